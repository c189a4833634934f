/** Cells of rows as pixels. A pixel that holds several columns shows their extreme, so no spike is lost. */

import { parseColor } from "./colors.js";
import { themeColor } from "./dom.js";
import { chooseBetter, hasZero, isRatio, numbersOf, shown } from "./rows.js";
import { shownColumns } from "./steps.js";

/** A canvas with one row of pixels for each node and one column of pixels for each drawn column, or fewer. */
export function paintCells(nodes, mostPixels) {
  const [from, to] = shownColumns();
  const width = Math.max(1, Math.min(to - from + 1, Math.floor(mostPixels)));
  const canvas = new OffscreenCanvas(width, Math.max(nodes.length, 1));
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  const paint = {
    ...shown,
    bad: parseColor(themeColor("bad")),
    zero: hasZero() ? parseColor(themeColor("zero")) : null,
    ends: isRatio() ? ["gone", "come"].map((name) => parseColor(themeColor(name))) : null,
    better: chooseBetter(),
    from,
    columns: to - from + 1,
    width,
  };
  nodes.forEach((node, i) => paintRow(numbersOf(node), pixels.subarray(i * width, (i + 1) * width), paint));
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Pixels without a number stay transparent: what lies beneath means "not recorded". */
function paintRow({ line, bad }, pixels, { shade, palette, bad: badColor, zero, ends, better, from, columns, width }) {
  if (!line && !bad) return;
  for (let x = 0; x < width; x++) {
    const start = from + Math.floor((x * columns) / width);
    const end = from + Math.floor(((x + 1) * columns) / width);
    let best = line ? line[start] : NaN;
    let broken = bad ? bad[start] > 0 : false;
    for (let column = start + 1; column < end; column++) {
      if (line && (Number.isNaN(best) || better(line[column], best))) best = line[column];
      broken ||= bad ? bad[column] > 0 : false;
    }
    const isEnd = best === Infinity || best === -Infinity;
    if (broken || (isEnd && !ends)) pixels[x] = badColor;
    else if (isEnd) pixels[x] = ends[Number(best > 0)];
    else if (best === 0 && zero !== null) pixels[x] = zero;
    else if (!Number.isNaN(best)) pixels[x] = palette[shade(best)];
  }
}

/** A pattern of fine diagonals for what was not recorded; strong ones, that fall, for what never got a gradient. */
export function makeHatch(context, isStrong = false) {
  const tile = new OffscreenCanvas(6, 6);
  const pen = tile.getContext("2d");
  const [begin, end] = isStrong ? [0, 6] : [6, 0];
  pen.strokeStyle = themeColor(isStrong ? "without" : "hatch");
  pen.lineWidth = 1.2;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift, begin);
    pen.lineTo(shift + 6, end);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}
