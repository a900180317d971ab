// The state of the page: the selection that all views share, and the link that restores it.

import { AGAIN, CLASSES, FAULTED, KIND, LOST, NO_PSN } from "./run.js";
import { psnDistance } from "./words.js";

/** The state that a link keeps. It omits defaults. */
const DEFAULTS = {
  view: "ladder", run: 0, conn: 0, sel: -1, from: -1, to: -1, step: 0,
  q: "", host: "", qp: "", opcode: "", cls: "", region: "", side: 0,
  scenario: "", seed: "", text: "",
};
const NUMBERS = ["run", "conn", "sel", "from", "to", "step", "side"];

export const app = { meta: null, runs: [], state: { ...DEFAULTS }, listeners: [], scheduled: false };

export function currentRun() {
  return app.runs[app.state.run] ?? app.runs[0];
}

export function currentConnection() {
  const run = currentRun();
  return run.connections[app.state.conn] ?? null;
}

/** Changes the state and the link. */
export function look(change) {
  Object.assign(app.state, change);
  if ("sel" in change && change.sel >= 0) follow(change);
  history.replaceState(null, "", "#" + linkOf(app.state));
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
