/** The curves in a panel of several runs: one of each run that is drawn, and how they are read at the cursor. */

import { formatNumber, formatShare } from "./format.js";
import { aboutOf, lineOf } from "./measures.js";
import { facts } from "./payload.js";
import { colorOf, dashOf, drawnRuns, makeKey } from "./runs.js";
import { state } from "./state.js";
import { columnCount } from "./steps.js";

/** What stands behind the title of a side: nothing, for runs may differ in it. */
export const sizeNote = () => null;

/** Columns in which any of the drawn runs has elements that are not finite. */
export function badIn(series) {
  const lines = drawnRuns().map((number) => lineOf(`nonfinite-${number}`, "high", series)).filter(Boolean);
  return lines.length ? Float32Array.from({ length: columnCount() }, (_, column) => Math.max(...lines.map((line) => line[column] || 0))) : null;
}

export function chartsOf(part, series) {
  const charts = [
    { title: "rms", name: "rms", scale: state.curves, print: formatNumber },
    { title: "mean", name: "mean", scale: "linear", print: formatNumber },
    part === "update"
      ? { title: "update ratio", name: "update_ratio", scale: state.curves, print: formatNumber }
      : { title: "share of zeros", name: "zero_share", scale: "share", print: formatShare },
  ];
  return charts
    .map((chart) => ({ ...chart, about: aboutOf(`${chart.name}-0`), lines: linesOf(chart.name, series) }))
    .filter(({ lines }) => lines.length);
}

const linesOf = (name, series) =>
  drawnRuns().flatMap((number) => {
    const line = lineOf(`${name}-${number}`, "mean", series);
    return line ? [{ number, line, color: colorOf(number), dash: dashOf(number), width: 1.6 }] : [];
  });

/** What a chart says of each run at the cursor, or at its last number. */
export const readChart = ({ lines, print }) =>
  lines.map(({ number, line }) => {
    const column = state.cursor ?? line.findLastIndex((value) => !Number.isNaN(value));
    return makeKey(number, `${facts.runs[number].letter} ${print(line[column] ?? NaN)}`);
  });
