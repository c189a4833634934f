/** Which folds are open; redraws the picture when that changes. */

import { find, fill } from "./dom.js";
import { drawSheet } from "./draw.js";
import { facts } from "./payload.js";
import { place } from "./place.js";
import { foldsAround, sheets } from "./scene.js";
import { moveBy, resizeDrawing } from "./view.js";

const MOST_SHOWN = 4000;
const opened = new Set(facts.opened);
const listeners = [];

/** Call something after each drawing. */
export const onDrawn = (listener) => listeners.push(listener);

/** The element of a box, or of the heading of an open fold, where it is to be seen. */
export const elementOf = (name) => find("world").querySelector(`[data-name="${CSS.escape(name)}"]`);

export function draw() {
  const placed = place(0, opened);
  resizeDrawing(placed.width, placed.height);
  fill(find("world"), ...drawSheet(placed));
  for (const listener of listeners) listener();
}

/** The drawing with what is open, wherever the window looks: its size, and elements of its own. */
export function drawAll() {
  const placed = place(0, opened);
  return { width: placed.width, height: placed.height, elements: drawSheet(placed) };
}

/** Open or close a fold; its upper edge stays where it is. */
export function toggle(fold, name) {
  const outline = () => elementOf(name).parentNode.querySelector(":scope > .frame") ?? elementOf(name);
  const before = (opened.has(fold) ? outline() : elementOf(name)).getBoundingClientRect();
  if (!opened.delete(fold)) opened.add(fold);
  draw();
  const after = (opened.has(fold) ? outline() : elementOf(name)).getBoundingClientRect();
  moveBy(before.left + before.width / 2 - after.left - after.width / 2, before.top - after.top);
}

/** Open all folds around something on a sheet. */
export function open(sheet) {
  const closed = foldsAround(sheet).filter((fold) => !opened.has(fold));
  for (const fold of closed) opened.add(fold);
  if (closed.length) draw();
}

/** Open every fold that is to be seen, or say that this would be too much. */
export function unfold() {
  const next = shownFolds().filter((fold) => !opened.has(fold));
  let count = 0;
  for (const fold of [0, ...shownFolds()]) count += sheets[fold].things.length;
  if (count > MOST_SHOWN) return false;
  for (const fold of next) opened.add(fold);
  draw();
  return true;
}

/** Close the innermost folds that are open. */
export function fold() {
  const open = shownFolds().filter((each) => opened.has(each));
  const deepest = Math.max(...open.map((each) => foldsAround(each).length));
  for (const each of open) if (foldsAround(each).length === deepest) opened.delete(each);
  draw();
}

/** Folds whose boxes are to be seen, open or closed; of those with a single node only the open ones. */
function shownFolds() {
  const shown = [];
  const look = (sheet) => {
    for (const { fold, alone } of sheets[sheet].things) {
      if (fold === undefined || (alone && !opened.has(fold))) continue;
      shown.push(fold);
      if (opened.has(fold)) look(fold);
    }
  };
  look(0);
  return shown;
}
