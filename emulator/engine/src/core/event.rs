//! The events of the HCA, declared once.
//!
//! [`hca_events`](crate::hca_events) holds the only declaration of every event: its name in the event log, its meaning,
//! its text, and its fields. The engine derives [`Event`] from it. The trace crate derives the log entry, its JSON
//! form, the schema, the text of ladders and log lines, and the reference page. Every drop, rejection, state change and
//! failed completion is an event with a reason, so that events alone explain a failure.

use crate::{
    AsyncEvent, ClientId, CmChannelId, CmDropReason, CmFailure, CmId, CmMessageKind, CqId, DropReason,
    Instant, LinkReject, QpState, QpType, RateCause, Reason, Recovery, RequestError, RetransmitCause,
};
use core::net::IpAddr;
use core::time::Duration;
use softhca_types::cm::{CmState, EventType};
use softhca_types::{
    AccessFlags, CallSite, Completion, CompletionOpcode, CorruptRing, ProgramAction, Sge, Verb,
};
use softhca_wire::{Mtu, Opcode, Psn, Qpn, Syndrome, TransportHeader};

/// The point at which an injected fault acted.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedPoint {
    /// A call.
    Call(Verb),
    /// A completion.
    Completion,
    /// The device.
    Event,
}

impl InjectedPoint {
    /// Its name in the log.
    pub const fn name(self) -> &'static str {
        match self {
            InjectedPoint::Call(verb) => verb.name(),
            InjectedPoint::Completion => "completion",
            InjectedPoint::Event => "event",
        }
    }
}

/// The part of a packet that events carry.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketSummary {
    /// Service and operation.
    pub opcode: Opcode,
    /// The PSN.
    pub psn: Psn,
    /// The destination queue pair.
    pub dest_qp: Qpn,
    /// Bytes of payload.
    pub payload_length: u32,
    /// The AETH syndrome of an ACK or NAK.
    pub syndrome: Option<Syndrome>,
    /// The address of the other host.
    pub peer: IpAddr,
}

impl PacketSummary {
    pub(crate) fn new(header: &TransportHeader, payload: usize, peer: IpAddr) -> PacketSummary {
        PacketSummary {
            opcode: header.bth.opcode,
            psn: header.bth.psn,
            dest_qp: header.bth.destination_qp,
            payload_length: payload as u32,
            syndrome: header.aeth.map(|aeth| aeth.syndrome),
            peer,
        }
    }
}

/// Passes the declaration of every event to the macro `$callback`, behind the tokens `$prefix`.
///
/// An event is: its meaning, its name in the log, its variant, `[EMPHASIS "TEXT"]`, its fields, and behind `log` the
/// fields that only the log has. In a text, `{field}` stands for a value and `{field|FORMAT}` for a formatted value.
/// `{field?TEXT}` stands for a text that depends on whether the field is set. `own` and `peer` are PSNs of the requests
/// of this queue pair and of its peer.
#[macro_export]
macro_rules! hca_events {
    ($callback:ident! { $($prefix:tt)* }) => { $callback! { $($prefix)*
        configuration {
            /// The attributes of a queue pair.
            QpConfiguration {
                /// `rc`, `uc`, `ud`, `xrc-initiator`, `xrc-target` or `gsi`.
                qp_type: QpType,
                /// The effect of a lost packet: `fatal`, `go-back-n` or `go-back-0`.
                recovery: Recovery,
                /// The address of the connected host.
                peer: Option<IpAddr>,
                /// The connected queue pair.
                dest_qp: Option<Qpn>,
                /// Payload bytes per packet.
                path_mtu: Mtu,
                /// The first PSN that it sends.
                sq_psn: Psn,
                /// The first PSN that it expects.
                rq_psn: Psn,
                /// The ACK timeout as the exponent of 4.096 µs.
                timeout: u8,
                /// The time without an ACK after which the requester acts, in nanoseconds; absent without a limit.
                ack_timeout: Option<Duration>,
                /// How often it retries without progress.
                retry_cnt: u8,
                /// How often it retries after an RNR NAK; 7 means without limit.
                rnr_retry: u8,
                /// The access that the peer has: flags with a `|` between them.
                qp_access_flags: AccessFlags,
                /// The outstanding READ and atomic requests that it may have.
                max_rd_atomic: u8,
                /// The outstanding READ and atomic requests that the peer may have here.
                max_dest_rd_atomic: u8,
                /// Work requests that the send queue holds; 0 without one.
                max_send_wr: u32,
                /// Work requests that its own receive queue holds; 0 without one.
                max_recv_wr: u32,
                /// The completion queue of sends, and how many CQEs it holds.
                send_cq: Option<(CqId, u32)>,
                /// The completion queue of receives, and how many CQEs it holds.
                recv_cq: Option<(CqId, u32)>,
            }
        }
        hca {
            /// A queue pair became ready to receive or to send.
            "qp:configured" QpConfigured
            [normal "configured: {qp_type}, path MTU {path_mtu}, recovery {recovery}, retry_cnt {retry_cnt}, rnr_retry {rnr_retry}"] {
                /// The queue pair.
                qp: Qpn,
                /// Its attributes.
                #[serde(flatten)]
                configuration: QpConfiguration,
            }
            /// The HCA fetched a send WQE from its ring and assigned PSNs to it.
            "work:fetched" WqeFetched
            [normal "fetches {operation} {wr_id}: {bytes} B in {packets} packets from {first_psn|own}{call_site?, posted at {call_site}}{trigger?; {trigger}}"] {
                /// The queue pair.
                qp: Qpn,
                /// The id of the work request.
                wr_id: u64,
                /// The operation.
                operation: CompletionOpcode,
                /// The length of the message.
                bytes: u32,
                /// Its first PSN.
                first_psn: Psn,
                /// The number of its PSNs.
                packets: u32,
                /// Its first SGE; absent for inline data.
                first_sge: Option<Sge>,
                /// The call that posted it: source file and line, or module and offset without debug information. Absent unless an unmodified program runs under `softhca exec` with a log.
                call_site: Option<CallSite>,
            }
            /// A work request completed.
            "work:completed" Completed
            [normal "completes {operation} {wr_id} with {status}, {bytes} B{trigger?: {trigger}}"] {
                /// The completion queue.
                cq: CqId,
                /// The CQE.
                #[serde(flatten)]
                completion: Completion,
                /// Why it failed; `none` on success.
                reason: Reason,
            }
            /// An unsignaled work request finished without a CQE.
            "work:unsignaled_completed" UnsignaledCompleted
            [success "completes request {wr_id} without a CQE (unsignaled)"] {
                /// The queue pair.
                qp: Qpn,
                /// The id of the work request.
                wr_id: u64,
            }
            /// A packet was sent.
            "transport:packet_sent" PacketSent
            [normal "-> {packet.peer} {packet.opcode} PSN {packet.psn}{packet.syndrome? {packet.syndrome}} {packet.payload} B{retransmission?, retransmission ({cause})}"] {
                /// The queue pair that sent it.
                qp: Qpn,
                /// The packet.
                packet: PacketSummary,
                /// The id of the work request that it belongs to or responds to; absent if unknown.
                wr_id: Option<u64>,
                /// Whether this PSN was sent before.
                retransmission: bool,
            } log {
                /// Why it was sent: `work`; for a retransmission `sequence-nak`, `response-gap`, `timeout`, `tail-probe` or `receiver-not-ready`; for a response `request`, `duplicate` or the reason of the rejection; `unknown` if a capture does not show it.
                cause: Keyword,
            }
            /// A packet for this queue pair was received.
            "transport:packet_received" PacketReceived
            [normal "<- {packet.peer} {packet.opcode} PSN {packet.psn}{packet.syndrome? {packet.syndrome}} {packet.payload} B"] {
                /// The queue pair.
                qp: Qpn,
                /// The packet.
                packet: PacketSummary,
            } log {
                /// The id of the work request that it belongs to or responds to; absent if unknown.
                wr_id: Option<u64>,
            }
            /// A packet was dropped.
            "transport:packet_dropped" PacketDropped
            [unusual "drops {packet!a packet}{packet?{packet.opcode} {packet.psn|either}}: {trigger}"] {
                /// The queue pair; 0 if unknown.
                qp: Qpn,
                /// The packet, if it could be parsed.
                packet: Option<PacketSummary>,
                /// Why.
                reason: DropReason,
            } log {
                /// The id of the work request that it belongs to or responds to; absent if unknown.
                wr_id: Option<u64>,
            }
            /// The responder acknowledged a duplicate request without executing it again.
            "transport:duplicate_request" DuplicateRequestHandled
            [unusual "{psn|peer} is a duplicate: acknowledged, not executed again"] {
                /// The queue pair.
                qp: Qpn,
                /// The PSN of the duplicate.
                psn: Psn,
                /// Its opcode.
                opcode: Opcode,
            }
            /// The responder rejected a request.
            "transport:request_rejected" RequestRejected
            [error "rejects {psn|peer}: {trigger}"] {
                /// The queue pair.
                qp: Qpn,
                /// The PSN of the request.
                psn: Psn,
                /// Why.
                error: RequestError,
            } log {
                /// The PSN that the responder expected, after a gap.
                expected_psn: Option<u32>,
            }
            /// A requester retransmits.
            "recovery:retransmitted" Retransmitted
            [unusual "retransmits from {from_psn|own}: {cause|words}{retries_left|retries}"] {
                /// The queue pair.
                qp: Qpn,
                /// The first PSN that it sends again.
                from_psn: Psn,
                /// Why.
                cause: RetransmitCause,
                /// How often it may retry again; absent if a capture does not show it.
                retries_left: Option<u8>,
            }
            /// A requester waits after an RNR NAK.
            "recovery:rnr_wait_started" RnrWaitStarted
            [unusual "RNR wait of {until|until} before {psn|own} is retransmitted{retries_left|retries}"] {
                /// The queue pair.
                qp: Qpn,
                /// The PSN that was rejected.
                psn: Psn,
                /// When the wait ends, in nanoseconds since the start.
                until: Instant,
                /// How often it may wait again; absent if a capture does not show it.
                retries_left: Option<u8>,
            }
            /// The ACK timer of a requester expired.
            "recovery:ack_timed_out" AckTimedOut
            [unusual "ACK timeout: {oldest_psn|own} is not acknowledged"] {
                /// The queue pair.
                qp: Qpn,
                /// The oldest unacknowledged PSN.
                oldest_psn: Psn,
            }
            /// A packet with an ECN mark (CE) was received.
            "congestion:ecn_mark_received" EcnMarkReceived
            [unusual "{psn|peer} has an ECN mark{cnp_queued?: a CNP follows}{cnp_queued!: the last CNP was too recent}"] {
                /// The queue pair.
                qp: Qpn,
                /// The PSN of the packet.
                psn: Psn,
                /// Whether a CNP follows. If not, the last one was sent too recently.
                cnp_queued: bool,
            }
            /// Rate control changed the rate of a queue pair.
            "congestion:rate_changed" RateChanged
            [unusual "rate {bits_per_second|rate}, alpha {alpha_millionths|millionths} ({cause|words})"] {
                /// The queue pair.
                qp: Qpn,
                /// Its rate, in bits per second.
                bits_per_second: u64,
                /// The rate that it increases to next, in bits per second.
                target: u64,
                /// The estimate of congestion (alpha of DCQCN), in millionths.
                alpha_millionths: u32,
                /// The cause of the change.
                cause: RateCause,
            }
            /// Local memory was written by a peer, a receive, a READ response or an atomic.
            "memory:written" MemoryWritten
            [normal "{length} B written at {address|hex}, key {key|hex}"] {
                /// The queue pair that received the packet.
                qp: Qpn,
                /// The key of the region or window.
                key: u32,
                /// The first byte.
                address: u64,
                /// The number of bytes.
                length: u32,
                /// The PSN of the packet.
                psn: Psn,
            }
            /// A memory region was deregistered before the completion of a send work request that uses it was polled.
            "memory:deregistered_in_use" DeregisteredInUse
            [error "deregisters key {key|hex}, which work request {wr_id} uses{completed?: its completion is not polled}"] {
                /// The queue pair of the work request.
                qp: Qpn,
                /// The id of the work request.
                wr_id: u64,
                /// The key of the region.
                key: u32,
                /// Whether the work request has completed.
                completed: bool,
            }
            /// A queue pair changed its state.
            "qp:state_changed" QpStateChanged
            [normal "{from} → {to}{trigger?: {trigger}}"] {
                /// The queue pair.
                qp: Qpn,
                /// The previous state.
                from: QpState,
                /// The new state.
                to: QpState,
                /// Why.
                reason: Reason,
            }
            /// A completion queue notifies its owner.
            "cq:notified" CompletionNotified
            [normal "completion queue {cq|hex} notifies its owner"] {
                /// The completion queue.
                cq: CqId,
            }
            /// An asynchronous event of the verbs.
            "device:async_event" AsyncEventRaised
            [unusual "async event {event}"] {
                /// The client that receives it; absent for every client.
                client: Option<ClientId>,
                /// Its name in `enum ibv_event_type`.
                event: AsyncEvent,
            } log {
                /// The number of the queue pair, completion queue or shared receive queue.
                element: Option<u32>,
            }
            /// A fault rule of the user acted on a call, a completion or the device.
            "fault:injected" FaultInjected
            [error "injected by fault rule {rule}: {point} {effect}"] {
                /// The number of the rule.
                rule: u32,
                /// The verb, or `completion`, or `event`.
                point: InjectedPoint,
                /// The object in order of creation, from 1; absent for calls on the device.
                object: Option<u32>,
                /// The queue pair; 0 if none.
                qp: Qpn,
                /// The effect of the rule.
                effect: ProgramAction,
            }
            /// A process called a verb. Only a run that records calls has it.
            "verb:called" VerbCalled
            [normal "process {process} calls {verb}"] {
                /// The process.
                process: u32,
                /// The verb.
                verb: Verb,
                /// The object in order of creation, from 1; absent for calls on the device.
                object: Option<u32>,
                /// The call of this verb on this object, from 1.
                nth: u64,
                /// The queue pair; 0 if the object is another.
                qp: Qpn,
                /// The program that the process belongs to.
                role: u32,
                /// The place of the call in the program: module and offset of the return address; absent if it is unknown.
                call_site: Option<CallSite>,
                /// The state of the queue pair before the call.
                state: Option<QpState>,
            }
            /// The ring of a client is corrupt; its queue pair stopped.
            "device:client_faulted" ClientFaulted
            [error "the client corrupted its ring: {trigger}"] {
                /// The client.
                client: ClientId,
                /// The queue pair.
                qp: Qpn,
                /// The invalid index.
                #[serde(flatten)]
                corrupt_ring: CorruptRing,
            }
            /// A peer without link control was detected: rxe, a hardware HCA, or no port at all.
            "link:foreign_peer" ForeignPeerDetected
            [unusual "{peer} is not SoftHCA: packets may be lost; recovery {recovery}, at most {window} unacknowledged packets"] {
                /// The address of the other host.
                peer: IpAddr,
                /// The effect of a lost packet on connections to it.
                recovery: Recovery,
                /// The most unacknowledged packets to it.
                window: u32,
            }
            /// Link control messages were rejected without effect. One event per reason and 100 ms.
            "link:message_rejected" LinkMessageRejected
            [unusual "rejects a link control message from {peer} ({messages} for this reason): {trigger}"] {
                /// The source address of the last one.
                peer: IpAddr,
                /// Why.
                reason: LinkReject,
                /// How many since the last such event.
                messages: u64,
            }
            /// A CM message was sent.
            "cm:message_sent" CmSent
            [normal "sends CM {message} to {peer}{retransmission?, retransmission}"] {
                /// The connection id, if it has one.
                id: Option<CmId>,
                /// The message: `REQ`, `REP`, ….
                message: CmMessageKind,
                /// The address of the other host.
                peer: IpAddr,
                /// Whether it was sent before.
                retransmission: bool,
            }
            /// A CM message was received.
            "cm:message_received" CmReceived
            [normal "receives CM {message} from {peer}"] {
                /// The message.
                message: CmMessageKind,
                /// The address of the other host.
                peer: IpAddr,
            }
            /// A CM message was dropped.
            "cm:message_dropped" CmDropped
            [unusual "drops CM {message} from {peer}: {trigger}"] {
                /// The connection id, if it has one.
                id: Option<CmId>,
                /// The message.
                message: CmMessageKind,
                /// The address of the other host.
                peer: IpAddr,
                /// Why.
                reason: CmDropReason,
            }
            /// A connection id changed its state.
            "cm:state_changed" CmStateChanged
            [normal "connection {id|hex}: {from} → {to}"] {
                /// The connection id.
                id: CmId,
                /// The previous state.
                from: CmState,
                /// The new state.
                to: CmState,
            }
            /// The connection manager stopped waiting for a reply.
            "cm:failed" CmFailed
            [error "connection {id|hex} failed: {reason|words}"] {
                /// The connection id.
                id: CmId,
                /// `timed-out` or `peer-unreachable`.
                reason: CmFailure,
            }
            /// A CM event waits for the application.
            "cm:event" CmEventRaised
            [normal "connection {id|hex}: {event}, status {status}"] {
                /// The client.
                client: ClientId,
                /// The event channel.
                channel: CmChannelId,
                /// The connection id.
                id: CmId,
                /// Its name in `enum rdma_cm_event_type`.
                event: EventType,
                /// Zero, a negative errno, or the reason of a rejection.
                status: i32,
            }
        }
    } };
}

macro_rules! declare_events {
    (
        configuration {
            $(#[doc = $struct_doc:literal])+
            $struct:ident { $( $(#[doc = $attribute_doc:literal])+ $attribute:ident: $attribute_type:ty, )* }
        }
        hca {$(
            $(#[doc = $meaning:literal])+
            $name:literal $variant:ident [$emphasis:ident $text:literal] {
                $( $(#[doc = $about:literal])+ $(#[serde($($serde:tt)*)])? $field:ident: $type:ty, )*
            } $(log { $($log:tt)* })?
        )*}
    ) => {
        $(#[doc = $struct_doc])+
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $struct { $( $(#[doc = $attribute_doc])+ pub $attribute: $attribute_type, )* }

        /// Something that happened in the HCA.
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum Event {$(
            $(#[doc = $meaning])+
            $variant { $( $(#[doc = $about])+ $field: $type, )* },
        )*}
    };
}

hca_events! { declare_events! {} }
