/** What the writer put into the page: sheets of things, rows and lines. */

import { readJson } from "./payload.js";

/** The inside of each fold that can be opened; the first one is the whole graph. */
export const sheets = [];

/** Every box, as {thing, sheet}. */
export const boxes = [];

export async function loadScene() {
  const scene = await readJson("scene");
  for (const [number, sheet] of scene.sheets.entries()) {
    sheets.push(sheet);
    for (const thing of sheet.things) {
      if (thing.gradient !== undefined) continue;
      thing.shapes = scene.looks[thing.look];
      boxes.push({ thing, sheet: number });
    }
  }
}

/** What is written in and above a box. */
export const wordsOf = ({ shapes }) => shapes.map(([, , text]) => text).filter(Boolean);

/** The folds around a sheet, the sheet itself included, from the inside out; the whole graph is left out. */
export function foldsAround(number) {
  const around = [];
  for (let at = number; at > 0; at = sheets[at].above) around.push(at);
  return around;
}
