// The card itself, in the page: a scenario is edited, run by the same code as in the command, and shown.

import { el, replace } from "./dom.js";
import { timeText } from "./words.js";
import { LogReader, Run } from "./run.js";
import { app, look } from "./state.js";
import { inflated } from "./data.js";

const OUTPUT = { RESULT: 0, EVENTS: 1, FRAMES: 2 };

/** The module, once it is there. */
let instance = null;

async function playgroundModule() {
  if (!instance) {
    const bytes = await new Response(inflated("playground")).arrayBuffer();
    instance = (await WebAssembly.instantiate(bytes, {})).instance;
  }
  return instance.exports;
}

/** Runs a scenario: its result, its event log as text, and its frames. */
export async function runScenario(text, seed) {
  const module = await playgroundModule();
  const bytes = new TextEncoder().encode(text);
  const at = module.input(bytes.length);
  new Uint8Array(module.memory.buffer, at, bytes.length).set(bytes);
  module.run(BigInt(seed));
  const output = (kind) => new Uint8Array(module.memory.buffer, module.output(kind), module.output_length(kind)).slice();
  const decode = (kind) => new TextDecoder().decode(output(kind));
  return { result: JSON.parse(decode(OUTPUT.RESULT)), events: decode(OUTPUT.EVENTS), frames: output(OUTPUT.FRAMES) };
}

export class Playground {
  constructor() {
    this.text = el("textarea", { class: "scenario", spellcheck: "false", "aria-label": "Scenario" });
    this.seed = el("input", { type: "number", value: "1", min: "0", "aria-label": "Seed", class: "seed" });
    this.go = el("button", { class: "button on", title: "Ctrl+Enter", onclick: () => this.run() }, "Run ▸");
    this.verdict = el("div", { class: "play-result", role: "status" });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run();
    });
    this.element = el("div", { class: "play" },
      el("div", { class: "play-left" }, this.text, el("div", { class: "play-bar" }, this.go, el("label", {}, "seed ", this.seed),
        el("span", { class: "hint" }, "Ctrl+Enter runs it. The same file and seed give the same events as softhca run."))),
      this.verdict);
  }

  draw() {
    if (this.text.value === "" && app.meta.scenario) this.text.value = app.meta.scenario;
  }

  async run() {
    this.go.disabled = true;
    replace(this.verdict, el("p", { class: "empty" }, "Running…"));
    await new Promise((resolve) => setTimeout(resolve, 20));
    try {
      const played = await runScenario(this.text.value, this.seed.value || "1");
      this.show(played);
      app.played = played.result;
    } catch (error) {
      // A panic leaves the module unusable.
      instance = null;
      replace(this.verdict, el("p", { class: "play-problem" }, "✕ The run broke off: " + error.message));
    }
    this.go.disabled = false;
  }

  show({ result, events, frames }) {
    if (result.problem) {
      const { line, column, message, help } = result.problem;
      replace(this.verdict, el("h3", { class: "bad" }, `✕ line ${line}, column ${column}`), el("p", {}, message), help && el("p", { class: "advice" }, "→ " + help));
      const start = this.text.value.split("\n").slice(0, Math.max(0, line - 1)).join("\n").length + (line > 1 ? 1 : 0);
      this.text.focus();
      this.text.setSelectionRange(start, start + (this.text.value.slice(start).indexOf("\n") + 1 || this.text.value.length));
      return;
    }
    const run = new Run(result.title, "log");
    const reader = new LogReader(run);
    reader.take(events);
    reader.finish();
    run.takeFrames(frames);
    if (result.why) run.why = result.why;
    app.runs = [run];
    const mark = { pass: "✓", fail: "✕", error: "!" }[result.verdict];
    replace(this.verdict,
      el("h3", { class: result.verdict === "pass" ? "good" : "bad" }, `${mark} ${result.verdict}`),
      result.error && el("p", {}, result.error),
      el("ul", { class: "play-list" },
        result.expectations.map(({ text, held, detail }) => el("li", { class: held ? "good" : "bad" }, (held ? "✓ " : "✕ ") + text, el("div", { class: "muted" }, detail))),
        result.rules.map(({ name, fired }) => el("li", {}, `⚡ ${name}: ${fired} times`))),
      el("p", { class: "muted" }, `${run.length} events in ${timeText(result.ended_ns)}`),
      el("p", { class: "muted" }, "trace_sha256 ", el("code", {}, result.trace_sha256 ?? "—")),
      el("button", { class: "button on", onclick: () => look({ view: "ladder" }) }, "See the ladder ›"));
    look({ run: 0, conn: 0, sel: -1, from: -1, to: -1 });
  }
}
