/**
 * The map of sites × steps: draws the rows in view, and only those, onto one canvas. A pixel that holds several columns
 * shows their extreme, so no spike is lost.
 */

import { pinnedCell } from "./actions.js";
import { parseColor } from "./colors.js";
import { find, sizeCanvas, themeColor } from "./dom.js";
import { columnToX, geometry } from "./geometry.js";
import { drawLabels } from "./labels.js";
import { chooseBetter, hasZero, isMerged, isRatio, isWithout, numbersOf, shown } from "./rows.js";
import { state } from "./state.js";
import { shownColumns } from "./steps.js";

/** First row in view and how many follow it. */
export function rowsInView() {
  const first = Math.floor(find("viewport").scrollTop / geometry.row);
  return [first, Math.ceil(geometry.height / geometry.row) + 1];
}

export function drawMap() {
  const start = performance.now();
  const [first, count] = rowsInView();
  const nodes = shown.rows.slice(first, first + count);
  const shift = first * geometry.row - find("viewport").scrollTop;
  find("sheet").style.height = `${geometry.height}px`;
  find("cells").style.left = find("cross").style.left = `${geometry.gutter}px`;
  const context = sizeCanvas(find("cells"), geometry.plot, geometry.height);
  context.translate(0, shift);
  drawRows(context, nodes, geometry.plot, geometry.row);
  drawNames();
  drawCross();
  performance.clearMeasures("heat map");
  performance.measure("heat map", { start });
}

/** Names of the rows in view; drawn apart from the cells, because the cursor changes them alone. */
export function drawNames() {
  const [first, count] = rowsInView();
  drawLabels(shown.rows.slice(first, first + count), first, first * geometry.row - find("viewport").scrollTop);
}

/** Rows one below the other, each `height` pixels high. */
export function drawRows(context, nodes, width, height) {
  const image = paintCells(nodes, width);
  const gap = height > 7 ? 1 : 0;
  const [hatch, strong] = [makeHatch(context), makeHatch(context, true)];
  context.imageSmoothingEnabled = false;
  nodes.forEach((node, i) => {
    const without = isWithout(node);
    if (!without && numbersOf(node).bad === null && numbersOf(node).line === null) {
      context.fillStyle = themeColor("line"); // a heading, which has no cells
      return context.fillRect(0, (i + 0.5) * height, width, 1);
    }
    context.fillStyle = without ? strong : hatch;
    context.fillRect(0, i * height, width, height - gap);
    context.drawImage(image, 0, i, image.width, 1, 0, i * height, width, height - gap);
  });
}

/** Crosshair at the cursor's column and the current row, and the columns being brushed. */
export function drawCross() {
  const context = sizeCanvas(find("cross"), geometry.plot, geometry.height);
  const row = shown.rows.findIndex((node) => node.id === state.current);
  const line = (x, y, w, h) => context.fillRect(Math.round(x), Math.round(y), w, h);
  context.fillStyle = themeColor("ink");
  if (row >= 0) {
    const top = row * geometry.row - find("viewport").scrollTop;
    line(0, top - 1, geometry.plot, 1);
    line(0, top + geometry.row - 1, geometry.plot, 1);
  }
  if (state.cursor !== null) {
    const x = columnToX(state.cursor);
    const width = columnToX(state.cursor + 1) - x;
    if (width > 5) {
      line(x, 0, 1, geometry.height);
      line(x + width, 0, 1, geometry.height);
    } else line(x + width / 2, 0, 1, geometry.height);
  }
  drawPin(context);
  if (state.brush) {
    const [a, b] = state.brush;
    context.globalAlpha = 0.22;
    context.fillRect(
      columnToX(Math.min(a, b)),
      0,
      columnToX(Math.max(a, b) + 1) - columnToX(Math.min(a, b)),
      geometry.height,
    );
  }
}

/** A frame around the pinned cell. */
function drawPin(context) {
  const pin = pinnedCell();
  const row = pin ? shown.rows.findIndex((node) => node.place === pin.place && !isMerged(node)) : -1;
  if (row < 0) return;
  const x = columnToX(pin.column);
  const width = Math.max(columnToX(pin.column + 1) - x, 5);
  context.strokeStyle = themeColor("accent");
  context.lineWidth = 2;
  context.strokeRect(x - 1, row * geometry.row - find("viewport").scrollTop, width + 2, geometry.row);
}

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
