// The filter language: qp == 0x12 && psn > +100 && nak. The twin of emulator/trace/src/filter.rs; both pass filter_cases.json.

/** The fields with a value: short name, names in Wireshark. `explorer/src/bundle.rs` adds those of filter.rs. */
export const FILTER_FIELDS = [];

/** The words that are true or false of a packet, from the same table. */
export const FILTER_FLAGS = [];

const COMPARISONS = {
  "==": (one, other) => one === other, "!=": (one, other) => one !== other, "<": (one, other) => one < other,
  "<=": (one, other) => one <= other, ">": (one, other) => one > other, ">=": (one, other) => one >= other,
};
const OPERATORS = { eq: "==", ne: "!=", lt: "<", le: "<=", gt: ">", ge: ">=", contains: "contains" };
for (const sign of Object.keys(COMPARISONS)) OPERATORS[sign] = sign;

/** An expression that is not one: where, counted from 1, and why. */
export class FilterError extends Error {
  constructor(column, message) {
    super(message);
    this.column = column;
  }
}

/** Whether a text is meant as an expression and not as words to look for. */
export function looksLikeFilter(text) {
  if (/[=<>&|()]|^!/.test(text)) return true;
  const isKnown = (word) => FILTER_FLAGS.includes(word) || ["and", "or", "not"].includes(word) || FILTER_FIELDS.some((names) => names.includes(word));
  return text !== "" && text.split(/\s+/).every(isKnown);
}

/** A test for packets; throws a FilterError. */
export function parseFilter(text) {
  const tokens = filterTokens(text);
  const end = [...text].length + 1;
  let at = 0;
  const peek = () => tokens[at]?.[1];
  const fail = (message) => {
    throw new FilterError(tokens[at]?.[0] ?? end, message);
  };
  const take = (...words) => {
    const found = words.includes(peek());
    if (found) at++;
    return found;
  };
  const either = () => {
    let test = both();
    while (take("||", "or")) {
      const [one, other] = [test, both()];
      test = (input) => one(input) || other(input);
    }
    return test;
  };
  const both = () => {
    let test = negated();
    while (take("&&", "and")) {
      const [one, other] = [test, negated()];
      test = (input) => one(input) && other(input);
    }
    return test;
  };
  const negated = () => {
    if (take("!", "not")) {
      const test = negated();
      return (input) => !test(input);
    }
    if (take("(")) {
      const test = either();
      return take(")") ? test : fail("a closing ) is missing");
    }
    return condition();
  };
  const condition = () => {
    const word = peek();
    if (word === undefined) fail("a condition is missing, such as psn == 7 or nak");
    if (FILTER_FLAGS.includes(word)) {
      at++;
      return (input) => (input.flags ?? []).includes(word);
    }
    const field = FILTER_FIELDS.find((names) => names.includes(word))?.[0];
    if (!field) fail(unknownField(word));
    at++;
    const operator = OPERATORS[peek()];
    if (!operator) return present(field);
    at++;
    const test = comparison(field, operator, peek(), fail);
    at++;
    return test;
  };
  const test = either();
  if (peek() !== undefined) fail(`\`${peek()}\` is unexpected here; join conditions with && or ||`);
  return test;
}

function filterTokens(text) {
  const characters = [...text];
  const tokens = [];
  let at = 0;
  while (at < characters.length) {
    const rest = characters.slice(at).join("");
    const space = rest.match(/^\s+/);
    if (space) {
      at += [...space[0]].length;
      continue;
    }
    if (rest.startsWith("\"") && rest.indexOf("\"", 1) < 0) throw new FilterError(at + 1, "the string has no closing quote");
    const token = rest.match(/^(?:&&|\|\||[=!<>]=|[()!<>]|"[^"]*"|[\p{L}\p{N}._:+\-/]+)/u)?.[0];
    if (!token) throw new FilterError(at + 1, `\`${characters[at]}\` is not part of the language`);
    tokens.push([at + 1, token]);
    at += [...token].length;
  }
  return tokens;
}

function present(field) {
  if (["src", "dst", "addr"].includes(field)) return (input) => Boolean(input.addresses);
  if (field === "opcode") return (input) => Boolean(input.opcode);
  return (input) => input.numbers?.[field] !== undefined;
}

function filterNumber(token) {
  if (/^0x[0-9a-f]+$/i.test(token) || /^\d+(\.\d*)?(e[+-]?\d+)?$/i.test(token)) return Number(token);
  return null;
}

function comparison(field, operator, token, fail) {
  if (token === undefined || ["&&", "||", "(", ")"].includes(token)) fail(`a value for ${field} is missing`);
  const isEquality = operator === "==" || operator === "!=";
  if (["src", "dst", "addr"].includes(field)) {
    if (!/^\d{1,3}(\.\d{1,3}){3}$/.test(token) && !(token.includes(":") && /^[0-9a-f:.]+$/i.test(token))) fail(`\`${token}\` is no IP address`);
    if (!isEquality) fail(`addresses are compared with == and !=, not otherwise: ${field}`);
    const wanted = token.toLowerCase();
    return ({ addresses }) => {
      if (!addresses) return false;
      const found = field === "src" ? addresses[0] === wanted : field === "dst" ? addresses[1] === wanted : addresses.includes(wanted);
      return found === (operator === "==");
    };
  }
  const number = filterNumber(token);
  if (field === "opcode" && (number === null || operator === "contains")) {
    if (!isEquality && operator !== "contains") fail("names of opcodes are compared with ==, != and contains");
    const wanted = token.replace(/^"|"$/g, "").toUpperCase();
    return ({ opcode }) => {
      if (!opcode) return false;
      if (operator === "contains") return opcode.includes(wanted);
      return (opcode === wanted || opcode.slice(opcode.lastIndexOf(" ") + 1) === wanted) === (operator === "==");
    };
  }
  if (operator === "contains") fail(`contains is for names of opcodes; compare ${field} with a number`);
  const compare = COMPARISONS[operator];
  if (field === "psn" && /^[+-]/.test(token)) {
    if (!/^[+-]\d+$/.test(token)) fail(`\`${token}\` is no number`);
    const wanted = Number(token);
    return ({ relative_psn: psn }) => psn !== undefined && psn !== null && compare(psn, wanted === 0 ? 0 : wanted);
  }
  if (number === null) fail(`\`${token}\` is no number; ${field} is compared with one`);
  return ({ numbers }) => {
    const values = numbers?.[field] ?? [];
    if (values.length === 0) return false;
    return operator === "!=" ? values.every((value) => value !== number) : values.some((value) => compare(value, number));
  };
}

function unknownField(word) {
  const names = [...FILTER_FIELDS.flat(), ...FILTER_FLAGS];
  const [distance, name] = names.map((name) => [editDistance(word, name), name]).reduce((best, next) => (next[0] < best[0] ? next : best));
  if (distance <= Math.max(2, Math.floor(word.length / 4))) return `unknown field \`${word}\`; did you mean ${name}?`;
  return `unknown field \`${word}\`; some fields are qp, psn, opcode and src, some words are nak and retransmission`;
}

function editDistance(one, other) {
  let before = Array.from({ length: other.length + 1 }, (_, at) => at);
  for (let row = 1; row <= one.length; row++) {
    const line = [row];
    for (let at = 1; at <= other.length; at++) {
      line[at] = Math.min(before[at] + 1, line[at - 1] + 1, before[at - 1] + (one[row - 1] === other[at - 1] ? 0 : 1));
    }
    before = line;
  }
  return before[other.length];
}
