// The form's controls, built from /api/form: each option's help, choices and slider stops.
import * as settings from "./settings.js";
import { byId, element } from "./dom.js";
import { t } from "./strings.js";

const controls = []; // functions that update a control from the settings
let stops = {};      // of the sliders; those of n_embd and n_head come with each plan
const MIB = 2 ** 20;
const GROUPS = ["amd", "workstation", "data_centre"]; // of GPUs; others are named after a model, such as RTX 40

export const controlsOf = (form) => Object.values(form.groups).flat();
const runNames = (form) => controlsOf(form).map((one) => one.name);

export function build(form) {
  byId("where").append(gpuField(form), othersField(form), budgetField(form), trainerField(form));
  byId("size").append(presetField(form), ...form.groups.size.map(field));
  byId("savers").querySelector(".fields").append(...form.groups.savers.map(field));
  byId("more").querySelector(".fields").append(...form.groups.more.map(field), torchField(form));
  byId("form").addEventListener("submit", (event) => event.preventDefault());
  byId("reset").addEventListener("click", () => settings.replaceRun({ others: "", budget: "", trainer: "", torch: "", eval_iters: "" }, runNames(form)));
  show();
}

export const show = () => { for (const control of controls) control(); };

export function update(plan) { // what `auto` means, and the sliders' stops
  stops = { ...stops, ...plan.slider_values };
  for (const name of ["dtype", "compile"]) {
    const auto = byId(`k-${name}`)?.querySelector('option[value="auto"]');
    if (auto) auto.textContent = `auto: ${plan.resolved[name]}`;
  }
  const { gpu } = plan.resolved;
  if (gpu && settings.value("gpu") && settings.value("gpu") !== gpu) settings.rename("gpu", gpu); // "4070"
  byId("k-budget").placeholder = `${Math.floor(plan.resolved.budget / MIB)}MiB`;
  byId("k-others").placeholder = String(Math.round(plan.resolved.others / MIB));
  show();
}

// ---- one option

function field(one) {
  stops[one.name] = one.stops;
  if (one.kind === "switch") return switchField(one);
  if (one.kind === "choice") return choiceField(one);
  return numberField(one);
}

// Label and control; a question mark shows the help, and a control that nanoGPT does not have is disabled for it.
function labelled(one, control) {
  control.id = `k-${one.name}`;
  const only = element("small", { class: "badge", hidden: true }, t("fitgpt_only"));
  const label = element("label", { for: control.id }, t(`option.${one.name}`), " ", element("code", {}, one.name), " ", only);
  if (one.fitgpt_only) controls.push(() => {
    only.hidden = settings.value("trainer") !== "nanogpt";
    for (const each of control.closest(".field").querySelectorAll("input, select")) each.disabled = !only.hidden;
  });
  return [element("div", { class: "label" }, label, ...help(one, control)), control];
}

function help(one, control) {
  if (!one.help) return [];
  const text = element("p", { class: "help", id: `h-${one.name}`, popover: "auto" }, one.help);
  const button = element("button", { type: "button", class: "ask", popovertarget: text.id, "aria-label": t("help", { name: one.name }) }, "?");
  control.setAttribute("aria-describedby", text.id);
  text.addEventListener("beforetoggle", () => {
    const box = button.getBoundingClientRect();
    Object.assign(text.style, { top: `${box.bottom + 6}px`, left: `${Math.max(8, Math.min(box.left - 40, innerWidth - 348))}px` });
  });
  return [button, text];
}

function switchField(one) {
  const box = element("input", { type: "checkbox" });
  const parts = labelled(one, box);
  box.addEventListener("change", () => settings.change({ [one.name]: box.checked ? "True" : "False" }));
  controls.push(() => { box.checked = settings.value(one.name) === "True"; });
  return element("div", { class: "field" }, ...parts);
}

function choiceField(one) {
  const list = element("select", {}, ...one.choices.map((text) => element("option", { value: text }, text)));
  const parts = labelled(one, list);
  list.addEventListener("change", () => settings.change({ [one.name]: list.value }));
  controls.push(() => choose(list, settings.value(one.name)));
  return element("div", { class: "field" }, ...parts);
}

function choose(list, text) { // a value not in the list, such as 4*no_mlp_up,8*matmuls, is added while it is chosen
  list.querySelector("[data-added]")?.remove();
  if (![...list.options].some((option) => option.value === text)) list.append(element("option", { value: text, "data-added": true }, text));
  list.value = text;
}

function numberField(one) {
  const typed = element("input", { type: "number", step: one.integer ? 1 : "any", inputmode: one.integer ? "numeric" : "decimal", min: 0 });
  const parts = labelled(one, typed);
  typed.addEventListener("input", () => { if (typed.value !== "") settings.change({ [one.name]: typed.value }); });
  typed.addEventListener("blur", show);
  controls.push(() => { if (document.activeElement !== typed) typed.value = settings.value(one.name); });
  if (one.kind === "slider") parts.push(slider(one.name, () => stops[one.name], () => Number(settings.value(one.name)),
    (found) => settings.change({ [one.name]: found })));
  return element("div", { class: "field" }, ...parts);
}

// A slider over unevenly spaced stops; a value between two stops is shown at the nearer one.
function slider(name, places, now, move) {
  const range = element("input", { type: "range", id: `s-${name}`, min: 0, step: 1, "aria-label": t("slider", { name: t(`option.${name}`) }) });
  range.addEventListener("input", () => move(places()[Number(range.value)]));
  controls.push(() => {
    const found = places();
    range.disabled = !found.length || byId(`k-${name}`).disabled;
    range.max = Math.max(found.length - 1, 0);
    const nearest = found.reduce((best, each, at) =>
      Math.abs(each - now()) < Math.abs(found[best] - now()) ? at : best, 0);
    range.value = nearest;
    range.setAttribute("aria-valuetext", String(now()));
  });
  return range;
}

// ---- the GPU

function gpuField(form) {
  const list = element("select", {});
  if (form.here) list.append(element("option", { value: "" }, t("this_machine", { gpu: form.here })));
  grouped(list, form.gpus, (gpu) => element("option", { value: gpu.name }, `${gpu.name} · ${gpu.memory}`));
  const parts = labelled({ name: "gpu", help: form.help.gpu }, list);
  list.addEventListener("change", () => settings.change({ gpu: list.value }));
  controls.push(() => choose(list, settings.value("gpu")));
  return element("div", { class: "field wide" }, ...parts);
}

function othersField(form) {
  const typed = element("input", { type: "number", min: 0, step: 1, inputmode: "numeric" });
  const parts = labelled({ name: "others", help: form.help.others }, typed);
  const now = () => mib(settings.value("others"));
  const set = (found) => settings.change({ others: found === "" ? "" : `${found}MiB` });
  typed.addEventListener("input", () => set(typed.value));
  controls.push(() => { if (document.activeElement !== typed) typed.value = settings.value("others") === "" ? "" : now(); });
  return element("div", { class: "field" }, ...parts, slider("others", () => form.others, now, set));
}

function mib(text) { // forms in the address: 2118MiB, 2118, 2GiB, plain bytes
  const found = /^\s*([\d.]+)\s*([a-z]*)\s*$/i.exec(text);
  if (!found) return 0;
  const unit = { "": Number(found[1]) < MIB ? 1 : 1 / MIB, k: 1 / 1024, m: 1, g: 1024, t: 1024 ** 2 }[found[2].toLowerCase().replace(/i?b$/, "")] ?? 1;
  return Math.round(Number(found[1]) * unit);
}

function budgetField(form) {
  const typed = element("input", { type: "text", spellcheck: "false" });
  const parts = labelled({ name: "budget", help: form.help.budget }, typed);
  typed.addEventListener("change", () => settings.change({ budget: typed.value.trim() }));
  controls.push(() => { if (document.activeElement !== typed) typed.value = settings.value("budget"); });
  return element("div", { class: "field" }, ...parts);
}

function trainerField(form) {
  const names = { fitgpt: "fitgpt", nanogpt: "nanoGPT" };
  const group = element("div", { class: "trainers", role: "radiogroup", "aria-labelledby": "trainer-label" });
  for (const name of form.trainers) {
    const button = element("input", { type: "radio", name: "trainer", value: name, id: `trainer-${name}` });
    button.addEventListener("change", () => settings.change({ trainer: name }));
    controls.push(() => { button.checked = settings.value("trainer") === name; });
    group.append(element("label", {}, button, names[name] || name));
  }
  return element("div", { class: "field wide" }, element("div", { class: "label", id: "trainer-label" },
    element("span", {}, t("option.trainer"), " ", element("code", {}, "trainer"))), group);
}

function torchField(form) {
  const list = element("select", {}, element("option", { value: "" }, t("as_installed")),
    ...form.torch.map((version) => element("option", { value: version }, version)));
  const parts = labelled({ name: "torch", help: form.help.torch }, list);
  list.addEventListener("change", () => settings.change({ torch: list.value }));
  controls.push(() => choose(list, settings.value("torch")));
  return element("div", { class: "field" }, ...parts);
}

function presetField(form) {
  const list = element("select", {}, element("option", { value: "" }, t("custom")));
  grouped(list, form.presets, (preset) => element("option", { value: form.presets.indexOf(preset) }, preset.name));
  const parts = labelled({ name: "preset" }, list);
  const names = runNames(form);
  list.addEventListener("change", () => {
    if (list.value !== "") settings.replaceRun({ eval_iters: "", ...form.presets[list.value].settings }, names);
  });
  const defaults = Object.fromEntries(controlsOf(form).map((one) => [one.name, one.default]));
  const meant = (name, text) => name === "vocab_size" && text === "0" ? form.default_vocab : text;
  const same = (preset) => names.every((name) => meant(name, settings.value(name)) === meant(name, preset.settings[name] ?? defaults[name]));
  controls.push(() => { const found = form.presets.findIndex(same); list.value = found < 0 ? "" : String(found); });
  return element("div", { class: "field wide" }, ...parts);
}

function grouped(list, entries, option) {
  for (const name of new Set(entries.map((each) => each.group))) {
    list.append(element("optgroup", { label: GROUPS.includes(name) ? t(`group.${name}`) : name }, ...entries.filter((each) => each.group === name).map(option)));
  }
}
