// The answer: at once from one replay (or, where that takes long, a draft and then the replay), then exact. The newest question wins; those in between are never asked.
import { ask, later } from "./ask.js";
import * as bars from "./bars.js";
import * as form from "./form.js";
import * as settings from "./settings.js";
import { byId, bytes, made } from "./words.js";

let asking = false, again = false;
let shown = null;      // the last plan that was drawn
let compared = null;   // what a change is compared with: { label, peak, ends, settings }
let withdrawn = new AbortController();
const followers = [];  // (query, signal): what comes after the plan

export const follow = (follower) => followers.push(follower);

export async function refresh() {
  withdrawn.abort();
  again = true;
  if (asking) return;
  asking = true;
  try {
    while (again) {
      again = false;
      const query = settings.query();
      const answer = await ask("plan", query);
      if (!again) draw(answer);
      else if (!answer.problem) look(answer); // a slider is on its way
    }
  } finally {
    asking = false;
  }
  followUp();
}

// Sets something, and shows what that did.
export function tryOut(label, changes, reasons = []) {
  const before = { ...settings.all() };
  const comparison = shown && { label, peak: shown.peak, ends: bars.ends(shown.bars), settings: before, reasons };
  settings.change(changes, { step: true }); // which forgets an earlier comparison
  compared = comparison;
}

export function forget() { compared = null; }

const followUp = later(90, async () => {
  withdrawn.abort();
  withdrawn = new AbortController();
  const { signal } = withdrawn, query = settings.query();
  if (shown === null) return;
  if (shown.fits === null) {
    const whole = await ask("whole", query, signal);
    if (signal.aborted || !whole) return;
    draw(whole);
  }
  drawStep(await ask("step", query, signal), signal);
  const exact = await ask("exact", query, signal);
  if (signal.aborted || !exact) return;
  drawExact(exact);
  for (const follower of followers) follower(query, signal); // each in a lane of its own
});

function draw(plan) {
  const wrong = plan.problem;
  byId("mend").hidden = true;
  if (wrong) return drawProblem(wrong);
  shown = plan;
  look(plan);
  drawDifference(plan);
  for (const [id, text] of [["command", plan.command], ["config", plan.config_file], ["plan-command", plan.plan_command]]) byId(id).textContent = text;
  form.learn(plan);
}

function look(plan) {
  rest(false);
  state(plan.fits === null ? "waiting" : plan.fits ? "fits" : "full", plan.verdict, "", plan.words);
  byId("title").textContent = [plan.title, ...plan.notes].join(". ");
  bars.draw(plan.bars, compared?.ends);
}

const rest = (inert) => { // what is below the verdict, while it is another run's
  for (const part of byId("results").querySelectorAll(":scope > section:not(.verdict), :scope > details")) part.inert = inert;
};

function drawProblem(wrong) {
  shown = null;
  rest(true);
  byId("title").textContent = "";
  state("problem", "This cannot be", "", wrong.what);
  const [words, button] = byId("mend").children;
  words.textContent = wrong.fix;
  byId("mend").hidden = !wrong.fix;
  button.hidden = !Object.keys(wrong.settings).length;
  button.textContent = `Set ${Object.entries(wrong.settings).map(([name, value]) => `${name}=${value}`).join(", ")}`;
  button.onclick = () => settings.change(wrong.settings, { step: true });
  say(`${wrong.what} ${wrong.fix}`);
}

function state(kind, word, short, words) {
  byId("verdict").dataset.state = kind;
  byId("word").textContent = word;
  byId("short").textContent = short;
  const knobFirst = /^[a-z_0-9]+[=_]/.test(words);  // a knob's name stays as it is typed
  byId("words").textContent = knobFirst ? words : words.charAt(0).toUpperCase() + words.slice(1);
}

function drawDifference(plan) {
  const place = byId("difference"), [words, button, reasons] = place.children;
  place.hidden = compared === null;
  if (compared === null) return;
  const less = compared.peak - plan.peak;
  words.textContent = `${compared.label}: ${bytes(compared.peak)} → ${bytes(plan.peak)} at the peak, `
    + (less === 0 ? "the same." : `${bytes(Math.abs(less))} ${less > 0 ? "less" : "more"}.`);
  reasons.replaceChildren(...compared.reasons.map((why) => made("li", {}, why)));
  const { settings: earlier } = compared;
  button.onclick = () => { settings.change(earlier, { step: true }); byId("results").focus(); };
}

function drawExact(exact) {
  if (exact.problem || shown === null) return;
  state(exact.fits ? "fits" : "full", exact.verdict, exact.short + (exact.speed && ` · ${exact.speed} tokens/s`), exact.words);
  say(`${exact.verdict}: ${exact.short}.`);
  byId("config").textContent = exact.config_file;
  if (shown.draft) fillIn(exact);
  bars.markNeeds(shown.bars, exact.needs);
  table("phases", ["", "allocated", "reserved", "process"], exact.phases.map((each) =>
    [each.name + (each.peak ? " ← peak" : ""), bytes(each.allocated), bytes(each.reserved), bytes(each.process)]));
  table("owners", ["", "bytes", "where they come from"], exact.owners.map((each) => [each.owner, bytes(each.nbytes), each.formula]), [1]);
  byId("facts").replaceChildren(...exact.facts.flatMap(([name, words]) => [made("dt", {}, name), made("dd", {}, words)]));
}

function fillIn(exact) { // a first answer that knew the tensors' sizes and no more
  for (const row of shown.bars.rows) {
    const { allocated, reserved } = exact.phases.find((each) => each.name === row.name) || row;
    Object.assign(row, { allocated, reserved });
    if (row.peak) row.owners = Object.fromEntries(exact.owners.map((each) => [each.owner, each.nbytes]));
  }
  shown.peak = Math.max(...shown.bars.rows.map((row) => row.allocated));
  bars.draw(shown.bars, compared?.ends);
  drawDifference(shown);
}

function drawStep(step, signal) {
  if (signal.aborted || !step || step.problem) return;
  const place = byId("step");
  if (place.contains(document.activeElement)) return; // somebody reads it with the keys
  place.innerHTML = step.html; // drawn and escaped by charts.py
  charts.attach(place);
}

export function table(id, heads, rows, figures = [1, 2, 3]) {
  const cell = (name, text, at) => made(name, { class: figures.includes(at) && "figure", scope: name === "th" && "col" }, text);
  const caption = byId(id).querySelector("caption");
  byId(id).replaceChildren(...(caption ? [caption] : []),
    made("thead", {}, made("tr", {}, ...heads.map((text, at) => cell("th", text, at)))),
    made("tbody", {}, ...rows.map((row) => made("tr", {}, ...row.map((text, at) => cell("td", text, at))))));
}

// To those who listen: once things have settled, and not what has been said already.
const say = later(300, (words) => { if (byId("said").textContent !== words) byId("said").textContent = words; });
