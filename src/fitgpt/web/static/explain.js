// A pasted message → what happened, why, where the memory was, what to do.
import { send } from "./ask.js";
import * as settings from "./settings.js";
import { open } from "./tabs.js";
import { tryOut } from "./plan.js";
import { byId, bytes, made } from "./words.js";

export function start() {
  byId("explain-form").addEventListener("submit", (event) => { event.preventDefault(); explain(); });
}

async function explain() {
  const place = byId("diagnosis");
  place.setAttribute("aria-busy", "true");
  place.replaceChildren(made("p", { class: "quiet" }, "Reading …"));
  const told = await send("explain", { text: byId("pasted").value, query: byId("with-plan").checked ? settings.query() : null });
  place.replaceChildren(...(told.problem ? [wrong(told.problem)] : parts(told)));
  place.removeAttribute("aria-busy");
}

const wrong = ({ what, fix }) => made("p", { class: "callout" }, `${what} ${fix}`);
const card = (title, ...inside) => made("section", { class: "card" }, made("h2", {}, title), ...inside);

function parts(told) {
  const found = [card(told.title, told.what ? made("p", {}, told.what) : null)];
  if (told.causes.length) found.push(card("Why", made("ul", {}, ...told.causes.map((cause) =>
    made("li", {}, made("code", {}, cause.code), ` ${cause.what}`)))));
  if (told.shares.length) found.push(card(`Where the memory was: ${told.shares_of}`, shares(told.shares)));
  if (told.remedies.length) found.push(card("What to do", made("ul", {}, ...told.remedies.map(remedy))));
  for (const note of told.notes) found.push(made("p", { class: "quiet" }, note));
  if (told.needed.length) found.push(card("More would be known with", made("ul", {}, ...told.needed.map((each) => made("li", {}, each)))));
  return found;
}

function shares(list) {
  return made("div", { class: "scroll" }, made("table", { class: "shares" }, ...list.map((share) => made("tr", {},
    made("td", { class: "figure" }, bytes(share.nbytes)), made("td", {}, share.what + (share.note ? `: ${share.note}` : ""))))));
}

function remedy(each) {
  const fits = each.fits === null ? "" : each.fits ? ": fits" : ": not enough alone";
  const item = made("li", {}, made("code", {}, each.todo),
    made("p", { class: "quiet" }, `${each.effect}${fits}${each.costs ? `. Costs: ${each.costs}` : ""}`));
  if (byId("with-plan").checked && Object.keys(each.settings).length) {
    const button = made("button", { type: "button" }, "Try it in the plan");
    button.addEventListener("click", () => { open("plan"); tryOut(each.todo, each.settings); });
    item.append(button);
  }
  return item;
}
