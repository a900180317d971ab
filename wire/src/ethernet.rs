//! The Ethernet header, with at most one 802.1Q tag.

use crate::Malformed;
use crate::display::{debug_as_display, display};
use crate::malformed::header_bytes;
use core::fmt;
use core::net::IpAddr;

/// A MAC address.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// The MAC address of an emulated port with this IP address, the same in every run. A multicast address
    /// maps as IP prescribes; any other maps to a locally administered address that ends like the IP address.
    pub fn from_ip(address: IpAddr) -> MacAddress {
        match address {
            IpAddr::V4(v4) => {
                let [a, b, c, d] = v4.octets();
                if v4.is_multicast() {
                    MacAddress([0x01, 0x00, 0x5e, b & 0x7f, c, d])
                } else {
                    MacAddress([0x02, 0x00, a, b, c, d])
                }
            }
            IpAddr::V6(v6) => {
                let [.., z, a, b, c, d] = v6.octets();
                if v6.is_multicast() {
                    MacAddress([0x33, 0x33, a, b, c, d])
                } else {
                    MacAddress([0x06, z, a, b, c, d])
                }
            }
        }
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The EtherType.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EtherType(pub u16);

impl EtherType {
    /// IP version 4.
    pub const IPV4: EtherType = EtherType(0x0800);
    /// An 802.1Q tag; another EtherType follows it.
    pub const VLAN: EtherType = EtherType(0x8100);
    /// IP version 6.
    pub const IPV6: EtherType = EtherType(0x86dd);
    /// MAC control: pause frames.
    pub const MAC_CONTROL: EtherType = EtherType(0x8808);
    /// RoCE version 1: a GRH follows.
    pub const ROCE: EtherType = EtherType(0x8915);
}

impl fmt::Display for EtherType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#06x}", self.0)
    }
}

debug_as_display!(EtherType, MacAddress);

/// The tag control information of an 802.1Q tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Vlan {
    /// The priority code point, 0 to 7: the PFC priority.
    pub priority: u8,
    /// Drop eligible indicator.
    pub drop_eligible: bool,
    /// The VLAN ID, 12 bits.
    pub id: u16,
}

impl Vlan {
    const fn from_bits(bits: u16) -> Vlan {
        Vlan { priority: (bits >> 13) as u8, drop_eligible: bits & 0x1000 != 0, id: bits & 0xfff }
    }

    const fn bits(self) -> u16 {
        (self.priority as u16 & 7) << 13 | (self.drop_eligible as u16) << 12 | self.id & 0xfff
    }
}

display!(Vlan { id, priority } "vlan={id} priority={priority}");

/// The Ethernet header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ethernet {
    /// The destination port or a multicast group.
    pub destination: MacAddress,
    /// The sending port.
    pub source: MacAddress,
    /// The 802.1Q tag, if present.
    pub vlan: Option<Vlan>,
    /// The EtherType of the payload.
    pub ether_type: EtherType,
}

impl Ethernet {
    /// Bytes of the header without a tag.
    pub const LEN: usize = 14;
    /// Bytes of a tag.
    pub const VLAN_LEN: usize = 4;

    /// Parses the header. Returns it with the bytes that follow.
    pub fn parse(bytes: &[u8]) -> Result<(Ethernet, &[u8]), Malformed> {
        let b = header_bytes::<{ Self::LEN }>(bytes, "Ethernet header")?;
        let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, k0, k1] = *b;
        let mut header = Ethernet {
            destination: MacAddress([d0, d1, d2, d3, d4, d5]),
            source: MacAddress([s0, s1, s2, s3, s4, s5]),
            vlan: None,
            ether_type: EtherType(u16::from_be_bytes([k0, k1])),
        };
        let mut rest = &bytes[Self::LEN..];
        if header.ether_type == EtherType::VLAN {
            let [t0, t1, k0, k1] = *header_bytes::<{ Self::VLAN_LEN }>(rest, "802.1Q tag")?;
            header.vlan = Some(Vlan::from_bits(u16::from_be_bytes([t0, t1])));
            header.ether_type = EtherType(u16::from_be_bytes([k0, k1]));
            rest = &rest[Self::VLAN_LEN..];
        }
        Ok((header, rest))
    }

    /// Bytes of this header.
    pub const fn length(&self) -> usize {
        Self::LEN + if self.vlan.is_some() { Self::VLAN_LEN } else { 0 }
    }

    /// Writes the header to the start of `bytes`, which must have room; returns its length.
    pub fn emit(&self, bytes: &mut [u8]) -> usize {
        bytes[..6].copy_from_slice(&self.destination.0);
        bytes[6..12].copy_from_slice(&self.source.0);
        let mut at = 12;
        if let Some(vlan) = self.vlan {
            bytes[12..14].copy_from_slice(&EtherType::VLAN.0.to_be_bytes());
            bytes[14..16].copy_from_slice(&vlan.bits().to_be_bytes());
            at = 16;
        }
        bytes[at..at + 2].copy_from_slice(&self.ether_type.0.to_be_bytes());
        at + 2
    }
}

impl fmt::Display for Ethernet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} > {} type={}", self.source, self.destination, self.ether_type)?;
        match self.vlan {
            Some(vlan) => write!(f, " {vlan}"),
            None => Ok(()),
        }
    }
}
