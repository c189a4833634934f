/** Details of the memory that is pointed at, or pinned by a click. */

import { formatCount, plural } from "./counts.js";
import { fill, find, make, makeTerms } from "./dom.js";
import { formatBytes, formatSeconds } from "./sizes.js";
import { data, GROUP_WORDS, groupOf, numberOf, onChange, state, textOf, titleOf } from "./store.js";

const MOST_SAVERS = 12;

export function showDetails() {
  onChange(draw);
  draw();
}

function draw() {
  const storage = data.storages[state.kept ?? state.pointed];
  if (storage === undefined) {
    fill(
      find("details"),
      make("p", { class: "note" }, "Hover over a tile to see its details."),
      make("p", { class: "note" }, "A tile is a storage that nodes of the graph save for the backward pass, in the module that saved it first; its area is its bytes, and its name says which operation needs it again. Parameters and buffers are not shown: they are in memory anyway."),
    );
    return;
  }
  const [row] = storage.savers;
  const known = [];
  const add = (term, ...values) => {
    const present = values.filter((value) => value);
    if (present.length) known.push([term, present]);
  };
  add("what it is", textOf(row, "plain"));
  add("memory", formatBytes(storage.bytes), ` ${formatCount(storage.bytes)} bytes`);
  add("tensor", textOf(row, "info"), numberOf(row, "asked") === storage.bytes ? "" : `copies take ${formatBytes(numberOf(row, "asked"))}`);
  add("kind", [textOf(row, "kind"), textOf(row, "name")].filter(Boolean).join(" "), textOf(row, "held") === "saved" ? "" : `held by ${HOLDERS[textOf(row, "held")]}`);
  add("held", ...describeLife(storage));
  add("made by", textOf(row, "maker"), numberOf(row, "seconds") === null ? "" : `in ${formatSeconds(numberOf(row, "seconds"))}`);
  add("recomputed by", textOf(row, "remake") || GROUP_WORDS[groupOf(storage)]);
  add("line", textOf(row, "source"));
  add(
    storage.savers.length > 1 ? `saved by ${plural(storage.savers.length, "node")}` : "saved by",
    ...storage.savers.slice(0, MOST_SAVERS).map((saver) => `${textOf(saver, "place")} ${textOf(saver, "slot")}`),
    storage.savers.length > MOST_SAVERS ? `and ${formatCount(storage.savers.length - MOST_SAVERS)} more` : "",
  );
  fill(
    find("details"),
    state.kept === storage.number ? make("span", { class: "kept" }, "pinned") : null,
    make("h3", {}, titleOf(storage)),
    make("dl", {}, ...makeTerms(known)),
  );
}

const HOLDERS = {
  attribute: "an attribute of the node, until the graph is dropped",
  hooks: "saved-tensor hooks, in what they packed it into",
  checkpoint: "a checkpoint that has run its function again",
  argument: "a checkpoint, as an argument of its function",
};

function describeLife({ spans }) {
  const lines = [];
  for (let i = 0; i < spans.length; i += 2) {
    const last = spans[i + 1] - 1;
    const until = spans[i + 1] >= data.held.length ? "until the graph is dropped" : `to ${formatCount(last)}`;
    const [from, to] = [data.seconds[spans[i]], data.seconds[last]];
    const time = from !== null && to !== null && from !== undefined && to !== undefined ? `, ${formatSeconds(to - from)}` : "";
    lines.push(`position ${formatCount(spans[i])} ${until}${time}`);
  }
  return lines;
}
