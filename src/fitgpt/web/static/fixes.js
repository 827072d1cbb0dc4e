// The fix buttons: one for each way to hold less, asked for one after another, in a fixed order.
import { ask } from "./ask.js";
import { tryOut } from "./plan.js";
import * as settings from "./settings.js";
import { byId, made } from "./words.js";

export function start() {
  byId("fit").addEventListener("click", fit);
}

async function fit() {
  const button = byId("fit"), note = byId("fit-note"), query = settings.query();
  button.disabled = true;
  note.textContent = "Looking among thousands of settings …";
  const found = await ask("fit", query);
  button.disabled = false;
  if (found.problem) {
    note.textContent = `${found.problem.what} ${found.problem.fix}`;
  } else if (query === settings.query()) { // nobody has changed anything meanwhile
    const changed = Object.keys(found.settings).length > 0;
    note.textContent = changed ? `The best of ${found.considered.toLocaleString("en")}.` : "It is the fastest that fits as it is.";
    if (changed) tryOut("fit it for me", found.settings, found.why);
  }
}

// Each stays where it is, faded, until its successor has come: nothing below jumps.
export async function price(query, signal) {
  const place = byId("fix-buttons");
  place.classList.add("stale");
  const list = await ask("fixes", query, signal);
  if (!list || list.problem) return;
  const shown = new Map([...place.children].map((one) => [one.dataset.family, one]));
  place.classList.remove("stale");
  for (const one of shown.values()) one.classList.add("stale");
  for (const family of list.families) {
    const answer = await ask("fix", `family=${encodeURIComponent(family)}&${query}`, signal);
    if (signal.aborted || !answer) return;
    if (answer.fix) shown.set(family, button(answer.fix));
    else shown.delete(family);
    show(place, list.families, shown);
  }
  show(place, list.families, shown);
  byId("no-fix").hidden = place.children.length > 0;
}

// One that is there already is not touched: taken out and put back while it is pressed, it would not be clicked.
function show(place, families, shown) {
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.family : null;
  const wanted = families.map((family) => shown.get(family)).filter(Boolean);
  for (const one of [...place.children]) if (!wanted.includes(one)) one.remove();
  wanted.forEach((one, at) => { if (place.children[at] !== one) place.insertBefore(one, place.children[at] ?? null); });
  const again = shown.get(focused);
  if (again && again !== document.activeElement) again.focus({ preventScroll: true });
}

function button(fix) {
  const one = made("button", { type: "button", class: `${fix.kind}${fix.fits ? " enough" : ""}`, title: `saves ${fix.saves}`, "data-family": fix.family },
    made("b", {}, fix.label), made("span", { class: "effect" }, fix.effect + (fix.fits ? ", fits" : "")),
    made("span", { class: "costs" }, `costs: ${fix.costs}`));
  one.addEventListener("click", () => { one.blur(); tryOut(fix.label, fix.settings); byId("results").focus({ preventScroll: true }); });
  return one;
}
