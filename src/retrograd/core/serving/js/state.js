/** What is chosen and how it is ordered: the address holds it, so a link shows the same, and Back comes back to it. */

export const DEFAULTS = { q: "", status: "", finding: "", script: "", sort: "started", turned: "", color: "", log: "1", smooth: "0" };

export const state = { ...DEFAULTS };
export const picked = new Set(); // names of runs to be compared, in the order in which they were ticked

export function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(DEFAULTS)) state[name] = words.get(name) ?? DEFAULTS[name];
  picked.clear();
  for (const name of words.getAll("run")) picked.add(name);
}

/** All that differs from what a page without it shows. */
export function writeAddress() {
  const told = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  return new URLSearchParams([...told, ...[...picked].map((name) => ["run", name])]).toString();
}

export function change(changes) {
  Object.assign(state, changes);
  keep();
}

export function keep() {
  const told = writeAddress();
  history.replaceState(null, "", told ? `#${told}` : location.pathname + location.search);
}
