/** Keys: arrows move the cursor, Enter opens or folds, Escape goes back, / searches. */

import { openRow, closePlace, scrollToRow, toggleFold } from "./actions.js";
import { find, focusOnSlash } from "./dom.js";
import { isMerged, shown } from "./rows.js";
import { change, state } from "./state.js";
import { shownColumns } from "./steps.js";

export function followKeys() {
  focusOnSlash("filter");
  find("viewport").addEventListener("keydown", pressOnMap);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") goBack(event.target.closest("input, select, textarea"));
  });
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
  };
  if (!(event.key in keys) || event.altKey || event.metaKey) return;
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
  else if (state.zoom) change({ zoom: null });
  else change({ cursor: null, current: null });
}
