/** Numbers by statistic, series and column. */

import { facts, readFloats } from "./payload.js";

const WIDTH = facts.columns.first.length;
const numbers = new Map(); // name of a block → its numbers
const largest = new Map(); // series → largest magnitudes

/** Statistics that can be chosen; the largest magnitude is made of the smallest and the largest element. */
export const STATISTICS = facts.measures.map((measure) => ({ ...measure }));
const ends = ["min", "max"].map((name) => STATISTICS.findIndex((statistic) => statistic.name === name));
if (ends.every((place) => place >= 0)) {
  const largestMagnitude = {
    name: "abs_max",
    label: "largest magnitude",
    bands: ["high"],
    signed: false,
    share: false,
  };
  STATISTICS.splice(ends[0], 0, { ...largestMagnitude, series: STATISTICS[ends[1]].series });
}
for (const statistic of STATISTICS) statistic.rank = new Map(statistic.series.map((series, i) => [series, i]));

export const statisticOf = (name) => STATISTICS.find((statistic) => statistic.name === name) ?? STATISTICS[0];

export async function loadStatistic(name) {
  if (name === "abs_max") return Promise.all([loadStatistic("min"), loadStatistic("max")]);
  return load(`statistic-${name}`);
}

export const loadLoss = () => load("loss");

async function load(block) {
  if (!numbers.has(block)) numbers.set(block, await readFloats(block));
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
  const start = (bands.indexOf(bandOf({ bands }, band)) * series.length + rank) * WIDTH;
  return numbers.get(block)?.subarray(start, start + WIDTH) ?? null;
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

/** How many elements of a column were NaN or infinite, for each column. */
export const badOf = (series) => lineOf("nonfinite", "high", series);
