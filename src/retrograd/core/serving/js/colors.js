/** The colour of each run: by a column, along a scale where that has numbers, or one of eight for each other text. */

import { make } from "./dom.js";
import { draw, makeAxis, printShort } from "./overlay.js";
import { isDark } from "./theme.js";

const HUES = [255, 50, 150, 325, 95, 205, 10, 285];
const GREY = () => (isDark() ? "#8b95a3" : "#8a93a0");

const plain = (hue) => `oklch(${isDark() ? 0.77 : 0.55} 0.15 ${hue})`;
/** From blue over green to orange, lighter on the way: told apart also without a sense of red and green. */
const along = (share) => `oklch(${(isDark() ? 0.6 : 0.42) + 0.26 * share} 0.15 ${265 - 205 * share})`;

export const isWide = (numbers) => numbers.every((number) => number > 0) && Math.max(...numbers) > 20 * Math.min(...numbers);

/** `of(run)` is a colour, `legend` says what it means. */
export function makeColors(runs, column) {
  const values = runs.map(column.of);
  const numbers = values.filter((value) => typeof value === "number" && Number.isFinite(value));
  const texts = [...new Set(values.filter((value) => value !== null && value !== undefined && typeof value !== "number").map(String))];
  if (!texts.length && new Set(numbers).size > 2) {
    const axis = makeAxis(numbers, isWide(numbers));
    const of = (run) => (Number.isFinite(column.of(run) ?? NaN) ? along(axis.of(column.of(run))) : GREY());
    const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => [along(share), printShort(axis.isLog ? axis.low * (axis.high / axis.low) ** share : axis.low + share * (axis.high - axis.low))]);
    const isMissing = numbers.length < runs.length;
    return { of, legend: makeLegend(`${column.title}${axis.isLog ? " (log)" : ""}`, [...marks, ...(isMissing ? [[GREY(), "not known, or not finite"]] : [])]) };
  }
  const keys = [...new Set(values.map(String))].toSorted(new Intl.Collator("en", { numeric: true }).compare);
  const of = (run) => plain(HUES[keys.indexOf(String(column.of(run))) % HUES.length]);
  const marks = keys.slice(0, 12).map((key, number) => [plain(HUES[number % HUES.length]), key === "null" || key === "undefined" ? "none" : key]);
  const rest = keys.length > 12 ? [[GREY(), `and ${keys.length - 12} others, in the same colours again`]] : [];
  return { of, legend: column.name === "name" ? [] : makeLegend(column.title, [...marks, ...rest]) };
}

const makeLegend = (title, marks) => [make("span", {}, `${title}:`), ...marks.map(([color, text]) => make("span", {}, makeSwatch(color), text))];

export const makeSwatch = (color) => draw("svg", { class: "swatch", width: 14, height: 10, "aria-hidden": "true" }, draw("rect", { y: 3, width: 14, height: 4, rx: 2, fill: color }));
