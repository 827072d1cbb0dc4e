// The copy buttons: command, config file, address.
import { byId } from "./dom.js";

export function start() {
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copied(button));
}

async function copied(button) {
  const name = button.dataset.copy, label = button.textContent;
  const done = await copy(name === "address" ? location.href : byId(name).textContent, byId(name));
  button.textContent = done ? "Copied" : "Select it, then Ctrl-C";
  setTimeout(() => { button.textContent = label; }, 1800);
}

async function copy(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // no permission, or not a secure context (another machine)
    if (element) getSelection().selectAllChildren(element);
    return false;
  }
}
