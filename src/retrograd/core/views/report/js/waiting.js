/** What a page waits for while its run is recorded. */

import { find } from "./dom.js";
import { facts } from "./payload.js";
import { columnCount } from "./steps.js";

const PATIENCE = 20; // seconds without a step after which the page says so

/** `idle`: seconds since the last thing that was recorded; null where nothing is recorded any more. */
export function tellWaiting(idle) {
  const text = idle === null ? "" : columnCount() === 0 ? "Waiting for the first step…" : idle >= PATIENCE ? `No new step for ${printSeconds(idle)}; the process is alive.` : "";
  find("waiting").hidden = !text;
  if (find("waiting").textContent !== text) find("waiting").textContent = text;
  find("nothing").hidden ||= Boolean(text) && columnCount() === 0;
}

const printSeconds = (seconds) => (seconds < 120 ? `${Math.round(seconds)} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`);

/** What is known before the first news. */
export const tellFirst = () => tellWaiting(facts.live?.idle ?? null);
