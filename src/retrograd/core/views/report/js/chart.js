/** One small chart of curves over steps, drawn by uPlot and linked to the map: same zoom, same cursor. */

import { themeColor } from "./dom.js";
import { formatPercent, formatTick } from "./format.js";
import { quantile, sortNumbers } from "./scale.js";
import { change, state } from "./state.js";
import { columnCount, shownColumns } from "./steps.js";

const TINY = 1e-320; // stands for zero on a log scale: below every range, so the line falls off the chart

/** The axis of the map: a column is one wide. `ticks`: null where none are drawn. */
export const STEPS = {
  places: () => Float64Array.from({ length: columnCount() }, (_, column) => column + 0.5),
  range() {
    const [from, to] = shownColumns();
    return [from, to + 1];
  },
  columnAt: (x) => Math.floor(x),
  placeOf: (column) => column + 0.5,
  isEven: true,
  ticks: null,
};

/**
 * `lines`: [{line, color, band, dash, width, faint, sparse}]: a Float32Array each; each two marked `band` are filled
 * between; `sparse` ones are drawn across columns without a number. `bad`: columns to mark. `scale`: "log", "linear" or
 * "share". `gutter`, `right`: functions that give the room for labels at the left and the margin at the right. `axis`:
 * where columns are. `print`: of numbers beside the chart.
 */
export function makeChart(host, { lines, bad, scale, height, gutter, right = () => 8, axis = STEPS, print = formatTick }) {
  const shown = { lines, bad, scale, axis, print: scale === "share" ? formatPercent : print, logarithmic: isLogarithmic(lines, scale) };
  const { logarithmic } = shown;
  const options = {
    width: Math.max(host.clientWidth, 80),
    height,
    padding: [6, right, 4, 0],
    legend: { show: false },
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
    select: { show: true },
    scales: {
      x: { time: false, range: () => axis.range() },
      y: { distr: logarithmic ? 3 : 1, range: () => fitRange(shown.lines, logarithmic, scale) },
    },
    axes: [
      makeTicks(axis),
      {
        size: gutter, // computed again at every change of size
        gap: 6,
        font: "11px system-ui, sans-serif",
        stroke: () => themeColor("muted"),
        grid: { stroke: () => themeColor("line"), width: 1 },
        ticks: { show: false },
        splits: (u, axis, low, high) => (logarithmic ? logTicks(low, high) : linearTicks(low, high)),
        values: (u, ticks) => ticks.map(scale === "share" ? formatPercent : print),
        filter: (u, ticks) => ticks,
      },
    ],
    series: [{}, ...lines.map(makeSeries)],
    bands: makeBands(lines),
    hooks: { drawClear: [(u) => markBad(u, shown)], draw: [(u) => markOutside(u, shown), moveCursor], setCursor: [tellCursor], setSelect: [tellZoom] },
  };
  const plot = new uPlot(options, pointsOf(shown), host);
  charts.set(plot, shown);
  return plot;
}

const charts = new WeakMap(); // uPlot → what it shows

/** Labels of a chart's own axis, below it. */
function makeTicks({ ticks }) {
  if (!ticks) return { show: false };
  return {
    size: 22,
    gap: 3,
    font: "11px system-ui, sans-serif",
    stroke: () => themeColor("muted"),
    grid: { show: false },
    ticks: { stroke: () => themeColor("muted"), width: 1, size: 4 },
    splits: (u) => ticks(u.width).map(({ place }) => place),
    values: (u) => ticks(u.width).map(({ text }) => text),
    filter: (u, splits) => splits,
  };
}

const isLogarithmic = (lines, scale) => scale === "log" && lines.some(({ line }) => line.some((value) => value > 0));

/** Show newer numbers of the same lines; false where the chart has to be made again. */
export function renewChart(plot, { lines, bad, scale }) {
  const shown = charts.get(plot);
  const isSame = (line, i) => ["name", "color", "band", "faint", "sparse"].every((key) => line[key] === shown.lines[i][key]);
  const isFit = scale === shown.scale && isLogarithmic(lines, scale) === shown.logarithmic;
  if (!isFit || lines.length !== shown.lines.length || !lines.every(isSame)) return false;
  Object.assign(shown, { lines, bad });
  plot.setData(pointsOf(shown));
  return true;
}

function pointsOf({ lines, axis, logarithmic }) {
  return [axis.places(), ...lines.map(({ line }) => Array.from(line, (value) => toPoint(value, logarithmic)))];
}

function toPoint(value, logarithmic) {
  if (!Number.isFinite(value)) return null;
  return logarithmic && value <= 0 ? TINY : value;
}

const paleColor = (color, share) => `color-mix(in srgb, ${themeColor(color)} ${share}%, transparent)`;

function makeSeries({ color, band, dash, faint, sparse, width = 1.4 }) {
  return {
    stroke: () => (band ? "transparent" : faint ? paleColor(color, 38) : themeColor(color)),
    width: band ? 0 : width,
    dash,
    spanGaps: Boolean(sparse),
    points: { show: (u, i, from, to) => !band && !faint && (to - from < 40 || Boolean(sparse)), size: 4, filter: band ? null : keepLonely },
  };
}

/** Points to mark where many are drawn: those without a neighbour, which no line shows. */
function keepLonely(u, i, show) {
  if (show) return null;
  const values = u.data[i];
  return [...values.keys()].filter(
    (k) => values[k] !== null && (values[k - 1] ?? null) === null && (values[k + 1] ?? null) === null,
  );
}

function makeBands(lines) {
  const edges = lines.flatMap(({ band }, i) => (band ? [i + 1] : []));
  return Array.from({ length: edges.length >> 1 }, (_, k) => ({
    series: [edges[2 * k + 1], edges[2 * k]],
    fill: () => paleColor(lines[edges[2 * k] - 1].color, 26),
  }));
}

/** Range of y: what is in view, without its outermost hundredth unless the full range is wanted. */
function fitRange(lines, logarithmic, scale) {
  const [from, to] = shownColumns();
  let sorted = sortNumbers(
    lines.map(({ line }) => line),
    from,
    to,
  );
  if (logarithmic) sorted = sorted.subarray(sorted.findIndex((value) => value > 0));
  if (sorted.length === 0) return logarithmic ? [0.1, 1] : [0, 1];
  const cut = state.range === "view" ? 0.01 : 0;
  const [low, high] = [quantile(sorted, cut), quantile(sorted, 1 - cut)];
  if (logarithmic) return low < high ? [low / (high / low) ** 0.08, high * (high / low) ** 0.08] : [low / 2, high * 2];
  const margin = (high - low || Math.abs(high) || 1) * 0.08;
  return scale === "share" ? [Math.max(0, low - margin), Math.min(1, high + margin)] : [low - margin, high + margin];
}

/** Powers of ten; with few of them in range also their double and fivefold. */
export function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const factors = decades < 1 ? [1, 2, 3, 5] : decades < 2 ? [1, 3] : [1];
  const stride = Math.max(1, Math.ceil(decades / 4));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    if (power % stride) continue;
    ticks.push(...factors.map((factor) => Number(`${factor}e${power}`)).filter((tick) => tick >= low && tick <= high));
  }
  return ticks.length > 1 ? ticks : linearTicks(low, high);
}

export function linearTicks(low, high) {
  const rough = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const ticks = [];
  for (let k = Math.ceil(low / unit); k * unit <= high; k++) ticks.push(Number((k * unit).toPrecision(12)));
  return ticks;
}

function markBad(u, { bad, axis }) {
  if (!bad) return;
  const { top, height } = u.bbox;
  const [from, to] = shownColumns();
  const width = Math.max(2, axis.isEven ? u.bbox.width / (to - from + 1) : 2 * devicePixelRatio);
  u.ctx.save();
  u.ctx.fillStyle = themeColor("bad");
  u.ctx.globalAlpha = 0.45;
  for (let column = from; column <= to; column++) {
    if (bad[column] > 0) u.ctx.fillRect(u.valToPos(axis.placeOf(column), "x", true) - width / 2, top, width, height);
  }
  u.ctx.restore();
}

/** Arrows at the edge where a line leaves the range; the furthest of either side says its value. */
function markOutside(u, { lines, axis, print, logarithmic }) {
  const { ctx, bbox } = u;
  const { min, max } = u.scales.y;
  const [from, to] = shownColumns();
  const size = 4 * devicePixelRatio;
  ctx.save();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.fillStyle = themeColor("ink");
  for (const [edge, way, isOut] of [[bbox.top, 1, (value) => value > max], [bbox.top + bbox.height, -1, (value) => value < min]]) {
    let [furthest, at, before] = [null, 0, -Infinity];
    for (let column = from; column <= to; column++) {
      const out = lines.map(({ line }) => line[column]).filter((value) => Number.isFinite(value) && isOut(value) && !(logarithmic && value <= 0));
      if (!out.length) continue;
      const value = out.reduce((a, b) => (way * b > way * a ? b : a));
      const x = u.valToPos(axis.placeOf(column), "x", true);
      if (furthest === null || way * value > way * furthest) [furthest, at] = [value, x];
      if (x - before < 2 * size) continue;
      before = x;
      ctx.beginPath();
      ctx.moveTo(x, edge);
      ctx.lineTo(x - size, edge + way * size * 1.5);
      ctx.lineTo(x + size, edge + way * size * 1.5);
      ctx.fill();
    }
    if (furthest === null) continue;
    const isRight = at > bbox.left + bbox.width * 0.8;
    ctx.textAlign = isRight ? "right" : "left";
    ctx.textBaseline = way > 0 ? "top" : "bottom";
    ctx.fillText(print(Number(furthest.toPrecision(3))), at + (isRight ? -2 : 2) * size, edge);
  }
  ctx.restore();
}

const columnUnder = (u, x) => Math.max(0, Math.min(columnCount() - 1, charts.get(u).axis.columnAt(u.posToVal(x, "x"))));

function tellCursor(u) {
  if (!u.over.matches(":hover")) return;
  const { left } = u.cursor;
  change({ cursor: left < 0 ? null : columnUnder(u, left), held: false });
}

function tellZoom(u) {
  const { left, width } = u.select;
  if (width > 4) change({ zoom: [left, left + width].map((x) => columnUnder(u, x)) });
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
}

/** Show the cursor of the page in a chart. */
export function moveCursor(u) {
  const left = state.cursor === null || !charts.has(u) ? -10 : u.valToPos(charts.get(u).axis.placeOf(state.cursor), "x");
  u.setCursor({ left, top: 1 }, false);
}

export const rescale = (u) => u.setData(u.data);

export const fitWidth = (u) => u.setSize({ width: Math.max(u.root.parentElement.clientWidth, 80), height: u.height });
