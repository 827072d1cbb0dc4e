// Tabs, by pointer and by arrow keys.
import { byId } from "./dom.js";

const listeners = [];
const tabs = () => [...document.querySelectorAll('[role="tab"]')].filter((tab) => !tab.hidden);

export const onOpen = (listener) => listeners.push(listener);

export function open(name) {
  for (const tab of document.querySelectorAll('[role="tab"]')) {
    const chosen = tab.getAttribute("aria-controls") === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !chosen;
  }
  for (const listener of listeners) listener(name);
}

export function start() {
  for (const tab of document.querySelectorAll('[role="tab"]')) {
    tab.addEventListener("click", () => open(tab.getAttribute("aria-controls")));
    tab.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -100, End: 100 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      const all = tabs(), at = all.indexOf(tab) + move;
      const to = all[Math.abs(move) === 1 ? (at + all.length) % all.length : move < 0 ? 0 : all.length - 1];
      open(to.getAttribute("aria-controls"));
      to.focus();
    });
  }
}
