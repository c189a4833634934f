/** Site, step and value under the cursor: beside the pointer, and as a line for those who cannot see it. */

import { plural } from "./counts.js";
import { fill, find, make } from "./dom.js";
import { printerOf } from "./format.js";
import { columnToX, geometry } from "./geometry.js";
import { bandOf, lineOf, statisticOf } from "./measures.js";
import { facts } from "./payload.js";
import { chooseBetter, isFolded, isMerged, isRatio, isWithout, mergeRule, numbersOf, numbersOfPlace, placesWithout, shown, siteName, whyWithout } from "./rows.js";
import { quantityOf, state } from "./state.js";
import { nameColumn } from "./steps.js";
import { fullName, describeWithout } from "./labels.js";

export function drawTooltip() {
  const node = shown.rows.find((row) => row.id === state.current);
  const tooltip = find("tooltip");
  const looking = state.held || find("viewport").matches(":hover"); // not where a chart moves the cursor
  tooltip.hidden = !node || state.cursor === null || !looking;
  if (tooltip.hidden) return;
  const lines = describeCell(node, state.cursor);
  fill(tooltip, ...lines.map(([kind, text]) => make("div", { class: kind }, text)));
  find("readout").textContent = lines.map(([, text]) => text).join(", ");
  moveTooltip(tooltip, node);
}

/** Lines of [class, text]. */
export function describeCell(node, column) {
  const { line, bad } = numbersOf(node);
  const without = placesWithout(node).length > 0;
  const lines = [
    ["where", `${nameOf(node)}${!isMerged(node) && facts.places[node.place]?.shape ? `, ${facts.places[node.place].shape}` : ""}`],
    ["when", nameColumn(column)],
  ];
  if (isWithout(node)) return [lines[0], ["value", describeWithout(node)]];
  if (!line && !bad) return [...lines, ["value", node.children && !isFolded(node) ? "its sites are below" : "unfold to see its sites"]];
  if (bad?.[column] > 0) lines.push(["alarm", `${plural(bad[column], "element")} NaN or infinite`]);
  const missing = !line || Number.isNaN(line[column]);
  if (missing && !(bad?.[column] > 0)) return [...lines, ["value", (!isMerged(node) && whyWithout(node.place)) || "not recorded"]];
  if (!missing) lines.push(["value", valueText(node, line[column], column)]);
  if (isMerged(node) && !missing)
    lines.push(["source", `${mergeRule()} of ${node.places.length} rows, at ${winnerOf(node, column)}`]);
  if (without) lines.push(["source", describeWithout(node)]);
  return lines;
}

const nameOf = (node) => (isMerged(node) || node.place === null ? fullName(node) : siteName(node.place));

function valueText(node, value, column) {
  const statistic = statisticOf(state.statistic);
  const print = printerOf(statistic);
  if (Math.abs(value) === Infinity && isRatio()) return value > 0 ? statistic.come : statistic.gone;
  const text = `${statistic.label} ${print(value)}`;
  if (facts.columns.width === 1 || isMerged(node)) return text;
  const series = facts.places[node.place].series[quantityOf(state.quantity).site];
  const others = statistic.bands.filter((band) => band !== bandOf(statistic, state.band));
  const words = { low: "smallest", mean: "mean", high: "largest" };
  const rest = others.map((band) => `${words[band]} ${print(lineOf(state.statistic, band, series)[column])}`);
  return rest.length ? `${text} (${rest.join(", ")})` : text;
}

function winnerOf(node, column) {
  const better = chooseBetter();
  const value = (number) => numbersOfPlace(number).line?.[column] ?? NaN;
  const best = node.places.reduce((a, b) => (Number.isNaN(value(a)) || better(value(b), value(a)) ? b : a));
  return facts.places[best].name;
}

function moveTooltip(tooltip, node) {
  const row = shown.rows.indexOf(node);
  const x = geometry.gutter + columnToX(state.cursor + 0.5);
  const y = find("viewport").offsetTop + row * geometry.row - find("viewport").scrollTop;
  const room = find("map").clientWidth;
  const [width, height] = [tooltip.offsetWidth, tooltip.offsetHeight];
  const left = x + 16 + width < room ? x + 16 : Math.max(4, x - 16 - width);
  tooltip.style.transform = `translate(${Math.round(left)}px, ${Math.round(y - height - 8 > 0 ? y - height - 8 : y + geometry.row + 8)}px)`;
}
