/** The part of a page that shows an inventory. */

import { showDetails } from "./details.js";
import { change, loadData } from "./store.js";
import { showTimeline } from "./timeline.js";
import { showTreemap } from "./treemap.js";

export async function showKept() {
  await loadData();
  showTimeline();
  showTreemap();
  showDetails();
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") change({ kept: null, path: "" });
  });
}
