/** A loss as people read it. */

import { formatCount } from "./counts.js";
import { formatNumber } from "./format.js";
import { facts } from "./payload.js";

/** A loss that is not finite is said to be so, and since when. */
export function tellLoss(line, low, column) {
  if (line[column] !== Infinity) return formatNumber(line[column] ?? NaN);
  let since = column;
  while (since > 0 && !Number.isFinite(line[since - 1])) since -= 1;
  const word = Number.isNaN(low[column]) ? "NaN" : "not finite";
  return `${word} since step ${formatCount(facts.columns.first[since])}`;
}
