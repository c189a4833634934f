/** Panels of the rows that are open: a place's value, gradient and update side by side. */

import { closePlace, togglePin } from "./actions.js";
import { plural } from "./counts.js";
import { fill, find, make } from "./dom.js";
import { freshenExponents, loadExponents } from "./exponents.js";
import { STATISTICS, badOf, loadStatistics } from "./measures.js";
import { facts } from "./payload.js";
import { makePictures } from "./pictures.js";
import { makeSide } from "./side.js";
import { makeSigned } from "./signed.js";
import { state } from "./state.js";

const panels = new Map(); // name of the place → {element, sides, renew}

/** Make the page's panels those of `state.open`; called again after anything that needs new curves. */
export async function drawPanels(renew = false) {
  const series = facts.places.filter(({ name }) => state.open.includes(name)).flatMap((place) => Object.values(place.series));
  const statistics = STATISTICS.map(({ name }) => name);
  if (state.open.length) await Promise.all([loadStatistics(statistics, series), freshenExponents(series)]);
  const histograms = loadExponents(series);
  if (!facts.live) await histograms; // of a long run that is followed, they come later
  const open = state.open.filter((name) => facts.places.some((place) => place.name === name));
  const wanted = isOverlaid(open) ? [JSON.stringify(open)] : open;
  for (const [name, panel] of panels) {
    if (!wanted.includes(name) || (renew && !panel.renew())) removePanel(name, panel);
  }
  document.body.classList.toggle("with-panels", wanted.length > 0);
  find("panels").hidden = wanted.length === 0;
  const fresh = wanted.filter((name) => !panels.has(name));
  for (const name of fresh) panels.set(name, isOverlaid(open) ? makeOverlay(open) : makePanel(name));
  showInOrder(wanted.map((name) => panels.get(name).element));
  for (const name of fresh) panels.get(name).sides.forEach((side) => side.mount());
  showPins();
  if (await histograms) await drawPanels(true);
}

/** Whether the open rows are drawn over each other; runs that are compared are so already. */
const isOverlaid = (open) => state.overlay === "on" && open.length > 1 && !facts.runs;

/** One panel with the curves of several places. */
function makeOverlay(names) {
  const places = names.map((name) => facts.places.find((place) => place.name === name));
  const lines = places.map((place, i) => ({ place, letter: nameLetter(i), ...styleOf(i) }));
  const seriesOf = (part) => lines.filter(({ place }) => part in place.series).map(({ place, ...style }) => ({ ...style, series: place.series[part] }));
  const sides = PARTS.filter((part) => seriesOf(part).length).map((part) => makeSide(part, seriesOf(part)));
  const key = lines.map(({ place: { name }, letter, color, dash }) =>
    make(
      "li",
      { title: name },
      make("i", { class: `line c-${color}${dash ? " dashed" : ""}` }),
      make("b", {}, letter),
      ` ${name}`,
      make("button", { class: "icon", type: "button", "aria-label": `close ${name}`, onclick: () => closePlace(name) }, "✕"),
    ),
  );
  const element = make("article", { class: "panel", "aria-label": `${names.length} sites over each other` }, make("ul", { class: "overlaid" }, ...key), make("div", { class: "sides" }, ...sides.map((side) => side.element)));
  return { element, sides, renew: () => sides.every((side) => side.renew()) };
}

const PARTS = ["value", "grad", "accumulated", "update"];
const DASHES = [undefined, [7, 4], [2, 3]];
const styleOf = (i) => ({ color: `run-${i % 8}`, dash: DASHES[(i % 8) % 3] });
const nameLetter = (i) => (i < 26 ? String.fromCharCode(65 + i) : `${i + 1}`);

/** Panels one below the other; those that stand where they shall stay untouched, with what is focused in them. */
function showInOrder(elements) {
  elements.forEach((element, i) => {
    const there = find("panel-list").children[i];
    if (there !== element) find("panel-list").insertBefore(element, there ?? null);
  });
}

function removePanel(name, panel) {
  panel.sides.forEach((side) => side.remove());
  panel.element.remove();
  panels.delete(name);
}

function makePanel(name) {
  const number = facts.places.findIndex((place) => place.name === name);
  const place = facts.places[number];
  const parts = PARTS.filter((part) => part in place.series);
  const sides = parts.map((part) => makeSide(part, place.series[part]));
  const notes = make("div", {}, ...notesOf(place));
  const element = make(
    "article",
    { class: "panel", id: `panel-${number}`, "aria-label": name },
    make(
      "header",
      {},
      make("h3", {}, name),
      make(
        "button",
        {
          class: "icon pin",
          type: "button",
          "aria-label": "Pin: keep this panel open",
          title: "Keep open",
          onclick: () => togglePin(name),
        },
        "Pin",
      ),
      make(
        "button",
        {
          class: "icon",
          type: "button",
          "aria-label": "close this panel",
          title: "Close",
          onclick: () => closePlace(name),
        },
        "✕",
      ),
    ),
    notes,
    make("div", { class: "sides" }, ...sides.map((side) => side.element)),
    makeSigned(place.series.value),
    makePictures(place.series),
  );
  return {
    element,
    sides,
    renew() {
      if (JSON.stringify(facts.places[number]) !== JSON.stringify(place)) return false;
      fill(notes, ...notesOf(place));
      return sides.every((side) => side.renew());
    },
  };
}

const notesOf = (place) => [
  ...alarms(place),
  ...Object.values(place.without).map((text) => make("p", { class: "note" }, `Gradient: ${text}.`)),
];

function alarms(place) {
  return Object.entries(place.series).flatMap(([part, series]) => {
    const columns = badOf(series)?.reduce((n, count) => n + (count > 0), 0) ?? 0;
    if (!columns) return [];
    const unit = facts.columns.width === 1 ? "step" : "column";
    return [
      make("p", { class: "alarm" }, `${facts.sites[series]} has NaN or infinite elements in ${plural(columns, unit)}.`),
    ];
  });
}

export function showPins() {
  for (const [name, { element }] of panels) {
    element.querySelector(".pin")?.setAttribute("aria-pressed", String(state.pinned.includes(name)));
  }
}

export const followPanels = (keys) => panels.forEach(({ sides }) => sides.forEach((side) => side.follow(keys)));

export const resizePanels = () => panels.forEach(({ sides }) => sides.forEach((side) => side.resize()));
