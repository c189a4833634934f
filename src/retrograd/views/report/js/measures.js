/** Numbers by statistic, series and column. */

import { facts, readFloats } from "./payload.js";

const numbers = new Map();
const largest = new Map();

/** Statistics that can be chosen; the largest magnitude is made of the smallest and the largest element. */
export const STATISTICS = Object.entries(facts.measures)
  .filter(([name]) => name !== "loss")
  .map(([name, measure]) => ({ name, ...measure }));
if (facts.measures.min && facts.measures.max) {
  const { series } = facts.measures.max;
  const entry = { name: "abs_max", label: "largest magnitude", bands: ["high"], signed: false, share: false, series };
  STATISTICS.splice(STATISTICS.findIndex(({ name }) => name === "min"), 0, entry);
}
for (const statistic of STATISTICS) statistic.rank = new Map(statistic.series.map((series, i) => [series, i]));

export const statisticOf = (name) => STATISTICS.find((statistic) => statistic.name === name) ?? STATISTICS[0];

export async function loadStatistic(name) {
  if (name === "abs_max") return Promise.all([loadStatistic("min"), loadStatistic("max")]);
  if (!numbers.has(name)) numbers.set(name, await readFloats(name));
}

/** The band that is nearest to the one asked for among those a statistic has. */
export function bandOf(statistic, band) {
  return statistic.bands.includes(band) ? band : statistic.bands.at(-1);
}

/** The numbers of one series, a column each; null where the series lacks the statistic. */
export function lineOf(name, band, series) {
  if (name === "abs_max") return magnitudes(series);
  const measure = name === "loss" ? { ...facts.measures.loss, rank: new Map([[0, 0]]) } : statisticOf(name);
  const block = numbers.get(measure.name ?? name);
  const rank = measure.rank.get(series);
  if (!block || rank === undefined) return null;
  const width = facts.columns.first.length;
  const start = (measure.bands.indexOf(bandOf(measure, band)) * measure.series.length + rank) * width;
  return block.subarray(start, start + width);
}

function magnitudes(series) {
  if (!largest.has(series)) {
    const [low, high] = [lineOf("min", "low", series), lineOf("max", "high", series)];
    largest.set(series, low && high && low.map((value, i) => Math.max(Math.abs(value), Math.abs(high[i]))));
  }
  return largest.get(series);
}

/** Columns in which some element of the series was NaN or infinite: a number above zero there. */
export const badOf = (series) => lineOf("nonfinite", "high", series);
