// A run in memory: one column per field, so that a million events fit and lookups are fast.
//
// Entries arrive in order, from a report, a file or a live card. Each is read once into the columns, and its line is
// kept as text for the inspector.

import { isResponse, psnDistance } from "./words.js";

/** A table of strings and their numbers. */
class Interner {
  constructor(first = []) {
    this.words = [];
    this.numbers = new Map();
    for (const word of first) this.of(word);
  }
  of(word) {
    let number = this.numbers.get(word);
    if (number === undefined) {
      number = this.words.length;
      this.words.push(word);
      this.numbers.set(word, number);
    }
    return number;
  }
}

/** A typed array that grows. */
class Column {
  constructor(kind, capacity = 1024) {
    this.kind = kind;
    this.values = new kind(capacity);
    this.length = 0;
  }
  push(value) {
    if (this.length === this.values.length) {
      const values = new this.kind(this.length * 2);
      values.set(this.values);
      this.values = values;
    }
    this.values[this.length++] = value;
  }
}

/** A column of a run: one value per event. */
class Field {
  constructor(kind, nothing) {
    this.kind = kind;
    this.nothing = nothing;
    this.values = new kind(0);
  }
  grow(capacity) {
    const values = new this.kind(capacity);
    values.set(this.values);
    if (this.nothing !== 0) values.fill(this.nothing, this.values.length);
    this.values = values;
  }
}

export const NO_PSN = 0xffffffff;

/** The queue pair number of multicast groups. */
const MULTICAST = 0xffffff;

/** Flags of an event. */
export const AGAIN = 1, LOST = 2, FAULTED = 4, ARRIVED = 8, FAILED = 16, MARKED = 32, DAMAGED = 64, INFERRED_LOST = 128;

/** The class of an event, for the filter. */
export const CLASSES = [
  "other", "request", "read response", "ack", "nak", "rnr nak", "cnp", "fault", "not taken", "duplicate", "recovery",
  "work", "completion", "failure", "state", "memory", "async event", "congestion", "received",
];
const CLASS = Object.fromEntries(CLASSES.map((name, index) => [name, index]));

const KINDS = {
  "work:fetched": 1, "work:completed": 2, "work:unsignaled_completed": 3, "transport:packet_sent": 4,
  "transport:packet_received": 5, "transport:packet_dropped": 6, "transport:duplicate_request": 7,
  "transport:request_rejected": 8, "recovery:retransmitted": 9, "recovery:rnr_wait_started": 10,
  "recovery:ack_timed_out": 11, "memory:written": 12, "qp:state_changed": 13, "cq:notified": 14,
  "device:async_event": 15, "device:client_faulted": 16, "fabric:fault": 17,
};
export const KIND = { STARTED: 1, COMPLETED: 2, RETIRED: 3, SENT: 4, RECEIVED: 5, DROPPED: 6, DUPLICATE: 7, REFUSED: 8,
  BACK: 9, RNR_WAIT: 10, TIMED_OUT: 11, WRITTEN: 12, STATE: 13, NOTIFIED: 14, ASYNC: 15, CLIENT: 16, FAULT: 17, OTHER: 18 };

/** The last sent packets of a flow by PSN, to match received packets with sent ones. */
class Recent {
  constructor() {
    this.size = 256;
    this.slots = new Int32Array(this.size).fill(-1);
  }
  put(psn, index, run) {
    const old = this.slots[psn & (this.size - 1)];
    if (old >= 0 && run.psn.values[old] !== psn && !(run.flags.values[old] & (ARRIVED | LOST)) && this.size < 65536) {
      this.grow(run);
    }
    this.slots[psn & (this.size - 1)] = index;
  }
  grow(run) {
    const old = this.slots;
    this.size *= 2;
    this.slots = new Int32Array(this.size).fill(-1);
    for (const index of old) if (index >= 0) this.slots[run.psn.values[index] & (this.size - 1)] = index;
  }
  findAny(psn, run) {
    const index = this.slots[psn & (this.size - 1)];
    return index >= 0 && run.psn.values[index] === psn ? index : -1;
  }
  find(psn, opcode, run) {
    const index = this.slots[psn & (this.size - 1)];
    return index >= 0 && run.psn.values[index] === psn && run.opcode.values[index] === opcode ? index : -1;
  }
}

export class Run {
  constructor(name, source) {
    this.name = name;
    this.source = source;
    this.title = "";
    this.header = null;
    this.notes = [];
    this.version = 0;
    this.length = 0;
    this.end = 0;
    this.isComplete = false;
    this.why = { explanations: [], summary: "", numbers: null, lints: [] };

    this.kinds = new Interner(["?", ...Object.keys(KINDS)]);
    this.hosts = new Interner();
    this.hostOf = new Map();
    this.opcodes = new Interner([""]);
    this.syndromes = new Interner([""]);
    this.responses = [false];

    // A column has its default where the event has no value.
    this.capacity = 0;
    this.time = new Field(Float64Array, 0);
    this.kind = new Field(Uint8Array, 0);
    this.cls = new Field(Uint8Array, 0);
    this.host = new Field(Uint16Array, 0);
    this.end_ = new Field(Int32Array, -1);      // the queue pair's end, or -1
    this.conn = new Field(Int32Array, -1);
    this.psn = new Field(Uint32Array, NO_PSN);
    this.opcode = new Field(Uint8Array, 0);
    this.syndrome = new Field(Uint8Array, 0);
    this.payload = new Field(Uint32Array, 0);
    this.flags = new Field(Uint8Array, 0);
    this.link = new Field(Int32Array, -1);      // a packet's arrival or departure; a fault's packet
    this.work = new Field(Int32Array, -1);
    this.chunk = new Field(Uint32Array, 0);
    this.start = new Field(Uint32Array, 0);
    this.chunks = [];

    this.ends = [];
    this.endOf = new Map();
    this.connections = [];
    this.connOf = new Map();
    this.works = [];
    this.flows = new Map();
    this.flowsOfHost = new Map();
    this.faults = new Map();                 // packet -> its faults
    this.gaps = new Set();                   // packets before which a capture misses some
    this.openGaps = new Set();               // flows whose next packet is one of those
    this.failures = [];                      // completions that failed
    this.labels = new Map();                 // the contents of a packet, if the log has them
    this.regions = new Map();
    this.series = new Map();                 // samples over time: rate, alpha, queue depth, …
    this.spans = new Map();                  // pauses
    this.lanes = new Map();                  // queues of switches and ports, by node, link and priority
    this.linkEnds = new Map();               // the nodes seen at each link
    this.targets = new Map();                // the destination of a link, if it has only one
    this.frames = null;
    this.frameAt = null;
  }

  /** Grows every column. */
  grow() {
    this.capacity = Math.max(1024, this.capacity * 2, Math.min(this.expected ?? 0, 1 << 22));
    for (const field of Object.values(this)) if (field instanceof Field) field.grow(this.capacity);
  }

  begin(header) {
    this.header = header;
    this.title = header.title || this.name;
    for (const point of header.vantage_points) this.hostOf.set(point.address, this.hosts.of(point.host));
    this.queuePairs = header.queue_pairs ?? [];
  }

  hostAt(address) {
    let host = this.hostOf.get(address);
    if (host === undefined) {
      host = this.hosts.of(address);
      this.hostOf.set(address, host);
    }
    return host;
  }

  /** The address of a host, or its name if none is known. */
  addressOf(host) {
    for (const [address, known] of this.hostOf) if (known === host) return address;
    return this.hosts.words[host];
  }

  /** The end of a connection for a queue pair. */
  endAt(host, qp) {
    const key = host * 0x1000000 + qp;
    let index = this.endOf.get(key);
    if (index === undefined) {
      index = this.ends.length;
      const number = this.ends.filter((end) => end.host === host && end.qp !== 0).length + 1;
      const word = this.hosts.words[host];
      const name = qp === 0 || qp === MULTICAST ? word : this.source === "capture" ? `${word} qp ${qp}` : `${word}.${number}`;
      this.ends.push({
        index, host, qp, name, zero: -1, conn: -1, early: [], open: new Map(), lanes: [], count: 0, states: [], hasBegun: false,
      });
      this.endOf.set(key, index);
    }
    return index;
  }

  /** The connection between two ends. */
  connect(one, other) {
    const key = Math.min(one, other) * 0x1000000 + Math.max(one, other);
    let index = this.connOf.get(key);
    if (index === undefined) {
      index = this.connections.length;
      this.connections.push({
        index, ends: [one, other], rows: new Column(Uint32Array, 64), lanes: new Column(Uint32Array, 64),
        packets: 0, service: "", troubles: 0,
      });
      this.connOf.set(key, index);
      this.takeEarly(this.connections[index]);
    }
    return index;
  }

  /** Inserts the events before the connection was known in the order of time, with their brackets. */
  takeEarly(connection) {
    const ends = [...new Set(connection.ends)].map((at) => this.ends[at]).filter((end) => end.conn < 0);
    const early = ends.flatMap((end) => end.early).sort((one, other) => one.event - other.event);
    for (const end of ends) [end.conn, end.early] = [connection.index, []];
    const masks = [0, 0];
    for (const { event, mask } of early) {
      const at = this.end_.values[event];
      if (connection.rows.length === 0 && at === connection.ends[1]) connection.ends.reverse();
      masks[connection.ends.indexOf(at)] = mask;
      this.conn.values[event] = connection.index;
      this.row(event, connection.index, masks[0] | masks[1] << 8);
    }
  }

  /** A queue pair that received a packet as a member of a group joins the ladder of the group, unless it has its own. */
  adopt(end, conn) {
    if (this.ends[end].conn < 0) this.ends[end].conn = conn;
  }

  place(event, conn) {
    this.conn.values[event] = conn;
    this.row(event, conn);
  }

  /** Adds an event to the ladder of its connection. */
  row(event, conn, mask = this.laneMask(this.connections[conn])) {
    const kind = this.kind.values[event];
    if (kind === KIND.RECEIVED || kind === KIND.WRITTEN || kind === KIND.NOTIFIED) return;
    const connection = this.connections[conn];
    connection.rows.push(event);
    connection.lanes.push(mask);
  }

  /** The open brackets of both sides: eight bits each. */
  laneMask(connection) {
    let mask = 0;
    for (let side = 0; side < 2; side++) {
      mask |= this.openLanes(this.ends[connection.ends[side]]) << (8 * side);
    }
    return mask;
  }

  openLanes({ lanes }) {
    let mask = 0;
    for (let lane = 0; lane < lanes.length; lane++) if (lanes[lane]) mask |= 1 << Math.min(lane, 7);
    return mask;
  }

  flow(from, to, qp) {
    const key = (to * 16384 + from) * 0x1000000 + qp;
    let flow = this.flows.get(key);
    if (!flow) {
      flow = { qp, requests: new Recent(), responses: new Recent() };
      this.flows.set(key, flow);
      if (!this.flowsOfHost.has(from)) this.flowsOfHost.set(from, []);
      this.flowsOfHost.get(from).push(flow);
    }
    return flow;
  }

  opcodeOf(word) {
    const number = this.opcodes.of(word);
    if (this.responses[number] === undefined) this.responses[number] = isResponse(word);
    return number;
  }

  /** Adds an entry; its line starts at `start` of `chunk`. */
  add(entry, chunk, start) {
    const index = this.length;
    const kind = KINDS[entry.name] ?? KIND.OTHER;
    const host = this.hosts.of(entry.host);
    const data = entry.data ?? {};
    if (index === this.capacity) this.grow();
    this.time.values[index] = entry.time;
    this.kind.values[index] = kind;
    this.host.values[index] = host;
    this.chunk.values[index] = chunk;
    this.start.values[index] = start;
    this.length++;
    if (entry.time > this.end) this.end = entry.time;
    const kinds = this.kinds;
    if (kind === KIND.OTHER) {
      this.kind.values[index] = Math.max(KIND.OTHER, kinds.of(entry.name));
    }
    switch (kind) {
      case KIND.SENT:
        this.sent(index, host, data);
        if (entry.trigger) this.labels.set(index, entry.trigger);
        break;
      case KIND.RECEIVED: this.received(index, host, data); break;
      case KIND.FAULT: this.fault(index, host, data, entry.certainty); break;
      default: this.addOther(index, kind, host, entry.name, data);
    }
  }

  packet(index, packet) {
    this.psn.values[index] = packet.psn;
    this.opcode.values[index] = this.opcodeOf(packet.opcode);
    this.payload.values[index] = packet.payload;
    if (packet.syndrome !== undefined) this.syndrome.values[index] = this.syndromes.of(packet.syndrome);
  }

  sent(index, host, data) {
    const packet = data.packet;
    this.packet(index, packet);
    const peer = this.hostAt(packet.peer);
    const end = this.endAt(host, data.qp);
    const conn = this.connect(end, this.endAt(peer, packet.dest_qp));
    this.end_.values[index] = end;
    this.ends[end].conn = conn;
    const connection = this.connections[conn];
    connection.packets++;
    if (!connection.service) connection.service = packet.opcode.slice(0, packet.opcode.indexOf(" "));
    const response = this.responses[this.opcode.values[index]];
    const flow = this.flow(host, peer, packet.dest_qp);
    (response ? flow.responses : flow.requests).put(packet.psn, index, this);
    if (!response) this.begun(end, packet.psn);
    if (!response && this.openGaps.delete(`${host} ${packet.dest_qp}`)) this.gaps.add(index);
    if (data.retransmission) this.flags.values[index] |= AGAIN;
    if (data.wr_id !== undefined) this.work.values[index] = this.ends[end].open.get(data.wr_id)?.[0] ?? -1;
    this.cls.values[index] = packet.syndrome !== undefined && packet.syndrome !== "ack"
      ? (packet.syndrome === "rnr-nak" ? CLASS["rnr nak"] : CLASS.nak)
      : !response ? CLASS.request
      : packet.opcode.endsWith("ACKNOWLEDGE") ? CLASS.ack
      : packet.opcode.endsWith("CNP") ? CLASS.cnp : CLASS["read response"];
    if (this.cls.values[index] === CLASS.nak || this.cls.values[index] === CLASS["rnr nak"]) connection.troubles++;
    if (packet.ecn === "ce") this.flags.values[index] |= MARKED;
    this.conn.values[index] = conn;
    this.row(index, conn);
  }

  received(index, host, data) {
    const packet = data.packet;
    this.packet(index, packet);
    const peer = this.hostAt(packet.peer);
    const end = this.endAt(host, data.qp);
    this.end_.values[index] = end;
    this.cls.values[index] = CLASS.received;
    const from = this.departure(index, host, peer, packet);
    if (from >= 0) {
      this.link.values[index] = from;
      if (!(this.flags.values[from] & ARRIVED)) this.link.values[from] = index;
      this.flags.values[from] |= ARRIVED;
      this.conn.values[index] = this.conn.values[from];
      if (packet.dest_qp === MULTICAST) this.adopt(end, this.conn.values[from]);
    } else {
      this.conn.values[index] = this.ends[end].conn;
    }
  }

  /** The event that sent a received packet, or -1. */
  departure(index, host, peer, packet) {
    const opcode = this.opcode.values[index];
    const find = (flow) => (flow ? (this.responses[opcode] ? flow.responses : flow.requests).find(packet.psn, opcode, this) : -1);
    // A multicast packet arrives at hosts other than its destination.
    if (packet.dest_qp === MULTICAST) {
      return Math.max(-1, ...(this.flowsOfHost.get(peer) ?? []).filter((flow) => flow.qp === MULTICAST).map(find));
    }
    return find(this.flows.get((host * 16384 + peer) * 0x1000000 + packet.dest_qp));
  }

  fault(index, host, data, certainty) {
    this.cls.values[index] = CLASS.fault;
    if (data.psn !== undefined) this.psn.values[index] = data.psn;
    let [found, toGroup] = [-1, false];
    if (data.opcode !== undefined) {
      const opcode = this.opcodeOf(data.opcode);
      this.opcode.values[index] = opcode;
      // A switch forwards packets of other hosts.
      for (const flow of this.flowsOfHost.get(host) ?? this.flows.values()) {
        const at = (this.responses[opcode] ? flow.responses : flow.requests).find(data.psn, opcode, this);
        if (at <= found) continue;
        found = at;
        toGroup = flow.qp === MULTICAST;
      }
    }
    const isInferred = certainty !== undefined && data.effect.kind === "dropped";
    if (isInferred) this.flags.values[index] |= INFERRED_LOST;
    if (found < 0) {
      if (certainty !== undefined && data.class === "request") this.openGaps.add(`${host} ${data.dest_qp}`);
      this.placeUnseen(index, host, data.dest_qp);
      return;
    }
    this.link.values[index] = found;
    this.end_.values[index] = this.end_.values[found];
    const conn = this.conn.values[found];
    this.conn.values[index] = conn;
    this.connections[conn].troubles++;
    this.flags.values[found] |= FAULTED;
    // Other copies of the packet may still arrive.
    if (data.effect.kind === "dropped" && !toGroup && !isInferred) this.flags.values[found] |= LOST;
    if (data.effect.kind === "marked-ce") this.flags.values[found] |= MARKED;
    if (!this.faults.has(found)) this.faults.set(found, []);
    this.faults.get(found).push(index);
  }

  /** A packet that is not in the capture still belongs to a connection. */
  placeUnseen(index, host, qp) {
    const flow = qp === undefined ? undefined : (this.flowsOfHost.get(host) ?? []).find((flow) => flow.qp === qp);
    const sent = flow ? Math.max(...flow.requests.slots, ...flow.responses.slots) : -1;
    if (sent < 0) return;
    this.end_.values[index] = this.end_.values[sent];
    this.conn.values[index] = this.conn.values[sent];
    this.connections[this.conn.values[sent]].troubles++;
    this.row(index, this.conn.values[sent]);
  }

  addOther(index, kind, host, name, data) {
    const qp = data.qp ?? (kind === KIND.ASYNC && (data.event.startsWith("QP") || data.event === "COMM_EST"
      || data.event === "SQ_DRAINED") ? data.element : undefined);
    // A capture may not show the sender; its packets still form one flow.
    const isKnown = qp !== undefined && (qp !== 0 || (this.source === "capture" && kind !== KIND.DROPPED));
    const end = isKnown ? this.endAt(host, qp) : -1;
    this.end_.values[index] = end;
    if (data.psn !== undefined) this.psn.values[index] = data.psn;
    let cls = CLASS.other;
    switch (kind) {
      case KIND.STARTED: cls = CLASS.work; this.started(index, end, data); break;
      case KIND.COMPLETED: cls = this.completed(index, end, data); break;
      case KIND.RETIRED: cls = CLASS.completion; this.finish(index, end, data.wr_id, "SUCCESS"); break;
      case KIND.DROPPED:
        cls = CLASS["not taken"];
        if (data.packet) this.dropped(index, host, data.packet);
        break;
      case KIND.DUPLICATE: cls = CLASS.duplicate; this.opcode.values[index] = this.opcodeOf(data.opcode); break;
      case KIND.REFUSED: cls = CLASS.nak; break;
      case KIND.BACK: cls = CLASS.recovery; this.psn.values[index] = data.from_psn; break;
      case KIND.RNR_WAIT: cls = CLASS.recovery; break;
      case KIND.TIMED_OUT: cls = CLASS.recovery; this.psn.values[index] = data.oldest_psn; break;
      case KIND.WRITTEN: cls = CLASS.memory; this.payload.values[index] = data.length; this.written(index, host, data); break;
      case KIND.STATE:
        cls = CLASS.state;
        if (end >= 0) this.ends[end].states.push({ event: index, from: data.from, to: data.to, reason: data.reason });
        break;
      case KIND.ASYNC: cls = CLASS["async event"]; break;
      case KIND.OTHER:
        if (name === "qp:configured" && end >= 0) this.configured(end, data);
        cls = this.congestion(index, host, name, data) ? CLASS.congestion : CLASS.other;
        break;
    }
    this.cls.values[index] = cls;
    if (end < 0) return;
    const conn = this.ends[end].conn;
    if (conn < 0) this.ends[end].early.push({ event: index, mask: this.openLanes(this.ends[end]) });
    else this.place(index, conn);
    if (conn >= 0 && (kind === KIND.REFUSED || cls === CLASS.failure)) this.connections[conn].troubles++;
  }

  dropped(index, host, packet) {
    this.packet(index, packet);
    const peer = this.hostAt(packet.peer);
    const from = this.departure(index, host, peer, packet);
    if (from < 0) return;
    this.link.values[index] = from;
    if (!(this.flags.values[from] & ARRIVED)) this.link.values[from] = index;
    this.flags.values[from] |= ARRIVED;
  }

  started(index, at, data) {
    if (at < 0) return;
    const end = this.ends[at];
    if (data.packets > 0) this.begun(at, data.first_psn);
    let lane = end.lanes.indexOf(false);
    if (lane < 0) lane = end.lanes.push(true) - 1;
    end.lanes[lane] = true;
    end.count++;
    const work = this.works.length;
    this.works.push({
      work, end: at, id: data.wr_id, operation: data.operation, bytes: data.bytes, first: data.first_psn,
      packets: data.packets, number: end.count, lane, started: index, ended: -1, status: "",
    });
    this.work.values[index] = work;
    this.payload.values[index] = data.bytes;
    if (!end.open.has(data.wr_id)) end.open.set(data.wr_id, []);
    end.open.get(data.wr_id).push(work);
  }

  completed(index, at, data) {
    this.payload.values[index] = data.bytes;
    const failed = data.status !== "SUCCESS";
    if (failed) {
      this.flags.values[index] |= FAILED;
      this.failures.push(index);
    }
    if (!data.operation.startsWith("receive")) this.finish(index, at, data.wr_id, data.status);
    return failed ? CLASS.failure : CLASS.completion;
  }

  finish(index, at, id, status) {
    if (at < 0) return;
    const end = this.ends[at];
    const open = end.open.get(id);
    const work = open?.shift();
    if (work === undefined) return;
    if (open.length === 0) end.open.delete(id);
    this.works[work].ended = index;
    this.works[work].status = status;
    end.lanes[this.works[work].lane] = false;
    this.work.values[index] = work;
  }

  written(index, host, data) {
    const key = host + "/" + data.key;
    const address = Number(data.address);
    let region = this.regions.get(key);
    if (!region) {
      region = { key: data.key, host, from: address, to: address + data.length,
        writes: new Column(Uint32Array, 64), address: new Column(Float64Array, 64) };
      this.regions.set(key, region);
    }
    region.from = Math.min(region.from, address);
    region.to = Math.max(region.to, address + data.length);
    region.writes.push(index);
    region.address.push(address);
  }

  /** Adds an event of congestion control, of a switch or of a pause. Returns whether it was one. */
  congestion(index, host, name, data) {
    const where = this.hosts.words[host];
    const lane = data.link === undefined ? where : this.lane(where, data.link, data.priority);
    switch (name) {
      case "congestion:rate_changed": {
        const of = this.ends[this.end_.values[index]]?.name ?? where;
        this.sample("rate", of, index, data.bits_per_second);
        this.sample("alpha", of, index, data.alpha_millionths / 1e6);
        return true;
      }
      case "fabric:queue_sampled": this.sample("queue depth", lane, index, data.depth); return true;
      case "fabric:pause_received": this.pause(lane, index, data.quanta > 0 ? data.until_ns : -1); return true;
      case "fabric:pause_ended": this.pause(lane, index, -1); return true;
      case "fabric:ecn_marked":
        this.aim(where, data.link, this.hosts.words[this.hostAt(data.packet.destination)]);
        this.hit(index, data.packet, MARKED);
        return true;
      case "fabric:frame_dropped": this.hit(index, data.packet, LOST); return true;
      default: return name.startsWith("congestion:") || name.startsWith("fabric:");
    }
  }

  /** The key of a queue: its owner, its link and its priority. */
  lane(where, link, priority) {
    const key = `${where}/${link}/${priority}`;
    if (!this.lanes.has(key)) {
      this.lanes.set(key, { where, link, priority });
      if (!this.linkEnds.has(link)) this.linkEnds.set(link, new Set());
      this.linkEnds.get(link).add(where);
    }
    return key;
  }

  aim(where, link, target) {
    const key = where + "/" + link;
    if (!this.targets.has(key)) this.targets.set(key, target);
    else if (this.targets.get(key) !== target) this.targets.set(key, null);
  }

  /** The name of a queue. The log numbers links; other events on the link show the other end. */
  laneText(key) {
    const lane = this.lanes.get(key);
    if (!lane) return key;
    const { where, link, priority } = lane;
    const other = [...this.linkEnds.get(link)].find((node) => node !== where) ?? this.targets.get(where + "/" + link);
    return (other ? `${where} → ${other}` : `${where}, link ${link}`) + `, priority ${priority}`;
  }

  /** Adds an event of a packet inside the fabric. */
  hit(index, packet, flag) {
    if (packet?.psn === undefined || packet.dest_qp === undefined) return;
    const [from, to] = [this.hostAt(packet.source), this.hostAt(packet.destination)];
    const flow = this.flows.get((to * 16384 + from) * 0x1000000 + packet.dest_qp);
    if (!flow) return;
    const found = Math.max(flow.requests.findAny(packet.psn, this), flow.responses.findAny(packet.psn, this));
    if (found < 0) return;
    this.psn.values[index] = packet.psn;
    this.link.values[index] = found;
    this.end_.values[index] = this.end_.values[found];
    this.conn.values[index] = this.conn.values[found];
    this.flags.values[found] |= flag;
    if (flag !== LOST) return;
    this.flags.values[found] |= FAULTED;
    this.connections[this.conn.values[found]].troubles++;
    if (!this.faults.has(found)) this.faults.set(found, []);
    this.faults.get(found).push(index);
  }

  pause(lane, index, until) {
    if (!this.spans.has(lane)) this.spans.set(lane, []);
    const spans = this.spans.get(lane);
    const last = spans[spans.length - 1];
    const now = this.time.values[index];
    if (last && last.to > now) last.to = until < 0 ? now : until;
    else if (until >= 0) spans.push({ from: now, to: until, event: index });
  }

  sample(name, of, index, value) {
    const key = name + "\u0000" + of;
    let series = this.series.get(key);
    if (!series) {
      series = { name, of, events: new Column(Uint32Array, 64), values: new Column(Float64Array, 64) };
      this.series.set(key, series);
    }
    series.events.push(index);
    series.values.push(value);
  }

  /** The first request of a queue pair: its PSNs are relative to this one, unless the first PSN is known. */
  begun(at, psn) {
    const end = this.ends[at];
    if (end.zero < 0) end.zero = psn;
    end.hasBegun = true;
  }

  /** Both ends and their first PSNs are known before the first packet. */
  configured(end, data) {
    // Every state change has the first PSN; the last one counts.
    if (data.sq_psn !== undefined && !this.ends[end].hasBegun) this.ends[end].zero = data.sq_psn;
    if (data.peer !== undefined && data.dest_qp !== undefined) {
      this.ends[end].conn = this.connect(end, this.endAt(this.hostAt(data.peer), data.dest_qp));
    }
  }

  /** The line of an event in the log. */
  line(index) {
    const chunk = this.chunk.values[index];
    const next = index + 1 < this.length && this.chunk.values[index + 1] === chunk ? this.start.values[index + 1] - 1 : undefined;
    return this.chunks[chunk].slice(this.start.values[index], next).trimEnd();
  }

  entry(index) {
    return parseExactly(this.line(index));
  }

  /** The first PSN to which the PSN of a packet is relative: that of the requester. */
  zero(index) {
    const at = this.end_.values[index];
    if (at < 0) return -1;
    const kind = this.kind.values[index];
    const response = this.responses[this.opcode.values[index]];
    const own = kind === KIND.SENT || kind === KIND.FAULT ? !response
      : kind === KIND.RECEIVED || kind === KIND.DROPPED ? response
      : kind === KIND.BACK || kind === KIND.TIMED_OUT || kind === KIND.RNR_WAIT || kind === KIND.STARTED;
    if (own) return this.ends[at].zero;
    return this.peerOf(index)?.zero ?? -1;
  }

  /** The peer. */
  peerOf(index) {
    const conn = this.conn.values[index];
    if (conn < 0) return null;
    const [one, other] = this.connections[conn].ends;
    return this.ends[this.end_.values[index] === one ? other : one];
  }

  /** The first event at or after a time. */
  at(time) {
    let [low, high] = [0, this.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.time.values[middle] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  takeFrames(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const at = new Map();
    let offset = 0;
    while (offset + 16 <= bytes.length) {
      at.set(view.getUint32(offset, true), offset);
      offset += 16 + view.getUint16(offset + 12, true);
    }
    this.frames = { bytes, view, at };
    this.version++;
  }

  /** The bytes of a packet, if the page has them; those of the sent packet for a received one. */
  frame(index) {
    if (!this.frames) return null;
    let offset = this.frames.at.get(index);
    if (offset === undefined && this.link.values[index] >= 0) offset = this.frames.at.get(this.link.values[index]);
    if (offset === undefined) return null;
    const { bytes, view } = this.frames;
    const kept = view.getUint16(offset + 12, true);
    return {
      length: view.getUint32(offset + 4, true), number: view.getUint32(offset + 8, true), link: bytes[offset + 14], intact: bytes[offset + 15] === 1,
      bytes: bytes.subarray(offset + 16, offset + 16 + kept),
    };
  }
}

/** Parses JSON without rounding: large integers become strings. */
export function parseExactly(line) {
  return JSON.parse(/\d{16,}/.test(line) ? line.replace(/([:,[])(\d{16,})(?=[,}\]])/g, '$1"$2"') : line);
}

/** Whether an integer is too large for a double. */
function isRounded(data) {
  return data !== undefined && (data.wr_id > Number.MAX_SAFE_INTEGER || data.address > Number.MAX_SAFE_INTEGER);
}

/** How long the page reads before it yields to the browser, and before it draws the events so far. */
const SLICE_MS = 24, DRAW_MS = 400;

/** The version of the log whose names and fields this page knows. */
const LOG_VERSION = 1;

/** Reads the lines of a log as they arrive. */
export class LogReader {
  constructor(run) {
    this.run = run;
    this.rest = "";
    this.lineNumber = 0;
    this.failed = false;
  }

  /** Adds text; an incomplete last line waits for the rest. */
  take(text) {
    if (this.failed) return;
    text = this.rest + text;
    const last = text.lastIndexOf("\n");
    if (last < 0) {
      this.rest = text;
      return;
    }
    this.rest = text.slice(last + 1);
    this.block(text.slice(0, last + 1));
  }

  finish() {
    if (this.failed) return;
    if (this.rest.trim() !== "") this.block(this.rest + "\n");
    if (!this.failed && this.lineNumber === 0) this.fail("the file is empty");
    this.run.isComplete = true;
    this.run.version++;
  }

  fail(why) {
    this.failed = true;
    this.run.notes.push(`The log cannot be read beyond line ${this.lineNumber}: ${why}. Later events are not shown; was the run or the file cut off?`);
    this.run.isComplete = true;
    this.run.version++;
  }

  block(text) {
    const run = this.run;
    let start = 0;
    if (this.lineNumber === 0) {
      this.lineNumber = 1;
      const end = text.indexOf("\n");
      let header;
      try {
        header = JSON.parse(text.slice(0, end));
      } catch {
        return this.fail("this is not an event log; `softhca run --out` writes them as events.jsonl, and `softhca report` reads captures");
      }
      if (header?.format !== "softhca-events" || !Array.isArray(header.vantage_points)) {
        return this.fail("this is not an event log; `softhca run --out` writes them as events.jsonl, and `softhca report` reads captures");
      }
      if (header.version !== LOG_VERSION) {
        run.notes.push(`The log has version ${header.version}, this page knows version ${LOG_VERSION}: new events are shown with their fields, without an explanation.`);
      }
      run.begin(header);
      start = end + 1;
    }
    const chunk = run.chunks.push(text) - 1;
    let entries = null;
    try {
      entries = JSON.parse("[" + text.slice(start).trimEnd().replaceAll("\n", ",") + "]");
    } catch {
      // One line is not JSON; parsing line by line finds it.
    }
    for (let at = 0; start < text.length; at++) {
      const end = text.indexOf("\n", start);
      this.lineNumber++;
      try {
        const entry = entries?.[at];
        run.add(entry && !isRounded(entry.data) ? entry : parseExactly(text.slice(start, end)), chunk, start);
      } catch (error) {
        return this.fail(error.message);
      }
      start = end + 1;
    }
    run.version++;
  }
}

/** Reads a stream of text into a run, and lets the browser draw in between. */
export async function readStream(stream, run, progressed) {
  const reader = new LogReader(run);
  const source = stream.pipeThrough(new TextDecoderStream()).getReader();
  let since = performance.now();
  let drawn = 0;
  let pending = [];
  let size = 0;
  const hand = () => {
    if (size > 0) reader.take(pending.join(""));
    pending = [];
    size = 0;
  };
  try {
    for (;;) {
      const { done, value } = await source.read();
      if (done) break;
      pending.push(value);
      size += value.length;
      if (size < 1 << 18) continue;
      hand();
      if (performance.now() - since > SLICE_MS) {
        if (performance.now() - drawn > DRAW_MS) {
          drawn = performance.now();
          progressed();
        }
        await new Promise((resolve) => setTimeout(resolve));
        since = performance.now();
      }
    }
    hand();
    reader.finish();
  } catch (error) {
    hand();
    reader.lineNumber += 1;
    reader.fail(error.message || "the data ends early");
  }
  progressed();
}

/** The PSN of an event relative to its zero, or null. */
export function relativeOf(run, index) {
  const psn = run.psn.values[index];
  if (psn === NO_PSN) return null;
  const zero = run.zero(index);
  return zero < 0 ? psn : psnDistance(psn, zero);
}
