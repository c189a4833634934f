/** Details of the box that is pointed at, or pinned by a click. */

import { fill, find, make, makeTerms } from "./dom.js";
import { elementOf } from "./folding.js";
import { boxes } from "./scene.js";

const byName = new Map();
let kept = null;
let pointed = null;

export function loadDetails() {
  for (const { thing } of boxes) byName.set(thing.name, thing);
  show(null);
}

/** Keep the details of a node; of the one that is kept: let go. */
export function keep(name) {
  kept = kept === name ? null : name;
  markKept();
  show(kept ?? pointed);
}

export function letGo() {
  kept = null;
  markKept();
  show(pointed);
}

export function markKept() {
  for (const element of find("world").querySelectorAll(".kept")) element.classList.remove("kept");
  if (kept !== null) elementOf(kept)?.classList.add("kept");
}

/** Show the details of the box under the pointer, unless others are pinned, and mark its lines. */
export function point(name) {
  for (const line of find("world").querySelectorAll(".near")) line.classList.remove("near");
  if (name !== null) {
    const own = CSS.escape(name);
    for (const line of find("world").querySelectorAll(`[data-from="${own}"], [data-to="${own}"]`)) {
      line.classList.add("near");
    }
  }
  pointed = name;
  show(kept ?? pointed);
}

function show(name) {
  const thing = byName.get(name);
  if (thing === undefined) {
    fill(
      find("details"),
      make("p", { class: "note" }, "Hover over a box to see its details. The backward pass runs from top to bottom."),
      make("p", { class: "note" }, "Blue boxes are calls of modules, white ones are nodes. A line is labelled with the shape of the gradient that arrives at its end; pills are leaves that get a gradient."),
    );
    return;
  }
  fill(
    find("details"),
    kept === name ? make("span", { class: "kept" }, "pinned") : null,
    make("h2", {}, thing.heading),
    make("dl", {}, ...makeTerms(thing.details)),
  );
}
