// The card itself, in the page: a scenario is edited, run by the same code as in the command, and shown.

import { el, replace } from "./dom.js";
import { countText, plural, timeText } from "./words.js";
import { LogReader, Run } from "./run.js";
import { app, look } from "./state.js";
import { inflated } from "./data.js";

const OUTPUT = { RESULT: 0, EVENTS: 1, FRAMES: 2 };

/** The module, once it is there, and the card that is made of it. */
let compiled = null, instance = null;

async function playgroundModule() {
  compiled ??= await WebAssembly.compile(await new Response(inflated("playground")).arrayBuffer());
  instance ??= await WebAssembly.instantiate(compiled, {});
  return instance.exports;
}

/** Runs a scenario: its result, its event log as text, and its frames. */
export async function runScenario(text, seed) {
  const module = await playgroundModule();
  const bytes = new TextEncoder().encode(text);
  const at = module.input(bytes.length);
  new Uint8Array(module.memory.buffer, at, bytes.length).set(bytes);
  const output = (kind) => new Uint8Array(module.memory.buffer, module.output(kind), module.output_length(kind)).slice();
  const decode = (kind) => new TextDecoder().decode(output(kind));
  try {
    module.run(BigInt.asUintN(64, BigInt(seed)));
  } catch (error) {
    // A card that panicked has said why; it is of no use any more.
    instance = null;
    throw new Error(decode(OUTPUT.RESULT) || error.message);
  }
  return { result: JSON.parse(decode(OUTPUT.RESULT)), events: decode(OUTPUT.EVENTS), frames: output(OUTPUT.FRAMES) };
}

/** Text as a word for a link, and back. */
async function packText(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

async function unpackText(word) {
  const bytes = Uint8Array.from(atob(word.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).text();
}

export class Playground {
  constructor() {
    this.scenarios = [];
    this.choice = el("select", { "aria-label": "Scenario to begin with", onchange: () => this.choose(this.choice.value) });
    this.text = el("textarea", { class: "scenario", spellcheck: "false", "aria-label": "Scenario" });
    this.seed = el("input", { type: "number", value: "1", min: "0", "aria-label": "Seed", class: "seed" });
    this.go = el("button", { class: "button on", title: "Ctrl+Enter", onclick: () => this.run() }, "Run ▸");
    this.verdict = el("div", { class: "play-result", role: "status" });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run();
    });
    this.element = el("div", { class: "play" },
      el("div", { class: "play-left" }, this.text, el("div", { class: "play-bar" }, this.go, el("label", {}, "seed ", this.seed), this.choice,
        el("span", { class: "hint" }, "Ctrl+Enter runs it. The same file and seed give the same events as softhca run."))),
      this.verdict);
  }

  /** Opens what the link names: a scenario that the page came with, or the text of one. A view of a run needs that run. */
  async open() {
    this.scenarios = app.meta.scenarios;
    replace(this.choice, this.scenarios.map(({ name }) => el("option", { value: name }, name)));
    const { scenario, seed, text, view } = app.state;
    const found = this.scenarios.find(({ name }) => name === scenario) ?? this.scenarios[0];
    this.choice.value = found.name;
    this.text.value = found.text;
    if (/^\d+$/.test(seed)) this.seed.value = seed;
    if (text) {
      try {
        this.text.value = await unpackText(text);
      } catch {
        replace(this.verdict, el("p", { class: "play-problem bad" }, "✕ The scenario in this link is damaged; was the link cut off?"));
        return look({ view: "playground", text: "" });
      }
    } else if (scenario && found.name !== scenario) {
      replace(this.verdict, el("p", { class: "play-problem bad" }, `✕ There is no scenario ${scenario} in this page.`));
      return look({ view: "playground", scenario: "" });
    }
    if (location.hash === "") look({ view: "playground" });
    else if (view !== "playground") await this.run({});
  }

  choose(name) {
    this.text.value = this.scenarios.find((scenario) => scenario.name === name).text;
    replace(this.verdict);
    look({ scenario: name, text: "" });
  }

  draw() {}

  /** Runs what is in the field, and looks at what came of it. */
  async run(at = { run: 0, conn: 0, sel: -1, from: -1, to: -1 }) {
    this.go.disabled = true;
    replace(this.verdict, el("p", { class: "empty" }, "Running…"));
    await new Promise((resolve) => setTimeout(resolve, 20));
    const [text, seed] = [this.text.value, /^\d+$/.test(this.seed.value) ? this.seed.value : "1"];
    const isOurs = this.scenarios.some((scenario) => scenario.name === this.choice.value && scenario.text === text);
    try {
      const link = { scenario: this.choice.value, seed: seed === "1" ? "" : seed, text: isOurs ? "" : await packText(text) };
      const played = await runScenario(text, seed);
      this.show(played);
      app.played = played.result;
      look({ ...link, ...(played.result.problem ? { view: "playground" } : at) });
    } catch (error) {
      replace(this.verdict, el("p", { class: "play-problem bad" }, "✕ The run broke off: " + error.message));
      look({ view: "playground" });
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
        result.rules.map(({ name, fired }) => el("li", {}, `⚡ ${name}: ${fired === 0 ? "never happened" : fired === 1 ? "happened once" : `happened ${countText(fired)} times`}`))),
      el("p", { class: "muted" }, `${plural(run.length, "event")} in ${timeText(run.end)}`),
      el("p", { class: "muted" }, "trace_sha256 ", el("code", {}, result.trace_sha256 ?? "—")),
      el("button", { class: "button on", onclick: () => look({ view: "ladder" }) }, "See the ladder ›"));
  }
}
