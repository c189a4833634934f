/** What is known of a run, column by column. */

import { facts } from "./payload.js";

export const curves = new Map(); // by the name of the run; null where it is too long for a list

const isTold = (value) => value !== null && value !== undefined;
const numberOf = (told) => (isTold(told) ? readNumber(told) : null);
const SPECIAL = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const settingOf = (told) => (isTold(told) ? (SPECIAL[told] ?? told) : null);
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

/** The number that a value is or says; NaN where it is none. */
export function readNumber(told) {
  if (!isTold(told)) return NaN;
  if (typeof told !== "string") return Number(told);
  return NUMBER.test(told) ? Number(told) : (SPECIAL[told.toLowerCase()] ?? NaN);
}

const RANKS = [1e6, 1e3, 1];

const OWN = [
  { name: "name", title: "run", of: (run) => run.name },
  { name: "when", title: "started", of: (run) => run.started || run.written || null, falls: true },
  { name: "steps", title: "last step", of: (run) => run.last_step, falls: true, isNumber: true },
  { name: "status", title: "status", of: (run) => run.status },
  { name: "loss", title: "last loss", of: (run) => numberOf(run.loss), isNumber: true },
  { name: "final", title: "final loss", of: (run) => numberOf(curves.get(run.name)?.final), isNumber: true },
  { name: "findings", title: "findings", of: ({ findings }) => findings && findings.critical + findings.warning + findings.note, rank: ({ findings }) => findings && findings.critical * RANKS[0] + findings.warning * RANKS[1] + findings.note, falls: true },
  { name: "finding", title: "finding", of: (run) => (run.findings ? run.found.join(" ") : null), isHidden: true },
];

/** All columns: those of every list, what was logged, and the settings; `differs` where runs differ in it. */
export function listColumns() {
  const logged = [...new Set([...curves.values()].flatMap((curve) => Object.keys(curve?.logged ?? {})))];
  const settings = [...new Set(facts.runs.flatMap((run) => Object.keys(run.settings)))];
  const taken = new Set([...OWN.map(({ name }) => name), ...settings]);
  return [
    ...OWN,
    ...logged.filter((name) => !taken.has(name)).map((name) => ({ name, title: name, of: (run) => numberOf(curves.get(run.name)?.logged[name]), isNumber: true, differs: true })),
    ...settings.map((name) => ({ name, title: name, of: (run) => settingOf(run.settings[name]) ?? numberOf(curves.get(run.name)?.logged[name]), isNumber: facts.runs.every((run) => typeof (run.settings[name] ?? 0) === "number"), isSetting: true, differs: facts.columns.includes(name) })),
  ];
}

const bare = (word) => word.replace(/^-+/, "").toLowerCase();

/** The column that a word means: its name, its title, or `lr` for `--lr`. */
export const findColumn = (word, columns) =>
  columns.find(({ name, title }) => name === word || title === word) ?? columns.find(({ name }) => bare(name) === bare(word));

const wordsOf = (text) => text.toLowerCase().split(/([0-9]+)/).filter(Boolean).map((word) => (/^[0-9]+$/.test(word) ? Number(word) : word));

/** Names in the order of their numbers: run2 before run10; a number before letters. */
function compareNames(one, other) {
  const [a, b] = [wordsOf(one), wordsOf(other)];
  const at = a.findIndex((word, i) => word !== b[i]);
  if (at < 0) return a.length - b.length;
  if (at >= b.length) return 1;
  if (typeof a[at] !== typeof b[at]) return typeof a[at] === "number" ? -1 : 1;
  return a[at] < b[at] ? -1 : 1;
}

/** Numbers before texts; NaN and what is not known come last, whichever way it is turned. */
export function sortRuns(runs, column, isTurned) {
  const of = column.rank ?? column.of;
  const groupOf = (value) => (value === null || value === undefined ? 3 : Number.isNaN(value) ? 2 : typeof value === "string" ? 1 : 0);
  const way = Boolean(column.falls) !== isTurned ? -1 : 1;
  const compare = (a, b) => {
    const [one, other] = [of(a), of(b)];
    const group = groupOf(one) - groupOf(other);
    if (group || groupOf(one) > 1) return group;
    return way * (typeof one === "string" ? compareNames(one, other) : one - other || 0);
  };
  return runs
    .toSorted((a, b) => (b.started || b.written) - (a.started || a.written) || compareNames(a.name, b.name))
    .toSorted(compare);
}
