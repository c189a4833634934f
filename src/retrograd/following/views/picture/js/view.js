/** Which part of the drawing is to be seen, and how large. */

import { find } from "./dom.js";

const [SMALLEST, LARGEST, MARGIN] = [0.02, 4, 24];
const at = { x: 0, y: 0, scale: 1 };
let size = { width: 1, height: 1 };

const clamp = (number, low, high) => Math.min(Math.max(number, low), high);

/** The drawing's own size has changed. */
export function resizeDrawing(width, height) {
  size = { width, height };
}

export function moveBy(x, y) {
  at.x += x;
  at.y += y;
  show();
}

/** Zoom by a factor around a point of the screen. */
export function zoomBy(factor, x, y) {
  const { clientWidth, clientHeight } = find("graph");
  [x, y] = [x ?? clientWidth / 2, y ?? clientHeight / 2];
  const scale = clamp(at.scale * factor, SMALLEST, LARGEST);
  at.x = x - ((x - at.x) * scale) / at.scale;
  at.y = y - ((y - at.y) * scale) / at.scale;
  at.scale = scale;
  show();
}

/** The whole drawing; or, as at first, as much as is legible, from its top. */
export function fit(isLegible = false) {
  const { clientWidth, clientHeight } = find("graph");
  const [wide, high] = [(clientWidth - 2 * MARGIN) / size.width, (clientHeight - 2 * MARGIN) / size.height];
  at.scale = clamp(isLegible ? Math.max(Math.min(wide, 1), 0.6) : Math.min(wide, high), SMALLEST, 1);
  at.x = (clientWidth - size.width * at.scale) / 2;
  at.y = Math.max((clientHeight - size.height * at.scale) / 2, MARGIN);
  show();
}

/** Actual size, around the middle of the picture. */
export const showActualSize = () => zoomBy(1 / at.scale);

/** Move so that a box is to be seen; to the middle where it was not. */
export function reveal(element) {
  const box = element.getBoundingClientRect();
  const around = find("graph").getBoundingClientRect();
  const isInside =
    box.left >= around.left && box.right <= around.right && box.top >= around.top + 20 && box.bottom <= around.bottom;
  if (isInside) return;
  const x = around.left + around.width / 2 - (box.left + box.width / 2);
  moveBy(x, around.top + around.height / 2 - (box.top + Math.min(box.height, around.height) / 2));
}

/** What is in the middle of the picture stays there when the window changes. */
export function followSize() {
  let width = find("graph").clientWidth;
  new ResizeObserver(() => {
    const now = find("graph").clientWidth;
    moveBy((now - width) / 2, 0);
    width = now;
  }).observe(find("graph"));
}

export function followPointer() {
  const graph = find("graph");
  const pointers = new Map();
  const point = (event) => {
    const { left, top } = graph.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  };
  graph.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const lines = event.deltaMode === 1 ? 18 : 1;
      const { x, y } = point(event);
      if (event.ctrlKey || event.metaKey) zoomBy(Math.exp(clamp(-event.deltaY * lines, -60, 60) / 150), x, y);
      else if (event.shiftKey && !event.deltaX) moveBy(-event.deltaY * lines, 0);
      else moveBy(-event.deltaX * lines, -event.deltaY * lines);
    },
    { passive: false },
  );
  graph.addEventListener("pointerdown", (event) => pointers.set(event.pointerId, { ...point(event), far: 0 }));
  graph.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (before === undefined) return;
    const now = { ...point(event), far: before.far + Math.abs(event.movementX) + Math.abs(event.movementY) };
    pointers.set(event.pointerId, now);
    if (now.far < 5) return;
    if (!graph.classList.contains("moving")) {
      graph.setPointerCapture(event.pointerId);
      graph.classList.add("moving"); // a click at its end opens nothing
    }
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other === undefined) moveBy(now.x - before.x, now.y - before.y);
    else zoomBy(distance(now, other) / Math.max(distance(before, other), 1), other.x, other.y);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    graph.addEventListener(end, (event) => {
      pointers.delete(event.pointerId);
      setTimeout(() => graph.classList.remove("moving"));
    });
  }
}

const distance = (a, b) => Math.hypot(a.x - b.x, a.y - b.y);

function show() {
  const [x, y] = [at.x.toFixed(2), at.y.toFixed(2)];
  find("world").setAttribute("transform", `translate(${x} ${y}) scale(${at.scale.toFixed(4)})`);
}
