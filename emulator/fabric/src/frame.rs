//! What travels over a cable.

use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr};
use softhca_wire::{AddressHeaders, Pfc};

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

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameContent {
    /// A RoCEv2 packet.
    Packet,
    /// The headers of a RoCEv2 packet, without its payload of so many bytes and without a valid ICRC.
    Elided {
        /// Payload and pad.
        bytes: u32,
    },
    /// A priority pause frame. It never leaves its cable.
    Pause,
}

/// A frame on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The IP and UDP headers of a packet.
    pub addressing: AddressHeaders,
    /// Everything from the BTH to the ICRC; of a pause frame the whole frame.
    pub bytes: Vec<u8>,
    /// What it is.
    pub content: FrameContent,
    /// The sender's service level, which a VLAN tag would carry.
    pub service_level: u8,
}

impl Frame {
    /// What Ethernet adds: header and check sequence.
    pub(crate) const ETHERNET_LEN: usize = 18;
    /// What passes on the wire between two frames: preamble and gap.
    pub(crate) const PREAMBLE_AND_GAP_LEN: usize = 8 + 12;

    /// A packet, from the BTH to the ICRC.
    pub const fn new(addressing: AddressHeaders, bytes: Vec<u8>) -> Frame {
        Frame { addressing, bytes, content: FrameContent::Packet, service_level: 0 }
    }

    /// What stands where no frame is.
    pub(crate) const fn empty() -> Frame {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Frame::new(AddressHeaders::between(nowhere, nowhere), Vec::new())
    }

    /// A pause frame.
    pub fn pause(pause: &Pfc) -> Frame {
        Frame { bytes: pause.emit().to_vec(), content: FrameContent::Pause, ..Frame::empty() }
    }

    /// The pause that it asks for, if it is a pause frame that can be read.
    pub fn as_pause(&self) -> Option<Pfc> {
        match self.content {
            FrameContent::Pause => Pfc::parse(&self.bytes).ok(),
            _ => None,
        }
    }

    /// Bytes of the IP packet: what a network MTU limits.
    pub fn packet_length(&self) -> usize {
        match self.content {
            FrameContent::Packet => self.addressing.header_length() + self.bytes.len(),
            FrameContent::Elided { bytes } => {
                self.addressing.header_length() + self.bytes.len() + bytes as usize
            }
            FrameContent::Pause => 0,
        }
    }

    /// Bytes that the frame takes in a buffer.
    pub fn buffer_length(&self) -> usize {
        match self.content {
            FrameContent::Pause => Pfc::LEN + 4,
            _ => self.packet_length() + Self::ETHERNET_LEN,
        }
    }

    /// Byte times that the frame occupies on a cable.
    pub fn wire_length(&self) -> usize {
        self.buffer_length() + Self::PREAMBLE_AND_GAP_LEN
    }

    /// The priority that switches queue it in: the upper three bits of the DSCP or, if that is zero, the
    /// service level.
    pub const fn priority(&self) -> u8 {
        match self.addressing.traffic_class >> 2 {
            0 => self.service_level & 7,
            dscp => dscp >> 3,
        }
    }
}
