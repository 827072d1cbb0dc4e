// The verdict on every GPU: what the run takes there, against what the GPU has.
import { get } from "./api.js";
import * as settings from "./settings.js";
import { byId, bytes, element, svgElement } from "./dom.js";
import { t } from "./strings.js";

// The verdicts of an earlier run stay, faded, until the new ones arrive.
export const fade = () => byId("gpus").classList.add("stale");

export async function showAll(query, signal) {
  const answer = await get("gpus", query, signal);
  if (signal.aborted || !answer || answer.problem) return;
  byId("gpus").classList.remove("stale");
  const fitting = answer.gpus.filter((gpu) => gpu.verdict === "fits").length;
  byId("gpus-note").textContent = t("gpus.note", { fitting, count: answer.gpus.length });
  if (byId("gpus").contains(document.activeElement)) return markChosen();
  byId("gpus").replaceChildren(...answer.gpus.map(button));
  markChosen();
}

export function markChosen() {
  for (const each of byId("gpus").children) each.setAttribute("aria-current", String(each.dataset.gpu === settings.value("gpu")));
}

function button(gpu) {
  const held = gpu.others + gpu.outside + gpu.peak;
  const verdict = gpu.problem || t(`gpus.${gpu.verdict}`);
  const kind = { fits: "yes", tight: "tight", does_not_fit: "no" }[gpu.verdict] ?? "odd";
  const share = (nbytes) => `${Math.min(100 * nbytes / gpu.usable, 100).toFixed(2)}%`;
  const picture = svgElement("svg", { "aria-hidden": "true" },
    svgElement("rect", { class: "room", width: "100%", height: "100%", rx: 2.5 }),
    svgElement("rect", { class: kind, width: gpu.problem ? 0 : share(held), height: "100%", rx: 2.5 }),
    svgElement("rect", { class: "o-others", width: share(gpu.others), height: "100%", rx: 2.5 }));
  const one = element("button", { type: "button", "data-gpu": gpu.name, title: gpu.problem ? "" : t("gpus.held", { held: bytes(held), usable: bytes(gpu.usable) }) },
    element("span", {}, gpu.name), element("span", { class: kind }, gpu.verdict === "fits" && gpu.speed ? t("gpus.speed", { speed: gpu.speed }) : verdict), picture);
  one.addEventListener("click", () => settings.change({ gpu: gpu.name }, { step: true }));
  return one;
}
