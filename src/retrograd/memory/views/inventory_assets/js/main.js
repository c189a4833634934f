/** Puts the page together. */

import { fill, find, make } from "./dom.js";
import { showKept } from "./kept.js";
import { showModules } from "./modules.js";
import { openPage } from "./opening.js";
import { facts } from "./payload.js";
import { showTensors } from "./tensors.js";
import { followTheme } from "./theme.js";

async function start() {
  followTheme();
  const { notes, passes } = facts.inventory;
  find("notes").hidden = !notes.length;
  fill(find("notes"), ...notes.map((note) => make("li", {}, note)));
  for (const id of ["main", "hint"]) find(id).hidden = !passes;
  await showKept();
  showModules();
  showTensors();
}

openPage(start);
