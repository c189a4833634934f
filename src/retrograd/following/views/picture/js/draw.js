/** A placed scene as SVG elements: the same as drawing.py. */

import { gate } from "./place.js";

const [LETTER, PILL] = [0.602, 10.5];
const [TITLE_LINE, NOTE_LINE, PILL_LINE, LABEL_LINE] = [17, 15, 19, 13];
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
    const { x, y, width } = placed.spots[i];
    if (placed.inner.has(i)) yield drawFrame(thing, placed.inner.get(i), left + x - width / 2, top + y);
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
  const left = x - thing.width / 2;
  const isFold = thing.kind === "fold";
  const group = shape("g", {
    class: `box ${thing.kind}`,
    "data-name": thing.name,
    "data-fold": thing.fold === undefined ? undefined : String(thing.fold),
    role: "treeitem",
    tabindex: "-1",
    "aria-expanded": thing.fold === undefined ? undefined : "false",
    "aria-label": [thing.title, ...thing.notes, ...thing.pills, ...thing.labels].join(", "),
  });
  group.append(shape("rect", { class: "back", x: left, y, width: thing.width, height: thing.height, rx: 7 }));
  if (isFold && thing.fold !== undefined) {
    group.append(shape("path", { class: "sign", d: `M${round(left + 10)} ${round(y + 12)} l4 4 l-4 4` }));
  }
  let line = y + 7 + TITLE_LINE - 4;
  group.append(shape("text", { class: "title", x, y: line }, thing.title));
  for (const note of thing.notes) group.append(shape("text", { class: "note", x, y: (line += NOTE_LINE) }, note));
  line += 7;
  for (const pill of thing.pills) {
    const width = pill.length * LETTER * PILL + 14;
    group.append(shape("rect", { class: "pill", x: x - width / 2, y: line, width, height: 16, rx: 8 }));
    group.append(shape("text", { class: "leaf", x, y: line + 11.5 }, pill));
    line += PILL_LINE;
  }
  [...thing.labels].reverse().forEach((label, i) => {
    group.append(shape("text", { class: "label", x, y: y - 13 - i * LABEL_LINE }, label));
  });
  return group;
}

/** One line, or one for each gradient where it ends at an open fold, whose gates are apart. */
function* drawLine(placed, line, left, top) {
  const apart = placed.inner.has(line.from) || placed.inner.has(line.to);
  const groups = apart ? line.gradients.map((gradient) => [gradient]) : [line.gradients];
  const endsAtBox = !placed.inner.has(line.to) && placed.sheet.things[line.to].gradient === undefined;
  for (const [i, gradients] of groups.entries()) {
    yield shape("path", {
      class: line.turned ? "line turned" : "line",
      "data-from": nameOf(placed.sheet.things[line.from]),
      "data-to": nameOf(placed.sheet.things[line.to]),
      "data-gradients": gradients.join(" "),
      d: traceLine(placed, line, gradients[0], (i - (groups.length - 1) / 2) * 4, left, top),
      [line.turned ? "marker-start" : "marker-end"]: endsAtBox ? "url(#tip)" : undefined,
    });
  }
}

function nameOf(thing) {
  if (thing.gradient === undefined) return thing.name;
  return `${thing.enters ? "in" : "out"}-${thing.gradient.replace(".", "-")}`;
}

function traceLine(placed, line, gradient, aside, left, top) {
  const [first, last] = [line.chain[0], line.chain.at(-1)];
  let x = endOf(placed, first, gradient, first === line.to);
  let y = placed.spots[first].y + placed.spots[first].height;
  let row = placed.rowOf[first];
  const parts = [`M${round(left + x)} ${round(top + y)}`];
  for (const number of line.chain.slice(1)) {
    if (placed.bottoms[row] > y) parts.push(`V${round(top + placed.bottoms[row])}`);
    [y, row] = [placed.bottoms[row], placed.rowOf[number]];
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
  const { x, width } = placed.spots[number];
  return placed.inner.has(number) ? x - width / 2 + placed.inner.get(number).gates.get(gate(gradient, enters)) : x;
}
