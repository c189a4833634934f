/** The list of runs, which is looked at again while it is open. */

import { fetchFrom } from "./server.js";
import { formatCount, plural } from "./counts.js";
import { fill, find, make } from "./dom.js";
import { openPage } from "./opening.js";
import { facts } from "./payload.js";
import { followTheme } from "./theme.js";

const PAUSE = 5000;

const lossOf = (run) => (run.loss === null ? null : Number(run.loss === "inf" ? Infinity : run.loss));
const worstOf = ({ findings }) => (findings ? findings.critical * 1e6 + findings.warning * 1e3 + findings.note : -1);

const chosen = new Set(); // names of the runs to be compared, in the order in which they were chosen

const COLUMNS = [
  { title: "", of: (run) => !chosen.has(run.name), show: showChoice },
  { title: "run", of: (run) => run.name, show: ({ name }) => make("a", { href: `run/${encodeURIComponent(name)}` }, name) },
  { title: "started", of: (run) => -(run.started || run.written), show: (run) => showTime(run.started) },
  { title: "last step", of: (run) => -(run.last_step ?? -1), show: (run) => (run.last_step === null ? "–" : formatCount(run.last_step)), number: true },
  { title: "status", of: (run) => run.status, show: (run) => make("span", { class: run.status }, run.status) },
  { title: "last loss", of: (run) => lossOf(run) ?? Infinity, show: (run) => showLoss(lossOf(run)), number: true },
  { title: "findings", of: (run) => -worstOf(run), show: showFindings },
];

let order = COLUMNS[2];

const showTime = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "–");
const showLoss = (loss) => (loss === null ? "–" : Number.isNaN(loss) ? "NaN" : String(Number(loss.toPrecision(4))));

function showChoice({ name }) {
  const choose = ({ target }) => {
    if (target.checked) chosen.add(name);
    else chosen.delete(name);
    tellChoice();
  };
  const box = make("input", { type: "checkbox", "aria-label": `compare ${name}`, onchange: choose });
  box.checked = chosen.has(name);
  return box;
}

/** Two runs are enough; the first that was chosen is what the others are held against. */
function tellChoice() {
  find("compare").disabled = chosen.size < 2 || chosen.size > 8;
  find("compare").textContent = chosen.size < 2 ? "Choose runs to compare" : `Compare ${chosen.size} runs`;
}

const compare = () => location.assign(`compare?${new URLSearchParams([...chosen].map((name) => ["run", name]))}`);

function showFindings({ findings }) {
  if (findings === null) return "–";
  const told = Object.entries(findings).filter(([, n]) => n);
  if (!told.length) return "none";
  return make("span", { class: findings.critical ? "critical" : "" }, told.map(([word, n]) => (word === "critical" ? `${n} critical` : plural(n, word))).join(", "));
}

function draw() {
  const runs = facts.runs.toSorted((a, b) => (order.of(a) < order.of(b) ? -1 : order.of(a) > order.of(b) ? 1 : 0));
  find("none").hidden = runs.length > 0;
  find("compare").hidden = runs.length < 2;
  fill(find("titles"), ...COLUMNS.map(makeTitle));
  fill(find("runs"), ...runs.map((run) => make("tr", {}, ...COLUMNS.map((column) => make("td", { class: column.number ? "number" : "" }, column.show(run))))));
}

function makeTitle(column) {
  const choose = () => {
    order = column;
    draw();
  };
  const sorted = column === order ? "ascending" : null;
  const title = column.title ? make("button", { type: "button", onclick: choose }, column.title) : make("span", { class: "unseen" }, "compare");
  return make("th", { scope: "col", class: column.number ? "number" : "", "aria-sort": sorted }, title);
}

async function lookAgain() {
  if (!document.hidden) {
    const answer = await fetchFrom(".", "runs").catch(() => null); // it may be over, or be started again
    if (answer) {
      facts.runs = await answer.json();
      draw();
    }
  }
  setTimeout(lookAgain, PAUSE);
}

openPage(
  async () => {
    followTheme();
    find("compare").addEventListener("click", compare);
    tellChoice();
    draw();
  },
  async () => void setTimeout(lookAgain, PAUSE),
);
