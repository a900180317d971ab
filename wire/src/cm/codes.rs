//! The small types that several messages share.

use crate::layout::{BitSpan, Field, number_field};
use core::fmt;

/// Names one end of a connection being made, at the end that chose it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CommunicationId(pub u32);

impl fmt::Display for CommunicationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Debug for CommunicationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CommunicationId({:#x})", self.0)
    }
}

/// Bytes for whoever uses the connection, filled up with zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PrivateData<const N: usize>(pub [u8; N]);

impl<const N: usize> PrivateData<N> {
    /// These bytes and zeros behind them, if there is room.
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

/// Bytes that a refusal has to say more: an address to turn to, a value that would do.
pub(super) const ADDITIONAL_INFO_LEN: usize = 72;

/// A refusal's additional information.
pub(super) type AdditionalInfo = PrivateData<ADDITIONAL_INFO_LEN>;

macro_rules! code {
    ($(#[$doc:meta])* $name:ident($inner:ty), $width:literal { $($(#[$value_doc:meta])* $value:ident = $number:literal $text:literal,)* }) => {
        $(#[$doc])*
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $inner);

        impl $name {
            $( $(#[$value_doc])* pub const $value: $name = $name($number); )*

            /// What the number means, if the specification says so.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $( $number => Some($text), )*
                    _ => None,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.name() {
                    Some(name) => write!(f, "{} ({name})", self.0),
                    None => self.0.fmt(f),
                }
            }
        }

        number_field! { $name, $width, |n| $name(n as $inner), |n: $name| n.0.into(); }
    };
}

number_field! { CommunicationId, 32, |n| CommunicationId(n as u32), |n: CommunicationId| n.0.into(); }

code! {
    /// Which message an MRA or REJ is about.
    MessageType(u8), 2 {
        /// A REQ.
        REQ = 0 "REQ",
        /// A REP.
        REP = 1 "REP",
        /// A LAP in an MRA, no message in a REJ.
        OTHER = 2 "other",
    }
}

code! {
    /// Why a connection is refused.
    RejectReason(u16), 16 {
        /// No queue pair is left.
        NO_QUEUE_PAIR = 1 "no queue pair",
        /// No end-to-end context is left.
        NO_END_TO_END_CONTEXT = 2 "no end-to-end context",
        /// Something else is exhausted.
        NO_RESOURCES = 3 "no resources",
        /// The other side did not answer in time.
        TIMEOUT = 4 "timeout",
        /// The request as a whole is not understood.
        UNSUPPORTED_REQUEST = 5 "unsupported request",
        /// A communication identifier that is not known.
        INVALID_COMMUNICATION_ID = 6 "invalid communication ID",
        /// Two identifiers that do not belong together.
        INVALID_COMMUNICATION_INSTANCE = 7 "invalid communication instance",
        /// Nobody listens.
        INVALID_SERVICE_ID = 8 "invalid service ID",
        /// The service speaks another transport.
        INVALID_TRANSPORT = 9 "invalid transport service type",
        /// The queue pair is still in use here.
        STALE_CONNECTION = 10 "stale connection",
        /// The reliable datagram channel is not there.
        NO_RELIABLE_DATAGRAM_CHANNEL = 11 "RDC does not exist",
        /// The path's GID is not ours.
        PRIMARY_GID = 12 "primary GID rejected",
        /// The path's LID is not ours.
        PRIMARY_LID = 13 "primary LID rejected",
        /// The path's service level is refused.
        PRIMARY_SERVICE_LEVEL = 14 "invalid primary SL",
        /// The path's traffic class is refused.
        PRIMARY_TRAFFIC_CLASS = 15 "invalid primary traffic class",
        /// The path's hop limit is refused.
        PRIMARY_HOP_LIMIT = 16 "invalid primary hop limit",
        /// The path's rate is refused.
        PRIMARY_RATE = 17 "invalid primary packet rate",
        /// The alternate path's GID is not ours.
        ALTERNATE_GID = 18 "alternate GID rejected",
        /// The alternate path's LID is not ours.
        ALTERNATE_LID = 19 "alternate LID rejected",
        /// The alternate path's service level is refused.
        ALTERNATE_SERVICE_LEVEL = 20 "invalid alternate SL",
        /// The alternate path's traffic class is refused.
        ALTERNATE_TRAFFIC_CLASS = 21 "invalid alternate traffic class",
        /// The alternate path's hop limit is refused.
        ALTERNATE_HOP_LIMIT = 22 "invalid alternate hop limit",
        /// The alternate path's rate is refused.
        ALTERNATE_RATE = 23 "invalid alternate packet rate",
        /// Ask another port's connection manager.
        PORT_AND_MANAGER_REDIRECT = 24 "port and CM redirection",
        /// Ask for another port.
        PORT_REDIRECT = 25 "port redirection",
        /// The path MTU is too large.
        INVALID_MTU = 26 "invalid path MTU",
        /// Too few outstanding reads are possible.
        INSUFFICIENT_RESPONDER_RESOURCES = 27 "insufficient responder resources",
        /// The application refused.
        CONSUMER = 28 "consumer reject",
        /// The RNR retry count is refused.
        RNR_RETRY_COUNT = 29 "RNR retry count rejected",
        /// The communication identifier is in use.
        DUPLICATE_COMMUNICATION_ID = 30 "duplicate local communication ID",
        /// The class version is not spoken here.
        INVALID_CLASS_VERSION = 31 "invalid class version",
        /// The path's flow label is refused.
        PRIMARY_FLOW_LABEL = 32 "invalid primary flow label",
        /// The alternate path's flow label is refused.
        ALTERNATE_FLOW_LABEL = 33 "invalid alternate flow label",
    }
}

code! {
    /// The answer to a datagram service request.
    SidrStatus(u8), 8 {
        /// The queue pair is named.
        VALID = 0 "valid",
        /// Nobody listens.
        UNSUPPORTED_SERVICE = 1 "service ID not supported",
        /// The service refused.
        REJECTED = 2 "rejected",
        /// The service has no queue pair.
        NO_QUEUE_PAIR = 3 "no queue pair",
        /// Ask elsewhere.
        REDIRECT = 4 "redirected",
        /// The class version is not spoken here.
        UNSUPPORTED_VERSION = 5 "version not supported",
    }
}

code! {
    /// The answer to a proposed alternate path.
    AlternatePathStatus(u8), 8 {
        /// The path is loaded.
        LOADED = 0 "loaded",
        /// A communication identifier that is not known.
        INVALID_COMMUNICATION_ID = 1 "invalid communication ID",
        /// Alternate paths are not known here.
        UNSUPPORTED = 2 "not supported",
        /// The path is refused.
        REJECTED = 3 "rejected",
    }
}
