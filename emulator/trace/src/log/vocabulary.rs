//! Every name that a log can have, with its fields: declared once.

use super::data::{BufferData, Change, CulpritData, PacketData, QueueData, Word};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// A name of the log, as its reference page tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    /// Category and name.
    pub name: &'static str,
    /// What happened.
    pub meaning: &'static str,
    /// The fields of its data with their meanings, in order.
    pub fields: &'static [(&'static str, &'static str)],
}

macro_rules! vocabulary {
    ($(
        $(#[doc = $meaning:literal])+
        $name:literal $variant:ident {
            $( $(#[doc = $about:literal])+ $(#[serde($($serde:tt)*)])? $field:ident: $kind:ty, )*
        }
    )*) => {
        /// What happened: the keys `name` and `data` of an entry.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "name", content = "data")]
        pub enum What {$(
            $(#[doc = $meaning])+
            #[serde(rename = $name)]
            $variant { $( $(#[doc = $about])+ $(#[serde($($serde)*)])? $field: $kind, )* },
        )*}

        impl What {
            /// Category and name.
            pub const fn name(&self) -> &'static str {
                match self {$( What::$variant { .. } => $name, )*}
            }
        }

        /// Every name that a log can have.
        pub const VOCABULARY: &[Name] = &[$(
            Name {
                name: $name,
                meaning: concat!($($meaning),+),
                fields: &[$( (stringify!($field), concat!($($about),+)) ),*],
            },
        )*];
    };
}

vocabulary! {
    /// A queue pair got ready to receive or to send: what it was told.
    "qp:configured" Configured {
        /// The queue pair.
        qp: u32,
        /// `rc`, `uc`, `ud`, `xrc-initiator`, `xrc-target` or `gsi`.
        kind: Word,
        /// What a lost packet does: `fatal`, `go-back-n` or `go-back-0`.
        recovery: Word,
        /// The host at the other end of the connection.
        #[serde(skip_serializing_if = "Option::is_none")]
        peer: Option<IpAddr>,
        /// The queue pair at the other end of the connection.
        #[serde(skip_serializing_if = "Option::is_none")]
        dest_qp: Option<u32>,
        /// Payload bytes per packet.
        mtu: u32,
        /// The first PSN that it sends.
        first_psn: u32,
        /// The first PSN that it expects.
        expected_psn: u32,
        /// The exponent of 4.096 µs that an acknowledgement may take.
        timeout: u8,
        /// How long a silent peer is waited for before something is done about it, in nanoseconds; absent for ever.
        #[serde(skip_serializing_if = "Option::is_none")]
        patience: Option<u64>,
        /// How often it tries again.
        retry_cnt: u8,
        /// How often it tries again when the receiver is not ready; 7 for ever.
        rnr_retry: u8,
        /// What the peer may do: rights with a `|` between them.
        access: String,
        /// Reads and atomics that it may have outstanding.
        max_rd_atomic: u8,
        /// Reads and atomics that the peer may have outstanding here.
        max_dest_rd_atomic: u8,
        /// Work requests that its send queue holds.
        send_slots: u32,
        /// Work requests that its own receive queue holds.
        receive_slots: u32,
        /// The completion queue of its sends.
        #[serde(skip_serializing_if = "Option::is_none")]
        send_cq: Option<QueueData>,
        /// The completion queue of its receives.
        #[serde(skip_serializing_if = "Option::is_none")]
        receive_cq: Option<QueueData>,
    }
    /// A send work request was taken from its ring and got its PSNs.
    "work:started" WorkStarted {
        /// The queue pair.
        qp: u32,
        /// The work request's id.
        id: u64,
        /// What it asks for.
        operation: Word,
        /// Its length.
        bytes: u32,
        /// Its first PSN.
        first_psn: u32,
        /// How many PSNs it has.
        packets: u32,
        /// Its first piece of local memory, unless the data stood in the request.
        #[serde(skip_serializing_if = "Option::is_none")]
        buffer: Option<BufferData>,
    }
    /// A work request completed.
    "work:completed" WorkCompleted {
        /// The queue pair.
        qp: u32,
        /// The work request's id.
        id: u64,
        /// What it asked for.
        operation: Word,
        /// How it ended.
        status: Word,
        /// Bytes transferred.
        bytes: u32,
        /// Immediate data, if there is some.
        #[serde(skip_serializing_if = "Option::is_none")]
        immediate: Option<u32>,
        /// The key that was invalidated, if one was.
        #[serde(skip_serializing_if = "Option::is_none")]
        invalidated: Option<u32>,
        /// The sending queue pair, for datagrams.
        #[serde(skip_serializing_if = "Option::is_none")]
        source_qp: Option<u32>,
        /// The completion queue.
        cq: u32,
        /// Why it failed; `none` if it did not.
        reason: Word,
        /// The same as a number: the completion's vendor error.
        vendor_error: u32,
    }
    /// An unsignalled work request was done without a completion.
    "work:retired" WorkRetired {
        /// The queue pair.
        qp: u32,
        /// The work request's id.
        id: u64,
    }
    /// A packet left.
    "transport:packet_sent" PacketSent {
        /// The queue pair that sent it.
        qp: u32,
        /// The packet.
        packet: PacketData,
        /// The id of the work request that it belongs to, or that it answers; absent if the log does not tell.
        #[serde(skip_serializing_if = "Option::is_none")]
        work: Option<u64>,
        /// Whether that PSN had left before.
        again: bool,
        /// Why it left: `work`; for what is sent again `sequence-nak`, `response-gap`, `timeout` or `receiver-not-ready`; for an answer `request`, `duplicate` or the reason of the refusal; `unknown` where a capture does not tell.
        cause: Word,
    }
    /// A packet came and is for this queue pair.
    "transport:packet_received" PacketReceived {
        /// The queue pair.
        qp: u32,
        /// The packet.
        packet: PacketData,
        /// The id of the work request that it belongs to, or that it answers; absent if the log does not tell.
        #[serde(skip_serializing_if = "Option::is_none")]
        work: Option<u64>,
    }
    /// A packet was not acted on.
    "transport:packet_dropped" PacketDropped {
        /// The queue pair; 0 if it is not known.
        qp: u32,
        /// The packet, if it could be read.
        #[serde(skip_serializing_if = "Option::is_none")]
        packet: Option<PacketData>,
        /// The id of the work request that it belongs to, or that it answers; absent if the log does not tell.
        #[serde(skip_serializing_if = "Option::is_none")]
        work: Option<u64>,
        /// Why.
        reason: Word,
    }
    /// A duplicate was answered and not executed again.
    "transport:duplicate_answered" DuplicateAnswered {
        /// The queue pair.
        qp: u32,
        /// The duplicate's PSN.
        psn: u32,
        /// Its opcode.
        opcode: Word,
    }
    /// A responder refused a request.
    "transport:request_refused" RequestRefused {
        /// The queue pair.
        qp: u32,
        /// The request's PSN.
        psn: u32,
        /// The PSN that is missing, if there is a gap.
        #[serde(skip_serializing_if = "Option::is_none")]
        missing_psn: Option<u32>,
        /// Why.
        reason: Word,
    }
    /// A requester will send again what it had sent.
    "recovery:went_back" WentBack {
        /// The queue pair.
        qp: u32,
        /// From which PSN on.
        to_psn: u32,
        /// What made it.
        cause: Word,
        /// How often it may do so again.
        retries_left: u8,
    }
    /// A requester waits because the receiver was not ready.
    "recovery:rnr_wait_started" RnrWaitStarted {
        /// The queue pair.
        qp: u32,
        /// The PSN that was refused.
        psn: u32,
        /// When the wait ends, in nanoseconds since the start.
        until: u64,
        /// How often it may wait again.
        retries_left: u8,
    }
    /// An ack timer ran out.
    "recovery:ack_timed_out" AckTimedOut {
        /// The queue pair.
        qp: u32,
        /// The oldest PSN without an answer.
        oldest_psn: u32,
    }
    /// A packet came with a congestion mark.
    "congestion:mark_seen" MarkSeen {
        /// The queue pair.
        qp: u32,
        /// The packet's PSN.
        psn: u32,
        /// Whether a notification (CNP) follows; if not, the last one was too short ago.
        notified: bool,
    }
    /// Congestion control changed the rate of a queue pair.
    "congestion:rate_changed" RateChanged {
        /// The queue pair.
        qp: u32,
        /// Its rate now, in bits per second.
        rate: u64,
        /// The rate that it rises to next.
        target: u64,
        /// The estimate of congestion (DCQCN's alpha), in millionths.
        alpha: u32,
        /// What changed it.
        cause: Word,
    }
    /// Local memory was written: by a peer, or by a receive, read response or atomic.
    "memory:written" MemoryWritten {
        /// The queue pair that the packet came to.
        qp: u32,
        /// The region or window.
        key: u32,
        /// The first byte.
        address: u64,
        /// How many bytes.
        length: u32,
        /// The packet's PSN.
        psn: u32,
    }
    /// A queue pair changed its state.
    "qp:state_changed" StateChanged {
        /// The queue pair.
        qp: u32,
        /// Its state before.
        from: Word,
        /// Its state now.
        to: Word,
        /// Why.
        reason: Word,
    }
    /// A completion queue's owner is to be woken.
    "cq:notified" Notified {
        /// The completion queue.
        cq: u32,
    }
    /// An asynchronous event of the verbs.
    "device:async_event" AsyncEvent {
        /// Whose it is; absent if everybody's.
        #[serde(skip_serializing_if = "Option::is_none")]
        client: Option<u32>,
        /// Its name, as `enum ibv_event_type` has it.
        event: Word,
        /// The number of the queue pair, completion queue or shared receive queue that it is about.
        #[serde(skip_serializing_if = "Option::is_none")]
        number: Option<u32>,
    }
    /// A client's ring is broken; its queue pair was stopped.
    "device:client_faulted" ClientFaulted {
        /// The client.
        client: u32,
        /// The queue pair.
        qp: u32,
        /// What the shared index says.
        index: u64,
        /// The least it can be.
        from: u64,
        /// The most it can be.
        to: u64,
    }
    /// A message of the connection manager left.
    "cm:message_sent" CmSent {
        /// The identifier that it is of, if there is one.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<u32>,
        /// The message: `REQ`, `REP`, ….
        message: Word,
        /// The other host.
        peer: IpAddr,
        /// Whether it had left before.
        again: bool,
    }
    /// A message of the connection manager came.
    "cm:message_received" CmReceived {
        /// The message.
        message: Word,
        /// The other host.
        peer: IpAddr,
    }
    /// A message of the connection manager was not acted on.
    "cm:message_ignored" CmIgnored {
        /// The identifier that it is about, if there is one.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<u32>,
        /// The message.
        message: Word,
        /// The other host.
        peer: IpAddr,
        /// Why.
        reason: Word,
    }
    /// A connection identifier changed its state.
    "cm:state_changed" CmStateChanged {
        /// The identifier.
        id: u32,
        /// Its state before.
        from: Word,
        /// Its state now.
        to: Word,
    }
    /// The connection manager gave up waiting for an answer.
    "cm:gave_up" CmGaveUp {
        /// The identifier.
        id: u32,
        /// `timed-out` or `link-dead`.
        reason: Word,
    }
    /// An event of connection management waits for the application.
    "cm:event" CmEvent {
        /// The application.
        client: u32,
        /// The channel.
        channel: u32,
        /// The identifier that it is about.
        id: u32,
        /// Its name, as `enum rdma_cm_event_type` has it.
        event: Word,
        /// Zero, a negative errno, or the reason of a refusal.
        status: i32,
    }
    /// A switch marked a packet because of the queue before it.
    "fabric:ecn_marked" EcnMarked {
        /// The cable that it leaves over.
        cable: u32,
        /// Its priority.
        priority: u8,
        /// Bytes that waited before it.
        depth: u64,
        /// The packet.
        packet: CulpritData,
    }
    /// A frame was lost in a switch, or at the port of a host.
    "fabric:frame_lost" FrameLost {
        /// The cable that it was to leave over, or that it came over.
        cable: u32,
        /// Its priority.
        priority: u8,
        /// Why.
        cause: Word,
        /// The packet.
        packet: CulpritData,
    }
    /// A pause frame was sent.
    "fabric:pause_sent" PauseSent {
        /// The cable.
        cable: u32,
        /// The priority that is to stop.
        priority: u8,
        /// For so many times 512 bit times; 0 lets it go on.
        quanta: u16,
        /// Bytes of that priority that had come over the cable and were still there.
        held: u64,
    }
    /// A pause frame came.
    "fabric:pause_received" PauseReceived {
        /// The cable.
        cable: u32,
        /// The priority that stops.
        priority: u8,
        /// For so many times 512 bit times; 0 lets it go on.
        quanta: u16,
        /// When it goes on by itself, in nanoseconds since the start.
        until: u64,
    }
    /// A priority that was stopped goes on.
    "fabric:pause_ended" PauseEnded {
        /// The cable.
        cable: u32,
        /// The priority.
        priority: u8,
        /// `resumed`, `expired`, or `overruled` by a watchdog.
        how: Word,
    }
    /// The depth of a queue passed a multiple of the step that the switch was asked to tell.
    "fabric:queue_sampled" QueueSampled {
        /// The cable that the queue leads to.
        cable: u32,
        /// The priority.
        priority: u8,
        /// Bytes that wait.
        depth: u64,
    }
    /// A watchdog acted on a queue that a pause had stopped for too long, or on a host that had stopped others.
    "fabric:watchdog_fired" WatchdogFired {
        /// The cable.
        cable: u32,
        /// The priority.
        priority: u8,
        /// Frames that it took out of the queue.
        lost: u64,
    }
    /// A watchdog is done: everything is as before.
    "fabric:watchdog_restored" WatchdogRestored {
        /// The cable.
        cable: u32,
        /// The priority.
        priority: u8,
    }
    /// Something was done to a packet on a cable.
    "fabric:fault" Fault {
        /// The cable.
        cable: u32,
        /// `forward` from the cable's first end, or `backward`.
        direction: Word,
        /// `rule`, `link-down` or `too-big`.
        cause: Word,
        /// The rule's number, if a rule did it.
        #[serde(skip_serializing_if = "Option::is_none")]
        rule: Option<u32>,
        /// What was done.
        effect: Change,
        /// What the packet is for.
        class: Word,
        /// Its opcode, unless it is malformed.
        #[serde(skip_serializing_if = "Option::is_none")]
        opcode: Option<Word>,
        /// Its PSN, unless it is malformed.
        #[serde(skip_serializing_if = "Option::is_none")]
        psn: Option<u32>,
        /// Its PSN counted from the first of its flow, if it belongs to one.
        #[serde(skip_serializing_if = "Option::is_none")]
        relative_psn: Option<i64>,
        /// Its flow, if it belongs to one.
        #[serde(skip_serializing_if = "Option::is_none")]
        role: Option<u32>,
        /// How often this PSN was seen, this time included; 0 if nobody counts.
        transmission: u64,
    }
}

impl What {
    /// The queue pair that it happened at, if it is about one.
    pub fn queue_pair(&self) -> Option<u32> {
        match self {
            What::Configured { qp, .. }
            | What::WorkStarted { qp, .. }
            | What::WorkCompleted { qp, .. }
            | What::WorkRetired { qp, .. }
            | What::PacketSent { qp, .. }
            | What::PacketReceived { qp, .. }
            | What::PacketDropped { qp, .. }
            | What::DuplicateAnswered { qp, .. }
            | What::RequestRefused { qp, .. }
            | What::WentBack { qp, .. }
            | What::RnrWaitStarted { qp, .. }
            | What::AckTimedOut { qp, .. }
            | What::MemoryWritten { qp, .. }
            | What::StateChanged { qp, .. }
            | What::ClientFaulted { qp, .. } => Some(*qp),
            _ => None,
        }
    }
}
