/** Parallel coordinates: an axis for each setting in which runs differ by numbers, and the final loss. */

import { isWide } from "./colors.js";
import { fill } from "./dom.js";
import { draw, makeAxis, printShort } from "./overlay.js";

const MOST = 7;
const TOP = 34;

/** The columns that have axes; none where no setting differs by numbers, or no loss is known. */
export function listAxes(runs, columns) {
  const numbersOf = (column) => runs.map(column.of).filter((value) => typeof value === "number" && Number.isFinite(value));
  const final = columns.find(({ name }) => name === "final");
  const found = columns.filter((column) => column.isNumber && column.differs && new Set(numbersOf(column)).size > 1).slice(0, MOST);
  if (!found.length || numbersOf(final).length < 2) return [];
  return [...found, final].map((column) => ({ column, axis: makeAxis(numbersOf(column), isWide(numbersOf(column))) }));
}

export function drawParallel(host, runs, axes, colorOf, { height = 262, point }) {
  const width = Math.max(host.clientWidth, 220);
  const left = (number) => 26 + (number / (axes.length - 1)) * (width - 74);
  const top = (share) => TOP + (1 - share) * (height - TOP - 12);
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${axes.map(({ column }) => column.title).join(", ")} of ${runs.length} runs` });
  const paths = new Map();
  for (const run of runs) {
    const values = axes.map(({ column }) => column.of(run));
    if (!values.every((value) => Number.isFinite(value ?? NaN))) continue;
    const line = draw("path", { class: "curve", stroke: colorOf(run), d: values.map((value, number) => `${number ? "L" : "M"}${left(number).toFixed(1)},${top(axes[number].axis.of(value)).toFixed(1)}`).join("") });
    line.append(draw("title", {}, `${run.name}: ${values.map((value, number) => `${axes[number].column.title} ${printShort(value)}`).join(", ")}`));
    line.addEventListener("pointerenter", () => point(run.name));
    line.addEventListener("pointerleave", () => point(null));
    paths.set(run.name, line);
    svg.append(line);
  }
  for (const [number, { column, axis }] of axes.entries()) {
    const end = number === axes.length - 1 ? "end" : number ? "middle" : "start";
    const shift = { start: -22, middle: 0, end: 44 }[end];
    const title = column.title.length > 14 ? `${column.title.slice(0, 13)}…` : column.title;
    svg.append(draw("line", { class: "axis", x1: left(number), x2: left(number), y1: top(0), y2: top(1) }), draw("text", { x: left(number) + shift, y: 12, "text-anchor": end }, title, draw("title", {}, column.title)));
    if (axis.isLog) svg.append(draw("text", { x: left(number) + shift, y: 25, "text-anchor": end }, "log"));
    for (const tick of axis.ticks) svg.append(draw("text", { x: left(number) + 4, y: top(axis.of(tick)) + 4 }, printShort(tick)));
  }
  fill(host, svg);
  return (name) => {
    for (const [each, line] of paths) {
      line.classList.toggle("hot", each === name);
      line.classList.toggle("cold", name !== null && each !== name);
    }
  };
}
