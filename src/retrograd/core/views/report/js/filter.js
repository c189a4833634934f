/** Which rows a search keeps: a glob (blocks.*), a regular expression between slashes, or a part of the name. */

/** A function from a name to whether it matches; throws SyntaxError for a broken expression. */
export function makeFilter(text) {
  const wanted = text.trim();
  if (!wanted) return null;
  const expression = /^\/(.+)\/(i?)$/.exec(wanted);
  if (expression) return test(new RegExp(expression[1], expression[2]));
  if (/[*?[%]/.test(wanted)) {
    const pattern = new RegExp(`^(?:${translateGlob(wanted)})$`);
    return (name) => name.includes(wanted) || pattern.test(name);
  }
  const lower = wanted.toLowerCase();
  return (name) => name.toLowerCase().includes(lower);
}

const test = (pattern) => (name) => pattern.test(name);

function translateGlob(glob) {
  return glob.replace(/\[!?[^\]]+\]|[\s\S]/g, (piece) => {
    if (piece === "*") return "[\\s\\S]*";
    if (piece === "?") return "[\\s\\S]";
    if (piece === "%") return "[^.:#]+";
    if (piece.length > 1) return piece.replace("[!", "[^").replaceAll("\\", "\\\\");
    return piece.replace(/[.+^${}()|[\]\\/]/g, "\\$&");
  });
}
