/** Tensors that were kept: a small picture of each, zero in the middle of two colours. */

import { makePalette, parseColor } from "./colors.js";
import { formatCount } from "./counts.js";
import { fill, make, redrawWith, themeColor } from "./dom.js";
import { formatNumber } from "./format.js";
import { facts, readBytes, readJson } from "./payload.js";
import { isDark } from "./theme.js";

const [CELL, BROKEN] = [4, 128];
let loading = null;

const load = () => (loading ??= readBytes("pictures").then((bytes) => (bytes === null ? {} : readJson("pictures"))));

/** What a panel shows of the series of a place: filled when they are unpacked; empty where no tensor was kept. */
export function makePictures(series) {
  const host = make("div", { class: "pictures" });
  if (!facts.live && !facts.runs) load().then((all) => fill(host, ...Object.values(series).filter((one) => all[one]).flatMap((one) => draw(facts.sites[one], all[one]))));
  return host;
}

const draw = (site, rows) => [
  make("div", { class: "plot-title", title: "The last tensors that were kept. A cell that holds several elements has the largest of them by magnitude." }, `kept tensors of ${site}`),
  make("div", { class: "kept" }, ...rows.map(drawOne)),
];

function drawOne({ step, micro, call, shape, first, bound, columns, cells, why }) {
  const when = [`step ${formatCount(step)}`, ...(micro ? [`micro-batch ${formatCount(micro)}`] : []), ...(call > 1 ? [`call ${formatCount(call)}`] : [])].join(", ");
  if (why) return make("figure", {}, make("figcaption", {}, `${when}: ${why}`));
  const part = first ? `, of [${"0, ".repeat(first)}:, :]` : "";
  const about = `${when}, ${shape.length ? shape.join(" × ") : "one number"}${part}, up to ±${formatNumber(bound)}`;
  const canvas = make("canvas", { role: "img", "aria-label": about });
  const figure = make("figure", {}, canvas, make("figcaption", {}, about));
  redrawWith(figure, () => paint(canvas, cells, columns));
  return figure;
}

function paint(canvas, cells, columns) {
  const palette = makePalette(true, isDark());
  const broken = parseColor(themeColor("bad"));
  const rows = cells.length / columns;
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  cells.forEach((cell, i) => (pixels[i] = cell === BROKEN ? broken : palette[cell + 128]));
  [canvas.width, canvas.height] = [columns, rows];
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.style.width = `${Math.max(columns * CELL, 24)}px`;
  canvas.style.height = `${Math.max(rows * CELL, 12)}px`;
}
