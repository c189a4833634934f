/** Numbers by statistic, series and column. */

import { fetchNumbers, facts, readFloats } from "./payload.js";

const lines = new Map(); // block → its series → {values, first, apart, columns, version}: a line each `apart` numbers
let generation = 0; // answers to requests from before all columns, or all series, changed are dropped
let coming = null; // the answer that is on its way
const SPARE = 128; // columns that a followed run may gain before its numbers are copied
const SCALARS = "scalars"; // name of the block that has all of them
const MOST_SERIES = 4000; // of one question, which is an address
const largest = new Map(); // series → {line, known, loaded}: largest magnitudes
let loaded = 0; // answers that have come so far

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
  forgetColumns();
}
findStatistics();

/** All numbers are others. */
export function forgetColumns() {
  lines.clear();
  largest.clear();
  generation += 1;
}

export const statisticOf = (name) => STATISTICS.find((statistic) => statistic.name === name) ?? STATISTICS[0];

/** One sentence about a statistic, for whoever points at it. */
export const aboutOf = (name) => STATISTICS.find((statistic) => statistic.name === name)?.about ?? "";

/** Make statistics of some series ready; a page in a file has all series of a statistic in one piece. */
export async function loadStatistics(names, wanted) {
  const all = names.flatMap((name) => (name === "abs_max" ? ["min", "max"] : name));
  if (!facts.live) return void (await Promise.all(all.map(unpackStatistic)));
  for (let lacking = listLacking(all, wanted); lacking; lacking = listLacking(all, wanted)) {
    coming ??= loadLacking(lacking).finally(() => (coming = null));
    if ((await coming) === null) return; // the run has other sites by now, which come with the next news
  }
}

/** Make all scalars ready. */
export async function loadScalars() {
  if (!facts.scalars) return;
  if (!facts.live) return unpack(SCALARS, facts.scalars);
  for (let lacking = listScalars(); lacking; lacking = listScalars()) {
    coming ??= loadLacking(lacking).finally(() => (coming = null));
    if ((await coming) === null) return;
  }
}

const listScalars = () => listLacking([SCALARS], facts.scalars.series);

/** There are other scalars than before. */
export function forgetScalars() {
  lines.delete(SCALARS);
  generation += 1;
}

const describe = (name) => (name === SCALARS ? facts.scalars : STATISTICS.find((each) => each.name === name));

const blockOf = (name) => (name === SCALARS ? SCALARS : `statistic-${name}`);

const linesOf = (name) => lines.get(name) ?? lines.set(name, new Map()).get(name);

const unpackStatistic = (name) => describe(name) && unpack(name, describe(name));

async function unpack(name, { bands, series }) {
  if (lines.has(name)) return;
  const values = await readFloats(blockOf(name));
  if (values === null) return;
  const columns = facts.columns.first.length;
  const known = linesOf(name);
  series.forEach((each, i) => known.set(each, { values, first: i * columns, apart: series.length * columns, columns }));
  loaded += 1;
}

/** What to request next: statistics that lack the same series from the same column on; null where nothing is lacking. */
function listLacking(names, wanted) {
  let found = null;
  for (const name of names) {
    const [known, described] = [linesOf(name), describe(name)];
    const has = (series) => (name === SCALARS || described.rank.has(series));
    const lacking = described ? wanted.filter((series) => has(series) && known.get(series)?.version !== facts.live.version) : [];
    if (!lacking.length) continue;
    const fromOf = (series) => Math.max((known.get(series)?.columns ?? 0) - 1, 0);
    const from = found?.from ?? fromOf(lacking[0]);
    const series = lacking.filter((each) => fromOf(each) === from).slice(0, MOST_SERIES);
    if (!found) found = { names: [name], series, from };
    else if (String(series) === String(found.series)) found.names.push(name);
  }
  return found;
}

/** Load columns that came since; null where the run has other sites than this page knows. */
async function loadLacking({ names, series, from }) {
  const columns = facts.columns.first.length;
  const [begun, version] = [generation, facts.live.version];
  const added = await fetchNumbers(names, series, from);
  if (added === null) return null;
  if (begun !== generation) return false;
  const width = columns - from;
  let at = 0;
  for (const name of names) {
    const [known, { bands }] = [linesOf(name), describe(name)];
    for (const [i, each] of series.entries()) {
      const line = makeRoom(known.get(each), bands.length, columns, from);
      for (let band = 0; band < bands.length; band++) {
        const start = at + (band * series.length + i) * width;
        line.values.set(added.subarray(start, start + width), band * line.apart + from);
      }
      known.set(each, { ...line, columns, version });
    }
    at += bands.length * series.length * width;
  }
  loaded += 1;
  return true;
}

/** The lines of a series with room for so many columns, those before `from` kept. */
function makeRoom(known, bands, columns, from) {
  if (known && known.apart >= columns) return known;
  const apart = columns + SPARE;
  const values = new Float32Array(bands * apart).fill(NaN);
  for (let band = 0; known && band < bands; band++)
    values.set(known.values.subarray(band * known.apart, band * known.apart + from), band * apart);
  return { values, first: 0, apart };
}

/** The band that is nearest to the requested one among those a statistic has. */
export function bandOf(statistic, band) {
  return statistic.bands.includes(band) ? band : statistic.bands.at(-1);
}

/** The numbers of one series, a column each; null where the series lacks the statistic. */
export function lineOf(name, band, series) {
  if (name === "abs_max") return magnitudes(series);
  return lineIn(name, band, series);
}

/** Numbers of a scalar, by its place in the list, or of the clock behind all of them; null where they have not come. */
export const scalarLine = (number, band = "mean") => facts.scalars && lineIn(SCALARS, band, number);

function lineIn(name, band, series) {
  const found = lines.get(name)?.get(series);
  if (!found) return null;
  const start = found.first + describe(name).bands.indexOf(bandOf(describe(name), band)) * found.apart;
  return found.values.subarray(start, start + Math.min(facts.columns.first.length, found.apart)); // NaN until they come
}

function magnitudes(series) {
  const [low, high] = [lineOf("min", "low", series), lineOf("max", "high", series)];
  if (!low || !high) return null;
  return extendLine(largest, series, knownColumns("abs_max", series), (line, begin) => {
    for (let i = begin; i < line.length; i++) line[i] = Math.max(Math.abs(low[i]), Math.abs(high[i]));
  });
}

/** How many columns of a line have come; a series that lacks the statistic lacks none. */
export function knownColumns(name, series) {
  if (name === "abs_max") return Math.min(knownColumns("min", series), knownColumns("max", series));
  if (!describe(name)?.rank.has(series)) return Infinity;
  return lines.get(name)?.get(series)?.columns ?? 0;
}

/**
 * A line that is made of others, column by column, and kept: only columns that came since are worked out again, and the
 * last one before them, which may have grown. `known`: how many columns of all that it is made of have come;
 * `work(line, begin)` works it out from a column on.
 */
export function extendLine(kept, key, known, work) {
  const columns = facts.columns.first.length;
  let found = kept.get(key);
  if (found?.loaded === loaded && found.line.length === columns) return found.line;
  const begin = Math.max(0, Math.min(found?.known ?? 0, columns) - 1);
  if (!found) kept.set(key, (found = { space: new Float32Array(0) }));
  if (found.space.length < columns) {
    const wider = new Float32Array(columns + SPARE);
    wider.set(found.space.subarray(0, begin));
    found.space = wider;
  }
  const line = found.space.subarray(0, columns);
  work(line, begin);
  Object.assign(found, { line, known, loaded });
  return line;
}

/** How many elements of a column were NaN or infinite, for each column; of two runs that are compared in either. */
export const badOf = (series, name = "nonfinite") => lineOf(name, "high", series);
