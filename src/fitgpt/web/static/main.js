// Entry point: loads the words, builds the form, then requests a plan at every change.
import { get } from "./api.js";
import { SERVED } from "./ask.js";
import * as copy from "./copy.js";
import { byId, element } from "./dom.js";
import * as fit from "./fit.js";
import * as fixes from "./fixes.js";
import * as form from "./form.js";
import * as gpus from "./gpus.js";
import * as live from "./live.js";
import * as paste from "./paste.js";
import * as plan from "./plan.js";
import * as settings from "./settings.js";
import * as strings from "./strings.js";
import * as tabs from "./tabs.js";

document.documentElement.classList.add(SERVED ? "served" : "site"); // page.css hides what belongs to the other
if (!SERVED) for (const id of ["tab-live", "live"]) byId(id).remove();
const asked = get("form");
const { language, names } = await strings.load(settings.inAddress().get("lang"));
const choices = await asked;
if (!choices.problem) {
  const options = Object.fromEntries(form.controlsOf(choices).map((one) => [one.name, one.default]));
  const others = { gpu: "", others: "", budget: "", trainer: "fitgpt", torch: "", eval_iters: "200" };
  settings.start({ ...others, ...options }, choices.here ? {} : { gpu: choices.example });
  form.build(choices);
  settings.onChange(() => { plan.clearComparison(); fit.clear(); form.show(); gpus.markChosen(); gpus.fade(); tabs.show(); paste.show(); plan.refresh(); });
  plan.onExact(fixes.showAll);
  plan.onExact(gpus.showAll);
  tabs.onOpen((name) => { if (name === "live") live.look(); });
  tabs.start();
  fit.start();
  copy.start();
  paste.start(form.controlsOf(choices).map((one) => one.name));
  byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("results").focus(); });
  languages();
  footer();
  if (!SERVED) byId("word").textContent = strings.t("site.starting");
  document.documentElement.dataset.built = ""; // shows the page
  await plan.refresh();
  if (SERVED) live.look();
} else if (!choices.offline) {
  byId("offline").textContent = `${choices.problem.what} ${choices.problem.fix}`;
  byId("offline").hidden = false;
}
document.documentElement.dataset.ready = "";

function languages() {
  const list = byId("language");
  list.append(...Object.entries(names).map(([name, text]) => element("option", { value: name, lang: name }, text)));
  list.value = language;
  list.parentElement.hidden = list.options.length < 2;
  list.addEventListener("change", () => { settings.setPage({ lang: list.value }); location.reload(); });
}

function footer() { // the documents are served where fitgpt runs from its repository
  byId("version").textContent = strings.t("footer.version", { version: choices.version });
  for (const each of document.querySelectorAll("[data-doc]")) {
    const file = `docs/${each.dataset.doc}.md`;
    each.append(" ", choices.has_docs ? element("a", { href: file }, file) : element("code", {}, file));
  }
}
