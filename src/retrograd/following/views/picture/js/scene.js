/** What the writer put into the page: sheets of things, rows and lines. */

import { readJson } from "./payload.js";

/** The inside of each fold that can be opened; the first one is the whole graph. */
export const sheets = [];

/** Every box, as {thing, sheet}. */
export const boxes = [];

export async function loadScene() {
  for (const [number, sheet] of (await readJson("sheets")).entries()) {
    sheets.push(sheet);
    for (const thing of sheet.things) if (thing.name !== undefined) boxes.push({ thing, sheet: number });
  }
}

/** The folds around a sheet, the sheet itself included, from the inside out; the whole graph is left out. */
export function foldsAround(number) {
  const around = [];
  for (let at = number; at > 0; at = sheets[at].above) around.push(at);
  return around;
}
