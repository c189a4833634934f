/** A chart of losses above the map, on the same axis; which lines it has, and how they are read, is up to the page's `loss.js`. */

import { fitWidth, makeChart, moveCursor, renewChart, rescale } from "./chart.js";
import { formatCount } from "./counts.js";
import { fill, find, make } from "./dom.js";
import { formatNumber } from "./format.js";
import { geometry } from "./geometry.js";
import { facts } from "./payload.js";
import { state } from "./state.js";

let chart = null;

/** Draw these lines, none where no loss was seen; `tag` is that of the element beside them, `loss-value`. */
export function drawLossChart(lines, height, tag) {
  if (chart && lines.length && renewChart(chart, { lines, scale: state.curves })) return;
  chart?.destroy();
  chart = null;
  if (!lines.length) return fill(find("loss"), make("p", { class: "note" }, "No loss was recorded."));
  fill(find("loss"), make("div", { class: "loss-title" }, "loss ", make(tag, { id: "loss-value" })));
  chart = makeChart(find("loss"), {
    lines,
    scale: state.curves,
    height,
    gutter: () => geometry.gutter,
    right: () => geometry.right,
  });
}

/** Take over the steps in view and the cursor; returns whether there is a chart to be read. */
export function followLossChart(keys) {
  if (!chart) return false;
  if (keys.has("zoom") || keys.has("range")) rescale(chart);
  moveCursor(chart);
  return true;
}

export const resizeLossChart = () => chart && fitWidth(chart);

/** The column at which a line is read: that of the cursor, else that of its last number. */
export const readingColumn = (line) => state.cursor ?? line.findLastIndex((value) => !Number.isNaN(value));

/** A loss that is not finite is said to be so, and since when. */
export function printLoss(line, low, column) {
  if (line[column] !== Infinity) return formatNumber(line[column] ?? NaN);
  let since = column;
  while (since > 0 && !Number.isFinite(line[since - 1])) since -= 1;
  const word = Number.isNaN(low[column]) ? "NaN" : "not finite";
  return `${word} since step ${formatCount(facts.columns.first[since])}`;
}
