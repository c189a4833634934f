/** Keys: arrows move the cursor, Enter opens or folds, Escape goes back, / searches, ? tells all of them. */

import { openRow, closePlace, pinCell, scrollToRow, toggleFold } from "./actions.js";
import { find, focusOnSlash } from "./dom.js";
import { facts } from "./payload.js";
import { isMerged, shown } from "./rows.js";
import { change, state } from "./state.js";
import { shownColumns } from "./steps.js";

export function followKeys() {
  focusOnSlash("filter");
  find("viewport").addEventListener("keydown", pressOnMap);
  const help = find("help");
  find("ask").addEventListener("click", showHelp);
  document.addEventListener("keydown", (event) => {
    if (help.open) return; // it closes itself
    const typing = event.target.closest("input, select, textarea");
    if (event.key === "Escape") goBack(typing);
    if (event.key === "?" && !typing) showHelp();
  });
}

/** From its top; `autofocus` in the page would be an error where the page is in a frame. */
function showHelp() {
  find("help").showModal();
  find("help-title").focus();
}

function pressOnMap(event) {
  const row = shown.rows.find((node) => node.id === state.current);
  const far = event.shiftKey ? 10 : 1;
  const keys = {
    ArrowDown: () => moveRow(far),
    ArrowUp: () => moveRow(-far),
    ArrowRight: () => moveColumn(far),
    ArrowLeft: () => moveColumn(-far),
    Home: () => moveRow(-shown.rows.length),
    End: () => moveRow(shown.rows.length),
    Enter: () => row && (row.place === null || isMerged(row) ? toggleFold(row) : openRow(row, event.ctrlKey)),
    " ": () => row && toggleFold(row),
    p: () => row && pinCell(row, state.cursor ?? shownColumns()[1]),
    s: () => change({ order: "value", flipped: [], at: state.cursor === null ? "" : String(facts.columns.first[state.cursor]) }),
  };
  if (!(event.key in keys) || event.altKey || event.metaKey || (event.ctrlKey && event.key !== "Enter")) return;
  event.preventDefault();
  keys[event.key]();
}

function moveRow(by) {
  const now = shown.rows.findIndex((node) => node.id === state.current);
  const next = Math.max(0, Math.min(shown.rows.length - 1, now + by));
  if (!shown.rows[next]) return;
  change({ current: shown.rows[next].id, cursor: state.cursor ?? shownColumns()[1], held: true });
  scrollToRow(shown.rows[next].id);
}

function moveColumn(by) {
  const [from, to] = shownColumns();
  change({ cursor: Math.max(from, Math.min(to, (state.cursor ?? from) + by)), held: true });
}

/** Escape undoes one thing: what is typed, then the last panel, then the zoom. */
function goBack(typing) {
  if (typing) return typing.blur();
  if (state.open.length) closePlace(state.open.at(-1));
  else if (state.pin) change({ pin: "" });
  else if (state.zoom) change({ zoom: null });
  else change({ cursor: null, current: null });
}
