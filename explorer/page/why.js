// Why a work request failed: the chain of causes of `softhca why`.

import { el, replace } from "./dom.js";
import { countText, timeText } from "./words.js";
import { app, currentRun, look } from "./state.js";
import { sentence, toneMark, toneOf } from "./say.js";

/** How sure an explanation from a capture is. */
const CERTAINTIES = { known: "Known", inferred: "Inferred", ambiguous: "Ambiguous: the capture fits more than one cause" };

export class Why {
  constructor() {
    this.element = el("div", { class: "why" });
    this.chosen = 0;
  }

  draw() {
    const run = currentRun();
    const { explanations, summary } = run.why;
    const verdict = run.result && resultPanel(run.result);
    if (explanations.length === 0) {
      const text = summary || (run.failures.length > 0 ? "The page has no explanation of these failures. Run: softhca why LOG" : "No completion of this run failed, so there is nothing to explain.");
      return replace(this.element, el("section", { class: "chain" }, verdict, el("p", { class: "empty" }, run.isComplete ? text : "Reading…")));
    }
    const chosen = explanations[this.chosen] ?? explanations[0];
    replace(this.element,
      el("nav", { class: "why-list", "aria-label": "Findings" },
        el("h2", {}, "Findings"),
        explanations.map((explanation, number) => el("button", {
          class: "why-item" + (explanation === chosen ? " on" : ""), "aria-pressed": String(explanation === chosen),
          onclick: () => {
            this.chosen = number;
            look({ sel: explanation.evidence.at(-1)?.entry ?? -1 });
          },
        }, explanation.title, el("span", { class: "muted" }, explanation.code))),
        summary && el("p", { class: "muted" }, summary)),
      el("section", { class: "chain" }, verdict,
        el("h2", {}, chosen.title),
        chosen.posted_at && el("p", { class: "muted" }, "Posted at ", el("code", {}, chosen.posted_at)),
        el("p", { class: "verdict" }, run.source === "capture" && el("b", {}, `${CERTAINTIES[chosen.certainty]}: `), chosen.cause),
        chosen.advice && el("p", { class: "advice" }, "→ " + chosen.advice),
        el("ol", {}, chosen.evidence.map((link, number) => cause(run, link, number + 1)))));
  }
}

/** The verdict of a run: what it expected and what happened instead, its faults, its seed and how to run it again. */
export function resultPanel({ verdict, error, expectations = [], rules = [], seed, replay }) {
  const mark = { pass: "✓", fail: "✕", error: "!" }[verdict];
  // What failed comes first.
  const sorted = [...expectations.filter(({ held }) => !held), ...expectations.filter(({ held }) => held)];
  return el("section", { class: "result", "aria-label": "Verdict" },
    el("h2", { class: verdict === "pass" ? "good" : "bad" }, `${mark} ${verdict}`),
    error && el("p", {}, error),
    el("ul", { class: "play-list" },
      sorted.map(({ text, held, detail }) => el("li", { class: held ? "good" : "bad" }, (held ? "✓ " : "✕ ") + text, el("div", { class: "muted" }, detail))),
      rules.map(({ name, fired }) => el("li", {}, `⚡ ${name}: ${fired === 0 ? "never fired" : fired === 1 ? "fired once" : `fired ${countText(fired)} times`}`))),
    seed !== undefined && el("p", { class: "muted" }, `seed ${seed}`, replay && [" · run it again: ", el("code", {}, replay)]));
}

function cause(run, { entry: event, packet, time_ns, text }, number) {
  const tone = event < run.length ? toneOf(run, event) : "plain";
  return el("li", {
    class: "cause " + tone + (app.state.sel === event ? " selected" : ""), tabindex: "0", title: event < run.length ? sentence(run, event) : "",
    onclick: () => look({ sel: event }),
    onkeydown: (key) => key.key === "Enter" && look({ sel: event, view: "ladder" }),
  },
  el("span", { class: "cause-number" }, number),
  el("div", {}, el("p", { class: "cause-text" }, (toneMark(tone) ? toneMark(tone) + " " : "") + text),
    el("p", { class: "muted" }, timeText(time_ns, run.end) + (packet ? `, packet ${packet}` : ""))));
}
