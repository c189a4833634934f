/** Bytes, seconds and shares as people read them. */

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** Three digits, in units of thousands: 45.4 GB. */
export function formatBytes(count) {
  let unit = 0;
  while (count >= 999.5 && unit < UNITS.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit === 0 || count >= 100 ? count.toFixed(0) : Number(count.toPrecision(3))} ${UNITS[unit]}`;
}

export function formatSeconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1) return `${Number(value.toPrecision(3))} s`;
  return value >= 1e-3 ? `${Number((value * 1e3).toPrecision(3))} ms` : `${Number((value * 1e6).toPrecision(3))} µs`;
}

/** A share in per cent with two digits. */
export function formatShare(part, total) {
  if (!(total > 0)) return "–";
  const percent = (100 * part) / total;
  return percent > 0 && percent < 0.1 ? "< 0.1 %" : `${percent >= 10 ? percent.toFixed(0) : percent.toFixed(1)} %`;
}
