// The plan: verdict and bars from one replay, then the step's timeline, the exact figures, and what listens for them.
import { debounce, get } from "./api.js";
import * as bars from "./bars.js";
import { byId, bytes, element } from "./dom.js";
import * as form from "./form.js";
import * as settings from "./settings.js";
import { t } from "./strings.js";

const BUSY_AFTER = 150; // ms: a shorter wait needs no busy state
let requesting = false, changedAgain = false, cleared = false;
let shown = null;      // the plan that is drawn
let compared = null;   // what a change is compared with: { label, peak, ends, settings, reasons }
let followUps = new AbortController();
const listeners = [];  // (query, signal), called after the exact figures

export const onExact = (listener) => listeners.push(listener);

// Requests a plan. Of several changes during a request only the last is requested next.
export async function refresh() {
  cleared = false;
  followUps.abort();
  changedAgain = true;
  if (requesting) return;
  requesting = true;
  try {
    while (changedAgain) {
      changedAgain = false;
      const answer = await showBusy(get("plan", settings.query()));
      if (cleared) return;
      if (!changedAgain) draw(answer);
      else if (!answer.problem) drawVerdictAndBars(answer); // a slider is moving
    }
  } finally {
    requesting = false;
  }
  followUp();
}

async function showBusy(answer) {
  const timer = setTimeout(() => byId("results").setAttribute("aria-busy", "true"), BUSY_AFTER);
  try {
    return await answer;
  } finally {
    clearTimeout(timer);
    byId("results").removeAttribute("aria-busy");
  }
}

// Applies settings, and shows their effect beside the plan before.
export function tryChange(label, changes, reasons = []) {
  const before = { ...settings.all() };
  const comparison = shown && { label, peak: shown.peak, ends: bars.ends(shown.bars), settings: before, reasons };
  settings.change(changes, { step: true }); // this clears an earlier comparison
  compared = comparison;
}

export function clearComparison() { compared = null; }

const followUp = debounce(90, async () => {
  followUps.abort();
  followUps = new AbortController();
  const { signal } = followUps, query = settings.query();
  if (shown === null) return;
  drawStep(await get("step", query, signal), signal);
  const exact = await get("exact", query, signal);
  if (signal.aborted || !exact) return;
  drawExact(exact);
  for (const listener of listeners) listener(query, signal);
});

// Shows no plan until the next change, or `restore`.
export function clear() {
  cleared = true;
  followUps.abort();
  byId("problem-fix").hidden = byId("difference").hidden = true;
  drawNothing("none", "");
}

export function restore() { if (cleared) refresh(); }

function draw(plan) {
  byId("problem-fix").hidden = true;
  if (plan.offline) return setInert(true);
  if (plan.problem) return drawProblem(plan.problem);
  shown = plan;
  drawVerdictAndBars(plan);
  drawDifference(plan);
  for (const [id, text] of [["command", plan.command], ["config", plan.config_file], ["plan-command", plan.plan_command]]) byId(id).textContent = text;
  form.update(plan);
}

function drawVerdictAndBars(plan) {
  setInert(false);
  drawVerdict(plan.verdict, "", plan.summary);
  byId("title").textContent = [plan.title, ...plan.notes].join(". ");
  bars.draw(plan.bars, compared?.ends);
}

const setInert = (inert) => { // everything below the verdict, while it shows an earlier run
  for (const part of byId("results").querySelectorAll(":scope > section:not(.verdict), :scope > details")) part.inert = inert;
};

function drawNothing(state, summary) {
  shown = null;
  setInert(true);
  byId("title").textContent = "";
  byId("length").replaceChildren();
  drawVerdict(state, "", summary);
}

function drawProblem(problem) {
  drawNothing("problem", problem.what);
  byId("problem-fix").hidden = !problem.fix;
  byId("problem-fix").replaceChildren(problem.fix, ...problem.settings.flatMap((changes) => {
    const list = Object.entries(changes).map(([name, value]) => `${name}=${value}`).join(", ");
    const button = element("button", { type: "button" }, t("set", { settings: list }));
    button.addEventListener("click", () => settings.change(changes, { step: true }));
    return [" ", button];
  }));
  announce(`${problem.what} ${problem.fix}`);
}

function drawVerdict(state, headroom, summary) {
  byId("verdict").dataset.state = state;
  byId("word").textContent = t(`verdict.${state}`);
  byId("headroom").textContent = headroom;
  const optionFirst = /^[a-z_0-9]+[=_]/.test(summary);  // an option's name keeps its lower case
  byId("summary").textContent = optionFirst ? summary : summary.charAt(0).toUpperCase() + summary.slice(1);
}

function drawDifference(plan) {
  byId("difference").hidden = compared === null;
  if (compared === null) return;
  const less = compared.peak - plan.peak;
  byId("difference-text").textContent = t(less === 0 ? "difference.same" : less > 0 ? "difference.less" : "difference.more", {
    label: compared.label, before: bytes(compared.peak), after: bytes(plan.peak), memory: bytes(Math.abs(less)) });
  byId("difference-reasons").replaceChildren(...compared.reasons.map((reason) => element("li", {}, reason)));
  const { settings: earlier } = compared;
  byId("undo").onclick = () => { settings.change(earlier, { step: true }); byId("results").focus(); };
}

// How long the run takes, and a length to choose where it has nanoGPT's default of 600,000 steps.
function drawLength({ hours, steps, tokens, per_parameter, default: by_default, suggested, suggested_per }) {
  const count = (number) => number.toLocaleString("en");
  const text = t(hours ? "length.hours" : "length", { hours, steps: count(steps), tokens, per_parameter });
  const set = element("button", { type: "button" }, t("length.set", { steps: count(suggested), per: suggested_per }));
  set.addEventListener("click", () => settings.change({ max_iters: suggested }, { step: true }));
  byId("length").replaceChildren(text, ...(by_default ? [" ", t("length.default"), " ", set] : []));
}

function drawExact(exact) {
  if (exact.problem || shown === null) return;
  const state = exact.verdict;
  const room = t(state === "does_not_fit" ? "headroom.does_not_fit" : "headroom.fits", { memory: bytes(Math.abs(exact.headroom)) });
  drawVerdict(state, room + (exact.speed && ` · ${t("speed", { speed: exact.speed })}`), exact.summary);
  drawLength(exact.length);
  announce(`${t(`verdict.${state}`)}: ${room}.`);
  byId("config").textContent = exact.config_file;
  bars.markNeeds(shown.bars, exact.needs);
  table("phases", [t("table.phase"), t("table.allocated"), t("table.reserved"), t("table.process")], exact.phases.map((each) =>
    [t(`phase.${each.phase}`) + (each.peak ? ` ← ${t("table.peak")}` : ""), bytes(each.allocated), bytes(each.reserved), bytes(each.process)]));
  table("owners", [t("table.owner"), t("table.bytes"), t("table.formula")], exact.owners.map((each) => [t(`part.${each.owner}`), bytes(each.nbytes), each.formula]), [1]);
  byId("facts").replaceChildren(...exact.facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
}

function drawStep(step, signal) {
  if (signal.aborted || !step || step.problem) return;
  const section = byId("step");
  if (section.contains(document.activeElement)) return; // do not redraw under the focus
  section.innerHTML = step.html; // rendered and escaped by charts.py
  charts.attach(section);
}

export function table(id, heads, rows, figures = [1, 2, 3]) {
  const cell = (name, text, at) => element(name, { class: figures.includes(at) && "figure", scope: name === "th" && "col" }, text);
  const caption = byId(id).querySelector("caption");
  byId(id).replaceChildren(...(caption ? [caption] : []),
    element("thead", {}, element("tr", {}, ...heads.map((text, at) => cell("th", text, at)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((text, at) => cell("td", text, at))))));
}

// For screen readers: once nothing has changed for a while, and not the same text twice.
const announce = debounce(300, (text) => { if (byId("status").textContent !== text) byId("status").textContent = text; });
