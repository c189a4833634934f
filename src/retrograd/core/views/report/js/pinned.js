/** The pinned cell: its numbers beside those of another step, or of another row, and their ratio. */

import { pinnedCell } from "./actions.js";
import { fill, find, make } from "./dom.js";
import { formatNumber, printerOf } from "./format.js";
import { STATISTICS, bandOf, lineOf, loadStatistics } from "./measures.js";
import { facts } from "./payload.js";
import { isMerged, shown } from "./rows.js";
import { change, quantityOf, state } from "./state.js";
import { nameColumn, shownColumns } from "./steps.js";

export async function showPinned() {
  const pin = pinnedCell();
  find("pinned").hidden = !pin;
  if (!pin) return;
  const [one, other] = [cellOf(pin.place, pin.column), otherCell(pin)];
  const series = [one, other].map((cell) => cell.series).filter((each) => each !== undefined);
  if (facts.live) await loadStatistics(STATISTICS.map(({ name }) => name), series);
  fill(
    find("pinned"),
    make(
      "div",
      { class: "scroll" },
      make(
        "table",
        {},
        make("caption", {}, one.name, " ", make("button", { class: "icon", type: "button", "aria-label": "let go of the pinned cell", onclick: () => change({ pin: "" }) }, "✕")),
        make("thead", {}, make("tr", {}, ...[quantityOf(state.quantity).title, `${nameColumn(one.column)} (pinned)`, other.name === one.name ? nameColumn(other.column) : `${nameColumn(other.column)}, ${other.name}`, "ratio"].map((text, i) => make("th", { scope: "col", class: i ? "number" : null }, text)))),
        make("tbody", {}, ...STATISTICS.filter(({ unlisted }) => !unlisted).map((statistic) => makeRow(statistic, one, other)).filter(Boolean)),
      ),
    ),
  );
}

/** What the pinned cell is set beside: the row and step at the cursor, else its own row at the last step in view. */
function otherCell(pin) {
  const row = shown.rows.find((node) => node.id === state.current);
  const isOne = state.cursor !== null && row && row.place !== null && !isMerged(row);
  return cellOf(isOne ? row.place : pin.place, state.cursor ?? shownColumns()[1]);
}

const cellOf = (place, column) => ({ name: facts.places[place].name, series: facts.places[place].series[quantityOf(state.quantity).site], column });

function makeRow(statistic, one, other) {
  const [a, b] = [one, other].map(({ series, column }) => lineOf(statistic.name, bandOf(statistic, state.band), series)?.[column] ?? NaN);
  if (Number.isNaN(a) && Number.isNaN(b)) return null;
  const print = printerOf(statistic);
  const ratio = a === b ? "=" : a === 0 || !Number.isFinite(b / a) ? "–" : `×${formatNumber(b / a)}`;
  return make("tr", {}, make("th", { scope: "row" }, statistic.label), ...[print(a), print(b), ratio].map((text) => make("td", { class: "number" }, text)));
}
