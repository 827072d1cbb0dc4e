// Requests to the server. A failed request returns { problem }, an aborted one null.
import { byId } from "./dom.js";
import { t } from "./strings.js";

export async function get(name, query = "", signal = undefined) {
  return json(fetch(`/api/${name}${query ? `?${query}` : ""}`, { signal, cache: "no-store" }));
}

export async function post(name, body) {
  return json(fetch(`/api/${name}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }));
}

async function json(response) {
  try {
    const answer = await (await response).json();
    byId("offline").hidden = true;
    return answer.bug ? { problem: { what: answer.bug, fix: t("bug"), settings: [] } } : answer;
  } catch (error) {
    if (error.name === "AbortError") return null;
    byId("offline").hidden = false;
    return { offline: true, problem: { what: t("offline"), fix: "", settings: [] } };
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
