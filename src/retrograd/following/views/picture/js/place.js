/** Coordinates of a sheet when some of its folds are open: the same as placing.py, line by line. */

import { sheets } from "./scene.js";

const LETTER = 0.602;
const TITLE = 13;
const BEND = 14;
const PORT = 12;
const [SPACE, SIDE, HEAD, FOOT] = [26, 20, 30, 20];
const [GAP, LABEL_LINE, LABEL_FOOT] = [18, 13, 11];
const [SWEEPS, FREE_SWEEPS] = [12, 6];
const [IS_THING, IS_BEND, IS_END] = [0, 1, 2];
const WEIGHTS = [1000, 1, 0.3];
const NO_WEIGHT = 0.01;

/** A gradient at the border of a fold, as a key. */
export const gate = (gradient, enters) => `${gradient} ${enters ? "in" : "out"}`;

/** Place the inside of a fold, and what is open in it. */
export function place(fold, opened) {
  const sheet = sheets[fold];
  const inner = new Map();
  sheet.things.forEach((thing, i) => {
    if (opened.has(thing.fold)) inner.set(i, place(thing.fold, opened));
  });
  const sizes = measure(sheet, inner);
  const rowOf = new Array(sizes.length).fill(0);
  sheet.rows.forEach((row, r) => row.forEach((number) => (rowOf[number] = r)));
  const ties = tie(sheet, inner, sizes, rowOf);
  const xs = spread(sheet, sizes, ties);
  const { heads, tops, bottoms, height } = stack(sheet, sizes, xs, ties, rowOf);
  const left = Math.min(...xs.map((x, i) => x - sizes[i][0] / 2));
  const right = Math.max(...xs.map((x, i) => x + sizes[i][0] / 2));
  const width = Math.max(right - left + 2 * SIDE, 2 * (sheet.title.length * LETTER * TITLE + 28));
  const shift = (width - (right - left)) / 2 - left;
  const spots = xs.map((x, i) => ({ x: x + shift, y: tops[rowOf[i]], width: sizes[i][0], height: sizes[i][1] }));
  const gates = new Map();
  sheet.things.forEach((thing, i) => {
    if (thing.gradient !== undefined) gates.set(gate(thing.gradient, thing.enters), spots[i].x);
  });
  return { sheet, width, height, spots, heads, tops, bottoms, rowOf, inner, gates };
}

function measure(sheet, inner) {
  const sizes = sheet.things.map((thing, i) => {
    if (inner.has(i)) return [inner.get(i).width, inner.get(i).height];
    return thing.gradient === undefined ? [thing.width, thing.height] : [PORT, 0];
  });
  const count = sheet.rows.reduce((sum, row) => sum + row.length, 0);
  while (sizes.length < count) sizes.push([BEND, 0]);
  return sizes;
}

function tie(sheet, inner, sizes, rowOf) {
  const ties = [];
  for (const line of sheet.lines) {
    const ends = new Map([[line.from, endOf(line, line.from, inner, sizes, false)]]);
    ends.set(line.to, endOf(line, line.to, inner, sizes, true));
    for (let i = 1; i < line.chain.length; i++) {
      const [upper, lower] = [line.chain[i - 1], line.chain[i]];
      if (rowOf[lower] !== rowOf[upper] + 1) continue;
      ties.push({ upper, lower, upperEnd: ends.get(upper) ?? 0, lowerEnd: ends.get(lower) ?? 0 });
    }
  }
  return ties;
}

/** How far from the middle of a thing a line ends: at the gates of an open fold. */
function endOf(line, number, inner, sizes, enters) {
  if (!inner.has(number)) return 0;
  const gates = line.gradients.map((gradient) => inner.get(number).gates.get(gate(gradient, enters)));
  return gates.reduce((sum, x) => sum + x, 0) / gates.length - sizes[number][0] / 2;
}

function spread(sheet, sizes, ties) {
  const xs = new Array(sizes.length).fill(0);
  const up = sizes.map(() => []);
  const down = sizes.map(() => []);
  for (const each of ties) {
    up[each.lower].push(each);
    down[each.upper].push(each);
  }
  const kinds = sizes.map((_, i) => {
    if (i >= sheet.things.length) return IS_BEND;
    return up[i].length && !down[i].length ? IS_END : IS_THING;
  });
  for (const row of sheet.rows) {
    settle(
      row,
      row.map(() => 0),
      row.map(() => 1),
      sizes,
      kinds,
      xs,
    );
  }
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const downwards = sweep % 2 === 0;
    for (const row of downwards ? sheet.rows.slice(1) : sheet.rows.slice(0, -1).reverse()) {
      const near = row.map((number) =>
        pull(number, (downwards ? up : down)[number], xs, kinds, sweep >= FREE_SWEEPS),
      );
      const wanted = near.map((x, i) => x ?? xs[row[i]]);
      const weights = near.map((x, i) => (x === null ? NO_WEIGHT : WEIGHTS[kinds[row[i]]]));
      settle(row, wanted, weights, sizes, kinds, xs);
    }
  }
  return xs;
}

/** Where neighbours want it: the median of those that matter most to it. */
function pull(number, ties, xs, kinds, isLate) {
  const wanted = [[], [], []];
  for (const each of ties) {
    const below = each.lower === number;
    const other = below ? each.upper : each.lower;
    wanted[kinds[other]].push(
      xs[other] + (below ? each.upperEnd - each.lowerEnd : each.lowerEnd - each.upperEnd),
    );
  }
  const some = (...lists) => lists.find((list) => list.length) ?? [];
  const chosen =
    kinds[number] === IS_BEND
      ? some(wanted[IS_BEND], ...(isLate ? [] : [wanted[IS_THING], wanted[IS_END]]))
      : some(wanted[IS_THING], wanted[IS_BEND], wanted[IS_END]);
  if (!chosen.length) return null;
  chosen.sort((a, b) => a - b);
  const middle = Math.floor(chosen.length / 2);
  return chosen.length % 2 ? chosen[middle] : (chosen[middle - 1] + chosen[middle]) / 2;
}

/** As near to the wanted places as can be without overlaps: neighbours that collide are pooled. */
function settle(row, wanted, weights, sizes, kinds, xs) {
  const offsets = [];
  let offset = 0;
  row.forEach((number, i) => {
    if (i) {
      const before = row[i - 1];
      const space = kinds[number] === IS_BEND && kinds[before] === IS_BEND ? 4 : SPACE;
      offset += (sizes[before][0] + sizes[number][0]) / 2 + space;
    }
    offsets.push(offset);
  });
  const pools = [];
  row.forEach((_, i) => {
    pools.push([(wanted[i] - offsets[i]) * weights[i], weights[i], 1]);
    while (pools.length > 1 && pools.at(-2)[0] / pools.at(-2)[1] > pools.at(-1)[0] / pools.at(-1)[1]) {
      const [total, weight, members] = pools.pop();
      pools.at(-1)[0] += total;
      pools.at(-1)[1] += weight;
      pools.at(-1)[2] += members;
    }
  });
  let i = 0;
  for (const [total, weight, members] of pools) {
    for (let n = 0; n < members; n++, i++) xs[row[i]] = total / weight + offsets[i];
  }
}

function stack(sheet, sizes, xs, ties, rowOf) {
  const sideways = sheet.rows.map(() => 0);
  for (const { upper, lower, upperEnd, lowerEnd } of ties) {
    const far = Math.abs(xs[upper] + upperEnd - xs[lower] - lowerEnd);
    sideways[rowOf[lower]] = Math.max(sideways[rowOf[lower]], far);
  }
  const [heads, tops, bottoms] = [[], [], []];
  let y = 0;
  let ports = false;
  sheet.rows.forEach((row, r) => {
    const things = row.filter((number) => number < sheet.things.length).map((number) => sheet.things[number]);
    const labels = Math.max(0, ...things.map((thing) => thing.labels?.length ?? 0));
    ports = things.some((thing) => thing.gradient !== undefined);
    if (r === 0) y = ports ? 0 : HEAD;
    else y += GAP + Math.min(sideways[r] * 0.12, 70) + (r === 1 && tops[0] === 0 ? 14 : 0);
    heads.push(y);
    y += labels ? LABEL_FOOT + LABEL_LINE * labels : 0;
    tops.push(y);
    y += Math.max(...row.map((number) => sizes[number][1]));
    bottoms.push(y);
  });
  return { heads, tops, bottoms, height: ports && sheet.rows.length > 1 ? y : y + FOOT };
}
