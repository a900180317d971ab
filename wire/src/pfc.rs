//! Priority flow control (PFC) frames (IEEE 802.1Qbb).

use crate::malformed::header_bytes;
use crate::{EtherType, Ethernet, MacAddress, Malformed};
use core::fmt;

/// A PFC frame. It has no VLAN tag and stays on its link.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pfc {
    /// The sending port.
    pub source: MacAddress,
    /// Pause time per priority in quanta of 512 bit times. Zero resumes; `None` leaves the priority
    /// unchanged.
    pub pause: [Option<u16>; 8],
}

impl Pfc {
    /// Bytes of the frame, padded to the Ethernet minimum, without the frame check sequence.
    pub const LEN: usize = 60;
    /// The multicast address that every port accepts and no switch forwards.
    pub const DESTINATION: MacAddress = MacAddress([0x01, 0x80, 0xc2, 0x00, 0x00, 0x01]);
    /// The PFC opcode (plain pause frames have another).
    pub const OPCODE: u16 = 0x0101;

    const BODY_LEN: usize = 2 + 2 + 8 * 2;

    /// Parses a frame. Ignores the padding.
    pub fn parse(bytes: &[u8]) -> Result<Pfc, Malformed> {
        let (ethernet, rest) = Ethernet::parse(bytes)?;
        if ethernet.ether_type != EtherType::MAC_CONTROL || ethernet.vlan.is_some() {
            return Err(Malformed::Field { what: "PFC EtherType", value: ethernet.ether_type.0.into() });
        }
        let body = header_bytes::<{ Self::BODY_LEN }>(rest, "PFC frame")?;
        let half = |at: usize| u16::from_be_bytes([body[at], body[at + 1]]);
        if half(0) != Self::OPCODE {
            return Err(Malformed::Field { what: "MAC control opcode", value: half(0).into() });
        }
        let enabled = half(2);
        if enabled > 0xff {
            return Err(Malformed::Field { what: "PFC class vector", value: enabled.into() });
        }
        let quanta = |priority| half(4 + 2 * priority);
        let pause = core::array::from_fn(|priority| (enabled >> priority & 1 == 1).then(|| quanta(priority)));
        Ok(Pfc { source: ethernet.source, pause })
    }

    /// The frame's bytes.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let ethernet = Ethernet {
            destination: Self::DESTINATION,
            source: self.source,
            vlan: None,
            ether_type: EtherType::MAC_CONTROL,
        };
        let at = ethernet.emit(&mut bytes);
        bytes[at..at + 2].copy_from_slice(&Self::OPCODE.to_be_bytes());
        for (priority, quanta) in self.pause.iter().enumerate() {
            if let Some(quanta) = quanta {
                bytes[at + 3] |= 1 << priority;
                bytes[at + 4 + 2 * priority..][..2].copy_from_slice(&quanta.to_be_bytes());
            }
        }
        bytes
    }
}

impl fmt::Display for Pfc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} PFC", self.source)?;
        for (priority, quanta) in self.pause.iter().enumerate() {
            match quanta {
                None => {}
                Some(0) => write!(f, " {priority}=resume")?,
                Some(quanta) => write!(f, " {priority}={quanta}")?,
            }
        }
        Ok(())
    }
}
