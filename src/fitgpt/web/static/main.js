// Begins: asks what there is to choose, builds the form, and from then on every change asks for a plan.
import { ask } from "./ask.js";
import { cards, mark } from "./cards.js";
import * as copy from "./copy.js";
import * as explain from "./explain.js";
import * as fixes from "./fixes.js";
import * as form from "./form.js";
import * as live from "./live.js";
import * as plan from "./plan.js";
import * as settings from "./settings.js";
import * as tabs from "./tabs.js";

const choices = await ask("form");
if (!choices.problem) {
  const knobs = Object.fromEntries(Object.values(choices.groups).flat().map((one) => [one.name, one.default]));
  const others = { gpu: "", others: "", budget: "", trainer: "fitgpt", torch: "", eval_iters: "200" };
  settings.start({ ...others, ...knobs }, choices.here ? {} : { gpu: choices.example });
  form.build(choices);
  settings.onChange(() => { plan.forget(); form.show(); mark(); plan.refresh(); });
  plan.follow(fixes.price);
  plan.follow(cards);
  tabs.start();
  tabs.onOpen((name) => { if (name === "live") live.look(); });
  fixes.start();
  copy.start();
  explain.start();
  await plan.refresh();
  live.look();
}
document.documentElement.dataset.ready = "";
