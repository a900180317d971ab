// The ladder of a connection: a rail for each queue pair, a bracket for each work request, an arrow for each packet.

import { el, replace, svg } from "./dom.js";
import { plural, timeDigits, timeText, timeUnit } from "./words.js";
import { AGAIN, FAULTED, KIND, LOST, MARKED } from "./run.js";
import { app, filteredEvents, look } from "./state.js";
import { faultText, packetDetail, packetLabel, packetMark, sentence, toneMark, toneOf, whoOf } from "./say.js";
import { Rows } from "./rows.js";

const LANES = 5;

/** How wide a character of the ladder is. */
function characterWidth() {
  return parseFloat(getComputedStyle(document.documentElement).fontSize) * 0.9 * 0.605;
}

/** A background for text on a line. */
function cloth(x, middle, characters, toRight) {
  const width = characters * characterWidth() + 10;
  return svg("rect", { class: "cloth", x: toRight ? x - 5 : x - width + 5, y: middle - 9, width, height: 18 });
}

export class Ladder {
  /** `which()` gives `{ run, connection, number }`; `number` is the run's. */
  constructor(which) {
    this.which = which;
    this.sheet = svg("svg", { class: "ladder-sheet", "aria-label": "Ladder" });
    this.heads = el("div", { class: "ladder-heads" });
    this.unit = el("span", { class: "ladder-unit" });
    this.rows = new Rows(() => this.source(), this.sheet);
    this.element = el("div", { class: "ladder" }, this.heads, this.rows.element);
    this.shown = -1;
  }

  list() {
    const { run, connection } = this.which();
    if (!connection) return { events: new Uint32Array(0), length: 0, places: null };
    const { rows } = connection;
    return filteredEvents(run, "ladder" + connection.index, rows.values, rows.length);
  }

  /** How many rows are shown: in step mode those up to the selection. */
  length(list) {
    const { number } = this.which();
    if (!app.state.step || app.state.run !== number) return list.length;
    return rowOf(list, app.state.sel) + 1;
  }

  source() {
    const { run, connection } = this.which();
    const list = this.list();
    return {
      length: this.length(list),
      stamp: connection ? `${connection.index}/${list.length}/${run.version}/${app.state.step ? app.state.sel : ""}/${list.stamp ?? ""}` : "",
      draw: (first, last, height, offset) => this.drawRows(list, first, last, height, offset),
      mark: (row) => {
        const event = list.events[row];
        const kind = run.kind.values[event];
        if (run.flags.values[event] & LOST || kind === KIND.REFUSED || run.flags.values[event] & 16) return 2;
        return run.flags.values[event] & (AGAIN | FAULTED) || run.syndrome.values[event] > 0 && run.syndromes.words[run.syndrome.values[event]] !== "ack" ? 1 : 0;
      },
    };
  }

  draw() {
    const { run, connection, number } = this.which();
    if (!connection) {
      replace(this.heads, el("p", { class: "empty" }, run.isComplete ? "No connection to draw." : "Reading…"));
      replace(this.sheet);
      return;
    }
    const head = (side) => {
      const end = run.ends[connection.ends[side]];
      const address = run.header?.vantage_points.find((point) => point.host === run.hosts.words[end.host])?.address ?? "";
      return el("div", { class: "ladder-head " + (side ? "right" : "left") },
        el("b", {}, end.name), el("span", {}, run.source === "capture" ? "" : ` ${address} qp ${end.qp || "?"}`));
    };
    replace(this.heads, this.unit, head(0), el("span", { class: "ladder-service" }, `${connection.service} · ${plural(connection.packets, "packet")}`), head(1));
    const isMine = app.state.run === number;
    if (isMine && app.state.sel >= 0 && this.shown !== app.state.sel) {
      const row = rowOf(this.list(), anchor(run, app.state.sel));
      if (row >= 0) this.rows.reveal(row);
    }
    this.shown = isMine ? app.state.sel : -1;
    this.rows.sticks = Boolean(app.connection) && app.state.sel < 0;
    this.rows.draw();
  }

  drawRows(list, first, last, height, offset) {
    const { run, connection, number } = this.which();
    const width = this.sheet.clientWidth || 600;
    const narrow = width < 620;
    const lane = narrow ? 5 : 9;
    const [unit, unitName] = timeUnit(run.end);
    const digits = timeDigits(last - first, (row) => run.time.values[list.events[first + row]], run.end);
    // The first row has the unit too; a narrow ladder has it in its head.
    const timeLength = (run.end / unit).toFixed(digits).length + (narrow ? 0 : unitName.length + 1);
    const timeWidth = Math.max(narrow ? 36 : 84, timeLength * characterWidth() * 0.9 + 6);
    const left = timeWidth + 10 + LANES * lane;
    const right = width - LANES * lane - (narrow ? 4 : 10);
    this.heads.style.paddingLeft = left - (narrow ? 6 : 12) + "px";
    this.heads.style.paddingRight = width - right + "px";
    this.unit.textContent = narrow ? unitName : "";
    const parts = [];
    const selected = app.state.run === number ? anchor(run, app.state.sel) : -1;
    let lastTime = -1;
    for (let row = first; row < last; row++) {
      const event = list.events[row];
      const y = offset + (row - first) * height;
      const middle = y + height / 2;
      const time = run.time.values[event];
      const group = svg("g", { class: "step" + (event === selected ? " selected" : ""), onclick: () => look({ run: number, sel: event }) });
      group.append(svg("rect", { class: "step-area", x: 0, y, width, height }));
      if (time !== lastTime) {
        const text = (time / unit).toFixed(digits) + (row === first && !narrow ? " " + unitName : "");
        group.append(svg("text", { class: "time", x: timeWidth, y: middle }, text));
      }
      lastTime = time;
      this.brackets(group, run, connection, list, row, event, { y, middle, height, left, right, lane });
      if (run.kind.values[event] === KIND.SENT) this.arrow(group, run, connection, event, { middle, left, right, narrow });
      else this.note(group, run, connection, event, { middle, left, right });
      parts.push(group);
    }
    replace(this.sheet, parts);
    this.sheet.setAttribute("aria-label", `Ladder, rows ${first + 1} to ${last} of ${list.length}`);
  }

  brackets(group, run, connection, list, row, event, { y, middle, height, left, right, lane: width }) {
    group.append(svg("line", { class: "rail", x1: left, x2: left, y1: y, y2: y + height }));
    group.append(svg("line", { class: "rail", x1: right, x2: right, y1: y, y2: y + height }));
    const place = list.places ? list.places[row] : row;
    const mask = connection.lanes.values[place];
    const own = run.work.values[event];
    const work = own >= 0 && (run.works[own].started === event || run.works[own].ended === event) ? run.works[own] : null;
    for (let side = 0; side < 2; side++) {
      for (let lane = 0; lane < LANES; lane++) {
        const x = side ? right + (lane + 1) * width - 3 : left - (lane + 1) * width + 3;
        const isHere = work && run.ends[work.end].index === connection.ends[side] && Math.min(work.lane, LANES - 1) === lane;
        const starts = isHere && work.started === event;
        const ends = isHere && work.ended === event;
        if (starts || ends) {
          const failed = ends && work.status !== "SUCCESS";
          const from = starts ? middle : y;
          group.append(svg("path", {
            class: "bracket" + (failed ? " failed" : ""),
            d: `M${side ? x - width + 3 : x + width - 3} ${middle} H${x} M${x} ${from} V${starts ? y + height : middle}`,
          }));
        } else if (mask & (1 << (lane + 8 * side))) {
          group.append(svg("line", { class: "bracket", x1: x, x2: x, y1: y, y2: y + height }));
        }
      }
    }
  }

  arrow(group, run, connection, event, { middle, left, right, narrow }) {
    const fromLeft = run.end_.values[event] === connection.ends[0];
    const flags = run.flags.values[event];
    const lost = flags & LOST;
    const tone = toneOf(run, event);
    const [start, goal] = fromLeft ? [left, right] : [right, left];
    const direction = fromLeft ? 1 : -1;
    const { label, characters } = this.label(run, event, tone, Math.floor((right - left - 40) / characterWidth()), narrow);
    // The label of a lost packet ends before its cross.
    const labelWidth = Math.min(Math.abs(goal - start) - 8, 30 + characters * characterWidth());
    const end = lost ? start + direction * Math.max(Math.abs(goal - start) * 0.56, labelWidth) : goal;
    const [y1, y2] = [middle - 3, lost ? middle + 1 : middle + 4];
    const isAck = run.opcodes.words[run.opcode.values[event]].endsWith("ACKNOWLEDGE");
    const kind = `arrow ${tone}${isAck ? " ack" : ""}${flags & 1 ? " again" : ""}`;
    group.append(svg("line", { class: kind, x1: start, y1, x2: end - (lost ? 0 : 7 * direction), y2 }));
    if (lost) group.append(svg("path", { class: "cross", d: `M${end - 6} ${y2 - 6} l12 12 m0 -12 l-12 12` }));
    else group.append(svg("path", { class: kind + " head", d: `M${end} ${y2} l${-9 * direction} -4.5 v9 z` }));
    for (const [name, value] of Object.entries({ x: start + 16 * direction, y: middle, "text-anchor": fromLeft ? "start" : "end" })) label.setAttribute(name, value);
    group.append(cloth(start + 16 * direction, middle, characters, fromLeft), label);
    const remarks = flags & FAULTED ? (run.faults.get(event) ?? []).map((fault) => faultText(run, fault)) : [];
    const arrived = run.link.values[event];
    const late = !lost && arrived >= 0 ? run.time.values[arrived] - run.time.values[event] : 0;
    if (remarks.length > 0) {
      const remark = (lost ? "" : "⚡ ") + remarks.join("; ");
      // The remark about a lost packet follows its cross.
      const room = lost ? Math.floor((Math.abs(goal - end) - 24) / characterWidth()) : narrow ? 1 : remark.length;
      if (lost && room < 6) return;
      if (!lost) group.append(cloth(end - 16 * direction, middle, Math.min(room, remark.length) + 1, !fromLeft));
      group.append(svg("text", {
        class: "fault", x: end + (lost ? 12 * direction : -16 * direction), y: middle,
        "text-anchor": (lost ? fromLeft : !fromLeft) ? "start" : "end",
      }, remark.length > room ? remark.slice(0, Math.max(1, room - 1)) + (room > 1 ? "…" : "") : remark));
    } else if (late > 0 && !narrow) {
      group.append(cloth(goal - 14 * direction, middle, timeText(late).length, !fromLeft));
      group.append(svg("text", {
        class: "late", x: goal - 14 * direction, y: middle, "text-anchor": fromLeft ? "end" : "start",
      }, "+" + timeText(late)));
    }
  }

  /** The text on an arrow, of at most `room` characters. */
  label(run, event, tone, room, narrow) {
    const mark = packetMark(run, event);
    const name = (mark ? mark + " " : "") + packetLabel(run, event);
    const label = svg("text", { class: "label " + tone }, svg("tspan", { class: "label-name" }, name.length > room ? name.slice(0, room - 1) + "…" : name));
    const detail = packetDetail(run, event);
    if (detail && !narrow) label.append(svg("tspan", { class: "label-detail", dx: "8" }, detail));
    if (run.flags.values[event] & MARKED) label.append(svg("tspan", { class: "label-mark", dx: "8" }, "⚑ CE"));
    return { label, characters: label.textContent.length + label.childElementCount - 1 };
  }

  note(group, run, connection, event, { middle, left, right }) {
    const atLeft = run.end_.values[event] === connection.ends[0];
    const tone = toneOf(run, event);
    const mark = toneMark(tone);
    // Members of a group share its side.
    const who = connection.ends.includes(run.end_.values[event]) ? "" : whoOf(run, event) + ": ";
    const text = (mark ? mark + " " : "") + who + sentence(run, event);
    const room = Math.floor((right - left - 30) / 7.7);
    group.append(svg("circle", { class: "dot " + tone, cx: atLeft ? left : right, cy: middle, r: 4 }));
    group.append(svg("text", {
      class: "note " + tone, x: atLeft ? left + 14 : right - 14, y: middle, "text-anchor": atLeft ? "start" : "end",
    }, text.length > room ? text.slice(0, room - 1) + "…" : text));
  }
}

/** The row of an event in an ascending list, or that of the last one before it. */
export function rowOf(list, event) {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list.events[middle] <= event) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** The event of a ladder that represents another: the sent packet for a received one, the packet of a fault. */
export function anchor(run, event) {
  if (event < 0 || event >= run.length) return -1;
  const kind = run.kind.values[event];
  const linked = run.link.values[event];
  return (kind === KIND.RECEIVED || kind === KIND.FAULT) && linked >= 0 ? linked : event;
}
