// The paste box: a config file or a command line fills the form; nvidia-smi's output or a message is explained, and
// offers its GPU and programs to the form.
import { post } from "./api.js";
import { byId, bytes, element } from "./dom.js";
import { tryChange } from "./plan.js";
import * as settings from "./settings.js";
import { t } from "./strings.js";
import { open } from "./tabs.js";

let runNames = [];

export function start(names) {
  runNames = names;
  byId("paste-form").addEventListener("submit", (event) => { event.preventDefault(); read(); });
  byId("pasted").addEventListener("paste", () => setTimeout(read));
  byId("with-plan").addEventListener("change", () => { if (byId("pasted").value.trim()) read(); });
}

async function read() {
  const note = byId("paste-note"), text = byId("pasted").value;
  note.textContent = t("paste.reading");
  const found = await post("paste", { text, query: byId("with-plan").checked ? settings.query() : null });
  note.textContent = "";
  if (found.problem) note.textContent = `${found.problem.what} ${found.problem.fix}`;
  else if (found.kind === "config" || found.kind === "command") fill(found, note);
  else explain(found);
}

function fill(found, note) {
  if (found.replaces) settings.replaceRun({ eval_iters: "", ...found.settings }, runNames);
  else settings.change(found.settings, { step: true });
  open("plan");
  const list = Object.entries(found.settings).map(([name, value]) => `${name}=${value}`).join(", ");
  note.textContent = [t(`paste.read.${found.kind}`, { settings: list || "–" }),
    found.unread?.length ? t("paste.unread", { files: found.unread.join(", ") }) : "",
    found.ignored.length ? t("paste.ignored", { names: found.ignored.join(", ") }) : "",
    found.unknown.length ? t("paste.unknown", { names: found.unknown.join(", ") }) : ""].filter(Boolean).join(" ");
}

// ---- diagnoses

function explain({ kind, offers, diagnosis }) {
  open("explain");
  byId("explain-empty").hidden = true;
  byId("diagnosis").replaceChildren(...(kind === "other" && diagnosis.subject === "unknown" ? [card(t("paste.nothing"))] : [
    ...offers.filter((each) => Object.keys(each.settings).length).map(offer),
    diagnosis.run ? element("p", { class: "quiet" }, t("explain.run", { run: diagnosis.run })) : null,
    Object.keys(diagnosis.inferred).length ? inferred(diagnosis.inferred) : null, ...parts(diagnosis)].filter(Boolean)));
}

const card = (title, ...inside) => element("section", { class: "card" }, element("h2", {}, title), ...inside);
const list = (items) => element("ul", {}, ...items);

function button(label, act) {
  const one = element("button", { type: "button" }, label);
  one.addEventListener("click", act);
  return one;
}

function offer(each) {
  const what = t(each.gpu ? "offer.gpu" : "offer.programs", { gpu: each.gpu, others: each.others || "0 B" });
  return element("p", { class: "callout" }, what, each.own.length ? ` ${t("offer.own", { names: each.own.join(", ") })}` : "", " ",
    button(t(each.gpu ? "offer.plan" : "offer.plan_programs"), () => { open("plan"); tryChange(what, each.settings); }));
}

function inferred(changes) {
  const text = Object.entries(changes).map(([name, value]) => `${name}=${value}`).join(", ");
  return element("p", { class: "callout" }, t("explain.inferred", { settings: text }), " ",
    button(t("set", { settings: text }), () => { open("plan"); tryChange(text, changes); }));
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
    item.append(button(t("remedy.try"), () => { open("plan"); tryChange(each.todo, each.settings); }));
  }
  return item;
}
