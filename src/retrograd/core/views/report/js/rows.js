/** What the map shows at present: its rows, the numbers of each, their common scale and colours. */

import { makePalette } from "./colors.js";
import { makeFilter } from "./filter.js";
import { badOf, bandOf, extendLine, knownColumns, lineOf, statisticOf } from "./measures.js";
import { facts } from "./payload.js";
import { fitScale, shadeWith, sortNumbers } from "./scale.js";
import { quantityOf, state } from "./state.js";
import { columnOf, shownColumns } from "./steps.js";
import { isDark } from "./theme.js";
import { buildList, buildTree, buildTypes, chooseDepth, listRows } from "./tree.js";

const ROWS_AT_FIRST = 64;

/** rows: nodes of the tree; scale, shade, palette: how numbers become colours; problem: why the filter fails. */
export const shown = { rows: [], total: 0, scale: null, shade: null, palette: null, problem: "" };

const trees = new Map();
const merged = new Map(); // statistic, band and row → its line, of what is shown at present
let shownNow = ""; // quantity, statistic and band

/** Tree of a quantity and the depth to which it starts unfolded. */
export function treeOf(key) {
  const cached = `${state.order} ${key}`;
  if (!trees.has(cached)) {
    const top = (BUILDERS[state.order] ?? buildTree)(quantityOf(key));
    trees.set(cached, { top, depth: chooseDepth(top, ROWS_AT_FIRST), total: countPlaces(top) });
  }
  return trees.get(cached);
}

const BUILDERS = { type: buildTypes, value: buildList, broken: buildList };

const countPlaces = (top) => new Set(top.children.flatMap((node) => node.places)).size;

/** The depth from which on modules are folded. */
export const foldDepth = (key = state.quantity) => (state.depth === "auto" ? treeOf(key).depth : Number(state.depth));

export const isFolded = (node) => node.depth >= foldDepth() !== state.flipped.includes(node.id);

/** Whether a row stands for several places. */
export const isMerged = (node) => Boolean(node.children) && !state.filter && isFolded(node) && node.places.length > 1;

/** All numbers are others; with other sites, the rows may be, too. */
export function forgetNumbers(withRows) {
  merged.clear();
  if (withRows) trees.clear();
}

export function listShownRows() {
  const { top, total } = treeOf(state.quantity);
  let matches = null;
  shown.problem = "";
  try {
    matches = makeFilter(state.filter);
  } catch (error) {
    shown.problem = `not a regular expression: ${error.message}`;
  }
  shown.rows = listRows(top, isFolded, matches && ((number) => siteNames(number).some(matches)));
  if (state.order === "value") sortRows();
  if (state.order === "broken") sortByFirst();
  shown.total = total;
}

/** The column at which rows are sorted by value. */
export const sortColumn = () => (state.at === "" ? shownColumns()[1] : columnOf(Number(state.at)));

/** The largest first: what is not finite above all, what was not recorded below. */
function sortRows() {
  const column = sortColumn();
  const valueOf = (node) => {
    const { line, bad } = numbersOf(node);
    return bad?.[column] > 0 ? Infinity : (line?.[column] ?? NaN);
  };
  const values = new Map(shown.rows.map((node) => [node, valueOf(node)]));
  const rank = (node) => (Number.isNaN(values.get(node)) ? -Infinity : values.get(node));
  shown.rows = shown.rows.toSorted((a, b) => (rank(a) === rank(b) ? Number.isNaN(values.get(a)) - Number.isNaN(values.get(b)) : rank(b) - rank(a)));
}

/** The row that was not finite first is on top; of one step, gradients from the last layer back, as backward reaches them. */
function sortByFirst() {
  const firstOf = (node) => numbersOf(node).bad?.findIndex((count) => count > 0) ?? -1;
  const first = new Map(shown.rows.map((node) => [node, firstOf(node)]));
  const [broken, whole] = [shown.rows.filter((node) => first.get(node) >= 0), shown.rows.filter((node) => first.get(node) < 0)];
  if (isBackward()) broken.reverse();
  shown.rows = [...broken.toSorted((a, b) => first.get(a) - first.get(b)), ...whole];
}

const isBackward = () => quantityOf(state.quantity).site === "grad";

const siteNames = (number) => [facts.places[number].name, siteName(number)];

/** The site of a place that is shown. */
export function siteName(number) {
  const { series, name } = facts.places[number];
  const { site } = quantityOf(state.quantity);
  return facts.sites[series[site]] ?? `${name}.${site}`;
}

/** Why a place has nothing of what is shown, or empty. */
export const whyWithout = (number) => facts.places[number].without[quantityOf(state.quantity).site] ?? "";

/** Places of a row that have nothing of what is shown, for a known reason; of an unfolded row its own. */
export function placesWithout(node) {
  const places = isMerged(node) ? node.places : node.place === null ? [] : [node.place];
  const { site } = quantityOf(state.quantity);
  return places.filter((number) => whyWithout(number) && !(site in facts.places[number].series));
}

/** Whether a row has no numbers for a known reason: it is hatched from end to end. */
export const isWithout = (node) => placesWithout(node).length === (isMerged(node) ? node.places.length : 1);

export function fitColors() {
  const statistic = statisticOf(state.statistic);
  const [from, to] = shownColumns();
  const lines = shown.rows.map((node) => numbersOf(node).line).filter(Boolean);
  const factor = isRatio() && state.scale !== "auto" ? Number(state.scale) : null;
  shown.scale = fitScale(sortNumbers(lines, from, to), kindOfScale(statistic), factor);
  shown.shade = shadeWith(shown.scale);
  shown.palette = makePalette(statistic.signed, isDark());
}

/** Whether exactly zero has a colour of its own: on a logarithmic scale it is no smallest number. */
export const hasZero = () => shown.scale?.kind === "log";

/** Whether the map shows by which factor two runs differ. */
export const isRatio = () => statisticOf(state.statistic).scale === "ratio";

function kindOfScale(statistic) {
  if (statistic.scale === "ratio") return "ratio";
  const logarithmic = (state.scale === "auto" ? statistic.scale : state.scale) === "log";
  if (statistic.signed) return logarithmic ? "signed" : "signed-linear";
  return logarithmic ? "log" : "linear";
}

/** A row's numbers: {line, bad}, either of them null where there is none. A folded module's are merged. */
export function numbersOf(node) {
  if (isMerged(node)) return mergePlaces(node);
  return node.place === null ? { line: null, bad: null } : numbersOfPlace(node.place);
}

export function numbersOfPlace(number) {
  const series = facts.places[number].series[quantityOf(state.quantity).site];
  return { line: lineOf(state.statistic, state.band, series), bad: badOf(series, statisticOf(state.statistic).bad) };
}

/** How numbers of a folded module are merged, in words. */
export function mergeRule() {
  if (isRatio()) return "furthest from equal";
  if (statisticOf(state.statistic).signed) return "furthest from zero";
  return wantsSmallest() ? "smallest" : "largest";
}

function wantsSmallest() {
  return facts.columns.width > 1 && bandOf(statisticOf(state.statistic), state.band) === "low";
}

function mergePlaces(node) {
  const present = [state.quantity, state.statistic, state.band].join("|");
  if (present !== shownNow) merged.clear();
  shownNow = present;
  const { name, bad } = statisticOf(state.statistic);
  const { site } = quantityOf(state.quantity);
  const series = node.places.map((number) => facts.places[number].series[site]).filter((each) => each !== undefined);
  return {
    line: mergeLines(`line ${node.id}`, name, series, (each) => lineOf(name, state.band, each), chooseBetter()),
    bad: mergeLines(`bad ${node.id}`, bad ?? "nonfinite", series, (each) => badOf(each, bad), (a, b) => a > b),
  };
}

/** Whether the first of two numbers is the one that a merged row shows. */
export function chooseBetter() {
  if (statisticOf(state.statistic).signed) return (a, b) => Math.abs(a) > Math.abs(b);
  return wantsSmallest() ? (a, b) => a < b : (a, b) => a > b;
}

function mergeLines(key, name, series, lineOfSeries, better) {
  if (!series.some(lineOfSeries)) return null;
  const known = Math.min(...series.map((each) => knownColumns(name, each)));
  return extendLine(merged, key, known, (best, begin) => {
    best.fill(NaN, begin);
    for (const line of series.map(lineOfSeries).filter(Boolean)) {
      for (let i = begin; i < best.length; i++) {
        if (Number.isNaN(best[i]) || better(line[i], best[i])) best[i] = line[i];
      }
    }
  });
}
