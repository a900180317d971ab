// TOML for the editor: tokens to colour, and the table, key or value at the caret.

const BARE = /[A-Za-z0-9_-]/;

/** The end of the string that starts at `at`, or of the text. */
function stringEnd(text, at) {
  const quote = text[at];
  const isLong = text.startsWith(quote.repeat(3), at);
  const mark = isLong ? quote.repeat(3) : quote;
  for (let to = at + mark.length; to < text.length; to++) {
    if (quote === '"' && text[to] === "\\") to++;
    else if (text.startsWith(mark, to)) return { to: to + mark.length, isClosed: true };
    else if (!isLong && text[to] === "\n") return { to, isClosed: false };
  }
  return { to: text.length, isClosed: false };
}

/**
 * Reads tokens `{ kind, from, to }` in order. `kind` is comment, table, key, string, literal or punctuation. `seen(token, place)` gets
 * each token with its place: `{ path, expects }`, where `path` leads to the table or value, and `expects` is key, value, table or end.
 */
function scan(text, seen) {
  let [at, table, key, expects] = [0, [], [], "key"];
  const stack = [];
  const base = () => (stack.length > 0 ? stack[stack.length - 1].path : table);
  const place = () => ({ path: expects === "key" ? [...base(), ...key] : expects === "table" ? [] : [...base(), ...key], expects });
  const emit = (kind, to, isClosed = true) => {
    seen({ kind, from: at, to, isClosed }, place());
    at = to;
  };
  while (at < text.length) {
    const letter = text[at];
    if (letter === "\n") {
      if (stack.length === 0) [key, expects] = [[], "key"];
      at++;
    } else if (letter === " " || letter === "\t" || letter === "\r") {
      at++;
    } else if (letter === "#") {
      const end = text.indexOf("\n", at);
      emit("comment", end < 0 ? text.length : end);
    } else if (letter === "[" && stack.length === 0 && expects === "key" && key.length === 0) {
      const line = text.slice(at).match(/^\[\[?[^\]\n#]*(\]\]?)?/)[0];
      expects = "table";
      table = line.replace(/[[\]]/g, "").split(".").map((part) => part.trim().replace(/^["']|["']$/g, "")).filter(Boolean);
      emit("table", at + line.length, line.endsWith("]"));
      expects = "end";
    } else if (expects === "key" && (BARE.test(letter) || letter === '"' || letter === "'")) {
      const to = letter === '"' || letter === "'" ? stringEnd(text, at).to : at + text.slice(at).match(/^[A-Za-z0-9_-]+/)[0].length;
      const name = text.slice(at, to).replace(/^["']|["']$/g, "");
      emit("key", to);
      key = [...key, name];
    } else if (letter === "=" && expects === "key") {
      emit("punctuation", at + 1);
      expects = "value";
    } else if (letter === '"' || letter === "'") {
      const { to, isClosed } = stringEnd(text, at);
      emit("string", to, isClosed);
      expects = "end";
    } else if ((letter === "{" || letter === "[") && expects === "value") {
      emit("punctuation", at + 1);
      stack.push({ path: [...base(), ...key], isTable: letter === "{" });
      [key, expects] = [[], letter === "{" ? "key" : "value"];
    } else if (letter === "}" || letter === "]") {
      emit("punctuation", at + 1);
      stack.pop();
      [key, expects] = [[], "end"];
    } else if (letter === ",") {
      emit("punctuation", at + 1);
      const isTable = stack[stack.length - 1]?.isTable;
      [key, expects] = [[], isTable ? "key" : stack.length > 0 ? "value" : "end"];
    } else if (expects === "value" && /[A-Za-z0-9+.-]/.test(letter)) {
      emit("literal", at + text.slice(at).match(/^[A-Za-z0-9_+.:-]+/)[0].length);
      expects = "end";
    } else {
      emit("punctuation", at + 1);
    }
  }
  return place();
}

/** The tokens of a text. */
export function tomlTokens(text) {
  const tokens = [];
  scan(text, (token) => tokens.push(token));
  return tokens;
}

/**
 * What can be completed at the caret: `{ expects, path, word, from, isString }`; `word` starts at `from` and ends at the caret.
 * Null inside a comment and after a value.
 */
export function tomlPlace(text, caret) {
  let last = null;
  const before = text.slice(0, caret);
  const end = scan(before, (token, place) => { last = { ...token, place }; });
  if (last && last.to === caret) {
    const word = before.slice(last.from);
    if (last.kind === "comment" || (last.kind === "string" && last.isClosed)) return null;
    if (last.kind === "table" && last.isClosed) return null;
    if (last.kind === "table") {
      const path = word.replace(/^\[+/, "").split(".");
      const part = path.pop().trimStart();
      return { expects: "table", path: path.map((name) => name.trim()), word: part, from: caret - part.length, isString: false };
    }
    if (last.kind === "key") return { ...last.place, word, from: last.from, isString: false };
    if (last.kind === "string") return { ...last.place, word: word.slice(1), from: last.from + 1, isString: true };
    if (last.kind === "literal") return { ...last.place, word, from: last.from, isString: false };
  }
  return end.expects === "key" || end.expects === "value" ? { ...end, word: "", from: caret, isString: false } : null;
}

/** The alternatives of a schema node, without references. An array stands for its items. */
function alternatives(schema, node, depth = 0) {
  if (!node || typeof node !== "object" || depth > 8) return [];
  if (node.$ref) return alternatives(schema, schema.$defs[node.$ref.slice("#/$defs/".length)], depth + 1);
  const nested = [...(node.anyOf ?? []), ...(node.oneOf ?? []), ...(node.allOf ?? [])].flatMap((other) => alternatives(schema, other, depth + 1));
  const items = node.items ? alternatives(schema, node.items, depth + 1) : [];
  return [node, ...nested, ...items];
}

function nodesAt(schema, path) {
  let nodes = alternatives(schema, schema);
  for (const key of path) {
    nodes = nodes.flatMap((node) => alternatives(schema, node.properties?.[key] ?? (typeof node.additionalProperties === "object" ? node.additionalProperties : null)));
  }
  return nodes;
}

function describe(schema, node) {
  return node.description ?? alternatives(schema, node).find((other) => other.description)?.description ?? "";
}

/** What the schema of scenarios permits at a place, as `{ label, insert, about }`. */
export function tomlCompletions(schema, place) {
  const found = new Map();
  const add = (label, insert, about) => !found.has(label) && found.set(label, { label, insert, about });
  const nodes = nodesAt(schema, place.path);
  for (const node of nodes) {
    if (place.expects !== "value") {
      for (const [name, property] of Object.entries(node.properties ?? {})) {
        const isTable = alternatives(schema, property).some((other) => other.properties || typeof other.additionalProperties === "object");
        if (place.expects === "key" || isTable) add(name, name + (place.expects === "key" ? " = " : ""), describe(schema, property));
      }
      continue;
    }
    const quoted = (text) => (place.isString ? text : JSON.stringify(text));
    for (const value of [node.const, ...(node.enum ?? [])]) if (typeof value === "string") add(value, quoted(value), node.description ?? "");
    if (place.isString) continue;
    if ([node.type].flat().includes("boolean")) for (const value of ["true", "false"]) add(value, value, "");
    for (const name of node.properties ? node.required ?? [] : []) add(`{ ${name} = … }`, `{ ${name} = `, node.description ?? "");
  }
  const word = place.word.toLowerCase();
  const fits = [...found.values()].filter(({ label }) => label.toLowerCase().includes(word) && label !== place.word);
  return fits.sort((one, other) => other.label.toLowerCase().startsWith(word) - one.label.toLowerCase().startsWith(word) || one.label.localeCompare(other.label));
}
