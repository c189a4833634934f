/** The map of rows × steps: draws the rows in view, and only those, onto one canvas. */

import { makeHatch, paintCells } from "./cells.js";
import { find, sizeCanvas, themeColor } from "./dom.js";
import { columnToX, geometry } from "./geometry.js";
import { drawLabels } from "./labels.js";
import { isWithout, numbersOf, shown } from "./rows.js";
import { state } from "./state.js";

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
    if (!without && numbersOf(node).bad === null && numbersOf(node).line === null) return;
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
