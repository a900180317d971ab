// Names and numbers: opcodes, times, PSNs, and the meaning of RoCE terms.

export const PSN_SPACE = 0x1000000;

/** The signed distance from `zero` to `psn`, in -2^23..2^23. */
export function psnDistance(psn, zero) {
  const distance = (psn - zero) & 0xffffff;
  return distance >= 0x800000 ? distance - PSN_SPACE : distance;
}

export function relativePsn(psn, zero) {
  if (zero < 0) return String(psn);
  const distance = psnDistance(psn, zero);
  return distance < 0 ? "−" + -distance : "+" + distance;
}

/** A time in nanoseconds in the unit that fits `span`. */
export function timeText(ns, span = ns, digits = 3) {
  const [unit, name] = timeUnit(Math.max(Math.abs(span), Math.abs(ns)));
  return (ns / unit).toFixed(unit === 1 ? 0 : digits) + " " + name;
}

/** The decimals with which `count` ascending times differ if they differ, in the unit that fits `span`; 3 at least, nanoseconds at most. */
export function timeDigits(count, timeAt, span) {
  const [unit] = timeUnit(span);
  let least = Infinity;
  for (let at = 1; at < count; at++) {
    const step = timeAt(at) - timeAt(at - 1);
    if (step > 0 && step < least) least = step;
  }
  let digits = Math.min(3, Math.log10(unit));
  while (digits < Math.log10(unit) && least / unit < 10 ** -digits) digits++;
  return digits;
}

export function timeUnit(span) {
  if (span < 1e3) return [1, "ns"];
  if (span < 1e6) return [1e3, "µs"];
  if (span < 1e9) return [1e6, "ms"];
  return [1e9, "s"];
}

/** A real time in milliseconds. */
export function secondsText(ms) {
  return (ms / 1000).toFixed(ms < 9950 ? 1 : 0) + " s";
}

export function countText(count) {
  return count.toLocaleString("en");
}

export function plural(count, one, many = one + "s") {
  return countText(count) + " " + (count === 1 ? one : many);
}

export function bytesText(count) {
  if (count < 10240) return count + " B";
  if (count < 10 * 1048576) return (count / 1024).toFixed(1) + " KiB";
  if (count < 10 * 1073741824) return (count / 1048576).toFixed(1) + " MiB";
  return (count / 1073741824).toFixed(1) + " GiB";
}

export function rateText(bitsPerSecond) {
  const short = (value) => String(Number(value.toPrecision(3)));
  if (bitsPerSecond >= 1e9) return short(bitsPerSecond / 1e9) + " Gbit/s";
  if (bitsPerSecond >= 1e6) return short(bitsPerSecond / 1e6) + " Mbit/s";
  if (bitsPerSecond >= 1e3) return short(bitsPerSecond / 1e3) + " kbit/s";
  return short(bitsPerSecond) + " bit/s";
}

export function hex(value, digits = 0) {
  return "0x" + value.toString(16).padStart(digits, "0");
}

/** `RC WRITE_FIRST` without its service. */
export function opcodeName(opcode) {
  const space = opcode.indexOf(" ");
  return space < 0 ? opcode : opcode.slice(space + 1);
}

/** Whether an opcode is that of a response. */
export function isResponse(opcode) {
  const name = opcodeName(opcode);
  return name === "ACKNOWLEDGE" || name === "ATOMIC_ACKNOWLEDGE" || name.startsWith("READ_RESPONSE") || name === "CNP";
}

const MEANINGS = {
  SEND: "A SEND carries data into the next receive that the peer has posted.",
  WRITE: "An RDMA WRITE places data in the peer's memory without the peer's program.",
  READ_REQUEST: "An RDMA READ requests a range of the peer's memory.",
  READ_RESPONSE: "A response to an RDMA READ, with its data. Responses use the PSNs that the request reserved.",
  ACKNOWLEDGE: "An acknowledgement covers its PSN and every one before it. With a NAK syndrome it rejects the request instead.",
  ATOMIC_ACKNOWLEDGE: "The response to an atomic: the value before the operation.",
  COMPARE_SWAP: "An atomic: replaces eight bytes of the peer if they have the expected value.",
  FETCH_ADD: "An atomic: adds to eight bytes of the peer.",
  CNP: "A congestion notification packet: a packet arrived with a CE mark, and the sender must reduce its rate.",
  FLUSH: "Requests that earlier writes become visible or persistent.",
  ATOMIC_WRITE: "Writes eight bytes at once.",
};

const POSITIONS = {
  FIRST: "It is the first packet of its message.",
  MIDDLE: "It is neither the first nor the last packet of its message.",
  LAST: "It is the last packet of its message.",
  ONLY: "It is the whole message.",
};

export function opcodeMeaning(opcode) {
  const name = opcodeName(opcode);
  const key = Object.keys(MEANINGS).sort((a, b) => b.length - a.length).find((key) => name.startsWith(key));
  const position = name.match(/_(FIRST|MIDDLE|LAST|ONLY)/);
  return (key ? MEANINGS[key] : "") + (position && key !== "READ_REQUEST" ? " " + POSITIONS[position[1]] : "");
}

const SYNDROMES = {
  "ack": "Everything up to this PSN has arrived.",
  "rnr-nak": "Receiver not ready: no receive is posted. The sender waits and tries again.",
  "nak/psn-sequence-error": "The responder expected another PSN: a packet is missing.",
  "nak/invalid-request": "The responder cannot execute the request.",
  "nak/remote-access-error": "The rkey, the range or the access flags do not permit this access.",
  "nak/remote-operational-error": "The responder has a local error.",
  "nak/invalid-rd-request": "Reliable datagram only.",
};

export function syndromeText(syndrome) {
  if (syndrome === "ack") return "ACK";
  if (syndrome === "rnr-nak") return "RNR NAK";
  return "NAK " + syndrome.slice(syndrome.indexOf("/") + 1).replaceAll("-", " ").replace(/^psn/, "PSN");
}

export function syndromeMeaning(syndrome) {
  return SYNDROMES[syndrome] ?? "The responder rejects the request.";
}

export const STATE_MEANINGS = {
  RESET: "Just created: nothing can be posted.",
  INIT: "Receives can be posted; packets are not processed yet.",
  RTR: "Ready to receive: the peer is known, and requests are executed.",
  RTS: "Ready to send: fully operational.",
  SQD: "Send queue draining: no new send starts.",
  SQE: "Send queue error: sends failed, receives continue.",
  ERR: "Error: all posted work requests are flushed.",
};
