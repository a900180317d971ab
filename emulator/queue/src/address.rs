//! Where a peer is.

use softhca_wire::Gid;

/// Where a peer is and how packets to it are marked.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AddressVector {
    /// The peer's GID.
    pub dgid: Gid,
    /// Which entry of the own GID table is the sender.
    pub sgid_index: u8,
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
        AddressVector { dgid: destination, hop_limit: 64, ..AddressVector::default() }
    }
}
