// Throughput, rates, alpha, queues, pauses and CNPs on one time axis.

import { el, replace } from "./dom.js";
import { countText, rateText } from "./words.js";
import { AGAIN, INFERRED_LOST, KIND, LOST } from "./run.js";
import { app, currentRun, look } from "./state.js";
import { Chart, valueAxis } from "./chart.js";

const LANE_GAP = 14;

export class Timeline {
  constructor() {
    this.chart = new Chart((context, plane) => this.paint(context, plane), (x, y, plane) => this.pick(x, y, plane), "Rates, queues, pauses and marks over time");
    this.bar = el("div", { class: "chart-bar" });
    this.element = el("div", { class: "chart-view" }, this.bar, this.chart.canvas);
  }

  draw() {
    const run = currentRun();
    const has = run.series.size > 0 || run.spans.size > 0;
    replace(this.bar, el("span", { class: "legend" }, "all lanes have one time axis"),
      !has && el("span", { class: "hint" }, "This run has no rates, queues or pauses; throughput and marks are counted from its packets."),
      el("span", { class: "hint" }, "wheel: zoom · drag: move · double click: all"));
    this.chart.draw();
  }

  paint(context, plane) {
    const run = currentRun();
    const lanes = [throughputLane(run, plane), marksLane(run, plane), ...seriesLanes(run), ...pauseLanes(run)];
    const total = lanes.reduce((sum, lane) => sum + lane.weight, 0);
    const room = plane.bottom - plane.top - LANE_GAP * lanes.length;
    let top = plane.top + 4;
    for (const lane of lanes) {
      const height = (room * lane.weight) / total;
      context.textAlign = "left";
      context.fillStyle = plane.colour.text;
      context.fillText(lane.title, plane.left + 6, top + 6);
      lane.paint(context, plane, top + 14, top + height);
      top += height + LANE_GAP;
    }
  }

  pick(x, _, plane) {
    const run = currentRun();
    const event = Math.min(run.length - 1, run.at(plane.time(x)));
    if (event >= 0) look({ sel: event });
  }
}

/** More lines cannot be distinguished; then one line is the sum of all. */
const MOST_LINES = 6;

/** Payload per time that every host sends, as steps. */
function throughputLane(run, plane) {
  const [first, last] = [run.at(plane.from), Math.min(run.length, run.at(plane.to) + 1)];
  const hosts = new Set();
  let packets = 0;
  for (let event = first; event < last; event++) {
    if (run.kind.values[event] !== KIND.SENT || run.payload.values[event] === 0) continue;
    packets++;
    hosts.add(run.host.values[event]);
  }
  const isAll = hosts.size > MOST_LINES;
  // A packet counts where it starts, so a step is wide enough for several.
  const bins = Math.max(8, Math.min(Math.floor((plane.right - plane.left) / 6), Math.floor(packets / Math.max(1, hosts.size) / 6)));
  const width = (plane.to - plane.from) / bins;
  const sums = new Map();
  for (let event = first; event < last; event++) {
    if (run.kind.values[event] !== KIND.SENT || run.payload.values[event] === 0) continue;
    const bin = Math.floor((run.time.values[event] - plane.from) / width);
    const host = isAll ? -1 : run.host.values[event];
    if (!sums.has(host)) sums.set(host, new Float64Array(bins));
    sums.get(host)[Math.max(0, Math.min(bins - 1, bin))] += run.payload.values[event];
  }
  let high = 1;
  for (const values of sums.values()) for (const value of values) high = Math.max(high, (value * 8e9) / width);
  return {
    title: isAll ? `payload sent by ${hosts.size} hosts` : "payload sent, by host", weight: 2,
    paint: (context, plane, top, bottom) => {
      const y = valueAxis(plane, top, bottom, 0, high * 1.05, rateText);
      const palette = [plane.colour.blue, plane.colour.orange, plane.colour.purple, plane.colour.green];
      let number = 0;
      for (const [host, values] of sums) {
        const colour = palette[number % 4];
        context.strokeStyle = colour;
        context.setLineDash(LINE_DASHES[number % 4]);
        context.lineWidth = 1.8;
        context.beginPath();
        values.forEach((value, bin) => {
          const [x, py] = [plane.x(plane.from + bin * width), y((value * 8e9) / width)];
          if (bin === 0) context.moveTo(x, py);
          else context.lineTo(x, py);
          context.lineTo(plane.x(plane.from + (bin + 1) * width), py);
        });
        context.stroke();
        context.setLineDash([]);
        context.lineWidth = 1;
        context.textAlign = "right";
        context.fillStyle = colour;
        // A narrow chart has the names below each other.
        const [across, down] = plane.width < 480 ? [0, 13] : [110, 0];
        if (!isAll) context.fillText("— " + run.hosts.words[host], plane.right - 4 - across * number, top - 8 + down * number);
        number++;
      }
    },
  };
}

const TICK_MARKS = [
  ["lost", "✕", "red", (run, event) => run.kind.values[event] === KIND.SENT && run.flags.values[event] & LOST],
  ["lost?", "◌", "orange", (run, event) => run.flags.values[event] & INFERRED_LOST],
  ["repeated", "↻", "orange", (run, event) => run.kind.values[event] === KIND.SENT && run.flags.values[event] & AGAIN],
  ["NAK", "⊘", "red", (run, event) => run.kind.values[event] === KIND.SENT && run.syndrome.values[event] > 0
    && run.syndromes.words[run.syndrome.values[event]] !== "ack"],
  ["CNP", "◆", "purple", (run, event) => run.kind.values[event] === KIND.SENT && run.opcodes.words[run.opcode.values[event]].endsWith("CNP")],
  ["failed", "!", "red", (run, event) => (run.flags.values[event] & 16) !== 0],
];

/** Marks for rare events: losses, retransmissions, NAKs, CNPs, failures. */
function marksLane(run, plane) {
  const found = TICK_MARKS.map(() => []);
  const last = Math.min(run.length, run.at(plane.to) + 1);
  for (let event = run.at(plane.from); event < last; event++) {
    if (run.flags.values[event] === 0 && run.syndrome.values[event] === 0 && run.kind.values[event] !== KIND.SENT) continue;
    for (let mark = 0; mark < TICK_MARKS.length; mark++) {
      const events = found[mark];
      if (!TICK_MARKS[mark][3](run, event)) continue;
      const x = Math.round(plane.x(run.time.values[event]));
      if (events.length === 0 || events[events.length - 1] !== x) events.push(x);
    }
  }
  return {
    title: "", weight: 1.4,
    paint: (context, plane, top, bottom) => {
      const height = (bottom - top + 14) / TICK_MARKS.length;
      TICK_MARKS.forEach(([name, sign, colour], number) => {
        const y = top - 14 + (number + 0.5) * height;
        context.textAlign = "right";
        context.fillStyle = plane.colour.muted;
        context.fillText(name + " " + sign, plane.left - 8, y);
        context.strokeStyle = plane.colour.line;
        context.beginPath();
        context.moveTo(plane.left, y);
        context.lineTo(plane.right, y);
        context.stroke();
        context.textAlign = "center";
        context.fillStyle = plane.colour[colour];
        const crowded = found[number].length > 200;
        for (const x of found[number]) {
          if (crowded) context.fillRect(x, y - height / 3, 1, (height * 2) / 3);
          else context.fillText(sign, x, y);
        }
      });
    },
  };
}

/** The most paused queues that are shown. */
const MOST_PAUSED = 16;

/** The pauses per queue and priority. */
function pauseLanes(run) {
  if (run.spans.size === 0) return [];
  const all = [...run.spans].map(([key, spans]) => [run.laneText(key), spans]).sort(([one], [other]) => one.localeCompare(other));
  const lanes = all.slice(0, MOST_PAUSED);
  return [{
    title: `paused ❚❚ (paused sender → sender of the pause)${all.length > lanes.length ? `: the first ${lanes.length} of ${all.length}` : ""}`,
    weight: 0.6 + lanes.length * 0.28,
    paint: (context, plane, top, bottom) => {
      const height = (bottom - top) / lanes.length;
      lanes.forEach(([name, spans], number) => {
        const y = top + number * height;
        context.fillStyle = plane.colour.orange;
        for (const span of spans) {
          if (span.to < plane.from || span.from > plane.to) continue;
          const [x1, x2] = [Math.max(plane.left, plane.x(span.from)), Math.min(plane.right, plane.x(span.to))];
          context.globalAlpha = 0.55;
          context.fillRect(x1, y + 2, Math.max(1.5, x2 - x1), height - 4);
          context.globalAlpha = 1;
          if (x2 - x1 > 18) context.fillRect(x1, y + 2, 3, height - 4);
        }
        context.fillStyle = plane.colour.muted;
        context.textAlign = "right";
        context.fillText(name.replace(", priority ", " p"), plane.left - 8, y + height / 2, plane.left - 10);
      });
    },
  }];
}

/** Bytes as scenarios write them. */
function decimalBytes(bytes) {
  return bytes >= 1e6 ? bytes / 1e6 + " MB" : bytes >= 1e3 ? bytes / 1e3 + " KB" : bytes + " B";
}

const MOST_DASHED = 5000;
const LINE_DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
const SERIES = ["rate", "alpha", "queue depth"];

/** A lane per measured quantity, with a line per queue pair or queue. */
function seriesLanes(run) {
  const groups = new Map();
  for (const series of run.series.values()) {
    if (!groups.has(series.name)) groups.set(series.name, []);
    groups.get(series.name).push(series);
  }
  return SERIES.filter((name) => groups.has(name)).map((name) => {
    const list = groups.get(name).sort((one, other) => one.of.localeCompare(other.of));
    let high = 0;
    for (const { values } of list) for (let at = 0; at < values.length; at++) high = Math.max(high, values.values[at]);
    const text = name === "rate" ? rateText : name === "queue depth" ? decimalBytes : (value) => countText(Number(value.toPrecision(4)));
    return {
      title: name, weight: 1.6,
      paint: (context, plane, top, bottom) => {
        const y = valueAxis(plane, top, bottom, 0, high * 1.05 || 1, text);
        const palette = [plane.colour.blue, plane.colour.orange, plane.colour.purple, plane.colour.green];
        list.slice(0, 12).forEach((series, number) => {
          context.strokeStyle = palette[number % 4];
          // Dashes make equal lines distinguishable. Long lines are not dashed, because that is slow.
          context.setLineDash(series.events.length < MOST_DASHED ? LINE_DASHES[number % 4] : []);
          context.lineWidth = 1.6;
          context.beginPath();
          let before = null;
          for (let at = 0; at < series.events.length; at++) {
            const x = plane.x(run.time.values[series.events.values[at]]);
            const value = y(series.values.values[at]);
            if (before === null) context.moveTo(x, value);
            else {
              context.lineTo(x, before);
              context.lineTo(x, value);
            }
            before = value;
          }
          context.stroke();
          context.setLineDash([]);
          context.lineWidth = 1;
          context.textAlign = "right";
          context.fillStyle = palette[number % 4];
          if (number < MOST_LINES) context.fillText("— " + run.laneText(series.of), plane.right - 4, top - 8 + number * 13);
        });
      },
    };
  });
}
