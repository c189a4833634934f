/**
 * Rows of the map: places by the modules they belong to, in call order. A module with modules inside is a
 * folder; a place of a plain module is a leaf. A folder that has just one place of its own shows it on its row.
 */

import { facts } from "./payload.js";
import { hasRow } from "./state.js";

/** Tree of the places that have the quantity. A node: {id, name, slot, place, children, parent, depth, places}. */
export function buildTree(quantity) {
  const root = branch("");
  facts.places.forEach((place, number) => {
    if (!hasRow(place, quantity)) return;
    let node = root;
    for (const token of splitPath(place.path)) {
      if (!node.branches.has(token)) node.branches.set(token, branch(node.path ? `${node.path}.${token}` : token));
      node = node.branches.get(token);
    }
    node.own.push(number);
  });
  const top = { id: "", children: [], parent: null, depth: -1 };
  for (const [token, node] of root.branches) grow(top, token, node);
  return top;
}

/** Places without modules, as one list. */
export function buildList(quantity) {
  const top = { id: "", children: [], parent: null, depth: -1 };
  facts.places.forEach((place, number) => hasRow(place, quantity) && addLeaf(top, nameOf(place), number));
  return top;
}

/** Places under the types of their modules. */
export function buildTypes(quantity) {
  const types = new Map((facts.model ?? []).map(([, path, type]) => [path, type]));
  const numbers = new Map();
  facts.places.forEach((place, number) => {
    if (!hasRow(place, quantity)) return;
    const type = place.path.startsWith("watch/") ? "watched" : (types.get(place.path) ?? "other");
    numbers.set(type, [...(numbers.get(type) ?? []), number]);
  });
  const top = { id: "", children: [], parent: null, depth: -1 };
  for (const [type, some] of numbers) {
    if (some.length === 1) {
      addLeaf(top, `${type} ${nameOf(facts.places[some[0]])}`, some[0]);
      continue;
    }
    const folder = add(top, { id: `${type}/`, name: type, slot: "", place: null });
    folder.children = [];
    for (const number of some) addLeaf(folder, nameOf(facts.places[number]), number);
  }
  return top;
}

const nameOf = ({ path }) => (path.startsWith("watch/") ? path.slice(6) : path);

const branch = (path) => ({ path, branches: new Map(), own: [] });

const splitPath = (path) => (path.startsWith("watch/") ? ["watch", path.slice(6)] : path.split("."));

function grow(parent, name, node) {
  if (node.branches.size === 1 && node.own.length === 0) {
    const [[token, only]] = node.branches;
    return grow(parent, `${name}.${token}`, only);
  }
  if (node.branches.size === 0) {
    for (const number of node.own) addLeaf(parent, name, number);
    return;
  }
  const inline = node.own.length === 1 ? node.own[0] : null;
  const folder = add(parent, {
    id: `${node.path}/`,
    name,
    slot: inline === null ? "" : facts.places[inline].label,
    place: inline,
  });
  folder.children = [];
  if (inline === null) for (const number of node.own) addLeaf(folder, "", number);
  for (const [token, child] of node.branches) grow(folder, token, child);
}

function addLeaf(parent, name, number) {
  const { label } = facts.places[number];
  add(parent, { id: facts.places[number].name, name, slot: label, place: number });
}

function add(parent, node) {
  Object.assign(node, { parent, depth: parent.depth + 1, places: [] });
  parent.children.push(node);
  if (node.place !== null) for (let above = node; above?.places; above = above.parent) above.places.push(node.place);
  return node;
}

/** Rows to show, from top to bottom. `isFolded(node)` is for folders; `keeps(node)` for leaves, or null. */
export function listRows(top, isFolded, keeps) {
  const rows = [];
  const visit = (node) => {
    if (keeps && !node.places.some(keeps)) return;
    rows.push(node);
    if (node.children && (keeps || !isFolded(node))) node.children.forEach(visit);
  };
  top.children.forEach(visit);
  return rows;
}

/** The depth down to which folders start unfolded, so that at most `most` rows show. */
export function chooseDepth(top, most) {
  let depth = 0;
  for (let next = 1; next < 12; next++) {
    if (listRows(top, (node) => node.depth >= next, null).length > most) break;
    depth = next;
  }
  return depth;
}
