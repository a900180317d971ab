// Every event of the run, one line each.

import { el, replace } from "./dom.js";
import { timeDigits, timeText } from "./words.js";
import { CLASSES, KIND, LOST } from "./run.js";
import { app, currentRun, filteredEvents, look } from "./state.js";
import { sentence, toneMark, toneOf, whoOf } from "./say.js";
import { rowOf } from "./ladder.js";
import { Rows } from "./rows.js";

export class Events {
  constructor() {
    this.table = el("div", { class: "table-body" });
    this.rows = new Rows(() => this.source(), this.table);
    this.bar = el("div", { class: "chart-bar" });
    this.element = el("div", { class: "events" }, this.bar, this.rows.element);
    this.shown = -1;
  }

  list() {
    const run = currentRun();
    return filteredEvents(run, "events", null, run.length);
  }

  source() {
    const run = currentRun();
    const list = this.list();
    const at = (row) => (list.events ? list.events[row] : row);
    return {
      length: list.length, stamp: `${list.length}/${list.stamp ?? ""}`,
      mark: (row) => {
        const event = at(row);
        return run.flags.values[event] & (LOST | 16) || run.kind.values[event] === KIND.REFUSED ? 2 : 0;
      },
      draw: (first, last, height, offset) => {
        const lines = [];
        const digits = timeDigits(last - first, (row) => run.time.values[at(first + row)], run.end);
        for (let row = first; row < last; row++) {
          const event = at(row);
          const tone = toneOf(run, event);
          lines.push(el("div", {
            class: "line " + tone + (event === app.state.sel ? " selected" : ""), style: { top: offset + (row - first) * height + "px", height: height + "px" },
            onclick: () => look({ sel: event }),
          },
          el("span", { class: "number" }, event + 1),
          el("span", { class: "time" }, timeText(run.time.values[event], run.end, digits)),
          el("span", { class: "who" }, whoOf(run, event)),
          el("span", { class: "class" }, CLASSES[run.cls.values[event]]),
          el("span", { class: "what" }, (toneMark(tone) ? toneMark(tone) + " " : "") + sentence(run, event))));
        }
        replace(this.table, lines);
      },
    };
  }

  draw() {
    const list = this.list();
    replace(this.bar, el("span", { class: "legend" }, `${list.length.toLocaleString("en")} of ${currentRun().length.toLocaleString("en")} events`));
    if (app.state.sel !== this.shown && app.state.sel >= 0) {
      this.rows.reveal(list.events ? rowOf(list, app.state.sel) : app.state.sel);
    }
    this.shown = app.state.sel;
    this.rows.draw();
  }
}
