/** The runs: which of them are drawn, in which colour and dash, and the table that says so. */

import { fill, find, make } from "./dom.js";
import { facts } from "./payload.js";
import { DEFAULTS, change, state } from "./state.js";

const COLORS = 8;
const DASHES = [undefined, [7, 4], [2, 3]];

DEFAULTS.hidden = []; // numbers of runs whose curves are not drawn, as text: the address holds them
state.hidden = [];

export const colorOf = (number) => `run-${number % COLORS}`;
export const dashOf = (number) => DASHES[(number % COLORS) % DASHES.length];

/** Numbers of the runs that are drawn. */
export const drawnRuns = () => [...facts.runs.keys()].filter((number) => !state.hidden.includes(String(number)));

export const makeKey = (number, ...texts) => make("span", { class: `reading ${colorOf(number)}` }, make("i", { class: "line" }), ...texts);

export function writeRuns() {
  fill(find("runs"), ...facts.runs.map(makeRun));
  fill(find("apart"), ...facts.apart.map((text) => make("li", {}, text)));
}

function makeRun({ letter, name, status, steps, loss, sites, findings, command }, number) {
  const isDrawn = !state.hidden.includes(String(number));
  const toggle = make("button", { type: "button", "aria-pressed": String(isDrawn), "aria-label": `curves of ${letter}`, title: isDrawn ? "Hide its curves" : "Draw its curves", onclick: () => flip(String(number)) }, letter);
  return make(
    "tr",
    {},
    make("td", {}, make("span", { class: `run ${colorOf(number)}`, title: command }, toggle, make("i", { class: "line" }), make("b", {}, name))),
    make("td", {}, status ? make("span", { class: `status ${status.kind}` }, status.text) : "–"),
    ...[steps, loss ?? "–", sites, findings].map((text) => make("td", {}, text)),
  );
}

function flip(number) {
  change({ hidden: state.hidden.includes(number) ? state.hidden.filter((other) => other !== number) : [...state.hidden, number] });
}
