/** Losses of several runs over each other. A curve has the first step, how many steps share a value, and the values. */

import { fill, make } from "./dom.js";
import { formatCount } from "./counts.js";

const SPACE = ["http:", "", "www.w3.org", "2000", "svg"].join("/"); // the name of SVG, nothing that is loaded
const LEFT = 54;
const BOTTOM = 22;
const NEAR = 40; // pixels from the cursor to the line that is meant

export function draw(tag, properties = {}, ...children) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(properties)) if (value !== null) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function printShort(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "-∞";
  const rounded = Number(value.toPrecision(4));
  return Math.abs(rounded) < 1e7 ? String(rounded) : rounded.toExponential();
}

/** Mean with what was before, where each value counts `share` of the one after it; without a pull to zero at the start. */
export function smooth(values, share) {
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    [sum, weight] = [sum * share + value, weight * share + 1];
    return sum / weight;
  });
}

/** Round numbers between two, some five of them; of a logarithmic axis powers of ten, or parts of one. */
export function findTicks(low, high, isLog) {
  if (isLog) {
    const powers = Array.from({ length: Math.floor(Math.log10(high)) - Math.floor(Math.log10(low)) + 1 }, (_, i) => 10 ** (Math.floor(Math.log10(low)) + i));
    const steps = powers.length > 3 ? [1] : [1, 2, 5];
    const every = Math.ceil(powers.length / 6);
    const found = powers.filter((_, i) => i % every === 0).flatMap((power) => steps.map((step) => step * power)).filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    if (found.length > 1) return found;
  }
  const raw = (high - low) / 5 || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((each) => each * power >= raw) * power;
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, i) => (first + i) * step);
}

/** From numbers to a share of the axis, 0 to 1. */
export function makeAxis(numbers, isLog) {
  const known = numbers.filter((number) => Number.isFinite(number) && (!isLog || number > 0));
  let [low, high] = known.length ? [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))] : [isLog ? 0.1 : 0, 1];
  if (low === high) [low, high] = isLog ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  const at = isLog ? Math.log : (value) => value;
  return { low, high, isLog, of: (value) => (at(value) - at(low)) / (at(high) - at(low)), ticks: findTicks(low, high, isLog) };
}

/** Without the largest 2 % where they take more than half of a logarithmic axis, as those of runs that diverge. */
function leaveOut(numbers) {
  const most = numbers.toSorted((a, b) => a - b)[Math.floor(numbers.length * 0.98)];
  return makeAxis(numbers, true).of(most) < 0.5 ? numbers.filter((number) => number <= most) : numbers;
}

/**
 * Draw lines into an element: each with a `name`, a `curve`, a `color`, and if need be a `dash`.
 * `point(name or null)` is called with the run that is pointed at, `choose(name)` with the one that is clicked.
 */
export function drawOverlay(host, lines, { isLog, share = 0, height = 240, about, point = () => {}, choose = () => {} }) {
  const width = Math.max(host.clientWidth, 220);
  const shown = lines
    .filter(({ curve }) => curve?.values.length)
    .map((line) => ({ ...line, values: smooth(line.curve.values, share), stepOf: (place) => line.curve.first + (place + 0.5) * line.curve.width - 0.5 }));
  const numbers = shown.flatMap(({ values }) => values.filter(Number.isFinite));
  const usual = isLog ? leaveOut(numbers) : numbers;
  const y = makeAxis(usual, isLog);
  const x = makeAxis(shown.flatMap(({ curve, values }) => [curve.first, curve.first + values.length * curve.width - 1]), false);
  const left = (step) => LEFT + x.of(step) * (width - LEFT - 12);
  const top = (value) => 8 + (1 - y.of(value)) * (height - 8 - BOTTOM);
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": about });
  for (const tick of y.ticks) svg.append(draw("line", { class: "grid", x1: LEFT, x2: width - 12, y1: top(tick), y2: top(tick) }), draw("text", { x: LEFT - 6, y: top(tick) + 4, "text-anchor": "end" }, printShort(tick)));
  for (const tick of x.ticks.filter(Number.isInteger)) svg.append(draw("text", { x: left(tick), y: height - 5, "text-anchor": x.of(tick) > 0.97 ? "end" : "middle" }, formatCount(tick)));
  for (const line of shown) {
    let isOn = false;
    let path = "";
    for (const [place, value] of line.values.entries()) {
      const isThere = value !== null && (!isLog || value > 0);
      if (isThere) path += `${isOn ? "L" : "M"}${left(line.stepOf(place)).toFixed(1)},${top(value).toFixed(1)}`;
      isOn = isThere;
    }
    line.path = draw("path", { class: "curve", d: path || "M0,0", stroke: line.color, "stroke-dasharray": line.dash ?? null });
    svg.append(line.path);
  }
  const idle = `Point at a line to read it.${usual.length < numbers.length ? ` Losses above ${printShort(y.high)} are left out.` : ""}`;
  const reading = make("p", { class: "note reading-line", "aria-live": "off" }, shown.length ? idle : "No loss is known of these runs.");
  let hot = null;
  const heat = (name) => {
    hot = name;
    for (const line of shown) {
      line.path.classList.toggle("hot", line.name === name);
      line.path.classList.toggle("cold", name !== null && line.name !== name);
    }
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    for (const line of shown) {
      const place = Math.round((x.low + ((px - LEFT) / (width - LEFT - 12)) * (x.high - x.low) + 0.5 - line.curve.first) / line.curve.width - 0.5);
      const value = line.values[place];
      if (value === undefined || value === null || (isLog && value <= 0)) continue;
      const distance = Math.abs(top(value) - py);
      if (distance < NEAR && (!best || distance < best.distance)) best = { line, place, value, distance };
    }
    fill(reading, best ? `${best.line.name}: ${printShort(best.value)} at step ${formatCount(Math.floor(best.line.stepOf(best.place)))}` : idle);
    heat(best?.line.name ?? null);
    point(hot);
  });
  svg.addEventListener("pointerleave", () => {
    heat(null);
    point(null);
  });
  svg.addEventListener("click", () => hot && choose(hot));
  fill(host, svg, reading);
  return heat;
}

/** A small picture of a curve, on a logarithmic scale where it can be; red where a value is not finite. */
export function drawSparkline(curve, width = 96, height = 22) {
  const { values } = curve;
  const isLog = values.every((value) => value === null || value > 0);
  const axis = makeAxis(values.filter((value) => value !== null), isLog);
  const left = (place) => 1 + (place / Math.max(values.length - 1, 1)) * (width - 2);
  let path = "";
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "sparkline", "aria-hidden": "true" });
  for (const [place, value] of values.entries()) {
    if (value === null) svg.append(draw("rect", { class: "gap", x: left(place) - 0.5, y: height - 4, width: Math.max(1, width / values.length), height: 3 }));
    else path += `${place && values[place - 1] !== null ? "L" : "M"}${left(place).toFixed(1)},${(2 + (1 - axis.of(value)) * (height - 4)).toFixed(1)}`;
  }
  if (path) svg.append(draw("path", { d: values.length > 1 ? path : `${path}h2` }));
  return svg;
}
