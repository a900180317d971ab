//! The IPv6 header. Extension headers appear as another next-header value and are left to the caller.

use crate::display::display;
use crate::malformed::header_bytes;
use crate::{AddressHeaders, Malformed, Udp};
use core::net::{IpAddr, Ipv6Addr};

/// The IPv6 header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ipv6 {
    /// The sender.
    pub source: Ipv6Addr,
    /// The receiver or a multicast group.
    pub destination: Ipv6Addr,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// The flow label, 20 bits.
    pub flow_label: u32,
    /// Bytes after this header.
    pub payload_length: u16,
    /// The payload protocol: 17 for UDP.
    pub next_header: u8,
    /// Time to live.
    pub hop_limit: u8,
}

impl Ipv6 {
    /// Bytes on the wire.
    pub const LEN: usize = 40;

    /// The header before a UDP header and `payload` bytes.
    ///
    /// # Panics
    /// If the addresses are not IPv6: only a bug mixes the families.
    pub fn new(addressing: &AddressHeaders, payload: usize) -> Ipv6 {
        let (IpAddr::V6(source), IpAddr::V6(destination)) = (addressing.source, addressing.destination)
        else {
            panic!("IPv6 header for other addresses: {addressing}");
        };
        Ipv6 {
            source,
            destination,
            traffic_class: addressing.traffic_class,
            flow_label: addressing.flow_label & 0xf_ffff,
            payload_length: (Udp::LEN + payload) as u16,
            next_header: Udp::PROTOCOL,
            hop_limit: addressing.hop_limit,
        }
    }

    /// Parses the header. Returns it with the payload that its length field covers and the bytes after that
    /// payload.
    pub fn parse(bytes: &[u8]) -> Result<(Ipv6, &[u8], &[u8]), Malformed> {
        let header = Ipv6::parse_header(header_bytes(bytes, "IPv6 header")?, "IPv6")?;
        let (payload, padding) = header.split_payload(bytes, "IPv6 payload")?;
        Ok((header, payload, padding))
    }

    /// Parses the header alone, which is called `what` in errors.
    pub(crate) fn parse_header(b: &[u8; Self::LEN], what: &'static str) -> Result<Ipv6, Malformed> {
        let first = u32::from_be_bytes([b[0], b[1], b[2], b[3]]);
        if first >> 28 != 6 {
            return Err(Malformed::Version { what, version: (first >> 28) as u8 });
        }
        let address = |at: usize| {
            let octets: [u8; 16] = b[at..at + 16].try_into().expect("sixteen bytes");
            Ipv6Addr::from(octets)
        };
        Ok(Ipv6 {
            source: address(8),
            destination: address(24),
            traffic_class: (first >> 20) as u8,
            flow_label: first & 0xf_ffff,
            payload_length: u16::from_be_bytes([b[4], b[5]]),
            next_header: b[6],
            hop_limit: b[7],
        })
    }

    /// The payload of a packet with this header, and the bytes after it.
    pub(crate) fn split_payload<'a>(
        &self,
        packet: &'a [u8],
        what: &'static str,
    ) -> Result<(&'a [u8], &'a [u8]), Malformed> {
        let (stated, rest) = (usize::from(self.payload_length), &packet[Self::LEN..]);
        rest.split_at_checked(stated).ok_or(Malformed::Length { what, stated, actual: rest.len() })
    }

    /// Writes the header to the start of `bytes`, which must have room.
    pub fn emit(&self, bytes: &mut [u8]) {
        let b: &mut [u8; Self::LEN] = bytes.first_chunk_mut().expect("room for an IPv6 header");
        let first = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label & 0xf_ffff;
        b[..4].copy_from_slice(&first.to_be_bytes());
        b[4..6].copy_from_slice(&self.payload_length.to_be_bytes());
        b[6] = self.next_header;
        b[7] = self.hop_limit;
        b[8..24].copy_from_slice(&self.source.octets());
        b[24..40].copy_from_slice(&self.destination.octets());
    }
}

display!(Ipv6 { source, destination, traffic_class, hop_limit, flow_label, payload_length }
    "{source} > {destination} class={traffic_class:#04x} hops={hop_limit} flow={flow_label:#x} len={payload_length}");
