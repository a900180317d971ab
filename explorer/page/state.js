// The state of the page: the selection that all views share, and the link that restores it.

import { dissect } from "./dissect.js";
import { FILTER_FIELDS, FilterError, looksLikeFilter, parseFilter } from "./filter.js";
import { AGAIN, CLASSES, DAMAGED, FAULTED, INFERRED_LOST, KIND, LOST, MARKED, NO_PSN } from "./run.js";
import { psnDistance } from "./words.js";

/** The state that a link keeps. It omits defaults. */
const DEFAULTS = {
  view: "ladder", run: 0, conn: 0, sel: -1, from: -1, to: -1, step: 0,
  q: "", host: "", qp: "", opcode: "", cls: "", region: "", side: 0,
  scenario: "", seed: "", text: "",
};
/** Milliseconds between two changes of the link. Chromium ignores all beyond 200 in ten seconds; a zoom makes 60 a second. */
const LINK_PAUSE = 100;
const NUMBERS = ["run", "conn", "sel", "from", "to", "step", "side"];

export const app = { meta: null, runs: [], state: { ...DEFAULTS }, listeners: [], scheduled: false, linkTimer: null };

export function currentRun() {
  return app.runs[app.state.run] ?? app.runs[0];
}

export function currentConnection() {
  const run = currentRun();
  return run.connections[app.state.conn] ?? null;
}

/** Changes the state, and soon the link. */
export function look(change) {
  Object.assign(app.state, change);
  if ("sel" in change && change.sel >= 0) follow(change);
  app.linkTimer ??= setTimeout(() => {
    app.linkTimer = null;
    history.replaceState(null, "", "#" + linkOf(app.state));
  }, LINK_PAUSE);
  redraw();
}

/** Selecting an event selects its connection too. */
function follow(change) {
  const run = currentRun();
  const conn = run.conn.values[change.sel];
  if (!("conn" in change) && change.sel < run.length && conn >= 0) app.state.conn = conn;
}

export function linkOf(state) {
  const parts = [];
  for (const [name, value] of Object.entries(DEFAULTS)) {
    if (state[name] !== value) parts.push(name + "=" + encodeURIComponent(state[name]));
  }
  return parts.join("&");
}

export function readLink() {
  clearTimeout(app.linkTimer);
  app.linkTimer = null;
  const state = { ...DEFAULTS };
  for (const part of location.hash.slice(1).split("&")) {
    const [name, value] = [part.slice(0, part.indexOf("=")), part.slice(part.indexOf("=") + 1)];
    if (!(name in DEFAULTS)) continue;
    try {
      const text = decodeURIComponent(value);
      state[name] = NUMBERS.includes(name) ? Number(text) || 0 : text;
    } catch {
      // A damaged part of a link keeps its default.
    }
  }
  app.state = state;
  redraw();
}

/** Draws once before the next frame, however often it is called. */
export function redraw() {
  if (app.scheduled) return;
  app.scheduled = true;
  requestAnimationFrame(() => {
    app.scheduled = false;
    for (const listener of app.listeners) listener();
  });
}

export function isFiltered() {
  const { q, host, qp, opcode, cls } = app.state;
  return Boolean(q || host || qp || opcode || cls);
}

/** A test for events that pass the filters; null if all pass. */
function makeFilter(run, { q, host, qp, opcode, cls }) {
  const tests = [];
  if (host) {
    const number = run.hosts.numbers.get(host) ?? -1;
    tests.push((index) => run.host.values[index] === number);
  }
  if (qp) {
    const ends = new Set(run.ends.filter((end) => end.name === qp).map((end) => end.index));
    tests.push((index) => ends.has(run.end_.values[index]));
  }
  if (opcode) {
    const number = run.opcodes.numbers.get(opcode) ?? -1;
    tests.push((index) => run.opcode.values[index] === number);
  }
  if (cls === "retransmission") tests.push((index) => run.flags.values[index] & AGAIN);
  else if (cls === "fault") tests.push((index) => run.kind.values[index] === KIND.FAULT || run.flags.values[index] & (LOST | FAULTED));
  else if (cls) {
    const number = CLASSES.indexOf(cls);
    tests.push((index) => run.cls.values[index] === number);
  }
  app.filterError = "";
  if (looksLikeFilter(q)) {
    try {
      const test = parseFilter(q);
      const words = [...q.matchAll(/[\w.]+/g)];
      const byteWord = words.find(([word]) => FILTER_FIELDS.some((names) => names[0] in BYTE_FIELDS && names.includes(word)));
      if (byteWord && !run.frames) {
        throw new FilterError(byteWord.index + 1, `${byteWord[0]} is in the bytes of packets, which this page does not have; softhca trace --filter searches a capture`);
      }
      tests.push((index) => run.kind.values[index] === KIND.SENT && test(filterInput(run, index, Boolean(byteWord))));
    } catch (error) {
      if (!(error instanceof FilterError)) throw error;
      app.filterError = `column ${error.column}: ${error.message}`;
      tests.push(() => false);
    }
    q = "";
  }
  for (const term of q.toLowerCase().split(/\s+/).filter(Boolean)) {
    const psn = term.match(/^(?:psn[:=])?([+-]\d+)$/);
    if (psn) {
      const wanted = Number(psn[1]);
      tests.push((index) => {
        const zero = run.zero(index);
        return run.psn.values[index] !== NO_PSN && zero >= 0 && psnDistance(run.psn.values[index], zero) === wanted;
      });
    } else {
      const found = textMatches(run, term);
      tests.push((index) => found[index] === 1);
    }
  }
  if (tests.length === 0) return null;
  return (index) => tests.every((test) => test(index));
}

/** What the filter language sees of a packet that was sent. */
function filterInput(run, index, hasBytes) {
  const data = run.entry(index).data;
  const { packet } = data;
  const name = packet.opcode.slice(packet.opcode.indexOf(" ") + 1);
  const [flags, response] = [run.flags.values[index], run.responses[run.opcode.values[index]]];
  const zero = run.zero(index);
  const syndrome = packet.syndrome ?? "";
  const words = {
    request: !response, response: response && name !== "CNP", send: name.startsWith("SEND"), write: name.startsWith("WRITE"),
    read: name.startsWith("READ"), atomic: /ATOMIC|FETCH_ADD|COMPARE_SWAP/.test(name), ack: name === "ACKNOWLEDGE" && syndrome === "ack",
    nak: syndrome !== "" && syndrome !== "ack", rnr: syndrome === "rnr-nak", cnp: name === "CNP", cm: packet.dest_qp === 1,
    ce: flags & MARKED, retransmission: flags & AGAIN, bad_icrc: flags & DAMAGED, gap: run.gaps.has(index),
    lost: flags & LOST || (run.faults.get(index) ?? []).some((fault) => run.flags.values[fault] & INFERRED_LOST),
  };
  const frame = run.frame(index);
  return {
    numbers: {
      ...(hasBytes && frame ? byteNumbers(frame) : {}), number: [frame?.number ?? index + 1], time: [run.time.values[index] / 1e9], qp: data.qp ? [packet.dest_qp, data.qp] : [packet.dest_qp],
      dest_qp: [packet.dest_qp], psn: [packet.psn], payload: [packet.payload], opcode: opcodeByte(packet.opcode),
    },
    addresses: [run.addressOf(run.host.values[index]), packet.peer], opcode: packet.opcode,
    relative_psn: zero >= 0 ? psnDistance(packet.psn, zero) : undefined, flags: Object.keys(words).filter((word) => words[word]),
  };
}

/** The number of an opcode, as a list that is empty if it is not known. */
function opcodeByte(name) {
  const at = app.meta.opcodes?.[name];
  return at === undefined ? [] : [at];
}

/** Fields that only the bytes of a packet have: the headers that may have them, and their name there. */
const BYTE_FIELDS = {
  port: [["UDP"], "source port"], ecn: [["IPv4", "IPv6", "GRH"], "ECN"], ack_req: [["BTH"], "ack request"], pad: [["BTH"], "pad count"], pkey: [["BTH"], "P_Key"],
  va: [["RETH", "AtomicETH"], "virtual address"], rkey: [["RETH", "AtomicETH"], "R_Key"], len: [["RETH"], "DMA length"], syndrome: [["AETH"], "syndrome"],
  msn: [["AETH"], "MSN"], qkey: [["DETH"], "Q_Key"], src_qp: [["DETH"], "source QP"], imm: [["ImmDt"], "immediate"],
};

function byteNumbers(frame) {
  const numbers = {};
  const headers = dissect(frame);
  for (const [name, [among, label]] of Object.entries(BYTE_FIELDS)) {
    const field = headers.find((header) => among.includes(header.name))?.fields.find((field) => field.name === label);
    if (field) numbers[name] = [Number(field.raw)];
  }
  return numbers;
}

/** The events whose line contains a word. */
function textMatches(run, term) {
  const found = new Uint8Array(run.length);
  let event = 0;
  for (const [number, chunk] of run.chunks.entries()) {
    const text = chunk.toLowerCase();
    let at = text.indexOf(term);
    while (at >= 0) {
      while (event < run.length && (run.chunk.values[event] < number
        || (run.chunk.values[event] === number && run.start.values[event] <= at))) event++;
      if (event > 0 && run.chunk.values[event - 1] === number) found[event - 1] = 1;
      const next = text.indexOf("\n", at);
      at = next < 0 ? -1 : text.indexOf(term, next);
    }
    while (event < run.length && run.chunk.values[event] <= number) event++;
  }
  return found;
}

const filtered = new Map();

/** The events of a list that pass the filters; cached until the filters or the list change. */
export function filteredEvents(run, name, events, length) {
  const { q, host, qp, opcode, cls } = app.state;
  if (!isFiltered()) return { events, length };
  const key = app.runs.indexOf(run) + name;
  const stamp = JSON.stringify([q, host, qp, opcode, cls, length, run.length]);
  const known = filtered.get(key);
  if (known?.stamp === stamp) return known;
  const filter = makeFilter(run, app.state);
  const kept = new Uint32Array(length);
  const places = new Uint32Array(length);
  let count = 0;
  for (let at = 0; at < length; at++) {
    const event = events ? events[at] : at;
    if (filter(event)) {
      places[count] = at;
      kept[count++] = event;
    }
  }
  const result = { stamp, events: kept.subarray(0, count), places: places.subarray(0, count), length: count };
  filtered.set(key, result);
  return result;
}
