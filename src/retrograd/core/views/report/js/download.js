/** Handing a file to the person who looks. */

import { make } from "./dom.js";
import { facts } from "./payload.js";
import { state } from "./state.js";

export function download(blob, name) {
  const address = URL.createObjectURL(blob);
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

export const fileName = (ending) =>
  `${facts.title.replace(/[^\w.-]+/g, "_")}-${state.quantity}-${state.statistic}.${ending}`;
