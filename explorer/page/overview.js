// The whole run in one strip: the number of events over time, and failures.

import { colours, el, paint } from "./dom.js";
import { timeText } from "./words.js";
import { KIND, LOST } from "./run.js";
import { app, currentRun, look } from "./state.js";

export class Overview {
  constructor() {
    this.canvas = el("canvas", { class: "overview", role: "img", title: "The whole run: click to go there", "aria-label": "Events and failures over the whole run" });
    this.bins = { stamp: "" };
    this.canvas.addEventListener("click", (event) => {
      const run = currentRun();
      const time = (event.offsetX / this.canvas.clientWidth) * run.end;
      const found = run.at(time);
      if (run.length > 0) look({ sel: Math.min(run.length - 1, found) });
    });
  }

  draw() {
    const run = currentRun();
    paint(this.canvas, (context, width, height) => {
      const colour = colours();
      const stamp = `${app.state.run}/${run.length}/${width}`;
      if (stamp !== this.bins.stamp) this.bins = { stamp, ...count(run, width) };
      const { packets, bad, high } = this.bins;
      for (let x = 0; x < width; x++) {
        if (packets[x] > 0) {
          const size = Math.max(1.5, (Math.log1p(packets[x]) / Math.log1p(high)) * (height - 14));
          context.fillStyle = colour.soft;
          context.fillRect(x, height - size, 1, size);
        }
        if (bad[x]) {
          context.fillStyle = colour.red;
          context.fillRect(x - 1, 0, 2.5, height);
        }
      }
      if (app.state.from >= 0 && run.end > 0) {
        context.strokeStyle = colour.accent;
        const [from, to] = [(app.state.from / run.end) * width, (app.state.to / run.end) * width];
        context.strokeRect(from, 0.5, Math.max(2, to - from), height - 1);
      }
      if (app.state.sel >= 0 && app.state.sel < run.length && run.end > 0) {
        const x = (run.time.values[app.state.sel] / run.end) * (width - 2);
        context.fillStyle = colour.accent;
        context.fillRect(x, 0, 2, height);
        context.beginPath();
        context.moveTo(x - 5, 0);
        context.lineTo(x + 7, 0);
        context.lineTo(x + 1, 8);
        context.fill();
      }
      context.font = `${Math.round(colour.size * 0.75)}px ${colour.font}`;
      context.fillStyle = colour.muted;
      context.textAlign = "right";
      context.fillText(timeText(run.end), width - 4, 11);
    });
  }
}

function count(run, width) {
  const [packets, bad] = [new Float64Array(width), new Uint8Array(width)];
  const scale = run.end > 0 ? (width - 1) / run.end : 0;
  let high = 1;
  for (let event = 0; event < run.length; event++) {
    const x = Math.floor(run.time.values[event] * scale);
    if (++packets[x] > high) high = packets[x];
    if (run.flags.values[event] & (LOST | 16) || run.kind.values[event] === KIND.REFUSED) bad[x] = 1;
  }
  return { packets, bad, high };
}
