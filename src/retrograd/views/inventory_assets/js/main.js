/** Puts the page together. */

import { showDetails } from "./details.js";
import { fill, find, make } from "./dom.js";
import { showModules } from "./modules.js";
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
  find("main").hidden = !facts.passes;
  showTimeline();
  showTreemap();
  showDetails();
  showModules();
  showTensors();
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") change({ kept: null, path: "" });
  });
}

function fail(error) {
  find("failure").hidden = false;
  find("failure").textContent =
    `This page could not be drawn: ${error.message}. It needs a browser from 2023 or later.`;
  throw error;
}

start()
  .then(() => (document.documentElement.dataset.ready = "yes"))
  .catch(fail);
