/** The key "/" puts the cursor into a search field. */

import { find } from "./dom.js";

export function focusOnSlash(id) {
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    find(id).focus();
  });
}
