/** Draws a page when it is opened, or says why that cannot be done. */

import { find } from "./dom.js";

/** `draw` and then `prepare`, what may be prepared afterwards. */
export function openPage(draw, prepare) {
  return draw()
    .then(() => (document.documentElement.dataset.ready = "yes"))
    .then(prepare)
    .catch(fail);
}

function fail(error) {
  find("failure").hidden = false;
  find("failure").textContent = `This page could not be drawn: ${error.message}. It needs a browser from 2023 or later.`;
  throw error;
}
