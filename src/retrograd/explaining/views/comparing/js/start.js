/** What comes first: the losses over each other, and the settings in which the runs differ. */

import { fill, find, make, themeColor } from "./dom.js";
import { drawOverlay, printShort } from "./overlay.js";
import { facts } from "./payload.js";
import { colorOf, dashOf, drawnRuns, makeKey } from "./runs.js";
import { onChange } from "./state.js";

let isLog = true;

export function writeStart() {
  drawStart();
  onChange(["hidden"], drawStart);
  find("start-log").addEventListener("click", () => {
    isLog = !isLog;
    drawStart();
  });
  new ResizeObserver(drawStart).observe(find("start-overlay").parentElement);
  new MutationObserver(drawStart).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  const finals = facts.curves.map(({ final }) => (final === null ? "-" : printShort(Number(final === "inf" ? Infinity : final))));
  const rows = [{ name: "final loss", values: finals }, ...facts.settings];
  fill(find("settings-titles"), make("th", { scope: "col" }, "setting"), ...facts.runs.map(({ letter, name }, number) => make("th", { scope: "col", title: name }, makeKey(number, letter))));
  fill(find("settings"), ...rows.map(({ name, values }) => make("tr", {}, make("th", { scope: "row" }, name), ...values.map((value) => make("td", {}, value)))));
  find("settings-same").hidden = facts.settings.length > 0;
}

function drawStart() {
  const lines = drawnRuns().map((number) => ({ name: `${facts.runs[number].letter} ${facts.runs[number].name}`, curve: facts.curves[number], color: themeColor(colorOf(number)), dash: dashOf(number)?.join(" ") }));
  const hasLog = lines.every(({ curve }) => curve.values.every((value) => value === null || value > 0));
  find("start-log").disabled = !hasLog;
  find("start-log").setAttribute("aria-pressed", String(isLog && hasLog));
  drawOverlay(find("start-overlay"), lines, { isLog: isLog && hasLog, height: 210, about: "losses of the runs over each other" });
}
