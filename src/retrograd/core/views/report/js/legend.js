/** The colour bar, and what a cell and a folded row mean. */

import { gradientOf } from "./colors.js";
import { plural } from "./counts.js";
import { fill, find, make } from "./dom.js";
import { printerOf } from "./format.js";
import { bandOf, statisticOf } from "./measures.js";
import { facts } from "./payload.js";
import { hasZero, isMerged, isRatio, placesWithout, mergeRule, shown, sortColumn } from "./rows.js";
import { valueAt } from "./scale.js";
import { quantityOf, state } from "./state.js";
import { nameColumn, skipsSteps } from "./steps.js";

const BAND_WORDS = { low: "smallest", mean: "mean", high: "largest" };

export function drawLegend() {
  const statistic = statisticOf(state.statistic);
  const print = printerOf(statistic);
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => make("span", {}, print(valueAt(shown.scale, share))));
  const bar = make("div", {
    class: "bar",
    role: "img",
    "aria-label": `Colours from ${ticks[0].textContent} to ${ticks[4].textContent}`,
  });
  bar.style.background = gradientOf(shown.palette);
  find("zero-swatch").hidden = !hasZero();
  find("without-swatch").hidden = !shown.rows.some((node) => placesWithout(node).length);
  for (const end of ["gone", "come"]) {
    find(`${end}-swatch`).hidden = !isRatio();
    find(`${end}-text`).textContent = statistic[end] ?? "";
  }
  find("map-title").title = statistic.about ?? "";
  find("map-title").textContent = `${statistic.title ?? statistic.label} of ${quantityOf(state.quantity).title}`;
  fill(find("scale-bar"), bar, make("div", { class: "ticks" }, ...ticks));
  find("notice").textContent = noticeText(statistic);
}

function noticeText(statistic) {
  const { total, first, width } = facts.columns;
  const cell = BAND_WORDS[bandOf(statistic, state.band)];
  const kept = isRatio() ? "the furthest from equal" : `the ${cell}`;
  const decimated =
    width > 1
      ? `${plural(total, "step")} drawn in ${plural(first.length, "column")} of ${width}; extremes kept (a cell shows ${kept} of its steps). `
      : "";
  const sorted = state.order === "value" ? `Rows are sorted by their value at ${nameColumn(sortColumn())}. ` : "";
  const skipped = first.some((_, column) => skipsSteps(column)) ? "Only recorded steps have columns: a mark on the axis says that steps before it have none. " : "";
  return `${skipped}${decimated}${sorted}${shown.rows.some(isMerged) ? `A folded module shows the ${mergeRule()} of its sites. ` : ""}${facts.digits ? `Numbers have ${facts.digits} significant digits.` : ""}`;
}
