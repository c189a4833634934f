/** The curves in a panel of one run: which there are, and how they are read at the cursor. */

import { plural } from "./counts.js";
import { make } from "./dom.js";
import { printerOf } from "./format.js";
import { aboutOf, badOf, lineOf, statisticOf } from "./measures.js";
import { facts } from "./payload.js";
import { state } from "./state.js";

/** What stands behind the title of a side. */
export function sizeNote(series) {
  const elements = facts.elements[series];
  return make("span", { class: "note" }, elements ? ` ${plural(elements, "element")}` : "");
}

/** Columns with elements that are not finite. */
export const badIn = badOf;

export function chartsOf(part, series) {
  const charts = [
    { title: "rms", about: `${aboutOf("rms")} Dashed: the standard deviation. Thin: the largest |x|.`, scale: state.curves, lines: [...extraLines(series), ...bandLines("rms", part, series)] },
    { title: "mean", about: aboutOf("mean"), scale: "linear", lines: bandLines("mean", part, series) },
    part === "update"
      ? { title: "update ratio", about: aboutOf("update_ratio"), scale: state.curves, lines: bandLines("update_ratio", part, series) }
      : { title: "share of zeros", about: aboutOf("zero_share"), scale: "share", lines: bandLines("zero_share", part, series) },
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

/** What a chart says at the cursor, or at the last number. */
export function readChart({ lines }) {
  const main = lines.at(-1);
  const column = state.cursor ?? main.line.findLastIndex((value) => !Number.isNaN(value));
  const print = printerOf(statisticOf(main.name));
  const said = lines
    .filter(({ band }) => !band)
    .toReversed()
    .map(({ name, line }) => `${name === main.name ? "" : `${name} `}${print(line[column] ?? NaN)}`);
  return [make("b", {}, said.join("  ·  "))];
}
