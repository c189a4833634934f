/** The loss, above the map: the mean of each column, in the band of its extremes. */

import { find } from "./dom.js";
import { drawLossChart, followLossChart, readingColumn, resizeLossChart, printLoss } from "./loss_chart.js";
import { loadLossLine, lossLine } from "./measures.js";
import { facts } from "./payload.js";

const HEIGHT = 92;

export const loadLoss = loadLossLine;

export function drawLoss() {
  const [low, mean, high] = ["low", "mean", "high"].map((band) => lossLine(band));
  if (!mean && facts.loss) return; // of a run that is followed, it is on its way
  const band = { color: "loss", band: true };
  const lines = mean ? [{ line: low, ...band }, { line: high, ...band }, { line: mean, color: "loss", width: 1.5 }] : [];
  drawLossChart(lines, HEIGHT, "b");
  readLoss();
}

export const followLoss = (keys) => followLossChart(keys) && readLoss();

export const resizeLoss = resizeLossChart;

function readLoss() {
  const line = lossLine("mean");
  if (line) find("loss-value").textContent = printLoss(line, lossLine("low"), readingColumn(line));
}
