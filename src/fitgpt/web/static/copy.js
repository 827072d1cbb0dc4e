// The buttons that copy the command, the config file or the address, and the one that saves the config file.
import { byId, element } from "./dom.js";
import { t } from "./strings.js";

export function start() {
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copied(button));
  byId("download").addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([byId("config").textContent], { type: "text/x-python" }));
    element("a", { href: url, download: "config.py" }).click();
    URL.revokeObjectURL(url);
  });
}

async function copied(button) {
  const name = button.dataset.copy, label = button.textContent;
  const done = await copy(name === "address" ? location.href : byId(name).textContent, byId(name));
  button.textContent = t(done ? "copied" : "copy.by_hand");
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
