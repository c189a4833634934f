/** One side of a panel: the curves and the histogram of one site. */

import { fitWidth, makeChart, moveCursor, rescale } from "./chart.js";
import { formatCount, plural } from "./counts.js";
import { make, sizeCanvas, themeColor } from "./dom.js";
import { gradientOf } from "./colors.js";
import { drawExponents, histogramOf, powerOfTwo, sharePalette } from "./exponents.js";
import { formatShare, printerOf } from "./format.js";
import { badOf, lineOf, statisticOf } from "./measures.js";
import { facts } from "./payload.js";
import { change, state } from "./state.js";
import { columnCount, shownColumns, stepTicks } from "./steps.js";

const [CHART, HISTOGRAM, AXIS, GUTTER] = [104, 120, 18, 52];
const TITLES = { value: "value", grad: "gradient", update: "update" };

/** {element, mount, follow, resize}: `mount` draws once the element is in the page. */
export function makeSide(part, series) {
  const charts = chartsOf(part, series).map((chart) => ({
    ...chart,
    host: make("div", { class: "plot" }),
    value: make("b"),
  }));
  const histogram = makeHistogram(series);
  const axis = make("canvas", { class: "side-axis", "aria-hidden": "true" });
  const element = make(
    "div",
    { class: `side ${part}` },
    make("h4", {}, make("i", { class: "dot" }), TITLES[part], sizeNote(series)),
    ...charts.flatMap(({ title, host, value }) => [make("div", { class: "plot-title" }, `${title} `, value), host]),
    ...(histogram ? histogram.elements : []),
    axis,
  );
  const read = () => charts.forEach(({ value, lines }) => (value.textContent = readLines(lines)));
  const drawRest = () => {
    histogram?.draw();
    drawAxisOf(axis, axis.parentElement.clientWidth);
  };
  return {
    element,
    mount() {
      for (const chart of charts)
        chart.plot = makeChart(chart.host, { ...chart, bad: badOf(series), height: CHART, gutter: () => GUTTER });
      drawRest();
      histogram?.follow();
      read();
    },
    follow(keys) {
      const rescaled = keys.has("zoom") || keys.has("range");
      for (const { plot } of charts) {
        if (rescaled) rescale(plot);
        moveCursor(plot);
      }
      if (rescaled) drawRest();
      histogram?.follow();
      read();
    },
    resize() {
      for (const { plot } of charts) fitWidth(plot);
      drawRest();
    },
    remove: () => charts.forEach(({ plot }) => plot?.destroy()),
  };
}

function sizeNote(series) {
  const elements = facts.elements[series];
  return make("span", { class: "note" }, elements ? ` ${plural(elements, "element")}` : "");
}

function chartsOf(part, series) {
  const charts = [
    { title: "rms", scale: state.curves, lines: [...extraLines(series), ...bandLines("rms", part, series)] },
    { title: "mean", scale: "linear", lines: bandLines("mean", part, series) },
    part === "update"
      ? { title: "update ratio", scale: state.curves, lines: bandLines("update_ratio", part, series) }
      : { title: "zeros share", scale: "share", lines: bandLines("zero_share", part, series) },
  ];
  return charts.filter(({ lines }) => lines.length);
}

/** The curve of a statistic, with a band from smallest to largest where columns hold several steps. */
function bandLines(name, color, series) {
  const middle = lineOf(name, "mean", series);
  if (!middle) return [];
  const lines = [{ name, line: middle, color, width: 1.6 }];
  if (facts.columns.width === 1) return lines;
  const edges = ["low", "high"].map((band) => ({
    name: `${name} ${band}`,
    line: lineOf(name, band, series),
    color,
    band: true,
  }));
  return [...edges, ...lines];
}

/** Beside rms: the standard deviation and, where the scale leaves room for it, the largest magnitude. */
function extraLines(series) {
  const std = lineOf("std", "mean", series);
  const largest = state.curves === "log" ? lineOf("abs_max", "high", series) : null;
  return [
    largest && { name: "|max|", line: largest, color: "muted", width: 1 },
    std && { name: "std", line: std, color: "ink", width: 1, dash: [2, 3] },
  ].filter(Boolean);
}

function readLines(lines) {
  const main = lines.at(-1);
  const column = state.cursor ?? main.line.findLastIndex((value) => !Number.isNaN(value));
  const print = printerOf(statisticOf(main.name));
  return lines
    .filter(({ band }) => !band)
    .toReversed()
    .map(({ name, line }) => `${name === main.name ? "" : `${name} `}${print(line[column] ?? NaN)}`)
    .join("  ·  ");
}

function makeHistogram(series) {
  const histogram = histogramOf(series);
  if (!histogram) return null;
  const canvas = make("canvas", {
    class: "exponents",
    role: "img",
    "aria-label": "histogram of binary exponents over steps",
  });
  const cross = make("i", { class: "cross" });
  const value = make("b");
  let probe = () => null;
  const width = () => canvas.parentElement.parentElement.clientWidth;
  const columnAt = (x) => {
    const [from, to] = shownColumns();
    return Math.max(from, Math.min(to, Math.floor(from + ((x - GUTTER) / (width() - GUTTER - 8)) * (to - from + 1))));
  };
  canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
    const found = probe(offsetX, offsetY);
    value.textContent = found ? `${powerOfTwo(found.exponent)}: ${formatShare(found.share)}` : "";
    change({ cursor: offsetX < GUTTER ? null : columnAt(offsetX) });
  });
  canvas.addEventListener("pointerleave", () => change({ cursor: null }));
  return {
    elements: [
      make("div", { class: "plot-title split" }, make("span", {}, "exponents of |x| ", value), makeShareKey()),
      make("div", { class: "stack" }, canvas, cross),
    ],
    draw: () => (probe = drawExponents(canvas, histogram, width(), HISTOGRAM, GUTTER)),
    follow() {
      const [from, to] = shownColumns();
      cross.hidden = state.cursor === null || state.cursor < from || state.cursor > to;
      cross.style.left = `${GUTTER + ((state.cursor + 0.5 - from) / (to - from + 1)) * (width() - GUTTER - 8)}px`;
    },
  };
}

/** What the colours of a histogram mean. */
function makeShareKey() {
  const bar = make("i", { class: "bar" });
  bar.style.background = gradientOf(sharePalette());
  return make(
    "span",
    { class: "key", title: "share of the finite, non-zero elements" },
    powerOfTwo(facts.exponents.smallest),
    bar,
    "all",
  );
}

function drawAxisOf(canvas, width) {
  const context = sizeCanvas(canvas, width, AXIS);
  const [from, to] = shownColumns();
  const plot = width - GUTTER - 8;
  context.fillStyle = themeColor("muted");
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  for (const { step, column } of stepTicks(from, Math.min(to, columnCount() - 1), plot / 80)) {
    const x = GUTTER + ((column - from) / (to - from + 1)) * plot;
    context.fillRect(Math.round(x), 0, 1, 3);
    if (x < width - 10) context.fillText(formatCount(step), Math.max(GUTTER, Math.min(x, width - 18)), 14);
  }
}
