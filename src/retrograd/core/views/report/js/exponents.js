/** The histogram of binary exponents over steps: how large the elements of a tensor were, and when. */

import { makePalette } from "./colors.js";
import { sizeCanvas, themeColor } from "./dom.js";
import { fetchLive, facts, readBytes, unpack } from "./payload.js";
import { columnCount, shownColumns } from "./steps.js";
import { isDark } from "./theme.js";

const FEWEST_BINS = 8;

let codes = null;
let fetched = new Map(); // series of a page that is served → its histogram; null while it is on its way

/** Make histograms of some series ready; returns whether there are others than before. */
export async function loadExponents(wanted) {
  if (!facts.live) return void (codes ??= await readBytes("exponents"));
  const [here, version] = [fetched, facts.live.version];
  const lacking = wanted.filter((series) => !here.has(series));
  if (!lacking.length || !columnCount()) return false;
  for (const series of lacking) here.set(series, null); // requested only once
  const found = await fetchExponents(lacking, 0, facts.columns.width);
  if (found === null || here !== fetched) return false; // the run has other sites by now, which come with the next news
  lacking.forEach((series, i) => here.set(series, { ...found[i], version }));
  return true;
}

/** Add the columns that came since to histograms that are there. */
export async function freshenExponents(wanted) {
  if (!facts.live) return;
  const [here, { version }] = [fetched, facts.live];
  const old = wanted.filter((series) => here.get(series) && here.get(series).version !== version);
  const alike = new Map(); // those of as many columns
  for (const series of old) {
    const shape = `${here.get(series).columns} ${here.get(series).merged}`;
    alike.set(shape, [...(alike.get(shape) ?? []), series]);
  }
  for (const some of alike.values()) {
    const known = some.map((series) => here.get(series));
    const [{ columns, merged }] = known;
    const found = await fetchExponents(some, (columns - 1) * merged, facts.columns.width * merged);
    if (found === null || here !== fetched) return;
    for (const [i, series] of some.entries()) {
      if (here.get(series) !== known[i]) continue; // another answer came first
      if (found[i].merged > 1) here.delete(series); // so many that each holds more steps: all are requested again
      else here.set(series, { ...addColumns(known[i], found[i]), version });
    }
  }
}

/** Histograms of some series from a column of the page on, in columns of so many steps; null where sites are others by now. */
async function fetchExponents(series, from, width) {
  const { first, last } = facts.columns;
  const columns = Math.ceil(((first.length - from) * facts.columns.width) / width);
  const query = { series, sites: facts.live.digests.sites, step: first[from], until: last.at(-1), width };
  const answer = await fetchLive("exponents", query);
  if (answer === null) return null;
  const { exponents, text } = await answer.json();
  const bytes = exponents && (await unpack(text));
  facts.exponents = exponents ?? facts.exponents;
  return series.map((_, i) => (exponents?.stretches[i] ? cutOut(exponents, i, bytes) : { ...EMPTY, columns: exponents?.columns ?? columns, merged: exponents?.merged ?? 1 }));
}

const EMPTY = { first: 0, bins: 0, cells: new Uint8Array(0) };

/** A histogram and the columns that follow, of which the first takes the place of its last. */
function addColumns(known, added) {
  const [kept, columns] = [known.columns - 1, known.columns - 1 + added.columns];
  const some = [known, added].filter(({ bins }) => bins);
  if (!some.length) return { ...known, columns };
  const first = Math.min(...some.map((each) => each.first));
  const bins = Math.max(...some.map((each) => each.first + each.bins)) - first;
  const cells = new Uint8Array(bins * columns);
  const copy = (part, width, at) => {
    for (let bin = 0; bin < part.bins; bin++)
      cells.set(part.cells.subarray(bin * part.columns, bin * part.columns + width), (bin + part.first - first) * columns + at);
  };
  copy(known, kept, 0);
  copy(added, added.columns, kept);
  return { first, bins, columns, merged: known.merged, cells };
}

export function forgetExponents() {
  fetched = new Map();
}

/** {first, bins, columns, merged, cells} of a series: exponent of the lowest bin, how many bins and columns, columns of the page in one, codes by bin and column. */
export function histogramOf(series) {
  if (facts.live) return fetched.get(series)?.bins ? fetched.get(series) : null;
  return facts.exponents?.stretches[series] && codes ? cutOut(facts.exponents, series, codes) : null;
}

function cutOut({ stretches, columns, merged }, series, bytes) {
  const [offset, first, bins] = stretches[series];
  return { first, bins, columns, merged, cells: bytes.subarray(offset, offset + bins * columns) };
}

/** Share of elements that a code stands for. */
export function shareOf(code) {
  return code === 0 ? 0 : 2 ** ((code - 1) / facts.exponents.levels + facts.exponents.smallest);
}

/** Draw a histogram; returns which exponent and share lie at a place of the canvas. */
export function drawExponents(canvas, histogram, width, height, gutter) {
  const context = sizeCanvas(canvas, width, height);
  const { columns, merged } = histogram;
  const spare = Math.max(0, FEWEST_BINS - histogram.bins);
  const lowest = histogram.first - Math.floor(spare / 2);
  const bins = histogram.bins + spare;
  const [from, to] = shownColumns();
  const [plot, top, step] = [width - gutter - 8, 4, (height - 8) / bins];
  const y = (exponent) => top + (lowest + bins - exponent) * step;
  context.imageSmoothingEnabled = false;
  context.fillStyle = themeColor("well");
  context.fillRect(gutter, top, plot, height - 8);
  const clip = [from / merged, 0, (to + 1 - from) / merged, histogram.bins];
  context.drawImage(
    paintHistogram(histogram, columns),
    ...clip,
    gutter,
    y(histogram.first + histogram.bins),
    plot,
    histogram.bins * step,
  );
  labelBins(context, lowest, bins, y, gutter);
  return (px, py) => {
    const column = Math.floor((from + ((px - gutter) / plot) * (to + 1 - from)) / merged);
    const bin = lowest + bins - 1 - Math.floor((py - top) / step) - histogram.first;
    const inside = px >= gutter && bin >= 0 && bin < histogram.bins && column < columns;
    return inside ? { exponent: bin + histogram.first, share: shareOf(histogram.cells[bin * columns + column]) } : null;
  };
}

function paintHistogram({ bins, cells }, columns) {
  const canvas = new OffscreenCanvas(columns, bins);
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, bins);
  const pixels = new Uint32Array(image.data.buffer);
  const palette = sharePalette();
  const top = -facts.exponents.smallest * facts.exponents.levels + 1;
  for (let bin = 0; bin < bins; bin++) {
    for (let column = 0; column < columns; column++) {
      const code = cells[bin * columns + column];
      if (code) pixels[(bins - 1 - bin) * columns + column] = palette[Math.min(255, Math.round((code / top) * 255))];
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Colours of shares, by their logarithm: most of them for the common ones, and none so faint that it is overlooked. */
export function sharePalette() {
  const palette = makePalette(false, isDark());
  return palette.map((_, shade) => palette[Math.round(255 * (0.14 + 0.86 * (shade / 255) ** 2.5))]);
}

function labelBins(context, lowest, bins, y, gutter) {
  const every = [1, 2, 4, 5, 10, 20, 40].find((stride) => bins / stride <= 5) ?? 50;
  context.fillStyle = themeColor("muted");
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let exponent = Math.ceil(lowest / every) * every; exponent < lowest + bins; exponent += every) {
    context.fillText(powerOfTwo(exponent), gutter - 6, (y(exponent) + y(exponent + 1)) / 2);
  }
}

const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";

export function powerOfTwo(exponent) {
  const digits = [...String(Math.abs(exponent))].map((digit) => SUPERSCRIPT[digit]).join("");
  return `2${exponent < 0 ? "⁻" : ""}${digits}`;
}
