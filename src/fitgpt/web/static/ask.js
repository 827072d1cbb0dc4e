// Questions to the server. An answer is an object; one that could not be had says so itself, as a problem.
import { byId } from "./words.js";

export async function ask(name, query = "", signal = undefined) {
  return answered(fetch(`/api/${name}${query ? `?${query}` : ""}`, { signal, cache: "no-store" }));
}

export async function send(name, body) {
  return answered(fetch(`/api/${name}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }));
}

async function answered(asking) {
  try {
    const answer = await (await asking).json();
    byId("offline").hidden = true;
    return answer.bug ? problem(answer.bug, "Please report it, with the address of this page.") : answer;
  } catch (error) {
    if (error.name === "AbortError") return null; // withdrawn: nobody waits for it
    byId("offline").hidden = false;
    return problem("The server does not answer any more.", "fitgpt serve");
  }
}

const problem = (what, fix) => ({ problem: { what, fix, settings: {} } });

// The last of several calls in a row, after a pause.
export function later(pause, act) {
  let waiting;
  return (...told) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => act(...told), pause);
  };
}
