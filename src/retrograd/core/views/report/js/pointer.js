/** Mouse and finger on the map: hover reads, a click on a row opens it, dragging along the steps zooms. */

import { find } from "./dom.js";
import { geometry, xToColumn } from "./geometry.js";
import { isMerged, shown } from "./rows.js";
import { openRow, pinCell, toggleFold } from "./actions.js";
import { change, state } from "./state.js";

const DRAG = 6;

let last = {}; // the last event of a pointer that moved, anywhere on the page
let rests = false; // what is under it was redrawn or moved: browsers report that as a move, too
let pressed = null; // {x, column, again} while a button or finger is down; again: on the row that was current already

export function followPointer() {
  const view = find("viewport");
  document.addEventListener("pointermove", watchRest, { capture: true });
  view.addEventListener("pointerdown", press);
  view.addEventListener("pointermove", move);
  view.addEventListener("pointerup", release);
  view.addEventListener("pointercancel", () => drop());
  view.addEventListener("pointerleave", leave);
  view.addEventListener("blur", () => change({ held: false, cursor: null }));
  document.addEventListener("pointerdown", ({ target }) => state.held && !view.contains(target) && change({ cursor: null, held: false }));
  view.addEventListener("dblclick", (event) => placeOf(event).x >= 0 && change({ zoom: null }));
}

function placeOf(event) {
  const box = find("viewport").getBoundingClientRect();
  const x = event.clientX - box.left - geometry.gutter;
  const row = shown.rows[Math.floor((event.clientY - box.top + find("viewport").scrollTop) / geometry.row)];
  return { x, row, column: xToColumn(x) };
}

function press(event) {
  const { x, row, column } = placeOf(event);
  if (event.button === 0 && x < geometry.plot) pressed = { x, column, again: state.current === row?.id };
}

function watchRest(event) {
  rests = event.clientX === last.clientX && event.clientY === last.clientY;
  last = event;
}

function move(event) {
  if (rests) return; // a key may have moved the cursor
  const { x, row, column } = placeOf(event);
  const inside = x >= 0 && x < geometry.plot;
  if (pressed?.x >= 0 && Math.abs(x - pressed.x) > DRAG) {
    find("viewport").setPointerCapture(event.pointerId);
    change({ brush: [pressed.column, column], cursor: column });
  } else change({ cursor: inside ? column : null, current: row?.id ?? null, held: false });
}

function release(event) {
  const { x, row, column } = placeOf(event);
  const { brush: brushed } = state;
  const again = pressed?.again;
  drop();
  if (brushed) {
    const [from, to] = brushed.toSorted((a, b) => a - b);
    if (to > from) change({ zoom: [from, to] });
  } else if (row && event.button === 0) {
    change({ current: row.id, cursor: x >= 0 ? column : null, held: event.pointerType === "touch" });
    if (event.altKey && x >= 0) pinCell(row, column);
    else if (event.pointerType !== "touch" || x < 0 || again) click(row, event); // a first tap on a cell only reads it
  }
}

/** The map may have gone from under a pointer that rests: what a key chose stays then. */
function leave(event) {
  if (pressed === null && event.pointerType !== "touch" && !state.held) change({ cursor: null });
}

function drop() {
  pressed = null;
  change({ brush: null });
}

function click(row, event) {
  const onCaret = event.target.closest?.(".caret") && row.children;
  if (onCaret || row.place === null || isMerged(row)) toggleFold(row);
  else openRow(row, event.shiftKey || event.ctrlKey || event.metaKey);
}
