//! A whole frame as captures hold it: link, network and UDP headers around a transport packet.
//!
//! Reading tells three things apart: RoCE, bytes that claim to be RoCE and are not well formed, and
//! [`Malformed::NotRoce`], which is returned only where the bytes prove another protocol.

use crate::{
    Envelope, EtherType, Ethernet, Grh, Icrc, Ipv4, Ipv6, MacAddress, Malformed, ROCE_PORT, Transport, Udp,
};
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::net::IpAddr;

/// What a captured frame starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Link {
    /// An Ethernet header.
    Ethernet,
    /// An IP header of either version.
    Ip,
    /// Whatever this type announces, the link header being stripped already.
    Payload(EtherType),
}

/// The headers between link and transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each field is the header of its type")]
pub enum Network {
    /// RoCEv2 over IPv4.
    V4 { ip: Ipv4, udp: Udp },
    /// RoCEv2 over IPv6.
    V6 { ip: Ipv6, udp: Udp },
    /// RoCE v1: no IP and no UDP.
    V1(Grh),
}

impl Network {
    /// The sender.
    pub fn source(&self) -> IpAddr {
        match self {
            Network::V4 { ip, .. } => IpAddr::V4(ip.source),
            Network::V6 { ip, .. } => IpAddr::V6(ip.source),
            Network::V1(grh) => grh.source.ip(),
        }
    }

    /// The receiver, or a group.
    pub fn destination(&self) -> IpAddr {
        match self {
            Network::V4 { ip, .. } => IpAddr::V4(ip.destination),
            Network::V6 { ip, .. } => IpAddr::V6(ip.destination),
            Network::V1(grh) => grh.destination.ip(),
        }
    }

    /// DSCP and ECN.
    pub fn traffic_class(&self) -> u8 {
        match self {
            Network::V4 { ip, .. } => ip.traffic_class,
            Network::V6 { ip, .. } => ip.traffic_class,
            Network::V1(grh) => grh.traffic_class,
        }
    }

    /// What the sender chose, as an engine is told it. RoCE v1 has no envelope.
    pub fn envelope(&self) -> Option<Envelope> {
        let (udp, flow_label, hop_limit, identification) = match self {
            Network::V4 { ip, udp } => (udp, 0, ip.hop_limit, ip.identification),
            Network::V6 { ip, udp } => (udp, ip.flow_label, ip.hop_limit, 0),
            Network::V1(_) => return None,
        };
        Some(Envelope {
            source: self.source(),
            destination: self.destination(),
            source_port: udp.source_port,
            traffic_class: self.traffic_class(),
            flow_label,
            hop_limit,
            identification,
        })
    }

    fn around(envelope: &Envelope, packet: usize) -> Network {
        let udp = Udp::around(envelope, packet);
        match envelope.source {
            IpAddr::V4(_) => Network::V4 { ip: Ipv4::around(envelope, packet), udp },
            IpAddr::V6(_) => Network::V6 { ip: Ipv6::around(envelope, packet), udp },
        }
    }

    fn kind(&self) -> EtherType {
        match self {
            Network::V4 { .. } => EtherType::IPV4,
            Network::V6 { .. } => EtherType::IPV6,
            Network::V1(_) => EtherType::ROCE,
        }
    }

    /// Bytes of these headers.
    pub const fn length(&self) -> usize {
        match self {
            Network::V4 { .. } => Ipv4::LEN + Udp::LEN,
            Network::V6 { .. } => Ipv6::LEN + Udp::LEN,
            Network::V1(_) => Grh::LEN,
        }
    }

    /// Writes the headers to the start of `bytes`, which must have room; returns their length.
    pub fn emit(&self, bytes: &mut [u8]) -> usize {
        match self {
            Network::V4 { ip, udp } => {
                ip.emit(bytes);
                udp.emit(&mut bytes[Ipv4::LEN..]);
            }
            Network::V6 { ip, udp } => {
                ip.emit(bytes);
                udp.emit(&mut bytes[Ipv6::LEN..]);
            }
            Network::V1(grh) => grh.emit(bytes),
        }
        self.length()
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Network::V1(grh) => write!(f, "{} > {} (v1)", grh.source, grh.destination),
            _ => write!(f, "{} > {}", self.source(), self.destination()),
        }
    }
}

/// A frame that carries RoCE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The link header, if the capture has it.
    pub ethernet: Option<Ethernet>,
    /// The network headers.
    pub network: Network,
    /// From the BTH to the ICRC.
    pub packet: &'a [u8],
    /// What a link put behind the packet to fill the frame up.
    pub trailer: &'a [u8],
}

impl<'a> Frame<'a> {
    /// A frame around `packet`, which runs from the BTH to the ICRC, between ports whose hardware addresses
    /// follow from their IP addresses.
    pub fn around(envelope: &Envelope, packet: &'a [u8]) -> Frame<'a> {
        let network = Network::around(envelope, packet.len());
        let ethernet = Ethernet {
            destination: MacAddress::of(envelope.destination),
            source: MacAddress::of(envelope.source),
            vlan: None,
            kind: network.kind(),
        };
        Frame { ethernet: Some(ethernet), network, packet, trailer: &[] }
    }

    /// Reads link and network headers and finds the packet, which is at least a BTH and an ICRC.
    ///
    /// What is in the packet, [`Frame::transport`] tells; whether it arrived whole, [`Frame::is_intact`].
    pub fn parse(link: Link, bytes: &'a [u8]) -> Result<Frame<'a>, Malformed> {
        let (ethernet, kind, rest) = match link {
            Link::Ethernet => {
                let (ethernet, rest) = Ethernet::parse(bytes)?;
                (Some(ethernet), ethernet.kind, rest)
            }
            Link::Ip => (None, ip_version(bytes)?, bytes),
            Link::Payload(kind) => (None, kind, bytes),
        };
        let (network, packet, trailer) = match kind {
            EtherType::IPV4 => {
                refuse_other_ipv4(rest)?;
                let (ip, datagram, trailer) = Ipv4::parse(rest)?;
                if ip.flags & MORE_FRAGMENTS != 0 {
                    return Err(Malformed::Field { what: "IPv4 flags", value: ip.flags.into() });
                }
                let (udp, packet) = Udp::parse(datagram)?;
                (Network::V4 { ip, udp }, packet, trailer)
            }
            EtherType::IPV6 => {
                refuse_other_ipv6(rest)?;
                let (ip, datagram, trailer) = Ipv6::parse(rest)?;
                let (udp, packet) = Udp::parse(datagram)?;
                (Network::V6 { ip, udp }, packet, trailer)
            }
            EtherType::ROCE => {
                let (grh, packet, trailer) = Grh::parse(rest)?;
                (Network::V1(grh), packet, trailer)
            }
            other => return Err(Malformed::NotRoce { what: "EtherType", value: other.0.into() }),
        };
        Icrc::split(packet)?;
        Ok(Frame { ethernet, network, packet, trailer })
    }

    /// The headers and the payload of the packet.
    pub fn transport(&self) -> Result<Transport<'a>, Malformed> {
        let (transport, _) = Icrc::split(self.packet)?;
        Transport::parse(transport)
    }

    /// The ICRC that the packet ends with.
    ///
    /// # Panics
    /// If the packet is shorter than [`Frame::parse`] lets through.
    pub fn icrc(&self) -> Icrc {
        self.split().1
    }

    /// The ICRC that it should end with.
    ///
    /// # Panics
    /// If the packet is shorter than [`Frame::parse`] lets through.
    pub fn expected_icrc(&self) -> Icrc {
        let transport = self.split().0;
        match &self.network {
            Network::V1(grh) => Icrc::compute_v1(grh, transport),
            Network::V4 { ip, .. } => Icrc::compute_with_flags(&self.known_envelope(), ip.flags, transport),
            Network::V6 { .. } => Icrc::compute(&self.known_envelope(), transport),
        }
    }

    /// Whether the ICRC is right.
    ///
    /// # Panics
    /// If the packet is shorter than [`Frame::parse`] lets through.
    pub fn is_intact(&self) -> bool {
        self.icrc() == self.expected_icrc()
    }

    fn split(&self) -> (&'a [u8], Icrc) {
        Icrc::split(self.packet).expect("a frame holds at least a BTH and an ICRC")
    }

    fn known_envelope(&self) -> Envelope {
        self.network.envelope().expect("RoCEv2 has an envelope")
    }

    /// How many bytes [`Frame::emit`] writes.
    pub fn length(&self) -> usize {
        let link = self.ethernet.map_or(0, |ethernet| ethernet.length());
        link + self.network.length() + self.packet.len() + self.trailer.len()
    }

    /// Writes the frame to the start of `bytes`, which must have room; returns its length.
    pub fn emit(&self, bytes: &mut [u8]) -> usize {
        let mut at = self.ethernet.map_or(0, |ethernet| ethernet.emit(bytes));
        at += self.network.emit(&mut bytes[at..]);
        for part in [self.packet, self.trailer] {
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

impl fmt::Display for Frame<'_> {
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

/// The two bytes at `at`, if they are there.
fn half_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2).map(|half| u16::from_be_bytes([half[0], half[1]]))
}

fn refuse_other(what: &'static str, value: u16) -> Result<(), Malformed> {
    Err(Malformed::NotRoce { what, value: value.into() })
}

/// Another protocol or port is another protocol, whatever else may be wrong with the datagram.
fn refuse_other_ipv4(bytes: &[u8]) -> Result<(), Malformed> {
    if let Some(protocol) = bytes.get(9).filter(|protocol| **protocol != Udp::PROTOCOL) {
        return refuse_other("IP protocol", (*protocol).into());
    }
    // The later fragments of a datagram show no port. RoCE senders do not fragment.
    if let Some(flags) = half_at(bytes, 6).filter(|flags| flags & FRAGMENT_OFFSET != 0) {
        return refuse_other("IPv4 fragment offset", flags & FRAGMENT_OFFSET);
    }
    let header = bytes.first().map_or(Ipv4::LEN, |first| usize::from(first & 15) * 4);
    refuse_other_port(bytes, header)
}

fn refuse_other_ipv6(bytes: &[u8]) -> Result<(), Malformed> {
    if let Some(next) = bytes.get(6).filter(|next| **next != Udp::PROTOCOL) {
        return refuse_other("IPv6 next header", (*next).into());
    }
    refuse_other_port(bytes, Ipv6::LEN)
}

fn refuse_other_port(bytes: &[u8], udp: usize) -> Result<(), Malformed> {
    match half_at(bytes, udp + 2) {
        Some(port) if port != ROCE_PORT => refuse_other("UDP port", port),
        _ => Ok(()),
    }
}
