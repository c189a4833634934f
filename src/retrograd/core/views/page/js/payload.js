/** What the writer put into the page: facts as JSON, blocks as gzip in base64. */

import { fetchFrom } from "./server.js";

export const facts = JSON.parse(document.getElementById("facts-json").textContent);

/** Bytes of a block, or null where the page has none of that name. */
export async function readBytes(name) {
  const text = document.getElementById(`block-${name}`)?.textContent;
  if (text === undefined) return null;
  return unpack(text);
}

/** Bytes of a text that is gzip in base64. */
export async function unpack(text) {
  const stream = new Blob([decodeBase64(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The value of a block of JSON. */
export const readJson = async (name) => JSON.parse(new TextDecoder().decode(await readBytes(name)));

/** A served page requests what a page in a file contains. */
export const fetchLive = (what, query) => fetchFrom(facts.live.base, what, query);

/** Numbers of some statistics and series from a column on; null where the run has other sites by now, or they are not read yet. */
export async function fetchNumbers(names, series, from) {
  const { first, last, width } = facts.columns;
  if (first.length === 0) return new Float32Array(0); // nothing was recorded yet
  const span = { step: first[from], until: last.at(-1), width };
  const chosen = { names: JSON.stringify(names), series, sites: facts.live.digests.sites };
  const scalars = () => JSON.stringify(facts.scalars.listed.map(({ name }) => name));
  const isScalar = names[0] === "scalars";
  const answer = await (isScalar ? fetchLive("scalars", { names: scalars(), ...span }) : fetchLive("numbers", { ...chosen, ...span }));
  const bytes = answer && (await answer.arrayBuffer());
  return bytes?.byteLength ? new Float32Array(bytes) : null;
}

/** Numbers of a block, put together again from their byte planes. */
export async function readFloats(name) {
  const planes = await readBytes(name);
  if (planes === null) return null;
  const n = planes.length / 4;
  const bytes = new Uint8Array(planes.length);
  for (let byte = 0; byte < 4; byte++) {
    const start = byte * n;
    for (let i = 0; i < n; i++) bytes[4 * i + byte] = planes[start + i];
  }
  return new Float32Array(bytes.buffer);
}

function decodeBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}
