// Entry point: builds the form, then requests a plan at every change.
import { get } from "./api.js";
import * as copy from "./copy.js";
import * as explain from "./explain.js";
import * as fixes from "./fixes.js";
import * as form from "./form.js";
import * as gpus from "./gpus.js";
import * as live from "./live.js";
import * as plan from "./plan.js";
import * as settings from "./settings.js";
import * as tabs from "./tabs.js";

const choices = await get("form");
if (!choices.problem) {
  const options = Object.fromEntries(Object.values(choices.groups).flat().map((one) => [one.name, one.default]));
  const others = { gpu: "", others: "", budget: "", trainer: "fitgpt", torch: "", eval_iters: "200" };
  settings.start({ ...others, ...options }, choices.here ? {} : { gpu: choices.example });
  form.build(choices);
  settings.onChange(() => { plan.clearComparison(); form.show(); gpus.markChosen(); plan.refresh(); });
  plan.onExact(fixes.showAll);
  plan.onExact(gpus.showAll);
  tabs.start();
  tabs.onOpen((name) => { if (name === "live") live.look(); });
  fixes.start();
  copy.start();
  explain.start();
  await plan.refresh();
  live.look();
}
document.documentElement.dataset.ready = "";
