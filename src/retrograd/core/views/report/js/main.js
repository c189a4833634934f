/** The page of one run: words around the map, the map, and what autograd kept. */

import { writeAbout } from "./about.js";
import { writeDid } from "./did.js";
import { find } from "./dom.js";
import { writeFindings } from "./findings.js";
import { showKept } from "./kept.js";
import { followRun } from "./live.js";
import { readView, showMap } from "./map.js";
import { STATISTICS, loadStatistics } from "./measures.js";
import { openPage } from "./opening.js";
import { facts } from "./payload.js";
import { QUANTITIES } from "./state.js";
import { tellFirst } from "./waiting.js";
import { showWayBack } from "./way_back.js";

async function start() {
  showWayBack(facts.live?.home);
  writeAbout();
  writeDid();
  writeFindings();
  readView();
  find("nothing").hidden = QUANTITIES.length > 0;
  if (facts.scalars) find("nothing").textContent = facts.hint;
  tellFirst();
  await showInventory();
  await showMap();
}

async function showInventory() {
  if (facts.inventory === null) return;
  find("kept").hidden = false;
  find("kept-about").textContent = [facts.inventory.about, ...facts.inventory.notes].join(" ");
  await showKept();
}

/** Prepare what panels need, after the first paint. */
async function prepare() {
  if (facts.live) return followRun();
  await loadStatistics(STATISTICS.map(({ name }) => name));
}

openPage(start, prepare);
