/** The strip above the map: scalars in small charts one below the other, with one cursor and one zoom for all and the map. */

import { fitWidth, makeChart, moveCursor, renewChart, rescale } from "./chart.js";
import { fill, find, make } from "./dom.js";
import { geometry } from "./geometry.js";
import { aboutChart, badOf, linesOf, listCharts, openCharts, readScalar, scaleOf, tickPrinter, toggleChart } from "./scalars.js";
import { change, state } from "./state.js";
import { nameColumn, shownColumns } from "./steps.js";
import { axisKey, listAxes, makeAxis, nameOnAxis } from "./strip_axis.js";

const [FIRST, OTHERS, AXIS, KEY] = [92, 72, 22, 17]; // heights
const charts = new Map(); // name → {plot, element, values, members}
let drawn = ""; // which charts, in which order, along which axis
let offered = "";

export function drawStrip() {
  const known = listCharts();
  find("strip-choices").hidden = known.size === 0;
  if (!known.size) return fill(find("loss-charts"), make("p", { class: "note" }, "No loss was recorded."));
  offerChoices(known);
  const names = openCharts();
  const key = JSON.stringify([names, axisKey(), names.map((name) => known.get(name).length)]);
  if (key !== drawn || !names.every((name) => renew(name, known.get(name)))) makeAll(names, known);
  drawn = key;
  readStrip();
}

function makeAll(names, known) {
  for (const { plot } of charts.values()) plot?.destroy();
  charts.clear();
  const made = names.map((name, i) => makeOne(name, known.get(name), i));
  fill(find("loss-charts"), ...made.map(({ element }) => element));
  made.forEach((each, i) => each.mount(i === names.length - 1));
}

function makeOne(name, members, place) {
  const values = members.map(() => make("b"));
  const notes = members.map(() => make("span", { class: "note" }));
  const scale = make("button", { type: "button", class: "quiet small", onclick: () => flipScale(name) });
  const taken = members.find((each) => each.taken)?.taken;
  const lines = members.map((each, i) =>
    make("div", { class: "reading" }, members.length > 1 ? makeKey(each) : null, values[i], notes[i]),
  );
  const title = make("div", { class: "loss-title" }, make("div", { class: "named" }, make("span", { class: "name", title: aboutChart(members) }, name), scale), ...lines, taken ? make("div", { class: "note", title: taken }, `at ${taken}`) : null);
  const host = make("div", { class: "plot" });
  const element = make("div", { class: "strip-chart", role: "group", "aria-label": name }, title, host);
  const height = Math.max(place === 0 ? FIRST : OTHERS, 30 + KEY * (members.length + Boolean(taken)));
  const chart = { element, values, notes, scale, members, plot: null };
  chart.mount = (isLast) => {
    const lines = linesOf(members);
    element.style.minHeight = `${height + (isLast ? AXIS : 0)}px`;
    sayScale(chart, name);
    if (!lines.length) return; // they are on their way
    chart.plot = makeChart(host, {
      ...numbersOf(name, members, lines),
      height: height + (isLast ? AXIS : 0),
      gutter: () => geometry.gutter,
      right: () => geometry.right,
      axis: makeAxis(isLast),
      print: tickPrinter(members[0]),
    });
  };
  charts.set(name, chart);
  return chart;
}

const numbersOf = (name, members, lines) => ({ lines, bad: badOf(members), scale: scaleOf(name, members).scale });

/** Show newer numbers in the chart that is there; false where it has to be made again. */
function renew(name, members) {
  const chart = charts.get(name);
  const lines = linesOf(members);
  if (!chart?.plot) return lines.length === 0;
  sayScale(chart, name);
  return renewChart(chart.plot, numbersOf(name, members, lines));
}

function sayScale({ scale: button, members }, name) {
  const { scale, why } = scaleOf(name, members);
  button.textContent = scale;
  button.title = why || `Scale of ${name}: ${scale}. Press for ${scale === "log" ? "linear" : "log"}.`;
  button.disabled = Boolean(why);
}

function flipScale(name) {
  change({ scales: state.scales.includes(name) ? state.scales.filter((other) => other !== name) : [...state.scales, name] });
}

/** The colour of a line, and what its name has beyond that of its chart. */
function makeKey({ name, chart, color }) {
  const rest = name.split(chart).join("").replace(/^_|_$/g, "");
  return make("span", { class: "of", title: name }, make("i", { class: `line c-${color}` }), rest);
}

/** Say what the charts read at the cursor, and where that is. */
export function readStrip() {
  for (const { members, values, notes } of charts.values())
    members.forEach((each, i) => {
      const { text, smoothed } = readScalar(each);
      values[i].textContent = text;
      notes[i].textContent = smoothed && ` ${smoothed} smoothed`;
    });
  const column = state.cursor;
  const words = column === null ? [] : [nameColumn(column), nameOnAxis("epoch", column), nameOnAxis("time", column)];
  find("strip-where").textContent = words.filter(Boolean).join(" · ");
}

export function followStrip(keys) {
  if (!charts.size) return;
  for (const { plot } of charts.values()) {
    if (!plot) continue;
    if (keys.has("zoom") || keys.has("range")) rescale(plot);
    moveCursor(plot);
  }
  readStrip();
}

export const resizeStrip = () => charts.forEach(({ plot }) => plot && fitWidth(plot));

// ---- choices ----

function offerChoices(known) {
  const axes = listAxes();
  const key = JSON.stringify([[...known.keys()], axes]);
  if (key !== offered) buildChoices([...known.keys()], axes);
  offered = key;
  const open = openCharts();
  for (const button of find("strip-names").children) button.setAttribute("aria-pressed", String(open.includes(button.dataset.name)));
  find("smooth").value = state.smooth;
  find("smooth-value").textContent = Number(state.smooth) ? state.smooth : "off";
  find("outliers").setAttribute("aria-pressed", String(state.range === "view"));
  if (find("along")) find("along").value = axisKey();
}

function buildChoices(names, axes) {
  const choose = ({ target }) => change({ scalars: toggleChart(target.dataset.name) });
  const buttons = names.map((name) => make("button", { type: "button", "data-name": name, onclick: choose }, name));
  const slider = make("input", { id: "smooth", type: "range", min: 0, max: 0.99, step: 0.01, oninput: ({ target }) => change({ smooth: target.value }) });
  const along = make("select", { id: "along", onchange: ({ target }) => change({ x: target.value }) }, ...axes.map(([value, label]) => make("option", { value }, label)));
  fill(
    find("strip-choices"),
    make("div", { id: "strip-names", class: "chips", role: "group", "aria-label": "Scalars that are drawn", hidden: names.length < 2 }, ...buttons),
    make("span", { id: "strip-where", class: "note" }),
    make("span", { class: "spring" }),
    make("label", { class: "field", title: "Exponential smoothing, as in TensorBoard; what was recorded stays behind it, paler" }, "Smoothing ", slider, make("span", { id: "smooth-value", class: "number" })),
    make("button", { id: "outliers", class: "quiet", type: "button", title: "Leaves the most extreme 1 % of the numbers in view out of the range of a chart", onclick: () => change({ range: state.range === "view" ? "full" : "view" }) }, "Ignore outliers"),
    axes.length > 1 ? make("label", { class: "field" }, "Along ", along) : null,
  );
}

/** Arrow keys move the cursor of the page where the strip is focused. */
export function followStripKeys() {
  find("loss-charts").addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.altKey || event.metaKey || event.target !== find("loss-charts")) return;
    event.preventDefault();
    const [from, to] = shownColumns();
    change({ cursor: Math.max(from, Math.min(to, (state.cursor ?? from) + by * (event.shiftKey ? 10 : 1))) });
  });
}
