/** Puts the page together. */

import { showDetails } from "./details.js";
import { fill, find, make } from "./dom.js";
import { showModules } from "./modules.js";
import { openPage } from "./opening.js";
import { facts } from "./payload.js";
import { change, loadData } from "./store.js";
import { showTensors } from "./tensors.js";
import { followTheme } from "./theme.js";
import { showTimeline } from "./timeline.js";
import { showTreemap } from "./treemap.js";

async function start() {
  followTheme();
  await loadData();
  find("notes").hidden = !facts.notes.length;
  fill(find("notes"), ...facts.notes.map((note) => make("li", {}, note)));
  for (const id of ["main", "hint"]) find(id).hidden = !facts.passes;
  showTimeline();
  showTreemap();
  showDetails();
  showModules();
  showTensors();
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") change({ kept: null, path: "" });
  });
}

openPage(start);
