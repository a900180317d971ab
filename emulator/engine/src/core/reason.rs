//! Why packets are dropped, requests are rejected, and work requests fail.

use crate::{AccessError, QpState, QpType};
use core::fmt;
use softhca_types::{CompletionStatus, CorruptRing};
use softhca_wire::{Malformed, NakCode, Opcode, Psn};

/// Why a packet was dropped.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the sentences of `Display` say what each means")]
pub enum DropReason {
    Malformed(Malformed),
    BadIcrc,
    NoQueuePair,
    WrongService { expected: QpType },
    PkeyMismatch,
    QkeyMismatch,
    AddressMismatch,
    InvalidQpState(QpState),
    NakOutstanding { expected: Psn },
    BeyondWindow { expected: Psn },
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
    DatagramTooLong { length: u64, capacity: u64 },
    TooManyPendingResponses,
    NotMulticastMember,
    InRnrWait,
    AfterRnrRetry,
    QpDestroyed,
    PortDown,
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DropReason::Malformed(why) => write!(f, "malformed: {why}"),
            DropReason::BadIcrc => f.write_str("the ICRC is wrong"),
            DropReason::NoQueuePair => f.write_str("no queue pair has this QPN"),
            DropReason::WrongService { expected: QpType::XrcInitiator } => {
                f.write_str("the queue pair is an XRC initiator")
            }
            DropReason::WrongService { expected } => {
                write!(f, "the queue pair has service {}", expected.service().name())
            }
            DropReason::PkeyMismatch => f.write_str("the P_Key is not in the table"),
            DropReason::QkeyMismatch => f.write_str("the Q_Key is wrong"),
            DropReason::AddressMismatch => {
                f.write_str("the source address is not that of the connected peer")
            }
            DropReason::InvalidQpState(state) => write!(f, "the queue pair is in {state}"),
            DropReason::NakOutstanding { expected } => {
                write!(f, "a NAK is outstanding: the responder accepts only PSN {expected}")
            }
            DropReason::BeyondWindow { expected } => {
                write!(f, "the PSN is too far ahead of {expected}, the expected one, to follow a loss")
            }
            DropReason::StaleResponse { oldest } => {
                write!(f, "a stale response: PSN {oldest} is the oldest outstanding")
            }
            DropReason::AlreadyRetransmitting { expected } => {
                write!(f, "response PSN {expected} is missing and already requested again")
            }
            DropReason::NoOutstandingRequest => f.write_str("no outstanding request matches this response"),
            DropReason::AtomicResultNotSaved => {
                f.write_str("a duplicate atomic whose result is no longer saved")
            }
            DropReason::Duplicate => f.write_str("a duplicate request"),
            DropReason::UcSequenceGap { expected } => {
                write!(f, "packet PSN {expected} of the message is missing")
            }
            DropReason::UcAccess(error) => write!(f, "{error}"),
            DropReason::UcRequest(error) => write!(f, "{error}"),
            DropReason::NoReceivePosted => f.write_str("no receive is posted"),
            DropReason::PayloadExceedsPmtu { length, mtu } => {
                write!(f, "a payload of {length} bytes exceeds the path MTU {mtu}")
            }
            DropReason::DatagramTooLong { length, capacity } => {
                write!(f, "GRH and payload have {length} bytes, the posted receive {capacity}")
            }
            DropReason::TooManyPendingResponses => f.write_str("too many responses are pending"),
            DropReason::NotMulticastMember => {
                f.write_str("no queue pair of this host is a member of the multicast group")
            }
            DropReason::PortDown => f.write_str("the port is down"),
            DropReason::InRnrWait => f.write_str("the requester is in an RNR wait"),
            DropReason::AfterRnrRetry => {
                f.write_str("the first sequence NAK after an RNR retry answers packets sent before it")
            }
            DropReason::QpDestroyed => {
                f.write_str("the queue pair was destroyed with more posted sends than the port keeps")
            }
        }
    }
}

/// Why a responder rejects a request. One place maps it to NAK code, state, counter and async event.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
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
    WriteWithImmAccess(AccessError),
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
            RequestError::PsnOutOfSequence { expected, got } => {
                write!(f, "expected PSN {expected}, received PSN {got}")
            }
            RequestError::ReceiverNotReady => f.write_str("no receive is posted"),
            RequestError::OpcodeOutOfSequence { opcode } => {
                write!(f, "{opcode} does not continue the message in progress")
            }
            RequestError::UnsupportedOpcode { opcode } => write!(f, "{opcode} is not supported"),
            RequestError::PayloadLength { length, mtu } => {
                write!(f, "a payload of {length} bytes is wrong for this opcode at path MTU {mtu}")
            }
            RequestError::MessageLength { got, dma_length: stated } => {
                write!(f, "the message has {got} bytes, its RETH has DMA length {stated}")
            }
            RequestError::TooManyRdAtomic { limit } => {
                write!(f, "more than {limit} READ and atomic requests are outstanding")
            }
            RequestError::MisalignedAtomic { address } => {
                write!(f, "the atomic address {address:#x} is not a multiple of 8")
            }
            RequestError::Access(error) | RequestError::WriteWithImmAccess(error) => error.fmt(f),
            RequestError::ReceiveTooSmall { message, capacity: room } => {
                write!(f, "a message of {message} bytes exceeds the receive buffer of {room} bytes")
            }
            RequestError::ReceiveAccess(error) => write!(f, "posted receive: {error}"),
            RequestError::ReadAccess(error) => write!(f, "READ source: {error}"),
            RequestError::InvalidateFailed(error) => write!(f, "invalidate: {error}"),
            RequestError::NoSuchSrq { srqn: number } => {
                write!(f, "no shared receive queue has number {number:#x}")
            }
            RequestError::CorruptRing(why) => why.fmt(f),
        }
    }
}

/// Why a work request failed, or a queue pair entered the error state.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
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
    Injected { rule: u32 },
    DeviceFailed,
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
            Reason::Injected { .. } => 60,
            Reason::DeviceFailed => 61,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::None => f.write_str("no error"),
            Reason::Requested => f.write_str("requested by the application"),
            Reason::Flushed => f.write_str("the queue pair is in the error state"),
            Reason::LocalAccess(error) => write!(f, "local memory: {error}"),
            Reason::MessageTooLong { length, limit } => {
                write!(f, "the message has {length} bytes, the limit is {limit}")
            }
            Reason::Unsupported => {
                f.write_str("the service of the queue pair does not support this operation")
            }
            Reason::RdAtomicDisabled => {
                f.write_str("max_rd_atomic is 0: READ and atomic requests are disabled")
            }
            Reason::BadAddressHandle { handle } => write!(f, "no address handle has number {handle:#x}"),
            Reason::MemoryWindowBind(error) => write!(f, "memory window: {error}"),
            Reason::CorruptRing(why) => why.fmt(f),
            Reason::InvalidWqe => f.write_str("the WQE in the ring is invalid"),
            Reason::Nak { code, psn } => write!(f, "the peer rejected PSN {psn}: {}", code.name()),
            Reason::SequenceNak { psn } => write!(f, "the peer did not receive PSN {psn}"),
            Reason::RnrRetryExceeded { psn } => {
                write!(f, "the peer had no receive posted for PSN {psn} in any retry")
            }
            Reason::AckTimeout { psn } => write!(f, "no ACK for PSN {psn} within the ACK timeout"),
            Reason::ResponseGap { expected, got } => {
                write!(f, "expected response PSN {expected}, received PSN {got}")
            }
            Reason::BadResponse { psn } => write!(f, "response PSN {psn} does not match its request"),
            Reason::PeerUnreachable => f.write_str("the peer port is unreachable"),
            Reason::RequestRejected(error) => error.fmt(f),
            Reason::CompletionQueueOverflow => f.write_str("the completion queue overflowed"),
            Reason::ClientExited => f.write_str("the client process exited"),
            Reason::Injected { rule } => write!(f, "injected by fault rule {rule}"),
            Reason::DeviceFailed => f.write_str("the device failed (DEVICE_FATAL)"),
        }
    }
}

/// Why a requester retransmits.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum RetransmitCause {
    SequenceNak,
    ResponseGap,
    Timeout,
    ReceiverNotReady,
    TailProbe,
    Adaptive,
}

/// Why a link control message is rejected. A rejected message changes nothing.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkReject {
    /// Another version of link control.
    Version(u8),
    /// Not a link control message.
    Malformed,
    /// It is for another port of this address, or comes from a port that is not a link control port.
    NoSuchPort,
    /// The token is not the one that this port gave the sender: forged, or from before a restart.
    BadToken,
    /// One of the two ports has restarted since.
    Stale,
    /// A value that no port can mean.
    OutOfBounds,
    /// The port has the most peers that it can have.
    TooManyPeers,
}

impl fmt::Display for LinkReject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LinkReject::Version(version) => {
                return write!(
                    f,
                    "version {version} of link control, this port has version 2: use the same release of SoftHCA on \
                     both hosts"
                );
            }
            LinkReject::Malformed => "not a link control message",
            LinkReject::NoSuchPort => "not from a link control port, or for another port of this address",
            LinkReject::BadToken => "wrong token: forged, or from before a restart",
            LinkReject::Stale => "from before a restart of one of the two ports",
            LinkReject::OutOfBounds => "impossible value",
            LinkReject::TooManyPeers => "the port has too many peers",
        })
    }
}

/// Whether a status is a failure other than a flush.
pub(crate) const fn is_failure(status: CompletionStatus) -> bool {
    !matches!(status, CompletionStatus::Success | CompletionStatus::WrFlushError)
}
