/** Names that break in a narrow column where a reader would break them: after a dot or a colon, and before "Backward". */

import { make } from "./dom.js";

const BREAK = "\n";

export function breakable(name) {
  const parts = name.replace(/([.:])(?=.)|(?=Backward)/g, `$1${BREAK}`).split(BREAK);
  return parts.flatMap((part, place) => (place ? [make("wbr"), part] : [part]));
}
