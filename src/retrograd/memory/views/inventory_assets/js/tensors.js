/** The memory that is shown, largest first, as a table that can be filtered. */

import { formatCount } from "./counts.js";
import { breakable, fill, find, focusOnSlash, make } from "./dom.js";
import { formatBytes, formatSeconds } from "./sizes.js";
import { aliveNow, change, data, firstRow, isWithin, moduleOf, numberOf, onChange, state, textOf, titleOf } from "./store.js";

const FIRST = 200;
const ALL = ["tensor", "bytes", "type and shape", "saved by", "held from", "to", "made in", "recomputed by", "line"];
const NUMBERS = new Set(["bytes", "saved by", "held from", "to", "made in"]);
const WIDE = new Set(["saved by", "held from", "to", "made in", "recomputed by", "line"]);

let texts = new Map();
let columns = ALL;

export function showTensors() {
  if (data.rows.seconds.every((value) => value === null)) columns = ALL.filter((name) => name !== "made in");
  find("filter").addEventListener("input", (event) => change({ filter: event.target.value.trim().toLowerCase(), shown: FIRST }));
  find("more").addEventListener("click", () => change({ shown: state.shown * 5 }));
  focusOnSlash("filter");
  onChange((values) => ["position", "path", "filter", "shown"].some((name) => name in values) && draw());
  onChange((values) => "kept" in values && mark());
  draw();
}

/** All that can be filtered by, made once for each piece of memory. */
function textFor(storage) {
  if (!texts.has(storage.number)) {
    const words = storage.savers.slice(0, 8).flatMap((row) => ["place", "slot", "plain", "info", "kind", "name", "remake", "source"].map((name) => textOf(row, name)));
    texts.set(storage.number, words.join(" ").toLowerCase());
  }
  return texts.get(storage.number);
}

function draw() {
  const within = aliveNow().filter((storage) => isWithin(moduleOf(storage), state.path));
  const found = state.filter ? within.filter((storage) => textFor(storage).includes(state.filter)) : within;
  const shown = found.slice(0, state.shown);
  const total = found.reduce((sum, storage) => sum + storage.bytes, 0);
  const rest = shown.length < found.length ? `, the largest ${formatCount(shown.length)} listed` : "";
  find("tensors-count").textContent = `${formatCount(found.length)} of ${formatCount(within.length)}${state.path ? ` in ${state.path}` : ""}, ${formatBytes(total)}${rest}`;
  find("more").hidden = shown.length === found.length;
  const heads = columns.map((name) => make("th", { scope: "col", class: classOf(name) }, name));
  fill(find("tensors"), make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...shown.map(drawRow)));
  mark();
}

function drawRow(storage) {
  const row = firstRow(storage);
  const last = storage.spans.at(-1) - 1;
  const cells = {
    bytes: formatBytes(storage.bytes),
    "type and shape": textOf(row, "info"),
    "saved by": formatCount(storage.savers.length),
    "held from": formatCount(storage.spans[0]),
    to: numberOf(row, "released") < 0 ? "–" : formatCount(last),
    "made in": formatSeconds(numberOf(row, "seconds")),
    "recomputed by": textOf(row, "remake") || "–",
    line: textOf(row, "line"),
  };
  const keep = () => change({ kept: state.kept === storage.number ? null : storage.number });
  return make(
    "tr",
    { "data-storage": String(storage.number) },
    make("td", { class: "name", title: textOf(row, "plain") }, make("button", { type: "button", "aria-pressed": "false", onclick: keep }, ...breakable(titleOf(storage)))),
    ...columns.slice(1).map((name) => make("td", { class: classOf(name) }, cells[name])),
  );
}

const classOf = (name) => [NUMBERS.has(name) ? "number" : "", WIDE.has(name) ? "wide" : ""].filter(Boolean).join(" ") || null;

function mark() {
  for (const element of find("tensors").querySelectorAll("tbody tr")) {
    const isKept = element.dataset.storage === String(state.kept);
    element.classList.toggle("kept", isKept);
    element.querySelector("button").setAttribute("aria-pressed", String(isKept));
  }
}
