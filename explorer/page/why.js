// Why a completion failed: the chain of causes, as `softhca why` tells it.

import { el, replace } from "./dom.js";
import { timeText } from "./words.js";
import { app, currentRun, look } from "./state.js";
import { sentence, toneMark, toneOf, whoOf } from "./say.js";

export class Why {
  constructor() {
    this.element = el("div", { class: "why" });
  }

  draw() {
    const run = currentRun();
    if (run.chains.length === 0) {
      const text = !run.isComplete ? "Reading…"
        : run.source === "capture" ? "A capture tells no completions, so there is no failure to explain. The NAKs and retransmissions are in the ladder."
        : run.failures.length > 0 ? "The log does not tell why these completions failed." : "Every completion of this run was a success: there is nothing to explain.";
      return replace(this.element, el("p", { class: "empty" }, text));
    }
    const chosen = run.chains.find((chain) => chain.links.some((link) => link.event === app.state.sel)) ?? run.chains[0];
    replace(this.element,
      el("nav", { class: "why-list", "aria-label": "Failed completions" },
        el("h3", {}, "What failed"),
        run.chains.slice(0, 200).map((chain) => el("button", {
          class: "why-item" + (chain === chosen ? " on" : ""), onclick: () => look({ sel: chain.event }),
        }, el("b", {}, "✕ " + sentence(run, chain.event)), el("span", { class: "muted" }, `${whoOf(run, chain.event)} at ${timeText(run.time.values[chain.event], run.end)}`)))),
      el("section", { class: "chain" },
        el("h3", {}, chosen.headline ?? "The chain of causes"),
        el("ol", {}, chosen.links.map((link, number) => this.link(run, link, number + 1, chosen.links.length)))));
  }

  link(run, link, number, count) {
    const isKnown = link.event !== undefined && link.event !== null && link.event < run.length;
    const tone = isKnown ? toneOf(run, link.event) : "plain";
    return el("li", {
      class: "cause " + tone + (isKnown && link.event === app.state.sel ? " selected" : ""),
      tabindex: "0", onclick: () => isKnown && look({ sel: link.event }),
      onkeydown: (event) => event.key === "Enter" && isKnown && look({ sel: link.event, view: "ladder" }),
    },
    el("span", { class: "cause-number" }, number),
    el("div", {},
      el("p", { class: "cause-text" }, (toneMark(tone) ? toneMark(tone) + " " : "") + link.text),
      el("p", { class: "muted" }, isKnown ? `${whoOf(run, link.event)} · ${timeText(run.time.values[link.event], run.end)}` : "",
        number === count ? " · this is what the program saw" : number === 1 ? " · it began here" : "")));
  }
}
