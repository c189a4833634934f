/** The curves in a panel of one run: which there are, and how they are read at the cursor. */

import { plural } from "./counts.js";
import { make } from "./dom.js";
import { printerOf } from "./format.js";
import { aboutOf, badOf, lineOf, statisticOf } from "./measures.js";
import { facts } from "./payload.js";
import { state } from "./state.js";

/** What stands behind the title of a side. */
export function sizeNote(series) {
  const elements = Array.isArray(series) ? 0 : facts.elements[series];
  const shape = facts.places.find((place) => Object.values(place.series).includes(series))?.shape;
  return make("span", { class: "note" }, [elements ? ` ${plural(elements, "element")}` : "", shape].filter(Boolean).join(": "));
}

/** Columns with elements that are not finite. */
export const badIn = (series) => {
  if (!Array.isArray(series)) return badOf(series);
  const lines = series.map((each) => badOf(each.series)).filter(Boolean);
  return lines.length ? lines[0].map((_, column) => Math.max(...lines.map((line) => line[column] || 0))) : null;
};

/** Of a list of series, [{series, letter, color, dash}], all lines are drawn over each other. */
export function chartsOf(part, series) {
  const charts = [
    { title: "rms", about: aboutOf("rms"), scale: state.curves, lines: [...extraLines(series), ...bandLines("rms", part, series)] },
    { title: "mean", about: aboutOf("mean"), scale: "linear", lines: bandLines("mean", part, series) },
    part === "update"
      ? { title: "update ratio", about: aboutOf("update_ratio"), scale: state.curves, lines: bandLines("update_ratio", part, series) }
      : { title: "share of zeros", about: aboutOf("zero_share"), scale: "share", lines: bandLines("zero_share", part, series) },
  ];
  return charts.filter(({ lines }) => lines.length);
}

/** The curve of a statistic, with a band from smallest to largest where columns hold several steps. */
function bandLines(name, color, series) {
  if (Array.isArray(series))
    return series.flatMap((each) => {
      const line = lineOf(name, "mean", each.series);
      return line ? [{ name, label: each.letter, line, color: each.color, dash: each.dash, width: 1.6 }] : [];
    });
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
  if (Array.isArray(series)) return [];
  const std = lineOf("std", "mean", series);
  const largest = state.curves === "log" ? lineOf("abs_max", "high", series) : null;
  return [
    largest && { name: "|max|", line: largest, color: "muted", width: 1 },
    std && { name: "std", line: std, color: "ink", width: 1, dash: [2, 3] },
  ].filter(Boolean);
}

/** What a chart says of each line at the cursor, or at its last number, beside how the line is drawn. */
export function readChart({ lines }) {
  const main = lines.at(-1);
  const column = state.cursor ?? main.line.findLastIndex((value) => !Number.isNaN(value));
  const print = printerOf(statisticOf(main.name));
  const drawn = lines.filter(({ band }) => !band);
  const said = (main.label ? drawn : drawn.toReversed())
    .map(({ name, label, line, color, dash }) => {
      const words = label ?? (name === main.name ? "" : name);
      return make("span", { class: "reading" }, make("i", { class: `line c-${color}${dash ? " dashed" : ""}` }), words && `${words} `, make("b", {}, print(line[column] ?? NaN)));
    });
  const band = lines.find((each) => each.band);
  return band ? [...said, make("span", { class: "reading" }, make("i", { class: `line shade c-${band.color}` }), "extremes")] : said;
}
