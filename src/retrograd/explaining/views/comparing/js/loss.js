/** The losses of all runs over each other, above the map. */

import { fill, find } from "./dom.js";
import { drawLossChart, followLossChart, readingColumn, resizeLossChart, printLoss } from "./loss_chart.js";
import { STATISTICS, lineOf, loadStatistics } from "./measures.js";
import { facts } from "./payload.js";
import { colorOf, dashOf, drawnRuns, makeKey } from "./runs.js";

const lossOf = (number, band) => lineOf(`loss-${number}`, band, 0);
const knownRuns = () => drawnRuns().filter((number) => lossOf(number, "mean"));

export const loadLoss = () => loadStatistics(STATISTICS.map(({ name }) => name).filter((name) => name.startsWith("loss-")));

export function drawLoss() {
  const known = knownRuns();
  const lines = known.map((number) => ({ line: lossOf(number, "mean"), color: colorOf(number), dash: dashOf(number), width: 1.6 }));
  drawLossChart(lines, Math.max(110, 30 + 20 * known.length), "div");
  if (known.length) readLoss();
}

export const followLoss = (keys) => followLossChart(keys) && readLoss();

export const resizeLoss = resizeLossChart;

function readLoss() {
  const keys = knownRuns().map((number) => {
    const line = lossOf(number, "mean");
    return makeKey(number, `${facts.runs[number].letter} ${printLoss(line, lossOf(number, "low"), readingColumn(line))}`);
  });
  fill(find("loss-value"), ...keys);
}
