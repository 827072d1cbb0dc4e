// The controls, built from what Python says of each knob: its help, its choices, where its slider halts.
import * as settings from "./settings.js";
import { byId, made } from "./words.js";

const controls = []; // functions that show the settings as they are now
let stops = {};      // of the sliders; those of width and heads come with each plan
const MIB = 2 ** 20;

export const runNames = (form) => Object.values(form.groups).flat().map((one) => one.name);

export function build(form) {
  byId("where").append(cardField(form), othersField(form), budgetField(form), trainerField(form));
  byId("size").append(presetField(form), ...form.groups.size.map(field));
  byId("less").querySelector(".fields").append(...form.groups.less.map(field));
  byId("more").querySelector(".fields").append(...form.groups.more.map(field), torchField(form));
  byId("form").addEventListener("submit", (event) => event.preventDefault());
  byId("reset").addEventListener("click", () => settings.replaceRun({ others: "", budget: "", trainer: "", torch: "", eval_iters: "" }, runNames(form)));
  show();
}

export const show = () => { for (const control of controls) control(); };

export function learn(plan) { // what a plan says of the controls
  stops = { ...stops, ...plan.values };
  for (const name of ["dtype", "compile"]) {
    const auto = byId(`k-${name}`)?.querySelector('option[value="auto"]');
    if (auto) auto.textContent = `auto: ${plan.means[name]}`;
  }
  byId("k-budget").placeholder = `${Math.floor(plan.means.budget / MIB)}MiB`;
  byId("k-others").placeholder = String(Math.round(plan.means.others / MIB));
  show();
}

// ---- one knob

function field(one) {
  stops[one.name] = one.stops;
  if (one.kind === "switch") return switchField(one);
  if (one.kind === "choice") return choiceField(one);
  return numberField(one);
}

const SHORT = 40; // a help of so many letters stands beside the name, a longer one below

function labelled(one, control) { // the label, the control, and below them what is long
  control.id = `k-${one.name}`;
  const short = one.help.length <= SHORT;
  const label = made("label", { for: control.id }, made("code", {}, one.name), ...(short ? [" ", made("small", {}, one.help)] : []));
  if (short) return [label, control];
  control.setAttribute("aria-describedby", `h-${one.name}`);
  return [label, control, made("p", { class: "help", id: `h-${one.name}` }, one.help)];
}

function switchField(one) {
  const box = made("input", { type: "checkbox" });
  const parts = labelled(one, box);
  box.addEventListener("change", () => settings.change({ [one.name]: box.checked ? "True" : "False" }));
  controls.push(() => { box.checked = settings.value(one.name) === "True"; });
  return made("div", { class: "field" }, ...parts);
}

function choiceField(one) {
  const list = made("select", {}, ...one.choices.map((text) => made("option", { value: text }, text)));
  const parts = labelled(one, list);
  list.addEventListener("change", () => settings.change({ [one.name]: list.value }));
  controls.push(() => choose(list, settings.value(one.name)));
  return made("div", { class: "field" }, ...parts);
}

function choose(list, text) { // a value that no option has, such as 4*no_wide,8*products, becomes one
  if (![...list.options].some((option) => option.value === text)) list.append(made("option", { value: text }, text));
  list.value = text;
}

function numberField(one) {
  const typed = made("input", { type: "number", step: one.whole ? 1 : "any", inputmode: one.whole ? "numeric" : "decimal", min: 0 });
  const parts = labelled(one, typed);
  typed.addEventListener("input", () => { if (typed.value !== "") settings.change({ [one.name]: typed.value }); });
  typed.addEventListener("blur", show);
  controls.push(() => { if (document.activeElement !== typed) typed.value = settings.value(one.name); });
  if (one.kind === "slider") parts.push(slider(one.name, () => stops[one.name], () => Number(settings.value(one.name)),
    (found) => settings.change({ [one.name]: found })));
  return made("div", { class: "field" }, ...parts);
}

// A slider over stops that are not evenly spaced; a value between two of them stands at the nearer.
function slider(name, places, now, move) {
  const range = made("input", { type: "range", id: `s-${name}`, min: 0, step: 1, "aria-label": `${name}, slider` });
  range.addEventListener("input", () => move(places()[Number(range.value)]));
  controls.push(() => {
    const found = places();
    range.disabled = !found.length;
    range.max = Math.max(found.length - 1, 0);
    const nearest = found.reduce((best, each, at) =>
      Math.abs(each - now()) < Math.abs(found[best] - now()) ? at : best, 0);
    range.value = nearest;
    range.setAttribute("aria-valuetext", String(now()));
  });
  return range;
}

// ---- where it runs

function cardField(form) {
  const list = made("select", {});
  if (form.here) list.append(made("option", { value: "" }, `here: ${form.here}`));
  grouped(list, form.cards, (card) => made("option", { value: card.name }, `${card.name} · ${card.memory}`));
  const parts = labelled({ name: "gpu", help: "the card to plan for" }, list);
  list.addEventListener("change", () => settings.change({ gpu: list.value }));
  controls.push(() => choose(list, settings.value("gpu")));
  return made("div", { class: "field wide" }, ...parts);
}

function othersField(form) {
  const typed = made("input", { type: "number", min: 0, step: 1, inputmode: "numeric" });
  const parts = labelled({ name: "others", help: "MiB that other programs hold of it" }, typed);
  const now = () => mib(settings.value("others"));
  const tell = (found) => settings.change({ others: found === "" ? "" : `${found}MiB` });
  typed.addEventListener("input", () => tell(typed.value));
  controls.push(() => { if (document.activeElement !== typed) typed.value = settings.value("others") === "" ? "" : now(); });
  return made("div", { class: "field" }, ...parts, slider("others", () => form.others, now, tell));
}

function mib(text) { // what the address may hold: 2118MiB, 2GiB, plain bytes
  const found = /^\s*([\d.]+)\s*([a-z]*)\s*$/i.exec(text);
  if (!found) return 0;
  const unit = { "": 1 / MIB, k: 1 / 1024, m: 1, g: 1024, t: 1024 ** 2 }[found[2].toLowerCase().replace(/i?b$/, "")] ?? 1;
  return Math.round(Number(found[1]) * unit);
}

function budgetField(form) {
  const typed = made("input", { type: "text", spellcheck: "false", title: form.help.budget });
  const parts = labelled({ name: "budget", help: "if it may not have the rest" }, typed);
  typed.addEventListener("change", () => settings.change({ budget: typed.value.trim() }));
  controls.push(() => { if (document.activeElement !== typed) typed.value = settings.value("budget"); });
  return made("div", { class: "field" }, ...parts);
}

function trainerField(form) {
  const names = { fitgpt: "fitgpt", nanogpt: "nanoGPT" };
  const group = made("div", { class: "trainers", role: "radiogroup", "aria-label": "trainer: whose training" });
  for (const name of form.trainers) {
    const button = made("input", { type: "radio", name: "trainer", value: name, id: `trainer-${name}` });
    button.addEventListener("change", () => settings.change({ trainer: name }));
    controls.push(() => { button.checked = settings.value("trainer") === name; });
    group.append(made("label", {}, button, names[name] || name));
  }
  return group;
}

function torchField(form) {
  const list = made("select", {}, made("option", { value: "" }, "as installed here"),
    ...form.torch.map((version) => made("option", { value: version }, version)));
  const parts = labelled({ name: "torch", help: "its version" }, list);
  list.addEventListener("change", () => settings.change({ torch: list.value }));
  controls.push(() => choose(list, settings.value("torch")));
  return made("div", { class: "field" }, ...parts);
}

function presetField(form) {
  const list = made("select", {}, made("option", { value: "" }, "your own"));
  grouped(list, form.presets, (preset) => made("option", { value: form.presets.indexOf(preset) }, preset.name));
  const parts = labelled({ name: "preset", help: "a model to begin with" }, list);
  const names = runNames(form);
  list.addEventListener("change", () => {
    if (list.value !== "") settings.replaceRun({ ...form.presets[list.value].knobs, eval_iters: "" }, names);
  });
  const usual = Object.fromEntries(Object.values(form.groups).flat().map((one) => [one.name, one.default]));
  const same = (preset) => names.every((name) => settings.value(name) === (preset.knobs[name] ?? usual[name]));
  controls.push(() => { const found = form.presets.findIndex(same); list.value = found < 0 ? "" : String(found); });
  return made("div", { class: "field wide" }, ...parts);
}

function grouped(list, entries, option) {
  for (const name of new Set(entries.map((each) => each.group))) {
    list.append(made("optgroup", { label: name }, ...entries.filter((each) => each.group === name).map(option)));
  }
}
