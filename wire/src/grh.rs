//! The global route header (GRH): part of a RoCE v1 packet, and the first 40 bytes that a UD receive
//! delivers.

use crate::malformed::header_bytes;
use crate::{AddressHeaders, Gid, Ipv4, Ipv6, Malformed};
use core::fmt;
use core::net::IpAddr;

/// The GRH of RoCE v1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grh {
    /// The sender.
    pub source: Gid,
    /// The receiver or a multicast group.
    pub destination: Gid,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// The flow label, 20 bits.
    pub flow_label: u32,
    /// Bytes after this header, including the ICRC.
    pub payload_length: u16,
    /// Time to live.
    pub hop_limit: u8,
}

impl Grh {
    /// Bytes on the wire.
    pub const LEN: usize = 40;
    /// The next-header value for a BTH.
    pub const NEXT_HEADER: u8 = 0x1b;

    /// Parses the header. Returns it with the payload that its length field covers and the bytes after that
    /// payload.
    pub fn parse(bytes: &[u8]) -> Result<(Grh, &[u8], &[u8]), Malformed> {
        let b = header_bytes::<{ Self::LEN }>(bytes, "GRH")?;
        let first = u32::from_be_bytes([b[0], b[1], b[2], b[3]]);
        if first >> 28 != 6 {
            return Err(Malformed::Version { what: "GRH", version: (first >> 28) as u8 });
        }
        if b[6] != Self::NEXT_HEADER {
            return Err(Malformed::Field { what: "GRH next header", value: b[6].into() });
        }
        let gid = |at: usize| Gid(b[at..at + 16].try_into().expect("sixteen bytes"));
        let header = Grh {
            source: gid(8),
            destination: gid(24),
            traffic_class: (first >> 20) as u8,
            flow_label: first & 0xf_ffff,
            payload_length: u16::from_be_bytes([b[4], b[5]]),
            hop_limit: b[7],
        };
        let length = usize::from(header.payload_length);
        let rest = &bytes[Self::LEN..];
        match rest.split_at_checked(length) {
            Some((payload, padding)) => Ok((header, payload, padding)),
            None => Err(Malformed::Length { what: "GRH payload", stated: length, actual: rest.len() }),
        }
    }

    /// Writes the header to the start of `bytes`, which must have room.
    pub fn emit(&self, bytes: &mut [u8]) {
        let b: &mut [u8; Self::LEN] = bytes.first_chunk_mut().expect("room for a GRH");
        let first = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow_label & 0xf_ffff;
        b[..4].copy_from_slice(&first.to_be_bytes());
        b[4..6].copy_from_slice(&self.payload_length.to_be_bytes());
        b[6] = Self::NEXT_HEADER;
        b[7] = self.hop_limit;
        b[8..24].copy_from_slice(&self.source.0);
        b[24..40].copy_from_slice(&self.destination.0);
    }

    /// The 40 bytes that a UD receive delivers before the payload in RoCEv2: the IPv6 header, or 20 zero
    /// bytes and the IPv4 header. `packet` is the length from the BTH to the ICRC.
    pub fn for_ud_receive(addressing: &AddressHeaders, packet: usize) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        match addressing.source {
            IpAddr::V4(_) => Ipv4::new(addressing, packet).emit(&mut bytes[Self::LEN - Ipv4::LEN..]),
            IpAddr::V6(_) => Ipv6::new(addressing, packet).emit(&mut bytes),
        }
        bytes
    }
}

impl fmt::Display for Grh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} > {} class={:#04x} hops={} flow={:#x} len={}",
            self.source,
            self.destination,
            self.traffic_class,
            self.hop_limit,
            self.flow_label,
            self.payload_length
        )
    }
}
