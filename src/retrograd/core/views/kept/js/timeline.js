/** Bytes held at each position, the peak, and the position that is chosen. */

import { formatCount } from "./counts.js";
import { find, redrawWith, sizeCanvas, themeColor } from "./dom.js";
import { formatBytes, formatSeconds } from "./sizes.js";
import { facts } from "./payload.js";
import { change, data, eventAt, onChange, state } from "./store.js";

const LEFT = 64;
const RIGHT = 12;
const TOP = 22;
const BOTTOM = 40;

let size = { width: 0, height: 0 };
let pointed = null;

export function showTimeline() {
  const element = find("timeline");
  element.setAttribute("aria-valuemax", String(data.held.length - 1));
  redrawWith(element, draw);
  element.addEventListener("pointermove", (event) => point(positionAt(event)));
  element.addEventListener("pointerleave", () => point(null));
  element.addEventListener("click", (event) => change({ position: positionAt(event) }));
  element.addEventListener("keydown", followKey);
  find("at-peak").addEventListener("click", () => change({ position: facts.inventory.peak }));
  find("at-all").addEventListener("click", () => change({ position: null }));
  onChange((values) => "position" in values && draw());
  draw();
}

function followKey(event) {
  const last = data.held.length - 1;
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageDown: -Math.ceil(last / 20), PageUp: Math.ceil(last / 20) };
  const now = state.position ?? facts.inventory.peak;
  const next = { Home: 0, End: last }[event.key] ?? (event.key in steps ? now + steps[event.key] : null);
  if (next === null) return;
  event.preventDefault();
  change({ position: Math.min(Math.max(next, 0), last) });
}

const span = () => Math.max(size.width - LEFT - RIGHT, 1);
const xOf = (position) => LEFT + (span() * (position + 0.5)) / data.held.length;
const yOf = (bytes) => size.height - BOTTOM - ((size.height - TOP - BOTTOM) * bytes) / Math.max(data.held[facts.inventory.peak], 1);

function positionAt(event) {
  const x = event.clientX - find("timeline").getBoundingClientRect().left - LEFT;
  return Math.min(Math.max(Math.floor((x / span()) * data.held.length), 0), data.held.length - 1);
}

function point(position) {
  pointed = position;
  const tip = find("held-tip");
  tip.hidden = position === null;
  if (position !== null) {
    tip.textContent = describe(position);
    const x = xOf(position);
    tip.style.left = `${x + 14 + tip.offsetWidth < size.width ? x + 14 : Math.max(0, x - 14 - tip.offsetWidth)}px`;
  }
  draw();
}

function describe(position) {
  const when = data.seconds[position];
  const time = when === null ? "" : `, after ${formatSeconds(when)}`;
  return `${formatBytes(data.held[position])} at position ${formatCount(position)}${time}: ${eventAt(position)}`;
}

function draw() {
  const element = find("timeline");
  size = { width: element.clientWidth, height: element.clientHeight };
  const context = sizeCanvas(element.firstElementChild, size.width, size.height);
  context.font = "12px system-ui, sans-serif";
  drawPhases(context);
  drawScale(context);
  drawPositions(context);
  drawCurve(context);
  drawPeak(context);
  if (state.position !== null) drawRule(context, state.position, themeColor("accent"), 2);
  if (pointed !== null) drawRule(context, pointed, themeColor("muted"), 1);
  announce(element);
}

function announce(element) {
  const { position } = state;
  element.setAttribute("aria-valuenow", String(position ?? facts.inventory.peak));
  element.setAttribute("aria-valuetext", describe(position ?? facts.inventory.peak));
  find("held-now").textContent = position === null ? "all saved tensors, at any time" : describe(position);
  find("at-peak").setAttribute("aria-pressed", String(position === facts.inventory.peak));
  find("at-all").setAttribute("aria-pressed", String(position === null));
}

/** Where nodes run the ground is shaded; each stretch is named if there is room. */
function drawPhases(context) {
  const { isRun, held } = data;
  const bottom = size.height - BOTTOM;
  const last = held.length - 1;
  for (let first = 0; first < last; ) {
    let end = first;
    while (end < last && isRun[end] === isRun[first]) end += 1;
    const [from, to] = [LEFT + (span() * first) / held.length, LEFT + (span() * end) / held.length];
    if (isRun[first]) {
      context.fillStyle = themeColor("well");
      context.fillRect(from, TOP, to - from, bottom - TOP);
    }
    const [name, words] = isRun[first] ? ["backward", "backward: nodes are run"] : ["forward", "forward: nodes are created"];
    if (to - from > 64) {
      context.fillStyle = themeColor("muted");
      context.textAlign = "center";
      context.fillText(context.measureText(words).width + 8 < to - from ? words : name, (from + to) / 2, size.height - 6);
    }
    first = end;
  }
}

function drawScale(context) {
  context.textAlign = "right";
  context.strokeStyle = themeColor("line");
  context.lineWidth = 1;
  const top = data.held[facts.inventory.peak];
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(yOf(top * share)) + 0.5;
    context.beginPath();
    context.moveTo(LEFT, y);
    context.lineTo(size.width - RIGHT, y);
    context.stroke();
    context.fillStyle = themeColor("muted");
    context.fillText(formatBytes(top * share), LEFT - 8, y + 4);
  }
}

/** Positions along the axis, with the time since the first where it is known. */
function drawPositions(context) {
  const last = data.held.length - 1;
  const count = Math.max(Math.min(Math.floor(span() / 150), last), 1);
  context.fillStyle = themeColor("muted");
  for (let i = 0; i <= count; i++) {
    const position = Math.round((last * i) / count);
    const time = data.seconds[position] ?? null;
    context.textAlign = i === 0 ? "left" : i === count ? "right" : "center";
    const x = i === 0 ? LEFT : i === count ? size.width - RIGHT : xOf(position);
    context.fillText(`${i === 0 ? "position " : ""}${formatCount(position)}${time === null ? "" : ` · ${formatSeconds(time)}`}`, x, size.height - BOTTOM + 15);
  }
}

/** As steps; where there are more positions than pixels, the smallest and largest of each pixel are drawn. */
function drawCurve(context) {
  const { held } = data;
  const columns = Math.min(held.length, Math.floor(span()));
  const bottom = yOf(0);
  const high = new Path2D();
  const low = new Path2D();
  high.moveTo(LEFT, bottom);
  for (let column = 0; column < columns; column++) {
    const from = Math.floor((column * held.length) / columns);
    const to = Math.max(Math.floor(((column + 1) * held.length) / columns), from + 1);
    let [least, most] = [Infinity, 0];
    for (let i = from; i < to; i++) [least, most] = [Math.min(least, held[i]), Math.max(most, held[i])];
    const [x, next] = [LEFT + (span() * column) / columns, LEFT + (span() * (column + 1)) / columns];
    high.lineTo(x, yOf(most));
    high.lineTo(next, yOf(most));
    if (least < most) low.rect(x, yOf(most), next - x, yOf(least) - yOf(most));
  }
  high.lineTo(LEFT + span(), bottom);
  context.globalAlpha = 0.22;
  context.fillStyle = themeColor("accent");
  context.fill(high);
  context.globalAlpha = 0.5;
  context.fill(low);
  context.globalAlpha = 1;
  context.strokeStyle = themeColor("accent");
  context.lineWidth = 1.5;
  context.stroke(high);
}

function drawPeak(context) {
  if (!data.held[facts.inventory.peak]) return;
  const [x, y] = [xOf(facts.inventory.peak), yOf(data.held[facts.inventory.peak])];
  context.fillStyle = themeColor("bad");
  context.beginPath();
  context.arc(x, y, 4, 0, 2 * Math.PI);
  context.fill();
  const words = `peak ${formatBytes(data.held[facts.inventory.peak])}: ${eventAt(facts.inventory.peak)}`;
  const room = size.width - RIGHT - LEFT;
  const text = context.measureText(words).width > room ? `peak ${formatBytes(data.held[facts.inventory.peak])}` : words;
  const half = context.measureText(text).width / 2;
  context.fillStyle = themeColor("ink");
  context.textAlign = "center";
  context.fillText(text, Math.min(Math.max(x, LEFT + half), size.width - RIGHT - half), 13);
}

function drawRule(context, position, color, width) {
  context.strokeStyle = color;
  context.lineWidth = width;
  context.beginPath();
  context.moveTo(xOf(position), TOP);
  context.lineTo(xOf(position), size.height - BOTTOM);
  context.stroke();
}
