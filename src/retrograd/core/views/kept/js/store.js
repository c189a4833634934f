/** What the page is about, and what is looked at now. */

import { facts, readJson } from "./payload.js";

export const GROUPS = ["cheap", "dear", "input", "cast", "other"];
export const GROUP_WORDS = {
  cheap: "cheap to recompute",
  dear: "product, convolution or attention",
  input: "input of the model",
  cast: "cast of a parameter",
  other: "only by running its module again",
};

/** Memory: its bytes, the rows that keep it, and the spans of positions in which it is held. */
export const data = { storages: [], held: [], seconds: [], isRun: [], at: [], texts: [], rows: {} };

/** `position`: null for everything; `path`: module that the map shows; `kept`, `pointed`: numbers of memory. */
export const state = { position: null, path: "", kept: null, pointed: null, filter: "", shown: 200 };

const listeners = [];
let alive = [];

export async function loadData() {
  const read = await readJson("inventory");
  Object.assign(data, read);
  data.storages = read.storages.map(([bytes, savers, spans], number) => ({ number, bytes, savers, spans }));
  state.position = facts.inventory.peak;
  choose();
}

export function onChange(listener) {
  listeners.push(listener);
}

export function change(values) {
  const moved = "position" in values && values.position !== state.position;
  Object.assign(state, values);
  if (moved) choose();
  for (const listener of listeners) listener(values);
}

function choose() {
  const { position } = state;
  alive = position === null ? data.storages : data.storages.filter((storage) => isHeld(storage, position));
}

/** The memory that is held at the chosen position, largest first. */
export const aliveNow = () => alive;

function isHeld({ spans }, position) {
  for (let i = 0; i < spans.length; i += 2) if (spans[i] <= position && position < spans[i + 1]) return true;
  return false;
}

/** A text of a row. */
export const textOf = (row, name) => data.texts[data.rows[name][row]];

export const numberOf = (row, name) => data.rows[name][row];

/** The row under which memory counts. */
export const firstRow = (storage) => storage.savers[0];

export const moduleOf = (storage) => textOf(firstRow(storage), "module");

export const groupOf = (storage) => GROUPS[numberOf(firstRow(storage), "group")];

export const titleOf = (storage) => `${textOf(firstRow(storage), "place")} ${textOf(firstRow(storage), "slot")}`;

/** Whether a module is this one, or within it. */
export const isWithin = (module, path) => path === "" || module === path || module.startsWith(`${path}.`);

export const eventAt = (position) => {
  const place = data.texts[data.at[position]];
  if (!place) return "the end";
  return data.isRun[position] ? `the backward runs ${place}` : `the forward creates ${place}`;
};
