//! Packets that a driver sends at once, and the gate that admits them.

use core::net::IpAddr;
use softhca_wire::{AddressHeaders, Qpn, QpnSlot};

/// The queue pairs of a remote process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Peer {
    /// The address of its host.
    pub address: IpAddr,
    /// Its QPNs.
    pub slot: QpnSlot,
}

impl Peer {
    /// Whether the queue pair with this address and number is one of these.
    pub fn contains(&self, address: IpAddr, qpn: Qpn) -> bool {
        self.address == address && self.slot.contains(qpn)
    }
}

/// All queue pairs of a host.
impl From<IpAddr> for Peer {
    fn from(address: IpAddr) -> Peer {
        Peer { address, slot: QpnSlot::ALL }
    }
}

/// Decides whether the driver may send to a destination now. A queue pair that may not send is blocked until
/// `Hca::unblock`.
pub trait TransmitGate {
    /// The number of packets of up to `size` bytes, without IP headers, that may be sent to this queue pair with this
    /// addressing now. Zero blocks the queue pair. A peer acknowledges the packets unless `is_unacknowledged`.
    fn allowed_packets(
        &mut self,
        addressing: &AddressHeaders,
        destination_qp: Qpn,
        size: usize,
        is_unacknowledged: bool,
    ) -> usize;

    /// How many high bits of an address's queue pair numbers are the slot of a process. Each process has a port of its
    /// own. Zero for a host with one port.
    fn slot_bits(&self, _address: IpAddr) -> u8 {
        0
    }
}

/// Admits everything.
impl TransmitGate for () {
    fn allowed_packets(&mut self, _: &AddressHeaders, _: Qpn, _: usize, _: bool) -> usize {
        usize::MAX
    }
}

/// Carries packets to the other processes of the host, in memory.
pub trait HostWire {
    /// The bytes of packets that the process in this slot has room for now.
    fn room(&mut self, slot: u16) -> usize;

    /// Sends packets of one size, of which the last may be shorter, to the process in this slot. It has room for them.
    fn send(&mut self, slot: u16, path: &AddressHeaders, segment_size: usize, packets: &[u8]);
}

/// Consecutive packets in the caller's buffer with one destination and one size; the last may be shorter. Each ends
/// with four bytes for the ICRC, which the driver computes once it knows the IP identification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketBatch {
    /// The addressing headers, including the ECN field.
    pub addressing: AddressHeaders,
    /// The bytes of each packet.
    pub segment_size: usize,
    /// The number of packets.
    pub packets: usize,
    /// The bytes of all packets.
    pub bytes: usize,
    /// Whether no ACK says that the packets arrived: datagrams, unreliable connections and READ responses.
    pub is_unacknowledged: bool,
    /// The sending queue pair.
    pub qpn: Qpn,
    /// The service level of its path: the priority if the DSCP is zero.
    pub service_level: u8,
    /// The bytes of payload and pad of each packet that are not in the buffer, if payloads are elided.
    pub elided_payload: usize,
}
