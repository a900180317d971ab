//! Where a peer is, and the envelope that takes a packet there.

use softhca_wire::{Envelope, Gid, Qpn};

/// Where a peer is and how packets to it are marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AddressVector {
    /// The peer's GID.
    pub destination: Gid,
    /// Which entry of the own GID table is the sender.
    pub source_index: u8,
    /// DSCP and ECN bits of the IP header.
    pub traffic_class: u8,
    /// The IPv6 flow label; zero lets the queue pair numbers choose the flow.
    pub flow_label: u32,
    /// Time to live; zero means 64.
    pub hop_limit: u8,
    /// The service level; the priority where no DSCP says otherwise.
    pub service_level: u8,
}

impl AddressVector {
    /// A vector to `destination` with every other choice at its default.
    pub fn to(destination: Gid) -> AddressVector {
        AddressVector { destination, hop_limit: 64, ..AddressVector::default() }
    }

    /// The envelope of a flow between two queue pairs.
    pub(crate) fn envelope(&self, source: Gid, local: Qpn, remote: Qpn) -> Envelope {
        Envelope {
            source: source.ip(),
            destination: self.destination.ip(),
            source_port: source_port(self.flow_label, local, remote),
            traffic_class: self.traffic_class,
            flow_label: self.flow_label,
            hop_limit: if self.hop_limit == 0 { 64 } else { self.hop_limit },
            identification: 0,
        }
    }
}

/// The UDP source port of a flow, in the dynamic range: folded from the flow label or, without one, from
/// the two queue pair numbers, as Linux senders do.
fn source_port(flow_label: u32, local: Qpn, remote: Qpn) -> u16 {
    let label = match flow_label & 0xf_ffff {
        0 => {
            let mut v = u64::from(local.value()) * u64::from(remote.value());
            v ^= v >> 20;
            v ^= v >> 40;
            (v & 0xf_ffff) as u32
        }
        label => label,
    };
    0xc000 | ((label & 0x3fff) ^ (label >> 14)) as u16
}
