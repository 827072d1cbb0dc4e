// The live tab: updated every 2 s while it is open, every 20 s otherwise.
import { get } from "./api.js";
import { table } from "./plan.js";
import { byId, bytes, element } from "./dom.js";
import { t } from "./strings.js";

const OPEN = 2000, ELSEWHERE = 20000;
const TILES = ["steps", "loss", "speed", "time_left", "reserved", "headroom", "device"]; // another is the GPU's name
let next;

export async function look() {
  clearTimeout(next);
  if (!document.hidden) draw(await get("live"));
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
  tab.textContent = t(live.running ? "tab.live" : "tab.last");
  tab.classList.toggle("running", live.running);
  byId("live-name").textContent = run.folder;
  byId("live-status").textContent = [run.status, run.phase, run.whereabouts, run.device_name, run.warning, run.hint].filter(Boolean).join(" · ");
  byId("live-progress").hidden = live.progress === null;
  if (live.progress !== null) byId("live-progress").value = live.progress;
  byId("live-tiles").replaceChildren(...live.tiles.map(([what, figure, more]) =>
    element("div", {}, element("dt", {}, TILES.includes(what) ? t(`tile.${what}`) : what), element("dd", {}, figure), element("dd", {}, more))));
  drawCharts(live.charts);
  byId("live-programs").hidden = !live.programs.length;
  if (live.programs.length) table("programs", [t("live.program"), t("live.pid"), t("live.memory")], live.programs.map((one) =>
    [one.kind === "run" ? t("live.this_run", { name: one.name }) : one.name, String(one.pid), one.nbytes === null ? "–" : bytes(one.nbytes)]));
}

function drawCharts(html) {
  const box = byId("live-charts");
  if (box.matches(":hover") || box.contains(document.activeElement)) return; // do not redraw under the pointer or the focus
  box.innerHTML = html; // rendered and escaped by charts.py
  charts.attach(box);
}
