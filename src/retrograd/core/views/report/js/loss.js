/** What is drawn above the map of one run: its scalars. */

import { loadScalars } from "./measures.js";
import { drawStrip, followStrip, followStripKeys, resizeStrip } from "./strip.js";

let isListening = false;

export const loadLoss = loadScalars;

export function drawLoss() {
  drawStrip();
  if (!isListening) followStripKeys();
  isListening = true;
}

export const followLoss = followStrip;

export const resizeLoss = resizeStrip;
