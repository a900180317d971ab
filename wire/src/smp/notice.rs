//! Notices: what agents report in traps.

use super::{Block, Lid};
use crate::code::code;
use crate::layout::{BitSpan, Field, START, layout};
use crate::{Gid, Qpn};

code! {
    /// How urgent a notice is.
    NoticeType(u8), 7 {
        FATAL = 0 "fatal",
        URGENT = 1 "urgent",
        SECURITY = 2 "security",
        SUBNET_MANAGEMENT = 3 "subnet management",
        INFORMATIONAL = 4 "informational",
    }
}

code! {
    /// The event that a notice reports (IBA 14.2.5.1).
    TrapNumber(u16), 16 {
        LINK_STATE = 128 "the link state of a switch port changed",
        LOCAL_LINK_INTEGRITY = 129 "local link integrity threshold reached",
        BUFFER_OVERRUN = 130 "excessive buffer overruns",
        FLOW_CONTROL_WATCHDOG = 131 "flow control watchdog expired",
        CAPABILITY_CHANGE = 144 "capabilities or description changed",
        BAD_M_KEY = 256 "bad M_Key",
        BAD_P_KEY = 257 "bad P_Key",
        BAD_Q_KEY = 258 "bad Q_Key",
    }
}

/// The details of a notice: an attribute's bytes after the fields that all notices have.
const DETAILS: usize = 10;

layout! {
    /// The fields that all notices have.
    pub struct NoticeHeader: 10 bytes {
        /// Whether the trap number is one of the specification.
        is_generic: bool = 0 [0..1],
        /// How urgent it is.
        notice_type: NoticeType = 0 [1..8],
        /// The kind of the node, as in NodeInfo.
        producer: u32 = 1 [0..24],
        /// The event.
        trap: TrapNumber = 4,
        /// The LID of the issuer.
        issuer: Lid = 6,
    }
}

/// A notice with its details.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Notice {
    /// The fields that all notices have.
    pub header: NoticeHeader,
    /// The details, at the start of the block.
    details: Block,
}

impl Notice {
    /// A notice without details.
    pub fn new(header: NoticeHeader) -> Notice {
        Notice { header, ..Notice::default() }
    }
}

impl Field for Notice {
    const WIDTH: usize = Block::LEN * 8;
    fn read(bytes: &[u8], at: BitSpan) -> Self {
        let bytes = &bytes[at.byte..at.byte + Block::LEN];
        let mut details = Block::default();
        details.0[..Block::LEN - DETAILS].copy_from_slice(&bytes[DETAILS..]);
        Notice { header: NoticeHeader::read(bytes, START), details }
    }
    fn write(&self, bytes: &mut [u8], at: BitSpan) {
        let bytes = &mut bytes[at.byte..at.byte + Block::LEN];
        self.header.write(bytes, START);
        bytes[DETAILS..].copy_from_slice(&self.details.0[..Block::LEN - DETAILS]);
    }
}

macro_rules! details {
    ($($name:ident: $read:ident, $with:ident;)*) => {
        impl Notice {
            $(
                #[doc = concat!("The details as [`", stringify!($name), "`].")]
                pub fn $read(&self) -> $name {
                    Field::read(&self.details.0, BitSpan { width: $name::WIDTH, ..START })
                }

                #[doc = concat!("The notice with [`", stringify!($name), "`].")]
                pub fn $with(mut self, details: $name) -> Notice {
                    self.details = Block::default();
                    details.write(&mut self.details.0, BitSpan { width: $name::WIDTH, ..START });
                    self
                }
            )*
        }
    };
}

details! {
    Lid: link_state, with_link_state;
    CapabilityChange: capability_change, with_capability_change;
    ManagementKeyViolation: management_key_violation, with_management_key_violation;
    KeyViolation: key_violation, with_key_violation;
}

layout! {
    /// Details of trap 144.
    pub struct CapabilityChange: 14 bytes {
        /// The LID of the port.
        lid: Lid = 2,
        /// Whether `change_flags` says what else changed.
        has_other_changes: bool = 5 [7..8],
        /// The capabilities now.
        capabilities: u32 = 6,
        /// 1 if the description changed.
        change_flags: u16 = 10,
    }
}

layout! {
    /// Details of trap 256.
    pub struct ManagementKeyViolation: 26 bytes {
        /// The LID of the port.
        lid: Lid = 2,
        /// The source LID of a directed route.
        dr_slid: Lid = 4,
        /// The method of the packet.
        method: u8 = 6,
        /// The attribute.
        attribute_id: u16 = 8,
        /// The attribute modifier.
        attribute_modifier: u32 = 10,
        /// The wrong key.
        m_key: u64 = 14,
    }
}

layout! {
    /// Details of traps 257 and 258.
    pub struct KeyViolation: 52 bytes {
        /// The source LID of the packet.
        source: Lid = 2,
        /// The destination LID.
        destination: Lid = 4,
        /// The wrong key.
        key: u32 = 6,
        /// The service level.
        sl: u8 = 10 [0..4],
        /// The source queue pair.
        source_qp: Qpn = 11,
        /// The destination queue pair.
        destination_qp: Qpn = 15,
        /// The source GID.
        source_gid: Gid = 18,
        /// The destination GID.
        destination_gid: Gid = 34,
    }
}
