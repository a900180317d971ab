// The card itself, in the page: a scenario is edited, run by the same code as in the command, and shown.

import { el, replace } from "./dom.js";
import { countText, plural, secondsText, timeText } from "./words.js";
import { Run, readStream } from "./run.js";
import { app, look, redraw } from "./state.js";
import { Card, Stopped } from "./card.js";

const card = new Card();

/** Runs a scenario: its result, its event log and its frames. */
export function runScenario(text, seed) {
  return card.run(text, seed);
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
    this.halt = el("button", { class: "button", title: "End this run", hidden: true, onclick: () => card.stop() }, "Stop ■");
    this.turn = 0;
    this.verdict = el("div", { class: "play-result", role: "status" });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run();
    });
    this.element = el("div", { class: "play" },
      el("div", { class: "play-left" }, this.text, el("div", { class: "play-bar" }, this.go, this.halt, el("label", {}, "seed ", this.seed), this.choice,
        el("span", { class: "hint" }, "Ctrl+Enter runs it. The same file and seed give the same events as softhca run."))),
      this.verdict);
  }

  /** Opens what the link names: a scenario that the page came with, or the text of one. A view of a run needs that run. */
  async open() {
    this.giveWay();
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
    this.giveWay();
    this.choice.value = name;
    this.text.value = this.scenarios.find((scenario) => scenario.name === name).text;
    replace(this.verdict);
    look({ scenario: name, text: "" });
  }

  draw() {}

  /** Runs what is in the field, and looks at what came of it. A run that is still under way gives way. */
  async run(at = { run: 0, conn: 0, sel: -1, from: -1, to: -1 }) {
    this.giveWay();
    const { turn } = this;
    const since = performance.now();
    const [text, seed] = [this.text.value, /^\d+$/.test(this.seed.value) ? this.seed.value : "1"];
    const isOurs = this.scenarios.some((scenario) => scenario.name === this.choice.value && scenario.text === text);
    const clock = this.begin(since);
    try {
      const played = await runScenario(text, seed);
      this.halt.hidden = true;
      const link = { scenario: this.choice.value, seed: seed === "1" ? "" : seed, text: isOurs ? "" : await packText(text) };
      await this.show(played, () => turn === this.turn);
      if (turn !== this.turn) return;
      app.played = played.result;
      look({ ...link, ...(played.result.problem ? { view: "playground" } : at) });
    } catch (error) {
      if (turn !== this.turn) return;
      const what = error instanceof Stopped
        ? `■ Stopped after ${secondsText(performance.now() - since)}. Nothing of that run is kept. An earlier \`ends\`, or fewer messages, make a shorter one.`
        : "✕ The run broke off: " + error.message;
      replace(this.verdict, el("p", { class: "play-problem bad" }, what));
      look({ view: "playground" });
    } finally {
      clearInterval(clock);
      if (turn === this.turn) this.giveWay();
    }
  }

  /** Ends what runs, if something does: its outcome is not shown any more. */
  giveWay() {
    this.turn++;
    card.stop();
    this.go.disabled = false;
    this.halt.hidden = true;
  }

  /** Shows that something runs, and for how long. */
  begin(since) {
    this.go.disabled = true;
    this.halt.hidden = false;
    const running = el("p", { class: "empty" });
    const tell = () => {
      const passed = performance.now() - since;
      running.textContent = passed < 1000 ? "Running…" : `Running for ${secondsText(passed)}… The views of the last run can be used meanwhile; Stop ends this one.`;
    };
    tell();
    replace(this.verdict, running);
    return setInterval(tell, 500);
  }

  async show({ result, events, frames }, isWanted) {
    if (!isWanted()) return;
    if (result.problem) {
      const { line, column, message, help } = result.problem;
      replace(this.verdict, el("h3", { class: "bad" }, `✕ line ${line}, column ${column}`), el("p", {}, message), help && el("p", { class: "advice" }, "→ " + help));
      const start = this.text.value.split("\n").slice(0, Math.max(0, line - 1)).join("\n").length + (line > 1 ? 1 : 0);
      this.text.focus();
      this.text.setSelectionRange(start, start + (this.text.value.slice(start).indexOf("\n") + 1 || this.text.value.length));
      return;
    }
    const run = new Run(result.title, "log");
    app.runs = [run];
    // A run that could not be begun has no log.
    if (events.length > 0) await readStream(new Blob([events]).stream(), run, redraw);
    run.isComplete = true;
    if (!isWanted()) return;
    run.takeFrames(frames);
    if (result.why) run.why = result.why;
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
