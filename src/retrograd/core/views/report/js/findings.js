/** What is wrong with the run, the worst first: each with what it rests on, and a way to its curves. */

import { show } from "./actions.js";
import { formatCount } from "./counts.js";
import { fill, find, make, makeTerms } from "./dom.js";
import { facts } from "./payload.js";

export function writeFindings() {
  const { about, shown, listed, not_checked: left, pending } = facts.findings;
  const isWell = listed.length === 0 && !pending && about.startsWith("no findings");
  find("findings-title").textContent = isWell ? "No findings" : "Findings";
  find("findings-about").textContent = isWell ? about.replace(/^no findings\W*/, "") : about;
  fill(find("findings-list"), ...listed.slice(0, shown).map(makeFinding));
  const rest = listed.slice(shown);
  fill(
    find("findings-rest"),
    rest.length ? fold("More findings", rest.length, make("ol", { class: "findings-list" }, ...rest.map(makeFinding))) : null,
    left.length ? fold("Not checked", left.length, make("dl", { class: "grounds" }, ...makeTerms(left))) : null,
  );
}

export function makeFinding({ severity, message, place, detector, repair, grounds, visit: evidence }) {
  return make(
    "li",
    { class: `finding ${severity}` },
    make("span", { class: "severity" }, severity),
    make(
      "div",
      { class: "said" },
      make("p", {}, message),
      make("p", { class: "note" }, [place, detector].filter(Boolean).join(" · ")),
      repair ? make("p", { class: "repair" }, "To do: ", repair) : null,
      grounds.length ? fold("Evidence", null, make("dl", { class: "grounds" }, ...makeTerms(grounds))) : null,
    ),
    evidence ? make("button", { type: "button", onclick: () => show(evidence) }, evidence.site === null ? "Show the loss" : "Show it") : null,
  );
}

export function fold(title, count, content) {
  const tally = count === null ? null : make("span", { class: "tally" }, formatCount(count));
  return make("details", {}, make("summary", {}, title, tally), content);
}
