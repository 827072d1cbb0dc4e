// The fix buttons: one per kind of change, requested one after another, in a fixed order.
import { get } from "./api.js";
import { byId, bytes, element } from "./dom.js";
import { tryChange } from "./plan.js";
import { t } from "./strings.js";

// An old button stays, faded, until the new one arrives, so that nothing below it moves.
export async function showAll(query, signal) {
  const box = byId("fix-buttons");
  box.classList.add("stale");
  const list = await get("fixes", query, signal);
  if (!list || list.problem) return;
  const shown = new Map([...box.children].map((one) => [one.dataset.family, one]));
  box.classList.remove("stale");
  for (const one of shown.values()) one.classList.add("stale");
  for (const family of list.families) {
    const answer = await get("fix", `family=${encodeURIComponent(family)}&${query}`, signal);
    if (signal.aborted || !answer) return;
    if (answer.fix) shown.set(family, button(answer.fix));
    else shown.delete(family);
    show(box, list.families, shown);
  }
  show(box, list.families, shown);
  byId("no-fix").hidden = box.children.length > 0;
}

// Buttons that are already in place are not moved: a button that is re-inserted while pressed gets no click.
function show(box, families, shown) {
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.family : null;
  const wanted = families.map((family) => shown.get(family)).filter(Boolean);
  for (const one of [...box.children]) if (!wanted.includes(one)) one.remove();
  wanted.forEach((one, at) => { if (box.children[at] !== one) box.insertBefore(one, box.children[at] ?? null); });
  const again = shown.get(focused);
  if (again && again !== document.activeElement) again.focus({ preventScroll: true });
}

function button(fix) {
  const effect = [t(fix.saved >= 0 ? "fix.less" : "fix.more", { memory: bytes(Math.abs(fix.saved)) }), fix.helps ? t("fix.fits") : ""];
  const badge = fix.kind === "exact" ? [] : [" ", element("small", { class: "badge" }, t(`kind.${fix.kind}`))];
  const one = element("button", { type: "button", class: fix.helps && "enough", title: fix.saves, "data-family": fix.family },
    element("b", {}, fix.label, ...badge), element("span", { class: "effect" }, effect.filter(Boolean).join(", ")),
    element("span", { class: "costs" }, t("costs", { what: fix.costs })));
  one.addEventListener("click", () => { one.blur(); tryChange(fix.label, fix.settings); byId("results").focus({ preventScroll: true }); });
  return one;
}
