/** Making elements, and watching them. Text from the run is only ever set as text, never as markup. */

/** `make("button", {class: "quiet", onclick: f}, "Reset")`: properties that start with "on" are listeners. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const find = (id) => document.getElementById(id);

/** The children of a `dl`: `pairs` of a term and its value, or several values. */
export const makeTerms = (pairs) =>
  pairs.map(([term, values]) =>
    make("div", {}, make("dt", {}, term), ...[values].flat().map((value) => make("dd", {}, value))),
  );

export function fill(element, ...children) {
  element.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

/** A name that breaks in a narrow column where a reader would break it: after a dot or a colon, and before "Backward". */
export const breakable = (name) =>
  name.split(/(?<=[.:])(?=.)|(?=Backward)/).flatMap((part, place) => (place ? [make("wbr"), part] : [part]));

/** A canvas of a size in CSS pixels, sharp on any screen; returns its context, in CSS pixels. */
export function sizeCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const colors = new Map(); // theme and name → colour: asking the browser each time recomputes all styles

/** The value of a colour of the style sheet in the theme that is shown. */
export function themeColor(name) {
  const root = document.documentElement;
  const key = `${root.dataset.theme} ${name}`;
  if (!colors.has(key)) colors.set(key, getComputedStyle(root).getPropertyValue(`--${name}`).trim());
  return colors.get(key);
}

/** Redraw a canvas when its element is resized, or the theme changes. */
export function redrawWith(element, draw) {
  new ResizeObserver(draw).observe(element);
  new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
}

/** The key "/" puts the cursor into a search field. */
export function focusOnSlash(id) {
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    find(id).focus();
  });
}
