// Creates elements from text only. Nothing becomes HTML except charts that Python rendered and escaped.

const UNITS = [[2 ** 40, "TiB", 2], [2 ** 30, "GiB", 2], [2 ** 20, "MiB", 1], [2 ** 10, "KiB", 1]];

export function bytes(value) {
  const [size, name, digits] = UNITS.find(([size]) => Math.abs(value) >= size) || [1, "B", 0];
  return `${(value / size).toFixed(digits)} ${name}`;
}

// element("p", {class: "quiet", hidden: true}, "text", child …)
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svgElement(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((each) => each !== null && each !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);
