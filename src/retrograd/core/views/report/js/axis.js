/** Labels of steps under the map, and above it where it is so long that these are far away. */

import { formatCount } from "./counts.js";
import { find, sizeCanvas, themeColor } from "./dom.js";
import { columnToX, geometry } from "./geometry.js";
import { shownColumns, skipsSteps, stepTicks } from "./steps.js";

const HEIGHT = 34;
const TOP = 22;
const LONG = 360; // pixels of a map that has an axis on both sides

export function drawAxis() {
  const canvas = find("axis");
  const context = sizeCanvas(canvas, geometry.gutter + geometry.plot, HEIGHT);
  context.translate(geometry.gutter, 0);
  drawSteps(context, geometry.plot);
  find("axis-above").hidden = geometry.height < LONG;
  if (find("axis-above").hidden) return;
  const above = sizeCanvas(find("axis-above"), geometry.gutter + geometry.plot, TOP);
  above.translate(geometry.gutter, 0);
  drawTicks(above, geometry.plot, { line: TOP - 4, text: TOP - 8 });
}

export function drawSteps(context, width) {
  drawTicks(context, width, { line: 0, text: 16 });
  context.textAlign = "right";
  context.fillText("step", width, 30);
}

function drawTicks(context, width, { line, text }) {
  const [from, to] = shownColumns();
  const place = (column) => Math.round((columnToX(column) / geometry.plot) * width);
  context.fillStyle = themeColor("warn");
  for (let column = from; column <= to; column++) if (skipsSteps(column)) context.fillRect(Math.max(place(column) - 1, 0), line, 2, 2);
  context.fillStyle = context.strokeStyle = themeColor("muted");
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  for (const { step, column } of stepTicks(from, to, width / 80)) {
    const x = place(column);
    if (x > width) continue;
    context.fillRect(x, line, 1, 4);
    if (x < width - 24) context.fillText(formatCount(step), Math.max(x, 8), text);
  }
}
