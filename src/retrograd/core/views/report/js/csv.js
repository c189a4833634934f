/** Download the numbers in view as CSV: a line a row of the map, a column a column in view. */

import { download, fileName } from "./download.js";
import { facts } from "./payload.js";
import { fullName } from "./labels.js";
import { bandOf, statisticOf } from "./measures.js";
import { isWithout, numbersOf, shown } from "./rows.js";
import { quantityOf, state } from "./state.js";
import { shownColumns } from "./steps.js";

export function makeCsv() {
  const [from, to] = shownColumns();
  const range = Array.from({ length: to - from + 1 }, (_, i) => from + i);
  const { first, last, width } = facts.columns;
  const statistic = statisticOf(state.statistic);
  const what = `${statistic.label} of ${quantityOf(state.quantity).title}${width > 1 ? ` (${bandOf(statistic, state.band)})` : ""}`;
  const lines = [
    [
      what,
      ...range.map((column) => (first[column] === last[column] ? first[column] : `${first[column]}-${last[column]}`)),
    ],
  ];
  for (const node of shown.rows) {
    const { line } = numbersOf(node);
    if (line || isWithout(node))
      lines.push([
        fullName(node),
        ...range.map((column) => (!line || Number.isNaN(line[column]) ? "" : Number(line[column].toPrecision(9)))),
      ]);
  }
  return lines.map((fields) => fields.map(quote).join(",")).join("\r\n") + "\r\n";
}

export const exportCsv = () => download(new Blob([makeCsv()], { type: "text/csv" }), fileName("csv"));

/** A leading = + - @, tab or carriage return would be run as a formula by spreadsheets; names get a quote before it, numbers stay. */
function quote(field) {
  if (typeof field === "number") return String(field);
  const safe = /^[=+@\t\r-]/.test(field) ? `'${field}` : field;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
