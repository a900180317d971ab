// A chart over time that can be zoomed and moved. All charts share the time range.

import { colours, el, paint } from "./dom.js";
import { timeUnit } from "./words.js";
import { app, currentRun, look } from "./state.js";

const LEFT = 108, RIGHT = 14, BOTTOM = 26;

/** The times that charts show. */
export function shownTimes() {
  const run = currentRun();
  const { from, to } = app.state;
  const end = Math.max(1, run.end);
  return from >= 0 && to > from ? [from, to] : [-0.01 * end, end * 1.02];
}

/** Round numbers between two others, at least `least` apart. */
export function ticks(from, to, count, least = 0) {
  const rough = Math.max((to - from) / Math.max(1, count), least);
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1e-12)));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough) ?? power * 10;
  const found = [];
  for (let value = Math.ceil(from / step) * step; value <= to; value += step) found.push(value);
  return found;
}

export class Chart {
  /** `draw(context, plane)`; `pick(x, y, plane)` selects the nearest event; `label` names the chart. */
  constructor(draw, pick, label) {
    this.canvas = el("canvas", { class: "chart", tabindex: "0", role: "img", "aria-label": label });
    this.paintPlane = draw;
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const [from, to] = shownTimes();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const shift = (event.deltaX / this.width()) * (to - from);
        return look({ from: Math.max(0, from + shift), to: to + shift });
      }
      this.zoom([from, to], event.offsetX, Math.exp(event.deltaY * 0.002));
    }, { passive: false });
    let start = null;
    const fingers = new Map();
    let pinch = null;
    const span = () => {
      const [one, other] = fingers.values();
      return { middle: (one + other) / 2, apart: Math.max(20, Math.abs(one - other)) };
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") fingers.set(event.pointerId, event.offsetX);
      if (fingers.size === 2) {
        pinch = { times: shownTimes(), apart: span().apart };
        start = null;
        return;
      }
      start = { x: event.offsetX, times: shownTimes(), moved: false };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (fingers.has(event.pointerId)) fingers.set(event.pointerId, event.offsetX);
      if (pinch && fingers.size === 2) return this.zoom(pinch.times, span().middle, pinch.apart / span().apart);
      if (!start || event.buttons === 0) return;
      const [from, to] = start.times;
      const shift = ((start.x - event.offsetX) / this.width()) * (to - from);
      if (Math.abs(event.offsetX - start.x) > 4) start.moved = true;
      if (start.moved) look({ from: Math.max(0, from + shift), to: Math.max(0, from + shift) + (to - from) });
    });
    for (const end of ["pointerup", "pointercancel"]) this.canvas.addEventListener(end, (event) => {
      fingers.delete(event.pointerId);
      pinch = null;
    });
    this.canvas.addEventListener("pointerup", (event) => {
      if (start && !start.moved) pick?.(event.offsetX, event.offsetY, this.plane);
      start = null;
    });
    this.canvas.addEventListener("dblclick", () => look({ from: -1, to: -1 }));
  }

  /** Shows `factor` times the range around the time at `x`. */
  zoom([from, to], x, factor) {
    const middle = from + ((x - LEFT) / this.width()) * (to - from);
    const [low, high] = [middle - (middle - from) * factor, middle + (to - middle) * factor];
    if (high - low < 2) return;
    if (low <= 0 && high >= currentRun().end) look({ from: -1, to: -1 });
    else look({ from: Math.max(0, low), to: high });
  }

  width() {
    return Math.max(1, this.canvas.clientWidth - LEFT - RIGHT);
  }

  draw(bottom = BOTTOM) {
    paint(this.canvas, (context, width, height) => {
      const [from, to] = shownTimes();
      const plane = {
        context, width, height, from, to, left: LEFT, right: width - RIGHT, top: 8, bottom: height - bottom,
        colour: colours(),
      };
      plane.x = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT - RIGHT);
      plane.time = (x) => from + ((x - LEFT) / (width - LEFT - RIGHT)) * (to - from);
      this.plane = plane;
      context.font = `${Math.round(plane.colour.size * 0.8)}px ${plane.colour.font}`;
      context.textBaseline = "middle";
      if (bottom > 0) timeAxis(plane);
      this.paintPlane(context, plane);
      selectionLine(plane);
    });
  }
}

function timeAxis(plane) {
  const { context, colour } = plane;
  const [unit, name] = timeUnit(plane.to);
  context.textAlign = "center";
  for (const time of ticks(Math.max(0, plane.from), plane.to, (plane.right - plane.left) / 110)) {
    const x = plane.x(time);
    context.strokeStyle = colour.line;
    context.beginPath();
    context.moveTo(x, plane.top);
    context.lineTo(x, plane.bottom);
    context.stroke();
    context.fillStyle = colour.muted;
    context.fillText(Number((time / unit).toPrecision(7)) + " " + name, x, plane.bottom + 14);
  }
}

function selectionLine(plane) {
  const run = currentRun();
  const { sel } = app.state;
  if (sel < 0 || sel >= run.length) return;
  const x = plane.x(run.time.values[sel]);
  if (x < plane.left || x > plane.right) return;
  plane.context.strokeStyle = plane.colour.accent;
  plane.context.setLineDash([4, 4]);
  plane.context.beginPath();
  plane.context.moveTo(x, plane.top);
  plane.context.lineTo(x, plane.bottom);
  plane.context.stroke();
  plane.context.setLineDash([]);
}

/** A scale at the left with lines across. */
export function valueAxis(plane, top, bottom, low, high, text, least = 0) {
  const { context, colour } = plane;
  const y = (value) => bottom - ((value - low) / (high - low || 1)) * (bottom - top);
  context.textAlign = "right";
  for (const value of ticks(low, high, (bottom - top) / 28, least)) {
    context.strokeStyle = colour.line;
    context.beginPath();
    context.moveTo(plane.left, y(value));
    context.lineTo(plane.right, y(value));
    context.stroke();
    context.fillStyle = colour.muted;
    context.fillText(text(value), plane.left - 8, y(value));
  }
  return y;
}
