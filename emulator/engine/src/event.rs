//! Facts that the card tells: one `Copy` enum, in the past tense.
//!
//! Every drop, refusal, state change and failed completion is an event with its reason, so that "why did
//! this fail" can be answered from events alone.

use crate::{
    AsyncEvent, ClientId, CmChannelId, CmFailure, CmId, CmIgnored, CmKind, CqId, Denied, Instant, QpKind,
    RateCause, Recovery, State,
};
use core::fmt;
use core::net::IpAddr;
use core::time::Duration;
use softhca_queue::cm::{CmState, EventKind};
use softhca_queue::{Access, Completion, CompletionOperation, Impossible, Sge, Status};
use softhca_wire::{Header, Malformed, Mtu, NakCode, Opcode, Psn, Qpn, Syndrome};

/// Hears every event.
pub trait Subscriber {
    /// `event` happened at `now`.
    fn event(&mut self, now: Instant, event: &Event);
}

/// Hears nothing.
impl Subscriber for () {
    fn event(&mut self, _: Instant, _: &Event) {}
}

impl<F: FnMut(Instant, &Event)> Subscriber for F {
    fn event(&mut self, now: Instant, event: &Event) {
        self(now, event);
    }
}

/// What a trace line needs to know of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// What it is.
    pub opcode: Opcode,
    /// Its PSN.
    pub psn: Psn,
    /// The queue pair that it is for.
    pub destination: Qpn,
    /// Bytes of payload.
    pub payload: u32,
    /// What it acknowledges or refuses.
    pub syndrome: Option<Syndrome>,
    /// The other host.
    pub peer: IpAddr,
}

impl Packet {
    pub(crate) fn of(header: &Header, payload: usize, peer: IpAddr) -> Packet {
        Packet {
            opcode: header.bth.opcode,
            psn: header.bth.psn,
            destination: header.bth.destination,
            payload: payload as u32,
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
    WrongPartition,
    WrongQueueKey,
    WrongAddress,
    StateDoesNotReceive(State),
    RefusalOutstanding { expected: Psn },
    StaleResponse { oldest: Psn },
    AskedAgain { expected: Psn },
    NothingOutstanding,
    DuplicateWithoutRecord,
    DuplicateOfNoInterest,
    UnreliableGap { expected: Psn },
    UnreliableAccess(Denied),
    UnreliableRequest(Refusal),
    NoReceivePosted,
    TooLongForPath { length: u32, mtu: u32 },
    TooManyRepliesOwed,
    NotAMember,
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
            DropReason::WrongPartition => f.write_str("the P_Key is not in the table"),
            DropReason::WrongQueueKey => f.write_str("the Q_Key is wrong"),
            DropReason::WrongAddress => f.write_str("it comes from another host than the connection's"),
            DropReason::StateDoesNotReceive(state) => write!(f, "the queue pair is in {state}"),
            DropReason::RefusalOutstanding { expected } => {
                write!(f, "a NAK is outstanding: only PSN {expected} is taken")
            }
            DropReason::StaleResponse { oldest } => write!(f, "an old response: {oldest} is awaited"),
            DropReason::AskedAgain { expected } => {
                write!(f, "response {expected} is missing and was asked for again already")
            }
            DropReason::NothingOutstanding => f.write_str("a response to nothing that was sent"),
            DropReason::DuplicateWithoutRecord => {
                f.write_str("a duplicate atomic whose result is no longer kept")
            }
            DropReason::DuplicateOfNoInterest => f.write_str("a duplicate"),
            DropReason::UnreliableGap { expected } => {
                write!(f, "the message lacks its packet {expected}")
            }
            DropReason::UnreliableAccess(denied) => write!(f, "{denied}"),
            DropReason::UnreliableRequest(refusal) => write!(f, "{refusal}"),
            DropReason::NoReceivePosted => f.write_str("no receive is posted"),
            DropReason::TooLongForPath { length, mtu } => {
                write!(f, "{length} bytes are more than the path MTU {mtu}")
            }
            DropReason::TooManyRepliesOwed => f.write_str("too many replies are owed already"),
            DropReason::NotAMember => f.write_str("no queue pair here is a member of the group"),
            DropReason::PortDown => f.write_str("the port is down"),
            DropReason::InRnrWait => f.write_str("the requester waits because the receiver is not ready"),
        }
    }
}

/// Why a responder refuses a request. One place maps it to NAK, state, counter and async event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the sentences of `Display` say what each means")]
pub enum Refusal {
    Gap { missing: Psn, got: Psn },
    NotReady,
    OpcodeOutOfPlace { opcode: Opcode },
    Unsupported { opcode: Opcode },
    PayloadLength { length: u32, mtu: u32 },
    MessageLength { got: u64, stated: u32 },
    TooManyReads { limit: u8 },
    Misaligned { address: u64 },
    Access(Denied),
    ReceiveTooSmall { message: u64, room: u64 },
    ReceiveDenied(Denied),
    ReadFailed(Denied),
    InvalidateFailed(Denied),
    NoSharedReceiveQueue { number: u32 },
    BrokenRing(Impossible),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Gap { missing, got } => write!(f, "PSN {missing} is missing, {got} came"),
            Refusal::NotReady => f.write_str("no receive is posted"),
            Refusal::OpcodeOutOfPlace { opcode } => write!(f, "{opcode} does not fit the open message"),
            Refusal::Unsupported { opcode } => write!(f, "{opcode} is not supported"),
            Refusal::PayloadLength { length, mtu } => {
                write!(f, "a payload of {length} bytes does not fit its place at path MTU {mtu}")
            }
            Refusal::MessageLength { got, stated } => {
                write!(f, "the message has {got} bytes, its RETH says {stated}")
            }
            Refusal::TooManyReads { limit } => write!(f, "more than {limit} reads and atomics at once"),
            Refusal::Misaligned { address } => write!(f, "an atomic at {address:#x}, not a multiple of 8"),
            Refusal::Access(denied) => denied.fmt(f),
            Refusal::ReceiveTooSmall { message, room } => {
                write!(f, "{message} bytes for a receive of {room}")
            }
            Refusal::ReceiveDenied(denied) => write!(f, "the posted receive: {denied}"),
            Refusal::ReadFailed(denied) => write!(f, "while reading: {denied}"),
            Refusal::InvalidateFailed(denied) => write!(f, "to invalidate: {denied}"),
            Refusal::NoSharedReceiveQueue { number } => {
                write!(f, "there is no shared receive queue {number:#x}")
            }
            Refusal::BrokenRing(why) => why.fmt(f),
        }
    }
}

/// Why a completion is not a success, or a queue pair went to the error state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the sentences of `Display` say what each means")]
pub enum Reason {
    None,
    Asked,
    FlushedAfterError,
    LocalMemory(Denied),
    MessageTooLong { length: u64, limit: u64 },
    Unsupported,
    NoReadsAllowed,
    BadAddressHandle { handle: u32 },
    WindowBind(Denied),
    BrokenRing(Impossible),
    BrokenRequest,
    Nak { code: NakCode, psn: Psn },
    SequenceNak { psn: Psn },
    RnrExhausted { psn: Psn },
    TimedOut { psn: Psn },
    ResponseGap { expected: Psn, got: Psn },
    BadResponse { psn: Psn },
    LinkDead,
    Refused(Refusal),
    CompletionQueueOverflow,
    ClientGone,
}

impl Reason {
    /// The code that completions carry as their vendor error.
    pub const fn code(self) -> u32 {
        match self {
            Reason::None => 0,
            Reason::Asked => 1,
            Reason::FlushedAfterError => 2,
            Reason::LocalMemory(_) => 10,
            Reason::MessageTooLong { .. } => 11,
            Reason::Unsupported => 12,
            Reason::NoReadsAllowed => 13,
            Reason::BadAddressHandle { .. } => 14,
            Reason::WindowBind(_) => 15,
            Reason::BrokenRing(_) => 16,
            Reason::BrokenRequest => 17,
            Reason::SequenceNak { .. } => 20,
            Reason::Nak { code: NakCode::InvalidRequest, .. } => 21,
            Reason::Nak { code: NakCode::RemoteAccess, .. } => 22,
            Reason::Nak { .. } => 23,
            Reason::RnrExhausted { .. } => 24,
            Reason::TimedOut { .. } => 25,
            Reason::ResponseGap { .. } => 26,
            Reason::BadResponse { .. } => 27,
            Reason::LinkDead => 28,
            Reason::Refused(_) => 30,
            Reason::CompletionQueueOverflow => 40,
            Reason::ClientGone => 41,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::None => f.write_str("nothing is wrong"),
            Reason::Asked => f.write_str("the application asked for it"),
            Reason::FlushedAfterError => f.write_str("the queue pair is in the error state"),
            Reason::LocalMemory(denied) => write!(f, "local memory: {denied}"),
            Reason::MessageTooLong { length, limit } => {
                write!(f, "{length} bytes, at most {limit} can be sent")
            }
            Reason::Unsupported => f.write_str("the queue pair's service has no such operation"),
            Reason::NoReadsAllowed => f.write_str("max_rd_atomic is 0: no read or atomic can be sent"),
            Reason::BadAddressHandle { handle } => write!(f, "there is no address handle {handle:#x}"),
            Reason::WindowBind(denied) => write!(f, "window: {denied}"),
            Reason::BrokenRing(why) => why.fmt(f),
            Reason::BrokenRequest => f.write_str("the work request in the ring makes no sense"),
            Reason::Nak { code, psn } => write!(f, "the peer refused PSN {psn}: {}", code.name()),
            Reason::SequenceNak { psn } => write!(f, "the peer missed PSN {psn}"),
            Reason::RnrExhausted { psn } => {
                write!(f, "the peer had no receive posted for PSN {psn}, in every try")
            }
            Reason::TimedOut { psn } => write!(f, "no answer to PSN {psn} in time"),
            Reason::ResponseGap { expected, got } => {
                write!(f, "response {expected} is missing, {got} came")
            }
            Reason::BadResponse { psn } => write!(f, "the response {psn} does not fit its request"),
            Reason::LinkDead => f.write_str("the peer's port is gone"),
            Reason::Refused(refusal) => refusal.fmt(f),
            Reason::CompletionQueueOverflow => f.write_str("its completion queue overflowed"),
            Reason::ClientGone => f.write_str("its process is gone"),
        }
    }
}

/// Why a requester sends again what it had sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum BackCause {
    SequenceNak,
    ResponseGap,
    Timeout,
    ReceiverNotReady,
}

/// What a queue pair was told when it got ready: enough to say later why something failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile {
    /// What it is.
    pub kind: QpKind,
    /// What a lost packet does.
    pub recovery: Recovery,
    /// The other end of a connection.
    pub peer: Option<(IpAddr, Qpn)>,
    /// Payload bytes per packet.
    pub mtu: Mtu,
    /// The first PSN that it sends, and the first that it expects.
    pub psns: [Psn; 2],
    /// The exponent of 4.096 µs that an acknowledgement may take.
    pub timeout: u8,
    /// How long a silent peer is waited for until something is done about it; none for ever.
    pub patience: Option<Duration>,
    /// How often to try again.
    pub retry_count: u8,
    /// How often to try again when the receiver is not ready; seven means for ever.
    pub rnr_retry: u8,
    /// What the peer may do.
    pub access: Access,
    /// Reads and atomics outstanding: towards the peer, and from it.
    pub reads: [u8; 2],
    /// Work requests that the send and the receive queue hold; zero for a queue that it does not have.
    pub slots: [u32; 2],
    /// The completion queues of sends and receives, and how many completions they hold.
    pub completion_queues: [Option<(CqId, u32)>; 2],
}

/// Something that happened in the card.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs, reason = "the fields are named after their types")]
pub enum Event {
    /// A queue pair got ready to receive or to send.
    Configured { qp: Qpn, profile: Profile },
    /// A send work request was taken from its ring and got its PSNs. `buffer` is its first piece of local
    /// memory, unless the data stood in the request.
    WorkStarted {
        qp: Qpn,
        id: u64,
        operation: CompletionOperation,
        bytes: u32,
        first: Psn,
        packets: u32,
        buffer: Option<Sge>,
    },
    /// A packet left. `work` is the request that it belongs to; `again` if that PSN had left before.
    PacketSent { qp: Qpn, packet: Packet, work: Option<u64>, again: bool },
    /// A packet came and is for this queue pair.
    PacketReceived { qp: Qpn, packet: Packet },
    /// A packet was not acted on.
    PacketDropped { qp: Qpn, packet: Option<Packet>, reason: DropReason },
    /// A duplicate was answered and not executed again.
    DuplicateAnswered { qp: Qpn, psn: Psn, opcode: Opcode },
    /// A responder refused a request.
    Refused { qp: Qpn, psn: Psn, refusal: Refusal },
    /// A requester will send again from `to`.
    WentBack { qp: Qpn, to: Psn, cause: BackCause, retries_left: u8 },
    /// A requester waits before it tries again.
    RnrWaitStarted { qp: Qpn, psn: Psn, until: Instant, retries_left: u8 },
    /// An ack timer ran out.
    AckTimedOut { qp: Qpn, oldest: Psn },
    /// A packet came with a congestion mark; `notified` if a notification follows.
    CongestionSeen { qp: Qpn, psn: Psn, notified: bool },
    /// Congestion control changed the rate of a queue pair.
    RateChanged { qp: Qpn, bits_per_second: u64, target: u64, alpha_millionths: u32, cause: RateCause },
    /// A peer wrote local memory, or a receive, read response or atomic did.
    MemoryWritten { qp: Qpn, key: u32, address: u64, length: u32, psn: Psn },
    /// A queue pair changed its state.
    StateChanged { qp: Qpn, from: State, to: State, reason: Reason },
    /// A work request completed.
    Completed { cq: CqId, completion: Completion, reason: Reason },
    /// An unsignalled work request was done without a completion.
    Retired { qp: Qpn, id: u64 },
    /// A completion queue's owner is to be woken.
    Notified { cq: CqId },
    /// An asynchronous event of the verbs.
    Raised { client: Option<ClientId>, event: AsyncEvent },
    /// A client's ring is broken; its queue pair was stopped.
    ClientFaulted { client: ClientId, qp: Qpn, why: Impossible },
    /// A message of the connection manager left; `again` if it had left before.
    CmSent { id: Option<CmId>, message: CmKind, peer: IpAddr, again: bool },
    /// A message of the connection manager came.
    CmReceived { message: CmKind, peer: IpAddr },
    /// A message of the connection manager was not acted on.
    CmIgnored { id: Option<CmId>, message: CmKind, peer: IpAddr, reason: CmIgnored },
    /// A connection identifier changed its state.
    CmStateChanged { id: CmId, from: CmState, to: CmState },
    /// No answer to a message will come any more.
    CmGaveUp { id: CmId, failure: CmFailure },
    /// An event of connection management waits in a channel.
    CmRaised { client: ClientId, channel: CmChannelId, id: CmId, kind: EventKind, status: i32 },
}

/// What a status means at a glance; used by traces.
pub(crate) const fn is_failure(status: Status) -> bool {
    !matches!(status, Status::Success | Status::Flushed)
}
