// Questions of the page. A failed one returns { problem }, an aborted one null.
import { SERVED, ask } from "./ask.js";
import { byId } from "./dom.js";
import { t } from "./strings.js";

export const get = (name, query = "", signal = undefined) => answered(ask(name, { query, signal }));
export const paste = (text, query) => answered(ask("paste", { text, query }));

async function answered(asked) {
  try {
    const answer = await asked;
    byId("offline").hidden = true;
    return answer.bug ? { problem: { what: answer.bug, fix: t("bug"), settings: [] } } : answer;
  } catch (error) {
    if (error.name === "AbortError") return null;
    byId("offline").hidden = false;
    return { offline: true, problem: { what: t(SERVED ? "offline" : "site.failed"), fix: "", settings: [] } };
  }
}

// Calls `act` once after the last of several calls in a row.
export function debounce(milliseconds, act) {
  let timer;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...values), milliseconds);
  };
}
