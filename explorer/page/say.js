// Events as sentences.

import { bytesText, opcodeName, rateText, relativePsn, syndromeText, timeText } from "./words.js";
import { AGAIN, KIND, LOST, NO_PSN } from "./run.js";

/** The PSN of an event as people read it. */
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

/** A mark beside the label, so that no meaning hangs on colour alone. */
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
  if (run.flags.values[index] & AGAIN) parts.push("sent again");
  return parts.join(", ");
}

export function workName(run, work) {
  const { operation, number } = run.works[work];
  return operation.toUpperCase() + " #" + number;
}

/** What was done to a packet, by whom. */
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
    default: return ["fabric:frame_lost", "fabric:watchdog_fired"].includes(run.kinds.words[kind]) ? "bad" : "plain";
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
      return `${workName(run, run.work.values[index])}, ${bytesText(data.bytes)}${packets}`;
    }
    case KIND.COMPLETED: {
      const work = run.work.values[index];
      const name = work >= 0 ? workName(run, work) : data.operation.toUpperCase();
      const bytes = data.operation.startsWith("receive") && data.status === "success" ? ", " + bytesText(data.bytes) : "";
      return `${name}: ${data.status}${bytes}${data.status !== "success" && data.status !== "flushed" && entry.trigger ? " — " + told(run, index, entry.trigger) : ""}`;
    }
    case KIND.RETIRED: {
      const work = run.work.values[index];
      return (work >= 0 ? workName(run, work) : "work request") + (run.source === "capture" ? ": answered" : ": done, no completion wanted");
    }
    case KIND.DROPPED: return `${data.packet ? packetLabel(run, index) : "a packet"} not taken: ${told(run, index, entry.trigger ?? data.reason)}`;
    case KIND.DUPLICATE: return `${psn} is a duplicate: answered, not done again`;
    case KIND.REFUSED: return told(run, index, entry.trigger ?? data.reason);
    case KIND.BACK: return `goes back to ${psn}: ${data.cause.replaceAll("-", " ")}, ${data.retries_left} more tries left`;
    case KIND.RNR_WAIT: return `waits ${timeText(data.until - run.time.values[index])} before ${psn} is sent again, ${data.retries_left} more tries left`;
    case KIND.TIMED_OUT: return `no answer to ${psn} in time`;
    case KIND.WRITTEN: return `${bytesText(data.length)} written to ${hexText(data.address)}, key ${hexText(data.key)}`;
    case KIND.STATE: return `${data.from} → ${data.to}${data.reason !== "asked" && entry.trigger ? ": " + told(run, index, entry.trigger) : ""}`;
    case KIND.NOTIFIED: return `completion queue ${hexText(data.cq)} wakes its owner`;
    case KIND.ASYNC: return `async event ${data.event}`;
    case KIND.CLIENT: return `the application broke its ring: ${entry.trigger}`;
    case KIND.FAULT: return `${data.opcode ? opcodeName(data.opcode) + " " + (data.relative_psn !== undefined ? signed(data.relative_psn) : data.psn) : "a packet"} ${entry.trigger}`;
    default: {
      const said = congestionText(run, index, entry.name, data);
      if (said) return said;
      const fields = Object.entries(data).filter(([name, value]) => typeof value !== "object" && name !== "qp");
      const text = fields.map(([name, value]) => `${name} ${value}`).join(", ");
      return entry.name.slice(entry.name.indexOf(":") + 1).replaceAll("_", " ") + (entry.trigger ? ": " + entry.trigger : text ? ": " + text : "");
    }
  }
}

/** What congestion control and the fabric tell. */
function congestionText(run, index, name, data) {
  const where = data.cable === undefined ? "" : ` on cable ${data.cable}, priority ${data.priority}`;
  const packet = data.packet?.psn === undefined ? "a packet" : run.link.values[index] >= 0 ? packetLabel(run, run.link.values[index]) : "PSN " + data.packet.psn;
  switch (name) {
    case "qp:configured": return `configured: ${data.kind.toUpperCase()}, recovery ${data.recovery}, MTU ${data.mtu}, retry_cnt ${data.retry_cnt}, rnr_retry ${data.rnr_retry}`;
    case "congestion:mark_seen": return `${psnOf(run, index)} came with a congestion mark${data.notified ? ": a CNP follows" : "; the last CNP was too short ago"}`;
    case "congestion:rate_changed": return `rate ${rateText(data.rate)}, alpha ${(data.alpha / 1e6).toFixed(3)}: ${data.cause.replaceAll("-", " ")}`;
    case "fabric:ecn_marked": return `${packet} marked CE: ${bytesText(data.depth)} waited before it${where}`;
    case "fabric:frame_lost": return `${packet} lost${where}: ${run.entry(index).trigger ?? data.cause}`;
    case "fabric:pause_sent": return data.quanta > 0 ? `asks for a pause of ${data.quanta} quanta${where}: ${bytesText(data.held)} are held` : `lets go on${where}`;
    case "fabric:pause_received": return data.quanta > 0 ? `paused${where} for ${timeText(data.until - run.time.values[index])}` : `may go on${where}`;
    case "fabric:pause_ended": return `goes on${where}: the pause ${data.how === "resumed" ? "was taken back" : data.how}`;
    case "fabric:queue_sampled": return `${bytesText(data.depth)} wait${where}`;
    case "fabric:watchdog_fired": return `the watchdog took ${data.lost} frames out${where}`;
    case "fabric:watchdog_restored": return `the watchdog is done${where}`;
    default: return "";
  }
}

function signed(number) {
  return number < 0 ? "−" + -number : "+" + number;
}

function hexText(value) {
  return "0x" + BigInt(value).toString(16);
}

/** The log's reason, with the PSNs of the connection's own counting. */
function told(run, index, text) {
  const kind = run.kind.values[index];
  const at = run.end_.values[index];
  if (at < 0) return text;
  const peer = run.peerOf(index);
  const ownFirst = kind === KIND.COMPLETED || kind === KIND.STATE;
  const refused = /is missing, .* came|does not fit/.test(text);
  const zero = ownFirst && !refused ? run.ends[at].zero : peer?.zero ?? -1;
  if (zero < 0) return text;
  return text
    .replace(/PSN (\d+)( is missing, )(\d+)( came)/, (_, one, a, two, b) => `PSN ${relativePsn(+one, zero)}${a}${relativePsn(+two, zero)}${b}`)
    .replace(/(response )(\d+)( is missing, )(\d+)( came)/, (_, r, one, a, two, b) => `${r}${relativePsn(+one, zero)}${a}${relativePsn(+two, zero)}${b}`)
    .replace(/PSN (\d+)/g, (_, psn) => `PSN ${relativePsn(+psn, zero)}`);
}

/** Who an event is of. */
export function whoOf(run, index) {
  const end = run.end_.values[index];
  return end >= 0 ? run.ends[end].name : run.hosts.words[run.host.values[index]] || "fabric";
}
