// The settings: what is not at its default, in the page's address, so that a plan can be shared.
import { later } from "./ask.js";

const said = new Map();
const listeners = [];
let usual = {};      // the default of every setting
let beginning = {};  // what a page without settings begins with

export function start(defaults, first) {
  usual = defaults;
  beginning = first;
  readAddress();
  addEventListener("popstate", () => { readAddress(); tell(); });
}

export const value = (name) => said.get(name) ?? usual[name] ?? "";
export const all = () => Object.fromEntries(Object.keys(usual).map((name) => [name, value(name)]));
export const query = () => new URLSearchParams([...said].sort()).toString();
export const onChange = (listener) => listeners.push(listener);

// A step that can be gone back on (Back, Undo) is kept in the history; a slider's every move is not.
export function change(settings, { step = false } = {}) {
  if (step) {
    writeAddress();
    history.pushState(null, "", location.href);
  }
  for (const [name, text] of Object.entries(settings)) keep(name, String(text));
  writeSoon();
  tell();
}

export function replaceRun(knobs, runNames) {
  const cleared = Object.fromEntries(runNames.map((name) => [name, usual[name]]));
  change({ ...cleared, ...knobs }, { step: true });
}

function keep(name, text) {
  if (text === usual[name] || text === "") said.delete(name);
  else said.set(name, text);
}

function readAddress() {
  said.clear();
  const found = new URLSearchParams(location.search);
  for (const [name, text] of found) if (name !== "tab") said.set(name, text);
  for (const [name, text] of Object.entries(beginning)) if (!found.has(name)) keep(name, text);
  writeAddress();
}

function writeAddress() {
  const text = query();
  history.replaceState(null, "", text ? `?${text}` : location.pathname);
}

const writeSoon = later(80, writeAddress); // a slider moves faster than browsers let an address change

function tell() {
  for (const listener of listeners) listener();
}
