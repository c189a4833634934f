/** The axis of steps. A place on it is a column number; columns hold equally many recorded steps. */

import { formatCount } from "./counts.js";
import { facts } from "./payload.js";
import { state } from "./state.js";

const { first, last } = facts.columns;
export const COLUMNS = first.length;

/** First and last column in view. */
export function shownColumns() {
  const [from, to] = state.zoom ?? [0, COLUMNS - 1];
  return [Math.max(0, Math.min(from, COLUMNS - 1)), Math.max(0, Math.min(to, COLUMNS - 1))];
}

export const nameColumn = (column) => nameColumns(column, column);

/** The steps from one column to another, in words. */
export function nameColumns(from, to) {
  const [a, b] = [first[from], last[to]];
  return a === b ? `step ${formatCount(a)}` : `steps ${formatCount(a)}–${formatCount(b)}`;
}

/** The column that holds a step. */
export function columnOf(step) {
  let [low, high] = [0, COLUMNS - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (first[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Round steps to label between two columns, with their place on the axis. */
export function stepTicks(from, to, most) {
  const span = last[to] - first[from] || 1;
  const rough = span / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = Math.max(1, [1, 2, 5, 10].find((factor) => factor * power >= rough) * power);
  const ticks = [];
  for (let step = Math.ceil(first[from] / unit) * unit; step <= last[to]; step += unit) {
    const column = columnOf(step);
    const next = column + 1 < COLUMNS ? first[column + 1] : last[column] + 1;
    ticks.push({ step, column: column + Math.min(1, (step - first[column]) / Math.max(next - first[column], 1)) });
  }
  return ticks;
}
