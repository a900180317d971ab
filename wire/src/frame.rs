//! A frame as a capture stores it: link, network and UDP headers around a transport packet.
//!
//! Parsing distinguishes RoCE, malformed RoCE, and [`Malformed::NotRoce`]. It returns the last one only for
//! bytes that belong to another protocol.

use crate::{
    AddressHeaders, EtherType, Ethernet, Grh, Icrc, Ipv4, Ipv6, LocalRoute, MacAddress, Malformed, ROCE_PORT,
    TransportPacket, Udp,
};
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::net::IpAddr;

/// The first header of a captured frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FirstHeader {
    /// An Ethernet header.
    Ethernet,
    /// An IPv4 or IPv6 header.
    Ip,
    /// The payload of this EtherType; the capture has no link header.
    Payload(EtherType),
}

/// The headers between link and transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each field is the header of its type")]
pub enum NetworkHeaders {
    /// RoCEv2 over IPv4.
    V4 { ip: Ipv4, udp: Udp },
    /// RoCEv2 over IPv6.
    V6 { ip: Ipv6, udp: Udp },
    /// RoCE v1: no IP and no UDP.
    V1(Grh),
}

impl NetworkHeaders {
    /// The sender.
    pub fn source(&self) -> IpAddr {
        match self {
            NetworkHeaders::V4 { ip, .. } => IpAddr::V4(ip.source),
            NetworkHeaders::V6 { ip, .. } => IpAddr::V6(ip.source),
            NetworkHeaders::V1(grh) => grh.source.ip(),
        }
    }

    /// The receiver or a multicast group.
    pub fn destination(&self) -> IpAddr {
        match self {
            NetworkHeaders::V4 { ip, .. } => IpAddr::V4(ip.destination),
            NetworkHeaders::V6 { ip, .. } => IpAddr::V6(ip.destination),
            NetworkHeaders::V1(grh) => grh.destination.ip(),
        }
    }

    /// DSCP and ECN.
    pub fn traffic_class(&self) -> u8 {
        match self {
            NetworkHeaders::V4 { ip, .. } => ip.traffic_class,
            NetworkHeaders::V6 { ip, .. } => ip.traffic_class,
            NetworkHeaders::V1(grh) => grh.traffic_class,
        }
    }

    /// The sender's address headers; `None` for RoCE v1.
    pub fn addressing(&self) -> Option<AddressHeaders> {
        let (udp, flow_label, hop_limit, identification) = match self {
            NetworkHeaders::V4 { ip, udp } => (udp, 0, ip.hop_limit, ip.identification),
            NetworkHeaders::V6 { ip, udp } => (udp, ip.flow_label, ip.hop_limit, 0),
            NetworkHeaders::V1(_) => return None,
        };
        Some(AddressHeaders {
            source: self.source(),
            destination: self.destination(),
            source_port: udp.source_port,
            traffic_class: self.traffic_class(),
            flow_label,
            hop_limit,
            identification,
            local: LocalRoute::NONE,
        })
    }

    fn new(addressing: &AddressHeaders, packet: usize) -> NetworkHeaders {
        let udp = Udp::new(addressing, packet);
        match addressing.source {
            IpAddr::V4(_) => NetworkHeaders::V4 { ip: Ipv4::new(addressing, packet), udp },
            IpAddr::V6(_) => NetworkHeaders::V6 { ip: Ipv6::new(addressing, packet), udp },
        }
    }

    fn ether_type(&self) -> EtherType {
        match self {
            NetworkHeaders::V4 { .. } => EtherType::IPV4,
            NetworkHeaders::V6 { .. } => EtherType::IPV6,
            NetworkHeaders::V1(_) => EtherType::ROCE,
        }
    }

    /// Bytes of these headers.
    pub const fn length(&self) -> usize {
        match self {
            NetworkHeaders::V4 { .. } => Ipv4::LEN + Udp::LEN,
            NetworkHeaders::V6 { .. } => Ipv6::LEN + Udp::LEN,
            NetworkHeaders::V1(_) => Grh::LEN,
        }
    }

    /// Writes the headers to the start of `bytes`, which must have room; returns their length.
    pub fn emit(&self, bytes: &mut [u8]) -> usize {
        match self {
            NetworkHeaders::V4 { ip, udp } => {
                ip.emit(bytes);
                udp.emit(&mut bytes[Ipv4::LEN..]);
            }
            NetworkHeaders::V6 { ip, udp } => {
                ip.emit(bytes);
                udp.emit(&mut bytes[Ipv6::LEN..]);
            }
            NetworkHeaders::V1(grh) => grh.emit(bytes),
        }
        self.length()
    }
}

impl fmt::Display for NetworkHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NetworkHeaders::V1(grh) => write!(f, "{} > {} (v1)", grh.source, grh.destination),
            _ => write!(f, "{} > {}", self.source(), self.destination()),
        }
    }
}

/// A frame that carries RoCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoceFrame<'a> {
    /// The Ethernet header, if the capture has it.
    pub ethernet: Option<Ethernet>,
    /// The network headers.
    pub network: NetworkHeaders,
    /// The packet, from the BTH to the ICRC.
    pub packet: &'a [u8],
    /// Padding that Ethernet appends to short frames.
    pub ethernet_padding: &'a [u8],
}

impl<'a> RoceFrame<'a> {
    /// A frame around `packet` (BTH to ICRC) between ports whose MAC addresses derive from their IP
    /// addresses.
    pub fn new(addressing: &AddressHeaders, packet: &'a [u8]) -> RoceFrame<'a> {
        let network = NetworkHeaders::new(addressing, packet.len());
        let ethernet = Ethernet {
            destination: MacAddress::from_ip(addressing.destination),
            source: MacAddress::from_ip(addressing.source),
            vlan: None,
            ether_type: network.ether_type(),
        };
        RoceFrame { ethernet: Some(ethernet), network, packet, ethernet_padding: &[] }
    }

    /// Parses the link and network headers and locates the packet, which has at least a BTH and an ICRC.
    ///
    /// [`RoceFrame::transport`] parses the packet; [`RoceFrame::icrc_is_valid`] checks its ICRC.
    pub fn parse(first: FirstHeader, bytes: &'a [u8]) -> Result<RoceFrame<'a>, Malformed> {
        let (ethernet, ether_type, rest) = match first {
            FirstHeader::Ethernet => {
                let (ethernet, rest) = Ethernet::parse(bytes)?;
                (Some(ethernet), ethernet.ether_type, rest)
            }
            FirstHeader::Ip => (None, ip_version(bytes)?, bytes),
            FirstHeader::Payload(ether_type) => (None, ether_type, bytes),
        };
        let (network, packet, padding) = match ether_type {
            EtherType::IPV4 => {
                reject_other_ipv4(rest)?;
                let (ip, datagram, padding) = Ipv4::parse(rest)?;
                if ip.flags & MORE_FRAGMENTS != 0 {
                    return Err(Malformed::Field { what: "IPv4 flags", value: ip.flags.into() });
                }
                let (udp, packet) = Udp::parse(datagram)?;
                (NetworkHeaders::V4 { ip, udp }, packet, padding)
            }
            EtherType::IPV6 => {
                reject_other_ipv6(rest)?;
                let (ip, datagram, padding) = Ipv6::parse(rest)?;
                let (udp, packet) = Udp::parse(datagram)?;
                (NetworkHeaders::V6 { ip, udp }, packet, padding)
            }
            EtherType::ROCE => {
                let (grh, packet, padding) = Grh::parse(rest)?;
                (NetworkHeaders::V1(grh), packet, padding)
            }
            other => return Err(Malformed::NotRoce { what: "EtherType", value: other.0.into() }),
        };
        Icrc::split(packet)?;
        Ok(RoceFrame { ethernet, network, packet, ethernet_padding: padding })
    }

    /// The headers and the payload of the packet.
    pub fn transport(&self) -> Result<TransportPacket<'a>, Malformed> {
        let (transport, _) = Icrc::split(self.packet)?;
        TransportPacket::parse(transport)
    }

    /// The packet's ICRC.
    ///
    /// # Panics
    /// If the packet is shorter than [`RoceFrame::parse`] accepts.
    pub fn icrc(&self) -> Icrc {
        self.split().1
    }

    /// The correct ICRC for the packet.
    ///
    /// # Panics
    /// If the packet is shorter than [`RoceFrame::parse`] accepts.
    pub fn expected_icrc(&self) -> Icrc {
        let transport = self.split().0;
        match &self.network {
            NetworkHeaders::V1(grh) => Icrc::compute_v1(grh, transport),
            NetworkHeaders::V4 { ip, .. } => {
                Icrc::compute_with_flags(&self.known_addressing(), ip.flags, transport)
            }
            NetworkHeaders::V6 { .. } => Icrc::compute(&self.known_addressing(), transport),
        }
    }

    /// Whether the ICRC is correct.
    ///
    /// # Panics
    /// If the packet is shorter than [`RoceFrame::parse`] accepts.
    pub fn icrc_is_valid(&self) -> bool {
        self.icrc() == self.expected_icrc()
    }

    fn split(&self) -> (&'a [u8], Icrc) {
        Icrc::split(self.packet).expect("a frame holds at least a BTH and an ICRC")
    }

    fn known_addressing(&self) -> AddressHeaders {
        self.network.addressing().expect("RoCEv2 has IP and UDP headers")
    }

    /// Bytes that [`RoceFrame::emit`] writes.
    pub fn length(&self) -> usize {
        let link = self.ethernet.map_or(0, |ethernet| ethernet.length());
        link + self.network.length() + self.packet.len() + self.ethernet_padding.len()
    }

    /// Writes the frame to the start of `bytes`, which must have room; returns its length.
    pub fn emit(&self, bytes: &mut [u8]) -> usize {
        let mut at = self.ethernet.map_or(0, |ethernet| ethernet.emit(bytes));
        at += self.network.emit(&mut bytes[at..]);
        for part in [self.packet, self.ethernet_padding] {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        at
    }

    /// The frame's bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.length()];
        self.emit(&mut bytes);
        bytes
    }
}

impl fmt::Display for RoceFrame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.network)?;
        match self.transport() {
            Ok(transport) => write!(f, "{transport}"),
            Err(reason) => write!(f, "malformed: {reason}"),
        }
    }
}

const MORE_FRAGMENTS: u16 = 0x2000;
const FRAGMENT_OFFSET: u16 = 0x1fff;

fn ip_version(bytes: &[u8]) -> Result<EtherType, Malformed> {
    match bytes.first().map(|first| first >> 4) {
        Some(4) => Ok(EtherType::IPV4),
        Some(6) => Ok(EtherType::IPV6),
        Some(version) => Err(Malformed::NotRoce { what: "IP version", value: version.into() }),
        None => Err(Malformed::Truncated { what: "IP header", needed: 1, available: 0 }),
    }
}

/// The big-endian `u16` at `at`, if present.
fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2).map(|half| u16::from_be_bytes([half[0], half[1]]))
}

fn reject(what: &'static str, value: u16) -> Result<(), Malformed> {
    Err(Malformed::NotRoce { what, value: value.into() })
}

/// Rejects another protocol or port before any other check of the datagram.
fn reject_other_ipv4(bytes: &[u8]) -> Result<(), Malformed> {
    if let Some(protocol) = bytes.get(9).filter(|protocol| **protocol != Udp::PROTOCOL) {
        return reject("IP protocol", (*protocol).into());
    }
    // Later fragments of a datagram carry no port. RoCE senders do not fragment.
    if let Some(flags) = u16_at(bytes, 6).filter(|flags| flags & FRAGMENT_OFFSET != 0) {
        return reject("IPv4 fragment offset", flags & FRAGMENT_OFFSET);
    }
    let header = bytes.first().map_or(Ipv4::LEN, |first| usize::from(first & 15) * 4);
    reject_other_port(bytes, header)
}

fn reject_other_ipv6(bytes: &[u8]) -> Result<(), Malformed> {
    if let Some(next) = bytes.get(6).filter(|next| **next != Udp::PROTOCOL) {
        return reject("IPv6 next header", (*next).into());
    }
    reject_other_port(bytes, Ipv6::LEN)
}

fn reject_other_port(bytes: &[u8], udp: usize) -> Result<(), Malformed> {
    match u16_at(bytes, udp + 2) {
        Some(port) if port != ROCE_PORT => reject("UDP port", port),
        _ => Ok(()),
    }
}
