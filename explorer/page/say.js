// The texts of events.

import { bytesText, opcodeName, rateText, relativePsn, syndromeText, timeText } from "./words.js";
import { AGAIN, KIND, LOST, NO_PSN } from "./run.js";
import { app } from "./state.js";

/** The relative PSN of an event. */
export function psnOf(run, index) {
  const psn = run.psn.values[index];
  return psn === NO_PSN ? "" : relativePsn(psn, run.zero(index));
}

export function packetLabel(run, index) {
  const opcode = run.opcodes.words[run.opcode.values[index]];
  const syndrome = run.syndromes.words[run.syndrome.values[index]];
  const name = opcodeName(opcode);
  if (name === "CNP") return "CNP";
  const message = run.labels.get(index)?.match(/^cm (\S+)/);
  if (message) return "CM " + message[1];
  if (name === "ACKNOWLEDGE" && syndrome) return syndromeText(syndrome) + " " + psnOf(run, index);
  return name + " " + psnOf(run, index);
}

/** A mark beside the label, so that no meaning depends on colour alone. */
export function packetMark(run, index) {
  const flags = run.flags.values[index];
  const syndrome = run.syndromes.words[run.syndrome.values[index]];
  if (flags & LOST) return "✕";
  if (syndrome && syndrome !== "ack") return "⊘";
  if (flags & AGAIN) return "↻";
  return "";
}

export function packetDetail(run, index) {
  const parts = [];
  const payload = run.payload.values[index];
  if (payload > 0) parts.push(bytesText(payload));
  if (run.flags.values[index] & AGAIN) parts.push("retransmission");
  return parts.join(", ");
}

export function workName(run, work) {
  const { operation, number } = run.works[work];
  return operation.toUpperCase() + " #" + number;
}

/** The effect of a fault on a packet, with its rule. */
export function faultText(run, fault) {
  const entry = run.entry(fault);
  return entry.trigger ?? entry.data.effect?.kind ?? "lost";
}

/** The tone of an event: plain, good, odd or bad. */
export function toneOf(run, index) {
  const kind = run.kind.values[index];
  const flags = run.flags.values[index];
  switch (kind) {
    case KIND.SENT: {
      const syndrome = run.syndromes.words[run.syndrome.values[index]];
      if (flags & LOST || (syndrome && syndrome !== "ack")) return "bad";
      return flags & AGAIN ? "odd" : "plain";
    }
    case KIND.COMPLETED: return run.failures.length > 0 && (flags & 16) ? "bad" : "good";
    case KIND.RETIRED: return "good";
    case KIND.REFUSED: case KIND.CLIENT: case KIND.FAULT: return "bad";
    case KIND.DROPPED: case KIND.DUPLICATE: case KIND.BACK: case KIND.RNR_WAIT: case KIND.TIMED_OUT: case KIND.ASYNC: return "odd";
    case KIND.STATE: return run.entry(index).data.to === "ERR" ? "bad" : "plain";
    default: return app.meta.events.find(({ name }) => name === run.kinds.words[kind])?.emphasis === "error" ? "bad" : "plain";
  }
}

const MARKS = { plain: "", good: "✓", odd: "△", bad: "✕" };

export function toneMark(tone) {
  return MARKS[tone];
}

/** An event in one line. */
export function sentence(run, index) {
  const kind = run.kind.values[index];
  const psn = psnOf(run, index);
  if (kind === KIND.SENT || kind === KIND.RECEIVED) {
    const [verb, detail] = [kind === KIND.SENT ? "" : "received: ", packetDetail(run, index)];
    return verb + packetLabel(run, index) + (detail ? ", " + detail : "");
  }
  const entry = run.entry(index);
  const data = entry.data ?? {};
  switch (kind) {
    case KIND.STARTED: {
      const packets = data.packets > 1 ? ` in ${data.packets} packets` : "";
      const missing = entry.trigger ? `; ${entry.trigger}` : "";
      return `${workName(run, run.work.values[index])}, ${bytesText(data.bytes)}${packets}${missing}`;
    }
    case KIND.COMPLETED: {
      const work = run.work.values[index];
      const name = work >= 0 ? workName(run, work) : data.operation.toUpperCase();
      const bytes = data.operation.startsWith("receive") && data.status === "SUCCESS" ? ", " + bytesText(data.bytes) : "";
      return `${name}: ${data.status}${bytes}${data.status !== "SUCCESS" && data.status !== "WR_FLUSH_ERR" && entry.trigger ? " — " + relativeReason(run, index, entry.trigger) : ""}`;
    }
    case KIND.RETIRED: {
      const work = run.work.values[index];
      return (work >= 0 ? workName(run, work) : "work request") + (run.source === "capture" ? ": acknowledged" : ": completed without a CQE (unsignaled)");
    }
    default: return eventText(run, index, entry, data);
  }
}

/** The text of an event, rendered from the template of its declaration. */
function eventText(run, index, entry, data) {
  const schema = app.meta.events.find(({ name }) => name === entry.name);
  if (!schema) return entry.name.slice(entry.name.indexOf(":") + 1).replaceAll("_", " ") + (entry.trigger ? ": " + entry.trigger : "");
  const ownZero = run.ends[run.end_.values[index]]?.zero ?? -1;
  const peerZero = run.peerOf(index)?.zero ?? -1;
  const formats = {
    own: (psn) => relativePsn(psn, ownZero), peer: (psn) => relativePsn(psn, peerZero), either: (psn) => relativePsn(psn, run.zero(index)),
    hex: hexText, signed, words: (text) => text.replaceAll(/[-/]/g, " "), until: (ns) => timeText(Math.max(0, ns - run.time.values[index])),
    retries: (left) => (left === undefined ? "" : `, ${left} retries left`), link: (link) => (link === undefined ? "" : ` on link ${link}`),
    rate: rateText, millionths: (count) => (count / 1e6).toFixed(3),
    packet: (packet) => packet?.psn === undefined ? "a packet" : run.link.values[index] >= 0 ? packetLabel(run, run.link.values[index]) : "PSN " + packet.psn,
  };
  const lookup = (path) => (path === "trigger" ? entry.trigger && relativeReason(run, index, entry.trigger) : path.split(".").reduce((value, key) => value?.[key], data));
  return renderTemplate(schema.text, lookup, formats);
}

/** Renders `{path}`, `{path|format}`, `{path?text if set}` and `{path!text if not set}`. */
function renderTemplate(template, lookup, formats) {
  let [text, rest] = ["", template];
  for (let open = rest.indexOf("{"); open >= 0; open = rest.indexOf("{")) {
    let [close, depth] = [open, 0];
    do depth += rest[close] === "{" ? 1 : rest[close] === "}" ? -1 : 0; while (depth > 0 && ++close < rest.length);
    const [, path, operator, tail] = rest.slice(open + 1, close).match(/^([^|?!]*)([|?!]?)(.*)$/s);
    const value = lookup(path);
    text += rest.slice(0, open);
    if (operator === "?" || operator === "!") text += Boolean(value) === (operator === "?") ? renderTemplate(tail, lookup, formats) : "";
    else text += operator === "|" ? formats[tail](value) : value ?? "";
    rest = rest.slice(close + 1);
  }
  return text + rest;
}

function signed(number) {
  return number < 0 ? "−" + -number : "+" + number;
}

function hexText(value) {
  return "0x" + BigInt(value).toString(16);
}

/** The reason in the log, with relative PSNs. */
function relativeReason(run, index, text) {
  const kind = run.kind.values[index];
  const at = run.end_.values[index];
  if (at < 0) return text;
  const peer = run.peerOf(index);
  const ownFirst = kind === KIND.COMPLETED || kind === KIND.STATE;
  const refused = /^expected PSN|does not continue/.test(text);
  const zero = ownFirst && !refused ? run.ends[at].zero : peer?.zero ?? -1;
  if (zero < 0) return text;
  return text.replace(/PSN (\d+)/g, (_, psn) => `PSN ${relativePsn(+psn, zero)}`);
}

/** The queue pair or host of an event. */
export function whoOf(run, index) {
  const end = run.end_.values[index];
  return end >= 0 ? run.ends[end].name : run.hosts.words[run.host.values[index]] || "fabric";
}
