/** The page of several runs: their verdicts and findings, and the map of their ratios. */

import { fetchFrom } from "./server.js";
import { readView, showMap } from "./map.js";
import { STATISTICS, loadStatistics } from "./measures.js";
import { openPage } from "./opening.js";
import { facts } from "./payload.js";
import { writeRuns } from "./runs.js";
import { writeStart } from "./start.js";
import { onChange } from "./state.js";
import { writeVerdicts } from "./verdicts.js";
import { showWayBack } from "./way_back.js";

async function start() {
  showWayBack(facts.home);
  writeVerdicts();
  readView();
  writeRuns();
  writeStart();
  onChange(["hidden"], writeRuns);
  await showMap();
}

/** Load the page again when a run has gone on (its address holds the view), unless it is hidden. */
async function lookAgain() {
  const { base, state } = facts.again;
  const answer = document.hidden ? null : await fetchFrom(base, "state", location.search).catch(() => null); // it may be over
  if (answer && (await answer.text()) !== state) location.reload();
  else followRuns();
}

const followRuns = () => void setTimeout(lookAgain, 1000 * facts.again.pause);

/** Prepare what panels need, after the first paint. */
async function prepare() {
  if (facts.again) followRuns();
  for (const { name } of STATISTICS) await loadStatistics([name]);
}

openPage(start, prepare);
