// Figures as words, and elements made of words only: nothing here, or anywhere, becomes HTML but what Python drew.

const UNITS = [[2 ** 40, "TiB", 2], [2 ** 30, "GiB", 2], [2 ** 20, "MiB", 1], [2 ** 10, "KiB", 1]];

export function bytes(value) {
  const [size, name, digits] = UNITS.find(([size]) => Math.abs(value) >= size) || [1, "B", 0];
  return `${(value / size).toFixed(digits)} ${name}`;
}

// made("p", {class: "quiet", hidden: true}, "words", element …)
export function made(name, attributes = {}, ...inside) {
  return furnished(document.createElement(name), attributes, inside);
}

export function drawn(name, attributes = {}, ...inside) {
  return furnished(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, inside);
}

function furnished(element, attributes, inside) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...inside.filter((each) => each !== null && each !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);
