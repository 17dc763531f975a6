// Charts over time, as SVG: with axes, a legend, and the values under the pointer or at the arrow keys.

import { h, s, replace } from "./dom.js";
import { timeOfDay } from "./format.js";

const HEIGHT = 180;
const MARGIN = { top: 8, right: 8, bottom: 22, left: 44 };

/** The next larger of 1, 2, 5, 10, 20, … */
function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999999);
}

/** The values at which the vertical axis has a line. */
function ticks(highest) {
  const step = nice(highest / 4);
  const count = Math.ceil(highest / step - 1e-6);
  return Array.from({ length: count + 1 }, (_, index) => index * step);
}

/** The moments at which the horizontal axis has a label: on whole steps of the clock. */
function moments(first, last, width) {
  const steps = [1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 14_400, 21_600].map((step) => step * 1000);
  const room = Math.max(2, Math.floor(width / 80));
  const step = steps.find((candidate) => (last - first) / candidate <= room) ?? steps.at(-1);
  const offset = new Date(first).getTimezoneOffset() * 60_000;
  const values = [];
  for (let at = Math.ceil((first - offset) / step) * step + offset; at <= last; at += step) values.push(at);
  return values;
}

/** A line through all points that have a value. One between two gaps is a dot. */
function path(points, values) {
  const has = (index) => values[index] !== null && values[index] !== undefined;
  return points
    .map((point, index) => (has(index) ? `${index > 0 && has(index - 1) ? "L" : "M"}${point}${has(index + 1) ? "" : "h0.01"}` : ""))
    .join("");
}

/**
 * A chart of series over time.
 *
 * `series` are `{name, color}`, drawn on top of each other if `stacked`. `format` writes a value, `unit` names it.
 * `update({times, values})` draws: `times` in milliseconds, `values` one list for each series; null is a gap.
 */
export function timeChart({ title, unit, series, stacked = false, format, height = HEIGHT }) {
  const svg = s("svg", { height, "aria-hidden": "true", focusable: "false" });
  const readout = h("div", { class: "readout", hidden: true });
  const cursor = s("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom });
  const plot = h(
    "div",
    { class: "plot", role: "slider", tabindex: "0", "aria-label": `${title}, ${unit}`, "aria-orientation": "horizontal" },
    svg,
    readout,
  );
  const latest = series.map(() => h("span", { class: "latest" }, "–"));
  const legend = h(
    "ul",
    { class: "legend" },
    series.map((one, index) => h("li", null, h("span", { class: `swatch ${one.color}` }), one.name, latest[index])),
  );
  const root = h("figure", { class: "chart" }, h("figcaption", null, title, h("span", { class: "unit" }, unit)), plot, legend);
  let data = { times: [], values: series.map(() => []) };
  let chosen = null;
  let place = null;
  const shown = (value) => (value === null || value === undefined ? "–" : format(value));

  function text(index) {
    const values = series.map((one, number) => `${one.name} ${shown(data.values[number][index])}`);
    return `${timeOfDay(data.times[index])}: ${values.join(", ")}`;
  }

  function choose(index) {
    chosen = index;
    cursor.toggleAttribute("hidden", index === null);
    readout.hidden = index === null;
    const last = data.times.length - 1;
    const at = index ?? last;
    plot.setAttribute("aria-valuemin", "0");
    plot.setAttribute("aria-valuemax", String(Math.max(last, 0)));
    plot.setAttribute("aria-valuenow", String(Math.max(at, 0)));
    plot.setAttribute("aria-valuetext", at < 0 ? "no values yet" : text(at));
    if (index === null || place === null) return;
    const x = place.x(data.times[index]);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    replace(
      readout,
      h("strong", null, timeOfDay(data.times[index])),
      series.map((one, number) =>
        h("span", null, h("span", { class: `swatch ${one.color}` }), one.name, h("b", null, shown(data.values[number][index]))),
      ),
    );
    const left = x > place.width / 2;
    readout.style.setProperty("left", left ? "auto" : `${x + 10}px`);
    readout.style.setProperty("right", left ? `${place.width - x + 10}px` : "auto");
  }

  function draw() {
    const width = Math.max(plot.clientWidth, 160);
    svg.setAttribute("width", width);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const { times, values } = data;
    const sums = times.map((_, index) =>
      stacked ? values.reduce((sum, one) => sum + (one[index] ?? 0), 0) : Math.max(0, ...values.map((one) => one[index] ?? 0)),
    );
    const lines = ticks(Math.max(...sums, 0) || 1);
    const top = lines.at(-1);
    const first = times[0] ?? Date.now() - 60_000;
    const last = Math.max(times.at(-1) ?? Date.now(), first + 1000);
    const x = (at) => MARGIN.left + ((at - first) / (last - first)) * (width - MARGIN.left - MARGIN.right);
    const y = (value) => height - MARGIN.bottom - (value / top) * (height - MARGIN.top - MARGIN.bottom);
    place = { x, width, first, last };
    const grid = lines.map((value) => [
      s("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      s("text", { class: "tick", x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)),
    ]);
    const labels = moments(first, last, width).map((at) => {
      // The label of the last moment ends where the plot does.
      const anchor = x(at) > width - 36 ? "end" : "middle";
      return s("text", { class: "tick", x: anchor === "end" ? width - 1 : x(at), y: height - 6, "text-anchor": anchor }, timeOfDay(at, last - first < 600_000));
    });
    const base = times.map(() => 0);
    const shapes = series.map((one, number) => {
      const upper = times.map((_, index) => (stacked ? base[index] : 0) + (values[number][index] ?? 0));
      const points = times.map((at, index) => `${x(at).toFixed(1)},${y(upper[index]).toFixed(1)}`);
      if (!stacked) return s("path", { class: `line ${one.color}`, d: path(points, values[number]) });
      const lower = times.map((at, index) => `${x(at).toFixed(1)},${y(base[index]).toFixed(1)}`).reverse();
      upper.forEach((value, index) => {
        base[index] = value;
      });
      return s("polygon", { class: `area ${one.color}`, points: [...points, ...lower].join(" ") });
    });
    replace(svg, grid, shapes, labels, cursor);
    choose(chosen === null || times.length === 0 ? null : Math.min(chosen, times.length - 1));
  }

  function nearest(event) {
    if (place === null || data.times.length === 0) return null;
    const box = svg.getBoundingClientRect();
    const share = (event.clientX - box.left - MARGIN.left) / Math.max(1, box.width - MARGIN.left - MARGIN.right);
    const at = place.first + share * (place.last - place.first);
    const distances = data.times.map((time) => Math.abs(time - at));
    return distances.indexOf(Math.min(...distances));
  }

  plot.addEventListener("pointermove", (event) => choose(nearest(event)));
  plot.addEventListener("pointerleave", () => choose(null));
  plot.addEventListener("blur", () => choose(null));
  plot.addEventListener("keydown", (event) => {
    const last = data.times.length - 1;
    const at = chosen ?? last;
    const next = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") choose(null);
    if (next === undefined || last < 0) return;
    event.preventDefault();
    choose(Math.min(Math.max(next, 0), last));
  });
  // Observed and not only drawn once: a chart is created before it is in the page, where it has no width.
  new ResizeObserver(draw).observe(plot);

  root.update = (next) => {
    data = next;
    series.forEach((_, number) => {
      latest[number].textContent = data.times.length === 0 ? "–" : shown(data.values[number].at(-1));
    });
    draw();
  };
  choose(null);
  return root;
}

/** Bars for names, the longest first: `rows` are `{label, value, note?, link?}`. */
export function bars(rows, format, empty) {
  if (rows.length === 0) return h("p", { class: "empty" }, empty);
  const highest = Math.max(...rows.map((row) => row.value), 1);
  return h(
    "ol",
    { class: "bars" },
    rows.map((row) => {
      const name = row.link ? h("a", { href: row.link }, row.label) : h("span", null, row.label);
      const bar = h("span", { class: "bar", "aria-hidden": "true", style: { width: `${(row.value / highest) * 100}%` } });
      return h("li", { title: row.label }, bar, h("span", { class: "name" }, name), h("span", { class: "value" }, format(row.value), row.note && h("small", null, row.note)));
    }),
  );
}

/** How much of a limit is used, as a bar. */
export function meter(label, used, limit, note) {
  const share = limit > 0 ? Math.min(used / limit, 1) : 1;
  const level = share >= 1 ? "full" : share >= 0.8 ? "near" : "";
  return h(
    "div",
    { class: `meter ${level}` },
    h("div", { class: "meter-text" }, h("span", null, label), h("span", { class: "value" }, `${used} of ${limit} used`)),
    h(
      "div",
      { class: "meter-track", role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": limit, "aria-valuenow": Math.min(used, limit), "aria-valuetext": `${used} of ${limit} used` },
      h("div", { class: "meter-fill", style: { width: `${share * 100}%` } }),
    ),
    note && h("small", { class: "quiet" }, note),
  );
}
