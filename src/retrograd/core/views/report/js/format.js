/** Numbers as people read them. */

import { formatCount } from "./counts.js";

/** Three significant digits; far from one in powers of ten: 0.0123, 4.56, 7.89e−5. */
export function formatNumber(value) {
  if (Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-3 ? value.toExponential(2) : formatPlain(value, size);
  return text.replace("e+", "e").replaceAll("-", "−");
}

function formatPlain(value, size) {
  return size >= 1000 ? formatCount(Math.round(value)) : String(Number(value.toPrecision(3)));
}

/** For axes, whose ticks have few digits: all of them, for with fewer two neighbours would be called the same. */
export function formatTick(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e4 || size < 1e-2 ? value.toExponential() : String(value);
  return text.replace("e+", "e").replaceAll("-", "−");
}

/** A factor of which the binary logarithm is given: ×10, ÷2.5, and = where it is exactly one. */
export function formatRatio(logarithm) {
  if (Number.isNaN(logarithm)) return "–";
  if (logarithm === 0) return "=";
  const sign = logarithm > 0 ? "×" : "÷";
  const excess = Math.expm1(Math.abs(logarithm) * Math.LN2);
  if (excess >= 0.1) return `${sign}${formatNumber(excess + 1)}`;
  if (excess < 1e-6) return `${sign}(1 + ${formatNumber(excess)})`;
  return `${sign}${(excess + 1).toFixed(1 - Math.floor(Math.log10(excess)))}`;
}

/** How numbers of a statistic are printed. */
export const printerOf = ({ share, scale }) => (scale === "ratio" ? formatRatio : share ? formatShare : formatNumber);

export const formatShare = (value) => (Number.isNaN(value) ? "–" : `${formatNumber(value * 100)} %`);

export const formatPercent = (value) => `${formatTick(Number((value * 100).toPrecision(6)))} %`;
