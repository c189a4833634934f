/** Follows a run that is still being recorded: requests what is new, and redraws the page. */

import { writeAbout } from "./about.js";
import { writeDid } from "./did.js";
import { find } from "./dom.js";
import { forgetExponents } from "./exponents.js";
import { writeFindings } from "./findings.js";
import { findStatistics, forgetColumns, forgetScalars } from "./measures.js";
import { fetchLive, facts } from "./payload.js";
import { forgetNumbers } from "./rows.js";
import { QUANTITIES, change, findQuantities } from "./state.js";
import { columnCount } from "./steps.js";
import { tellWaiting } from "./waiting.js";

const STRUCTURE = ["sites", "places", "measures"];

/** Poll for news, unless the page is hidden. */
export function followRun() {
  const again = () => setTimeout(() => (document.hidden ? again() : lookForNews().finally(again)), facts.live.pause);
  again();
}

async function lookForNews() {
  const { first, last, width } = facts.columns;
  const have = JSON.stringify(facts.live.digests);
  try {
    const query = { have, column: first.length - 1, step: first.at(-1) ?? -1, until: last.at(-1) ?? -1, width };
    const answer = await fetchLive("news", query);
    const news = await answer.json();
    adopt(news);
    tellWaiting(news.idle);
    find("failure").hidden = true;
  } catch (error) {
    find("failure").hidden = false;
    find("failure").textContent = `Live updates have stopped: ${error.message}. Is “retrograd serve” still running?`;
  }
}

function adopt({ news, digests, columns }) {
  if (!columns && Object.keys(news).length === 0) return;
  performance.mark("news");
  Object.assign(facts, news);
  Object.assign(facts.live.digests, digests);
  if ("scalars" in news) forgetScalars();
  const isOther = STRUCTURE.some((key) => key in news);
  if (columns) addColumns(columns);
  if (isOther) {
    const before = QUANTITIES.length;
    findQuantities();
    findStatistics();
    if (before === 0 && QUANTITIES.length > 0) return location.reload(); // nothing was drawn yet
  }
  if (find("map").hidden && facts.scalars && columnCount()) return location.reload();
  if (isOther || columns?.from === 0) {
    forgetColumns();
    forgetNumbers(isOther);
    forgetExponents();
  }
  writeAbout(Object.keys(news));
  if ("card" in news) writeDid();
  if ("findings" in news) writeFindings();
  if (columns || isOther) {
    facts.live.version += 1;
    change({ data: facts.live.version, ...(columns?.from === 0 ? { zoom: null } : {}) });
  }
}

function addColumns({ from, first, last, width, total }) {
  facts.columns = {
    first: [...facts.columns.first.slice(0, from), ...first],
    last: [...facts.columns.last.slice(0, from), ...last],
    width,
    total,
  };
}
