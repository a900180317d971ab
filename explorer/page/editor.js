// The editor of the playground: a text field over a coloured copy of its text, errors marked in place, completion from the schema.

import { el, replace } from "./dom.js";
import { app } from "./state.js";
import { tomlCompletions, tomlPlace, tomlTokens } from "./toml.js";

const MAX_COMPLETIONS = 60;
/** The delay between the last key and the check of the text. */
const CHECK_DELAY_MS = 250;

export class Editor {
  /** `check(text)` resolves to `{ line, column, message, help }`, to `undefined` if the text is valid, or to null if it was not checked. */
  constructor(check) {
    this.check = check;
    this.problem = null;
    this.drawn = null;
    this.completions = [];
    this.chosen = 0;
    this.timer = 0;
    this.copy = el("pre", { class: "scenario-copy", "aria-hidden": "true" });
    this.list = el("ul", { class: "completions", id: "completions", role: "listbox", "aria-label": "Completions", hidden: true });
    this.text = el("textarea", {
      class: "scenario", spellcheck: "false", wrap: "off", autocapitalize: "off", autocomplete: "off", "aria-label": "Scenario",
      "aria-autocomplete": "list", "aria-controls": "completions", "aria-describedby": "scenario-problem",
    });
    this.note = el("p", { class: "scenario-problem", id: "scenario-problem", role: "status" });
    this.element = el("div", { class: "editor" }, el("div", { class: "editor-field" }, this.copy, this.text, this.list), this.note);
    this.text.addEventListener("input", () => this.changed());
    this.text.addEventListener("scroll", () => this.scrolled());
    this.text.addEventListener("keydown", (event) => this.pressed(event));
    this.text.addEventListener("pointerdown", () => this.close());
    this.text.addEventListener("blur", () => this.close());
  }

  /** Shows the text and its error, whoever changed them. */
  draw() {
    const stamp = JSON.stringify([this.text.value, this.problem]);
    if (stamp === this.drawn) return;
    this.drawn = stamp;
    replace(this.copy, this.parts());
    replace(this.note, this.problem && [
      el("b", {}, this.problem.line > 0 ? `✕ line ${this.problem.line}, column ${this.problem.column}: ` : "✕ "), this.problem.help && el("b", {}, `→ ${this.problem.help} `), this.problem.message]);
    this.text.setAttribute("aria-invalid", String(Boolean(this.problem)));
    this.scrolled();
  }

  parts() {
    const text = this.text.value;
    const wrong = this.problem?.line > 0 ? this.range(this.problem) : null;
    const parts = [];
    let at = 0;
    const add = (to, kind) => {
      // An error can begin or end inside a token.
      for (const stop of [wrong?.from, wrong?.to, to].filter((stop) => stop > at && stop <= to)) {
        if (stop === at) continue;
        const isWrong = wrong && at >= wrong.from && at < wrong.to;
        parts.push(kind || isWrong ? el("span", { class: kind + (isWrong ? " squiggle" : "") }, text.slice(at, stop)) : text.slice(at, stop));
        at = stop;
      }
    };
    for (const { kind, from, to } of tomlTokens(text)) {
      add(from, "");
      add(to, "toml-" + kind);
    }
    add(text.length, "");
    // A last line without characters has a height too.
    return [parts, "\n"];
  }

  /** The characters that an error marks: the token at its position, or the rest of the line. */
  range({ line, column }) {
    const text = this.text.value;
    let start = 0;
    for (let number = 1; number < line; number++) start = text.indexOf("\n", start) + 1 || text.length;
    const end = text.indexOf("\n", start) < 0 ? text.length : text.indexOf("\n", start);
    // Columns count characters, strings of this language 16-bit units.
    const from = Math.min(end, start + [...text.slice(start, end)].slice(0, column - 1).join("").length);
    const token = tomlTokens(text).find((token) => token.from <= from && from < token.to);
    const to = Math.min(end, token ? token.to : end);
    return to > from ? { from, to } : { from: Math.max(start, end - 1), to: Math.max(start, end - 1) + 1 };
  }

  /** Puts the caret at an error. */
  select(problem) {
    const { from, to } = this.range(problem);
    this.text.focus();
    this.text.setSelectionRange(from, to);
    this.text.scrollTop = (problem.line - 4) * parseFloat(getComputedStyle(this.text).lineHeight);
  }

  setProblem(problem) {
    this.problem = problem ?? null;
    this.draw();
    if (this.problem?.line > 0) this.reveal(this.problem.line);
  }

  /** Scrolls as far as the note about a line would cover it. */
  reveal(line) {
    const { lineHeight, paddingTop } = getComputedStyle(this.text);
    const bottom = parseFloat(paddingTop) + (line + 1) * parseFloat(lineHeight);
    if (this.text.scrollTop + this.text.clientHeight < bottom) this.text.scrollTop = bottom - this.text.clientHeight;
  }

  scrolled() {
    this.copy.style.transform = `translate(${-this.text.scrollLeft}px, ${-this.text.scrollTop}px)`;
  }

  changed() {
    this.problem = null;
    this.draw();
    this.complete(false);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.checkNow(), CHECK_DELAY_MS);
  }

  async checkNow() {
    const text = this.text.value;
    const problem = await this.check(text);
    if (text === this.text.value && problem !== null) this.setProblem(problem);
  }

  pressed(event) {
    if (event.key === " " && event.ctrlKey) {
      event.preventDefault();
      return this.complete(true);
    }
    if (this.list.hidden) return;
    const act = {
      ArrowDown: () => this.choose(this.chosen + 1), ArrowUp: () => this.choose(this.chosen - 1), Escape: () => this.close(),
      Enter: () => this.accept(), Tab: () => this.accept(),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey) return event.key.startsWith("Arrow") || event.key === "Home" || event.key === "End" ? this.close() : undefined;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  /** Lists what fits at the caret: on demand, or once a word has begun. */
  complete(isDemanded) {
    const { selectionStart: caret, value } = this.text;
    const place = app.meta.schema ? tomlPlace(value, caret) : null;
    const isWanted = place && (isDemanded || place.word !== "" || place.isString);
    this.completions = isWanted ? tomlCompletions(app.meta.schema, place).slice(0, MAX_COMPLETIONS) : [];
    if (this.completions.length === 0) return this.close();
    this.place = place;
    replace(this.list, this.completions.map(({ label, about }, number) => el("li", {
      role: "option", id: "completion-" + number, onpointerdown: (event) => event.preventDefault(), onclick: () => this.accept(number),
    }, el("b", {}, label), about && el("span", { class: "muted" }, " " + about.split("\n")[0]))));
    this.list.hidden = false;
    this.position(place.from);
    this.choose(0);
  }

  /** Moves the list below the word. */
  position(offset) {
    const before = this.text.value.slice(0, offset);
    const lineStart = before.lastIndexOf("\n") + 1;
    const measure = el("span", {}, before.slice(lineStart) || "\u200b");
    this.copy.append(measure);
    const width = before.length > lineStart ? measure.getBoundingClientRect().width : 0;
    measure.remove();
    const style = getComputedStyle(this.text);
    const height = parseFloat(style.lineHeight);
    const line = before.split("\n").length;
    const field = this.text.getBoundingClientRect();
    const top = parseFloat(style.paddingTop) + line * height - this.text.scrollTop;
    const left = parseFloat(style.paddingLeft) + width - this.text.scrollLeft;
    const isAbove = top + this.list.offsetHeight > field.height && top - height > this.list.offsetHeight;
    this.list.style.top = (isAbove ? top - height - this.list.offsetHeight : top) + "px";
    this.list.style.left = Math.max(0, Math.min(left, field.width - this.list.offsetWidth)) + "px";
  }

  choose(number) {
    this.chosen = (number + this.completions.length) % this.completions.length;
    for (const [at, item] of [...this.list.children].entries()) {
      item.setAttribute("aria-selected", String(at === this.chosen));
      if (at === this.chosen) item.scrollIntoView({ block: "nearest" });
    }
    this.text.setAttribute("aria-activedescendant", "completion-" + this.chosen);
  }

  accept(number = this.chosen) {
    const { insert } = this.completions[number];
    const caret = this.text.selectionStart;
    const rest = this.text.value.slice(caret);
    // A key that has its equals sign keeps it; a value inside quotes gets the closing one.
    const end = this.place.expects === "key" && /^\s*=/.test(rest) ? insert.trimEnd().replace(/ =$/, "") : insert;
    const quote = this.place.isString ? this.text.value[this.place.from - 1] : "";
    this.close();
    this.text.setRangeText(end + (quote && !rest.startsWith(quote) ? quote : ""), this.place.from, caret, "end");
    this.changed();
    this.close();
  }

  close() {
    this.list.hidden = true;
    this.text.removeAttribute("aria-activedescendant");
  }
}
