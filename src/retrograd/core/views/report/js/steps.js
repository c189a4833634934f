/** The axis of steps. A place on it is a column number; columns hold equally many recorded steps. */

import { formatCount } from "./counts.js";
import { facts } from "./payload.js";
import { state } from "./state.js";

/** How many columns there are, which grows while a run is followed. */
export const columnCount = () => facts.columns.first.length;

/** First and last column in view. */
export function shownColumns() {
  const end = columnCount() - 1;
  const [from, to] = state.zoom ?? [0, end];
  return [Math.max(0, Math.min(from, end)), Math.max(0, Math.min(to, end))];
}

export const nameColumn = (column) => nameColumns(column, column);

/** The steps from one column to another, in words. */
export function nameColumns(from, to) {
  const [a, b] = [facts.columns.first[from], facts.columns.last[to]];
  return a === b ? `step ${formatCount(a)}` : `steps ${formatCount(a)}–${formatCount(b)}`;
}

/** The column that holds a step. */
export function columnOf(step) {
  const { first } = facts.columns;
  let [low, high] = [0, first.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (first[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Whether steps in a column, or between it and the one before, were not recorded. */
export function skipsSteps(column) {
  const { first, last, width } = facts.columns;
  return last[column] - first[column] >= width || (column > 0 && first[column] - last[column - 1] > 1);
}

/** Round steps to label between two columns, with their place on the axis. */
export function stepTicks(from, to, most) {
  const { first, last } = facts.columns;
  const span = last[to] - first[from] || 1;
  const rough = span / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = Math.max(1, [1, 2, 5, 10].find((factor) => factor * power >= rough) * power);
  const ticks = [];
  for (let step = Math.ceil(first[from] / unit) * unit; step <= last[to]; step += unit) {
    const column = columnOf(step);
    const next = column + 1 < first.length ? first[column + 1] : last[column] + 1;
    ticks.push({ step, column: column + Math.min(1, (step - first[column]) / Math.max(next - first[column], 1)) });
  }
  return ticks;
}
