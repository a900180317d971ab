//! Work completions.

use bitflags::bitflags;
use core::fmt;
use softhca_wire::Qpn;

/// Declares an enum whose values have a number in verbs and a name in logs and scenarios.
macro_rules! named_enum {
    ($(#[$meta:meta])* pub enum $type:ident { $($variant:ident = $number:literal => $name:literal,)* }) => {
        softhca_wire::named_enum! {
            $(#[$meta])*
            #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
            #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
            #[repr(u8)]
            pub enum $type {
                $(#[cfg_attr(feature = "serde", serde(rename = $name))] $variant = $number => $name,)*
            }
        }
    };
}

named_enum! {
    /// How a work request ended. The numbers are those of `enum ibv_wc_status`.
    #[allow(missing_docs, reason = "the names are those of every verbs text")]
    pub enum CompletionStatus {
        Success = 0 => "SUCCESS",
        LocalLengthError = 1 => "LOC_LEN_ERR",
        LocalQpOperationError = 2 => "LOC_QP_OP_ERR",
        LocalProtectionError = 4 => "LOC_PROT_ERR",
        WrFlushError = 5 => "WR_FLUSH_ERR",
        MwBindError = 6 => "MW_BIND_ERR",
        BadResponseError = 7 => "BAD_RESP_ERR",
        LocalAccessError = 8 => "LOC_ACCESS_ERR",
        RemoteInvalidRequestError = 9 => "REM_INV_REQ_ERR",
        RemoteAccessError = 10 => "REM_ACCESS_ERR",
        RemoteOperationError = 11 => "REM_OP_ERR",
        RetryExceededError = 12 => "RETRY_EXC_ERR",
        RnrRetryExceededError = 13 => "RNR_RETRY_EXC_ERR",
        RemoteAbortedError = 16 => "REM_ABORT_ERR",
        FatalError = 19 => "FATAL_ERR",
        GeneralError = 21 => "GENERAL_ERR",
    }
}

impl CompletionStatus {
    /// Whether the work request was done.
    pub const fn is_success(self) -> bool {
        matches!(self, CompletionStatus::Success)
    }

    /// The cause of a failure and its remedy. A log of events has the exact cause: `softhca why`.
    pub const fn advice(self) -> &'static str {
        match self {
            CompletionStatus::Success => "the work request is done",
            CompletionStatus::LocalLengthError => {
                "the message is longer than the SGEs of the receive, or than the device allows: post larger receives"
            }
            CompletionStatus::LocalQpOperationError => {
                "the queue pair cannot execute this operation: check its type, max_rd_atomic and the address handle"
            }
            CompletionStatus::LocalProtectionError => {
                "an SGE is outside of its memory region, or its lkey is wrong, deregistered or without LOCAL_WRITE: \
                 keep the region until the completion"
            }
            CompletionStatus::WrFlushError => {
                "the queue pair is in ERR: the first completion with another status, or the asynchronous event, has the \
                 cause"
            }
            CompletionStatus::MwBindError => {
                "the memory window could not be bound: check its rkey, and the region's bounds and MW_BIND"
            }
            CompletionStatus::BadResponseError => "the response of the peer does not match the request",
            CompletionStatus::LocalAccessError => "the memory of the receive does not allow the access",
            CompletionStatus::RemoteInvalidRequestError => {
                "the peer rejected the request as invalid: its receive is too small, or the queue pair there does not \
                 support the operation"
            }
            CompletionStatus::RemoteAccessError => {
                "the peer rejected the rkey, the address range or the access: use the rkey of a region that is still \
                 registered, stay in its bounds, and give region and queue pair the REMOTE_ access flag"
            }
            CompletionStatus::RemoteOperationError => {
                "the peer could not execute the request: a receive there names memory that is not accessible"
            }
            CompletionStatus::RetryExceededError => {
                "the peer did not acknowledge: it is gone, not yet in RTR, or a packet is lost and recovery is fatal"
            }
            CompletionStatus::RnrRetryExceededError => {
                "the peer had no receive posted in any retry: post receives before the peer sends, or raise rnr_retry"
            }
            CompletionStatus::RemoteAbortedError => "the peer aborted the operation",
            CompletionStatus::FatalError => "the device failed",
            CompletionStatus::GeneralError => "the device reported an unknown error",
        }
    }
}

named_enum! {
    /// The operation that completed.
    #[allow(missing_docs, reason = "the names are those of every verbs text")]
    pub enum CompletionOpcode {
        Send = 0 => "send",
        Write = 1 => "write",
        Read = 2 => "read",
        CompareSwap = 3 => "compare-swap",
        FetchAdd = 4 => "fetch-add",
        BindMemoryWindow = 5 => "bind-window",
        LocalInvalidate = 6 => "local-invalidate",
        Receive = 7 => "receive",
        ReceiveWriteWithImm = 8 => "receive-write-immediate",
    }
}

impl CompletionOpcode {
    /// Whether this is the receiving side of something.
    pub const fn is_receive(self) -> bool {
        matches!(self, CompletionOpcode::Receive | CompletionOpcode::ReceiveWriteWithImm)
    }
}

bitflags! {
    /// Flags of a work completion (`enum ibv_wc_flags`).
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct CompletionFlags: u8 {
        /// A GRH precedes the data.
        const GRH = 1;
        /// `imm_data` holds immediate data.
        const IMMEDIATE = 1 << 1;
        /// `imm_data` holds an rkey that was invalidated.
        const INVALIDATED = 1 << 2;
        /// The sender requested a solicited event.
        const SOLICITED = 1 << 3;
        /// The datagram arrived in an IPv4 packet: the IPv4 header is the second half of the GRH.
        const IPV4 = 1 << 4;
    }
}

/// The local route of a datagram that arrived over InfiniBand.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ReceivedRoute {
    /// The LID of the sender.
    pub slid: u16,
    /// Which of the LIDs of the own port the datagram was sent to.
    pub dlid_path_bits: u8,
}

/// A work completion (`struct ibv_wc`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The ID of the work request.
    pub wr_id: u64,
    /// The status.
    pub status: CompletionStatus,
    /// The opcode. Undefined unless the status is success.
    pub opcode: CompletionOpcode,
    /// The fields that are valid.
    pub flags: CompletionFlags,
    /// The bytes transferred.
    pub byte_len: u32,
    /// Immediate data, or the rkey that was invalidated.
    pub imm_data: u32,
    /// The local queue pair.
    pub qpn: Qpn,
    /// The source queue pair of a datagram.
    pub src_qp: Qpn,
    /// The service level of a datagram.
    pub service_level: u8,
    /// The route of a datagram that arrived over InfiniBand. Only a success has it.
    pub route: ReceivedRoute,
    /// The reason of a failure, as a code of this HCA.
    pub vendor_error: u32,
    /// The time of completion in nanoseconds of the HCA clock.
    pub timestamp: u64,
}

/// One line: what completed and, for a failure, its cause and remedy.
impl fmt::Display for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (id, qpn, status) = (self.wr_id, self.qpn, self.status);
        if status.is_success() {
            return write!(f, "{} {id} of queue pair {qpn}: success, {} bytes", self.opcode, self.byte_len);
        }
        write!(f, "work request {id} of queue pair {qpn}: {status}: {}", status.advice())
    }
}

/// The completions that notify the application (`ibv_req_notify_cq`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum CqNotify {
    /// Solicited completions and errors.
    SolicitedOnly = 1,
    /// Every completion.
    NextCompletion = 2,
}
