/** From numbers to shades: linear, logarithmic, or logarithmic on both sides of zero. */

const ENOUGH = 20000;

/** A number below which a share of the finite numbers lie; `sorted` is ascending. */
export const quantile = (sorted, share) => sorted[Math.round(share * (sorted.length - 1))];

/** Finite numbers of the lines between two columns, ascending; a sample where they are many. */
export function sortNumbers(lines, from, to) {
  const columns = to - from + 1;
  const stride = Math.max(1, Math.ceil((lines.length * columns) / ENOUGH));
  const found = new Float64Array(Math.ceil((lines.length * columns) / stride));
  let count = 0;
  for (let at = 0; at < lines.length * columns; at += stride) {
    const value = lines[Math.floor(at / columns)][from + (at % columns)];
    if (Number.isFinite(value)) found[count++] = value;
  }
  return found.subarray(0, count).sort();
}

/** A scale that suits the numbers in view: all but the outermost half per cent on either side. */
export function fitScale(sorted, kind, factor = null) {
  if (kind === "ratio") return fitRatio(sorted, factor);
  if (kind === "signed" || kind === "signed-linear") return fitSigned(sorted, kind);
  const usable = kind === "log" ? sorted.subarray(sorted.findIndex((value) => value > 0)) : sorted;
  if (usable.length === 0 || (kind === "log" && sorted.at(-1) <= 0)) return { kind: "linear", low: 0, high: 1 };
  let [low, high] = [quantile(usable, 0.005), quantile(usable, 0.995)];
  if (kind === "linear" && low > 0 && low < high * 0.5) low = 0;
  if (low === high)
    [low, high] = kind === "log" ? [low / 2, high * 2] : [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
  return { kind, low, high };
}

/** Factors at which the colours of a ratio may end. */
export const FACTORS = [1.001, 1.01, 1.1, 2, 10, 100, 1000];

/** Of binary logarithms of ratios: the least factor within which nine of ten that are not equal lie. */
function fitRatio(sorted, factor) {
  const sizes = sorted.map(Math.abs).filter((size) => size > 0).sort();
  const most = sizes.length ? 2 ** quantile(sizes, 0.9) : 2;
  const end = Math.log2(factor ?? FACTORS.find((each) => each >= most) ?? FACTORS.at(-1));
  return { kind: "ratio", low: -end, high: end };
}

function fitSigned(sorted, kind) {
  const sizes = sorted.map(Math.abs).sort();
  const high = sizes.length ? quantile(sizes, 0.995) || 1 : 1;
  const knee = Math.max(sizes.length ? quantile(sizes, 0.1) : 0, high * 1e-4);
  return { kind, low: -high, high, knee };
}

/** A function from a number to 0…255. */
export function shadeWith({ kind, low, high, knee }) {
  if (kind === "log") {
    const factor = 255 / Math.log(high / low);
    return (value) => (value > low ? Math.min(255, Math.log(value / low) * factor) | 0 : 0);
  }
  if (kind === "signed") {
    const factor = 127.5 / Math.log1p(high / knee);
    return (value) => clamp(127.5 + Math.sign(value) * Math.log1p(Math.abs(value) / knee) * factor);
  }
  const factor = 255 / (high - low);
  return (value) => clamp((value - low) * factor);
}

/** The number in the middle of a shade: the inverse, for the ticks of the colour bar. */
export function valueAt({ kind, low, high, knee }, share) {
  if (kind === "log") return low * (high / low) ** share;
  if (kind === "signed") {
    const side = 2 * share - 1;
    return Math.sign(side) * knee * Math.expm1(Math.abs(side) * Math.log1p(high / knee));
  }
  return low + (high - low) * share;
}

const clamp = (shade) => (shade < 0 ? 0 : shade > 255 ? 255 : shade | 0);
