//! Packets that one process of a host hands over to another.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use softhca_wire::{Qpn, QpnSlot};

/// A packet that arrived at the socket of another slot than its own: the kernel merges the packets of one sender, and gives
/// all to the slot of the first.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandedOverPacket {
    /// The sender.
    pub source: SocketAddr,
    /// The address of the host that it was sent to.
    pub destination: IpAddr,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// From the BTH to the ICRC, which is correct.
    pub bytes: Vec<u8>,
}

impl HandedOverPacket {
    /// The destination QPN in a packet.
    #[inline]
    pub fn destination_qp(bytes: &[u8]) -> Qpn {
        bytes
            .get(5..8)
            .map_or(Qpn::default(), |qpn| Qpn::new(u32::from_be_bytes([0, qpn[0], qpn[1], qpn[2]])))
    }

    /// The slot that the packet is for.
    pub fn slot(&self) -> u16 {
        QpnSlot::of(Self::destination_qp(&self.bytes), QpnSlot::BITS).number
    }
}
