/** Coordinates of a sheet when some of its folds are open: the same as placing.py, line by line. */

import { sheets } from "./scene.js";

const [LETTER, TITLE, BEND] = [0.602, 13, 14];
const [SPACE, SIDE, HEAD, FOOT, GAP] = [26, 20, 30, 20, 18];

/** A gradient at the border of a fold, as a key. */
export const gate = (gradient, enters) => `${gradient} ${enters ? "in" : "out"}`;

/** Place the inside of a fold, and what is open in it. */
export function place(fold, opened) {
  const sheet = sheets[fold];
  const inner = new Map();
  sheet.things.forEach((thing, i) => {
    if (opened.has(thing.fold)) inner.set(i, place(thing.fold, opened));
  });
  const sizes = sheet.xs.map((_, i) => measure(sheet.things[i], inner.get(i)));
  const xs = stretch(sheet, sizes, inner);
  const { heads, tops, bottoms, height } = stack(sheet, sizes, xs);
  const first = Math.min(...xs.map((x, i) => x - sizes[i].left));
  const last = Math.max(...xs.map((x, i) => x + sizes[i].right));
  const width = Math.max(last - first + 2 * SIDE, 2 * (sheet.title.length * LETTER * TITLE + 28));
  const shift = (width - (last - first)) / 2 - first;
  const spots = xs.map((x, i) => ({ x: x + shift, y: tops[sheet.rowOf[i]], ...sizes[i] }));
  const gates = new Map();
  sheet.things.forEach((thing, i) => {
    if (thing.gradient !== undefined) gates.set(gate(thing.gradient, thing.enters), spots[i].x);
  });
  return { sheet, width, height, spots, heads, tops, bottoms, inner, gates };
}

/** How far a thing, or a bend, reaches to both sides of where lines end at it, and its height. */
function measure(thing, inner) {
  if (inner === undefined) {
    const { width, height } = thing ?? { width: BEND, height: 0 };
    return { left: width / 2, right: width / 2, height };
  }
  const gates = [...inner.gates].filter(([key]) => key.endsWith(" in")).map(([, x]) => x);
  const left = gates.length ? gates.reduce((sum, x) => sum + x, 0) / gates.length : inner.width / 2;
  return { left, right: inner.width - left, height: inner.height };
}

/** Horizontal places with room for open folds. What stands in one column still does. */
function stretch(sheet, sizes, inner) {
  const xs = [...sheet.xs];
  const before = new Map(sheet.rows.flatMap((row) => row.slice(1).map((number, i) => [number, row[i]])));
  const columns = new Map();
  sheet.xs.forEach((x, i) => columns.get(x)?.push(i) ?? columns.set(x, [i]));
  let moved = 0;
  for (const [x, numbers] of [...columns].sort(([a], [b]) => a - b)) {
    for (const b of numbers) {
      const a = before.get(b);
      if (inner.has(a) || (a !== undefined && inner.has(b)))
        moved = Math.max(moved, xs[a] + sizes[a].right + SPACE + sizes[b].left - x);
    }
    for (const number of numbers) xs[number] += moved;
  }
  return xs;
}

function stack(sheet, sizes, xs) {
  const sideways = sheet.rows.map(() => 0);
  for (const { chain } of sheet.lines) {
    for (let i = 1; i < chain.length; i++) {
      const row = sheet.rowOf[chain[i]];
      sideways[row] = Math.max(sideways[row], Math.abs(xs[chain[i - 1]] - xs[chain[i]]));
    }
  }
  const [heads, tops, bottoms] = [[], [], []];
  let y = 0;
  let ports = false;
  sheet.rows.forEach((row, r) => {
    const things = row.map((number) => sheet.things[number]).filter(Boolean);
    ports = things.some((thing) => thing.gradient !== undefined);
    if (r === 0) y = ports ? 0 : HEAD;
    else y += GAP + Math.min(sideways[r] * 0.12, 70) + (r === 1 && tops[0] === 0 ? 14 : 0);
    heads.push(y);
    y += Math.max(0, ...things.map((thing) => thing.head));
    tops.push(y);
    y += Math.max(...row.map((number) => sizes[number].height));
    bottoms.push(y);
  });
  return { heads, tops, bottoms, height: ports && sheet.rows.length > 1 ? y : y + FOOT };
}
