//! What travels over a cable.

use alloc::vec::Vec;
use softhca_wire::Envelope;

/// Which way a frame goes over a cable.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From the cable's first end to its second.
    Forward,
    /// From the cable's second end to its first.
    Backward,
}

impl Direction {
    /// The other way.
    pub const fn reverse(self) -> Direction {
        match self {
            Direction::Forward => Direction::Backward,
            Direction::Backward => Direction::Forward,
        }
    }
}

/// A RoCEv2 packet on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The IP and UDP headers.
    pub envelope: Envelope,
    /// Everything from the BTH to the ICRC.
    pub bytes: Vec<u8>,
}

impl Frame {
    /// What Ethernet adds: header and check sequence, preamble, and the gap to the next frame.
    const ETHERNET_OVERHEAD: usize = 18 + 8 + 12;

    /// Bytes of the IP packet: what a network MTU limits.
    pub fn packet_length(&self) -> usize {
        self.envelope.overhead() + self.bytes.len()
    }

    /// Byte times that the frame occupies on a cable.
    pub fn wire_length(&self) -> usize {
        self.packet_length() + Self::ETHERNET_OVERHEAD
    }

    /// The priority that switches queue it in: the upper three bits of the DSCP.
    pub const fn priority(&self) -> u8 {
        self.envelope.traffic_class >> 5
    }
}
