//! Typed numbers of the transport headers.

use crate::display::debug_as_display;
use core::fmt;

/// A packet sequence number: 24 bits, compared and advanced modulo 2^24.
///
/// A PSN is before another if it is less than half the number space behind it (IBA C9-66).
///
/// ```
/// use softhca_wire::Psn;
/// let last = Psn::new(0xff_ffff);
/// assert_eq!(last.plus(1), Psn::new(0));
/// assert!(last.is_before(Psn::new(0)));
/// assert_eq!(Psn::new(0).since(last), 1);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(from = "u32", into = "u32")
)]
pub struct Psn(u32);

impl Psn {
    /// The size of the PSN space.
    pub const SPACE: u32 = 1 << 24;
    const MASK: u32 = Self::SPACE - 1;

    /// The low 24 bits of `value`.
    #[inline]
    pub const fn new(value: u32) -> Self {
        Psn(value & Self::MASK)
    }

    /// The number itself.
    #[inline]
    pub const fn value(self) -> u32 {
        self.0
    }

    /// The PSN `count` packets later.
    #[inline]
    pub const fn plus(self, count: u32) -> Self {
        Psn::new(self.0.wrapping_add(count))
    }

    /// The PSN `count` packets earlier.
    #[inline]
    pub const fn minus(self, count: u32) -> Self {
        Psn::new(self.0.wrapping_sub(count))
    }

    /// The distance from `earlier` to this PSN, in 0..2^24.
    #[inline]
    pub const fn since(self, earlier: Psn) -> u32 {
        self.0.wrapping_sub(earlier.0) & Self::MASK
    }

    /// The signed distance from `other` to this PSN, in -2^23..2^23.
    #[inline]
    pub const fn distance(self, other: Psn) -> i32 {
        ((self.0.wrapping_sub(other.0) << 8) as i32) >> 8
    }

    /// Whether this PSN precedes `other` within half of the PSN space.
    #[inline]
    pub const fn is_before(self, other: Psn) -> bool {
        self.distance(other) < 0
    }

    /// Whether this PSN is one of the `count` that start at `first`.
    #[inline]
    pub const fn is_within(self, first: Psn, count: u32) -> bool {
        self.since(first) < count
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A queue pair number: 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(from = "u32", into = "u32")
)]
pub struct Qpn(u32);

impl Qpn {
    /// The general services interface (QP1): connection management and subnet administration.
    pub const GSI: Qpn = Qpn(1);
    /// The destination of every multicast packet.
    pub const MULTICAST: Qpn = Qpn(0xff_ffff);

    /// The low 24 bits of `value`.
    #[inline]
    pub const fn new(value: u32) -> Self {
        Qpn(value & 0xff_ffff)
    }

    /// The number itself.
    #[inline]
    pub const fn value(self) -> u32 {
        self.0
    }
}

/// The QPNs of one process, where the processes of a host share its address: those with the same high bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct QpnSlot {
    /// The high bits.
    pub number: u16,
    /// How many there are; zero for a host whose QPNs all belong to one process.
    pub bits: u8,
}

impl QpnSlot {
    /// The slot bits of a host that is shared: 512 slots of 32,768 QPNs.
    pub const BITS: u8 = 9;
    /// The QPNs of a host with one process.
    pub const ALL: QpnSlot = QpnSlot { number: 0, bits: 0 };

    /// The slot of a QPN on a host with this many slot bits. Multicast goes to slot 0.
    #[inline]
    pub const fn of(qpn: Qpn, bits: u8) -> QpnSlot {
        let number = if bits == 0 || qpn.0 == Qpn::MULTICAST.0 { 0 } else { qpn.0 >> (24 - bits) };
        QpnSlot { number: number as u16, bits }
    }

    /// Whether a QPN is one of these.
    #[inline]
    pub const fn contains(self, qpn: Qpn) -> bool {
        QpnSlot::of(qpn, self.bits).number == self.number
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Conversions for numbers narrower than their representation.
macro_rules! narrow {
    ($($name:ident: $number:ty = $value:ident),*) => {
        $(impl From<$number> for $name {
            fn from(value: $number) -> $name {
                $name::new(value)
            }
        }

        impl From<$name> for $number {
            fn from(number: $name) -> $number {
                number.$value()
            }
        })*
    };
}
pub(crate) use narrow;

narrow!(Psn: u32 = value, Qpn: u32 = value);
debug_as_display!(LocalKey, PartitionKey, Psn, Qpn, QueueKey, RemoteKey);

macro_rules! key {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

key!(
    /// The lkey in a scatter/gather entry.
    LocalKey,
    u32
);
key!(
    /// The rkey of a region or window in an RDMA or atomic request.
    RemoteKey,
    u32
);
key!(
    /// The P_Key in every packet. Bit 15 means full membership.
    PartitionKey,
    u16
);
key!(
    /// The Q_Key that authorizes senders to a datagram queue pair.
    QueueKey,
    u32
);

impl PartitionKey {
    /// The default partition with full membership: the only entry in a RoCE port's P_Key table.
    pub const DEFAULT: PartitionKey = PartitionKey(0xffff);

    /// Whether a port with this key accepts packets with `other`: the same partition, and at least one full
    /// member (IBA 10.9.3).
    pub const fn matches(self, other: PartitionKey) -> bool {
        self.0 & 0x7fff == other.0 & 0x7fff && self.0 & 0x7fff != 0 && (self.0 | other.0) & 0x8000 != 0
    }
}

impl QueueKey {
    /// The well-known Q_Key of QP1.
    pub const GSI: QueueKey = QueueKey(0x8001_0000);

    /// Whether this is a controlled Q_Key: a work request with such a key sends the queue pair's own Q_Key
    /// instead (IBA 10.2.5).
    pub const fn is_controlled(self) -> bool {
        self.0 & 0x8000_0000 != 0
    }
}

/// A path MTU: payload bytes per packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    B256 = 1,
    /// 512 bytes.
    B512 = 2,
    /// 1024 bytes.
    B1024 = 3,
    /// 2048 bytes.
    B2048 = 4,
    /// 4096 bytes.
    B4096 = 5,
}

impl Mtu {
    /// Every path MTU, smallest first.
    pub const ALL: [Mtu; 5] = [Mtu::B256, Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096];

    /// Payload bytes per packet.
    #[inline]
    pub const fn bytes(self) -> u32 {
        128 << self as u8
    }

    /// The code that verbs and the connection manager use: 1 for 256 up to 5 for 4096.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The path MTU with this code.
    pub fn from_code(code: u8) -> Option<Mtu> {
        Mtu::ALL.into_iter().find(|mtu| mtu.code() == code)
    }

    /// The path MTU of this many bytes.
    pub fn from_bytes(bytes: u32) -> Option<Mtu> {
        Mtu::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }

    /// The largest path MTU whose packets fit a network MTU (including IP headers), with room for the largest
    /// transport headers.
    pub fn fitting(network_mtu: u32) -> Option<Mtu> {
        const HEADROOM: u32 = 40 + 8 + 12 + 4 + 16 + 4 + 4;
        Mtu::ALL.into_iter().rev().find(|mtu| mtu.bytes() + HEADROOM <= network_mtu)
    }

    /// Packets in a message of `length` bytes: at least one.
    #[inline]
    pub const fn packets(self, length: u32) -> u32 {
        if length == 0 { 1 } else { (length - 1) / self.bytes() + 1 }
    }
}
