/** Puts the page of several runs together and says what is redrawn when. */

import { drawAxis } from "./axis.js";
import { find } from "./dom.js";
import { measureMap } from "./geometry.js";
import { followHash, readHash } from "./hash.js";
import { drawCross, drawMap, drawNames } from "./heatmap.js";
import { followKeys } from "./keyboard.js";
import { drawLegend } from "./legend.js";
import { drawLosses, followLosses, loadLosses, resizeLosses } from "./losses.js";
import { STATISTICS, loadStatistics, statisticOf } from "./measures.js";
import { openPage } from "./opening.js";
import { facts } from "./payload.js";
import { drawPanels, followPanels, resizePanels, showPins } from "./panels.js";
import { followPointer } from "./pointer.js";
import { fitColors, listShownRows } from "./rows.js";
import { writeRuns } from "./runs.js";
import { QUANTITIES, change, onChange, state } from "./state.js";
import { followTheme, showTheme } from "./theme.js";
import { writeTold } from "./told.js";
import { buildToolbar, showCounts, showToolbar } from "./toolbar.js";
import { drawTooltip } from "./tooltip.js";

async function redrawAll() {
  const { name, bad } = statisticOf(state.statistic);
  await loadStatistics([name, bad]);
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
  resizeLosses();
  resizePanels();
}

function listen() {
  onChange(["quantity", "statistic", "band", "scale", "filter", "depth", "flipped", "rows", "zoom", "theme"], redrawAll);
  onChange(["curves", "range"], showToolbar);
  onChange(["cursor", "current", "brush"], drawCursor);
  onChange(["open"], () => drawPanels().then(resize));
  onChange(["curves", "theme", "hidden"], () => {
    writeRuns();
    drawLosses();
    drawPanels(true);
  });
  onChange(["zoom", "cursor", "range"], followLosses);
  onChange(["zoom", "cursor", "range"], followPanels);
  onChange(["pinned"], showPins);
  onChange(["open"], drawCursor);
  find("viewport").addEventListener("scroll", () => requestAnimationFrame(drawMap), { passive: true });
  new ResizeObserver(() => requestAnimationFrame(resize)).observe(find("map"));
}

async function start() {
  Object.assign(state, readHash());
  writeRuns();
  writeTold();
  onChange(["theme"], () => showTheme(state.theme));
  followTheme(state.theme, (theme) => change({ theme }));
  find("map").hidden = QUANTITIES.length === 0;
  if (QUANTITIES.length === 0) return;
  buildToolbar();
  await loadLosses();
  await redrawAll();
  drawLosses();
  listen();
  followHash();
  followPointer();
  followKeys();
  if (state.open.length) change({ open: state.open });
}

/** Where a run goes on, load the page again, of which the address holds the view; one that nobody looks at waits. */
function lookAgain() {
  setTimeout(() => (document.hidden ? lookAgain() : location.reload()), 1000 * facts.again);
}

/** What panels need is made ready while nobody waits for it. */
async function prepare() {
  if (facts.again) lookAgain();
  for (const { name } of STATISTICS) await loadStatistics([name]);
}

openPage(start, prepare);
