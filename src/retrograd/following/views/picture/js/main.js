/** Puts the page together. */

import { loadDetails, point, markKept } from "./details.js";
import { find } from "./dom.js";
import { savePng, saveSvg } from "./export.js";
import { draw, fold, onDrawn, unfold } from "./folding.js";
import { act, followKeys, setCurrent } from "./keyboard.js";
import { openPage } from "./opening.js";
import { facts } from "./payload.js";
import { loadScene } from "./scene.js";
import { followSearch, markFound } from "./search.js";
import { followTheme } from "./theme.js";
import { fit, followPointer, followSize, showActualSize, zoomBy } from "./view.js";

function notice(text) {
  find("notice").hidden = !text;
  find("notice").textContent = text;
}

function listen() {
  const graph = find("graph");
  const boxAt = (event) => event.target.closest("[data-name]");
  graph.addEventListener("click", (event) => {
    const element = boxAt(event);
    if (element === null || graph.classList.contains("moving")) return;
    setCurrent(element.dataset.name, false);
    act(element);
  });
  graph.addEventListener("pointerover", (event) => point(boxAt(event)?.dataset.name ?? null));
  graph.addEventListener("pointerleave", () => point(null));
  graph.addEventListener("found", (event) => {
    setCurrent(event.target.dataset.name, false);
    point(event.target.dataset.name);
  });
  find("fold").addEventListener("click", fold);
  find("unfold").addEventListener("click", () => {
    notice(unfold() ? facts.notice : "Opening all of these would draw too many boxes; open single modules instead.");
  });
  find("save-svg").addEventListener("click", saveSvg);
  find("save-png").addEventListener("click", async () => notice((await savePng()) || facts.notice));
  find("out").addEventListener("click", () => zoomBy(0.8));
  find("in").addEventListener("click", () => zoomBy(1.25));
  find("whole").addEventListener("click", () => fit());
  find("actual").addEventListener("click", showActualSize);
}

async function start() {
  followTheme();
  await loadScene();
  loadDetails();
  notice(facts.notice);
  onDrawn(markKept);
  onDrawn(markFound);
  followKeys();
  draw();
  fit(true);
  followPointer();
  followSize();
  followSearch();
  listen();
}

openPage(start);
