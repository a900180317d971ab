// Why a work request failed: the chain of causes, as `softhca why` tells it.

import { el, replace } from "./dom.js";
import { timeText } from "./words.js";
import { app, currentRun, look } from "./state.js";
import { sentence, toneMark, toneOf } from "./say.js";

export class Why {
  constructor() {
    this.element = el("div", { class: "why" });
    this.chosen = 0;
  }

  draw() {
    const run = currentRun();
    const { explanations, remark } = run.why;
    if (explanations.length === 0) {
      const text = run.source === "capture"
        ? "A capture tells no completions, so there is nothing to explain. NAKs and retransmissions are in the ladder."
        : remark || (run.failures.length > 0 ? "Whoever made this page did not ask why. Run: softhca why LOG" : "No completion of this run failed: there is nothing to explain.");
      return replace(this.element, el("p", { class: "empty" }, run.isComplete ? text : "Reading…"));
    }
    const chosen = explanations[this.chosen] ?? explanations[0];
    replace(this.element,
      el("nav", { class: "why-list", "aria-label": "What is explained" },
        el("h3", {}, "What went wrong"),
        explanations.map((explanation, number) => el("button", {
          class: "why-item" + (explanation === chosen ? " on" : ""), "aria-pressed": String(explanation === chosen),
          onclick: () => {
            this.chosen = number;
            look({ sel: eventAt(run, explanation.chain[explanation.chain.length - 1]?.time_ns) });
          },
        }, explanation.title)),
        remark && el("p", { class: "muted" }, remark)),
      el("section", { class: "chain" },
        el("h3", {}, chosen.title),
        el("p", { class: "verdict" }, chosen.cause),
        chosen.advice && el("p", { class: "advice" }, "→ " + chosen.advice),
        el("ol", {}, chosen.chain.map((link, number) => cause(run, link, number + 1)))));
  }
}

function cause(run, link, number) {
  const event = eventAt(run, link.time_ns);
  const tone = event < 0 ? "plain" : toneOf(run, event);
  const isSelected = event >= 0 && app.state.sel >= 0 && app.state.sel < run.length && run.time.values[app.state.sel] === run.time.values[event];
  return el("li", {
    class: "cause " + tone + (isSelected ? " selected" : ""), tabindex: "0", title: event < 0 ? "" : sentence(run, event),
    onclick: () => look({ sel: event }),
    onkeydown: (key) => key.key === "Enter" && look({ sel: event, view: "ladder" }),
  },
  el("span", { class: "cause-number" }, number),
  el("div", {}, el("p", { class: "cause-text" }, (toneMark(tone) ? toneMark(tone) + " " : "") + link.text),
    el("p", { class: "muted" }, timeText(link.time_ns, run.end))));
}

/** What happened at a time; of several, the one that tells most. */
function eventAt(run, time) {
  const first = run.at(time ?? 0);
  if (first >= run.length || run.time.values[first] !== time) return first < run.length ? first : -1;
  let best = first;
  for (let event = first; event < run.length && event < first + 200 && run.time.values[event] === time; event++) {
    const tone = toneOf(run, event);
    if (tone === "bad" || (tone === "odd" && toneOf(run, best) !== "bad")) best = event;
    if (tone === "bad") break;
  }
  return best;
}
