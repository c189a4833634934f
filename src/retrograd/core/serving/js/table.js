/** The runs, each in a row. */

import { makeSwatch } from "./colors.js";
import { curves } from "./columns.js";
import { formatCount, plural } from "./counts.js";
import { make } from "./dom.js";
import { drawSparkline, printShort } from "./overlay.js";
import { picked, writeAddress } from "./state.js";

const two = (number) => String(number).padStart(2, "0");

/** As `retrograd ls` writes it, on the clock of this machine. */
export function showTime(seconds) {
  if (!seconds) return "–";
  const at = new Date(seconds * 1000);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

function showFindings({ findings }) {
  if (findings === null) return "–";
  const told = Object.entries(findings).filter(([, n]) => n);
  if (!told.length) return "none";
  return make("span", { class: findings.critical ? "critical" : "" }, told.map(([word, n]) => (word === "critical" ? `${n} critical` : plural(n, word))).join(", "));
}

const SHOWN = {
  when: (run) => showTime(run.started),
  steps: (run) => (run.last_step === null ? "–" : formatCount(run.last_step)),
  status: (run) => make("span", { class: run.status.split(" ")[0] }, run.status),
  findings: showFindings,
  commit: ({ settings: { commit } }) => (typeof commit === "string" ? commit.slice(0, 8) : "–"),
};

const FEW = 4; // settings of a run that a narrow page shows at once
const unfolded = new Set(); // names of runs of which it shows all

const show = (value) => (value === null || value === undefined ? "–" : typeof value === "number" ? printShort(value) : String(value));

function showCurve(run) {
  const curve = curves.get(run.name);
  if (curve === undefined) return "…";
  if (curve === null) return make("span", { class: "note", title: "Its loss has too many steps, or cannot be read, for a list." }, "–");
  return curve.values.length ? drawSparkline(curve) : "–";
}

/** The page of a run; it knows the way back to this list as it is. */
function linkTo(run) {
  const list = writeAddress();
  return `run/${encodeURIComponent(run.name)}${list ? `?${new URLSearchParams({ list })}` : ""}`;
}

export function makeTitles(columns, sorted, isTurned, choose) {
  const title = (column) => {
    const way = column === sorted ? (Boolean(column.falls) !== isTurned ? "descending" : "ascending") : null;
    const button = make("button", { type: "button", onclick: () => choose(column) }, column.title);
    return make("th", { scope: "col", class: column.isNumber ? "number" : "", "aria-sort": way }, button);
  };
  const [name, ...rest] = columns.map(title);
  return [make("th", { scope: "col" }, make("span", { class: "unseen" }, "compare")), name, make("th", { scope: "col" }, make("span", { class: "note" }, "loss")), ...rest];
}

export function makeRow(run, columns, color, { pick, point }) {
  const box = make("input", { type: "checkbox", "aria-label": `compare ${run.name}`, onchange: ({ target }) => pick(run.name, target.checked) });
  box.checked = picked.has(run.name);
  const cells = columns.slice(1).map((column) => {
    const shown = SHOWN[column.name]?.(run) ?? show(column.of(run));
    const title = column.name === "status" || column.name === "when" ? null : column.title;
    const text = column.isSetting ? String(run.settings[column.name] ?? "") : null;
    return make("td", { class: [column.isNumber ? "number" : "", column.isSetting ? "setting" : "", shown === "–" ? "empty" : ""].join(" "), "data-title": title, title: text }, shown);
  });
  const name = make("td", { class: "name" }, color ? makeSwatch(color) : null, make("a", { href: linkTo(run) }, run.name));
  const more = columns.filter((column) => column.isSetting).length - FEW;
  const unfold = make("button", { type: "button", class: "quiet unfold", onclick: () => unfolded.add(run.name) && unfold.closest("tr").classList.add("unfolded") }, `${more} more`);
  if (more > 0) cells.push(make("td", { class: "more" }, unfold));
  return make("tr", { class: unfolded.has(run.name) ? "unfolded" : "", onpointerenter: () => point(run.name), onpointerleave: () => point(null) }, make("td", {}, box), name, make("td", {}, showCurve(run)), ...cells);
}
