// The playground: edits a scenario, runs it with the code of the command, and shows the result.

import { el, replace } from "./dom.js";
import { plural, secondsText, timeText } from "./words.js";
import { Run, readStream } from "./run.js";
import { app, look, redraw } from "./state.js";
import { resultPanel } from "./why.js";
import { Card, Stopped } from "./card.js";
import { Editor } from "./editor.js";

const card = new Card();

/** Runs a scenario: its result, its event log and its frames. */
export function runScenario(text, seed) {
  return card.run(text, seed);
}

/** Compresses a text for a link. */
async function packText(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** Decompresses a text of a link. */
async function unpackText(word) {
  const bytes = Uint8Array.from(atob(word.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).text();
}

/** The scenarios by their titles, those of a lesson together. */
function scenarioChoices(scenarios) {
  const lessons = [...new Set(scenarios.map(({ lesson }) => lesson))].sort((one, other) => (one || Infinity) - (other || Infinity));
  return lessons.map((lesson) => el("optgroup", { label: lesson ? `Lesson ${lesson}` : "More" }, scenarios.filter((scenario) => scenario.lesson === lesson)
    .map(({ name, text }) => el("option", { value: name }, text.match(/^title\s*=\s*"(.*)"\s*$/m)?.[1] ?? name))));
}

export class Playground {
  constructor() {
    this.scenarios = [];
    this.choice = el("select", { "aria-label": "Example scenario", onchange: () => this.choose(this.choice.value) });
    this.editor = new Editor((text) => card.check(text));
    this.text = this.editor.text;
    this.seed = el("input", { type: "number", value: "1", min: "0", "aria-label": "Seed", class: "seed" });
    this.go = el("button", { class: "button on", title: "Ctrl+Enter", onclick: () => this.run() }, "Run ▸");
    this.halt = el("button", { class: "button", title: "Stop this run", hidden: true, onclick: () => card.stop() }, "Stop ■");
    this.turn = 0;
    this.verdict = el("div", { class: "play-result", role: "status" });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run();
    });
    this.element = el("div", { class: "play" },
      el("div", { class: "play-left" }, this.editor.element, el("div", { class: "play-bar" }, this.go, this.halt, el("label", {}, "seed ", this.seed), this.choice,
        el("span", { class: "hint" }, "Ctrl+Enter: run · Ctrl+Space: complete · The same file and seed give the same events as softhca run."))),
      this.verdict);
  }

  /** Opens the scenario of the link: the name of an example, or a text. A view of a run runs it. */
  async open() {
    this.stop();
    this.scenarios = app.meta.scenarios;
    replace(this.choice, scenarioChoices(this.scenarios));
    const { scenario, seed, text, view } = app.state;
    const found = this.scenarios.find(({ name }) => name === scenario) ?? this.scenarios[0];
    this.choice.value = found.name;
    this.text.value = found.text;
    if (/^\d+$/.test(seed)) this.seed.value = seed;
    if (text) {
      try {
        this.text.value = await unpackText(text);
      } catch {
        replace(this.verdict, el("p", { class: "play-problem bad" }, "✕ The scenario in this link is damaged; is the link complete?"));
        return look({ view: "playground", text: "" });
      }
    } else if (scenario && found.name !== scenario) {
      replace(this.verdict, el("p", { class: "play-problem bad" }, `✕ This page has no scenario ${scenario}.`));
      return look({ view: "playground", scenario: "" });
    }
    if (location.hash === "") await this.run({ view: "playground" });
    else if (view !== "playground") await this.run({});
  }

  choose(name) {
    this.stop();
    this.choice.value = name;
    this.text.value = this.scenarios.find((scenario) => scenario.name === name).text;
    this.text.setSelectionRange(0, 0);
    this.text.scrollTop = 0;
    replace(this.verdict);
    this.editor.setProblem(null);
    look({ scenario: name, text: "" });
  }

  draw() {
    this.editor.draw();
  }

  /** The part of a link that restores the scenario and the seed. */
  async linkState() {
    const text = this.text.value;
    const seed = /^\d+$/.test(this.seed.value) ? this.seed.value : "1";
    const isExample = this.scenarios.some((scenario) => scenario.name === this.choice.value && scenario.text === text);
    return { scenario: this.choice.value, seed: seed === "1" ? "" : seed, text: isExample ? "" : await packText(text) };
  }

  /** Runs the scenario and shows the result. Stops a run that has not ended. */
  async run(at = { run: 0, conn: 0, sel: -1, from: -1, to: -1 }) {
    this.stop();
    const { turn } = this;
    const since = performance.now();
    const [text, seed] = [this.text.value, /^\d+$/.test(this.seed.value) ? this.seed.value : "1"];
    const clock = this.begin(since);
    try {
      const played = await runScenario(text, seed);
      this.halt.hidden = true;
      const link = await this.linkState();
      await this.show(played, () => turn === this.turn);
      if (turn !== this.turn) return;
      app.played = played.result;
      look({ ...link, ...(played.result.problem ? { view: "playground" } : at) });
    } catch (error) {
      if (turn !== this.turn) return;
      const what = error instanceof Stopped
        ? `■ Stopped after ${secondsText(performance.now() - since)}. Nothing of the run is kept. A shorter \`duration\` or fewer messages make a shorter run.`
        : "✕ The run failed: " + error.message;
      replace(this.verdict, el("p", { class: "play-problem bad" }, what));
      look({ view: "playground" });
    } finally {
      clearInterval(clock);
      if (turn === this.turn) this.stop();
    }
  }

  /** Stops the current run, if there is one, and discards its result. */
  stop() {
    this.turn++;
    card.stop();
    this.go.disabled = false;
    this.halt.hidden = true;
  }

  /** Shows how long the run has lasted. */
  begin(since) {
    this.go.disabled = true;
    this.halt.hidden = false;
    const running = el("p", { class: "empty" });
    const update = () => {
      const passed = performance.now() - since;
      running.textContent = passed < 1000 ? "Running…" : `Running for ${secondsText(passed)}… The views still show the previous run; Stop ends this one.`;
    };
    update();
    replace(this.verdict, running);
    return setInterval(update, 500);
  }

  async show({ result, events, frames }, isWanted) {
    if (!isWanted()) return;
    if (result.problem) {
      const { line, column, message, help } = result.problem;
      replace(this.verdict, el("h2", { class: "bad" }, line > 0 ? `✕ line ${line}, column ${column}` : "✕ the scenario"),
        help && el("p", { class: "advice" }, "→ " + help), el("p", {}, message));
      this.editor.setProblem(line > 0 ? result.problem : null);
      if (line > 0) this.editor.select(result.problem);
      return;
    }
    this.editor.setProblem(null);
    const run = new Run(result.title, "log");
    app.runs = [run];
    // A run that failed to start has no log.
    if (events.length > 0) await readStream(new Blob([events]).stream(), run, redraw);
    run.isComplete = true;
    if (!isWanted()) return;
    run.takeFrames(frames);
    if (result.why) run.why = result.why;
    replace(this.verdict, resultPanel(result),
      el("p", { class: "muted" }, `${plural(run.length, "event")} in ${timeText(run.end)}`),
      el("p", { class: "muted" }, "trace_sha256 ", el("code", {}, result.trace_sha256 ?? "—")),
      el("button", { class: "button on", onclick: () => look({ view: "ladder" }) }, "Show the ladder ›"));
  }
}
