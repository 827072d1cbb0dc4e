// The explain tab: a pasted message → what happened, why, where the memory was, what to do.
import { post } from "./api.js";
import * as settings from "./settings.js";
import { open } from "./tabs.js";
import { tryChange } from "./plan.js";
import { byId, bytes, element } from "./dom.js";

export function start() {
  byId("explain-form").addEventListener("submit", (event) => { event.preventDefault(); explain(); });
}

async function explain() {
  const output = byId("diagnosis");
  output.setAttribute("aria-busy", "true");
  output.replaceChildren(element("p", { class: "quiet" }, "Reading …"));
  const diagnosis = await post("explain", { text: byId("pasted").value, query: byId("with-plan").checked ? settings.query() : null });
  output.replaceChildren(...(diagnosis.problem ? [wrong(diagnosis.problem)] : parts(diagnosis)));
  output.removeAttribute("aria-busy");
}

const wrong = ({ what, fix }) => element("p", { class: "callout" }, `${what} ${fix}`);
const card = (title, ...inside) => element("section", { class: "card" }, element("h2", {}, title), ...inside);

function parts(diagnosis) {
  const found = [card(diagnosis.title, diagnosis.what ? element("p", {}, diagnosis.what) : null)];
  if (diagnosis.causes.length) found.push(card("Why", element("ul", {}, ...diagnosis.causes.map((cause) =>
    element("li", {}, element("code", {}, cause.code), ` ${cause.what}`)))));
  if (diagnosis.shares.length) found.push(card(`Where the memory was: ${diagnosis.shares_of}`, shares(diagnosis.shares)));
  if (diagnosis.remedies.length) found.push(card("What to do", element("ul", {}, ...diagnosis.remedies.map(remedy))));
  for (const note of diagnosis.notes) found.push(element("p", { class: "quiet" }, note));
  if (diagnosis.needed.length) found.push(card("To find out more, add", element("ul", {}, ...diagnosis.needed.map((each) => element("li", {}, each)))));
  return found;
}

function shares(list) {
  return element("div", { class: "scroll" }, element("table", { class: "shares" }, ...list.map((share) => element("tr", {},
    element("td", { class: "figure" }, bytes(share.nbytes)), element("td", {}, share.what + (share.note ? `: ${share.note}` : ""))))));
}

function remedy(each) {
  const fits = each.fits === null ? "" : each.fits ? ": fits" : ": not enough alone";
  const item = element("li", {}, element("code", {}, each.todo),
    element("p", { class: "quiet" }, `${each.effect}${fits}${each.costs ? `. Costs: ${each.costs}` : ""}`));
  if (byId("with-plan").checked && Object.keys(each.settings).length) {
    const button = element("button", { type: "button" }, "Try it in the plan");
    button.addEventListener("click", () => { open("plan"); tryChange(each.todo, each.settings); });
    item.append(button);
  }
  return item;
}
