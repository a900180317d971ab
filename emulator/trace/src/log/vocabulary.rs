//! Every name that a log can have, with its fields: declared once.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::net::IpAddr;

/// A word of a fixed set, or what a reader found in its place.
type Word = Cow<'static, str>;

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
        /// Why it left: `work`; for what is sent again `sequence-nak`, `response-gap`, `timeout` or `receiver-not-ready`; for an answer `request`, `duplicate` or the reason of the refusal.
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

/// A packet in an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketData {
    /// Service and opcode: `RC WRITE_FIRST`.
    pub opcode: Word,
    /// Its PSN.
    pub psn: u32,
    /// The queue pair that it is for.
    pub dest_qp: u32,
    /// Bytes of payload.
    pub payload: u32,
    /// `ack`, `rnr-nak`, or `nak/` and its code, where it has an AETH.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub syndrome: Option<Word>,
    /// How long an RNR NAK asks to wait, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rnr_wait: Option<u64>,
    /// The other host.
    pub peer: IpAddr,
}

/// A piece of memory in an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BufferData {
    /// The region.
    pub key: u32,
    /// The first byte.
    pub address: u64,
    /// How many bytes.
    pub length: u32,
}

/// A completion queue in an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueData {
    /// Its number.
    pub cq: u32,
    /// How many completions it holds.
    pub slots: u32,
}

/// What a fault did to a packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Change {
    /// It was lost.
    Dropped {
        /// And with it so many duplicates.
        copies: u64,
    },
    /// Others were made of it.
    Duplicated {
        /// How many.
        copies: u32,
    },
    /// It was held back.
    HeldBack {
        /// Behind how many others.
        by: u32,
    },
    /// It takes longer.
    Delayed {
        /// How many nanoseconds longer.
        ns: u64,
    },
    /// One bit was flipped.
    Corrupted {
        /// Counted from the highest bit of the BTH's first byte.
        bit: u32,
        /// `stale` or `repaired`: what became of the ICRC.
        seal: Word,
    },
    /// It carries a congestion mark now.
    MarkedCe,
    /// A field has another value now.
    Rewritten {
        /// The field.
        field: Word,
        /// Its old value.
        from: u64,
        /// Its new value.
        to: u64,
    },
    /// It took the link down.
    LinkCut {
        /// `one-way` or `both-ways`.
        cut: Word,
        /// Until when, in nanoseconds since the start.
        until: u64,
    },
}
