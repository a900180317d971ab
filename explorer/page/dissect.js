// The fields of a frame: name, position, value and meaning.

import { bytesText, hex } from "./words.js";

const LINKS = ["ethernet", "ip", "loopback", "cooked", "cooked2"];

/** Reads bits of bytes in network order. */
class Cursor {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
    this.headers = [];
  }
  left() {
    return this.bytes.length - this.at;
  }
  /** A header of `length` bytes; fields are `[name, bits, meaning, show]`, in order. */
  header(name, length, fields, meaning = "") {
    if (this.left() < length) {
      this.headers.push({ name, from: this.at, to: this.bytes.length, meaning: "cut: " + length + " bytes are needed", fields: [] });
      this.at = this.bytes.length;
      return null;
    }
    const start = this.at;
    const values = {};
    const shown = [];
    let bit = start * 8;
    for (const [field, bits, about, show] of fields) {
      const value = this.bits(bit, bits);
      values[field] = value;
      shown.push({
        name: field, from: Math.floor(bit / 8), to: Math.ceil((bit + bits) / 8), bits, bit: bit % 8,
        raw: value, value: show ? show(value, values) : bits > 16 ? hex(value, bits / 4) : String(value), meaning: about,
      });
      bit += bits;
    }
    this.at += length;
    this.headers.push({ name, from: start, to: this.at, meaning, fields: shown });
    return values;
  }
  bits(bit, count) {
    let value = 0n;
    for (let at = bit; at < bit + count; at++) value = (value << 1n) | BigInt((this.bytes[at >> 3] >> (7 - (at & 7))) & 1);
    return count <= 52 ? Number(value) : value;
  }
}

const mac = (value) => BigInt(value).toString(16).padStart(12, "0").replace(/..(?=.)/g, "$&:");
const ipv4 = (value) => [24, 16, 8, 0].map((shift) => (value / 2 ** shift) & 255).join(".");
const hexOf = (digits) => (value) => hex(value, digits);
const yes = (value) => (value ? "yes" : "no");
const ecnText = (value) => ["not capable", "capable (1)", "capable (0)", "congestion experienced"][value] + ` (${value})`;

function ipv6(value) {
  const parts = [];
  for (let shift = 112n; shift >= 0n; shift -= 16n) parts.push(((value >> shift) & 0xffffn).toString(16));
  const text = parts.join(":");
  const zeros = text.match(/(?:^|:)0(?::0)+(?:$|:)/g)?.sort((a, b) => b.length - a.length)[0];
  return zeros ? text.replace(zeros, "::") : text;
}

const ETHERNET = [
  ["destination", 48, "The MAC address of the receiver or of the next router.", mac],
  ["source", 48, "The MAC address of the sender.", mac],
  ["type", 16, "The type of the next header: 0x0800 is IPv4, 0x86dd IPv6, 0x8915 RoCE v1.", hexOf(4)],
];
const VLAN = [
  ["priority", 3, "The priority of the frame, which PFC pauses."], ["drop eligible", 1, "Whether a congested switch may drop it first.", yes],
  ["VLAN", 12, "The virtual network."], ["type", 16, "The type of the next header.", hexOf(4)],
];
const IPV4 = [
  ["version", 4, "4."], ["header length", 4, "In words of 32 bits; RoCEv2 has no options, so 5."],
  ["DSCP", 6, "The traffic class: networks map it to a priority."],
  ["ECN", 2, "Explicit congestion notification: a congested switch sets CE (congestion experienced) instead of dropping the packet.", ecnText],
  ["total length", 16, "Bytes from here to the end of the ICRC."],
  ["identification", 16, "The number of the packet for reassembly. The ICRC covers it.", hexOf(4)], ["flags", 3, "2 is do not fragment: RoCE packets are never fragmented."],
  ["fragment offset", 13, "Always 0."], ["time to live", 8, "The remaining number of hops. The ICRC does not cover it."],
  ["protocol", 8, "17 is UDP."], ["header checksum", 16, "The checksum of this header. The ICRC does not cover it.", hexOf(4)],
  ["source", 32, "The IP address of the sender.", ipv4], ["destination", 32, "The IP address of the receiver.", ipv4],
];
const IPV6 = [
  ["version", 4, "6."], ["DSCP", 6, "The traffic class: networks map it to a priority."],
  ["ECN", 2, "Explicit congestion notification: a congested switch sets CE (congestion experienced) instead of dropping the packet.", ecnText],
  ["flow label", 20, "The same for all packets of a flow.", hexOf(5)], ["payload length", 16, "Bytes after this header."],
  ["next header", 8, "17 is UDP, 27 is RoCE v1."], ["hop limit", 8, "The remaining number of hops. The ICRC does not cover it."],
  ["source", 128, "The IP address of the sender.", ipv6], ["destination", 128, "The IP address of the receiver.", ipv6],
];
const UDP = [
  ["source port", 16, "Chosen by the sender. Switches select one of several paths by it."], ["destination port", 16, "4791 is RoCEv2."],
  ["length", 16, "Bytes from here to the end of the ICRC."], ["checksum", 16, "0 for RoCE, which has the ICRC.", hexOf(4)],
];

const SERVICES = { 0: "RC", 1: "UC", 3: "UD", 4: "CNP", 5: "XRC" };
const OPERATIONS = [
  "SEND_FIRST", "SEND_MIDDLE", "SEND_LAST", "SEND_LAST_IMM", "SEND_ONLY", "SEND_ONLY_IMM", "WRITE_FIRST", "WRITE_MIDDLE",
  "WRITE_LAST", "WRITE_LAST_IMM", "WRITE_ONLY", "WRITE_ONLY_IMM", "READ_REQUEST", "READ_RESPONSE_FIRST", "READ_RESPONSE_MIDDLE",
  "READ_RESPONSE_LAST", "READ_RESPONSE_ONLY", "ACKNOWLEDGE", "ATOMIC_ACKNOWLEDGE", "COMPARE_SWAP", "FETCH_ADD", null,
  "SEND_LAST_INV", "SEND_ONLY_INV", null, null, null, null, "FLUSH", "ATOMIC_WRITE", null, null,
];

/** Service and name of an opcode. */
export function opcodeText(byte) {
  if (byte === 0x81) return "CNP CNP";
  const [service, name] = [SERVICES[byte >> 5], OPERATIONS[byte & 31]];
  return service && name ? service + " " + name : "undefined " + hex(byte, 2);
}

const BTH = [
  ["opcode", 8, "Transport service (upper three bits) and operation (lower five bits).", (value) => `${opcodeText(value)} (${hex(value, 2)})`],
  ["solicited event", 1, "Requests a completion event at a receiver that waits for solicited completions only.", yes],
  ["migration", 1, "Path migration: 1 is the state migrated.", yes],
  ["pad count", 2, "Bytes of padding after the payload, to a multiple of four."],
  ["version", 4, "Always 0."], ["P_Key", 16, "The partition: both ends must share it. 0xffff is the default.", hexOf(4)],
  ["FECN", 1, "Forward congestion notification of InfiniBand.", yes], ["BECN", 1, "Backward congestion notification: set in CNPs.", yes],
  ["reserved", 6, "0. The ICRC does not cover it."],
  ["destination QP", 24, "The destination queue pair.", (value) => `${value} (${hex(value, 6)})`],
  ["ack request", 1, "Requests an acknowledgement from the responder.", yes], ["reserved 2", 7, "0."],
  ["PSN", 24, "The packet sequence number: counts the packets of one direction, modulo 2^24. A gap means that a packet is missing."],
];
const EXTENDED = {
  DETH: [["Q_Key", 32, "The key of the destination UD queue pair; a packet with another key is dropped.", hexOf(8)], ["reserved", 8, "0."], ["source QP", 24, "The queue pair of the sender."]],
  XRCETH: [["reserved", 8, "0."], ["XRC SRQ", 24, "The shared receive queue for the message."]],
  FETH: [["parameters", 32, "Placement and range of a FLUSH.", hexOf(8)]],
  RETH: [
    ["virtual address", 64, "The address in the memory region of the peer.", hexOf(16)],
    ["R_Key", 32, "The rkey of the memory region of the peer.", hexOf(8)],
    ["DMA length", 32, "Bytes of the whole message, not of this packet.", (value) => bytesText(value)],
  ],
  AtomicETH: [
    ["virtual address", 64, "Eight bytes of the peer's memory, aligned.", hexOf(16)], ["R_Key", 32, "The key of the region.", hexOf(8)],
    ["swap or add", 64, "The new value, or the addend.", hexOf(16)], ["compare", 64, "The value that the memory must have for a swap.", hexOf(16)],
  ],
  AETH: [
    ["syndrome", 8, "ACK with credits, RNR NAK with its timer, or NAK with its code.", aethText],
    ["MSN", 24, "The number of messages that the responder has completed, modulo 2^24."],
  ],
  AtomicAckETH: [["original", 64, "The value before the atomic.", hexOf(16)]],
  ImmDt: [["immediate", 32, "Four bytes in the receiver's completion.", hexOf(8)]],
  IETH: [["R_Key", 32, "The rkey that the receiver invalidates.", hexOf(8)]],
};

const NAKS = ["PSN sequence error", "invalid request", "remote access error", "remote operational error", "invalid RD request"];

function aethText(value) {
  const code = value & 31;
  switch (value >> 5) {
    case 0: return `ACK, ${code === 31 ? "no end-to-end credits" : "credit code " + code} (${hex(value, 2)})`;
    case 1: return `RNR NAK, timer code ${code} (${hex(value, 2)})`;
    case 3: return `NAK ${NAKS[code] ?? "code " + code} (${hex(value, 2)})`;
    default: return `reserved (${hex(value, 2)})`;
  }
}

/** The extended transport headers after a BTH, in wire order. */
function extendedHeaders(opcode) {
  const [service, low] = [opcode >> 5, opcode & 31];
  const found = [];
  if (opcode === 0x81) return found;
  const response = low >= 0x0d && low <= 0x12;
  if (service === 3) found.push("DETH");
  if (service === 5 && !response) found.push("XRCETH");
  if (low === 0x1c) found.push("FETH");
  if ([0x06, 0x0a, 0x0b, 0x0c, 0x1c, 0x1d].includes(low)) found.push("RETH");
  if (low === 0x13 || low === 0x14) found.push("AtomicETH");
  if ([0x0d, 0x0f, 0x10, 0x11, 0x12].includes(low)) found.push("AETH");
  if (low === 0x12) found.push("AtomicAckETH");
  if ([0x03, 0x05, 0x09, 0x0b].includes(low)) found.push("ImmDt");
  if (low === 0x16 || low === 0x17) found.push("IETH");
  return found;
}

const CM_NAMES = { 0x10: "REQ", 0x11: "MRA", 0x12: "REJ", 0x13: "REP", 0x14: "RTU", 0x15: "DREQ", 0x16: "DREP", 0x17: "SIDR_REQ", 0x18: "SIDR_REP", 0x19: "LAP", 0x1a: "APR" };
const MAD = [
  ["base version", 8, "1."], ["class", 8, "Which manager it is for: 7 is the connection manager.", hexOf(2)], ["class version", 8, "2 for the connection manager."],
  ["method", 8, "3 is send.", hexOf(2)], ["status", 16, "0 is fine.", hexOf(4)], ["class specific", 16, "0.", hexOf(4)],
  ["transaction", 64, "Pairs requests and answers.", hexOf(16)],
  ["attribute", 16, "The message.", (value) => `${CM_NAMES[value] ?? ""} (${hex(value, 4)})`], ["reserved", 16, "0."], ["modifier", 32, "0.", hexOf(8)],
];

const WHAT = {
  Ethernet: "The link: from one card to the next.", IPv4: "The network: from host to host.", IPv6: "The network: from host to host.",
  UDP: "RoCEv2 travels in UDP.", BTH: "The base transport header: what the packet is, for which queue pair, and its number.",
  DETH: "Datagram extended transport header.", XRCETH: "XRC extended transport header.", FETH: "FLUSH extended transport header.",
  RETH: "RDMA extended transport header: where in the peer's memory.", AtomicETH: "The operands of an atomic.",
  AETH: "ACK extended transport header: what the responder says.", AtomicAckETH: "The answer to an atomic.", ImmDt: "Immediate data.", IETH: "Invalidate extended transport header.",
};

/** All headers of a frame: `{ name, from, to, meaning, fields }`, with byte ranges. */
export function dissect(frame) {
  const cursor = new Cursor(frame.bytes);
  const isWhole = frame.bytes.length === frame.length;
  let type = 0x0800;
  switch (LINKS[frame.link]) {
    case "ethernet": {
      let link = cursor.header("Ethernet", 14, ETHERNET, WHAT.Ethernet);
      while (link && (link.type === 0x8100 || link.type === 0x88a8)) link = cursor.header("VLAN tag", 4, VLAN, "Which virtual network, with which priority.");
      type = link?.type;
      break;
    }
    case "loopback": cursor.header("Loopback", 4, [["family", 32, "The address family, in the byte order of the machine.", hexOf(8)]]); break;
    case "cooked": {
      const link = cursor.header("Cooked", 16, [["packet type", 16, "0 is to us, 4 is from us."], ["device type", 16, ""], ["address length", 16, ""], ["address", 64, "", hexOf(16)], ["type", 16, "The type of the next header.", hexOf(4)]], "What Linux writes for the interface any.");
      type = link?.type;
      break;
    }
    case "cooked2": {
      const link = cursor.header("Cooked 2", 20, [["type", 16, "The type of the next header.", hexOf(4)], ["reserved", 16, ""], ["interface", 32, ""], ["device type", 16, ""], ["packet type", 8, ""], ["address length", 8, ""], ["address", 64, "", hexOf(16)]], "What Linux writes for the interface any.");
      type = link?.type;
      break;
    }
  }
  if (LINKS[frame.link] === "ip" || LINKS[frame.link] === "loopback") type = cursor.bytes[cursor.at] >> 4 === 6 ? 0x86dd : 0x0800;
  const network = cursor.at;
  if (type === 0x8915) cursor.header("GRH", 40, IPV6, "The global route header of RoCE v1.");
  else {
    if (type === 0x86dd) cursor.header("IPv6", 40, IPV6, WHAT.IPv6);
    else if (type === 0x0800) cursor.header("IPv4", 20, IPV4, WHAT.IPv4);
    else return rest(cursor, "Other", isWhole, frame, 0);
    cursor.header("UDP", 8, UDP, WHAT.UDP);
  }
  const bth = cursor.header("BTH", 12, BTH, WHAT.BTH);
  if (!bth) return cursor.headers;
  for (const name of extendedHeaders(bth.opcode)) cursor.header(name, EXTENDED[name].reduce((sum, field) => sum + field[1], 0) / 8, EXTENDED[name], WHAT[name]);
  if (bth["destination QP"] === 1) cursor.header("MAD", 24, MAD, "A management datagram: connections are made with these.");
  return rest(cursor, "Payload", isWhole, frame, bth["pad count"], network);
}

/** Payload, padding and ICRC, as far as they were kept. */
function rest(cursor, name, isWhole, frame, pad) {
  const { headers, bytes } = cursor;
  const tail = isWhole ? 4 : 0;
  const end = Math.max(cursor.at, bytes.length - tail - (isWhole ? pad : 0));
  const cut = isWhole ? "" : ` The frame has ${bytesText(frame.length)}; the rest is in the capture, not in this page.`;
  if (end > cursor.at) headers.push({ name, from: cursor.at, to: end, meaning: "What the program sends." + cut, fields: [] });
  if (isWhole && pad > 0) headers.push({ name: "Padding", from: end, to: end + pad, meaning: "Zeros up to a multiple of four bytes.", fields: [] });
  if (isWhole && name === "Payload" && bytes.length >= cursor.at + 4) {
    const value = Array.from(bytes.subarray(bytes.length - 4), (byte) => byte.toString(16).padStart(2, "0")).join("");
    headers.push({
      name: "ICRC", from: bytes.length - 4, to: bytes.length,
      meaning: "The invariant CRC: over everything that no router may change.",
      fields: [{ name: "ICRC", from: bytes.length - 4, to: bytes.length, bits: 32, bit: 0, value: "0x" + value + (frame.intact ? ", right" : ", WRONG"), meaning: "A card discards a packet whose ICRC is wrong." }],
    });
  }
  return headers;
}
