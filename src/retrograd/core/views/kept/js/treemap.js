/** Modules within modules, and in them the memory that they keep; areas are bytes. */

import { formatCount, plural } from "./counts.js";
import { fill, find, make, redrawWith, sizeCanvas, themeColor } from "./dom.js";
import { formatBytes, formatShare } from "./sizes.js";
import { aliveNow, change, data, GROUP_WORDS, GROUPS, groupOf, isWithin, moduleOf, onChange, state, textOf, firstRow, titleOf } from "./store.js";
import { layTiles } from "./tiles.js";

const HEADING = 17;
const GAP = 2;
const SMALLEST = 1.5;

let tiles = [];
let folders = [];

export function showTreemap() {
  const element = find("treemap");
  redrawWith(element, draw);
  element.addEventListener("pointermove", (event) => {
    const tile = tileAt(event);
    element.title = tile === null ? (folderAt(event)?.path ?? "") : textOf(firstRow(tile.storage), "plain");
    if ((tile?.storage.number ?? null) !== state.pointed) change({ pointed: tile?.storage.number ?? null });
  });
  element.addEventListener("pointerleave", () => change({ pointed: null }));
  element.addEventListener("click", act);
  onChange((values) => ("position" in values || "path" in values ? draw() : mark()));
  draw();
}

function act(event) {
  const folder = folderAt(event);
  if (folder !== null) {
    change({ path: folder.path });
    return;
  }
  const number = tileAt(event)?.storage.number ?? null;
  change({ kept: number === state.kept ? null : number });
}

/** The modules that keep something, as a tree; a module's own memory is a child beside the modules in it. */
function grow(storages) {
  const root = { name: "", path: "", size: 0, children: new Map(), own: [] };
  for (const storage of storages) {
    const parts = moduleOf(storage).split(".").filter(Boolean);
    let node = root;
    node.size += storage.bytes;
    for (let depth = 0; depth < parts.length; depth++) {
      if (!node.children.has(parts[depth])) {
        node.children.set(parts[depth], { name: parts[depth], path: parts.slice(0, depth + 1).join("."), size: 0, children: new Map(), own: [] });
      }
      node = node.children.get(parts[depth]);
      node.size += storage.bytes;
    }
    node.own.push({ storage, size: storage.bytes });
  }
  return root;
}

function draw() {
  const element = find("treemap");
  const [width, height] = [element.clientWidth, element.clientHeight];
  const shown = aliveNow().filter((storage) => isWithin(moduleOf(storage), state.path));
  let root = grow(shown);
  for (const part of state.path.split(".").filter(Boolean)) root = root.children.get(part) ?? root;
  tiles = [];
  folders = [];
  lay(root, 0, 0, width, height);
  const context = sizeCanvas(element.firstElementChild, width, height);
  paint(context);
  drawLegend(shown);
  drawPath();
  element.setAttribute("aria-label", describe(root, shown));
}

function lay(node, x, y, width, height) {
  const items = [...node.children.values(), ...node.own].sort((a, b) => b.size - a.size);
  layTiles(items, x, y, width, height, (item, left, top, w, h) => {
    if (w < SMALLEST || h < SMALLEST) return;
    if (item.storage) {
      tiles.push({ storage: item.storage, x: left, y: top, width: w, height: h });
      return;
    }
    const folder = foldSingles(item);
    const heading = h > 2.2 * HEADING && w > 34 ? HEADING : 0;
    if (heading) folders.push({ path: folder.path, name: folder.label, size: folder.size, x: left, y: top, width: w, height: heading, whole: h });
    const gap = w > 12 && h > 12 ? GAP : 0;
    lay(folder, left + gap, top + heading, w - 2 * gap, h - heading - gap);
  });
}

/** A module that keeps nothing but what one module in it keeps is drawn as one. */
function foldSingles(node) {
  let label = node.name;
  while (node.children.size === 1 && node.own.length === 0) {
    const [child] = node.children.values();
    label += `.${child.name}`;
    node = child;
  }
  return { ...node, label };
}

function paint(context) {
  const colors = Object.fromEntries(GROUPS.map((group) => [group, themeColor(COLORS[group])]));
  const [page, ink, muted] = ["surface", "ink", "muted"].map(themeColor);
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "left";
  for (const tile of tiles) {
    const inset = tile.width > 4 && tile.height > 4 ? 0.5 : 0;
    context.globalAlpha = state.pointed === tile.storage.number || state.kept === tile.storage.number ? 0.52 : 0.42;
    context.fillStyle = colors[groupOf(tile.storage)];
    context.fillRect(tile.x + inset, tile.y + inset, Math.max(tile.width - 2 * inset, 0.5), Math.max(tile.height - 2 * inset, 0.5));
    context.globalAlpha = 1;
    if (tile.width > 60 && tile.height > 30) label(context, tile, ink);
  }
  for (const folder of folders) {
    context.fillStyle = page;
    context.globalAlpha = 0.6;
    context.fillRect(folder.x, folder.y, folder.width, folder.height);
    context.globalAlpha = 1;
    context.fillStyle = muted;
    context.font = "600 11px system-ui, sans-serif";
    const words = `${folder.name} ${formatBytes(folder.size)}`;
    write(context, words, folder.x + 4, folder.y + 12, folder.width - 8);
    context.font = "11px system-ui, sans-serif";
    context.strokeStyle = themeColor("strong-line");
    context.strokeRect(folder.x + 0.5, folder.y + 0.5, folder.width - 1, folder.whole - 1);
  }
  context.strokeStyle = themeColor("accent");
  context.lineWidth = 2;
  for (const tile of tiles) {
    if (tile.storage.number !== state.kept && tile.storage.number !== state.pointed) continue;
    context.strokeRect(tile.x + 1, tile.y + 1, Math.max(tile.width - 2, 1), Math.max(tile.height - 2, 1));
  }
  context.lineWidth = 1;
}

const COLORS = { cheap: "good", dear: "grad", input: "value", cast: "update", other: "muted" };

/** Which tensor of which operation, in plain words, and its size; in as many lines as there is room for. */
function label(context, tile, ink) {
  context.fillStyle = ink;
  const row = firstRow(tile.storage);
  const name = textOf(row, "plain");
  const names = tile.height > 59 ? name.split(": ") : [name];
  const lines = [...names, formatBytes(tile.storage.bytes), ...(tile.height > 46 ? [textOf(row, "info")] : [])];
  lines.forEach((line, i) => write(context, line, tile.x + 5, tile.y + 15 + 13 * i, tile.width - 10));
}

/** Text that ends in an ellipsis where there is no room for all of it. */
function write(context, text, x, y, room) {
  if (context.measureText(text).width > room) {
    let [few, many] = [0, text.length];
    while (few < many) {
      const middle = (few + many + 1) >> 1;
      if (context.measureText(`${text.slice(0, middle)}…`).width <= room) few = middle;
      else many = middle - 1;
    }
    if (few < 2) return;
    text = `${text.slice(0, few)}…`;
  }
  context.fillText(text, x, y);
}

function mark() {
  const element = find("treemap");
  paint(sizeCanvas(element.firstElementChild, element.clientWidth, element.clientHeight));
}

const inside = (box, { x, y }) => box.x <= x && x < box.x + box.width && box.y <= y && y < box.y + box.height;

function spotOf(event) {
  const area = find("treemap").getBoundingClientRect();
  return { x: event.clientX - area.left, y: event.clientY - area.top };
}

const folderAt = (event) => folders.findLast((folder) => inside(folder, spotOf(event))) ?? null;

const tileAt = (event) => tiles.find((tile) => inside(tile, spotOf(event))) ?? null;

function drawLegend(shown) {
  const total = shown.reduce((sum, storage) => sum + storage.bytes, 0);
  const sums = Object.fromEntries(GROUPS.map((group) => [group, 0]));
  for (const storage of shown) sums[groupOf(storage)] += storage.bytes;
  const entries = GROUPS.filter((group) => sums[group] > 0).map((group) =>
    make("li", {}, make("i", { class: group }), `${GROUP_WORDS[group]}: ${formatBytes(sums[group])}, ${formatShare(sums[group], total)}`),
  );
  fill(find("kept-legend"), ...entries);
}

function drawPath() {
  const parts = state.path.split(".").filter(Boolean);
  const steps = [make("button", { type: "button", onclick: () => change({ path: "" }) }, "all modules")];
  parts.forEach((part, depth) => {
    const path = parts.slice(0, depth + 1).join(".");
    steps.push(make("span", { "aria-hidden": true }, "›"), make("button", { type: "button", onclick: () => change({ path }) }, part));
  });
  fill(find("kept-path"), ...(parts.length ? steps : []));
}

function describe(root, shown) {
  if (!shown.length) return "Nothing is held here.";
  const largest = shown[0];
  return `Treemap by module of ${plural(shown.length, "storage")}, ${formatBytes(root.size)}. The largest is ${titleOf(largest)}, ${formatBytes(largest.bytes)}. ${formatCount(data.storages.length)} in all.`;
}
