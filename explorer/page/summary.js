// The run in numbers: hosts, connections, trouble, latencies, the slowest requests, and mistakes of programs.

import { el, replace } from "./dom.js";
import { bytesText, countText, plural, rateText, timeText } from "./words.js";
import { currentRun, look } from "./state.js";

export class SummaryView {
  constructor() {
    this.element = el("div", { class: "summary" });
  }

  draw() {
    const run = currentRun();
    const { numbers, lints, summary } = run.why;
    if (!numbers) {
      const text = run.isComplete ? summary || "This page has no summary of the run. Run: softhca trace --summary FILE" : "Reading…";
      return replace(this.element, el("p", { class: "empty" }, text));
    }
    const has = (list) => list && list.length > 0;
    replace(this.element, el("section", { class: "chain" },
      el("h2", {}, "Summary"),
      el("p", {}, `${plural(numbers.hosts.length, "host")}, ${plural(numbers.connections.length, "connection")}, `
        + `${plural(numbers.messages, "message")}, ${bytesText(numbers.bytes)}, ${plural(numbers.packets, "packet")} in ${timeText(numbers.duration_ns)}`),
      el("p", {}, saveLink("summary.csv", "text/csv", () => csvText(numbers)), " ", saveLink("summary.json", "application/json", () => JSON.stringify(numbers, null, 1))),
      has(numbers.causes) && [el("h2", {}, "Trouble"), table(["what", "known", "inferred", "ambiguous"],
        numbers.causes.map((cause) => [cause.code, cause.known, cause.inferred, cause.ambiguous].map(orBlank)))],
      el("h2", {}, "Connections"), table(["connection", "service", "packets", "payload", "messages", "failed", "sent again", "lost", "not captured", "NAKs", "CNPs"],
        numbers.connections.slice(0, MOST_ROWS).map((one) => [one.name, one.service, countText(one.packets), bytesText(one.payload), one.messages,
          one.failed, one.retransmissions, one.lost, one.not_captured, one.naks, one.cnps].map(orBlank))),
      el("h2", {}, "Hosts"), table(["host", "packets", "payload"], numbers.hosts.slice(0, MOST_ROWS).map((host) => [host.name, countText(host.packets), bytesText(host.payload)])),
      has(numbers.operations) && [el("h2", {}, "Operations"), table(["operation", "messages", "bytes", "sizes", "min", "median", "p99", "max", "latencies"],
        numbers.operations.map((one) => [one.operation, one.messages, bytesText(one.bytes), bars(one.sizes, bytesText), timeText(one.min_ns), timeText(one.median_ns),
          timeText(one.p99_ns), timeText(one.max_ns), bars(one.latencies, timeText)]))],
      has(numbers.throughput) && [el("h2", {}, "Throughput"), el("p", {}, bars(numbers.throughput.map((bin) => ({ from: bin.time_ns, count: bin.payload })), timeText),
        ` payload in each ${timeText(numbers.throughput[0].length_ns)}, at most ${rateText(Math.max(...numbers.throughput.map((bin) => bin.payload)) * 8e9 / numbers.throughput[0].length_ns)}`)],
      has(numbers.slowest) && [el("h2", {}, "Slowest work requests"), table(["request", "queue pair", "took"],
        numbers.slowest.map((slow) => [el("button", { class: "button", onclick: () => look({ sel: slow.entry, view: "ladder" }) }, slow.request),
          slow.queue_pair, timeText(slow.took_ns)]))],
      has(lints) && [el("h2", {}, "Mistakes of the program"), table(["lint", "what", "fix"],
        lints.map((lint) => [`${lint.severity} ${lint.code}`, lint.text + (lint.times > 1 ? ` (${lint.times} times)` : ""), lint.fix]))]));
  }
}

/** More rows than these are in the exported files only. */
const MOST_ROWS = 200;

function orBlank(value) {
  return value === 0 ? "" : value;
}

function table(heads, rows) {
  // The keyboard scrolls what is wider than the screen.
  return el("div", { class: "table-scroll", tabindex: "0", role: "group", "aria-label": `table: ${heads.join(", ")}` }, el("table", { class: "numbers" },
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell)))))));
}

/** A histogram as text: one block for each bucket. */
function bars(buckets, text) {
  const most = Math.max(1, ...buckets.map(({ count }) => count));
  const blocks = buckets.map(({ count }) => "▁▂▃▄▅▆▇█"[Math.min(7, Math.floor((count / most) * 7.99))]).join("");
  const about = buckets.map(({ from, count }) => `from ${text(from)}: ${countText(count)}`).join(", ");
  return el("span", { title: about, "aria-label": about, role: "img" }, blocks);
}

function saveLink(name, type, text) {
  return el("button", {
    class: "button", onclick: () => {
      const link = el("a", { href: URL.createObjectURL(new Blob([text()], { type })), download: name });
      link.click();
      URL.revokeObjectURL(link.href);
    },
  }, "Save " + name);
}

/** The numbers as rows of table, name, key, value. */
function csvText(numbers) {
  const rows = [["table", "name", "key", "value"]];
  for (const key of ["duration_ns", "packets", "messages", "bytes"]) rows.push(["total", "", key, numbers[key]]);
  const lists = [["host", numbers.hosts, "name"], ["connection", numbers.connections, "name"], ["cause", numbers.causes, "code"],
    ["operation", numbers.operations, "operation"]];
  for (const [label, list, naming] of lists) {
    for (const one of list) {
      for (const [key, value] of Object.entries(one)) if (typeof value === "number") rows.push([label, one[naming], key, value]);
    }
  }
  for (const one of numbers.operations) {
    for (const { from, count } of one.sizes) rows.push(["size", one.operation, from, count]);
    for (const { from, count } of one.latencies) rows.push(["latency_ns", one.operation, from, count]);
  }
  for (const bin of numbers.throughput) rows.push(["throughput", bin.length_ns, bin.time_ns, bin.payload]);
  for (const slow of numbers.slowest) rows.push(["slowest", `${slow.request} of ${slow.queue_pair}`, slow.entry, slow.took_ns]);
  return rows.map((row) => row.map((cell) => (/[",]/.test(String(cell)) ? `"${String(cell).replaceAll("\"", "\"\"")}"` : cell)).join(",")).join("\n") + "\n";
}
