/** Keys: arrows move from box to box in the order of the backward, as in a tree. */

import { keep, letGo, point } from "./details.js";
import { find, focusOnSlash } from "./dom.js";
import { elementOf, onDrawn, toggle } from "./folding.js";
import { fit, reveal, showActualSize, zoomBy } from "./view.js";

let current = null;

const elements = () => [...find("world").querySelectorAll("[data-name]")];

/** Do what a click on a box does. */
export function act(element) {
  const { name, fold } = element.dataset;
  if (fold !== undefined) toggle(Number(fold), name);
  else keep(name);
}

/** One box at a time can be reached by the tab key. */
export function setCurrent(name, isFocused) {
  current = name;
  for (const element of find("world").querySelectorAll('[tabindex="0"]')) element.setAttribute("tabindex", "-1");
  const element = (name !== null && elementOf(name)) || elements()[0];
  element?.setAttribute("tabindex", "0");
  if (isFocused && element) {
    element.focus({ preventScroll: true });
    reveal(element);
    point(element.dataset.name);
  }
}

export function followKeys() {
  focusOnSlash("search");
  // Listened for at the document: Chromium lets an SVG element be focused for having a listener to focus.
  let hadFocus = false;
  document.addEventListener("focusin", (event) => (hadFocus = find("world").contains(event.target)));
  onDrawn(() => setCurrent(current, hadFocus));
  find("graph").addEventListener("keydown", (event) => {
    const element = event.target.closest("[data-name]");
    if (element === null || event.ctrlKey || event.metaKey || event.altKey) return;
    if (press(event.key, element)) event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input") || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      "+": () => zoomBy(1.25),
      "=": () => zoomBy(1.25),
      "-": () => zoomBy(0.8),
      0: () => fit(),
      1: showActualSize,
      Escape: letGo,
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  });
}

function press(key, element) {
  const all = elements();
  const here = all.indexOf(element);
  const expanded = element.getAttribute("aria-expanded");
  const go = (other) => other && setCurrent(other.dataset.name, true);
  switch (key) {
    case "ArrowDown":
      go(all[here + 1]);
      return true;
    case "ArrowUp":
      go(all[here - 1]);
      return true;
    case "Home":
      go(all[0]);
      return true;
    case "End":
      go(all.at(-1));
      return true;
    case "ArrowRight":
      if (expanded === "false") act(element);
      else go(all[here + 1]);
      return true;
    case "ArrowLeft":
      if (expanded === "true") act(element);
      else go(element.closest(".open")?.querySelector(":scope > .handle"));
      return true;
    case "Enter":
    case " ":
      act(element);
      return true;
    default:
      return false;
  }
}
