/** Parallel coordinates: an axis for each setting in which runs differ by numbers, one below the other, and the final loss. */

import { isWide } from "./colors.js";
import { fill } from "./dom.js";
import { draw, makeAxis, printShort } from "./overlay.js";

const MOST = 7;
const FEW = 6; // values that are all told
const [TOP, ROW, SIDE, FOOT] = [24, 46, 22, 22];
const LETTER = 7; // pixels of a letter of a tick

/** The columns that have axes, and those for which there is no room; none where no setting differs by numbers, or no loss is known. */
export function listAxes(runs, columns) {
  const numbersOf = (column) => runs.map(column.of).filter((value) => typeof value === "number" && Number.isFinite(value));
  const final = columns.find(({ name }) => name === "final");
  const found = columns.filter((column) => column.isSetting && column.isNumber && column.differs && new Set(numbersOf(column)).size > 1);
  if (!found.length || numbersOf(final).length < 2) return { axes: [], left: [] };
  const agreement = new Map(found.map((column) => [column, agree(runs, column, final)]));
  const kept = found.toSorted((a, b) => agreement.get(b) - agreement.get(a)).slice(0, MOST);
  const axes = [...found.filter((column) => kept.includes(column)), final].map((column) => {
    const numbers = numbersOf(column);
    const axis = makeAxis(numbers, isWide(numbers));
    return { column, axis, ticks: chooseTicks(numbers, axis) };
  });
  return { axes, left: found.filter((column) => !kept.includes(column)) };
}

/** How far two columns order runs alike, or the other way round, 0 to 1: Spearman's rank correlation without its sign. */
function agree(runs, one, other) {
  const both = runs.map((run) => [one.of(run), other.of(run)]).filter((pair) => pair.every((value) => Number.isFinite(value ?? NaN)));
  const [a, b] = [0, 1].map((side) => rank(both.map((pair) => pair[side])));
  const dot = (x, y) => x.reduce((sum, value, i) => sum + value * y[i], 0);
  return Math.abs(dot(a, b)) / Math.sqrt(dot(a, a) * dot(b, b) || 1);
}

/** Ranks around zero; equal numbers share the mean of theirs. */
function rank(numbers) {
  const sorted = numbers.toSorted((a, b) => a - b);
  return numbers.map((number) => (sorted.indexOf(number) + sorted.lastIndexOf(number) - sorted.length + 1) / 2);
}

/** Few values are told themselves; between whole numbers there is nothing to tell. */
function chooseTicks(numbers, { ticks }) {
  const distinct = [...new Set(numbers)].toSorted((a, b) => a - b);
  if (distinct.length <= FEW) return distinct;
  return numbers.every(Number.isInteger) ? ticks.filter(Number.isInteger) : ticks;
}

/** Those of an axis that do not run into each other; the ends first. */
function placeTicks({ axis, ticks }, left) {
  const placed = [];
  for (const tick of [ticks[0], ticks.at(-1), ...ticks.slice(1, -1)]) {
    const [x, text] = [left(axis.of(tick)), printShort(tick)];
    if (placed.every((other) => Math.abs(other.x - x) > (LETTER * (other.text.length + text.length)) / 2)) placed.push({ x, text });
  }
  return placed;
}

export function drawParallel(host, runs, axes, colorOf, { point }) {
  const width = Math.max(host.clientWidth, 220);
  const height = TOP + (axes.length - 1) * ROW + FOOT;
  const left = (share) => SIDE + share * (width - 2 * SIDE);
  const top = (number) => TOP + number * ROW;
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${axes.map(({ column }) => column.title).join(", ")} of ${runs.length} runs` });
  const paths = new Map();
  for (const run of runs) {
    const values = axes.map(({ column }) => column.of(run));
    if (!values.every((value) => Number.isFinite(value ?? NaN))) continue;
    const line = draw("path", { class: "curve", stroke: colorOf(run), d: values.map((value, number) => `${number ? "L" : "M"}${left(axes[number].axis.of(value)).toFixed(1)},${top(number)}`).join("") });
    line.append(draw("title", {}, `${run.name}: ${values.map((value, number) => `${axes[number].column.title} ${printShort(value)}`).join(", ")}`));
    line.addEventListener("pointerenter", () => point(run.name));
    line.addEventListener("pointerleave", () => point(null));
    paths.set(run.name, line);
    svg.append(line);
  }
  for (const [number, each] of axes.entries()) {
    const { column, axis } = each;
    svg.append(draw("line", { class: "axis", x1: left(0), x2: left(1), y1: top(number), y2: top(number) }));
    svg.append(draw("text", { class: "axis-title", x: left(0) - SIDE + 2, y: top(number) - 8 }, `${column.title}${axis.isLog ? " (log)" : ""}`));
    for (const { x, text } of placeTicks(each, left)) svg.append(draw("text", { x, y: top(number) + 14, "text-anchor": "middle" }, text));
  }
  fill(host, svg);
  return (name) => {
    for (const [each, line] of paths) {
      line.classList.toggle("hot", each === name);
      line.classList.toggle("cold", name !== null && each !== name);
    }
  };
}
