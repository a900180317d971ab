//! Facts that the card tells: one `Copy` enum, in the past tense.
//!
//! Every drop, refusal, state change and failed completion is an event with its reason, so that "why did
//! this fail" can be answered from events alone.

use crate::{
    AccessError, AsyncEvent, ClientId, CmChannelId, CmDropReason, CmFailure, CmId, CmMessageKind, CqId,
    Instant, QpState, QpType, RateCause, Recovery,
};
use core::fmt;
use core::net::IpAddr;
use core::time::Duration;
use softhca_queue::cm::{CmState, EventType};
use softhca_queue::{AccessFlags, Completion, CompletionOpcode, CompletionStatus, CorruptRing, Sge};
use softhca_wire::{Malformed, Mtu, NakCode, Opcode, Psn, Qpn, Syndrome, TransportHeader};

/// What a trace line needs to know of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketSummary {
    /// What it is.
    pub opcode: Opcode,
    /// Its PSN.
    pub psn: Psn,
    /// The queue pair that it is for.
    pub dest_qp: Qpn,
    /// Bytes of payload.
    pub payload_length: u32,
    /// What it acknowledges or refuses.
    pub syndrome: Option<Syndrome>,
    /// The other host.
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

/// Why a packet was not acted on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the sentences of `Display` say what each means")]
pub enum DropReason {
    Malformed(Malformed),
    BadIcrc,
    NoQueuePair,
    WrongService { expected: &'static str },
    PkeyMismatch,
    QkeyMismatch,
    AddressMismatch,
    InvalidQpState(QpState),
    NakOutstanding { expected: Psn },
    StaleResponse { oldest: Psn },
    AlreadyRetransmitting { expected: Psn },
    NoOutstandingRequest,
    AtomicResultNotSaved,
    Duplicate,
    UcSequenceGap { expected: Psn },
    UcAccess(AccessError),
    UcRequest(RequestError),
    NoReceivePosted,
    PayloadExceedsPmtu { length: u32, mtu: u32 },
    TooManyPendingResponses,
    NotMulticastMember,
    InRnrWait,
    PortDown,
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DropReason::Malformed(why) => write!(f, "malformed: {why}"),
            DropReason::BadIcrc => f.write_str("the ICRC is wrong"),
            DropReason::NoQueuePair => f.write_str("no such queue pair"),
            DropReason::WrongService { expected } => write!(f, "the queue pair is of service {expected}"),
            DropReason::PkeyMismatch => f.write_str("the P_Key is not in the table"),
            DropReason::QkeyMismatch => f.write_str("the Q_Key is wrong"),
            DropReason::AddressMismatch => f.write_str("it comes from another host than the connection's"),
            DropReason::InvalidQpState(state) => write!(f, "the queue pair is in {state}"),
            DropReason::NakOutstanding { expected } => {
                write!(f, "a NAK is outstanding: only PSN {expected} is taken")
            }
            DropReason::StaleResponse { oldest } => write!(f, "an old response: {oldest} is awaited"),
            DropReason::AlreadyRetransmitting { expected } => {
                write!(f, "response {expected} is missing and was asked for again already")
            }
            DropReason::NoOutstandingRequest => f.write_str("a response to nothing that was sent"),
            DropReason::AtomicResultNotSaved => {
                f.write_str("a duplicate atomic whose result is no longer kept")
            }
            DropReason::Duplicate => f.write_str("a duplicate"),
            DropReason::UcSequenceGap { expected } => {
                write!(f, "the message lacks its packet {expected}")
            }
            DropReason::UcAccess(denied) => write!(f, "{denied}"),
            DropReason::UcRequest(refusal) => write!(f, "{refusal}"),
            DropReason::NoReceivePosted => f.write_str("no receive is posted"),
            DropReason::PayloadExceedsPmtu { length, mtu } => {
                write!(f, "{length} bytes are more than the path MTU {mtu}")
            }
            DropReason::TooManyPendingResponses => f.write_str("too many replies are owed already"),
            DropReason::NotMulticastMember => f.write_str("no queue pair here is a member of the group"),
            DropReason::PortDown => f.write_str("the port is down"),
            DropReason::InRnrWait => f.write_str("the requester waits because the receiver is not ready"),
        }
    }
}

/// Why a responder refuses a request. One place maps it to NAK, state, counter and async event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the sentences of `Display` say what each means")]
pub enum RequestError {
    PsnOutOfSequence { expected: Psn, got: Psn },
    ReceiverNotReady,
    OpcodeOutOfSequence { opcode: Opcode },
    UnsupportedOpcode { opcode: Opcode },
    PayloadLength { length: u32, mtu: u32 },
    MessageLength { got: u64, dma_length: u32 },
    TooManyRdAtomic { limit: u8 },
    MisalignedAtomic { address: u64 },
    Access(AccessError),
    ReceiveTooSmall { message: u64, capacity: u64 },
    ReceiveAccess(AccessError),
    ReadAccess(AccessError),
    InvalidateFailed(AccessError),
    NoSuchSrq { srqn: u32 },
    CorruptRing(CorruptRing),
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequestError::PsnOutOfSequence { expected: missing, got } => {
                write!(f, "PSN {missing} is missing, {got} came")
            }
            RequestError::ReceiverNotReady => f.write_str("no receive is posted"),
            RequestError::OpcodeOutOfSequence { opcode } => {
                write!(f, "{opcode} does not fit the open message")
            }
            RequestError::UnsupportedOpcode { opcode } => write!(f, "{opcode} is not supported"),
            RequestError::PayloadLength { length, mtu } => {
                write!(f, "a payload of {length} bytes does not fit its place at path MTU {mtu}")
            }
            RequestError::MessageLength { got, dma_length: stated } => {
                write!(f, "the message has {got} bytes, its RETH says {stated}")
            }
            RequestError::TooManyRdAtomic { limit } => {
                write!(f, "more than {limit} reads and atomics at once")
            }
            RequestError::MisalignedAtomic { address } => {
                write!(f, "an atomic at {address:#x}, not a multiple of 8")
            }
            RequestError::Access(denied) => denied.fmt(f),
            RequestError::ReceiveTooSmall { message, capacity: room } => {
                write!(f, "{message} bytes for a receive of {room}")
            }
            RequestError::ReceiveAccess(denied) => write!(f, "the posted receive: {denied}"),
            RequestError::ReadAccess(denied) => write!(f, "while reading: {denied}"),
            RequestError::InvalidateFailed(denied) => write!(f, "to invalidate: {denied}"),
            RequestError::NoSuchSrq { srqn: number } => {
                write!(f, "there is no shared receive queue {number:#x}")
            }
            RequestError::CorruptRing(why) => why.fmt(f),
        }
    }
}

/// Why a completion is not a success, or a queue pair went to the error state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the sentences of `Display` say what each means")]
pub enum Reason {
    None,
    Requested,
    Flushed,
    LocalAccess(AccessError),
    MessageTooLong { length: u64, limit: u64 },
    Unsupported,
    RdAtomicDisabled,
    BadAddressHandle { handle: u32 },
    MemoryWindowBind(AccessError),
    CorruptRing(CorruptRing),
    InvalidWqe,
    Nak { code: NakCode, psn: Psn },
    SequenceNak { psn: Psn },
    RnrRetryExceeded { psn: Psn },
    AckTimeout { psn: Psn },
    ResponseGap { expected: Psn, got: Psn },
    BadResponse { psn: Psn },
    PeerUnreachable,
    RequestRejected(RequestError),
    CompletionQueueOverflow,
    ClientExited,
}

impl Reason {
    /// The code that completions carry as their vendor error.
    pub const fn code(self) -> u32 {
        match self {
            Reason::None => 0,
            Reason::Requested => 1,
            Reason::Flushed => 2,
            Reason::LocalAccess(_) => 10,
            Reason::MessageTooLong { .. } => 11,
            Reason::Unsupported => 12,
            Reason::RdAtomicDisabled => 13,
            Reason::BadAddressHandle { .. } => 14,
            Reason::MemoryWindowBind(_) => 15,
            Reason::CorruptRing(_) => 16,
            Reason::InvalidWqe => 17,
            Reason::SequenceNak { .. } => 20,
            Reason::Nak { code: NakCode::InvalidRequest, .. } => 21,
            Reason::Nak { code: NakCode::RemoteAccessError, .. } => 22,
            Reason::Nak { .. } => 23,
            Reason::RnrRetryExceeded { .. } => 24,
            Reason::AckTimeout { .. } => 25,
            Reason::ResponseGap { .. } => 26,
            Reason::BadResponse { .. } => 27,
            Reason::PeerUnreachable => 28,
            Reason::RequestRejected(_) => 30,
            Reason::CompletionQueueOverflow => 40,
            Reason::ClientExited => 41,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::None => f.write_str("nothing is wrong"),
            Reason::Requested => f.write_str("the application asked for it"),
            Reason::Flushed => f.write_str("the queue pair is in the error state"),
            Reason::LocalAccess(denied) => write!(f, "local memory: {denied}"),
            Reason::MessageTooLong { length, limit } => {
                write!(f, "{length} bytes, at most {limit} can be sent")
            }
            Reason::Unsupported => f.write_str("the queue pair's service has no such operation"),
            Reason::RdAtomicDisabled => f.write_str("max_rd_atomic is 0: no read or atomic can be sent"),
            Reason::BadAddressHandle { handle } => write!(f, "there is no address handle {handle:#x}"),
            Reason::MemoryWindowBind(denied) => write!(f, "window: {denied}"),
            Reason::CorruptRing(why) => why.fmt(f),
            Reason::InvalidWqe => f.write_str("the work request in the ring makes no sense"),
            Reason::Nak { code, psn } => write!(f, "the peer refused PSN {psn}: {}", code.name()),
            Reason::SequenceNak { psn } => write!(f, "the peer missed PSN {psn}"),
            Reason::RnrRetryExceeded { psn } => {
                write!(f, "the peer had no receive posted for PSN {psn}, in every try")
            }
            Reason::AckTimeout { psn } => write!(f, "no answer to PSN {psn} in time"),
            Reason::ResponseGap { expected, got } => {
                write!(f, "response {expected} is missing, {got} came")
            }
            Reason::BadResponse { psn } => write!(f, "the response {psn} does not fit its request"),
            Reason::PeerUnreachable => f.write_str("the peer's port is gone"),
            Reason::RequestRejected(refusal) => refusal.fmt(f),
            Reason::CompletionQueueOverflow => f.write_str("its completion queue overflowed"),
            Reason::ClientExited => f.write_str("its process is gone"),
        }
    }
}

/// Why a requester sends again what it had sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum RetransmitCause {
    SequenceNak,
    ResponseGap,
    Timeout,
    ReceiverNotReady,
}

/// What a queue pair was told when it got ready: enough to say later why something failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpConfiguration {
    /// What it is.
    pub kind: QpType,
    /// What a lost packet does.
    pub recovery: Recovery,
    /// The other end of a connection.
    pub peer: Option<(IpAddr, Qpn)>,
    /// Payload bytes per packet.
    pub pmtu: Mtu,
    /// The first PSN that it sends, and the first that it expects.
    pub psns: [Psn; 2],
    /// The exponent of 4.096 µs that an acknowledgement may take.
    pub timeout: u8,
    /// How long a silent peer is waited for until something is done about it; none for ever.
    pub ack_timeout: Option<Duration>,
    /// How often to try again.
    pub retry_count: u8,
    /// How often to try again when the receiver is not ready; seven means for ever.
    pub rnr_retry: u8,
    /// What the peer may do.
    pub access_flags: AccessFlags,
    /// Reads and atomics outstanding: towards the peer, and from it.
    pub max_rd_atomic: [u8; 2],
    /// Work requests that the send and the receive queue hold; zero for a queue that it does not have.
    pub max_wr: [u32; 2],
    /// The completion queues of sends and receives, and how many completions they hold.
    pub cqs: [Option<(CqId, u32)>; 2],
}

/// Something that happened in the card.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs, reason = "the fields are named after their types")]
pub enum Event {
    /// A queue pair got ready to receive or to send.
    QpConfigured { qp: Qpn, configuration: QpConfiguration },
    /// A send work request was taken from its ring and got its PSNs. `buffer` is its first piece of local
    /// memory, unless the data stood in the request.
    WqeFetched {
        qp: Qpn,
        wr_id: u64,
        operation: CompletionOpcode,
        bytes: u32,
        first_psn: Psn,
        packets: u32,
        first_sge: Option<Sge>,
    },
    /// A packet left. `work` is the request that it belongs to; `again` if that PSN had left before.
    PacketSent { qp: Qpn, packet: PacketSummary, wr_id: Option<u64>, retransmission: bool },
    /// A packet came and is for this queue pair.
    PacketReceived { qp: Qpn, packet: PacketSummary },
    /// A packet was not acted on.
    PacketDropped { qp: Qpn, packet: Option<PacketSummary>, reason: DropReason },
    /// A duplicate was answered and not executed again.
    DuplicateRequestHandled { qp: Qpn, psn: Psn, opcode: Opcode },
    /// A responder refused a request.
    RequestRejected { qp: Qpn, psn: Psn, error: RequestError },
    /// A requester will send again from `to`.
    Retransmitted { qp: Qpn, from_psn: Psn, cause: RetransmitCause, retries_left: u8 },
    /// A requester waits before it tries again.
    RnrWaitStarted { qp: Qpn, psn: Psn, until: Instant, retries_left: u8 },
    /// An ack timer ran out.
    AckTimedOut { qp: Qpn, oldest_psn: Psn },
    /// A packet came with a congestion mark; `notified` if a notification follows.
    EcnMarkReceived { qp: Qpn, psn: Psn, cnp_queued: bool },
    /// Congestion control changed the rate of a queue pair.
    RateChanged { qp: Qpn, bits_per_second: u64, target: u64, alpha_millionths: u32, cause: RateCause },
    /// A peer wrote local memory, or a receive, read response or atomic did.
    MemoryWritten { qp: Qpn, key: u32, address: u64, length: u32, psn: Psn },
    /// A queue pair changed its state.
    QpStateChanged { qp: Qpn, from: QpState, to: QpState, reason: Reason },
    /// A work request completed.
    Completed { cq: CqId, completion: Completion, reason: Reason },
    /// An unsignalled work request was done without a completion.
    UnsignaledCompleted { qp: Qpn, wr_id: u64 },
    /// A completion queue's owner is to be woken.
    CompletionNotified { cq: CqId },
    /// An asynchronous event of the verbs.
    AsyncEventRaised { client: Option<ClientId>, event: AsyncEvent },
    /// A client's ring is broken; its queue pair was stopped.
    ClientFaulted { client: ClientId, qp: Qpn, why: CorruptRing },
    /// A message of the connection manager left; `again` if it had left before.
    CmSent { id: Option<CmId>, message: CmMessageKind, peer: IpAddr, retransmission: bool },
    /// A message of the connection manager came.
    CmReceived { message: CmMessageKind, peer: IpAddr },
    /// A message of the connection manager was not acted on.
    CmDropped { id: Option<CmId>, message: CmMessageKind, peer: IpAddr, reason: CmDropReason },
    /// A connection identifier changed its state.
    CmStateChanged { id: CmId, from: CmState, to: CmState },
    /// No answer to a message will come any more.
    CmFailed { id: CmId, failure: CmFailure },
    /// An event of connection management waits in a channel.
    CmEventRaised { client: ClientId, channel: CmChannelId, id: CmId, kind: EventType, status: i32 },
}

/// What a status means at a glance; used by traces.
pub(crate) const fn is_failure(status: CompletionStatus) -> bool {
    !matches!(status, CompletionStatus::Success | CompletionStatus::WrFlushError)
}
