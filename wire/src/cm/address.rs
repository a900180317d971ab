//! The RDMA CM's encoding of IP addresses and ports in CM messages.

use crate::Malformed;
use crate::layout::number_field;
use crate::malformed::header_bytes;
use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

crate::named_enum! {
    /// RDMA port spaces (`RDMA_PS_*`).
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[repr(u16)]
    pub enum PortSpace {
        /// IP over InfiniBand datagrams.
        IpOverIb = 0x0002 => "ipoib",
        /// Connected services.
        Tcp = 0x0106 => "tcp",
        /// Datagram services.
        Udp = 0x0111 => "udp",
        /// Any service, with native service IDs.
        Ib = 0x013f => "ib",
    }
}

/// A service ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ServiceId(pub u64);

impl ServiceId {
    /// The service ID of a port.
    pub const fn new(space: PortSpace, port: u16) -> ServiceId {
        ServiceId((space as u64) << 16 | port as u64)
    }

    /// The port space, if the service ID belongs to the RDMA CM.
    pub fn port_space(self) -> Option<PortSpace> {
        PortSpace::ALL.into_iter().find(|space| *space as u64 == self.0 >> 16)
    }

    /// The port: the lower 16 bits.
    pub const fn port(self) -> u16 {
        self.0 as u16
    }
}

impl fmt::Display for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port_space() {
            Some(space) => write!(f, "{}/{}", space.name(), self.port()),
            None => write!(f, "{:#018x}", self.0),
        }
    }
}

number_field! { ServiceId, 64, ServiceId, |n: ServiceId| n.0; }

/// The RDMA CM header: the addresses before the user's private data of a REQ or SIDR_REQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RdmaCmHeader {
    /// The active side; same address family as `destination`.
    pub source: IpAddr,
    /// The active side's port.
    pub source_port: u16,
    /// The passive side; the service ID has its port.
    pub destination: IpAddr,
}

impl RdmaCmHeader {
    /// Bytes on the wire; the user's private data follows.
    pub const LEN: usize = 36;

    /// Parses the header at the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<RdmaCmHeader, Malformed> {
        let b = header_bytes::<{ Self::LEN }>(bytes, "RDMA CM header")?;
        if b[0] != 0 {
            return Err(Malformed::Version { what: "RDMA CM", version: b[0] });
        }
        let address = |at: usize| -> Result<IpAddr, Malformed> {
            let octets: [u8; 16] = b[at..at + 16].try_into().expect("sixteen bytes");
            match b[1] >> 4 {
                4 => Ok(Ipv4Addr::new(octets[12], octets[13], octets[14], octets[15]).into()),
                6 => Ok(Ipv6Addr::from(octets).into()),
                version => Err(Malformed::Version { what: "RDMA CM IP", version }),
            }
        };
        Ok(RdmaCmHeader {
            source: address(4)?,
            source_port: u16::from_be_bytes([b[2], b[3]]),
            destination: address(20)?,
        })
    }

    /// The header's bytes.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[2..4].copy_from_slice(&self.source_port.to_be_bytes());
        for (at, address) in [(4, self.source), (20, self.destination)] {
            match address {
                IpAddr::V4(v4) => {
                    bytes[1] = 4 << 4;
                    bytes[at + 12..at + 16].copy_from_slice(&v4.octets());
                }
                IpAddr::V6(v6) => {
                    bytes[1] = 6 << 4;
                    bytes[at..at + 16].copy_from_slice(&v6.octets());
                }
            }
        }
        bytes
    }
}

impl fmt::Display for RdmaCmHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} > {}", SocketAddr::new(self.source, self.source_port), self.destination)
    }
}
