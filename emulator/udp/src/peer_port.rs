//! The port of a process, by which link control knows its peers.

use std::net::IpAddr;
use std::ops::RangeInclusive;

/// The port of a process: the processes of one host share its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerPort {
    /// The host's address.
    pub address: IpAddr,
    /// The slot of the process in its host; zero for a host with one process.
    pub slot: u16,
}

impl PeerPort {
    /// The ports of all processes of a host.
    pub(crate) fn all_of(address: IpAddr) -> RangeInclusive<PeerPort> {
        PeerPort { address, slot: 0 }..=PeerPort { address, slot: u16::MAX }
    }
}

impl From<IpAddr> for PeerPort {
    fn from(address: IpAddr) -> PeerPort {
        PeerPort { address, slot: 0 }
    }
}
