// The page's own words, by language: static/strings/*.json. Texts of the planner and of diagnoses stay English.
let words = {};

export async function load(chosen) {
  const catalogues = await (await fetch("static/strings.json")).json();
  const wanted = [chosen, ...navigator.languages].filter(Boolean);
  const language = wanted.map((name) => name.toLowerCase().split("-")[0]).find((name) => catalogues[name]) || "en";
  words = catalogues[language];
  Object.assign(document.documentElement, { lang: language, dir: words.direction });
  for (const each of document.querySelectorAll("[data-t]")) each.textContent = t(each.dataset.t);
  for (const each of document.querySelectorAll("[data-t-label]")) each.setAttribute("aria-label", t(each.dataset.tLabel));
  document.title = t("title");
  return { language, names: Object.fromEntries(Object.entries(catalogues).map(([name, each]) => [name, each.language])) };
}

// t("speed", {speed: "50k"}). In a text from right to left a value keeps its own direction: it is isolated.
export function t(key, values = {}) {
  const isolated = (value) => words.direction === "rtl" ? `\u2068${value}\u2069` : String(value);
  if (!(key in words)) throw new Error(`no text for ${key}`);
  return words[key].replace(/\{(\w+)\}/g, (_, name) => isolated(values[name]));
}
