/** One side of a panel: the curves of one site in all runs. */

import { fitWidth, makeChart, moveCursor, rescale } from "./chart.js";
import { formatCount } from "./counts.js";
import { fill, make, sizeCanvas, themeColor } from "./dom.js";
import { formatNumber, formatShare } from "./format.js";
import { lineOf } from "./measures.js";
import { facts } from "./payload.js";
import { colorOf, dashOf, drawnRuns, makeKey } from "./runs.js";
import { state } from "./state.js";
import { columnCount, shownColumns, stepTicks } from "./steps.js";

const [CHART, AXIS, GUTTER] = [120, 18, 52];
const TITLES = { value: "value", grad: "gradient", update: "update" };

/** {element, mount, follow, resize, remove}: `mount` draws once the element is in the page. */
export function makeSide(part, series) {
  const charts = chartsOf(part, series).map((chart) => ({ ...chart, host: make("div", { class: "plot" }), value: make("span") }));
  const axis = make("canvas", { class: "side-axis", "aria-hidden": "true" });
  const element = make(
    "div",
    { class: "side" },
    make("h4", {}, TITLES[part]),
    ...charts.flatMap(({ title, host, value }) => [make("div", { class: "plot-title" }, `${title} `, value), host]),
    charts.length ? axis : make("p", { class: "note" }, "Nothing of it in the runs that are drawn."),
  );
  const read = () => charts.forEach(({ value, lines, print }) => fill(value, ...lines.map((each) => readLine(each, print))));
  const drawRest = () => charts.length && drawAxisOf(axis, axis.parentElement.clientWidth);
  return {
    element,
    mount() {
      for (const chart of charts) chart.plot = makeChart(chart.host, { ...chart, bad: badIn(series), height: CHART, gutter: () => GUTTER });
      drawRest();
      read();
    },
    follow(keys) {
      const rescaled = keys.has("zoom") || keys.has("range");
      for (const { plot } of charts) {
        if (rescaled) rescale(plot);
        moveCursor(plot);
      }
      if (rescaled) drawRest();
      read();
    },
    resize() {
      for (const { plot } of charts) fitWidth(plot);
      drawRest();
    },
    remove: () => charts.forEach(({ plot }) => plot?.destroy()),
  };
}

function chartsOf(part, series) {
  const charts = [
    { title: "rms", scale: state.curves, print: formatNumber, lines: linesOf("rms", series) },
    { title: "mean", scale: "linear", print: formatNumber, lines: linesOf("mean", series) },
    part === "update"
      ? { title: "update ratio", scale: state.curves, print: formatNumber, lines: linesOf("update_ratio", series) }
      : { title: "zeros share", scale: "share", print: formatShare, lines: linesOf("zero_share", series) },
  ];
  return charts.filter(({ lines }) => lines.length);
}

const linesOf = (name, series) =>
  drawnRuns().flatMap((number) => {
    const line = lineOf(`${name}-${number}`, "mean", series);
    return line ? [{ number, line, color: colorOf(number), dash: dashOf(number), width: 1.6 }] : [];
  });

/** Columns in which any of the drawn runs has elements that are not finite. */
function badIn(series) {
  const lines = drawnRuns().map((number) => lineOf(`nonfinite-${number}`, "high", series)).filter(Boolean);
  return lines.length ? Float32Array.from({ length: columnCount() }, (_, column) => Math.max(...lines.map((line) => line[column] || 0))) : null;
}

function readLine({ number, line }, print) {
  const column = state.cursor ?? line.findLastIndex((value) => !Number.isNaN(value));
  return makeKey(number, `${facts.runs[number].letter} ${print(line[column] ?? NaN)}`);
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
