/** The view in the address: what follows # restores it. Only what differs from the default is written. */

import { DEFAULTS, change, onChange, state } from "./state.js";

let written = null;

export function readHash() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const patch = {};
  for (const [key, preset] of Object.entries(DEFAULTS)) {
    const text = parameters.get(key);
    if (text === null) patch[key] = structuredClone(preset);
    else if (Array.isArray(preset)) patch[key] = parameters.getAll(key);
    else if (key === "zoom") patch[key] = readZoom(text);
    else patch[key] = text;
  }
  return patch;
}

function readZoom(text) {
  const match = /^(\d+)-(\d+)$/.exec(text);
  return match ? [Number(match[1]), Number(match[2])] : null;
}

export function printHash(view) {
  const parameters = new URLSearchParams();
  for (const [key, preset] of Object.entries(DEFAULTS)) {
    const value = view[key];
    if (Array.isArray(preset)) for (const item of value) parameters.append(key, item);
    else if (key === "zoom") value && parameters.set(key, value.join("-"));
    else if (value !== preset) parameters.set(key, value);
  }
  return parameters.toString();
}

export function followHash() {
  onChange(Object.keys(DEFAULTS), () => {
    const text = printHash(state);
    if (text === location.hash.slice(1)) return;
    written = text;
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  });
  addEventListener("hashchange", () => {
    if (location.hash.slice(1) !== written) change(readHash());
  });
}
