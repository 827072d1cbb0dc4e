// The paste box: a config file or a command line fills the form; nvidia-smi's output or a message is explained, and
// offers its GPU and programs to the form.
import * as api from "./api.js";
import { byId, bytes, element } from "./dom.js";
import * as plan from "./plan.js";
import * as settings from "./settings.js";
import { t } from "./strings.js";
import { onOpen, open } from "./tabs.js";

const LONGEST_IN_ADDRESS = 4000; // characters: longer links are cut off in many places
let runNames = [];
let explained = ""; // the text whose diagnosis is shown

export function start(names) {
  runNames = names;
  byId("paste-form").addEventListener("submit", (event) => { event.preventDefault(); read(); });
  byId("pasted").addEventListener("paste", () => setTimeout(read));
  byId("pasted").addEventListener("input", () => { if (!byId("pasted").value) plan.restore(); });
  byId("with-plan").addEventListener("change", () => {
    settings.setPage({ about: byId("with-plan").checked ? "plan" : "" });
    if (byId("pasted").value.trim()) read();
  });
  onOpen(inAddress);
  show();
}

// A link to the diagnosis has the text, one to the plan has not: a traceback contains paths and names.
function inAddress(tab) {
  if (tab !== "explain") settings.setPage({ paste: "" });
  else if (explained) settings.setPage({ paste: explained.length <= LONGEST_IN_ADDRESS ? explained : "" });
}

// Explains the text of the address.
export function show() {
  const text = settings.ofPage("paste");
  byId("with-plan").checked = settings.ofPage("about") === "plan";
  if (text === "" || text === explained) return;
  byId("pasted").value = text;
  read({ opens: false });
}

async function read({ opens = true } = {}) {
  const note = byId("paste-note"), text = byId("pasted").value;
  if (!text.trim()) return byId("pasted").focus();
  note.textContent = t("paste.reading");
  byId("diagnosis").inert = true; // it is of an earlier text
  const found = await api.paste(text, byId("with-plan").checked ? settings.query() : null);
  note.textContent = "";
  byId("diagnosis").inert = false;
  if (found.problem) clear(`${found.problem.what} ${found.problem.fix}`);
  else if (found.kind === "config" || found.kind === "command") fill(found, note);
  else if (found.kind === "script") clear(t("paste.script"), " ", element("code", {}, found.command || traceCommand()));
  else if (found.kind === "other" && found.diagnosis.subject === "unknown") clear(t("paste.nothing"));
  else {
    explained = text;
    explain(found);
    plan.restore();
    if (opens) open("explain");
    inAddress(settings.ofPage("tab"));
  }
}

// What is below is the answer to an earlier text, or to the form: it must not be read as the answer to this one.
function clear(...why) {
  byId("paste-note").append(...why);
  explained = "";
  byId("diagnosis").replaceChildren();
  byId("explain-empty").hidden = false;
  settings.setPage({ paste: "" });
  plan.clear();
}

function traceCommand() {
  const gpu = settings.value("gpu").replace(/[^\w .-]/g, ""); // of an address, which may be anybody's; empty: this machine's
  return `fitgpt trace ${gpu && `--gpu "${gpu}" `}train.py`;
}

function fill(found, note) {
  if (found.replaces) settings.replaceRun({ eval_iters: "", ...found.settings }, runNames);
  else settings.change(found.settings, { step: true });
  open("plan", { step: false });
  const list = Object.entries(found.settings).map(([name, value]) => `${name}=${value}`).join(", ");
  note.textContent = [t(`paste.read.${found.kind}`, { settings: list || "–" }),
    found.unread?.length ? t("paste.unread", { files: found.unread.join(", ") }) : "",
    found.ignored.length ? t("paste.ignored", { names: found.ignored.join(", ") }) : "",
    found.unknown.length ? t("paste.unknown", { names: found.unknown.join(", ") }) : ""].filter(Boolean).join(" ");
}

// ---- diagnoses

function explain({ offers, diagnosis }) {
  byId("explain-empty").hidden = true;
  byId("diagnosis").replaceChildren(...[
    ...offers.filter((each) => Object.keys(each.settings).length).map(offer),
    diagnosis.run ? element("p", { class: "quiet" }, t("explain.run", { run: diagnosis.run })) : null,
    Object.keys(diagnosis.inferred).length ? inferred(diagnosis.inferred) : null, ...parts(diagnosis)].filter(Boolean));
}

const card = (title, ...inside) => element("section", { class: "card" }, element("h2", {}, title), ...inside);
const list = (items) => element("ul", {}, ...items);

function button(label, act) {
  const one = element("button", { type: "button" }, label);
  one.addEventListener("click", act);
  return one;
}

function tryInPlan(label, changes) { // one step back returns here
  plan.tryChange(label, changes);
  open("plan", { step: false });
}

function offer(each) {
  const what = t(each.gpu ? "offer.gpu" : "offer.programs", { gpu: each.gpu, others: each.others || "0 B" });
  const label = t(each.gpu ? "offer.plan" : "offer.plan_programs");
  return element("p", { class: "callout" }, what, each.own.length ? ` ${t("offer.own", { names: each.own.join(", ") })}` : "", " ",
    button(label, () => tryInPlan(label, each.settings)));
}

function inferred(changes) {
  const text = Object.entries(changes).map(([name, value]) => `${name}=${value}`).join(", ");
  return element("p", { class: "callout" }, t("explain.inferred", { settings: text }), " ",
    button(t("set", { settings: text }), () => tryInPlan(text, changes)));
}

function parts(diagnosis) {
  const found = [card(diagnosis.title, diagnosis.what ? element("p", {}, diagnosis.what) : null)];
  if (diagnosis.causes.length) found.push(card(t("explain.why"), list(diagnosis.causes.map((cause) =>
    element("li", {}, element("code", {}, cause.code), ` ${cause.what}`)))));
  if (diagnosis.shares.length) found.push(card(t("explain.where", { what: diagnosis.shares_of }), shares(diagnosis.shares)));
  if (diagnosis.remedies.length) found.push(card(t("explain.todo"), list(diagnosis.remedies.map(remedy))));
  for (const note of diagnosis.notes) found.push(element("p", { class: "quiet" }, note));
  if (diagnosis.needed.length || diagnosis.wants_plan) {
    const more = diagnosis.needed.map((each) => element("li", {}, each));
    if (diagnosis.wants_plan) more.unshift(element("li", {}, t("explain.with_plan"), " ",
      button(t("explain.as_plan"), () => byId("with-plan").click())));
    found.push(card(t("explain.more"), list(more)));
  }
  return found;
}

function shares(all) {
  return element("div", { class: "scroll" }, element("table", { class: "shares" }, ...all.map((share) => element("tr", {},
    element("td", { class: "figure" }, bytes(share.nbytes)), element("td", {}, share.what + (share.note ? `: ${share.note}` : ""))))));
}

function remedy(each) {
  const fits = each.fits === null ? "" : `: ${t(each.fits ? "remedy.fits" : "remedy.not_enough")}`;
  const item = element("li", {}, element("code", {}, each.todo),
    element("p", { class: "quiet" }, `${each.effect}${fits}${each.costs ? `. ${t("costs", { what: each.costs })}` : ""}`));
  if (byId("with-plan").checked && Object.keys(each.settings).length) {
    item.append(button(t("remedy.try"), () => tryInPlan(each.todo, each.settings)));
  }
  return item;
}
