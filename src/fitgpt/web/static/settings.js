// The settings that are not at their default. The page's address carries them, so that a plan can be shared.
import { debounce } from "./api.js";

const changed = new Map();
const listeners = [];
let defaults = {}; // of every setting
let initial = {};  // settings of a page whose address has none

export function start(allDefaults, first) {
  defaults = allDefaults;
  initial = first;
  readAddress();
  addEventListener("popstate", () => { readAddress(); notify(); });
}

export const value = (name) => changed.get(name) ?? defaults[name] ?? "";
export const all = () => Object.fromEntries(Object.keys(defaults).map((name) => [name, value(name)]));
export const query = () => new URLSearchParams([...changed].sort()).toString();
export const onChange = (listener) => listeners.push(listener);

// `step` adds an entry to the browser's history, for Back and Undo; the moves of a slider do not.
export function change(settings, { step = false } = {}) {
  if (step) {
    writeAddress();
    history.pushState(null, "", location.href);
  }
  for (const [name, text] of Object.entries(settings)) set(name, String(text));
  writeSoon();
  notify();
}

// Resets the settings of the run, then applies the new ones.
export function replaceRun(settings, runNames) {
  const cleared = Object.fromEntries(runNames.map((name) => [name, defaults[name]]));
  change({ ...cleared, ...settings }, { step: true });
}

function set(name, text) {
  if (text === defaults[name] || text === "") changed.delete(name);
  else changed.set(name, text);
}

function readAddress() {
  changed.clear();
  const found = new URLSearchParams(location.search);
  for (const [name, text] of found) if (name !== "tab") changed.set(name, text);
  for (const [name, text] of Object.entries(initial)) if (!found.has(name)) set(name, text);
  writeAddress();
}

function writeAddress() {
  const text = query();
  history.replaceState(null, "", text ? `?${text}` : location.pathname);
}

const writeSoon = debounce(80, writeAddress); // browsers limit how often the address may change

function notify() {
  for (const listener of listeners) listener();
}
