// Two runs: their figures, and both ladders.

import { el, replace } from "./dom.js";
import { bytesText, countText, timeText } from "./words.js";
import { AGAIN, KIND, LOST } from "./run.js";
import { app, look, redraw } from "./state.js";
import { Ladder } from "./ladder.js";

/** The figures of a run. */
function figures(run) {
  let [packets, again, lost, naks, acks, payload, repeated] = [0, 0, 0, 0, 0, 0, 0];
  for (let event = 0; event < run.length; event++) {
    if (run.kind.values[event] !== KIND.SENT) continue;
    packets++;
    const flags = run.flags.values[event];
    if (flags & LOST) lost++;
    payload += run.payload.values[event];
    if (flags & AGAIN) {
      again++;
      repeated += run.payload.values[event];
    }
    const syndrome = run.syndromes.words[run.syndrome.values[event]];
    if (syndrome === "ack") acks++;
    else if (syndrome) naks++;
  }
  const done = run.works.filter((work) => work.status === "SUCCESS");
  let last = 0;
  for (const work of done) last = Math.max(last, run.time.values[work.ended]);
  return [
    ["packets sent", packets, countText], ["of these retransmitted", again, countText], ["lost in the network", lost, countText],
    ["payload sent", payload, bytesText], ["of this retransmitted", repeated, bytesText], ["ACKs", acks, countText], ["NAKs", naks, countText],
    ["work requests completed", done.length, countText], ["failed completions", run.failures.length, countText],
    ["last success at", last, (value) => (done.length ? timeText(value, run.end) : "—")], ["end of the run", run.end, (value) => timeText(value)],
  ];
}

export class Compare {
  constructor(openFile) {
    this.table = el("div", { class: "compare-table", tabindex: "0", role: "group", "aria-label": "Figures" });
    this.ladders = [0, 1].map((number) => new Ladder(() => ({
      run: app.runs[number] ?? app.runs[0], number, connection: this.connection(number),
    })));
    this.sides = el("div", { class: "compare-sides" });
    this.element = el("div", { class: "compare" }, this.table, this.sides);
    this.openFile = openFile;
    this.stamp = "";
    // Both scroll together, in proportion to their lengths.
    this.ladders.forEach((ladder, number) => ladder.rows.element.addEventListener("wheel", () => {
      const other = this.ladders[1 - number].rows;
      other.scrollTo((ladder.rows.top / Math.max(1, ladder.rows.limit())) * other.limit());
    }, { passive: true }));
  }

  connection(number) {
    const run = app.runs[number];
    return run?.connections[Math.min(app.state.conn, run.connections.length - 1)] ?? null;
  }

  draw() {
    if (app.runs.length < 2) {
      this.stamp = "";
      replace(this.sides);
      return replace(this.table, el("div", { class: "empty" },
        el("p", {}, "The page has one run. Open the event log of another run to compare them, or create a report of both: softhca report RUN OTHER."),
        el("button", { class: "button", onclick: this.openFile }, "Open an event log…")));
    }
    const stamp = app.runs.map((run) => run.version).join("/");
    if (stamp !== this.stamp) {
      this.stamp = stamp;
      const [one, other] = app.runs.map(figures);
      replace(this.table, el("table", { class: "list" },
        el("thead", {}, el("tr", {}, el("td", {}), one.map(([name, value], at) => el("th", {}, (value !== other[at][1] ? "≠\u00a0" : "") + name)))),
        el("tbody", {}, [one, other].map((counts, number) => el("tr", {}, el("th", {}, app.runs[number].title),
          counts.map(([, value, text], at) => el("td", { class: one[at][1] !== other[at][1] ? "differs" : "" }, text(value))))))));
      replace(this.sides, this.ladders.map((ladder, number) => el("section", { onclick: () => app.state.run !== number && look({ run: number }) },
        el("h2", {}, app.runs[number].title), ladder.element)));
      redraw();
    }
    for (const ladder of this.ladders) ladder.draw();
  }
}
