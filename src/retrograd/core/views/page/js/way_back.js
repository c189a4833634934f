/** From the page of a run, or of several, back to the list that led there, as it was. */

import { make } from "./dom.js";

export function showWayBack(home) {
  if (!home) return;
  const list = new URLSearchParams(location.search).get("list");
  document.querySelector(".heading .brand").after(make("a", { class: "way-back", href: home + (list ? `#${list}` : "") }, "← All runs"));
}
