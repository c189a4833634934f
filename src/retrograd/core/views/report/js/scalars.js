/** The scalars of the strip: which share a chart, on which scale, and how their numbers are read. */

import { formatCount } from "./counts.js";
import { formatNumber, formatTick } from "./format.js";
import { scalarLine } from "./measures.js";
import { facts } from "./payload.js";
import { smooth } from "./smoothing.js";
import { formatBytes, formatSeconds } from "./sizes.js";
import { state } from "./state.js";

const COLORS = ["loss", "run-1", "run-0", "run-2", "run-3", "run-5", "run-6", "run-4"];

/** Charts by name: [name, its scalars]; the first is open as long as none was chosen. */
export function listCharts() {
  const charts = new Map();
  facts.scalars?.listed.forEach((each, number) => {
    if (!charts.has(each.chart)) charts.set(each.chart, []);
    charts.get(each.chart).push({ ...each, number, color: COLORS[charts.get(each.chart).length % COLORS.length] });
  });
  return charts;
}

/** Names of the charts that are open, in their order. */
export function openCharts() {
  const names = [...listCharts().keys()];
  return state.scalars.length ? names.filter((name) => state.scalars.includes(name)) : names.slice(0, 1);
}

/** What the address says instead where a person has closed all charts. */
const NONE = "";

export function toggleChart(name) {
  const open = openCharts();
  const names = open.includes(name) ? open.filter((other) => other !== name) : [...open, name];
  return names.length ? names : [NONE];
}

/** The scale of a chart: {scale, why}; logarithmic only where no finite number is zero or below. */
export function scaleOf(name, members) {
  const isPositive = members.every(({ number }) => (scalarLine(number, "low") ?? []).every((value) => !Number.isFinite(value) || value > 0));
  if (!isPositive) return { scale: "linear", why: "linear: some numbers are not positive" };
  const [own, other] = members[0].scale === "log" ? ["log", "linear"] : ["linear", "log"];
  return { scale: state.scales.includes(name) ? other : own, why: "" };
}

const weight = () => Math.min(Math.max(Number(state.smooth) || 0, 0), 0.999);

/** Lines of a chart, each raw, and smoothed above that where this is wanted. */
export function linesOf(members) {
  return members.flatMap((each) => {
    const { name, number, color } = each;
    const line = scalarLine(number);
    if (!line) return [];
    const sparse = isSparse(line);
    const edges = facts.columns.width === 1 ? [] : ["low", "high"].map((band) => ({ name, line: scalarLine(number, band), color, band: true }));
    const raw = { name, line, color, sparse, width: 1.5 };
    return [...edges, ...(isSmoothed(each, sparse) ? [{ ...raw, faint: true }, { ...raw, line: smooth(line, weight()) }] : [raw])];
  });
}

/** What is set, and what was measured only now and then, stays as it is. */
const isSmoothed = ({ exact }, sparse) => weight() > 0 && !exact && !sparse;

/** Whether most numbers stand alone, as those of an evaluation now and then. */
function isSparse(line) {
  let [count, alone] = [0, 0];
  line.forEach((value, i) => {
    if (Number.isNaN(value)) return;
    count += 1;
    if (Number.isNaN(line[i - 1] ?? NaN) && Number.isNaN(line[i + 1] ?? NaN)) alone += 1;
  });
  return alone > count / 2;
}

/** Columns in which no number was finite though there were some. */
export const badOf = (members) =>
  members.reduce((bad, { number }) => {
    scalarLine(number)?.forEach((value, column) => {
      if (value === Infinity) (bad ??= new Uint8Array(facts.columns.first.length))[column] = 1;
    });
    return bad;
  }, null);

/** {text, smoothed, at}: what a scalar reads at the cursor, or last; of one that has no number there, the last before. */
export function readScalar(each) {
  const { number, unit } = each;
  const line = scalarLine(number);
  if (!line) return { text: "…", smoothed: "" };
  let column = state.cursor ?? line.findLastIndex((value) => !Number.isNaN(value));
  const sparse = isSparse(line);
  while (sparse && column > 0 && Number.isNaN(line[column])) column -= 1;
  const isBad = line[column] === Infinity;
  const smoothed = isSmoothed(each, sparse) && !isBad ? print(smooth(line, weight())[column] ?? NaN, unit) : "";
  return { text: isBad ? sayBroken(line, scalarLine(number, "low"), column) : print(line[column] ?? NaN, unit), smoothed };
}

/** A number that is not finite is said to be so, and since when. */
function sayBroken(line, low, column) {
  let since = column;
  while (since > 0 && !Number.isFinite(line[since - 1])) since -= 1;
  const word = Number.isNaN(low[column]) ? "NaN" : "not finite";
  return `${word} since step ${formatCount(facts.columns.first[since])}`;
}

const print = (value, unit) => (Number.isNaN(value) ? "–" : unit in PRINTERS ? PRINTERS[unit](value) : [formatNumber(value), unit].filter(Boolean).join(" "));
const PRINTERS = { B: formatBytes, s: formatSeconds };

/** What a chart shows, in a sentence for each of its scalars. */
export const aboutChart = (members) => members.map(({ name, about, unit }) => `${name}: ${about}${unit ? `, in ${unit}` : ""}`).join("\n");

/** How numbers beside a chart are printed. */
export const tickPrinter = ({ unit }) => (unit === "B" ? formatBytes : formatTick);
