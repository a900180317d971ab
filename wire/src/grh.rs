//! The global route header (GRH): part of a RoCE v1 packet, and the first 40 bytes that a UD receive
//! delivers.

use crate::malformed::header_bytes;
use crate::{AddressHeaders, Gid, Ipv4, Ipv6, Malformed};
use core::fmt;
use core::net::IpAddr;

/// The GRH of RoCE v1 and of InfiniBand.
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
        let ipv6 = Ipv6::parse_header(header_bytes(bytes, "GRH")?, "GRH")?;
        if ipv6.next_header != Self::NEXT_HEADER {
            return Err(Malformed::Field { what: "GRH next header", value: ipv6.next_header.into() });
        }
        let (payload, padding) = ipv6.split_payload(bytes, "GRH payload")?;
        let Ipv6 { source, destination, traffic_class, flow_label, payload_length, hop_limit, .. } = ipv6;
        let [source, destination] = [source, destination].map(|address| Gid(address.octets()));
        let header = Grh { source, destination, traffic_class, flow_label, payload_length, hop_limit };
        Ok((header, payload, padding))
    }

    /// The IPv6 header with the same bytes.
    fn ipv6(&self) -> Ipv6 {
        let Grh { source, destination, traffic_class, flow_label, payload_length, hop_limit } = *self;
        let [source, destination] = [source, destination].map(|gid| gid.0.into());
        let next_header = Self::NEXT_HEADER;
        Ipv6 { source, destination, traffic_class, flow_label, payload_length, next_header, hop_limit }
    }

    /// Writes the header to the start of `bytes`, which must have room.
    pub fn emit(&self, bytes: &mut [u8]) {
        self.ipv6().emit(bytes);
    }

    /// The 40 bytes that a UD receive delivers before the payload: the GRH of InfiniBand, or zeros without one. In RoCEv2,
    /// the IPv6 header, or 20 zero bytes and the IPv4 header. `packet` is the length from the BTH to the ICRC.
    pub fn for_ud_receive(addressing: &AddressHeaders, packet: usize) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        match addressing.source {
            _ if addressing.local.exists() => {
                if let Some(grh) = addressing.grh(packet) {
                    grh.emit(&mut bytes);
                }
            }
            IpAddr::V4(_) => Ipv4::new(addressing, packet).emit(&mut bytes[Self::LEN - Ipv4::LEN..]),
            IpAddr::V6(_) => Ipv6::new(addressing, packet).emit(&mut bytes),
        }
        bytes
    }
}

impl fmt::Display for Grh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ipv6().fmt(f)
    }
}
