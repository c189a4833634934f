/** Labels of steps under the map. */

import { formatCount } from "./counts.js";
import { find, sizeCanvas, themeColor } from "./dom.js";
import { columnToX, geometry } from "./geometry.js";
import { shownColumns, stepTicks } from "./steps.js";

const HEIGHT = 34;

export function drawAxis() {
  const canvas = find("axis");
  const context = sizeCanvas(canvas, geometry.gutter + geometry.plot, HEIGHT);
  context.translate(geometry.gutter, 0);
  drawSteps(context, geometry.plot);
}

export function drawSteps(context, width) {
  const [from, to] = shownColumns();
  context.fillStyle = context.strokeStyle = themeColor("muted");
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  for (const { step, column } of stepTicks(from, to, width / 80)) {
    const x = (columnToX(column) / geometry.plot) * width;
    if (x > width) continue;
    context.fillRect(Math.round(x), 0, 1, 4);
    if (x < width - 24) context.fillText(formatCount(step), Math.max(x, 8), 16);
  }
  context.textAlign = "right";
  context.fillText("step", width, 30);
}
