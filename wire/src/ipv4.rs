//! The IPv4 header. Parsing rejects options: RoCE senders do not use them and the ICRC does not define them.

use crate::display::display;
use crate::malformed::header_bytes;
use crate::{AddressHeaders, Malformed, Udp};
use core::net::Ipv4Addr;

/// The IPv4 header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ipv4 {
    /// The sender.
    pub source: Ipv4Addr,
    /// The receiver or a multicast group.
    pub destination: Ipv4Addr,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// Bytes of header and payload.
    pub total_length: u16,
    /// Identifies the datagram's fragments; the ICRC covers it.
    pub identification: u16,
    /// Three flag bits and the fragment offset, in wire format.
    pub flags: u16,
    /// Time to live.
    pub hop_limit: u8,
    /// The payload protocol: 17 for UDP.
    pub protocol: u8,
    /// The header checksum. Captures show zero when the NIC fills it in later (checksum offload).
    pub checksum: u16,
}

impl Ipv4 {
    /// Bytes on the wire.
    pub const LEN: usize = 20;
    /// The flags that RoCE senders set: don't fragment, offset zero.
    pub const DONT_FRAGMENT: u16 = 0x4000;

    /// The header before a UDP header and `payload` bytes.
    ///
    /// # Panics
    /// If the addresses are not IPv4: only a bug mixes the families.
    pub fn new(addressing: &AddressHeaders, payload: usize) -> Ipv4 {
        let (core::net::IpAddr::V4(source), core::net::IpAddr::V4(destination)) =
            (addressing.source, addressing.destination)
        else {
            panic!("IPv4 header for other addresses: {addressing}");
        };
        Ipv4 {
            source,
            destination,
            traffic_class: addressing.traffic_class,
            total_length: (Self::LEN + Udp::LEN + payload) as u16,
            identification: addressing.identification,
            flags: Self::DONT_FRAGMENT,
            hop_limit: addressing.hop_limit,
            protocol: Udp::PROTOCOL,
            checksum: 0,
        }
        .with_checksum()
    }

    /// Returns this header with its checksum computed.
    pub fn with_checksum(mut self) -> Ipv4 {
        self.checksum = 0;
        let mut bytes = [0; Self::LEN];
        self.emit(&mut bytes);
        self.checksum = !ones_complement_sum(&bytes);
        self
    }

    /// Parses the header. Returns it with the payload that its length field covers and the bytes after that
    /// payload.
    pub fn parse(bytes: &[u8]) -> Result<(Ipv4, &[u8], &[u8]), Malformed> {
        let b = header_bytes::<{ Self::LEN }>(bytes, "IPv4 header")?;
        match b[0] {
            0x45 => {}
            0x46..=0x4f => {
                return Err(Malformed::Field { what: "IPv4 header length", value: (b[0] & 15).into() });
            }
            _ => return Err(Malformed::Version { what: "IPv4", version: b[0] >> 4 }),
        }
        let half = |at: usize| u16::from_be_bytes([b[at], b[at + 1]]);
        let header = Ipv4 {
            source: Ipv4Addr::new(b[12], b[13], b[14], b[15]),
            destination: Ipv4Addr::new(b[16], b[17], b[18], b[19]),
            traffic_class: b[1],
            total_length: half(2),
            identification: half(4),
            flags: half(6),
            hop_limit: b[8],
            protocol: b[9],
            checksum: half(10),
        };
        if header.checksum != 0 && ones_complement_sum(b) != 0xffff {
            return Err(Malformed::Checksum { what: "IPv4 header" });
        }
        let length = usize::from(header.total_length);
        if length < Self::LEN || length > bytes.len() {
            return Err(Malformed::Length { what: "IPv4 length", stated: length, actual: bytes.len() });
        }
        Ok((header, &bytes[Self::LEN..length], &bytes[length..]))
    }

    /// Writes the header to the start of `bytes`, which must have room.
    pub fn emit(&self, bytes: &mut [u8]) {
        let b: &mut [u8; Self::LEN] = bytes.first_chunk_mut().expect("room for an IPv4 header");
        b[0] = 0x45;
        b[1] = self.traffic_class;
        b[2..4].copy_from_slice(&self.total_length.to_be_bytes());
        b[4..6].copy_from_slice(&self.identification.to_be_bytes());
        b[6..8].copy_from_slice(&self.flags.to_be_bytes());
        b[8] = self.hop_limit;
        b[9] = self.protocol;
        b[10..12].copy_from_slice(&self.checksum.to_be_bytes());
        b[12..16].copy_from_slice(&self.source.octets());
        b[16..20].copy_from_slice(&self.destination.octets());
    }
}

fn ones_complement_sum(bytes: &[u8; Ipv4::LEN]) -> u16 {
    let halves = bytes.chunks_exact(2).map(|half| u32::from(half[0]) << 8 | u32::from(half[1]));
    let sum: u32 = halves.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

display!(Ipv4 { source, destination, traffic_class, hop_limit, identification, total_length }
    "{source} > {destination} tos={traffic_class:#04x} ttl={hop_limit} id={identification} len={total_length}");
