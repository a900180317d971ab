// The selected event: its meaning, its fields and related events. On narrow screens a sheet below the view.

import { el, replace } from "./dom.js";
import { bytesText, opcodeMeaning, syndromeMeaning, timeText } from "./words.js";
import { FAILED, KIND } from "./run.js";
import { app, currentRun, look } from "./state.js";
import { faultText, sentence, toneMark, toneOf, whoOf, workName } from "./say.js";

export class Inspector {
  constructor() {
    this.element = el("aside", { class: "inspector", "aria-label": "The selected event" });
    this.live = el("div", { class: "sr", "aria-live": "polite" });
    this.stamp = "";
  }

  draw() {
    const run = currentRun();
    const event = app.state.sel;
    const stamp = `${app.state.run}/${event}/${run.version}`;
    if (stamp === this.stamp) return;
    this.stamp = stamp;
    const isEmpty = event < 0 || event >= run.length;
    this.element.classList.toggle("unused", isEmpty);
    if (isEmpty) {
      return replace(this.element, el("p", { class: "empty" }, "Select an event to see its fields. Keys: ? for help, n for the next packet, f for the next failure."));
    }
    const entry = run.entry(event);
    const schema = app.meta.events.find((schema) => schema.name === entry.name);
    const tone = toneOf(run, event);
    const text = sentence(run, event);
    replace(this.live, `${whoOf(run, event)}: ${text}`);
    replace(this.element,
      el("button", { class: "button close", title: "Close", "aria-label": "Close", onclick: () => look({ sel: -1, step: 0 }) }, "✕"),
      el("p", { class: "muted" }, `${whoOf(run, event)} · ${timeText(run.time.values[event], run.end)} · event ${event + 1}`),
      el("h2", { class: tone }, (toneMark(tone) ? toneMark(tone) + " " : "") + text),
      el("p", {}, schema?.description ?? "", " ", el("code", {}, entry.name)),
      entry.trigger && el("p", { class: "trigger" }, (run.kind.values[event] === KIND.SENT ? "" : "Why: ") + entry.trigger),
      this.terms(run, event),
      this.related(run, event),
      fieldTable(entry.data, schema),
      el("details", {}, el("summary", {}, "The line of the log"), el("pre", {}, run.line(event))));
    this.element.scrollTop = 0;
  }

  terms(run, event) {
    const opcode = run.opcodes.words[run.opcode.values[event]];
    const syndrome = run.syndromes.words[run.syndrome.values[event]];
    return [
      opcode && el("p", { class: "term" }, opcodeMeaning(opcode)),
      syndrome && el("p", { class: "term" }, syndromeMeaning(syndrome)),
    ];
  }

  related(run, event) {
    const links = [];
    const to = (label, other) => links.push(el("button", { class: "link", onclick: () => look({ sel: other }) }, label));
    const linked = run.link.values[event];
    const kind = run.kind.values[event];
    if (linked >= 0 && kind === KIND.SENT) to(`arrived ${timeText(run.time.values[linked] - run.time.values[event])} later`, linked);
    if (linked >= 0 && kind !== KIND.SENT) to(kind === KIND.FAULT ? "the packet" : "when it was sent", linked);
    for (const fault of run.faults.get(event) ?? []) to("⚡ " + faultText(run, fault), fault);
    const work = run.work.values[event];
    if (work >= 0) {
      const { started, ended, status, bytes } = run.works[work];
      if (started !== event) to(`${workName(run, work)}, ${bytesText(bytes)}: started`, started);
      if (ended >= 0 && ended !== event) to(`${workName(run, work)}: ${status}`, ended);
    }
    if (run.frame(event)) links.push(el("button", { class: "link", onclick: () => look({ view: "packet" }) }, "its bytes"));
    if (run.flags.values[event] & FAILED && run.why.explanations.length > 0) {
      links.push(el("button", { class: "link", onclick: () => look({ view: "why" }) }, "why?"));
    }
    return links.length > 0 && el("div", { class: "related" }, links);
  }
}

function fieldTable(data, schema) {
  const rows = [];
  const walk = (object, prefix) => {
    for (const [name, value] of Object.entries(object ?? {})) {
      if (value !== null && typeof value === "object") walk(value, prefix + name + ".");
      else {
        const meaning = schema?.fields.find((field) => field[0] === prefix + name)?.[1] ?? "";
        rows.push(el("tr", {}, el("th", {}, prefix + name), el("td", { class: "mono" }, String(value), meaning && el("div", { class: "muted" }, meaning))));
      }
    }
  };
  walk(data, "");
  return el("table", { class: "fields" }, el("tbody", {}, rows));
}
