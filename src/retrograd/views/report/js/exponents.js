/** The histogram of binary exponents over steps: how large the elements of a tensor were, and when. */

import { makePalette } from "./colors.js";
import { sizeCanvas, themeColor } from "./dom.js";
import { ask, facts, readBytes, unpack } from "./payload.js";
import { shownColumns } from "./steps.js";
import { isDark } from "./theme.js";

const FEWEST_BINS = 8;

const OLD = 30_000; // milliseconds after which the histograms of a followed run are asked for again, or
const SHARE = 0.05; // of the time that asking may take, where that is later

let codes = null;
let due = 0; // when histograms are old
const asked = new Map(); // series of a page that is served → its histogram

/** Make histograms of some series ready; tells whether there are others than before. */
export async function loadExponents(wanted) {
  if (!facts.live) return void (codes ??= await readBytes("exponents"));
  const begun = performance.now();
  if (begun > due) forgetExponents();
  const lacking = wanted.filter((series) => !asked.has(series));
  if (!lacking.length || !facts.columns.first.length) return false;
  for (const series of lacking) asked.set(series, null); // nobody else needs to ask
  const { first, last, width } = facts.columns;
  const chosen = { series: lacking, sites: facts.live.digests.sites };
  const answer = await ask("exponents", { ...chosen, step: first[0], until: last.at(-1), width });
  if (answer === null) return false; // the run has other sites by now, of which the next news tell
  const { exponents, text } = await answer.json();
  const bytes = exponents && (await unpack(text));
  facts.exponents = exponents ?? facts.exponents;
  lacking.forEach((series, i) => asked.set(series, exponents?.stretches[i] ? cutOut(exponents, i, bytes) : null));
  due = performance.now() + Math.max(OLD, (performance.now() - begun) / SHARE);
  return true;
}

export function forgetExponents() {
  asked.clear();
  due = Infinity;
}

/** {first, bins, cells} of a series: exponent of the lowest bin, how many bins, codes by bin and column. */
export function histogramOf(series) {
  if (facts.live) return asked.get(series) ?? null;
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
