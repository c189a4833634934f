/** Printing: all rows of the map, and all tables below it. */

import { find } from "./dom.js";
import { geometry } from "./geometry.js";

let opened = [];

/** `redraw` draws the map again in its new size. */
export function followPrinting(redraw) {
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll(".trouble:not([open])")];
    for (const each of opened) each.open = true;
    find("viewport").scrollTop = 0;
    geometry.isPrinted = true;
    redraw();
  });
  addEventListener("afterprint", () => {
    for (const each of opened) each.open = false;
    geometry.isPrinted = false;
    redraw();
  });
}
