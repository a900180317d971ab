//! Every name that a log can have, with its fields: declared once.

use super::data::{CompletionQueueData, EffectData, FabricPacketData, Keyword, PacketData, SgeData};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// A name of the log, as its reference page tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventSchema {
    /// Category and name.
    pub name: &'static str,
    /// What happened.
    pub description: &'static str,
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
        pub enum LogEvent {$(
            $(#[doc = $meaning])+
            #[serde(rename = $name)]
            $variant { $( $(#[doc = $about])+ $(#[serde($($serde)*)])? $field: $kind, )* },
        )*}

        impl LogEvent {
            /// Category and name.
            pub const fn name(&self) -> &'static str {
                match self {$( LogEvent::$variant { .. } => $name, )*}
            }
        }

        /// Every name that a log can have.
        pub const EVENT_SCHEMAS: &[EventSchema] = &[$(
            EventSchema {
                name: $name,
                description: concat!($($meaning),+),
                fields: &[$( (stringify!($field), concat!($($about),+)) ),*],
            },
        )*];
    };
}

vocabulary! {
    /// A queue pair got ready to receive or to send: what it was told.
    "qp:configured" QpConfigured {
        /// The queue pair.
        qp: u32,
        /// `rc`, `uc`, `ud`, `xrc-initiator`, `xrc-target` or `gsi`.
        qp_type: Keyword,
        /// What a lost packet does: `fatal`, `go-back-n` or `go-back-0`.
        recovery: Keyword,
        /// The host at the other end of the connection.
        #[serde(skip_serializing_if = "Option::is_none")]
        peer: Option<IpAddr>,
        /// The queue pair at the other end of the connection.
        #[serde(skip_serializing_if = "Option::is_none")]
        dest_qp: Option<u32>,
        /// Payload bytes per packet.
        path_mtu: u32,
        /// The first PSN that it sends.
        sq_psn: u32,
        /// The first PSN that it expects.
        rq_psn: u32,
        /// The exponent of 4.096 µs that an acknowledgement may take.
        timeout: u8,
        /// How long a silent peer is waited for before something is done about it, in nanoseconds; absent for ever.
        #[serde(skip_serializing_if = "Option::is_none")]
        ack_timeout: Option<u64>,
        /// How often it tries again.
        retry_cnt: u8,
        /// How often it tries again when the receiver is not ready; 7 for ever.
        rnr_retry: u8,
        /// What the peer may do: rights with a `|` between them.
        qp_access_flags: String,
        /// Reads and atomics that it may have outstanding.
        max_rd_atomic: u8,
        /// Reads and atomics that the peer may have outstanding here.
        max_dest_rd_atomic: u8,
        /// Work requests that its send queue holds.
        max_send_wr: u32,
        /// Work requests that its own receive queue holds.
        max_recv_wr: u32,
        /// The completion queue of its sends.
        #[serde(skip_serializing_if = "Option::is_none")]
        send_cq: Option<CompletionQueueData>,
        /// The completion queue of its receives.
        #[serde(skip_serializing_if = "Option::is_none")]
        recv_cq: Option<CompletionQueueData>,
    }
    /// A send work request was taken from its ring and got its PSNs.
    "work:started" WqeFetched {
        /// The queue pair.
        qp: u32,
        /// The work request's id.
        wr_id: u64,
        /// What it asks for.
        operation: Keyword,
        /// Its length.
        bytes: u32,
        /// Its first PSN.
        first_psn: u32,
        /// How many PSNs it has.
        packets: u32,
        /// Its first piece of local memory, unless the data stood in the request.
        #[serde(skip_serializing_if = "Option::is_none")]
        first_sge: Option<SgeData>,
    }
    /// A work request completed.
    "work:completed" WorkCompleted {
        /// The queue pair.
        qp: u32,
        /// The work request's id.
        wr_id: u64,
        /// What it asked for.
        operation: Keyword,
        /// How it ended.
        status: Keyword,
        /// Bytes transferred.
        bytes: u32,
        /// Immediate data, if there is some.
        #[serde(skip_serializing_if = "Option::is_none")]
        imm_data: Option<u32>,
        /// The key that was invalidated, if one was.
        #[serde(skip_serializing_if = "Option::is_none")]
        invalidated_rkey: Option<u32>,
        /// The sending queue pair, for datagrams.
        #[serde(skip_serializing_if = "Option::is_none")]
        src_qp: Option<u32>,
        /// The completion queue.
        cq: u32,
        /// Why it failed; `none` if it did not.
        reason: Keyword,
        /// The same as a number: the completion's vendor error.
        vendor_err: u32,
    }
    /// An unsignalled work request was done without a completion.
    "work:retired" UnsignaledCompleted {
        /// The queue pair.
        qp: u32,
        /// The work request's id.
        wr_id: u64,
    }
    /// A packet left.
    "transport:packet_sent" PacketSent {
        /// The queue pair that sent it.
        qp: u32,
        /// The packet.
        packet: PacketData,
        /// The id of the work request that it belongs to, or that it answers; absent if the log does not tell.
        #[serde(skip_serializing_if = "Option::is_none")]
        wr_id: Option<u64>,
        /// Whether that PSN had left before.
        retransmission: bool,
        /// Why it left: `work`; for what is sent again `sequence-nak`, `response-gap`, `timeout` or `receiver-not-ready`; for an answer `request`, `duplicate` or the reason of the refusal; `unknown` where a capture does not tell.
        cause: Keyword,
    }
    /// A packet came and is for this queue pair.
    "transport:packet_received" PacketReceived {
        /// The queue pair.
        qp: u32,
        /// The packet.
        packet: PacketData,
        /// The id of the work request that it belongs to, or that it answers; absent if the log does not tell.
        #[serde(skip_serializing_if = "Option::is_none")]
        wr_id: Option<u64>,
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
        wr_id: Option<u64>,
        /// Why.
        reason: Keyword,
    }
    /// A duplicate was answered and not executed again.
    "transport:duplicate_answered" DuplicateRequestHandled {
        /// The queue pair.
        qp: u32,
        /// The duplicate's PSN.
        psn: u32,
        /// Its opcode.
        opcode: Keyword,
    }
    /// A responder refused a request.
    "transport:request_refused" RequestRejected {
        /// The queue pair.
        qp: u32,
        /// The request's PSN.
        psn: u32,
        /// The PSN that is missing, if there is a gap.
        #[serde(skip_serializing_if = "Option::is_none")]
        expected_psn: Option<u32>,
        /// Why.
        reason: Keyword,
    }
    /// A requester will send again what it had sent.
    "recovery:went_back" Retransmitted {
        /// The queue pair.
        qp: u32,
        /// From which PSN on.
        from_psn: u32,
        /// What made it.
        cause: Keyword,
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
    "congestion:mark_seen" EcnMarkReceived {
        /// The queue pair.
        qp: u32,
        /// The packet's PSN.
        psn: u32,
        /// Whether a notification (CNP) follows; if not, the last one was too short ago.
        cnp_queued: bool,
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
        cause: Keyword,
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
    "qp:state_changed" QpStateChanged {
        /// The queue pair.
        qp: u32,
        /// Its state before.
        from: Keyword,
        /// Its state now.
        to: Keyword,
        /// Why.
        reason: Keyword,
    }
    /// A completion queue's owner is to be woken.
    "cq:notified" CompletionNotified {
        /// The completion queue.
        cq: u32,
    }
    /// An asynchronous event of the verbs.
    "device:async_event" AsyncEventRaised {
        /// Whose it is; absent if everybody's.
        #[serde(skip_serializing_if = "Option::is_none")]
        client: Option<u32>,
        /// Its name, as `enum ibv_event_type` has it.
        event: Keyword,
        /// The number of the queue pair, completion queue or shared receive queue that it is about.
        #[serde(skip_serializing_if = "Option::is_none")]
        element: Option<u32>,
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
        message: Keyword,
        /// The other host.
        peer: IpAddr,
        /// Whether it had left before.
        retransmission: bool,
    }
    /// A message of the connection manager came.
    "cm:message_received" CmReceived {
        /// The message.
        message: Keyword,
        /// The other host.
        peer: IpAddr,
    }
    /// A message of the connection manager was not acted on.
    "cm:message_ignored" CmDropped {
        /// The identifier that it is about, if there is one.
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<u32>,
        /// The message.
        message: Keyword,
        /// The other host.
        peer: IpAddr,
        /// Why.
        reason: Keyword,
    }
    /// A connection identifier changed its state.
    "cm:state_changed" CmStateChanged {
        /// The identifier.
        id: u32,
        /// Its state before.
        from: Keyword,
        /// Its state now.
        to: Keyword,
    }
    /// The connection manager gave up waiting for an answer.
    "cm:gave_up" CmFailed {
        /// The identifier.
        id: u32,
        /// `timed-out` or `link-dead`.
        reason: Keyword,
    }
    /// An event of connection management waits for the application.
    "cm:event" CmEventRaised {
        /// The application.
        client: u32,
        /// The channel.
        channel: u32,
        /// The identifier that it is about.
        id: u32,
        /// Its name, as `enum rdma_cm_event_type` has it.
        event: Keyword,
        /// Zero, a negative errno, or the reason of a refusal.
        status: i32,
    }
    /// A switch marked a packet because of the queue before it.
    "fabric:ecn_marked" EcnMarked {
        /// The cable that it leaves over.
        link: u32,
        /// Its priority.
        priority: u8,
        /// Bytes that waited before it.
        queue_depth: u64,
        /// The packet.
        packet: FabricPacketData,
    }
    /// A frame was lost in a switch, or at the port of a host.
    "fabric:frame_lost" FrameDropped {
        /// The cable that it was to leave over, or that it came over.
        link: u32,
        /// Its priority.
        priority: u8,
        /// Why.
        cause: Keyword,
        /// The packet.
        packet: FabricPacketData,
    }
    /// A pause frame was sent.
    "fabric:pause_sent" PauseSent {
        /// The cable.
        link: u32,
        /// The priority that is to stop.
        priority: u8,
        /// For so many times 512 bit times; 0 lets it go on.
        quanta: u16,
        /// Bytes of that priority that had come over the cable and were still there.
        buffered: u64,
    }
    /// A pause frame came.
    "fabric:pause_received" PauseReceived {
        /// The cable.
        link: u32,
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
        link: u32,
        /// The priority.
        priority: u8,
        /// `resumed`, `expired`, or `overruled` by a watchdog.
        cause: Keyword,
    }
    /// The depth of a queue passed a multiple of the step that the switch was asked to tell.
    "fabric:queue_sampled" QueueSampled {
        /// The cable that the queue leads to.
        link: u32,
        /// The priority.
        priority: u8,
        /// Bytes that wait.
        queue_depth: u64,
    }
    /// A watchdog acted on a queue that a pause had stopped for too long, or on a host that had stopped others.
    "fabric:watchdog_fired" WatchdogFired {
        /// The cable.
        link: u32,
        /// The priority.
        priority: u8,
        /// Frames that it took out of the queue.
        dropped: u64,
    }
    /// A watchdog is done: everything is as before.
    "fabric:watchdog_restored" WatchdogRestored {
        /// The cable.
        link: u32,
        /// The priority.
        priority: u8,
    }
    /// Something was done to a packet on a cable.
    "fabric:fault" Fault {
        /// The cable.
        link: u32,
        /// `forward` from the cable's first end, or `backward`.
        direction: Keyword,
        /// `rule`, `link-down` or `too-big`.
        cause: Keyword,
        /// The rule's number, if a rule did it.
        #[serde(skip_serializing_if = "Option::is_none")]
        rule: Option<u32>,
        /// What was done.
        effect: EffectData,
        /// What the packet is for.
        class: Keyword,
        /// Its opcode, unless it is malformed.
        #[serde(skip_serializing_if = "Option::is_none")]
        opcode: Option<Keyword>,
        /// Its PSN, unless it is malformed.
        #[serde(skip_serializing_if = "Option::is_none")]
        psn: Option<u32>,
        /// Its PSN counted from the first of its flow, if it belongs to one.
        #[serde(skip_serializing_if = "Option::is_none")]
        relative_psn: Option<i64>,
        /// Its flow, if it belongs to one.
        #[serde(skip_serializing_if = "Option::is_none")]
        flow: Option<u32>,
        /// How often this PSN was seen, this time included; 0 if nobody counts.
        transmission: u64,
    }
}

impl LogEvent {
    /// The queue pair that it happened at, if it is about one.
    pub fn queue_pair(&self) -> Option<u32> {
        match self {
            LogEvent::QpConfigured { qp, .. }
            | LogEvent::WqeFetched { qp, .. }
            | LogEvent::WorkCompleted { qp, .. }
            | LogEvent::UnsignaledCompleted { qp, .. }
            | LogEvent::PacketSent { qp, .. }
            | LogEvent::PacketReceived { qp, .. }
            | LogEvent::PacketDropped { qp, .. }
            | LogEvent::DuplicateRequestHandled { qp, .. }
            | LogEvent::RequestRejected { qp, .. }
            | LogEvent::Retransmitted { qp, .. }
            | LogEvent::RnrWaitStarted { qp, .. }
            | LogEvent::AckTimedOut { qp, .. }
            | LogEvent::MemoryWritten { qp, .. }
            | LogEvent::QpStateChanged { qp, .. }
            | LogEvent::ClientFaulted { qp, .. } => Some(*qp),
            _ => None,
        }
    }
}
