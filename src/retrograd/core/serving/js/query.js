/**
 * Which runs are listed: words that they contain, conditions such as `lr>=0.01`, and the choices beside. `retrograd ls`
 * answers the same (`core/runs/listed.py`): a test asks both.
 */

import { findColumn, readNumber } from "./columns.js";
import { facts } from "./payload.js";

const CONDITION = /^(.+?)(!=|<=|>=|=|<|>)(.*)$/s;
const COMPARISONS = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b };

/** Words of a text, of which one in quotes may have spaces. */
const splitWords = (text) => [...text.matchAll(/"([^"]*)"|((?:[^\s"]|"[^"]*")+)/g)].map(([, quoted, word]) => quoted ?? word.replaceAll('"', ""));

function isEqual(found, wanted, isList) {
  if (found === null || found === undefined) return wanted === "" || wanted === "none";
  if (typeof found === "number") return found === readNumber(wanted) || (wanted === "nan" && Number.isNaN(found));
  const text = String(found).toLowerCase();
  return isList ? text.split(" ").filter(Boolean).includes(wanted) || (text === "" && wanted === "none") : text === wanted;
}

function holds(run, { column, comparison, value }) {
  const [found, wanted] = [column.of(run), value.toLowerCase()];
  if (comparison === "=" || comparison === "!=") return isEqual(found, wanted, column.name === "finding") === (comparison === "=");
  return COMPARISONS[comparison](readNumber(found), readNumber(wanted)); // nothing is true of NaN
}

const textOf = (run) => [run.name, run.status, ...run.found, ...Object.entries(run.settings).map(([name, value]) => `${name}=${value}`)].join("\n").toLowerCase();

/** The runs that are meant, and what of the text could not be understood. */
export function chooseRuns(state, columns) {
  const conditions = [];
  const words = [];
  const wrong = [];
  for (const word of splitWords(state.q)) {
    const [, name, comparison, value] = word.match(CONDITION) ?? [];
    const column = name && findColumn(name, columns);
    if (!name) words.push(word.toLowerCase());
    else if (column) conditions.push({ column, comparison, value });
    else wrong.push(`No run has a column “${name}”; there ${nameNear(name, columns)}.`);
  }
  for (const name of ["status", "finding", "script"]) {
    const column = state[name] && findColumn(name, columns);
    if (column) conditions.push({ column, comparison: "=", value: state[name] });
  }
  const runs = facts.runs.filter((run) => conditions.every((each) => holds(run, each)) && (!words.length || words.every((word) => textOf(run).includes(word))));
  return { runs, wrong };
}

function nameNear(word, columns) {
  const near = columns.filter(({ name }) => name.includes(word.slice(0, 2)) || word.includes(name));
  return `are ${(near.length ? near : columns).slice(0, 8).map(({ name }) => name).join(", ")}`;
}
