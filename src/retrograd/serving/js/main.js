/** The list of runs, which is looked at again while it is open. */

import { askServer } from "./asking.js";
import { formatCount, plural } from "./counts.js";
import { fill, find, make } from "./dom.js";
import { openPage } from "./opening.js";
import { facts } from "./payload.js";
import { followTheme } from "./theme.js";

const PAUSE = 5000;

const lossOf = (run) => (run.loss === null ? null : Number(run.loss === "inf" ? Infinity : run.loss));
const worstOf = ({ findings }) => (findings ? findings.critical * 1e6 + findings.warning * 1e3 + findings.note : -1);

const COLUMNS = [
  { title: "run", of: (run) => run.name, show: ({ name }) => make("a", { href: `run/${encodeURIComponent(name)}` }, name) },
  { title: "started", of: (run) => -(run.started || run.written), show: (run) => showTime(run.started) },
  { title: "last step", of: (run) => -(run.last_step ?? -1), show: (run) => (run.last_step === null ? "–" : formatCount(run.last_step)), number: true },
  { title: "status", of: (run) => run.status, show: (run) => make("span", { class: run.status }, run.status) },
  { title: "last loss", of: (run) => lossOf(run) ?? Infinity, show: (run) => showLoss(lossOf(run)), number: true },
  { title: "findings", of: (run) => -worstOf(run), show: showFindings },
];

let order = COLUMNS[1];

const showTime = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "–");
const showLoss = (loss) => (loss === null ? "–" : Number.isNaN(loss) ? "NaN" : String(Number(loss.toPrecision(4))));

function showFindings({ findings }) {
  if (findings === null) return "–";
  const told = Object.entries(findings).filter(([, n]) => n);
  if (!told.length) return "none";
  return make("span", { class: findings.critical ? "critical" : "" }, told.map(([word, n]) => (word === "critical" ? `${n} critical` : plural(n, word))).join(", "));
}

function draw() {
  const runs = facts.runs.toSorted((a, b) => (order.of(a) < order.of(b) ? -1 : order.of(a) > order.of(b) ? 1 : 0));
  find("none").hidden = runs.length > 0;
  fill(find("titles"), ...COLUMNS.map(makeTitle));
  fill(find("runs"), ...runs.map((run) => make("tr", {}, ...COLUMNS.map((column) => make("td", { class: column.number ? "number" : "" }, column.show(run))))));
}

function makeTitle(column) {
  const choose = () => {
    order = column;
    draw();
  };
  const sorted = column === order ? "ascending" : null;
  return make("th", { scope: "col", class: column.number ? "number" : "", "aria-sort": sorted }, make("button", { type: "button", onclick: choose }, column.title));
}

async function lookAgain() {
  if (!document.hidden) {
    const answer = await askServer(".", "runs").catch(() => null); // it may be over, or be started again
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
    draw();
  },
  async () => void setTimeout(lookAgain, PAUSE),
);
