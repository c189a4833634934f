/** The search field: boxes by name, module, leaf or line, whether they are to be seen or not. */

import { formatCount } from "./counts.js";
import { find } from "./dom.js";
import { elementOf, open } from "./folding.js";
import { boxes, wordsOf } from "./scene.js";
import { reveal } from "./view.js";

let texts = null;
let found = [];
let current = -1;

export function followSearch() {
  const field = find("search");
  field.addEventListener("input", () => {
    const text = field.value.trim().toLowerCase();
    texts ??= boxes.map(({ thing }) => textOf(thing));
    found = text ? boxes.filter((_, i) => texts[i].includes(text)) : [];
    current = -1;
    markFound();
    showCount();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && found.length) go(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") field.blur();
  });
}

/** Mark what was found among the boxes that are to be seen. */
export function markFound() {
  for (const element of find("world").querySelectorAll(".match")) element.classList.remove("match");
  const names = new Set(found.map(({ thing }) => thing.name));
  for (const element of find("world").querySelectorAll("[data-name]")) {
    if (names.has(element.dataset.name)) element.classList.add("match");
  }
}

function go(step) {
  current = current < 0 ? (step > 0 ? 0 : found.length - 1) : (current + step + found.length) % found.length;
  const { thing, sheet } = found[current];
  open(sheet);
  const element = elementOf(thing.name);
  reveal(element);
  element.dispatchEvent(new CustomEvent("found", { bubbles: true }));
  showCount();
}

function showCount() {
  const count = formatCount(found.length);
  if (!find("search").value.trim()) find("found").textContent = "";
  else if (!found.length) find("found").textContent = "nothing found";
  else find("found").textContent = current < 0 ? `${count} found, Enter shows` : `${formatCount(current + 1)} of ${count}`;
}

/** A fold that can be opened is found by its name; what is in it is found where it is. */
function textOf(thing) {
  const parts = [thing.name, thing.heading];
  if (thing.fold === undefined) parts.push(...wordsOf(thing), ...thing.details.flatMap(([, values]) => values));
  return parts.join("\n").toLowerCase();
}
