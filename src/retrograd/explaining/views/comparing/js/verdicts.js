/** Where each run parts from the first and why, and the findings that only some of the runs have. */

import { show } from "./actions.js";
import { fill, find, make } from "./dom.js";
import { fold, makeFinding } from "./findings.js";
import { facts } from "./payload.js";

const CLASSES = { identical: "good", "same within noise": "good", different: "warning", "cannot be compared": "warning" };

export function writeVerdicts() {
  fill(find("verdicts"), ...facts.verdicts.map(makeVerdict));
  const { some, all } = facts.findings;
  const which = facts.runs.length > 2 ? "some runs have" : "one run has";
  find("findings-title").textContent = some.length ? `Findings that only ${which}` : "No findings that only some runs have";
  fill(find("findings-list"), ...some.slice(0, 6).map(makeOwn));
  const rest = some.slice(6);
  fill(
    find("findings-rest"),
    rest.length ? fold("More of them", rest.length, make("ol", { class: "findings-list" }, ...rest.map(makeOwn))) : null,
    all.length ? fold("Findings of all runs", all.length, make("ol", { class: "findings-list" }, ...all.map(makeFinding))) : null,
  );
}

const makeOwn = (finding) => makeFinding({ ...finding, place: [`only ${finding.runs.join(", ")}`, finding.place].filter(Boolean).join(" · ") });

const CAUSES = 2; // of a difference that are seen at once

const listOf = (findings) => make("ol", { class: "findings-list" }, ...findings.map((each) => makeFinding({ ...each, visit: null })));

function makeVerdict({ verdict, called, said, visit: place, findings = [], context = [], about = "" }, number) {
  const { letter, name } = facts.runs[number + 1];
  const causes = findings.filter(({ severity }) => severity !== "note");
  const rest = [...causes.slice(CAUSES), ...findings.filter(({ severity }) => severity === "note")];
  return make(
    "li",
    { class: `finding ${CLASSES[verdict]}` },
    make("span", { class: "severity" }, `A, ${letter}`),
    make(
      "div",
      { class: "said" },
      make("p", {}, make("b", {}, name), ": ", said),
      called && called !== letter ? make("p", { class: "note" }, `${called} stands for ${name} here.`) : null,
      listOf(causes.slice(0, CAUSES)),
      rest.length ? fold("More differences", rest.length, listOf(rest)) : null,
      context.length ? fold("Also different", context.length, make("ul", {}, ...context.map((text) => make("li", {}, text)))) : null,
      about ? make("p", { class: "note" }, `Compared: ${about}.`) : null,
    ),
    place ? make("button", { type: "button", onclick: () => show(place) }, "Show it") : null,
  );
}
