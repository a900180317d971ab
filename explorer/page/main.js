// The frame of the page, its keys, and the current view.

import { el, replace } from "./dom.js";
import { countText, plural } from "./words.js";
import { CLASSES, KIND, Run } from "./run.js";
import { FILTER_FIELDS, FILTER_FLAGS } from "./filter.js";
import { emptyRuns, readFile, readMeta, readRuns } from "./data.js";
import { app, currentConnection, currentRun, filteredEvents, isFiltered, linkOf, look, readLink, redraw } from "./state.js";
import { sentence, whoOf } from "./say.js";
import { Ladder, anchor, rowOf } from "./ladder.js";
import { Sequence } from "./sequence.js";
import { Timeline } from "./timeline.js";
import { Machines } from "./machines.js";
import { MemoryView } from "./memory.js";
import { SummaryView } from "./summary.js";
import { Why } from "./why.js";
import { PacketView } from "./packet.js";
import { Events } from "./events.js";
import { Compare } from "./compare.js";
import { Inspector } from "./inspector.js";
import { Overview } from "./overview.js";
import { followEvents, liveRun } from "./live.js";
import { Playground } from "./playground.js";

const VIEWS = [
  ["summary", "Summary", "The run in numbers"],
  ["ladder", "Ladder", "Packets and events between two queue pairs"], ["sequence", "PSNs", "PSNs over time, and the acknowledged PSN"],
  ["timeline", "Timeline", "Throughput, rates, queues, pauses, CNPs"], ["states", "States", "The state machines of both queue pairs"],
  ["memory", "Memory", "Written bytes by time and writer"], ["why", "Why", "The chain of causes of a failure"],
  ["packet", "Bytes", "The bytes of a packet, field by field"], ["compare", "Compare", "Two runs side by side"],
  ["events", "Events", "Every event, one line each"],
];
const PLAYGROUND = ["playground", "Playground", "Edit a scenario and run it here"];

const KEYS = [
  ["0 … 9", "the views"], ["↓ ↑, j k", "next and previous event of the ladder"], ["n p", "next and previous packet"],
  ["f", "next fault, NAK or failure"], ["s", "step mode: show the run up to the selection only"], ["[ ]", "previous and next connection"],
  ["/", "search"], ["Esc", "leave the search, clear filters, end step mode"], ["t", "light or dark"], ["+ −", "larger and smaller"],
  ["c", "copy a link to this view"], ["?", "this help"],
];

const filePicker = el("input", { type: "file", accept: ".jsonl,.json", class: "sr", tabindex: "-1", "aria-label": "Open an event log" });
const ladderView = new Ladder(() => ({ run: currentRun(), connection: currentConnection(), number: app.state.run }));
const views = {
  ladder: ladderView, sequence: new Sequence(), timeline: new Timeline(), states: new Machines(), memory: new MemoryView(),
  summary: new SummaryView(), why: new Why(), packet: new PacketView(), compare: new Compare(() => filePicker.click()), events: new Events(),
};
const playground = new Playground();
const inspector = new Inspector();
const overview = new Overview();

const page = {
  title: el("h1", {}, "SoftHCA explorer"),
  status: el("span", { class: "status", role: "status" }),
  notes: el("section", { class: "notes", role: "alert", "aria-label": "Notes" }),
  tabs: el("nav", { class: "tabs", "aria-label": "Views" }),
  filters: el("div", { class: "filters", role: "search", "aria-label": "Connection, search and filters" }),
  caption: el("section", { class: "caption", "aria-label": "Step" }),
  view: el("main", { class: "view" }),
  help: el("dialog", { class: "help" }),
};
const search = el("input", { type: "search", placeholder: "search or filter ( / )", "aria-label": "Search", class: "search", list: "filter-words" });
// Completes the word at the end of what is typed.
const filterWords = el("datalist", { id: "filter-words" });
const choices = {};

function build(root) {
  if (app.meta.playground) {
    VIEWS.push(PLAYGROUND);
    views.playground = playground;
  }
  for (const [at, [name, label, about]] of VIEWS.entries()) {
    page.tabs.append(el("button", { class: "tab", id: "tab-" + name, title: at < 10 ? `${about} (${at})` : about, onclick: () => look({ view: name }) },
      at < 10 && el("kbd", {}, at), label));
  }
  let pause = 0;
  search.addEventListener("input", () => {
    const start = search.value.slice(0, search.value.search(/[\w.]*$/));
    const words = [...FILTER_FIELDS.flat(), ...FILTER_FLAGS].filter((word) => word.startsWith(search.value.slice(start.length)));
    replace(filterWords, words.map((word) => el("option", { value: start + word })));
    clearTimeout(pause);
    pause = setTimeout(() => look({ q: search.value.trim() }), 180);
  });
  for (const [name, label] of [["run", "run"], ["conn", "connection"], ["host", "host"], ["qp", "queue pair"], ["opcode", "opcode"], ["cls", "class"]]) {
    choices[name] = el("select", { "aria-label": label, onchange: (event) => {
      const value = event.target.value;
      look(name === "run" ? { run: Number(value), conn: 0, sel: -1, from: -1, to: -1 } : name === "conn" ? { conn: Number(value), sel: -1 } : { [name]: value });
    } });
  }
  const step = el("button", { class: "button", title: "Step mode: one packet after the other (s)", onclick: toggleStep }, "Step");
  page.step = step;
  const clear = el("button", { class: "button", title: "Clear search and filters (Esc)", onclick: clearFilters }, "Clear");
  page.clear = clear;
  page.filters.append(choices.run, choices.conn, search,
    el("div", { class: "more-filters" }, choices.host, choices.qp, choices.opcode, choices.cls), clear,
    el("span", { class: "spring" }),
    moreButton("more-filters", "Filters", "More filters", page.filters),
    el("button", { class: "button", title: "Previous packet (p)", "aria-label": "Previous packet", onclick: () => stepPacket(-1) }, "‹"),
    step,
    el("button", { class: "button", title: "Next packet (n)", onclick: () => stepPacket(1) }, "Next packet ›"));
  replace(page.help, el("h2", {}, "Keys"), el("table", {}, el("tbody", {}, KEYS.map(([keys, about]) => el("tr", {}, el("th", {}, keys), el("td", {}, about))))),
    el("h2", {}, "Signs"), el("p", {}, "✕ lost or failed · ⊘ NAK · ↻ retransmitted · ⚡ fault rule · △ unusual · ✓ completed · ⚑ CE mark · ◆ CNP"),
    el("h2", {}, "Search"), el("p", {}, "Words are searched in the lines of the log; +12 is a PSN relative to the first of its connection. "
      + "Expressions select packets, with the fields of Wireshark or short names: qp == 0x12 && psn > +100 && nak"),
    el("form", { method: "dialog" }, el("button", { class: "button" }, "Close")));
  const top = el("header", { class: "top" }, el("span", { class: "logo", "aria-hidden": "true" }, "⇄"), page.title, page.status, el("span", { class: "spring" }));
  top.append(moreButton("more", "⋯", "More", top), el("div", { class: "top-buttons" },
    el("button", { class: "button", title: "Open a second event log", onclick: () => filePicker.click() }, "Open…"),
    el("button", { class: "button", title: "Copy a link to this view (c)", onclick: copyLink }, "Link"),
    el("button", { class: "button", title: "Larger (+)", onclick: () => scale(1) }, "A+"),
    el("button", { class: "button", title: "Smaller (−)", onclick: () => scale(-1) }, "A−"),
    el("button", { class: "button", title: "Light or dark (t)", "aria-label": "Light or dark", onclick: turnTheme }, "◐"),
    el("button", { class: "button", title: "Help (?)", "aria-label": "Help", onclick: () => page.help.showModal() }, "?")));
  root.append(top,
    page.tabs, page.filters, page.notes,
    el("div", { class: "middle" }, page.view, inspector.element),
    page.caption, el("footer", {}, overview.canvas, filePicker, filterWords, inspector.live), page.help);
}

/** A button that shows on narrow screens the controls which have no room there. */
function moreButton(id, text, label, owner) {
  const button = el("button", { class: "button more", id, title: label, "aria-label": label, "aria-expanded": "false", onclick: () => {
    button.setAttribute("aria-expanded", String(owner.classList.toggle("open")));
    redraw();
  } }, text);
  return button;
}

let drawnView = null;

function draw() {
  const run = currentRun();
  const view = views[app.state.view] ? app.state.view : "ladder";
  const unknown = view === app.state.view ? [] : [`This page has no view ${app.state.view}. The views are ${Object.keys(views).join(", ")}.`];
  document.title = run.title + " — SoftHCA explorer";
  page.title.textContent = run.title || run.name;
  page.status.textContent = statusText(run);
  replace(page.notes, [...unknown, ...app.runs.flatMap((run) => run.notes)].map((note) => el("p", { class: "note-bar" }, "⚠ ", note)));
  for (const [name] of VIEWS) {
    const tab = document.getElementById("tab-" + name);
    tab.classList.toggle("on", name === view);
    tab.setAttribute("aria-current", name === view ? "page" : "false");
  }
  drawFilters(run);
  if (drawnView !== view) {
    drawnView = view;
    document.getElementById("tab-" + view).scrollIntoView({ block: "nearest", inline: "nearest" });
    replace(page.view, views[view].element);
  }
  page.filters.hidden = view === "playground";
  document.body.classList.toggle("wide", ["packet", "compare", "playground"].includes(view));
  if (run.length === 0 && run.isComplete && view !== "compare" && view !== "playground") {
    drawnView = null;
    replace(page.view, el("p", { class: "empty big" }, "The run has no event."));
  } else views[view].draw();
  page.step.classList.toggle("on", Boolean(app.state.step));
  page.caption.hidden = !app.state.step;
  if (app.state.step && app.state.sel >= 0 && app.state.sel < run.length) {
    replace(page.caption, el("b", {}, whoOf(run, app.state.sel)), " ", sentence(run, app.state.sel));
  }
  inspector.draw();
  overview.draw();
  const isWrong = Boolean(app.state.q && app.filterError);
  search.setAttribute("aria-invalid", String(isWrong));
  search.title = isWrong ? app.filterError : "";
  if (isWrong) page.status.textContent = `filter: ${app.filterError}`;
}

function statusText(run) {
  if (app.connection) return `${app.connection}: ${plural(run.length, "event")}, ${plural(run.connections.length, "connection")}`;
  if (!run.isComplete) {
    const share = run.expected ? ` of ${countText(run.expected)}` : "";
    return `reading… ${countText(run.length)}${share} events`;
  }
  return `${plural(run.length, "event")}, ${plural(run.connections.length, "connection")}` + (run.source === "capture" ? ", from a capture" : "");
}

function setOptions(select, options, value) {
  const stamp = JSON.stringify([options, value]);
  if (select.dataset.stamp === stamp) return;
  select.dataset.stamp = stamp;
  replace(select, options.map(([key, text]) => el("option", { value: key }, text)));
  select.value = value;
}

function drawFilters(run) {
  const { state } = app;
  setOptions(choices.run, app.runs.map((run, at) => [String(at), run.title || run.name]), String(state.run));
  choices.run.hidden = app.runs.length < 2;
  setOptions(choices.conn, run.connections.slice(0, 2000).map((connection) => [String(connection.index), connectionText(run, connection)]), String(state.conn));
  const some = (label, words) => [["", label], ...words.map((word) => [word, word])];
  setOptions(choices.host, some("any host", run.hosts.words.filter(Boolean).slice(0, 2000)), state.host);
  setOptions(choices.qp, some("any queue pair", run.ends.map((end) => end.name).slice(0, 2000)), state.qp);
  setOptions(choices.opcode, some("any opcode", run.opcodes.words.filter(Boolean)), state.opcode);
  setOptions(choices.cls, some("any class", ["fault", "retransmission", ...CLASSES.filter((name) => !["other", "fault", "received"].includes(name))]), state.cls);
  if (document.activeElement !== search) search.value = state.q;
  page.clear.hidden = !isFiltered();
}

function connectionText(run, { ends, service, packets, troubles }) {
  return `${run.ends[ends[0]].name} ↔ ${run.ends[ends[1]].name} · ${service} · ${plural(packets, "packet")}${troubles ? " · " + troubles + " ✕" : ""}`;
}

/** The rows of the ladder that pass the filters. */
function ladderRows() {
  const run = currentRun();
  const connection = currentConnection();
  if (!connection) return { events: [], length: 0 };
  return filteredEvents(run, "ladder" + connection.index, connection.rows.values, connection.rows.length);
}

/** Moves the selection to the next row for which `wanted` holds. */
function move(direction, wanted = () => true) {
  const run = currentRun();
  if (app.state.view === "events") {
    const list = filteredEvents(run, "events", null, run.length);
    return moveIn(list.events ? list : { events: { get: (row) => row }, length: list.length, plain: true }, direction, wanted);
  }
  moveIn(ladderRows(), direction, wanted);
}

function moveIn(list, direction, wanted) {
  const run = currentRun();
  const at = (row) => (list.plain ? row : list.events[row]);
  const selected = app.state.sel < 0 ? -1 : anchor(run, app.state.sel);
  let row = selected < 0 ? (direction > 0 ? -1 : 0) : list.plain ? selected : rowOf(list, selected);
  if (direction < 0 && row >= 0 && at(row) !== selected) row++;
  for (row += direction; row >= 0 && row < list.length; row += direction) {
    if (wanted(at(row))) return look({ sel: at(row) });
  }
}

function stepPacket(direction) {
  const run = currentRun();
  move(direction, (event) => run.kind.values[event] === KIND.SENT);
}

function nextTrouble() {
  const run = currentRun();
  const isTrouble = (event) => run.flags.values[event] & 22 || run.kind.values[event] === KIND.REFUSED || run.kind.values[event] === KIND.FAULT
    || (run.syndrome.values[event] > 0 && run.syndromes.words[run.syndrome.values[event]] !== "ack");
  for (let event = app.state.sel + 1; event < run.length; event++) if (isTrouble(event)) return look({ sel: event });
  for (let event = 0; event < Math.min(run.length, app.state.sel); event++) if (isTrouble(event)) return look({ sel: event });
}

function toggleStep() {
  const list = ladderRows();
  look({ step: app.state.step ? 0 : 1, view: "ladder", sel: app.state.sel < 0 && list.length > 0 ? list.events[0] : app.state.sel });
}

function clearFilters() {
  search.value = "";
  look({ q: "", host: "", qp: "", opcode: "", cls: "" });
}

function turnTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  keep("theme", root.dataset.theme);
  redraw();
}

function scale(direction) {
  const root = document.documentElement;
  const size = Math.min(28, Math.max(11, (parseFloat(getComputedStyle(root).fontSize) || 15) + direction * 1.5));
  root.style.fontSize = size + "px";
  keep("size", size);
  redraw();
}

/** Stores a preference, where the browser permits that to pages from disk. */
function keep(name, value) {
  try {
    localStorage.setItem("softhca-" + name, value);
  } catch {
    // The preference is lost.
  }
}

function recall() {
  try {
    const [theme, size] = [localStorage.getItem("softhca-theme"), Number(localStorage.getItem("softhca-size"))];
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
    if (size >= 11 && size <= 28) document.documentElement.style.fontSize = size + "px";
  } catch {
    // The preference is lost.
  }
}

async function copyLink() {
  if (app.meta.playground) look(await playground.linkState());
  const link = location.href.split("#")[0] + "#" + linkOf(app.state);
  try {
    await navigator.clipboard.writeText(link);
    page.status.textContent = "link copied";
  } catch {
    page.status.textContent = "the link is in the address bar";
  }
}

function onKey(event) {
  const isTyping = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement || event.target instanceof HTMLTextAreaElement;
  if (event.key === "Escape") {
    if (page.help.open) return;
    document.activeElement?.blur();
    if (isFiltered()) clearFilters();
    else if (app.state.step) look({ step: 0 });
    return;
  }
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || page.help.open) return;
  const act = {
    ArrowDown: () => move(1), ArrowUp: () => move(-1), j: () => move(1), k: () => move(-1), n: () => stepPacket(1), p: () => stepPacket(-1),
    f: nextTrouble, s: toggleStep, t: turnTheme, c: copyLink, "/": () => search.focus(), "?": () => page.help.showModal(),
    "+": () => scale(1), "=": () => scale(1), "-": () => scale(-1), "[": () => look({ conn: Math.max(0, app.state.conn - 1), sel: -1 }),
    "]": () => look({ conn: Math.min(currentRun().connections.length - 1, app.state.conn + 1), sel: -1 }),
    PageDown: () => pageBy(1), PageUp: () => pageBy(-1), Home: () => pageBy(-Infinity), End: () => pageBy(Infinity),
  }[event.key] ?? (/^\d$/.test(event.key) && VIEWS[Number(event.key)] && (() => look({ view: VIEWS[Number(event.key)][0] })));
  if (!act) return;
  event.preventDefault();
  act();
}

function pageBy(direction) {
  const rows = views[app.state.view]?.rows;
  if (rows) rows.scrollTo(direction === Infinity ? rows.limit() : direction === -Infinity ? 0 : rows.top + direction * (rows.visible() - 2));
}

async function openFile(file) {
  const run = await readFile(file, redraw);
  if (run.length === 0) {
    currentRun().notes.push(...run.notes);
    return redraw();
  }
  app.runs = [app.runs[0], run];
  look({ view: "compare" });
}

/** Resolves when the browser has read the whole page, whose data follow the script. */
function loaded() {
  if (document.readyState !== "loading") return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve, { once: true }));
}

async function begin() {
  const root = document.getElementById("app");
  try {
    if (typeof DecompressionStream === "undefined") throw new Error("this browser has no DecompressionStream; use a newer one");
    app.meta = readMeta();
    app.runs = app.meta.live ? [liveRun(app.meta.live)] : emptyRuns(app.meta);
    // A playground has no run yet.
    if (app.runs.length === 0) {
      app.runs = [new Run("playground", "log")];
      app.runs[0].isComplete = true;
    }
    recall();
    build(root);
    readLink();
    // The report of a failed run begins with its verdict.
    const result = app.runs[0].result;
    if (location.hash === "" && result && result.verdict !== "pass") app.state.view = "why";
    app.listeners.push(draw);
    window.addEventListener("hashchange", () => {
      readLink();
      if (app.meta.playground) playground.open();
    });
    window.addEventListener("keydown", onKey);
    new ResizeObserver(redraw).observe(page.view);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    filePicker.addEventListener("change", () => filePicker.files[0] && openFile(filePicker.files[0]));
    window.addEventListener("dragover", (event) => event.preventDefault());
    window.addEventListener("drop", (event) => {
      event.preventDefault();
      if (event.dataTransfer.files[0]) openFile(event.dataTransfer.files[0]);
    });
    draw();
    await loaded();
    if (app.meta.live) followEvents(app.runs[0]);
    else if (app.meta.playground) await playground.open();
    else await readRuns(app.meta, app.runs, redraw);
    app.readAt = performance.now();
    redraw();
  } catch (error) {
    replace(root, el("p", { class: "empty big" }, "The page cannot show the run: " + error.message));
    throw error;
  }
}

begin();
