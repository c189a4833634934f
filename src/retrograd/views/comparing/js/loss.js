/** The losses of all runs over each other, above the map and on the same axis. */

import { fitWidth, makeChart, moveCursor, rescale } from "./chart.js";
import { fill, find, make } from "./dom.js";
import { geometry } from "./geometry.js";
import { tellLoss } from "./loss_words.js";
import { STATISTICS, lineOf, loadStatistics } from "./measures.js";
import { facts } from "./payload.js";
import { colorOf, dashOf, drawnRuns, makeKey } from "./runs.js";
import { state } from "./state.js";

let chart = null;

const lossOf = (number, band) => lineOf(`loss-${number}`, band, 0);

export const loadLoss = () => loadStatistics(STATISTICS.map(({ name }) => name).filter((name) => name.startsWith("loss-")));

export function drawLoss() {
  const host = find("loss");
  const known = drawnRuns().filter((number) => lossOf(number, "mean"));
  chart?.destroy();
  chart = null;
  if (!known.length) return fill(host, make("p", { class: "note" }, "No loss was seen."));
  fill(host, make("div", { class: "loss-title" }, "loss ", make("div", { id: "loss-value" })));
  chart = makeChart(host, {
    lines: known.map((number) => ({ line: lossOf(number, "mean"), color: colorOf(number), dash: dashOf(number), width: 1.6 })),
    scale: state.curves,
    height: Math.max(110, 30 + 20 * known.length),
    gutter: () => geometry.gutter,
    right: () => geometry.right,
  });
  readLoss();
}

export function followLoss(keys) {
  if (!chart) return;
  if (keys.has("zoom") || keys.has("range")) rescale(chart);
  moveCursor(chart);
  readLoss();
}

export const resizeLoss = () => chart && fitWidth(chart);

function readLoss() {
  const keys = drawnRuns().flatMap((number) => {
    const line = lossOf(number, "mean");
    if (!line) return [];
    const column = state.cursor ?? line.findLastIndex((value) => !Number.isNaN(value));
    return [makeKey(number, `${facts.runs[number].letter} ${tellLoss(line, lossOf(number, "low"), column)}`)];
  });
  fill(find("loss-value"), ...keys);
}
