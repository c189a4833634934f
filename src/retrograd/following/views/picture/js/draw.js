/** A placed scene as SVG elements: the same as drawing.py. */

import { gate } from "./place.js";
import { wordsOf } from "./scene.js";

const SPACE = ["http:", "", "www.w3.org", "2000", "svg"].join("/"); // the name of SVG, nothing that is loaded

const round = (number) => number.toFixed(1);

/** `shape("rect", {x: 1}, "text")` */
export function shape(tag, properties = {}, ...children) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value !== undefined) element.setAttribute(name, typeof value === "number" ? round(value) : value);
  }
  element.append(...children);
  return element;
}

/** Elements of a placed sheet, lines first. */
export const drawSheet = (placed, left = 0, top = 0) => [...drawEach(placed, left, top)];

function* drawEach(placed, left, top) {
  for (const line of placed.sheet.lines) yield* drawLine(placed, line, left, top);
  for (const [i, thing] of placed.sheet.things.entries()) {
    const { x, y, left: side } = placed.spots[i];
    if (placed.inner.has(i)) yield drawFrame(thing, placed.inner.get(i), left + x - side, top + y);
    else if (thing.gradient === undefined) yield drawBox(thing, left + x, top + y);
    else if (placed.sheet.above === null) yield shape("circle", { class: "start", cx: left + x, cy: top + y, r: 4.5 });
    else yield shape("circle", { class: "port", cx: left + x, cy: top + y, r: 2 });
  }
}

function drawFrame(thing, inner, x, y) {
  const { width, height, sheet } = inner;
  const handle = { class: "handle", "data-name": thing.name, "data-fold": String(thing.fold), role: "treeitem" };
  return shape(
    "g",
    { class: "open" },
    shape("rect", { class: "frame", x, y, width, height, rx: 10 }),
    shape(
      "g",
      { ...handle, "aria-expanded": "true", "aria-label": `${sheet.title}, open`, tabindex: "-1" },
      shape("rect", { class: "grip", x: x + 4, y: y + 4, width: sheet.title.length * 7.3 + 30, height: 22, rx: 5 }),
      shape("path", { class: "sign", d: `M${round(x + 11)} ${round(y + 13)} l4 4 l4 -4` }),
      shape("text", { class: "heading", x: x + 25, y: y + 19 }, sheet.title),
    ),
    ...drawSheet(inner, x, y),
  );
}

function drawBox(thing, x, y) {
  const canOpen = thing.fold !== undefined;
  const named = {
    class: `box ${thing.isModule ? "fold" : "node"}`,
    transform: `translate(${round(x)} ${round(y)})`,
    "data-name": thing.name,
    "data-fold": canOpen ? String(thing.fold) : undefined,
    role: "treeitem",
    tabindex: "-1",
    "aria-expanded": canOpen ? "false" : undefined,
    "aria-label": wordsOf(thing).join(", "),
  };
  return shape("g", named, ...thing.shapes.map((each) => shape(...each)));
}

/** One line, or one for each gradient where it ends at an open fold, whose gates are apart. */
function* drawLine(placed, line, left, top) {
  const apart = placed.inner.has(line.from) || placed.inner.has(line.to);
  const groups = apart ? line.gradients.map((gradient) => [gradient]) : [line.gradients];
  const endsAtBox = !placed.inner.has(line.to) && placed.sheet.things[line.to].gradient === undefined;
  for (const [i, gradients] of groups.entries()) {
    yield shape("path", {
      class: line.turned ? "line turned" : "line",
      "data-from": placed.sheet.things[line.from].name,
      "data-to": placed.sheet.things[line.to].name,
      "data-gradients": gradients.join(" "),
      d: traceLine(placed, line, gradients[0], (i - (groups.length - 1) / 2) * 4, left, top),
      [line.turned ? "marker-start" : "marker-end"]: endsAtBox ? "url(#tip)" : undefined,
    });
  }
}

function traceLine(placed, line, gradient, aside, left, top) {
  const [first, last] = [line.chain[0], line.chain.at(-1)];
  let x = endOf(placed, first, gradient, first === line.to);
  let y = placed.spots[first].y + placed.spots[first].height;
  let row = placed.sheet.rowOf[first];
  const parts = [`M${round(left + x)} ${round(top + y)}`];
  for (const number of line.chain.slice(1)) {
    if (placed.bottoms[row] > y) parts.push(`V${round(top + placed.bottoms[row])}`);
    [y, row] = [placed.bottoms[row], placed.sheet.rowOf[number]];
    const to = number === last ? endOf(placed, last, gradient, last === line.to) : placed.spots[number].x + aside;
    const [head, down] = [placed.heads[row], placed.tops[row]];
    if (to !== x) {
      const middle = round(top + (y + head) / 2);
      parts.push(`C${round(left + x)} ${middle} ${round(left + to)} ${middle} ${round(left + to)} ${round(top + head)}`);
    }
    parts.push(`V${round(top + down)}`);
    [x, y] = [to, down];
  }
  return parts.join(" ");
}

function endOf(placed, number, gradient, enters) {
  const { x, left } = placed.spots[number];
  return placed.inner.has(number) ? x - left + placed.inner.get(number).gates.get(gate(gradient, enters)) : x;
}
