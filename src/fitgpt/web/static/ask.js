// The transport: `fitgpt serve` answers over HTTP. The static site has another ask.js, where Python answers in the browser.
export const SERVED = true;

// The answer to a question of web/api.py. `text`: of a paste, whose query is null without a plan.
export async function ask(name, { query = "", text, signal }) {
  const response = text === undefined
    ? fetch(`api/${name}${query ? `?${query}` : ""}`, { signal, cache: "no-store" })
    : fetch(`api/${name}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ text, query }) });
  return (await response).json();
}
