// Settings for a goal: the fastest that fit, the largest model … with speed against memory, and runners-up.
import { get } from "./api.js";
import { byId, bytes, element, svgElement } from "./dom.js";
import { tryChange } from "./plan.js";
import * as settings from "./settings.js";
import { t } from "./strings.js";

let base = null;  // the settings that the search began with
let curve = null; // … and those of its curve: with the shape that was found, and what was allowed
let applying = false;

export function start() {
  byId("lossy").checked = settings.ofPage("lossy") !== "";
  byId("lossy").addEventListener("change", () => settings.setPage({ lossy: byId("lossy").checked ? "1" : "" }));
  for (const button of document.querySelectorAll("[data-goal]")) {
    button.addEventListener("click", () => search(button.dataset.goal, byId("lossy").checked ? "lossy" : ""));
  }
}

// What was found for settings that have changed since is removed.
export function clear() {
  if (applying || base === null) return;
  base = null;
  byId("fit-result").hidden = true;
  byId("fit-note").textContent = t("fit.note");
}

async function search(goal, allow) {
  const from = settings.all(), found = await ask(from, { goal, allow });
  if (!found) return;
  base = from;
  curve = { allow, settings: ["largest-model", "longest-context"].includes(goal) ? { ...from, ...found.chosen?.settings } : from };
  byId("fit-suggestions").replaceChildren(...found.suggestions.map(suggestion));
  drawChart(found);
  drawRunnersUp(found);
  byId("fit-result").hidden = false;
  if (found.chosen) apply(t(`goal.${goal}`), base, found);
}

// A point of the curve: the fastest within that memory.
async function searchWithin(nbytes) {
  const found = await ask(curve.settings, { goal: "fastest", allow: curve.allow, within: nbytes });
  if (!found?.chosen) return;
  apply(t("goal.fastest"), curve.settings, found);
  mark(found.chosen);
}

// null: there is a problem, or the settings have changed in the meantime.
async function ask(from, request) {
  const note = byId("fit-note"), before = settings.query();
  busy(true);
  note.textContent = t("fit.searching");
  const given = Object.entries(from).filter(([, text]) => text !== "");
  const found = await get("fit", new URLSearchParams([...Object.entries(request), ...given]).toString());
  busy(false);
  if (found.problem) note.textContent = `${found.problem.what} ${found.problem.fix}`;
  else if (!found.chosen) note.textContent = found.too_small;
  else note.textContent = Object.keys(found.chosen.settings).length ? t("fit.found", { count: found.considered.toLocaleString("en") }) : t("fit.same");
  return found.problem || before !== settings.query() ? null : found;
}

const busy = (now) => { for (const button of byId("fit").querySelectorAll("button")) button.disabled = now; };

function apply(label, from, { chosen, reasons }) {
  applying = true;
  tryChange(label, { ...from, ...chosen.settings }, reasons);
  applying = false;
}

function suggestion(each) {
  const button = element("button", { type: "button" }, each.label);
  button.addEventListener("click", () => {
    settings.change(each.settings, { step: true });
    search("fastest", each.allow);
  });
  return element("li", {}, button, " ", each.text);
}

function drawRunnersUp(found) {
  const rows = [...(found.chosen ? [found.chosen] : []), ...found.runners_up];
  byId("runners-up").hidden = !rows.length;
  byId("runners-up").querySelector("tbody").replaceChildren(...rows.map((each, at) => {
    const use = element("button", { type: "button" }, t("fit.use"));
    use.addEventListener("click", () => { apply(t("fit.runner_up", { number: at + 1 }), base, { chosen: each, reasons: [] }); mark(each); });
    return element("tr", {}, element("td", {}, use), element("td", { class: "figure" }, bytes(each.needs)),
      element("td", { class: "figure" }, each.speed || "–"), element("td", {}, ...(each.flags ? each.flags.split(" ").flatMap((flag) => [element("code", { class: "flag" }, flag), " "]) : [t("fit.as_given")])));
  }));
}

// ---- speed against memory: a curve, with a button at each of its points

let place = null; // (bytes, tokens/s) → percent of the drawing

function drawChart({ points, given, chosen, limit }) {
  const drawn = points.length > 1;
  byId("fit-chart").hidden = !drawn;
  if (!drawn) return;
  const marked = [given, chosen].filter((each) => each?.likely);
  const most = 1.06 * Math.max(limit, ...marked.map((each) => each.needs)), top = 1.12 * Math.max(...points.map(([, speed]) => speed), ...marked.map((each) => each.likely));
  place = (nbytes, speed) => [100 * nbytes / most, 100 - 100 * speed / top];
  const line = (x1, y1, x2, y2, kind) => svgElement("line", { x1: `${x1}%`, y1: `${y1}%`, x2: `${x2}%`, y2: `${y2}%`, class: kind });
  const places = points.map(([nbytes, speed]) => place(nbytes, speed));
  const [x] = place(limit, 0), gib = 2 ** 30, steps = [0.25, 0.5, 1, 2, 4, 8, 16, 32].find((step) => most / gib / step <= 7) ?? 64;
  const across = [0.5, 1].map((share) => share * Math.max(...points.map(([, speed]) => speed))).flatMap((speed) => {
    const [, y] = place(0, speed);
    return [line(0, y, 100, y, "axis"), svgElement("text", { y: `${y}%`, dy: -4 }, t("speed", { speed: short(speed) }))];
  });
  const below = Array.from({ length: Math.floor(most / gib / steps) + 1 }, (_, at) => svgElement("text", { x: `${place(at * steps * gib, 0)[0]}%`, y: "100%", dy: 16,
    "text-anchor": at ? "middle" : "start" }, at ? `${at * steps} GiB` : "0"));
  byId("fit-plot").replaceChildren(
    svgElement("svg", { "aria-hidden": "true" }, line(0, 100, 100, 100, "axis"), ...across, ...below,
      ...places.slice(1).map(([right, y], at) => line(...places[at], right, y, "curve")),
      line(x, 0, x, 100, "limit-halo"), line(x, 0, x, 100, "limit-line"),
      svgElement("text", { class: "limit-name", x: `${x}%`, y: 12, dx: -6, "text-anchor": "end" }, t("fit.limit", { limit: bytes(limit) }))),
    ...points.map(([nbytes, speed]) => point(nbytes, speed, "", t("fit.point", { memory: bytes(nbytes), speed: short(speed) }),
      () => searchWithin(nbytes))),
    ...(given?.likely ? [point(given.needs, given.likely, "given", t("fit.given", { memory: bytes(given.needs) }), () => { apply(t("fit.as_given"), base, { chosen: given, reasons: [] }); mark(given); })] : []));
  mark(chosen);
}

function point(nbytes, speed, kind, label, act) {
  const [x, y] = place(nbytes, speed), one = element("button", { type: "button", class: `point ${kind}`, "aria-label": label, title: label });
  Object.assign(one.style, { left: `${x}%`, top: `${y}%` });
  one.addEventListener("click", act);
  return one;
}

function mark(scored) {
  byId("fit-plot").querySelector(".chosen")?.remove();
  if (!scored?.likely || !place) return;
  const [x, y] = place(scored.needs, scored.likely), dot = element("span", { class: "chosen", "aria-hidden": "true" });
  Object.assign(dot.style, { left: `${x}%`, top: `${y}%` });
  byId("fit-plot").append(dot);
}

const short = (speed) => speed >= 1e6 ? `${(speed / 1e6).toFixed(1)}M` : speed >= 1000 ? `${(speed / 1000).toFixed(speed < 1e4 ? 1 : 0)}k` : speed.toFixed(0);
