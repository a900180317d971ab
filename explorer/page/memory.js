// The bytes of a memory region that were written, by time and writer.

import { el, replace } from "./dom.js";
import { bytesText, countText, hex, plural, timeDigits, timeText } from "./words.js";
import { app, currentRun, filteredEvents, look } from "./state.js";
import { Chart, valueAxis } from "./chart.js";
import { psnOf } from "./say.js";
import { rowOf } from "./ladder.js";
import { Rows } from "./rows.js";

export class MemoryView {
  constructor() {
    this.chart = new Chart((context, plane) => this.paint(context, plane), (x, y, plane) => this.pick(x, y, plane), "Written bytes over time");
    this.bar = el("div", { class: "chart-bar" });
    this.table = el("div", { class: "table-body" });
    this.rows = new Rows(() => this.source(), this.table);
    this.element = el("div", { class: "memory" }, this.bar, el("div", { class: "memory-split" }, this.chart.canvas, this.rows.element));
    this.shown = -1;
  }

  region() {
    const run = currentRun();
    return run.regions.get(app.state.region) ?? run.regions.values().next().value ?? null;
  }

  draw() {
    const run = currentRun();
    const region = this.region();
    if (!region) {
      this.element.classList.add("nothing");
      return replace(this.bar, el("p", { class: "empty" }, "The run has no event about written memory."));
    }
    this.element.classList.remove("nothing");
    const chips = [...run.regions].slice(0, 24).map(([key, other]) => el("button", {
      class: "chip" + (other === region ? " on" : ""), "aria-pressed": String(other === region), onclick: () => look({ region: key }),
    }, `${run.hosts.words[other.host]} key ${hex(other.key)}`, el("span", { class: "muted" }, " " + plural(other.writes.length, "write"))));
    const more = run.regions.size > 24 ? el("span", { class: "hint" }, `and ${run.regions.size - 24} more regions`) : null;
    replace(this.bar, chips, more, el("span", { class: "hint" }, "up: address · right: time · a bar is a range of bytes from the time it was written"));
    this.chart.draw();
    const list = this.list();
    if (app.state.sel !== this.shown) {
      const row = rowOf(list, app.state.sel);
      if (row >= 0) this.rows.reveal(row);
    }
    this.shown = app.state.sel;
    this.rows.draw();
  }

  list() {
    const region = this.region();
    if (!region) return { events: new Uint32Array(0), length: 0 };
    return filteredEvents(currentRun(), "memory" + region.key, region.writes.values, region.writes.length);
  }

  source() {
    const run = currentRun();
    const list = this.list();
    const region = this.region();
    return {
      length: list.length, stamp: `${region?.key}/${list.length}`, mark: () => 0,
      draw: (first, last, height, offset) => {
        const lines = [];
        const digits = timeDigits(last - first, (row) => run.time.values[list.events[first + row]], run.end);
        for (let row = first; row < last; row++) {
          const event = list.events[row];
          const address = region.address.values[list.places ? list.places[row] : row];
          const writer = run.peerOf(event);
          const length = run.payload.values[event];
          lines.push(el("div", {
            class: "line" + (event === app.state.sel ? " selected" : ""), style: { top: offset + (row - first) * height + "px", height: height + "px" },
            onclick: () => look({ sel: event }),
          },
          el("span", { class: "time" }, timeText(run.time.values[event], run.end, digits)),
          el("span", { class: "mono" }, `${hex(address)} … ${hex(address + length)}`),
          el("span", {}, bytesText(length)),
          el("span", {}, writer ? `by ${writer.name}, PSN ${psnOf(run, event)}` : "")));
        }
        replace(this.table, lines);
      },
    };
  }

  paint(context, plane) {
    const run = currentRun();
    const region = this.region();
    if (!region) return;
    const size = Math.max(1, region.to - region.from);
    const y = valueAxis(plane, plane.top + 8, plane.bottom - 6, 0, size, (value) => "+" + countText(Math.round(value)));
    plane.y = y;
    const palette = [plane.colour.blue, plane.colour.orange, plane.colour.purple, plane.colour.green];
    const writers = new Map();
    const count = region.writes.length;
    const step = Math.max(1, Math.floor(count / 60000));
    for (let at = 0; at < count; at += step) {
      const event = region.writes.values[at];
      const time = run.time.values[event];
      if (time > plane.to) break;
      const writer = run.peerOf(event)?.name ?? "?";
      if (!writers.has(writer)) writers.set(writer, palette[writers.size % 4]);
      const offset = region.address.values[at] - region.from;
      const [top, bottom] = [y(offset + run.payload.values[event]), y(offset)];
      const x = Math.max(plane.left, plane.x(time));
      // The last writer covers earlier ones.
      context.fillStyle = plane.colour.bg;
      context.fillRect(x, top, plane.right - x, Math.max(1, bottom - top));
      context.globalAlpha = 0.2;
      context.fillStyle = writers.get(writer);
      context.fillRect(x, top, plane.right - x, Math.max(1, bottom - top));
      context.globalAlpha = 1;
      context.fillRect(x, top, 3, Math.max(2, bottom - top));
      if (event === app.state.sel) {
        context.strokeStyle = plane.colour.accent;
        context.lineWidth = 2;
        context.strokeRect(x - 1, top - 1, plane.right - x, Math.max(3, bottom - top + 2));
        context.lineWidth = 1;
      }
    }
    let number = 0;
    context.textAlign = "right";
    for (const [writer, colour] of writers) {
      const [text, y] = ["▌ written by " + writer, plane.top + 16 + 18 * number++];
      context.fillStyle = plane.colour.bg;
      context.fillRect(plane.right - context.measureText(text).width - 12, y - 9, context.measureText(text).width + 10, 18);
      context.fillStyle = colour;
      context.fillText(text, plane.right - 6, y);
    }
  }

  pick(x, y, plane) {
    const run = currentRun();
    const region = this.region();
    if (!region || !plane?.y) return;
    const time = plane.time(x);
    // The last write to this address before this time.
    for (let at = region.writes.length - 1; at >= 0; at--) {
      const event = region.writes.values[at];
      if (run.time.values[event] > time) continue;
      const offset = region.address.values[at] - region.from;
      const [top, bottom] = [plane.y(offset + run.payload.values[event]), plane.y(offset)];
      if (y >= top - 2 && y <= bottom + 2) return look({ sel: event });
    }
  }
}
