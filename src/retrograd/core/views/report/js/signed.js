/** Values around zero at a few steps: a ridge a step, so that one-sided and two-peaked activations are seen. */

import { formatCount } from "./counts.js";
import { fill, make, redrawWith, sizeCanvas, themeColor } from "./dom.js";
import { formatNumber, formatShare } from "./format.js";
import { facts, readBytes, readJson } from "./payload.js";

const [ROW, GUTTER, AXIS] = [24, 64, 20];
let loading = null;

const load = () => (loading ??= readBytes("signed").then((bytes) => (bytes === null ? {} : readJson("signed"))));

/** What a panel shows of a series: filled when the histograms are unpacked; empty where there are none. */
export function makeSigned(series) {
  const host = make("div", { class: "signed" });
  const isOutput = series !== undefined && /:output\b/.test(facts.sites[series]) && !/\.(grad|update)$/.test(facts.sites[series]);
  if (!isOutput) return host;
  if (facts.live) fill(host, make("p", { class: "note" }, "Values around zero are on the page that retrograd report writes."));
  else load().then((all) => fill(host, ...draw(all[series])));
  return host;
}

function draw(rows) {
  if (!rows) return [make("p", { class: "note" }, "Values around zero: not recorded. Outputs of modules have them in training, at sampled steps.")];
  const canvas = make("canvas", { role: "img", "aria-label": `histograms of values around zero at steps ${rows.map(([step]) => step).join(", ")}` });
  const said = make("b");
  const stack = make("div", { class: "stack" }, canvas);
  const height = rows.length * ROW + AXIS;
  const paint = () => stack.clientWidth && paintRidges(canvas, rows, stack.clientWidth, height);
  canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
    const row = rows[Math.floor(offsetY / ROW)];
    said.textContent = row ? read(row, (2 * (offsetX - GUTTER)) / (stack.clientWidth - GUTTER - 8) - 1) : "";
  });
  canvas.addEventListener("pointerleave", () => (said.textContent = ""));
  redrawWith(stack, paint);
  const about = "32 bins of equal width around 0, up to 4 root mean squares of that step; what lies beyond is counted apart. Heights are shares of the fullest bin of the row.";
  const sampled = rows.some(([, , elements, counts]) => counts.reduce((sum, n) => sum + n) < elements) ? ", of some elements" : "";
  return [make("div", { class: "plot-title", title: about }, `values around 0 at ${rows.length === 1 ? "one step" : `${rows.length} steps`}${sampled}, each to ±4 rms `, said), stack];
}

/** What lies at a place from −1 to 1 of a row. */
function read([step, bound, , counts], x) {
  const total = counts.reduce((sum, n) => sum + n);
  const bin = Math.floor(16 * (x + 1));
  const beyond = counts[0] + counts[33];
  const rest = `${beyond ? `; ${formatShare(beyond / total)} beyond ±${formatNumber(bound)}` : ""}${counts[34] ? `; ${formatCount(counts[34])} not finite` : ""}`;
  if (bound === 0 || bin < 0 || bin > 31) return `step ${formatCount(step)}: ${bound === 0 ? "all zero" : `edges ±${formatNumber(bound)}`}${rest}`;
  const edge = (i) => formatNumber((bound * (i - 16)) / 16);
  return `step ${formatCount(step)}, ${edge(bin)} to ${edge(bin + 1)}: ${formatShare(counts[bin + 1] / total)}${rest}`;
}

function paintRidges(canvas, rows, width, height) {
  const context = sizeCanvas(canvas, width, height);
  const plot = width - GUTTER - 8;
  const x = (share) => GUTTER + (plot * (share + 1)) / 2; // each row has a scale of its own
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "alphabetic";
  rows.forEach(([step, bound, , counts], i) => {
    const bottom = (i + 1) * ROW - 1;
    const fullest = Math.max(...counts.slice(1, 33), 1);
    context.fillStyle = themeColor("value");
    for (let bin = 0; bin < 32; bin++) {
      if (!counts[bin + 1]) continue;
      const [left, right] = bound ? [x((bin - 16) / 16), x((bin - 15) / 16)] : [x(0) - 1, x(0) + 1];
      const tall = Math.max((counts[bin + 1] / fullest) * (ROW - 4), 1);
      context.fillRect(left, bottom - tall, Math.max(right - left - 0.5, 1), tall);
    }
    context.fillStyle = themeColor("line");
    context.fillRect(GUTTER, bottom, plot, 1);
    context.fillStyle = themeColor("muted");
    context.textAlign = "right";
    context.fillText(`step ${formatCount(step)}`, GUTTER - 6, bottom - 4);
  });
  context.fillStyle = themeColor("strong-line");
  context.fillRect(Math.round(x(0)), 0, 1, height - AXIS);
  context.fillStyle = themeColor("muted");
  for (const [share, text, align] of [[-1, "−4 rms", "left"], [0, "0", "center"], [1, "4 rms", "right"]]) {
    context.textAlign = align;
    context.fillText(text, x(share), height - 6);
  }
}
