/** The histogram of one site in a panel, with what is read under the pointer. */

import { gradientOf } from "./colors.js";
import { make } from "./dom.js";
import { drawExponents, histogramOf, powerOfTwo, sharePalette } from "./exponents.js";
import { formatShare } from "./format.js";
import { facts } from "./payload.js";
import { change, state } from "./state.js";
import { shownColumns } from "./steps.js";

const HEIGHT = 120;

/** {elements, draw, follow}; null where the site has none. `gutter`: the room for labels at the left. */
export function makeHistogram(series, gutter) {
  if (Array.isArray(series) || !histogramOf(series)) return null; // those of several sites cannot be drawn over each other
  const canvas = make("canvas", {
    class: "exponents",
    role: "img",
    "aria-label": "histogram of binary exponents over steps",
  });
  const cross = make("i", { class: "cross" });
  const value = make("b");
  let probe = () => null;
  const width = () => canvas.parentElement.parentElement.clientWidth;
  const columnAt = (x) => {
    const [from, to] = shownColumns();
    return Math.max(from, Math.min(to, Math.floor(from + ((x - gutter) / (width() - gutter - 8)) * (to - from + 1))));
  };
  canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
    const found = probe(offsetX, offsetY);
    value.textContent = found ? `${powerOfTwo(found.exponent)}: ${formatShare(found.share)}` : "";
    change({ cursor: offsetX < gutter ? null : columnAt(offsetX) });
  });
  canvas.addEventListener("pointerleave", () => change({ cursor: null }));
  return {
    elements: [
      make("div", { class: "plot-title split" }, make("span", {}, "exponents of |x| ", value), makeShareKey()),
      make("div", { class: "stack" }, canvas, cross),
    ],
    draw() {
      const histogram = histogramOf(series);
      if (histogram) probe = drawExponents(canvas, histogram, width(), HEIGHT, gutter); // while it is requested again, the old one stays
    },
    follow() {
      const [from, to] = shownColumns();
      cross.hidden = state.cursor === null || state.cursor < from || state.cursor > to;
      cross.style.left = `${gutter + ((state.cursor + 0.5 - from) / (to - from + 1)) * (width() - gutter - 8)}px`;
    },
  };
}

/** What the colours of a histogram mean. */
function makeShareKey() {
  const bar = make("i", { class: "bar" });
  bar.style.background = gradientOf(sharePalette());
  return make(
    "span",
    { class: "key", title: "share of the finite, non-zero elements" },
    `1 in ${Math.floor(2 ** -facts.exponents.smallest / 1e6)} million`,
    bar,
    "all",
  );
}
