// The run that is going on here: looked at every two seconds while its tab is open, and every twenty otherwise.
import { ask } from "./ask.js";
import { table } from "./plan.js";
import { byId, bytes, made } from "./words.js";

const OPEN = 2000, ELSEWHERE = 20000;
let next;

export async function look() {
  clearTimeout(next);
  if (!document.hidden) draw(await ask("live"));
  next = setTimeout(look, byId("live").hidden ? ELSEWHERE : OPEN);
}

function draw(live) {
  const tab = byId("tab-live");
  const run = live && live.run;
  tab.hidden = !run && byId("live").hidden;
  if (!run) {
    byId("live-status").textContent = live?.why || live?.problem?.what || "";
    return;
  }
  tab.textContent = live.going ? "Live run" : "Last run";
  tab.classList.toggle("going", live.going);
  byId("live-name").textContent = run.folder;
  byId("live-status").textContent = [run.status, run.phase, run.whereabouts, run.device_name, run.warning, run.hint].filter(Boolean).join(" · ");
  byId("live-progress").hidden = live.progress === null;
  if (live.progress !== null) byId("live-progress").value = live.progress;
  byId("live-tiles").replaceChildren(...live.tiles.map(([what, figure, more]) =>
    made("div", {}, made("dt", {}, what), made("dd", {}, figure), made("dd", {}, more))));
  drawCharts(live.charts);
  byId("live-programs").hidden = !live.programs.length;
  byId("live-programs").querySelector("table").id = "programs";
  if (live.programs.length) table("programs", ["program", "pid", "memory"], live.programs.map((one) =>
    [one.name + (one.kind === "run" ? " (this run)" : ""), String(one.pid), one.nbytes === null ? "–" : bytes(one.nbytes)]));
}

function drawCharts(html) {
  const place = byId("live-charts");
  if (place.matches(":hover") || place.contains(document.activeElement)) return; // somebody is reading them
  place.innerHTML = html; // drawn and escaped by charts.py
  charts.attach(place);
}
