/** Areas in proportion to sizes, as square as can be (Bruls, Huizing and van Wijk, 2000). */

/** `items` with a `size`, largest first, laid out in a rectangle; calls `place(item, x, y, width, height)`. */
export function layTiles(items, x, y, width, height, place) {
  let total = items.reduce((sum, item) => sum + item.size, 0);
  let next = 0;
  while (next < items.length && total > 0 && width > 0 && height > 0) {
    const scale = (width * height) / total;
    const side = Math.min(width, height);
    let end = next + 1;
    let area = items[next].size * scale;
    const largest = area;
    while (end < items.length) {
      const grown = area + items[end].size * scale;
      if (worst(largest, items[end].size * scale, grown, side) > worst(largest, items[end - 1].size * scale, area, side)) break;
      area = grown;
      end += 1;
    }
    const depth = area / side;
    let along = 0;
    for (let i = next; i < end; i++) {
      const length = (items[i].size * scale) / depth;
      if (width >= height) place(items[i], x, y + along, depth, length);
      else place(items[i], x + along, y, length, depth);
      along += length;
      total -= items[i].size;
    }
    if (width >= height) [x, width] = [x + depth, width - depth];
    else [y, height] = [y + depth, height - depth];
    next = end;
  }
}

function worst(largest, smallest, area, side) {
  const square = side * side;
  return Math.max((square * largest) / (area * area), (area * area) / (square * smallest));
}
