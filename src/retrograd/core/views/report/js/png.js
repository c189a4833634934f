/** Download the map as an image: all its rows, with title, names, axis and colour bar. */

import { drawSteps } from "./axis.js";
import { cssColor } from "./colors.js";
import { make, sizeCanvas, themeColor } from "./dom.js";
import { download, fileName } from "./download.js";
import { printerOf } from "./format.js";
import { drawRows } from "./heatmap.js";
import { fullName } from "./labels.js";
import { statisticOf } from "./measures.js";
import { facts } from "./payload.js";
import { shown } from "./rows.js";
import { valueAt } from "./scale.js";
import { quantityOf, state } from "./state.js";

const [NAMES, PLOT, HEAD, FOOT, TALLEST] = [300, 900, 56, 84, 12000];

export const exportPng = () => paintPicture().toBlob((blob) => download(blob, fileName("png")));

export function paintPicture() {
  const row = Math.max(
    1,
    Math.min(16, Math.floor((TALLEST / devicePixelRatio - HEAD - FOOT) / Math.max(shown.rows.length, 1))),
  );
  const [width, height] = [NAMES + PLOT + 24, HEAD + row * shown.rows.length + FOOT];
  const canvas = make("canvas");
  const context = sizeCanvas(canvas, width, height);
  context.fillStyle = themeColor("surface");
  context.fillRect(0, 0, width, height);
  write(context, facts.title, 16, 24, "600 16px system-ui, sans-serif");
  write(
    context,
    `${statisticOf(state.statistic).title ?? statisticOf(state.statistic).label} of ${quantityOf(state.quantity).title}`,
    16,
    44,
    "12px system-ui, sans-serif",
    "muted",
  );
  if (row > 9)
    shown.rows.forEach((node, i) =>
      write(context, fullName(node), 16, HEAD + (i + 0.75) * row, "11px system-ui, sans-serif", "ink", NAMES - 24),
    );
  place(context, NAMES, HEAD, () => drawRows(context, shown.rows, PLOT, row));
  place(context, NAMES, HEAD + row * shown.rows.length, () => drawSteps(context, PLOT));
  place(context, NAMES, height - 36, () => drawBar(context));
  return canvas;
}

function place(context, x, y, draw) {
  context.save();
  context.translate(x, y);
  draw();
  context.restore();
}

function write(context, text, x, y, font, color = "ink", most = undefined) {
  context.font = font;
  context.fillStyle = themeColor(color);
  context.textAlign = "left";
  context.fillText(text, x, y, most);
}

function drawBar(context) {
  for (let shade = 0; shade < 256; shade++) {
    context.fillStyle = cssColor(shown.palette[shade]);
    context.fillRect(shade, 0, 1.5, 10);
  }
  for (const share of [0, 0.5, 1])
    write(context, printerOf(statisticOf(state.statistic))(valueAt(shown.scale, share)), share * 236, 26, "11px system-ui, sans-serif", "muted");
}
