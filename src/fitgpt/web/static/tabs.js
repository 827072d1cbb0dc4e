// Tabs, by pointer and by arrow keys. The address has the open one.
import { byId } from "./dom.js";
import * as settings from "./settings.js";

const listeners = [];
const tabs = () => [...document.querySelectorAll('[role="tab"]')];
const panel = (tab) => tab.getAttribute("aria-controls");

export const onOpen = (listener) => listeners.push(listener);

export function open(name, { step = true } = {}) {
  settings.setPage({ tab: name === "plan" ? "" : name }, { step });
  show();
}

// Shows the tab of the address.
export function show() {
  const name = tabs().some((tab) => panel(tab) === settings.ofPage("tab")) ? settings.ofPage("tab") : "plan";
  if (!byId(name).hidden) return;
  for (const tab of tabs()) {
    const chosen = panel(tab) === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    byId(panel(tab)).hidden = !chosen;
  }
  byId("paste").hidden = name === "live";
  for (const listener of listeners) listener(name);
}

export function start() {
  for (const tab of tabs()) {
    tab.addEventListener("click", () => open(panel(tab)));
    tab.addEventListener("keydown", (event) => {
      const forward = document.documentElement.dir === "rtl" ? -1 : 1;
      const move = { ArrowLeft: -forward, ArrowRight: forward, Home: -100, End: 100 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      const all = tabs().filter((each) => !each.hidden), at = all.indexOf(tab) + move;
      const to = all[Math.abs(move) === 1 ? (at + all.length) % all.length : move < 0 ? 0 : all.length - 1];
      open(panel(to));
      to.focus();
    });
  }
  show();
}
