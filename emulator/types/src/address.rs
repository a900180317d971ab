//! Address vectors.

use softhca_wire::Gid;

/// The address of a peer and the header fields of packets to it (`struct ibv_ah_attr`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AddressVector {
    /// The peer's GID. On InfiniBand, zero for packets without a GRH.
    pub dgid: Gid,
    /// The index of the source GID in the local GID table.
    pub sgid_index: u8,
    /// The DSCP and ECN bits of the IP header.
    pub traffic_class: u8,
    /// The IPv6 flow label. With zero, the queue pair numbers select the flow.
    pub flow_label: u32,
    /// The hop limit or time to live; zero means 64.
    pub hop_limit: u8,
    /// The service level: the priority of packets without a DSCP.
    pub service_level: u8,
    /// The LID of the peer. InfiniBand only, as the path bits. Packets have a GRH if the peer's GID is set.
    pub dlid: u16,
    /// Which of the LIDs of the own port packets come from.
    pub src_path_bits: u8,
}

impl AddressVector {
    /// An address vector to `dgid` with defaults for everything else.
    pub fn to(dgid: Gid) -> AddressVector {
        AddressVector { dgid, hop_limit: 64, ..AddressVector::default() }
    }
}
