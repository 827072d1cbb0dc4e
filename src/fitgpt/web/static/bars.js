// One stacked bar per phase: other programs, memory outside the allocator, each owner's tensors, reserved but unallocated.
import { byId, bytes, element, svgElement } from "./dom.js";
import { t } from "./strings.js";

const OWNERS = ["weights", "gradients", "optimizer", "casts", "activations", "attention", "logits", "workspace", "data",
  "other"];
const PARTS = ["others", "outside", ...OWNERS, "unallocated"];
const GIB = 2 ** 30;

export function draw(bars, before) {
  const root = byId("bars");
  const most = 1.02 * Math.max(bars.limit, ...bars.rows.map((row) => end(bars, row)), ...(before || []).map(([, at]) => at));
  const share = (nbytes) => `${(100 * nbytes / most).toFixed(3)}%`;
  const wanted = bars.rows.map((row) => row.phase).join();
  if (root.dataset.phases !== wanted) rebuild(root, bars.rows, wanted);
  for (const row of bars.rows) fill(root.querySelector(`[data-phase="${row.phase}"]`), bars, row, share, before);
  drawEnds(root, bars, share, most);
  legend(bars);
  if (before) byId("bars-legend").append(element("li", {}, "┆", element("span", {}, t("bars.before"))));
}

// Where each phase's bar ends, to mark the state before a change.
export const ends = (bars) => bars.rows.map((row) => [row.phase, end(bars, row)]);

export function markNeeds(bars, needs) {
  const root = byId("bars");
  const most = Number(root.dataset.most);
  const at = bars.others + bars.outside + needs;
  document.querySelectorAll(".needs").forEach((old) => old.remove());
  byId("bars-legend").append(element("li", { class: "needs" }, "▲", element("span", {}, t("bars.needs")), element("b", {}, bytes(at))));
  if (at > most) return;
  const x = 100 * at / most;
  const axis = root.querySelector(".ends.below svg");
  axis.append(svgElement("svg", { x: `${x}%`, width: 1, height: 1, overflow: "visible", class: "needs" },
    svgElement("path", { d: "M0,-5 l4,6 h-8 z" }), svgElement("title", {}, t("bars.needs_title", { needs: bytes(needs), all: bytes(at) }))));
}

function rebuild(root, rows, wanted) {
  root.dataset.phases = wanted;
  const hatch = svgElement("svg", { width: 0, height: 0, "aria-hidden": "true" }, svgElement("defs", {},
    svgElement("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse" }, svgElement("path", { d: "M-1,6 L6,-1" }))));
  const line = (kind, phase) => element("div", { class: `line ${kind}`, "data-phase": phase }, element("span"),
    svgElement("svg", phase ? { role: "img" } : { "aria-hidden": "true" }, ...(phase
      ? [...PARTS.map((part) => svgElement("rect", { class: `o-${part}`, "data-part": part, height: "100%" }, svgElement("title"))),
        svgElement("line", { class: "limit-halo", y1: -4, y2: "100%" }), svgElement("line", { class: "limit-line", y1: -4, y2: "100%" }), svgElement("line", { class: "ghost", y1: -3, y2: "112%" })] : [])),
    element("span"));
  root.replaceChildren(hatch, line("ends above"), ...rows.map((row) => line("phase-line", row.phase)), line("ends below"));
  hatch.classList.add("hidden-defs");
}

function held(bars, row) {
  return { others: bars.others, outside: bars.outside, ...row.owners, unallocated: Math.max(row.reserved - row.allocated, 0) };
}

const end = (bars, row) => bars.others + bars.outside + Math.max(row.reserved, row.allocated);

function fill(line, bars, row, share, before) {
  const parts = held(bars, row);
  const [name, picture, figure] = line.children;
  name.textContent = t(`phase.${row.phase}`);
  figure.textContent = bytes(end(bars, row));
  line.classList.toggle("peak", row.peak);
  let at = 0;
  for (const rect of picture.querySelectorAll("rect")) {
    const nbytes = parts[rect.dataset.part] || 0;
    rect.setAttribute("x", share(at));
    rect.setAttribute("width", share(nbytes));
    rect.firstChild.textContent = `${t(`part.${rect.dataset.part}`)} ${bytes(nbytes)}`;
    at += nbytes;
  }
  for (const line of picture.querySelectorAll(".limit-halo, .limit-line")) across(line, share(bars.limit));
  const ghost = picture.querySelector(".ghost");
  const was = before?.find(([phase]) => phase === row.phase);
  ghost.setAttribute("visibility", was ? "visible" : "hidden");
  if (was) across(ghost, share(was[1]));
  const owners = Object.entries(row.owners).sort((a, b) => b[1] - a[1]).slice(0, 4);
  picture.setAttribute("aria-label", t("bars.label", { phase: t(`phase.${row.phase}`), total: bytes(end(bars, row)), allocated: bytes(row.allocated),
    owners: owners.map(([owner, nbytes]) => `${t(`part.${owner}`)} ${bytes(nbytes)}`).join(", ") }));
}

function across(line, x) {
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
}

function drawEnds(root, bars, share, most) { // above: the name of the limit; below: the scale
  root.dataset.most = most;
  const position = 100 * bars.limit / most;
  root.querySelector(".ends.above svg").replaceChildren(svgElement("text", { class: "limit-name", x: `${position}%`, y: 13,
    "text-anchor": position > 45 ? "end" : "start" }, bars.whole_gpu
    ? t("bars.usable", { gpu: bars.card, usable: bytes(bars.limit) }) : t("bars.budget", { budget: bytes(bars.budget) })));
  root.querySelector(".ends.above").lastChild.textContent = t("bars.total");
  const step = [0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128].find((gib) => most / GIB / gib <= 7) || 256;
  const marks = [];
  for (let gib = 0; gib * GIB <= most; gib += step) {
    marks.push(svgElement("text", { x: share(gib * GIB), y: 13, "text-anchor": gib ? "middle" : "start" }, String(gib)));
  }
  root.querySelector(".ends.below svg").replaceChildren(...marks);
  root.querySelector(".ends.below").lastChild.textContent = "GiB";
}

function legend(bars) {
  const row = bars.rows.find((each) => each.peak);
  const parts = held(bars, row);
  const shown = PARTS.filter((part) => bars.rows.some((each) => (held(bars, each)[part] || 0) >= 2 ** 20));
  const root = byId("bars");
  byId("bars-legend").replaceChildren(...shown.map((part) => {
    const key = element("li", { class: `o-${part}` }, element("i"),
      element("span", {}, t(`part.${part}`)), element("b", {}, bytes(parts[part] || 0)));
    key.addEventListener("pointerenter", () => pick(root, part));
    key.addEventListener("pointerleave", () => pick(root, null));
    return key;
  }));
}

function pick(root, part) {
  root.classList.toggle("pick", part !== null);
  for (const rect of root.querySelectorAll("rect")) rect.classList.toggle("picked", rect.dataset.part === part);
}
