/** The loss, above the map and on the same axis. */

import { fitWidth, makeChart, moveCursor, renewChart, rescale } from "./chart.js";
import { fill, find, make } from "./dom.js";
import { geometry } from "./geometry.js";
import { tellLoss } from "./loss_words.js";
import { loadLossLine, lossLine } from "./measures.js";
import { facts } from "./payload.js";
import { state } from "./state.js";

const HEIGHT = 92;

let chart = null;

export const loadLoss = loadLossLine;

export function drawLoss() {
  const host = find("loss");
  const bands = ["low", "mean", "high"].map((band) => lossLine(band));
  if (!bands[1] && facts.loss) return; // of a run that is followed, it is on its way
  const lines = [
    { line: bands[0], color: "loss", band: true },
    { line: bands[2], color: "loss", band: true },
    { line: bands[1], color: "loss", width: 1.5 },
  ];
  if (chart && bands[1] && renewChart(chart, { lines, scale: state.curves })) return readLoss();
  chart?.destroy();
  chart = null;
  if (!bands[1]) return fill(host, make("p", { class: "note" }, "No loss was seen."));
  fill(host, make("div", { class: "loss-title" }, "loss ", make("b", { id: "loss-value" })));
  chart = makeChart(host, {
    lines,
    scale: state.curves,
    height: HEIGHT,
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
  const line = lossLine("mean");
  if (!line) return; // of a run that is followed, it is on its way
  const known = state.cursor ?? line.findLastIndex((value) => !Number.isNaN(value));
  find("loss-value").textContent = tellLoss(line, lossLine("low"), known);
}
