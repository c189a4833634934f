/** Puts the map, the loss above it and the panels beside it together, and says what is redrawn when. */

import { scrollToRow } from "./actions.js";
import { drawAxis } from "./axis.js";
import { find } from "./dom.js";
import { geometry, measureMap } from "./geometry.js";
import { followHash, readHash } from "./hash.js";
import { drawCross, drawMap, drawNames } from "./heatmap.js";
import { followKeys } from "./keyboard.js";
import { drawLegend } from "./legend.js";
import { drawLoss, followLoss, loadLoss, resizeLoss } from "./loss.js";
import { loadStatistics, statisticOf } from "./measures.js";
import { drawPanels, followPanels, resizePanels, showPins } from "./panels.js";
import { facts } from "./payload.js";
import { showPinned } from "./pinned.js";
import { followPointer } from "./pointer.js";
import { followPrinting } from "./print.js";
import { fitColors, listShownRows } from "./rows.js";
import { QUANTITIES, change, onChange, seriesOf, state } from "./state.js";
import { followTheme, showTheme } from "./theme.js";
import { buildToolbar, followReset, showCounts, showToolbar, showZoom } from "./toolbar.js";
import { drawTooltip } from "./tooltip.js";
import { openWorst } from "./worst.js";

const STRIP = ["scalars", "scales", "smooth", "x", "range"]; // what the strip alone depends on

/** Take the view from the address, and the theme with it. */
export function readView() {
  Object.assign(state, readHash());
  onChange(["theme"], () => showTheme(state.theme));
  followTheme(state.theme, (theme) => change({ theme }));
}

/** Draw all of it, once the view is known; nothing where nothing was recorded, or the loss alone. */
export async function showMap() {
  find("map").hidden = QUANTITIES.length === 0 && !facts.scalars;
  if (QUANTITIES.length === 0) return facts.scalars ? showLoss() : undefined;
  buildToolbar();
  await Promise.all([loadLoss(), loadShown()]);
  listShownRows();
  const worst = openWorst();
  drawAll();
  drawLoss();
  listen();
  if (worst) showInMiddle(worst);
  followHash();
  followPointer();
  followKeys();
  performance.mark("first paint");
  if (state.open.length) change({ open: state.open });
}

async function showLoss() {
  find("map").classList.add("loss-alone");
  const draw = async () => {
    await loadLoss();
    measureMap();
    drawLoss();
    showZoom();
  };
  await draw();
  onChange(["theme", "data", ...STRIP], draw);
  onChange(["zoom", "cursor", "range"], followLoss);
  onChange(["zoom"], showZoom);
  followReset();
  followHash();
  followKeys();
  followResize(() => {
    measureMap();
    resizeLoss();
  });
}

function loadShown() {
  const { name, bad } = statisticOf(state.statistic);
  return loadStatistics([name, bad ?? "nonfinite"], seriesOf(state.quantity));
}

async function redrawAll() {
  await loadShown();
  listShownRows();
  drawAll();
}

function drawAll() {
  measureMap();
  fitColors();
  drawMap();
  drawAxis();
  drawLegend();
  showToolbar();
  showCounts();
  drawTooltip();
}

function drawCursor() {
  drawCross();
  drawNames();
  drawTooltip();
}

function resize() {
  measureMap();
  drawMap();
  drawAxis();
  resizeLoss();
  resizePanels();
}

function listen() {
  onChange(["quantity", "statistic", "band", "scale", "filter", "depth", "flipped", "rows", "order", "at", "zoom", "theme"], redrawAll);
  onChange(["curves", "range"], showToolbar);
  onChange(["cursor", "current", "brush"], drawCursor);
  onChange(["data"], async () => {
    await Promise.all([loadLoss(), redrawAll()]);
    drawLoss();
    await drawPanels(true);
    performance.measure("update", "news");
  });
  onChange(["open", "overlay"], () => drawPanels().then(resize));
  onChange(["open", "overlay"], showToolbar);
  onChange(["pin"], drawCross);
  onChange(["pin", "cursor", "current", "quantity", "band", "zoom", "data"], showPinned);
  onChange(["curves", "theme", "hidden"], () => {
    drawLoss();
    drawPanels(true);
  });
  onChange(STRIP, drawLoss);
  onChange(["zoom", "cursor", "range"], followLoss);
  onChange(["zoom", "cursor", "range"], followPanels);
  onChange(["pinned"], showPins);
  onChange(["open"], drawCursor);
  find("viewport").addEventListener("scroll", () => requestAnimationFrame(drawMap), { passive: true });
  followResize(resize);
  followPrinting(resize);
  if (state.pin) change({ pin: state.pin });
}

function followResize(resize) {
  const isOther = () => find("map").clientWidth !== geometry.card; // its height is our own doing
  new ResizeObserver(() => isOther() && requestAnimationFrame(resize)).observe(find("map"));
}

function showInMiddle(row) {
  scrollToRow(row.id);
  find("viewport").scrollTop += geometry.height / 2;
}
