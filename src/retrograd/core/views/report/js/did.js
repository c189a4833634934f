/** What the run did, in a few lines: each with what it leaves out folded away. */

import { fill, find, make } from "./dom.js";
import { fold } from "./findings.js";
import { facts } from "./payload.js";

export function writeDid() {
  find("did").hidden = facts.card.length === 0;
  fill(find("did-lines"), ...facts.card.map(makeLine));
}

function makeLine({ topic, text, place, details }) {
  return make(
    "div",
    {},
    make("dt", {}, topic),
    make(
      "dd",
      {},
      text,
      place ? make("span", { class: "note" }, ` ${place}`) : null,
      details.length ? fold("More", null, make("ul", {}, ...details.map((each) => make("li", {}, each)))) : null,
    ),
  );
}
