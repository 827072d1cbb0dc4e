// The settings that are not at their default. The page's address carries them and what else the page shows, so that it can
// be shared: after the #, because a browser does not send that part to the server.
import { debounce } from "./api.js";

const OF_THE_PAGE = ["tab", "lang", "lossy", "about", "paste"]; // in the address, but no settings of a run
const changed = new Map();
const page = new Map();
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
export const ofPage = (name) => page.get(name) ?? "";
export const inAddress = () => new URLSearchParams([...new URLSearchParams(location.search), ...new URLSearchParams(location.hash.slice(1))]);

// `step` adds an entry to the browser's history, for Back and Undo; the moves of a slider do not.
export function change(settings, { step = false } = {}) {
  if (step) newEntry();
  for (const [name, text] of Object.entries(settings)) set(name, String(text));
  writeSoon();
  notify();
}

// Resets the settings of the run, then applies the new ones.
export function replaceRun(settings, runNames) {
  const cleared = Object.fromEntries(runNames.map((name) => [name, defaults[name]]));
  change({ ...cleared, ...settings }, { step: true });
}

// The same setting by another name, such as RTX 4070 for 4070.
export function rename(name, text) {
  set(name, text);
  writeSoon();
}

// What the page shows beside the settings. `step`: as above.
export function setPage(changes, { step = false } = {}) {
  if (Object.entries(changes).every(([name, text]) => ofPage(name) === text)) return;
  if (step) newEntry();
  for (const [name, text] of Object.entries(changes)) text === "" ? page.delete(name) : page.set(name, text);
  writeAddress();
}

function newEntry() {
  writeAddress();
  history.pushState(null, "", location.href);
}

function set(name, text) {
  if (text === defaults[name] || text === "") changed.delete(name);
  else changed.set(name, text);
}

function readAddress() {
  changed.clear();
  page.clear();
  const found = inAddress();
  for (const [name, text] of found) (OF_THE_PAGE.includes(name) ? page : changed).set(name, text);
  for (const [name, text] of Object.entries(initial)) if (!found.has(name)) set(name, text);
  writeAddress();
}

function writeAddress() {
  const text = new URLSearchParams([...[...changed].sort(), ...page]).toString();
  history.replaceState(null, "", text ? `${location.pathname}#${text}` : location.pathname);
}

const writeSoon = debounce(80, writeAddress); // browsers limit how often the address may change

function notify() {
  for (const listener of listeners) listener();
}
