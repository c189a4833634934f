/** Words around the map: which run this is, what was recorded, what was not and why, and the model. */

import { visit } from "./actions.js";
import { formatCount } from "./counts.js";
import { breakable, fill, find, make, makeTerms } from "./dom.js";
import { facts } from "./payload.js";
import { change } from "./state.js";

const WRITERS = {
  title: () => (find("title").textContent = facts.title),
  status: () => fill(find("status"), facts.status ? make("span", { class: `status ${facts.status.kind}` }, facts.status.text) : null),
  header: () => fill(find("facts"), ...makeTerms(facts.header)),
  command: writeCommand,
  nonfinite: writeBanner,
  recorded: () => fill(find("recorded"), ...makeTerms(facts.recorded)),
  troubles: () => fill(find("troubles"), ...facts.troubles.map(makeTrouble)),
  model: writeModel,
};

/** Write the parts of the page that show these facts; at first all of them. */
export const writeAbout = (names = Object.keys(WRITERS)) => names.forEach((name) => WRITERS[name]?.());

function writeCommand() {
  find("command").textContent = facts.command;
  find("command").hidden = !facts.command;
}

function writeModel() {
  find("model-card").hidden = facts.model.length === 0;
  fill(find("model"), ...facts.model.map(makeModule));
}

function writeBanner() {
  const bad = facts.nonfinite;
  find("banner").hidden = !bad;
  if (!bad) return;
  fill(
    find("banner"),
    make(
      "span",
      {},
      make("b", {}, "First non-finite numbers: "),
      `step ${formatCount(bad.step)}, `,
      make("code", {}, bad.site),
      ` (${bad.text})`,
    ),
    make(
      "span",
      { class: "buttons" },
      make("button", { type: "button", id: "visit", onclick: () => visit(bad.site, bad.step) }, "Show it"),
      make("button", { type: "button", id: "in-order", onclick: () => change({ order: "broken", flipped: [], cursor: null }) }, "Rows by their first"),
    ),
  );
}

/** A list of what went wrong or was left out: {title, columns, rows, more}. */
function makeTrouble({ title, note, columns, rows, more }) {
  return make(
    "details",
    { class: "trouble", open: rows.length <= 8 },
    make("summary", {}, title, make("span", { class: "tally" }, formatCount(rows.length + more))),
    note ? make("p", { class: "note" }, note) : null,
    make(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": title },
      make(
        "table",
        {},
        make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell))))),
      ),
    ),
    more ? make("p", { class: "note" }, `… and ${formatCount(more)} more, not listed here.`) : null,
  );
}

/** A module: [depth, name, kind, parameters, arguments, shapes]. */
function makeModule([depth, name, kind, parameters, settings, shapes]) {
  const row = make(
    "tr",
    {},
    make("td", { class: "module" }, ...breakable(name)),
    make("td", { class: "kind" }, kind, settings ? make("span", { class: "settings" }, `(${settings})`) : null, shapes ? make("div", { class: "settings" }, shapes) : null),
    make("td", { class: "number" }, parameters ? formatCount(parameters) : "–"),
  );
  row.style.setProperty("--depth", depth);
  return row;
}
