/** Redraws a canvas when its element is resized, or the theme changes. */

export function redrawWith(element, draw) {
  new ResizeObserver(draw).observe(element);
  new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
}
