/** What each module keeps of what is shown, as a table. */

import { formatCount, plural } from "./counts.js";
import { breakable, fill, find, make } from "./dom.js";
import { formatBytes, formatShare } from "./sizes.js";
import { aliveNow, change, moduleOf, onChange } from "./store.js";

const MOST = 300;

export function showModules() {
  onChange((values) => "position" in values && draw());
  draw();
}

function draw() {
  const sums = new Map();
  let total = 0;
  for (const storage of aliveNow()) {
    const sum = sums.get(moduleOf(storage)) ?? { bytes: 0, count: 0 };
    sum.bytes += storage.bytes;
    sum.count += 1;
    sums.set(moduleOf(storage), sum);
    total += storage.bytes;
  }
  const rows = [...sums].sort((a, b) => b[1].bytes - a[1].bytes);
  const most = rows[0]?.[1].bytes ?? 1;
  find("modules-count").textContent =
    `${plural(rows.length, "module")}, ${formatBytes(total)}${rows.length > MOST ? `; the largest ${formatCount(MOST)} are listed` : ""}`;
  fill(
    find("modules"),
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "module"), ...["tensors", "bytes", "share"].map((name) => make("th", { scope: "col", class: "number" }, name)), make("th", { class: "wide" }, make("span", { class: "unseen" }, "bar")))),
    make("tbody", {}, ...rows.slice(0, MOST).map(([module, sum]) => drawRow(module, sum, total, most))),
  );
}

function drawRow(module, { bytes, count }, total, most) {
  const bar = make("span", { class: "share" });
  bar.style.width = `${Math.round((120 * bytes) / most)}px`;
  const name = module ? make("button", { type: "button", title: "Show it in the treemap", onclick: () => change({ path: module }) }, ...breakable(module)) : "(no module)";
  return make(
    "tr",
    {},
    make("td", { class: "name" }, name),
    make("td", { class: "number" }, formatCount(count)),
    make("td", { class: "number" }, formatBytes(bytes)),
    make("td", { class: "number" }, formatShare(bytes, total)),
    make("td", { class: "bar-cell wide", "aria-hidden": "true" }, bar),
  );
}
