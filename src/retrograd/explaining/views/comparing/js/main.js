/** The page of several runs: what is told of them, and the map of their ratios. */

import { askServer } from "./asking.js";
import { readView, showMap } from "./map.js";
import { STATISTICS, loadStatistics } from "./measures.js";
import { openPage } from "./opening.js";
import { facts } from "./payload.js";
import { writeRuns } from "./runs.js";
import { onChange } from "./state.js";
import { writeTold } from "./told.js";

async function start() {
  writeTold();
  readView();
  writeRuns();
  onChange(["hidden"], writeRuns);
  await showMap();
}

/** Where a run has gone on, load the page again, of which the address holds the view; one that nobody looks at waits. */
async function lookAgain() {
  const { base, state } = facts.again;
  const answer = document.hidden ? null : await askServer(base, "state", location.search).catch(() => null); // it may be over
  if (answer && (await answer.text()) !== state) location.reload();
  else followRuns();
}

const followRuns = () => void setTimeout(lookAgain, 1000 * facts.again.pause);

/** What panels need is made ready while nobody waits for it. */
async function prepare() {
  if (facts.again) followRuns();
  for (const { name } of STATISTICS) await loadStatistics([name]);
}

openPage(start, prepare);
