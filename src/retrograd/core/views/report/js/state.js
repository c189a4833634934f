/** What is shown: one object. Parts of the page listen for the keys they depend on and redraw once a frame. */

import { facts } from "./payload.js";

const KNOWN = [
  { key: "grad", label: "Gradients", of: "activation", site: "grad", title: "gradients of activations" },
  { key: "value", label: "Activations", of: "activation", site: "value", title: "activations" },
  { key: "wgrad", label: "Weight gradients", of: "parameter", site: "grad", title: "gradients of weights" },
  { key: "accumulated", label: "Accumulated", of: "parameter", site: "accumulated", title: "accumulated gradients of weights" },
  { key: "update", label: "Updates", of: "parameter", site: "update", title: "updates of weights" },
  { key: "weight", label: "Weights", of: "parameter", site: "value", title: "weights" },
];

/** Those of which anything was recorded. */
export const QUANTITIES = [];

/** Find them again, where sites have come meanwhile. */
export function findQuantities() {
  const has = ({ of, site }) => facts.places.some((place) => place.kind === of && site in place.series);
  QUANTITIES.splice(0, QUANTITIES.length, ...KNOWN.filter(has));
}
findQuantities();

export const quantityOf = (key) => QUANTITIES.find((quantity) => quantity.key === key) ?? QUANTITIES[0];

/** Whether a place has a row: something was recorded of it, or the reason is known why nothing was. */
export const hasRow = ({ kind, series, without }, { of, site }) => kind === of && (site in series || site in without);

/** Numbers of the sites that are shown for a quantity, in the order of their places. */
export function seriesOf(key) {
  const { of, site } = quantityOf(key);
  return facts.places.filter((place) => place.kind === of && site in place.series).map((place) => place.series[site]);
}

export const DEFAULTS = {
  quantity: QUANTITIES[0]?.key ?? "grad",
  statistic: facts.measures[0]?.name ?? "rms", // the ratio where runs are compared
  band: "high",
  scale: "auto",
  filter: "",
  zoom: null, // [first, last] column, or null for all
  depth: "auto", // modules at this depth or below are folded
  flipped: [], // modules folded or unfolded by hand, against that
  open: [], // names of places whose panels are open; pinned ones stay when another row is clicked
  pinned: [],
  rows: "normal",
  order: "model", // of the rows; "type": under types of modules, "value": the largest first
  at: "", // the step at which values are sorted; empty: the last in view
  pin: "", // the step and the name of the place that are pinned
  overlay: "off",
  scalars: [], // charts above the map; none named: the first one
  scales: [], // those of them whose scale is not their own
  smooth: "0",
  x: "step", // the axis of the charts above the map
  curves: "log",
  range: "view",
  theme: "auto",
};

/** held: the cell at the cursor was chosen by a finger or a key, so that it is read without hovering. */
export const state = { ...structuredClone(DEFAULTS), cursor: null, current: null, brush: null, held: false };

const listeners = [];
let changed = null;

/** Call `react` in the next frame after any of `keys` has changed. */
export function onChange(keys, react) {
  listeners.push([new Set(keys), react]);
}

export function change(patch) {
  Object.assign(state, patch);
  if (changed === null) {
    changed = new Set();
    requestAnimationFrame(notify);
  }
  for (const key of Object.keys(patch)) changed.add(key);
}

function notify() {
  const keys = changed;
  changed = null;
  for (const [watched, react] of listeners) {
    if ([...keys].some((key) => watched.has(key))) react(keys);
  }
}
