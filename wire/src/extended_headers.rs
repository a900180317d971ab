//! The extended transport headers, except the AETH.

use crate::malformed::header_bytes;
use crate::{Malformed, Qpn, QueueKey, RemoteKey};
use core::fmt;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// The datagram header: who sends, and the key that lets it in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deth {
    /// The receiver's Q_Key.
    pub qkey: QueueKey,
    /// The sending queue pair.
    pub source_qp: Qpn,
}

impl Deth {
    /// Bytes on the wire.
    pub const LEN: usize = 8;

    /// Reads the header from the start of `bytes`.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Deth, Malformed> {
        let b = header_bytes::<{ Self::LEN }>(bytes, "DETH")?;
        Ok(Deth { qkey: QueueKey(u32_at(b, 0)), source_qp: Qpn::new(u32_at(b, 4)) })
    }

    /// Writes the header to the start of `bytes`, which must have room.
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..4].copy_from_slice(&self.qkey.0.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.source_qp.value().to_be_bytes());
    }
}

impl fmt::Display for Deth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "qkey={} src_qp={}", self.qkey, self.source_qp)
    }
}

/// The one-sided header: which bytes of the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reth {
    /// The first byte's address in the region's own terms.
    pub virtual_address: u64,
    /// The region or window.
    pub rkey: RemoteKey,
    /// Bytes of the whole message.
    pub dma_length: u32,
}

impl Reth {
    /// Bytes on the wire.
    pub const LEN: usize = 16;

    /// Reads the header from the start of `bytes`.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Reth, Malformed> {
        let b = header_bytes::<{ Self::LEN }>(bytes, "RETH")?;
        Ok(Reth { virtual_address: u64_at(b, 0), rkey: RemoteKey(u32_at(b, 8)), dma_length: u32_at(b, 12) })
    }

    /// Writes the header to the start of `bytes`, which must have room.
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..8].copy_from_slice(&self.virtual_address.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.rkey.0.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.dma_length.to_be_bytes());
    }
}

impl fmt::Display for Reth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "va={:#x} rkey={} len={}", self.virtual_address, self.rkey, self.dma_length)
    }
}

/// The atomic header: which eight bytes, and what to do with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicEth {
    /// The address of the eight bytes.
    pub virtual_address: u64,
    /// The region or window.
    pub rkey: RemoteKey,
    /// The value to swap in, or to add.
    pub swap_or_add: u64,
    /// The value to compare with.
    pub compare: u64,
}

impl AtomicEth {
    /// Bytes on the wire.
    pub const LEN: usize = 28;

    /// Reads the header from the start of `bytes`.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<AtomicEth, Malformed> {
        let b = header_bytes::<{ Self::LEN }>(bytes, "AtomicETH")?;
        Ok(AtomicEth {
            virtual_address: u64_at(b, 0),
            rkey: RemoteKey(u32_at(b, 8)),
            swap_or_add: u64_at(b, 12),
            compare: u64_at(b, 20),
        })
    }

    /// Writes the header to the start of `bytes`, which must have room.
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..8].copy_from_slice(&self.virtual_address.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.rkey.0.to_be_bytes());
        bytes[12..20].copy_from_slice(&self.swap_or_add.to_be_bytes());
        bytes[20..28].copy_from_slice(&self.compare.to_be_bytes());
    }
}

impl fmt::Display for AtomicEth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AtomicEth { virtual_address, rkey, swap_or_add, compare } = self;
        write!(f, "va={virtual_address:#x} rkey={rkey} swap={swap_or_add:#x} compare={compare:#x}")
    }
}

macro_rules! word {
    ($(#[$doc:meta])* $name:ident, $label:literal, $inner:ty, $bytes:literal, $display:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name(pub $inner);

        impl $name {
            /// Bytes on the wire.
            pub const LEN: usize = $bytes;

            /// Reads the header from the start of `bytes`.
            #[inline]
            pub fn parse(bytes: &[u8]) -> Result<$name, Malformed> {
                Ok($name(<$inner>::from_be_bytes(*header_bytes::<{ Self::LEN }>(bytes, $label)?)))
            }

            /// Writes the header to the start of `bytes`, which must have room.
            #[inline]
            pub fn emit(&self, bytes: &mut [u8]) {
                bytes[..Self::LEN].copy_from_slice(&self.0.to_be_bytes());
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, $display, self.0)
            }
        }
    };
}

word!(
    /// The value that an atomic found before it acted.
    AtomicAckEth, "AtomicAckETH", u64, 8, "original={:#x}"
);
word!(
    /// Immediate data: four bytes for the receiver's completion.
    Immediate, "ImmDt", u32, 4, "imm={:#x}"
);
word!(
    /// The remote key that the receiver's card invalidates.
    Ieth, "IETH", u32, 4, "invalidate={:#x}"
);
word!(
    /// The shared receive queue that an XRC request is for (24 bits; the upper eight are reserved).
    XrcEth, "XRCETH", u32, 4, "srq={:#x}"
);
word!(
    /// Placement type and selectivity of a FLUSH.
    Feth, "FETH", u32, 4, "flush={:#x}"
);
