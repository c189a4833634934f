/** The list of runs, which is looked at again while it is open. */

import { makeColors } from "./colors.js";
import { curves, findColumn, listColumns, sortRuns } from "./columns.js";
import { formatCount, plural } from "./counts.js";
import { fill, find, focusOnSlash, make } from "./dom.js";
import { openPage } from "./opening.js";
import { drawOverlay } from "./overlay.js";
import { drawParallel, listAxes } from "./parallel.js";
import { facts } from "./payload.js";
import { chooseRuns } from "./query.js";
import { fetchFrom } from "./server.js";
import { DEFAULTS, change, keep, picked, readAddress, state, writeAddress } from "./state.js";
import { makeRow, makeTitles } from "./table.js";
import { followTheme } from "./theme.js";

const PAUSE = 5000;
const MOST_DRAWN = 50;
const MOST_COMPARED = 8;

let readings = 0; // losses up to here are known
let waiting = null; // runs whose losses are still to be read
let heat = [];
let rows = new Map();

function draw() {
  const columns = listColumns();
  const sorted = findColumn(state.sort, columns) ?? columns[1];
  const { runs: chosen, wrong } = chooseRuns(state, columns);
  const runs = sortRuns(chosen, sorted, state.turned === "1");
  find("count").textContent = runs.length === facts.runs.length ? plural(runs.length, "run") : `${formatCount(runs.length)} of ${plural(facts.runs.length, "run")}`;
  find("wrong").hidden = !wrong.length;
  find("wrong").textContent = wrong.join(" ");
  find("search").setAttribute("aria-invalid", String(wrong.length > 0));
  find("none").hidden = runs.length > 0;
  find("none").textContent = facts.runs.length ? "No run is like that." : "There is no run in this folder yet.";
  find("clear").hidden = !["q", "status", "finding", "script"].some((name) => state[name]);
  const shown = columns.filter((column) => !column.isHidden && (!column.isSetting || column.differs));
  fillChoices(columns, shown, sorted);
  const colorOf = drawPictures(runs, columns);
  fill(find("titles"), ...makeTitles(shown, sorted, state.turned === "1", order));
  const made = runs.map((run) => [run.name, makeRow(run, shown, colorOf.get(run.name), { pick, point })]);
  rows = new Map(made);
  fill(find("runs"), ...rows.values());
  drawBar();
}

/** The loss of the runs that are ticked, or of the first ones of the list; returns the colour of each that is drawn. */
function drawPictures(runs, columns) {
  const known = facts.runs.filter((run) => picked.has(run.name));
  const drawn = (known.length ? known : runs).slice(0, MOST_DRAWN);
  find("pictures").hidden = !drawn.length;
  if (!drawn.length) return new Map();
  const column = findColumn(state.color || (drawn.length <= MOST_COMPARED ? "name" : "final"), columns);
  const colors = makeColors(drawn, column ?? columns[0]);
  find("drawn").textContent = [known.length ? `of the ${plural(drawn.length, "run")} that you ticked` : drawn.length < runs.length ? `of the first ${drawn.length} listed; tick runs to draw others` : `of ${plural(drawn.length, "run")}`, waiting ? `; ${waiting} still to be read` : ""].join("");
  const lines = drawn.map((run) => ({ name: run.name, curve: curves.get(run.name), color: colors.of(run) }));
  const hasLog = lines.every(({ curve }) => !curve || curve.values.every((value) => value === null || value > 0));
  find("log").disabled = !hasLog;
  find("log").title = hasLog ? "Logarithmic axis" : "A loss is zero or negative, so the axis is linear";
  find("log").setAttribute("aria-pressed", String(hasLog && state.log === "1"));
  const { axes, left } = listAxes(drawn, columns);
  find("parallel-card").hidden = !axes.length;
  find("parallel-left").textContent = left.length ? `Those ${axes.length - 1} settings whose order agrees most with that of the final loss; ${left.map(({ title }) => title).join(", ")} differ too.` : "";
  heat = [drawOverlay(find("overlay"), lines, { isLog: hasLog && state.log === "1", share: Number(state.smooth), about: `loss of ${plural(drawn.length, "run")}`, point, choose: (name) => pick(name, !picked.has(name)) })];
  if (axes.length) heat.push(drawParallel(find("parallel"), drawn, axes, colors.of, { point }));
  fill(find("colors"), ...colors.legend);
  return new Map(drawn.map((run) => [run.name, colors.of(run)]));
}

/** Show which lines and which row are of one run. */
function point(name) {
  for (const each of heat) each(name);
  for (const [each, row] of rows) row.classList.toggle("hot", each === name);
}

function pick(name, isPicked) {
  if (isPicked) picked.add(name);
  else picked.delete(name);
  keep();
  draw();
}

/** Two runs are enough; the first that was ticked is what the others are compared with. */
function drawBar() {
  const n = picked.size;
  find("bar").hidden = facts.runs.length < 2;
  find("drop").hidden = !n;
  find("picked").textContent = n ? [...picked].join(", ") : "Tick runs to compare them.";
  find("compare").disabled = n < 2 || n > MOST_COMPARED;
  find("compare").textContent = n > MOST_COMPARED ? `At most ${MOST_COMPARED} can be compared` : n < 2 ? "Compare" : `Compare ${n} runs`;
}

function compare() {
  const list = writeAddress();
  location.assign(`compare?${new URLSearchParams([...[...picked].map((name) => ["run", name]), ...(list ? [["list", list]] : [])])}`);
}

function order(column) {
  const isSame = findColumn(state.sort, listColumns()) === column;
  change(isSame ? { turned: state.turned === "1" ? "" : "1" } : { sort: column.name === "when" ? DEFAULTS.sort : column.name, turned: "" });
  draw();
}

function fillChoices(columns, shown, sorted) {
  const wordsOf = { status: ({ status }) => [status], finding: (run) => (run.findings ? (run.found.length ? run.found : ["none"]) : []), script: (run) => [run.settings.script].filter(Boolean).map(String) };
  for (const [name, of] of Object.entries(wordsOf)) {
    const counts = new Map();
    for (const word of facts.runs.flatMap(of)) counts.set(word, (counts.get(word) ?? 0) + 1);
    if (state[name] && !counts.has(state[name])) counts.set(state[name], 0);
    const words = [...counts].toSorted(([a], [b]) => (a < b ? -1 : 1));
    offer(name, [["", "all"], ...words.map(([word, n]) => [word, `${word} (${n})`])], state[name]);
  }
  offer("sort", shown.map(({ name, title }) => [name, title]), sorted.name);
  const colorful = shown.filter(({ name, differs }) => differs || ["name", "status", "when", "final", "loss"].includes(name));
  offer("color", [["", "best fit"], ...colorful.map(({ name, title }) => [name, title])], state.color);
}

/** The options of a choice; left alone where they are as before, for it may be open. */
function offer(id, options, value) {
  const element = find(id);
  const told = JSON.stringify(options);
  if (element.dataset.told !== told) {
    element.dataset.told = told;
    fill(element, ...options.map(([name, text]) => make("option", { value: name }, text)));
  }
  element.value = value;
}

function follow() {
  const bind = (id, event, changes) =>
    find(id).addEventListener(event, ({ currentTarget }) => {
      change(changes(currentTarget));
      draw();
    });
  for (const id of ["status", "finding", "script", "color"]) bind(id, "change", ({ value }) => ({ [id]: value }));
  bind("sort", "change", ({ value }) => ({ sort: value === "when" ? DEFAULTS.sort : value, turned: "" }));
  bind("turn", "click", () => ({ turned: state.turned === "1" ? "" : "1" }));
  bind("search", "input", ({ value }) => ({ q: value }));
  bind("smooth", "input", ({ value }) => ({ smooth: value }));
  bind("log", "click", () => ({ log: state.log === "1" ? "0" : "1" }));
  find("clear").addEventListener("click", () => {
    change({ q: "", status: "", finding: "", script: "" });
    show();
  });
  find("drop").addEventListener("click", () => {
    picked.clear();
    keep();
    draw();
  });
  find("compare").addEventListener("click", compare);
  addEventListener("hashchange", () => {
    readAddress();
    show();
  });
  addEventListener("resize", draw);
  new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  focusOnSlash("search");
}

function show() {
  find("search").value = state.q;
  find("smooth").value = state.smooth;
  draw();
}

/** Losses that were read since; more at once where the server has not read all. */
async function readLosses() {
  const answer = await fetchFrom(".", "losses", { since: readings });
  const told = await answer.json();
  const isNew = Object.keys(told.losses).length > 0 || waiting !== told.waiting;
  for (const [name, curve] of Object.entries(told.losses)) curves.set(name, curve);
  readings = told.until;
  waiting = told.waiting;
  if (isNew) draw();
  if (waiting) await readLosses();
}

async function lookAgain() {
  if (!document.hidden) {
    try {
      const told = await (await fetchFrom(".", "runs")).json();
      const isNew = JSON.stringify([told.runs, told.columns]) !== JSON.stringify([facts.runs, facts.columns]);
      Object.assign(facts, told);
      if (isNew) draw();
      await readLosses();
    } catch {
      // the server may be over, or be started again
    }
  }
  setTimeout(lookAgain, PAUSE);
}

openPage(
  async () => {
    readAddress();
    followTheme();
    show();
    follow();
  },
  async () => {
    await readLosses().catch(() => null);
    setTimeout(lookAgain, PAUSE);
  },
);
