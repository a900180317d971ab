//! Frames on a link.

use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr};
use softhca_wire::{AddressHeaders, Pfc};

/// The direction of a frame on a link.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From the link's first end to its second.
    Forward,
    /// From the link's second end to its first.
    Backward,
}

impl Direction {
    /// The opposite direction.
    pub const fn reverse(self) -> Direction {
        match self {
            Direction::Forward => Direction::Backward,
            Direction::Backward => Direction::Forward,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameContent {
    /// A RoCEv2 packet.
    Packet,
    /// The headers of a RoCEv2 packet. The payload of `bytes` bytes is elided and the ICRC is not valid.
    Elided {
        /// Bytes of payload and padding.
        bytes: u32,
    },
    /// A PFC pause frame. It stays on its link.
    Pause,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The IP and UDP headers of a packet.
    pub addressing: AddressHeaders,
    /// The packet, from the BTH to the ICRC; for a pause frame, the whole frame.
    pub bytes: Vec<u8>,
    pub content: FrameContent,
    /// The sender's service level, the priority in a VLAN tag.
    pub service_level: u8,
}

impl Frame {
    /// Bytes of the Ethernet header and frame check sequence.
    pub(crate) const ETHERNET_LEN: usize = 18;
    /// Bytes of preamble and inter-frame gap.
    pub(crate) const PREAMBLE_AND_GAP_LEN: usize = 8 + 12;

    /// A packet, from the BTH to the ICRC.
    pub const fn new(addressing: AddressHeaders, bytes: Vec<u8>) -> Frame {
        Frame { addressing, bytes, content: FrameContent::Packet, service_level: 0 }
    }

    /// A placeholder.
    pub(crate) const fn empty() -> Frame {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Frame::new(AddressHeaders::between(nowhere, nowhere), Vec::new())
    }

    pub fn pause(pause: &Pfc) -> Frame {
        Frame { bytes: pause.emit().to_vec(), content: FrameContent::Pause, ..Frame::empty() }
    }

    /// The pause request, if this is a valid pause frame.
    pub fn as_pause(&self) -> Option<Pfc> {
        match self.content {
            FrameContent::Pause => Pfc::parse(&self.bytes).ok(),
            _ => None,
        }
    }

    /// Bytes of the IP packet, which the link MTU limits.
    pub fn packet_length(&self) -> usize {
        match self.content {
            FrameContent::Packet => self.addressing.header_length() + self.bytes.len(),
            FrameContent::Elided { bytes } => {
                self.addressing.header_length() + self.bytes.len() + bytes as usize
            }
            FrameContent::Pause => 0,
        }
    }

    /// Bytes that the frame occupies in a buffer.
    pub fn buffer_length(&self) -> usize {
        match self.content {
            FrameContent::Pause => Pfc::LEN + 4,
            _ => self.packet_length() + Self::ETHERNET_LEN,
        }
    }

    /// Byte times that the frame occupies on a link.
    pub fn wire_length(&self) -> usize {
        self.buffer_length() + Self::PREAMBLE_AND_GAP_LEN
    }

    /// The priority: the upper three bits of the DSCP or, if the DSCP is zero, the service level.
    pub const fn priority(&self) -> u8 {
        match self.addressing.traffic_class >> 2 {
            0 => self.service_level & 7,
            dscp => dscp >> 3,
        }
    }
}
