/** The choices above the map. */

import { foldAll } from "./actions.js";
import { formatCount, plural } from "./counts.js";
import { fill, find, make } from "./dom.js";
import { exportCsv } from "./csv.js";
import { exportPng } from "./png.js";
import { STATISTICS, bandOf, statisticOf } from "./measures.js";
import { facts } from "./payload.js";
import { isRatio, shown } from "./rows.js";
import { FACTORS } from "./scale.js";
import { QUANTITIES, change, quantityOf, seriesOf, state } from "./state.js";
import { columnCount, nameColumns, shownColumns } from "./steps.js";

const BANDS = { high: "largest", mean: "mean", low: "smallest" };
const ORDERS = [["model", "as in the model"], ["type", "by type of layer"], ["value", "largest first"], ["broken", "first NaN or Inf first"]];
const offered = new Map(); // list → its choices, as text
const FACTOR_CHOICES = [["auto", "automatic range"], ...FACTORS.map((factor) => [String(factor), `up to ×${formatCount(factor)}`])];

export function buildToolbar() {
  fill(
    find("quantities"),
    ...QUANTITIES.map(({ key, label }) =>
      make("button", { type: "button", "data-key": key, onclick: () => change(chooseQuantity(key)) }, label),
    ),
  );
  find("statistic").addEventListener("change", ({ target }) => change({ statistic: target.value }));
  find("band").addEventListener("change", ({ target }) => change({ band: target.value }));
  find("scale").addEventListener("change", ({ target }) => change({ scale: target.value }));
  find("order").addEventListener("change", ({ target }) => change({ order: target.value, flipped: [], at: state.pin.split(" ")[0] }));
  find("overlay").addEventListener("click", () => change({ overlay: state.overlay === "on" ? "off" : "on" }));
  find("filter").addEventListener("input", ({ target }) => change({ filter: target.value }));
  find("fold").addEventListener("click", () => foldAll(true));
  find("unfold").addEventListener("click", () => foldAll(false));
  find("fit").addEventListener("click", () => change({ rows: state.rows === "fit" ? "normal" : "fit" }));
  followReset();
  find("csv").addEventListener("click", exportCsv);
  find("png").addEventListener("click", exportPng);
  for (const choice of ["curves", "range"]) {
    find(choice).addEventListener(
      "click",
      ({ target }) => target.dataset.key && change({ [choice]: target.dataset.key }),
    );
  }
}

/** A statistic that the new quantity lacks gives way to rms. */
function chooseQuantity(key) {
  return {
    quantity: key,
    flipped: [],
    statistic: statisticsOf(key).some(({ name }) => name === state.statistic) ? state.statistic : "rms",
  };
}

export function statisticsOf(key) {
  const series = new Set(seriesOf(key));
  return STATISTICS.filter(({ unlisted, series: some }) => !unlisted && some.some((number) => series.has(number)));
}

export function showToolbar() {
  const statistic = statisticOf(state.statistic);
  press("quantities", quantityOf(state.quantity).key);
  find("statistic").title = statistic.about ?? "";
  press("curves", state.curves);
  press("range", state.range);
  offer(
    "statistic",
    statisticsOf(state.quantity).map(({ name, label, about }) => [name, label, about]),
    state.statistic,
  );
  offer(
    "band",
    Object.entries(BANDS).filter(([band]) => statistic.bands.includes(band)),
    bandOf(statistic, state.band),
  );
  offer(
    "scale",
    isRatio() ? FACTOR_CHOICES : [["log", statistic.signed ? "log on both sides of 0" : "log scale"], ["linear", "linear scale"]],
    state.scale === "auto" && !isRatio() ? statistic.scale : state.scale,
  );
  offer("order", ORDERS.filter(([order]) => (order !== "type" || facts.model?.length) && (order !== "broken" || facts.nonfinite || state.order === order)), state.order);
  find("overlay").setAttribute("aria-pressed", String(state.overlay === "on"));
  find("overlay").hidden = state.open.length < 2 || Boolean(facts.runs);
  find("band-field").hidden = facts.columns.width === 1 || statistic.bands.length === 1;
  find("fit").setAttribute("aria-pressed", String(state.rows === "fit"));
  if (find("filter").value !== state.filter) find("filter").value = state.filter;
}

function press(group, key) {
  for (const button of find(group).querySelectorAll("button"))
    button.setAttribute("aria-pressed", String(button.dataset.key === key));
}

/** The choices of a list; one that a person has open stays as it is unless they are others. */
function offer(id, choices, chosen) {
  const key = JSON.stringify(choices);
  if (offered.get(id) !== key) fill(find(id), ...choices.map(([value, label, title]) => make("option", { value, title }, label)));
  offered.set(id, key);
  if (find(id).value !== chosen) find(id).value = chosen;
}

/** What the filter keeps and what the zoom shows. */
export function showCounts() {
  const kept = new Set(
    shown.rows.flatMap((node) =>
      node.children && !state.filter ? node.places : node.place === null ? [] : [node.place],
    ),
  );
  find("filter").setAttribute("aria-invalid", String(Boolean(shown.problem)));
  const count = state.filter
    ? `${plural(shown.rows.filter((node) => !node.children).length, "site")} of ${formatCount(shown.total)}`
    : plural(kept.size, "site");
  find("count").textContent = shown.problem || count + (state.zoom ? `, ${nameColumns(...state.zoom)} of ${nameColumns(0, columnCount() - 1).replace(/^steps? /, "")}` : "");
  find("empty").hidden = shown.rows.length > 0;
  showZoom();
}

export const followReset = () => find("reset").addEventListener("click", () => change({ zoom: null }));

/** Which steps are in view, where these are not all. */
export function showZoom() {
  find("reset").hidden = state.zoom === null;
  const [from, to] = shownColumns();
  find("zoom").textContent = nameColumns(from, to);
}
