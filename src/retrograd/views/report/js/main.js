/** Puts the page together and says what is redrawn when. */

import { writeAbout } from "./about.js";
import { scrollToRow } from "./actions.js";
import { drawAxis } from "./axis.js";
import { find } from "./dom.js";
import { geometry, measureMap } from "./geometry.js";
import { showKept } from "./kept.js";
import { writeFindings } from "./findings.js";
import { facts } from "./payload.js";
import { followHash, readHash } from "./hash.js";
import { drawCross, drawMap, drawNames } from "./heatmap.js";
import { drawLegend } from "./legend.js";
import { followRun } from "./live.js";
import { drawLoss, followLoss, resizeLoss } from "./loss.js";
import { STATISTICS, loadLoss, loadStatistics, statisticOf } from "./measures.js";
import { drawPanels, followPanels, resizePanels, showPins } from "./panels.js";
import { followPointer } from "./pointer.js";
import { followKeys } from "./keyboard.js";
import { openPage } from "./opening.js";
import { fitColors, listShownRows } from "./rows.js";
import { QUANTITIES, change, onChange, seriesOf, state } from "./state.js";
import { followTheme, showTheme } from "./theme.js";
import { buildToolbar, showCounts, showToolbar } from "./toolbar.js";
import { drawTooltip } from "./tooltip.js";
import { openWorst } from "./worst.js";

async function redrawAll() {
  await loadStatistics([statisticOf(state.statistic).name, "nonfinite"], seriesOf(state.quantity));
  listShownRows();
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
  onChange(
    ["quantity", "statistic", "band", "scale", "filter", "depth", "flipped", "rows", "zoom", "theme"],
    redrawAll,
  );
  onChange(["curves", "range"], showToolbar);
  onChange(["cursor", "current", "brush"], drawCursor);
  onChange(["data"], async () => {
    await Promise.all([loadLoss(), redrawAll()]);
    drawLoss();
    await drawPanels(true);
    performance.measure("update", "news");
  });
  onChange(["open"], () => drawPanels().then(resize));
  onChange(["curves", "theme"], () => {
    drawLoss();
    drawPanels(true);
  });
  onChange(["zoom", "cursor", "range"], followLoss);
  onChange(["zoom", "cursor", "range"], followPanels);
  onChange(["pinned"], showPins);
  onChange(["open"], drawCursor);
  find("viewport").addEventListener("scroll", () => requestAnimationFrame(drawMap), { passive: true });
  new ResizeObserver(() => requestAnimationFrame(resize)).observe(find("map"));
}

async function showInventory() {
  if (facts.inventory === null) return;
  find("kept").hidden = false;
  find("kept-about").textContent = [facts.inventory.about, ...facts.inventory.notes].join(" ");
  await showKept();
}

function showInMiddle(row) {
  scrollToRow(row.id);
  find("viewport").scrollTop += geometry.height / 2;
}

async function start() {
  writeAbout();
  writeFindings();
  Object.assign(state, readHash());
  onChange(["theme"], () => showTheme(state.theme));
  followTheme(state.theme, (theme) => change({ theme }));
  find("nothing").hidden = QUANTITIES.length > 0;
  find("map").hidden = QUANTITIES.length === 0;
  await showInventory();
  if (QUANTITIES.length === 0) return;
  buildToolbar();
  await loadLoss();
  await redrawAll();
  const worst = openWorst();
  if (worst) await redrawAll();
  drawLoss();
  listen();
  if (worst) showInMiddle(worst);
  followHash();
  followPointer();
  followKeys();
  performance.mark("first paint");
  if (state.open.length) change({ open: state.open });
}

/** What panels need is made ready while nobody waits for it. */
async function prepare() {
  if (facts.live) return followRun();
  await loadStatistics(STATISTICS.map(({ name }) => name));
}

openPage(start, prepare);
