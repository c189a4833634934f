/** What a first view opens by itself where all that it would show is a few folded rows. */

import { chooseBetter, isMerged, listShownRows, numbersOf, shown, treeOf } from "./rows.js";
import { state } from "./state.js";

const FEW = 8; // rows that are too few to show where something is wrong

/** Unfold down to the worst place, and return its row; null where there is more to see already. */
export function openWorst() {
  const isAsIs = state.depth === "auto" && state.flipped.length === 0 && !state.filter;
  if (!isAsIs || treeOf(state.quantity).depth > 0 || shown.rows.length > FEW) return null;
  let row = worstOf(shown.rows.filter(isMerged));
  const opened = [];
  for (; row?.children; row = worstOf(row.children)) opened.push(row.id);
  if (!row) return null;
  Object.assign(state, { flipped: opened, current: row.id });
  listShownRows();
  return row;
}

/** The first one with elements that were not finite; where all were, the one with the most extreme number. */
function worstOf(rows) {
  const better = chooseBetter();
  let worst = null;
  for (const row of rows) {
    const { line, bad } = numbersOf(row);
    const broken = bad?.findIndex((count) => count > 0) ?? -1;
    const extreme = line?.reduce((best, value) => (Number.isNaN(best) || better(value, best) ? value : best), NaN) ?? NaN;
    const found = { row, broken: broken < 0 ? Infinity : broken, extreme };
    const isSooner = worst && found.broken < worst.broken;
    const isFurther = worst && found.broken === worst.broken && (Number.isNaN(worst.extreme) || better(extreme, worst.extreme));
    if (!worst || isSooner || isFurther) worst = found;
  }
  return worst?.row ?? null;
}
