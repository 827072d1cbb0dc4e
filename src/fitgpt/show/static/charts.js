// Adds to charts that are already drawn: values under the pointer, zoom (drag, wheel, pinch, keys) and a reset button.
// charts.attach(root) is for pages that put charts in later.
"use strict";
const charts = (() => {
  const WIDE = 100000, TALL = 10000; // of the drawing, as in charts.py
  const SVG = "http://www.w3.org/2000/svg";
  const MAX_ZOOM = 400;
  const UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
  const LETTERS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];

  const power = (value) => Number(value.toExponential(2)).toExponential().replace("e+", "e");
  const grouped = (value, digits) =>
    value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const plain = (value, step) =>
    grouped(value, step > 0 ? Math.min(Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)), 9) : 0);

  function formatValue(unit, value) {
    if (typeof value !== "number") return String(value); // NaN, infinite
    if (unit === "bytes") {
      const [size, name] = UNITS.find(([size]) => Math.abs(value) >= size) || UNITS[4];
      return `${grouped(value / size, size >= 2 ** 30 ? 2 : size > 1 ? 1 : 0)} ${name}`;
    }
    if (unit === "count") return Math.abs(value) >= 100 ? grouped(value, 0) : String(Number(value.toPrecision(3)));
    if (value === 0) return "0";
    const size = Math.abs(value);
    return size >= 0.01 && size < 1e5 ? value.toFixed(size < 10 ? 4 : size < 100 ? 2 : 1) : power(value);
  }

  function tickLabel(unit, value, step, largest) {
    if (value === 0) return "0";
    if (unit === "bytes") {
      const [size, name] = UNITS.find(([size]) => largest >= size) || UNITS[4];
      return `${plain(value / size, step / size)} ${name}`;
    }
    if (unit === "count" && largest >= 10000) {
      const [size, letter] = LETTERS.find(([size]) => largest >= size);
      return plain(value / size, step / size) + letter;
    }
    return largest >= 1e6 || largest < 0.01 ? power(value) : plain(value, step);
  }

  function ticks(unit, low, high, most) {
    const base = unit === "bytes" ? UNITS.find(([size]) => high - low >= size || size === 1)[0] : 1;
    const rough = (high - low) / base / most;
    const ten = 10 ** Math.floor(Math.log10(rough));
    const step = base * ten * [1, 2, 5, 10].find((times) => ten * times >= rough * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) found.push(n * step);
    return { step, found };
  }

  function svg(name, attributes, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return x - xs[low] <= xs[high] - x ? low : high;
  }

  function between(knots, value, from, to) { // the value of one column of the knots, as the other has it
    const found = knots.findIndex((knot, place) => place > 0 && value <= knot[from]);
    const place = found < 0 ? knots.length - 1 : found;
    const before = knots[place - 1], after = knots[place];
    return before[to] + (value - before[from]) / (after[from] - before[from]) * (after[to] - before[to]);
  }

  function valuesFrom(changes, count) { // [place, value, place, value …] → the value at every place
    const y = new Array(count).fill(0);
    for (let n = 0; n < changes.length; n += 2) y.fill(changes[n + 1], changes[n]);
    return { x: y.map((_, place) => place), y };
  }

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.data = JSON.parse(figure.querySelector("script").textContent);
      this.frame = figure.querySelector(".frame");
      this.plot = figure.querySelector(".plot");
      this.inner = figure.querySelector(".inner");
      for (const one of this.data.series) if (one.changes) Object.assign(one, valuesFrom(one.changes, this.data.count));
      const [x0, x1, y0, y1] = this.data.scale;
      this.whole = { x0, x1, y0, y1 };
      this.view = { ...this.whole };
      this.xs = [...new Set(this.data.series.flatMap((one) => one.x))].sort((a, b) => a - b);
      this.pointers = new Map();
      this.addControls();
      this.listen();
      new ResizeObserver(() => this.draw()).observe(this.plot);
    }

    addControls() {
      this.frame.tabIndex = 0;
      this.frame.setAttribute("role", "group");
      this.frame.setAttribute("aria-label", `${this.figure.querySelector("figcaption").textContent}. Arrow keys show `
        + "values, plus and minus zoom, 0 shows everything.");
      this.cursor = this.plot.appendChild(svg("line", { class: "cursor", y1: 0, y2: "100%", visibility: "hidden" }));
      this.brush = this.plot.appendChild(svg("rect", { class: "brush", y: 0, height: "100%", visibility: "hidden" }));
      this.readout = document.createElement("div");
      this.readout.className = "readout";
      this.readout.hidden = true;
      this.readout.setAttribute("aria-live", "polite");
      this.reset = document.createElement("button");
      this.reset.type = "button";
      this.reset.className = "reset";
      this.reset.textContent = "Show all";
      this.reset.hidden = true;
      this.frame.append(this.readout, this.reset);
    }

    listen() {
      const plot = this.plot;
      plot.addEventListener("pointerdown", (event) => this.pressed(event));
      plot.addEventListener("pointermove", (event) => this.moved(event));
      for (const end of ["pointerup", "pointercancel"]) plot.addEventListener(end, (event) => this.released(event));
      plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.point(null); });
      plot.addEventListener("dblclick", () => this.show(this.whole));
      plot.addEventListener("wheel", (event) => {
        const meant = event.ctrlKey || event.metaKey || this.frame.contains(document.activeElement);
        if (!meant) return; // the page scrolls past charts nobody has chosen
        event.preventDefault();
        this.zoom(this.at(event), Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))));
      }, { passive: false });
      this.reset.addEventListener("click", () => { this.show(this.whole); this.frame.focus(); });
      this.frame.addEventListener("keydown", (event) => this.typed(event));
      this.frame.addEventListener("blur", () => this.point(null));
    }

    at(event) { // the x under the pointer
      const box = this.plot.getBoundingClientRect();
      const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
      return this.view.x0 + share * (this.view.x1 - this.view.x0);
    }

    pressed(event) {
      if (event.button > 0) return;
      this.pointers.set(event.pointerId, this.at(event));
      this.plot.setPointerCapture(event.pointerId);
      this.pressedAt = event.pointerType === "mouse" || event.pointerType === "pen" ? this.at(event) : null;
    }

    moved(event) {
      const x = this.at(event);
      if (this.pointers.has(event.pointerId)) {
        if (this.pointers.size === 2) return this.pinched(event, x);
        if (this.pressedAt !== null) this.drawBrush(this.pressedAt, x);
      }
      this.point(x, event.clientY);
    }

    released(event) {
      const from = this.pressedAt;
      this.pointers.delete(event.pointerId);
      this.brush.setAttribute("visibility", "hidden");
      this.pressedAt = null;
      if (event.type !== "pointerup") return;
      const x = this.at(event);
      const width = this.view.x1 - this.view.x0;
      if (from !== null && from !== undefined && Math.abs(x - from) > width * 0.01) {
        this.show({ x0: Math.min(from, x), x1: Math.max(from, x) });
      } else {
        this.point(x, event.clientY);
      }
    }

    drawBrush(from, to) {
      const [left, right] = [Math.min(from, to), Math.max(from, to)];
      this.brush.setAttribute("x", this.across(left));
      this.brush.setAttribute("width", `${(right - left) / (this.view.x1 - this.view.x0) * 100}%`);
      this.brush.setAttribute("visibility", "visible");
    }

    pinched(event, x) {
      const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
      const before = Math.abs(this.pointers.get(event.pointerId) - other);
      if (before > 0 && Math.abs(x - other) > 0) this.zoom(other, before / Math.abs(x - other));
      this.pointers.set(event.pointerId, this.at(event));
    }

    typed(event) {
      const last = this.xs.length - 1;
      const here = this.cursorAt === null || this.cursorAt === undefined
        ? (this.view.x0 + this.view.x1) / 2 : this.cursorAt;
      const step = event.shiftKey ? Math.max(1, Math.round(last / 20)) : 1;
      const move = (place) => {
        const x = this.xs[Math.min(Math.max(place, 0), last)];
        const width = this.view.x1 - this.view.x0;
        if (x < this.view.x0 || x > this.view.x1) this.show({ x0: x - width / 2, x1: x + width / 2 });
        this.point(x);
      };
      const keys = {
        ArrowLeft: () => move(nearest(this.xs, here) - step),
        ArrowRight: () => move(nearest(this.xs, here) + step),
        Home: () => move(0),
        End: () => move(last),
        "+": () => this.zoom(here, 0.5),
        "=": () => this.zoom(here, 0.5),
        "-": () => this.zoom(here, 2),
        0: () => this.show(this.whole),
        Escape: () => { this.show(this.whole); this.point(null); },
      };
      if (!Object.hasOwn(keys, event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target !== this.frame) return;
      event.preventDefault();
      keys[event.key]();
    }

    zoom(x, times) {
      const { x0, x1 } = this.view;
      this.show({ x0: x - (x - x0) * times, x1: x + (x1 - x) * times });
    }

    show({ x0, x1 }) {
      const all = this.whole.x1 - this.whole.x0;
      const width = Math.min(Math.max(x1 - x0, all / MAX_ZOOM), all);
      const start = Math.min(Math.max((x0 + x1 - width) / 2, this.whole.x0), this.whole.x1 - width);
      this.view = { ...this.whole, x0: start, x1: start + width };
      const zoomed = width < all * 0.999;
      if (zoomed) Object.assign(this.view, this.height());
      this.figure.classList.toggle("zoomed", zoomed);
      this.reset.hidden = !zoomed;
      this.draw();
      this.point(null);
    }

    height() { // the range of what is in view, within what the whole chart shows
      let low = Infinity, high = -Infinity;
      const sums = new Map();
      for (const one of this.data.series) {
        one.x.forEach((x, place) => {
          if (x < this.view.x0 || x > this.view.x1 || typeof one.y[place] !== "number") return;
          sums.set(x, (sums.get(x) || 0) + one.y[place]);
          low = Math.min(low, one.low ? one.low[place] : one.y[place]);
          high = Math.max(high, one.high ? one.high[place] : one.y[place]);
        });
      }
      if (low > high) return {};
      if (this.data.kind === "stacked") high = Math.max(...sums.values());
      if (this.data.fromZero) low = this.whole.y0;
      const room = (high - low) * 0.1 || Math.abs(high) * 0.05 || 1;
      return { y0: Math.max(low - room, this.whole.y0), y1: Math.min(high + room, this.whole.y1) };
    }

    across(x) { return `${(x - this.view.x0) / (this.view.x1 - this.view.x0) * 100}%`; }
    down(y) { return `${(this.view.y1 - y) / (this.view.y1 - this.view.y0) * 100}%`; }

    draw() {
      const { x0, x1, y0, y1 } = this.view, all = this.whole;
      const wide = WIDE / (all.x1 - all.x0), tall = TALL / (all.y1 - all.y0);
      this.inner.setAttribute("viewBox",
        `${(x0 - all.x0) * wide} ${(all.y1 - y1) * tall} ${(x1 - x0) * wide} ${(y1 - y0) * tall}`);
      this.drawAxes();
      for (const element of this.plot.querySelectorAll("[data-x], [data-y]")) this.place(element);
      this.namePhases();
    }

    drawAxes() {
      const { x0, x1, y0, y1 } = this.view;
      const box = this.plot.getBoundingClientRect();
      const rows = ticks(this.data.unit, y0, y1, Math.max(2, Math.round(box.height / 46)));
      const most = Math.max(Math.abs(y0), Math.abs(y1));
      this.plot.querySelector(".axis.y").replaceChildren(...rows.found.flatMap((y) => [
        svg("line", { x1: 0, x2: "100%", y1: this.down(y), y2: this.down(y) }),
        svg("text", { x: -8, y: this.down(y), dy: 4, "text-anchor": "end" },
          tickLabel(this.data.unit, y, rows.step, most))]));
      if (this.data.kind === "stacked") return;
      const mostColumns = Math.max(2, Math.min(Math.round(box.width / 60), 12));
      for (const axis of this.data.axes || []) this.drawAltAxis(axis, mostColumns);
      const columns = ticks("count", x0, x1, mostColumns);
      const whole = columns.found.filter((x) => columns.step >= 1 || Number.isInteger(x));
      this.plot.querySelector(".axis.x").replaceChildren(...whole.map((x) =>
        svg("text", { x: this.across(x), y: "100%", dy: 18, "text-anchor": "middle" },
          tickLabel("count", x, columns.step, Math.max(Math.abs(x0), Math.abs(x1))))));
    }

    drawAltAxis({ kind, knots }, mostColumns) { // tokens or time, in place of steps
      const { x0, x1 } = this.view;
      const low = between(knots, Math.max(x0, knots[0][0]), 0, 1), high = between(knots, Math.min(x1, knots.at(-1)[0]), 0, 1);
      const { step, found } = ticks("count", low, high, mostColumns);
      this.plot.querySelector(`.axis.x-${kind}`).replaceChildren(...found.map((value) =>
        svg("text", { x: this.across(between(knots, value, 1, 0)), y: "100%", dy: 18, "text-anchor": "middle" },
          tickLabel("count", value, step, high))));
    }

    place(element) { // what lies over the drawing at its own size
      const { x: dx, y: dy } = element.dataset;
      const outside = (dx !== undefined && (+dx < this.view.x0 || +dx > this.view.x1))
        || (dy !== undefined && (+dy < this.view.y0 || +dy > this.view.y1));
      element.setAttribute("visibility", outside ? "hidden" : "visible");
      for (const part of [element, ...element.children]) {
        const names = { line: [["x1", "x2"], ["y1", "y2"]], circle: [["cx"], ["cy"]], text: [["x"], ["y"]], rect: [["x"], []] }[part.tagName];
        if (!names) continue;
        if (dx !== undefined) for (const name of names[0]) part.setAttribute(name, this.across(+dx));
        if (dy !== undefined) for (const name of names[1]) part.setAttribute(name, this.down(+dy));
      }
    }

    namePhases() { // those that are long enough to hold their names
      const phases = [...this.plot.querySelectorAll(".phase")];
      const box = this.plot.getBoundingClientRect();
      const left = (phase) => (+phase.dataset.x - this.view.x0) / (this.view.x1 - this.view.x0) * box.width;
      phases.forEach((phase, place) => {
        let label = phase.querySelector("text");
        if (!label) label = phase.appendChild(svg("text", { y: 0, dx: 3, dy: -6 }, phase.dataset.name));
        const start = Math.max(left(phase), 0);
        const end = Math.min(place + 1 < phases.length ? left(phases[place + 1]) : box.width, box.width);
        const fits = end - start >= label.getComputedTextLength() + 6;
        label.setAttribute("x", start);
        label.setAttribute("visibility", fits ? "visible" : "hidden");
      });
    }

    point(x, clientY) {
      this.cursorAt = x;
      this.readout.hidden = x === null;
      this.cursor.setAttribute("visibility", x === null ? "hidden" : "visible");
      if (x === null) return;
      const snapped = this.xs[nearest(this.xs, x)];
      this.cursorAt = snapped;
      this.cursor.setAttribute("x1", this.across(snapped));
      this.cursor.setAttribute("x2", this.across(snapped));
      this.readout.replaceChildren(...this.valueRows(snapped));
      const frame = this.frame.getBoundingClientRect(), inner = this.plot.getBoundingClientRect();
      const left = inner.left - frame.left + (snapped - this.view.x0) / (this.view.x1 - this.view.x0) * inner.width;
      const room = this.readout.offsetWidth + 14;
      const beside = left + room <= frame.width ? left + 12 : Math.max(left - room, 0);
      const above = clientY === undefined ? 8 : clientY - frame.top - this.readout.offsetHeight / 2;
      this.readout.style.left = `${Math.min(beside, Math.max(frame.width - room + 14, 0))}px`;
      this.readout.style.top = `${Math.min(Math.max(above, 0), Math.max(inner.height - this.readout.offsetHeight, 0))}px`;
    }

    valueRows(x) {
      const line = (name, value, kind) => {
        const row = document.createElement("div");
        if (kind !== undefined) row.className = kind;
        const text = document.createElement("span");
        text.textContent = name;
        const figure = document.createElement("b");
        figure.textContent = value;
        row.append(...(kind ? [document.createElement("i")] : []), text, figure);
        return row;
      };
      const unit = this.data.unit;
      if (this.data.kind === "stacked") {
        const phase = this.data.marks.filter(([start]) => start <= x).pop();
        const held = this.data.series.filter((one) => one.y[x]).reverse();
        const total = held.reduce((sum, one) => sum + one.y[x], 0);
        return [line(phase ? phase[1] : "total", formatValue(unit, total), ""),
          ...held.map((one) => line(one.name, formatValue(unit, one.y[x]), one.class))];
      }
      const near = (this.view.x1 - this.view.x0) * 0.02;
      const events = this.data.marks.filter(([at]) => Math.abs(at - x) <= near / 2);
      const others = (this.data.axes || []).map(({ name, knots }) =>
        line(name, formatValue("count", Math.max(between(knots, x, 0, 1), 0)), ""));
      return [line(this.data.xName, formatValue("count", x), ""), ...others, ...this.data.series.filter((one) => one.x.length).map((one) => {
        const place = nearest(one.x, x);
        const away = Math.abs(one.x[place] - x) > near ? ` (${this.data.xName} ${formatValue("count", one.x[place])})` : "";
        const spread = one.low && typeof one.y[place] === "number"
          ? ` (${formatValue(unit, one.low[place])} – ${formatValue(unit, one.high[place])})` : "";
        return line(one.name + away, formatValue(unit, one.y[place]) + spread, one.class);
      }), ...events.slice(0, 4).map(([, text]) => line(text.slice(0, 160), "", "event"))];
    }
  }

  function attach(root) {
    for (const figure of root.querySelectorAll("figure[data-chart]:not([data-live])")) {
      figure.dataset.live = "";
      new Chart(figure);
    }
  }

  return { attach };
})();
charts.attach(document);
