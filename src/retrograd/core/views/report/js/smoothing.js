/** Exponential smoothing as in TensorBoard: the weight of the past is what was chosen, and its beginning is made up for. */

/** A smoothed line: numbers that are missing or not finite are passed over. `weight`: from 0 to below 1. */
export function smooth(line, weight) {
  const smoothed = new Float32Array(line.length).fill(NaN);
  let [sum, past] = [0, 1];
  for (let i = 0; i < line.length; i++) {
    if (!Number.isFinite(line[i])) continue;
    sum = sum * weight + (1 - weight) * line[i];
    past *= weight;
    smoothed[i] = sum / (1 - past);
  }
  return smoothed;
}
