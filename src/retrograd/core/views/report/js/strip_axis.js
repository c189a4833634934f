/** Along which axis scalars are drawn: steps, as the map is, or epochs, or the time since the start. */

import { STEPS } from "./chart.js";
import { formatCount } from "./counts.js";
import { formatTick } from "./format.js";
import { scalarLine } from "./measures.js";
import { facts } from "./payload.js";
import { state } from "./state.js";
import { columnCount, shownColumns, stepTicks } from "./steps.js";

const SPACE = 90; // pixels of a label
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

const epochNumber = () => facts.scalars.listed.findIndex(({ name }) => name === "epoch");
const lineOf = (key) => (key === "time" ? scalarLine(facts.scalars.listed.length) : epochNumber() < 0 ? null : scalarLine(epochNumber()));

/** Axes that can be chosen: those of which there are numbers. */
export const listAxes = () =>
  [["step", "steps"], ["epoch", "epochs"], ["time", "wall time"]].filter(([key]) => key === "step" || lineOf(key)?.some(Number.isFinite));

export const axisKey = () => (listAxes().some(([key]) => key === state.x) ? state.x : "step");

/** The axis that is chosen; with labels where the chart is the last of the strip. */
export function makeAxis(isLast) {
  const key = axisKey();
  if (key === "step") return { ...STEPS, ticks: isLast ? listStepTicks : null };
  const at = placesOf(key);
  return {
    places: () => placesOf(key),
    range() {
      const [[from, to], places] = [shownColumns(), placesOf(key)];
      const [low, high] = [places[from], places[to]];
      return low < high ? [low, high] : [low - 0.5, low + 0.5];
    },
    columnAt: (x) => nearest(placesOf(key), x),
    placeOf: (column) => placesOf(key)[column] ?? at.at(-1),
    isEven: false,
    ticks: isLast ? (width) => listTicks(key, width) : null,
  };
}

let known = { line: null, count: 0, places: null };

/** Where columns are: rising, also where the line has no number or goes back. */
function placesOf(key) {
  const line = lineOf(key);
  if (known.key === key && known.line === line && known.last === line.at(-1)) return known.places;
  const places = spread(fillGaps(line));
  known = { key, line, last: line.at(-1), places };
  return places;
}

function fillGaps(line) {
  const places = new Float64Array(line.length).fill(NaN);
  let [before, highest] = [-1, -Infinity];
  for (let i = 0; i < line.length; i++) {
    if (!Number.isFinite(line[i])) continue;
    highest = Math.max(highest, line[i]);
    const start = before < 0 ? highest : places[before];
    for (let k = before + 1; k <= i; k++) places[k] = start + ((k - before) / (i - before)) * (highest - start);
    before = i;
  }
  return places.fill(highest, before + 1);
}

/** Columns of one whole epoch lie between it and the next. */
function spread(places) {
  let [start, long] = [0, 1];
  for (let i = 1; i <= places.length; i++) {
    if (places[i] === places[start]) continue;
    const isLast = i === places.length;
    const width = isLast ? Math.max(long, i - start) : i - start;
    const rise = isLast ? 1 : places[i] - places[start];
    for (let k = i - 1; k > start && i - start > 1; k--) places[k] += ((k - start) / width) * rise;
    [start, long] = [i, width];
  }
  return places;
}

function nearest(places, x) {
  let [low, high] = [0, places.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((places[middle] + places[middle + 1]) / 2 < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

function listStepTicks(width) {
  const [from, to] = shownColumns();
  return columnCount() ? stepTicks(from, to, width / SPACE).map(({ step, column }) => ({ place: column, text: formatCount(step) })) : [];
}

function listTicks(key, width) {
  const [[from, to], places] = [shownColumns(), placesOf(key)];
  const [low, high] = [places[from], places[to]];
  const [size, unit] = key === "time" ? (UNITS.find(([each]) => high >= 2 * each) ?? [1, "s"]) : [1, ""];
  const rough = (high - low) / size / Math.max(width / SPACE, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const stride = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const ticks = [];
  for (let k = Math.ceil(low / size / stride); k * stride * size <= high; k++) {
    const value = Number((k * stride).toPrecision(12));
    ticks.push({ place: value * size, text: `${formatTick(value)}${unit && ` ${unit}`}` });
  }
  return ticks;
}

/** Where a column is on an axis, in words; empty where that is not known. */
export function nameOnAxis(key, column) {
  const value = lineOf(key)?.[column];
  if (!Number.isFinite(value)) return "";
  if (key === "epoch") return `epoch ${formatTick(Number(value.toPrecision(4)))}`;
  const [size, unit] = UNITS.find(([each]) => value >= 2 * each) ?? [1, "s"];
  return `${Number((value / size).toPrecision(3))} ${unit}`;
}
