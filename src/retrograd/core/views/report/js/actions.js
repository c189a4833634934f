/** What a person can do to the view, whatever it is done with. */

import { find } from "./dom.js";
import { geometry } from "./geometry.js";
import { facts } from "./payload.js";
import { foldDepth, isMerged, shown, treeOf } from "./rows.js";
import { QUANTITIES, change, state } from "./state.js";
import { columnCount, columnOf } from "./steps.js";

export function toggleFold(node) {
  if (!node.children) return;
  const flipped = state.flipped.includes(node.id)
    ? state.flipped.filter((id) => id !== node.id)
    : [...state.flipped, node.id];
  change({ flipped });
}

/** Fold or unfold every module. */
export const foldAll = (folded) => change({ depth: folded ? "0" : "99", flipped: [] });

/** Open a row's panel; it takes the place of the last one that is not pinned, or is added to them. */
export function openRow(node, add = false) {
  openPlace(facts.places[node.place].name, add);
}

export function openPlace(name, add = false) {
  if (state.open.includes(name))
    return find(`panel-${facts.places.findIndex((place) => place.name === name)}`)?.scrollIntoView({
      block: "nearest",
    });
  const kept = add ? state.open : state.open.filter((other) => state.pinned.includes(other));
  change({ open: [...kept, name], pinned: add ? [...new Set([...state.pinned, ...state.open])] : state.pinned });
}

export function closePlace(name) {
  const without = (names) => names.filter((other) => other !== name);
  change({ open: without(state.open), pinned: without(state.pinned) });
}

export function togglePin(name) {
  const pinned = state.pinned.includes(name) ? state.pinned.filter((other) => other !== name) : [...state.pinned, name];
  change({ pinned });
}

/** Pin a cell, or let go of it where it is the pinned one; a row that stands for several sites has no cell of its own. */
export function pinCell(row, column) {
  if (row.place === null || isMerged(row)) return;
  const pin = `${facts.columns.first[column]} ${facts.places[row.place].name}`;
  change({ pin: pin === state.pin ? "" : pin });
}

/** {column, place} of the pinned cell; null where none is, or it is of another run. */
export function pinnedCell() {
  const [, step, name] = /^(\d+) ([^]*)$/.exec(state.pin) ?? [];
  const place = facts.places.findIndex((each) => each.name === name);
  return place < 0 ? null : { column: columnOf(Number(step)), place };
}

/** Show what a finding rests on: its site where it has one, else the losses of its steps above the map, with all extremes. */
export function show({ site, step, last = step }) {
  const scalars = state.scalars.length && !state.scalars.includes("loss") ? ["loss", ...state.scalars] : state.scalars;
  if (site === null) change({ scalars, zoom: zoomOn(step, last), cursor: columnOf(step), range: "full" });
  else visit(site, step, last);
  find("map").scrollIntoView({ block: "start" });
}

/** Go to one site, or to one that never got a gradient, at some steps: choose what it is of, unfold down to it, open it and zoom near. */
export function visit(site, step, last = step) {
  const series = facts.sites.indexOf(site);
  const isIt = ({ name, series: own, without }, part) => (series < 0 ? part in without && site === `${name}.${part}` : own[part] === series);
  const number = facts.places.findIndex((place) => QUANTITIES.some(({ of, site: part }) => of === place.kind && isIt(place, part)));
  const place = facts.places[number];
  const quantity = QUANTITIES.find(({ of, site: part }) => of === place.kind && isIt(place, part));
  change({ quantity: quantity.key, order: "model", filter: "", zoom: zoomOn(step, last), cursor: columnOf(step), flipped: flipsDownTo(quantity.key, number) });
  openPlace(place.name);
  const row = findRow(treeOf(quantity.key).top, number);
  change({ current: row.id });
  requestAnimationFrame(() => requestAnimationFrame(() => scrollToRow(row.id)));
}

/** The columns of some steps with a few around them; null where that is nearly all. */
function zoomOn(step, last) {
  const reach = Math.max(10, Math.round(columnCount() / 12));
  const [from, to] = [columnOf(step) - reach, columnOf(last) + reach];
  return columnCount() > 1.5 * (to - from) ? [Math.max(0, from), Math.min(columnCount() - 1, to)] : null;
}

function flipsDownTo(key, number) {
  const { top } = treeOf(key);
  const flipped = new Set(key === state.quantity ? state.flipped : []);
  for (let node = findRow(top, number); node !== top; node = node.parent) {
    const folded = node.depth >= foldDepth(key) !== flipped.has(node.id);
    if (node.children && folded) flipped.has(node.id) ? flipped.delete(node.id) : flipped.add(node.id);
  }
  return [...flipped];
}

function findRow(node, number) {
  if (node.place === number) return node;
  return (node.children ?? [])
    .filter((child) => child.places.includes(number))
    .map((child) => findRow(child, number))[0];
}

export function scrollToRow(id) {
  const row = shown.rows.findIndex((node) => node.id === id);
  const view = find("viewport");
  if (row < 0) return;
  const top = row * geometry.row;
  if (top < view.scrollTop) view.scrollTop = top;
  else if (top + geometry.row > view.scrollTop + geometry.height) view.scrollTop = top + geometry.row - geometry.height;
}
