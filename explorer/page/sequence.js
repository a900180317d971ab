// PSNs over time: sent, retransmitted, lost and acknowledged packets.

import { el, replace } from "./dom.js";
import { countText, psnDistance } from "./words.js";
import { AGAIN, KIND, LOST, NO_PSN } from "./run.js";
import { app, currentConnection, currentRun, look } from "./state.js";
import { Chart, valueAxis } from "./chart.js";

/** The requests of one side of a connection, as points. */
class Track {
  constructor(run, connection, side) {
    this.run = run;
    this.connection = connection;
    this.side = side;
    this.read = 0;
    this.sent = [];
    this.answers = [];
    this.high = 1;
    this.update();
  }

  update() {
    const { run, connection, side } = this;
    const rows = connection.rows;
    const [own, peer] = side ? [connection.ends[1], connection.ends[0]] : connection.ends;
    const zero = run.ends[own].zero;
    for (; this.read < rows.length; this.read++) {
      const event = rows.values[this.read];
      if (run.kind.values[event] !== KIND.SENT || run.psn.values[event] === NO_PSN) continue;
      const response = run.responses[run.opcode.values[event]];
      const at = run.end_.values[event];
      if (at === own && !response) {
        this.sent.push(event);
        this.high = Math.max(this.high, psnDistance(run.psn.values[event], zero));
      } else if (at === peer && response && !run.opcodes.words[run.opcode.values[event]].endsWith("CNP")) {
        this.answers.push(event);
        this.high = Math.max(this.high, psnDistance(run.psn.values[event], zero));
      }
    }
  }
}

const tracks = new Map();

function trackOf(run, connection, side) {
  const key = `${app.runs.indexOf(run)}/${connection.index}/${side}`;
  let track = tracks.get(key);
  if (!track || track.run !== run) tracks.set(key, (track = new Track(run, connection, side)));
  track.update();
  return track;
}

export class Sequence {
  constructor() {
    this.chart = new Chart((context, plane) => this.paint(context, plane), (x, y, plane) => this.pick(x, y, plane), "PSNs over time");
    this.bar = el("div", { class: "chart-bar" });
    this.element = el("div", { class: "chart-view" }, this.bar, this.chart.canvas);
  }

  draw() {
    const run = currentRun();
    const connection = currentConnection();
    if (!connection) return replace(this.bar, el("p", { class: "empty" }, "No connection to draw."));
    const side = (number) => el("button", {
      class: "chip" + (app.state.side === number ? " on" : ""), "aria-pressed": String(app.state.side === number),
      onclick: () => look({ side: number, sel: app.state.sel }),
    }, "requests of " + run.ends[connection.ends[number]].name);
    replace(this.bar, side(0), side(1), el("span", { class: "legend" },
      el("i", { class: "key sent" }), "sent", el("i", { class: "key again" }), "retransmitted", el("i", { class: "key lost" }), "lost",
      el("i", { class: "key acked" }), "acknowledged", el("i", { class: "key nak" }), "NAK"),
    el("span", { class: "hint" }, "wheel or pinch: zoom · drag: move · double click: all"));
    this.chart.draw();
  }

  paint(context, plane) {
    const run = currentRun();
    const connection = currentConnection();
    if (!connection) return;
    const track = trackOf(run, connection, app.state.side ? 1 : 0);
    const { colour } = plane;
    const zero = run.ends[connection.ends[app.state.side ? 1 : 0]].zero;
    const time = (event) => run.time.values[event];
    const psn = (event) => psnDistance(run.psn.values[event], zero);
    const span = visibleSpan(track, plane, time, psn);
    const y = valueAxis(plane, plane.top + 8, plane.bottom - 8, span[0], span[1], (value) =>
      Number.isInteger(value) && value >= 0 ? "+" + countText(Math.abs(value)) : "", 1);
    plane.y = y;
    if (track.sent.length === 0) {
      context.fillStyle = colour.muted;
      context.textAlign = "center";
      context.fillText("This side asked for nothing.", (plane.left + plane.right) / 2, plane.height / 2);
      return;
    }
    context.save();
    context.beginPath();
    context.rect(plane.left - 8, 0, plane.right - plane.left + 16, plane.bottom + 6);
    context.clip();
    ackLine(context, plane, run, track, time, psn, y);
    // One mark per pixel is enough.
    let [lastX, lastY] = [-1, -1];
    const [first, last] = rangeOf(track.sent, plane, time);
    const size = last - first < 200 ? 8 : last - first < 4000 ? 4 : 2;
    for (let at = first; at < last; at++) {
      const event = track.sent[at];
      const flags = run.flags.values[event];
      const [px, py] = [plane.x(time(event)), y(psn(event))];
      const special = flags & (AGAIN | LOST);
      if (!special && Math.round(px) === lastX && Math.round(py) === lastY) continue;
      [lastX, lastY] = [Math.round(px), Math.round(py)];
      if (flags & LOST) cross(context, px, py, 6, colour.red);
      else if (flags & AGAIN) ring(context, px, py, Math.min(size, 4) + 1, colour.orange);
      else {
        context.fillStyle = colour.blue;
        context.fillRect(px - size / 2, py - size / 2, size, size);
      }
      if (event === app.state.sel) ring(context, px, py, 10, colour.accent);
    }
    context.restore();
  }

  pick(x, y, plane) {
    const run = currentRun();
    const connection = currentConnection();
    if (!connection || !plane?.y) return;
    const track = trackOf(run, connection, app.state.side ? 1 : 0);
    const zero = run.ends[connection.ends[app.state.side ? 1 : 0]].zero;
    let [best, distance] = [-1, 900];
    for (const event of [...slice(track.sent, plane, run, x), ...slice(track.answers, plane, run, x)]) {
      const dx = plane.x(run.time.values[event]) - x;
      const dy = plane.y(psnDistance(run.psn.values[event], zero)) - y;
      if (dx * dx + dy * dy < distance) [best, distance] = [event, dx * dx + dy * dy];
    }
    if (best >= 0) look({ sel: best });
  }
}

/** The part of a list of events whose times are visible. */
function rangeOf(events, plane, time) {
  const find = (wanted) => {
    let [low, high] = [0, events.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (time(events[middle]) < wanted) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  return [Math.max(0, find(plane.from) - 1), Math.min(events.length, find(plane.to) + 1)];
}

function slice(events, plane, run, x) {
  const near = { from: plane.time(x - 30), to: plane.time(x + 30) };
  const [first, last] = rangeOf(events, near, (event) => run.time.values[event]);
  return events.slice(first, Math.min(last, first + 20000));
}

function visibleSpan(track, plane, time, psn) {
  if (app.state.from < 0) return [-0.04 * track.high, track.high * 1.05];
  const [first, last] = rangeOf(track.sent, plane, time);
  let [low, high] = [Infinity, -Infinity];
  for (let at = first; at < last; at++) {
    const value = psn(track.sent[at]);
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, track.high];
  const pad = Math.max(2, (high - low) * 0.06);
  return [low - pad, high + pad];
}

function ackLine(context, plane, run, track, time, psn, y) {
  const { colour } = plane;
  const [first, last] = rangeOf(track.answers, plane, time);
  context.strokeStyle = colour.green;
  context.lineWidth = 2;
  context.beginPath();
  let high = first === 0 ? -1 : null;
  if (first === 0) context.moveTo(Math.max(plane.left, plane.x(0)), y(-1));
  for (let at = Math.max(0, first - 50); at < last; at++) {
    const event = track.answers[at];
    const syndrome = run.syndromes.words[run.syndrome.values[event]];
    const refused = syndrome && syndrome !== "ack";
    const arrival = run.link.values[event];
    const px = plane.x(arrival >= 0 ? run.time.values[arrival] : time(event));
    if (refused || run.flags.values[event] & LOST) continue;
    const value = psn(event);
    if (high === null) context.moveTo(px, y(value));
    else if (value > high) {
      context.lineTo(px, y(high));
      context.lineTo(px, y(value));
    }
    high = high === null ? value : Math.max(high, value);
  }
  if (high !== null) context.lineTo(Math.min(plane.right, plane.x(run.end)), y(high));
  context.stroke();
  context.lineWidth = 1;
  for (let at = first; at < last; at++) {
    const event = track.answers[at];
    const syndrome = run.syndromes.words[run.syndrome.values[event]];
    if (!syndrome || syndrome === "ack") continue;
    const [px, py] = [plane.x(time(event)), y(psn(event))];
    context.fillStyle = colour.red;
    context.beginPath();
    context.moveTo(px, py - 7);
    context.lineTo(px + 7, py + 5);
    context.lineTo(px - 7, py + 5);
    context.fill();
    if (event === app.state.sel) ring(context, px, py, 11, colour.accent);
  }
}

function cross(context, x, y, size, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 2.5;
  context.beginPath();
  context.moveTo(x - size, y - size);
  context.lineTo(x + size, y + size);
  context.moveTo(x + size, y - size);
  context.lineTo(x - size, y + size);
  context.stroke();
  context.lineWidth = 1;
}

export function ring(context, x, y, radius, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.stroke();
  context.lineWidth = 1;
}
