/** One side of a panel: the curves and the histogram of one site. */

import { fitWidth, makeChart, moveCursor, renewChart, rescale } from "./chart.js";
import { formatCount } from "./counts.js";
import { badIn, chartsOf, readChart, sizeNote } from "./curves.js";
import { fill, make, sizeCanvas, themeColor } from "./dom.js";
import { histogramOf } from "./exponents.js";
import { makeHistogram } from "./histogram.js";
import { columnCount, shownColumns, stepTicks } from "./steps.js";

const [CHART, AXIS, GUTTER] = [104, 18, 52];
const TITLES = { value: "value", grad: "gradient", accumulated: "accumulated gradient", update: "update" };

/** {element, mount, renew, follow, resize, remove}: `mount` draws once the element is in the page. */
export function makeSide(part, series) {
  const charts = chartsOf(part, series).map((chart) => ({ ...chart, host: make("div", { class: "plot" }), value: make("span") }));
  const histogram = makeHistogram(series, GUTTER);
  const axis = make("canvas", { class: "side-axis", "aria-hidden": "true" });
  const element = make(
    "div",
    { class: `side ${part}` },
    make("h4", {}, make("i", { class: "dot" }), TITLES[part], sizeNote(series)),
    ...charts.flatMap(({ title, about, host, value }) => [make("div", { class: "plot-title", title: about }, `${title} `, value), host]),
    ...(histogram ? histogram.elements : []),
    charts.length || histogram ? axis : make("p", { class: "note" }, "None of the runs drawn has recorded it."),
  );
  const read = () => charts.forEach((chart) => fill(chart.value, ...readChart(chart)));
  const drawRest = () => {
    histogram?.draw();
    if (axis.parentElement) drawAxisOf(axis, axis.parentElement.clientWidth);
  };
  return {
    element,
    mount() {
      for (const chart of charts)
        chart.plot = makeChart(chart.host, { ...chart, bad: badIn(series), height: CHART, gutter: () => GUTTER });
      drawRest();
      histogram?.follow();
      read();
    },
    renew() {
      const [newer, bad] = [chartsOf(part, series), badIn(series)];
      const isSame = newer.length === charts.length && (histogram || Array.isArray(series) || !histogramOf(series));
      const takes = (chart, i) => newer[i].title === chart.title && renewChart(chart.plot, { ...newer[i], bad });
      if (!isSame || !charts.every(takes)) return false;
      charts.forEach((chart, i) => (chart.lines = newer[i].lines));
      drawRest();
      histogram?.follow();
      read();
      return true;
    },
    follow(keys) {
      const rescaled = keys.has("zoom") || keys.has("range");
      for (const { plot } of charts) {
        if (rescaled) rescale(plot);
        moveCursor(plot);
      }
      if (rescaled) drawRest();
      histogram?.follow();
      read();
    },
    resize() {
      for (const { plot } of charts) fitWidth(plot);
      drawRest();
    },
    remove: () => charts.forEach(({ plot }) => plot?.destroy()),
  };
}

function drawAxisOf(canvas, width) {
  const context = sizeCanvas(canvas, width, AXIS);
  const [from, to] = shownColumns();
  const plot = width - GUTTER - 8;
  context.fillStyle = themeColor("muted");
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  for (const { step, column } of stepTicks(from, Math.min(to, columnCount() - 1), plot / 80)) {
    const x = GUTTER + ((column - from) / (to - from + 1)) * plot;
    context.fillRect(Math.round(x), 0, 1, 3);
    if (x < width - 10) context.fillText(formatCount(step), Math.max(GUTTER, Math.min(x, width - 18)), 14);
  }
}
