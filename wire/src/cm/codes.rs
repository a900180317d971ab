//! Small types that several messages share.

use crate::code::code;
use crate::display::debug_as_display;
use crate::layout::{BitSpan, Field, number_field};
use core::fmt;

/// A communication ID: identifies a connection at the side that chose it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CommunicationId(pub u32);

impl fmt::Display for CommunicationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

debug_as_display!(CommunicationId);

/// Private data of the application, padded with zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PrivateData<const N: usize>(pub [u8; N]);

impl<const N: usize> PrivateData<N> {
    /// These bytes padded with zeros, if they fit.
    pub fn new(bytes: &[u8]) -> Option<PrivateData<N>> {
        let mut data = [0; N];
        data.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(PrivateData(data))
    }
}

impl<const N: usize> Default for PrivateData<N> {
    fn default() -> Self {
        PrivateData([0; N])
    }
}

impl<const N: usize> fmt::Debug for PrivateData<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = self.0.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        write!(f, "PrivateData({:02x?})", &self.0[..used])
    }
}

impl<const N: usize> Field for PrivateData<N> {
    const WIDTH: usize = N * 8;
    fn read(bytes: &[u8], at: BitSpan) -> Self {
        PrivateData(Field::read(bytes, at))
    }
    fn write(&self, bytes: &mut [u8], at: BitSpan) {
        self.0.write(bytes, at);
    }
}

/// Bytes of the additional information: a redirection or an acceptable value.
pub(super) const ADDITIONAL_INFO_LEN: usize = 72;

/// Additional information of a REJ, SIDR_REP or APR.
pub(super) type AdditionalInfo = PrivateData<ADDITIONAL_INFO_LEN>;

number_field! { CommunicationId, 32, |n| CommunicationId(n as u32), |n: CommunicationId| n.0.into(); }

code! {
    /// The message that an MRA or REJ answers.
    MessageType(u8), 2 {
        REQ = 0 "REQ",
        REP = 1 "REP",
        /// A LAP in an MRA, no message in a REJ.
        OTHER = 2 "other",
    }
}

code! {
    /// REJ reasons.
    RejectReason(u16), 16 {
        NO_QUEUE_PAIR = 1 "no queue pair",
        NO_END_TO_END_CONTEXT = 2 "no end-to-end context",
        NO_RESOURCES = 3 "no resources",
        /// The peer did not respond in time.
        TIMEOUT = 4 "timeout",
        UNSUPPORTED_REQUEST = 5 "unsupported request",
        INVALID_COMMUNICATION_ID = 6 "invalid communication ID",
        /// The two communication IDs do not belong together.
        INVALID_COMMUNICATION_INSTANCE = 7 "invalid communication instance",
        /// No listener on this service ID.
        INVALID_SERVICE_ID = 8 "invalid service ID",
        /// The service uses another transport service type.
        INVALID_TRANSPORT = 9 "invalid transport service type",
        /// The queue pair still belongs to an earlier connection.
        STALE_CONNECTION = 10 "stale connection",
        NO_RELIABLE_DATAGRAM_CHANNEL = 11 "RDC does not exist",
        /// The primary path's GID is not local.
        PRIMARY_GID = 12 "primary GID rejected",
        /// The primary path's LID is not local.
        PRIMARY_LID = 13 "primary LID rejected",
        PRIMARY_SERVICE_LEVEL = 14 "invalid primary SL",
        PRIMARY_TRAFFIC_CLASS = 15 "invalid primary traffic class",
        PRIMARY_HOP_LIMIT = 16 "invalid primary hop limit",
        PRIMARY_RATE = 17 "invalid primary packet rate",
        /// The alternate path's GID is not local.
        ALTERNATE_GID = 18 "alternate GID rejected",
        /// The alternate path's LID is not local.
        ALTERNATE_LID = 19 "alternate LID rejected",
        ALTERNATE_SERVICE_LEVEL = 20 "invalid alternate SL",
        ALTERNATE_TRAFFIC_CLASS = 21 "invalid alternate traffic class",
        ALTERNATE_HOP_LIMIT = 22 "invalid alternate hop limit",
        ALTERNATE_RATE = 23 "invalid alternate packet rate",
        PORT_AND_MANAGER_REDIRECT = 24 "port and CM redirection",
        PORT_REDIRECT = 25 "port redirection",
        /// The path MTU is too large.
        INVALID_MTU = 26 "invalid path MTU",
        INSUFFICIENT_RESPONDER_RESOURCES = 27 "insufficient responder resources",
        /// The application rejected the connection.
        CONSUMER = 28 "consumer reject",
        RNR_RETRY_COUNT = 29 "RNR retry count rejected",
        /// The communication ID is in use.
        DUPLICATE_COMMUNICATION_ID = 30 "duplicate local communication ID",
        INVALID_CLASS_VERSION = 31 "invalid class version",
        PRIMARY_FLOW_LABEL = 32 "invalid primary flow label",
        ALTERNATE_FLOW_LABEL = 33 "invalid alternate flow label",
    }
}

code! {
    /// SIDR_REP status.
    SidrStatus(u8), 8 {
        /// The message contains the queue pair.
        VALID = 0 "valid",
        /// No listener on this service ID.
        UNSUPPORTED_SERVICE = 1 "service ID not supported",
        REJECTED = 2 "rejected",
        NO_QUEUE_PAIR = 3 "no queue pair",
        REDIRECT = 4 "redirected",
        UNSUPPORTED_VERSION = 5 "version not supported",
    }
}

code! {
    /// APR status.
    AlternatePathStatus(u8), 8 {
        LOADED = 0 "loaded",
        INVALID_COMMUNICATION_ID = 1 "invalid communication ID",
        UNSUPPORTED = 2 "not supported",
        REJECTED = 3 "rejected",
    }
}
