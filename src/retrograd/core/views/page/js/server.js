/** Requests to the server that a page comes from; a page in a file has none, and its policy forbids them. */

/** The answer; null where the question is about sites that are others by now. */
export async function fetchFrom(base, what, query = {}) {
  const answer = await fetch(`${base}/${what}?${new URLSearchParams(query)}`);
  if (answer.status === 412) return null;
  if (!answer.ok) throw new Error(`the server says ${answer.status}`);
  return answer;
}
