/**
 * Colours of cells. Both maps are safe for colour-blind eyes: blue to pale green rises evenly in lightness,
 * and purple to teal differ from their middle in lightness too. Vermilion is in neither and means NaN or infinity.
 */

const RISING = ["#132350", "#1d4b8c", "#2277a8", "#35a09f", "#77c793", "#c4e59f", "#f6f8d3"];
const SIGNED = {
  light: ["#4b2a86", "#8d6bbd", "#cbbadf", "#f0f0f2", "#a9d6cf", "#3f9d92", "#075e57"],
  dark: ["#b093ee", "#7c5ab8", "#4a3a70", "#262c36", "#1c524f", "#2c8f84", "#84d6c8"],
};
const SHADES = 256;

/** 256 colours as numbers for ImageData, darkest-on-light or brightest-on-dark for the largest. */
export function makePalette(signed, dark) {
  const stops = signed ? SIGNED[dark ? "dark" : "light"] : dark ? RISING : RISING.toReversed();
  const lab = stops.map(toLab);
  const palette = new Uint32Array(SHADES);
  for (let shade = 0; shade < SHADES; shade++) {
    const place = (shade / (SHADES - 1)) * (stops.length - 1);
    const i = Math.min(Math.floor(place), stops.length - 2);
    palette[shade] = fromLab(lab[i].map((a, k) => a + (lab[i + 1][k] - a) * (place - i)));
  }
  return palette;
}

export function parseColor(hex) {
  const [r, g, b] = channels(hex);
  return pack(r, g, b);
}

export function cssColor(packed) {
  return `rgb(${packed & 255} ${(packed >> 8) & 255} ${(packed >> 16) & 255})`;
}

/** A palette as a CSS background, from left to right. */
export function gradientOf(palette) {
  const stops = Array.from({ length: 17 }, (_, i) => cssColor(palette[Math.round((i * (SHADES - 1)) / 16)]));
  return `linear-gradient(90deg, ${stops.join(", ")})`;
}

const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const pack = (r, g, b) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

// Oklab (Björn Ottosson 2020): mixing there keeps lightness even.
function toLab(hex) {
  const [r, g, b] = channels(hex).map((c) =>
    c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4,
  );
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function fromLab([lightness, a, b]) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  const encode = (c) => (c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055);
  return pack(...linear.map((c) => Math.max(0, Math.min(255, Math.round(encode(Math.max(c, 0)) * 255)))));
}
