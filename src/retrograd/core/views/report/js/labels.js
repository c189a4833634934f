/** Names of the rows in view, as a tree that assistive technology can read. */

import { fill, find, make } from "./dom.js";
import { geometry } from "./geometry.js";
import { facts } from "./payload.js";
import { isFolded, isMerged, numbersOf, placesWithout, shown, whyWithout } from "./rows.js";
import { state } from "./state.js";

const LEAST_SPACE = 13;

export function drawLabels(nodes, first, shift) {
  const labels = find("labels");
  labels.style.width = `${geometry.gutter}px`;
  fill(labels, ...chooseLabelled(nodes).map((i) => makeLabel(nodes[i], first + i, shift + i * geometry.row)));
  const current = labels.querySelector("[aria-selected=true]");
  if (current) find("viewport").setAttribute("aria-activedescendant", current.id);
  else find("viewport").removeAttribute("aria-activedescendant");
}

/** Rows that get a label: all, or where they are too low for that the outermost modules first. */
function chooseLabelled(nodes) {
  const apart = Math.ceil(LEAST_SPACE / geometry.row);
  const order = [...nodes.keys()];
  if (apart === 1) return order;
  const chosen = [];
  for (const i of order.sort((a, b) => nodes[a].depth - nodes[b].depth || a - b)) {
    if (chosen.every((other) => Math.abs(other - i) >= apart)) chosen.push(i);
  }
  return chosen.sort((a, b) => a - b);
}

function makeLabel(node, position, top) {
  const folder = Boolean(node.children);
  const folded = folder && !state.filter && isFolded(node);
  const without = placesWithout(node);
  const reason = without.length ? describeWithout(node) : "";
  const bad = numbersOf(node).bad?.some((count) => count > 0);
  const label = make(
    "div",
    {
      class: `label${folder ? " folder" : ""}${node.id === state.current ? " current" : ""}${isOpen(node) ? " opened" : ""}`,
      role: "treeitem",
      id: `row-${position}`,
      "data-row": position,
      "aria-level": node.depth + 1,
      "aria-posinset": position + 1,
      "aria-setsize": shown.rows.length,
      "aria-selected": String(node.id === state.current),
      "aria-expanded": folder ? String(!folded) : null,
      title: reason ? `${fullName(node)}: ${reason}` : fullName(node),
    },
    make("span", { class: "caret" }, folder ? (folded ? "▸" : "▾") : ""),
    make("span", { class: `name${state.order === "model" ? "" : " tail"}` }, make("bdi", {}, node.name, make("span", { class: "slot" }, slotText(node)))),
    reason ? make("span", { class: "unseen" }, `, ${reason}`) : null,
    reason ? make("span", { class: "without", "aria-hidden": "true" }, make("i"), isMerged(node) ? `${without.length} of` : "") : null,
    bad ? make("span", { class: "bad", title: "contains NaN or infinite elements" }, "●") : null,
    node.place !== null && facts.places[node.place].note && !isMerged(node)
      ? make("span", { class: "merged" }, facts.places[node.place].note)
      : null,
    isMerged(node)
      ? make("span", { class: "merged", title: `${node.places.length} sites, merged` }, String(node.places.length))
      : null,
  );
  label.style.transform = `translateY(${top}px)`;
  label.style.height = `${Math.max(geometry.row, LEAST_SPACE)}px`;
  label.style.setProperty("--depth", node.depth);
  return label;
}

const isOpen = (node) => node.place !== null && state.open.includes(facts.places[node.place].name);

/** What follows a row's name: nothing for a module's plain output, since that is what a row is by default. */
function slotText(node) {
  if (node.id === "self:output") return " whole model";
  if (!node.slot || node.slot === "output") return "";
  const again = /^(#\d+):output$/.exec(node.slot);
  if (again) return ` ${again[1]}`;
  return node.slot.startsWith("#") ? node.slot : `:${node.slot}`;
}

/** What is said of a row of which all or some never got a gradient. */
export function describeWithout(node) {
  if (!isMerged(node)) return whyWithout(node.place);
  const [few, all] = [placesWithout(node), node.places.length];
  const said = whyWithout(few[0]).split(":")[0].replace(/^no /, "had no "); // of a run that goes on: so far
  return `${few.length === all ? `all ${all}` : `${few.length} of ${all}`} ${said}`;
}

export function fullName(node) {
  if (isMerged(node)) return `${node.id.slice(0, -1)} (${node.places.length} sites)`;
  return node.place === null ? node.id.slice(0, -1) : facts.places[node.place].name;
}
