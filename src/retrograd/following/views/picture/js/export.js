/** The whole drawing, with the modules that are open, as a file: SVG, or PNG. */

import { make } from "./dom.js";
import { shape } from "./draw.js";
import { drawAll } from "./folding.js";

const BORDER = 16;
const [SHARP, LONGEST] = [2, 16000]; // pixels of a unit, and pixels of a side that every browser can draw

const NOT_XML = /[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu;

/** What a style sheet of the page says of the drawing; its colours are put in, since not every reader knows variables. */
function listRules(svg) {
  const colors = getComputedStyle(document.documentElement);
  const isOfDrawing = ({ selectorText }) => selectorText && (svg.matches(selectorText) || svg.querySelector(selectorText));
  return [...document.styleSheets]
    .flatMap((sheet) => [...sheet.cssRules].filter(isOfDrawing))
    .map((rule) => rule.cssText.replace(/var\(--([\w-]+)\)/g, (_, name) => colors.getPropertyValue(`--${name}`).trim()))
    .join("\n");
}

function drawFile() {
  const { width, height, elements } = drawAll();
  const [wide, high] = [width + 2 * BORDER, height + 2 * BORDER].map(Math.ceil);
  const tip = document.querySelector("#graph defs").cloneNode(true);
  const ground = shape("rect", { class: "ground", x: -BORDER, y: -BORDER, width: wide, height: high });
  const view = `${-BORDER} ${-BORDER} ${wide} ${high}`;
  const svg = shape("svg", { class: "graph", viewBox: view, width: wide, height: high }, tip, ground, ...elements);
  svg.prepend(shape("style", {}, listRules(svg)));
  return { text: new XMLSerializer().serializeToString(svg).replace(NOT_XML, "\ufffd"), wide, high };
}

const fileName = (ending) => {
  const page = decodeURIComponent(location.pathname).split("/").at(-1).replace(/\.html?$/, "");
  return `${page.replace(/[^\w.-]+/g, "_") || "graph"}.${ending}`;
};

function save(blob, name) {
  const address = URL.createObjectURL(blob);
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

export function saveSvg() {
  save(new Blob([drawFile().text], { type: "image/svg+xml" }), fileName("svg"));
}

/** Says by how much a drawing had to be made smaller; nothing where it was not. */
export async function savePng() {
  const { text, wide, high } = drawFile();
  const scale = Math.min(SHARP, LONGEST / Math.max(wide, high));
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`; // what the page's policy lets it load
  await picture.decode();
  const canvas = make("canvas", { width: Math.ceil(wide * scale), height: Math.ceil(high * scale) });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => save(blob, fileName("png")));
  return scale < 1 ? `The drawing is so large that its PNG has ${Math.round(100 * scale)} % of its size; an SVG has all of it.` : "";
}
