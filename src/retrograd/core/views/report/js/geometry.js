/** Sizes that the map, its axis and the loss above it share, in CSS pixels. */

import { find } from "./dom.js";
import { shown } from "./rows.js";
import { state } from "./state.js";
import { shownColumns } from "./steps.js";

/** card: width of all; gutter: width of the labels; plot: width of the cells; right: what a scroll bar takes; row: height of a row. */
export const geometry = { card: 0, gutter: 0, plot: 0, right: 0, row: 0, height: 0, isPrinted: false };

const LEAST_ROW = 3;
const MOST_PRINTED = 32000; // pixels of a canvas

export function measureMap() {
  const view = find("viewport");
  const card = (geometry.card = find("map").clientWidth);
  const narrow = card < 560;
  geometry.gutter = narrow ? 118 : Math.min(250, Math.max(170, Math.round(card * 0.2)));
  const onScreen = Math.round(Math.max(220, innerHeight * (narrow ? 0.55 : 0.62)));
  const fitting = Math.floor(onScreen / Math.max(shown.rows.length, 1));
  const [least, largest] = narrow ? [22, 22] : [14, 18];
  geometry.row = Math.min(largest, Math.max(state.rows === "fit" ? LEAST_ROW : least, fitting));
  if (geometry.isPrinted) geometry.row = Math.max(1, Math.min(geometry.row, Math.floor(MOST_PRINTED / devicePixelRatio / Math.max(shown.rows.length, 1))));
  const most = geometry.isPrinted ? Infinity : onScreen;
  geometry.height = Math.max(geometry.row * Math.min(shown.rows.length, Math.floor(most / geometry.row)), 60);
  view.style.height = `${geometry.height}px`;
  find("spacer").style.height = `${Math.max(shown.rows.length * geometry.row, geometry.height)}px`;
  find("map").style.setProperty("--gutter", `${geometry.gutter}px`);
  geometry.right = view.offsetWidth - view.clientWidth;
  geometry.plot = Math.max(60, view.clientWidth - geometry.gutter);
}

/** Where a column begins, from the left edge of the cells; fractions are welcome. */
export function columnToX(column) {
  const [from, to] = shownColumns();
  return ((column - from) / (to - from + 1)) * geometry.plot;
}

export function xToColumn(x) {
  const [from, to] = shownColumns();
  const column = from + Math.floor((x / geometry.plot) * (to - from + 1));
  return Math.max(from, Math.min(to, column));
}
