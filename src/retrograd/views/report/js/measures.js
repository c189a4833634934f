/** Numbers by statistic, series and column. */

import { facts, readFloats } from "./payload.js";

const numbers = new Map(); // name of a block → {values, stride, columns, version}: a line each `stride` numbers
let generation = 0; // what was asked for before all columns, or all series, became others is of no use
const coming = new Map(); // name of a block → the answer that is on its way
const SPARE = 128; // columns that a followed run may gain before its numbers are copied
const largest = new Map(); // series → largest magnitudes

/** Statistics that can be chosen; the largest magnitude is made of the smallest and the largest element. */
export const STATISTICS = [];

/** Find them again, where sites have come meanwhile: nothing that was loaded fits then. */
export function findStatistics() {
  STATISTICS.splice(0, STATISTICS.length, ...facts.measures.map((measure) => ({ ...measure })));
  const ends = ["min", "max"].map((name) => STATISTICS.findIndex((statistic) => statistic.name === name));
  if (ends.every((place) => place >= 0)) {
    const largestMagnitude = {
      name: "abs_max",
      label: "largest magnitude",
      about: "The largest |x| among the finite elements of the tensor.",
      bands: ["high"],
      signed: false,
      share: false,
    };
    STATISTICS.splice(ends[0], 0, { ...largestMagnitude, series: STATISTICS[ends[1]].series });
  }
  for (const statistic of STATISTICS) statistic.rank = new Map(statistic.series.map((series, i) => [series, i]));
  forgetColumns(true);
}
findStatistics();

/** There are more columns, or other numbers in the last one; `anew` where all of them are others. */
export function forgetColumns(anew) {
  if (anew) numbers.clear();
  if (anew) generation += 1;
  largest.clear();
}

export const statisticOf = (name) => STATISTICS.find((statistic) => statistic.name === name) ?? STATISTICS[0];

export async function loadStatistic(name) {
  if (name === "abs_max") return Promise.all([loadStatistic("min"), loadStatistic("max")]);
  await load(`statistic-${name}`, () => STATISTICS.find((each) => each.name === name));
}

export const loadLoss = () => load("loss", () => facts.loss);

/** Load what is lacking of a block, one answer after the other, until it is what the page is about. */
async function load(block, describe) {
  while (describe() && !isLoaded(block)) {
    if (!coming.has(block)) coming.set(block, loadLacking(block, describe()).finally(() => coming.delete(block)));
    if ((await coming.get(block)) === null) return; // a file that lacks it
  }
}

const isLoaded = (block) => numbers.has(block) && (!facts.live || numbers.get(block).version === facts.live.version);

/** Load all of a block, or the columns that came since; null where there is none. */
async function loadLacking(block, { bands, series }) {
  const columns = facts.columns.first.length;
  const known = numbers.get(block);
  const begun = generation;
  const [version, from] = [facts.live?.version, known ? Math.max(known.columns - 1, 0) : 0];
  const added = await readFloats(block, from);
  if (added === null) return null;
  if (begun !== generation) return false;
  const [lines, width] = [bands.length * series.length, columns - from];
  if (!known && !facts.live) return Boolean(numbers.set(block, { values: added, stride: columns, columns }));
  const stride = known && known.stride >= columns ? known.stride : columns + SPARE;
  const values = known?.stride === stride ? known.values : new Float32Array(lines * stride).fill(NaN);
  for (let line = 0; line < lines; line++) {
    if (known && values !== known.values)
      values.set(known.values.subarray(line * known.stride, line * known.stride + from), line * stride);
    values.set(added.subarray(line * width, (line + 1) * width), line * stride + from);
  }
  numbers.set(block, { values, stride, columns, version });
  return true;
}

/** The band that is nearest to the one asked for among those a statistic has. */
export function bandOf(statistic, band) {
  return statistic.bands.includes(band) ? band : statistic.bands.at(-1);
}

/** The numbers of one series, a column each; null where the series lacks the statistic. */
export function lineOf(name, band, series) {
  if (name === "abs_max") return magnitudes(series);
  const statistic = STATISTICS.find((each) => each.name === name);
  const rank = statistic?.rank.get(series);
  return rank === undefined ? null : lineIn(`statistic-${name}`, statistic, band, rank);
}

/** The loss; null where none was seen. */
export const lossLine = (band) => facts.loss && lineIn("loss", facts.loss, band, 0);

function lineIn(block, { bands, series }, band, rank) {
  const found = numbers.get(block);
  if (!found) return null;
  const start = (bands.indexOf(bandOf({ bands }, band)) * series.length + rank) * found.stride;
  return found.values.subarray(start, start + Math.min(facts.columns.first.length, found.stride)); // NaN until they come
}

function magnitudes(series) {
  if (!largest.has(series)) {
    const [low, high] = [lineOf("min", "low", series), lineOf("max", "high", series)];
    if (!low || !high) return null;
    largest.set(
      series,
      low.map((value, i) => Math.max(Math.abs(value), Math.abs(high[i]))),
    );
  }
  return largest.get(series);
}

/** How many elements of a column were NaN or infinite, for each column; of two runs that are compared in either. */
export const badOf = (series, name = "nonfinite") => lineOf(name, "high", series);
