// The state machines of both queue pairs, with their transitions.

import { el, replace, svg } from "./dom.js";
import { STATE_MEANINGS, timeText } from "./words.js";
import { KIND } from "./run.js";
import { app, currentConnection, currentRun, look } from "./state.js";
import { sentence } from "./say.js";

const PLACES = { RESET: [70, 60], INIT: [210, 60], RTR: [350, 60], RTS: [490, 60], SQD: [640, 60], SQE: [640, 175], ERR: [350, 175] };
const WAYS = [
  ["RESET", "INIT"], ["INIT", "RTR"], ["RTR", "RTS"], ["RTS", "SQD"], ["SQD", "RTS"], ["RTS", "SQE"], ["SQE", "RTS"],
  ["INIT", "ERR"], ["RTR", "ERR"], ["RTS", "ERR"], ["SQD", "ERR"], ["SQE", "ERR"], ["ERR", "RESET"],
];
const [BOX_WIDTH, BOX_HEIGHT] = [92, 42];

export class Machines {
  constructor() {
    this.element = el("div", { class: "machines", tabindex: "0", role: "group", "aria-label": "State machines" });
  }

  draw() {
    const run = currentRun();
    const connection = currentConnection();
    if (!connection) return replace(this.element, el("p", { class: "empty" }, "No connection to draw."));
    replace(this.element, connection.ends.map((end) => machine(run, run.ends[end])));
  }
}

function machine(run, end) {
  const until = app.state.sel >= 0 && app.state.sel < run.length ? app.state.sel : run.length;
  const gone = end.states.filter((change) => change.event <= until);
  // A queue pair that was connected before the log began sends requests in RTS only, and answers in RTR or RTS.
  const use = end.states.length === 0 ? usesOf(run, end) : {};
  const now = gone.length > 0 ? gone[gone.length - 1].to : end.states[0]?.from ?? (use.requests ? "RTS" : undefined);
  const went = new Map();
  gone.forEach((change, number) => went.set(change.from + ">" + change.to, number + 1));
  const known = new Set(end.states.flatMap((change) => [change.from, change.to]));
  if (use.answers) known.add("RTR").add("RTS");
  const drawing = svg("svg", { class: "machine", viewBox: "10 20 690 200", role: "img", "aria-label": `${end.name} is in ${now ?? "an unknown state"}` });
  for (const [from, to] of WAYS) drawing.append(way(from, to, went.get(from + ">" + to)));
  for (const [key, number] of went) {
    const [from, to] = key.split(">");
    if (PLACES[from] && PLACES[to] && !WAYS.some((way) => way[0] === from && way[1] === to)) drawing.append(way(from, to, number));
  }
  for (const [state, [x, y]] of Object.entries(PLACES)) {
    const kind = state === now ? " now" : known.has(state) ? " known" : "";
    drawing.append(svg("g", { class: "state" + kind + (state === "ERR" ? " error" : "") },
      svg("title", {}, STATE_MEANINGS[state]),
      svg("rect", { x: x - BOX_WIDTH / 2, y: y - BOX_HEIGHT / 2, width: BOX_WIDTH, height: BOX_HEIGHT, rx: 9 }),
      svg("text", { x, y: y + 1 }, (state === now ? "● " : "") + state)));
  }
  const list = end.states.map((change, number) => el("tr", {
    class: (change.event === app.state.sel ? "selected" : "") + (change.event > until ? " later" : ""),
    onclick: () => look({ sel: change.event }),
  }, el("td", {}, number + 1), el("td", {}, timeText(run.time.values[change.event], run.end)), el("td", {}, sentence(run, change.event))));
  return el("section", { class: "card" },
    el("h2", {}, end.name, el("span", { class: "muted" }, ` queue pair ${end.qp}`)),
    drawing,
    use.requests && el("p", { class: "muted" }, "The log has no state change of it. It sends requests, so it is in RTS."),
    use.answers && !now && el("p", { class: "muted" }, "It answers requests, so it is in RTR or RTS."),
    el("p", { class: "muted" }, now ? `${now}: ${STATE_MEANINGS[now] ?? ""}` : "The log has no state change of this queue pair."
      + (run.source === "capture" ? " A capture shows packets only." : " It was connected before the log began, and its state did not change.")),
    list.length > 0 && el("table", { class: "list" }, el("tbody", {}, list)));
}

/** Whether a queue pair sends requests, and answers. */
function usesOf(run, end) {
  const uses = {};
  for (let event = 0; event < run.length && !(uses.requests && uses.answers); event++) {
    if (run.end_.values[event] !== end.index || run.kind.values[event] !== KIND.SENT) continue;
    uses[/RESPONSE|ACKNOWLEDGE|CNP/.test(run.opcodes.words[run.opcode.values[event]]) ? "answers" : "requests"] = true;
  }
  return uses;
}

function way(from, to, number) {
  const [[x1, y1], [x2, y2]] = [PLACES[from], PLACES[to]];
  const length = Math.hypot(x2 - x1, y2 - y1);
  const [ux, uy] = [(x2 - x1) / length, (y2 - y1) / length];
  const cut = (x, y) => Math.min(ux ? (BOX_WIDTH / 2 + 3) / Math.abs(ux) : Infinity, uy ? (BOX_HEIGHT / 2 + 3) / Math.abs(uy) : Infinity);
  const double = WAYS.some((way) => way[0] === to && way[1] === from) ? (y1 === y2 ? 9 : 6) : 0;
  const [sx, sy] = [x1 + ux * cut() - uy * double, y1 + uy * cut() + ux * double];
  const [ex, ey] = [x2 - ux * cut() - uy * double, y2 - uy * cut() + ux * double];
  const group = svg("g", { class: "way" + (number ? " gone" : "") },
    svg("line", { x1: sx, y1: sy, x2: ex - ux * 6, y2: ey - uy * 6 }),
    svg("path", { d: `M${ex} ${ey} L${ex - ux * 9 - uy * 5} ${ey - uy * 9 + ux * 5} L${ex - ux * 9 + uy * 5} ${ey - uy * 9 - ux * 5} z` }));
  if (number) {
    const [mx, my] = [(sx + ex) / 2 + uy * 11, (sy + ey) / 2 - ux * 11];
    group.append(svg("circle", { cx: mx, cy: my, r: 9 }), svg("text", { x: mx, y: my + 0.5 }, number));
  }
  return group;
}
