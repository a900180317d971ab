//! The extended transport headers, except the AETH.

use crate::display::display;
use crate::malformed::header_bytes;
use crate::{Malformed, Qpn, QueueKey, RemoteKey};
use core::fmt;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// DETH: the datagram extended transport header.
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

    /// Parses the header at the start of `bytes`.
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

display!(Deth { qkey, source_qp } "qkey={qkey} src_qp={source_qp}");

/// RETH: the RDMA extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reth {
    /// The virtual address of the first byte, relative to the region's base.
    pub virtual_address: u64,
    /// The rkey of the region or window.
    pub rkey: RemoteKey,
    /// DMA length: bytes of the whole message.
    pub dma_length: u32,
}

impl Reth {
    /// Bytes on the wire.
    pub const LEN: usize = 16;

    /// Parses the header at the start of `bytes`.
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

display!(Reth { virtual_address, rkey, dma_length } "va={virtual_address:#x} rkey={rkey} len={dma_length}");

/// AtomicETH: the operands of an atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicEth {
    /// The virtual address of the eight bytes.
    pub virtual_address: u64,
    /// The rkey of the region or window.
    pub rkey: RemoteKey,
    /// The value to swap in, or to add.
    pub swap_or_add: u64,
    /// The value to compare with.
    pub compare: u64,
}

impl AtomicEth {
    /// Bytes on the wire.
    pub const LEN: usize = 28;

    /// Parses the header at the start of `bytes`.
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

display!(AtomicEth { virtual_address, rkey, swap_or_add, compare }
    "va={virtual_address:#x} rkey={rkey} swap={swap_or_add:#x} compare={compare:#x}");

macro_rules! word {
    ($(#[$doc:meta])* $name:ident, $label:literal, $inner:ty, $bytes:literal, $display:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name(pub $inner);

        impl $name {
            /// Bytes on the wire.
            pub const LEN: usize = $bytes;

            /// Parses the header at the start of `bytes`.
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
    /// AtomicAckETH: the original value of the eight bytes.
    AtomicAckEth, "AtomicAckETH", u64, 8, "original={:#x}"
);
word!(
    /// ImmDt: four bytes for the receiver's CQE.
    Immediate, "ImmDt", u32, 4, "imm={:#x}"
);
word!(
    /// IETH: the rkey that the receiver invalidates.
    Ieth, "IETH", u32, 4, "invalidate={:#x}"
);
word!(
    /// XRCETH: the SRQ of an XRC request (24 bits; the upper eight are reserved).
    XrcEth, "XRCETH", u32, 4, "srq={:#x}"
);
word!(
    /// FETH: placement type and selectivity of a FLUSH.
    Feth, "FETH", u32, 4, "flush={:#x}"
);
