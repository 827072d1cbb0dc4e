// Every card side by side: what this run would hold there, against what the card has.
import { ask } from "./ask.js";
import * as settings from "./settings.js";
import { byId, bytes, drawn, made } from "./words.js";

export async function cards(query, signal) {
  const answer = await ask("cards", query, signal);
  if (signal.aborted || !answer || answer.problem) return;
  const fitting = answer.cards.filter((card) => card.fits).length;
  byId("cards-note").textContent = `It fits on ${fitting} of ${answer.cards.length}, with as much of other programs. `
    + "A bar is a card, as far as this run would fill it. Choose one to plan for it.";
  if (byId("cards").contains(document.activeElement)) return mark();
  byId("cards").replaceChildren(...answer.cards.map(button));
  mark();
}

export function mark() { // the one that is planned for
  for (const each of byId("cards").children) each.setAttribute("aria-current", String(each.dataset.card === settings.value("gpu")));
}

function button(card) {
  const held = card.others + card.outside + card.peak;
  const verdict = card.problem || (card.fits ? "fits" : "does not fit");
  const kind = card.problem ? "odd" : card.fits ? "yes" : "no";
  const share = (nbytes) => `${Math.min(100 * nbytes / card.usable, 100).toFixed(2)}%`;
  const picture = drawn("svg", { "aria-hidden": "true" },
    drawn("rect", { class: "room", width: "100%", height: "100%", rx: 2.5 }),
    drawn("rect", { class: kind, width: card.problem ? 0 : share(held), height: "100%", rx: 2.5 }),
    drawn("rect", { class: "o-others", width: share(card.others), height: "100%", rx: 2.5 }));
  const one = made("button", { type: "button", "data-card": card.name, title: card.problem ? "" : `${bytes(held)} of ${bytes(card.usable)}` },
    made("span", {}, card.name), made("span", { class: kind }, card.fits && card.speed ? `✓ ${card.speed} tok/s` : verdict), picture);
  one.addEventListener("click", () => settings.change({ gpu: card.name }, { step: true }));
  return one;
}
