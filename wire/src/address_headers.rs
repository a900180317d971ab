//! The fields of the headers before a transport packet, independent of the code that builds them: IP and UDP of RoCE, LRH
//! and GRH of InfiniBand.

use crate::display::{debug_as_display, display};
use crate::smp::Lid;
use crate::{Grh, Lrh};
use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A global identifier. In RoCEv2 it is an IPv6 address or an IPv4-mapped IPv6 address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Gid(pub [u8; 16]);

/// The first twelve bytes of [`Gid::link_local`].
const LINK_LOCAL_ALIAS: [u8; 12] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0x5e, 0xfe];

impl Gid {
    /// The IP address that packets carry. For [`Gid::link_local`], this is the IPv4 address.
    pub fn ip(self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        match v6.to_ipv4_mapped().or_else(|| self.embedded_ipv4()) {
            Some(v4) => IpAddr::V4(v4),
            None => IpAddr::V6(v6),
        }
    }

    /// A link-local GID of the card with this IPv4 address, for a card without an IPv6 address to bind. It is an alias
    /// with the IPv4 address in its interface identifier, as in RFC 5214 (fe80::5efe:192.0.2.1). Packets travel as
    /// IPv4.
    pub fn link_local(address: Ipv4Addr) -> Gid {
        let mut gid = [0; 16];
        gid[..12].copy_from_slice(&LINK_LOCAL_ALIAS);
        gid[12..].copy_from_slice(&address.octets());
        Gid(gid)
    }

    /// The GID table of a card with this address alone: the address and, for IPv4, the link-local alias.
    pub fn table(address: IpAddr) -> alloc::vec::Vec<Gid> {
        let alias = match address {
            IpAddr::V4(v4) => Some(Gid::link_local(v4)),
            IpAddr::V6(_) => None,
        };
        core::iter::once(Gid::from(address)).chain(alias).collect()
    }

    /// The group in whose place cards with IPv4 addresses use this IPv6 group: one in 239.0.0.0/8, by a hash. Packets
    /// travel as IPv4.
    pub fn ipv4_group(self) -> Gid {
        // FNV-1a.
        let hash = self
            .0
            .iter()
            .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
        let [_, a, b, c] = hash.to_be_bytes();
        Gid::from(IpAddr::from([239, a, b, c]))
    }

    fn embedded_ipv4(self) -> Option<Ipv4Addr> {
        let (prefix, address) = self.0.split_at(12);
        let address: [u8; 4] = address.try_into().expect("four bytes");
        (prefix == LINK_LOCAL_ALIAS).then(|| address.into())
    }

    /// Whether this is a multicast group.
    pub fn is_multicast(self) -> bool {
        self.ip().is_multicast()
    }

    /// The node GUID of the card with this address: a locally administered EUI-64.
    pub fn guid(self) -> u64 {
        let low = u64::from_be_bytes(self.0[8..].try_into().expect("eight bytes"));
        0x0200_0000_0000_0000 | low & 0x00ff_ffff_ffff_ffff
    }

    /// Whether every byte is zero: an unused table entry.
    pub fn is_unspecified(self) -> bool {
        self.0 == [0; 16]
    }
}

impl From<IpAddr> for Gid {
    fn from(address: IpAddr) -> Gid {
        match address {
            IpAddr::V4(v4) => Gid(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Gid(v6.octets()),
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

debug_as_display!(Gid);

crate::named_enum! {
    /// The ECN codepoint, the low two bits of a traffic class.
    #[repr(u8)]
    pub enum Ecn {
        /// Not ECN-capable: the transport ignores congestion marks.
        NotEct = 0 => "not-ect",
        /// ECN-capable, ECT(1).
        Ect1 = 1 => "ect1",
        /// ECN-capable, ECT(0).
        Ect0 = 2 => "ect0",
        /// Marked by a switch.
        CongestionExperienced = 3 => "ce",
    }
}

impl Ecn {
    /// The codepoint in this traffic class.
    pub const fn of(traffic_class: u8) -> Ecn {
        match traffic_class & 3 {
            0 => Ecn::NotEct,
            1 => Ecn::Ect1,
            2 => Ecn::Ect0,
            _ => Ecn::CongestionExperienced,
        }
    }
}

/// The first eight bytes of the addresses that stand for LIDs: nothing is ever sent to this prefix (RFC 6666).
const LID_PREFIX: u64 = 0x0100 << 48;

/// The fields of a local route header that its sender chooses. All are zero in RoCE packets.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct LocalRoute {
    /// The source.
    pub slid: Lid,
    /// The destination.
    pub dlid: Lid,
    /// The service level.
    pub service_level: u8,
}

impl LocalRoute {
    /// The route of a RoCE packet, which has none.
    pub const NONE: LocalRoute = LocalRoute { slid: Lid(0), dlid: Lid(0), service_level: 0 };

    /// Whether the packet has a local route: it is an InfiniBand packet.
    pub const fn exists(&self) -> bool {
        self.dlid.0 != 0
    }

    /// The address that stands for a LID where a packet has no GRH, such as `100::5`.
    pub fn address(lid: Lid) -> IpAddr {
        IpAddr::V6(Ipv6Addr::from_bits(u128::from(LID_PREFIX) << 64 | u128::from(lid.0)))
    }
}

/// All fields of the headers before the BTH that the sender chooses: IP and UDP, or LRH and GRH.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddressHeaders {
    /// The sender; same address family as `destination`.
    pub source: IpAddr,
    /// The receiver or a multicast group.
    pub destination: IpAddr,
    /// Identifies the flow for ECMP. The destination port is 4791.
    pub source_port: u16,
    /// DSCP in the upper six bits, ECN in the lower two.
    pub traffic_class: u8,
    /// IPv6 only, 20 bits.
    pub flow_label: u32,
    /// Time to live.
    pub hop_limit: u8,
    /// IPv4 only. The ICRC covers it, so the code that writes the ICRC must know it.
    pub identification: u16,
    /// InfiniBand only.
    pub local: LocalRoute,
}

impl AddressHeaders {
    /// Headers between two addresses with default values in all other fields.
    pub const fn between(source: IpAddr, destination: IpAddr) -> AddressHeaders {
        AddressHeaders {
            source,
            destination,
            source_port: crate::ROCE_PORT,
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
            identification: 0,
            local: LocalRoute::NONE,
        }
    }

    /// The headers of an InfiniBand packet. Without a GRH, addresses stand for the LIDs.
    pub fn routed(local: LocalRoute, grh: Option<&Grh>) -> AddressHeaders {
        match grh {
            Some(grh) => AddressHeaders {
                traffic_class: grh.traffic_class,
                flow_label: grh.flow_label,
                hop_limit: grh.hop_limit,
                local,
                ..AddressHeaders::between(
                    IpAddr::V6(grh.source.0.into()),
                    IpAddr::V6(grh.destination.0.into()),
                )
            },
            None => AddressHeaders {
                hop_limit: 0,
                local,
                ..AddressHeaders::between(LocalRoute::address(local.slid), LocalRoute::address(local.dlid))
            },
        }
    }

    /// The local route header of an InfiniBand packet, without its lengths.
    pub fn lrh(&self) -> Lrh {
        let LocalRoute { slid, dlid, service_level } = self.local;
        Lrh { slid, dlid, service_level, ..Lrh::default() }
    }

    /// The global route header of an InfiniBand packet that has one, before so many bytes.
    pub fn grh(&self, payload: usize) -> Option<Grh> {
        let (IpAddr::V6(source), IpAddr::V6(destination)) = (self.source, self.destination) else {
            return None;
        };
        let is_global = self.local.exists() && self.source != LocalRoute::address(self.local.slid);
        is_global.then(|| Grh {
            source: Gid(source.octets()),
            destination: Gid(destination.octets()),
            traffic_class: self.traffic_class,
            flow_label: self.flow_label & 0xf_ffff,
            payload_length: payload as u16,
            hop_limit: self.hop_limit,
        })
    }

    /// The ECN codepoint.
    pub const fn ecn(&self) -> Ecn {
        Ecn::of(self.traffic_class)
    }

    /// Bytes of IP and UDP headers.
    pub const fn header_length(&self) -> usize {
        match self.source {
            IpAddr::V4(_) => 28,
            IpAddr::V6(_) => 48,
        }
    }
}

display!(AddressHeaders { source, destination } "{source} > {destination}");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infiniband_headers_are_those_of_the_packet() {
        let local = LocalRoute { slid: Lid(4), dlid: Lid(9), service_level: 3 };
        let headers = AddressHeaders::routed(local, None);
        assert_eq!(alloc::format!("{headers}"), "100::4 > 100::9");
        assert_eq!(headers.grh(100), None);
        let lrh = headers.lrh();
        assert_eq!((lrh.slid, lrh.dlid, lrh.service_level), (Lid(4), Lid(9), 3));
        let [source, destination] =
            [1, 2].map(|last| Gid(Ipv6Addr::from_bits(0xfe80 << 112 | last).octets()));
        let (flow_label, hop_limit) = (0x12345, 64);
        let grh = Grh { source, destination, traffic_class: 8, flow_label, payload_length: 100, hop_limit };
        let headers = AddressHeaders::routed(local, Some(&grh));
        assert_eq!(headers.grh(100), Some(grh));
        assert_eq!(AddressHeaders::between(headers.source, headers.destination).grh(100), None);
    }

    #[test]
    fn an_ipv6_group_has_an_ipv4_group_in_its_place() {
        let [one, other] = ["ff01::2c9:8500:0:1", "ff01::2c9:8500:0:2"]
            .map(|text| Gid::from(text.parse::<IpAddr>().unwrap()).ipv4_group());
        assert!(one.is_multicast() && one.ip().is_ipv4() && one != other);
    }

    #[test]
    fn the_link_local_alias_stands_for_the_ipv4_address() {
        let address = IpAddr::from([127, 0, 0, 3]);
        let [mapped, alias] = Gid::table(address).try_into().unwrap();
        assert_eq!(mapped, Gid::from(address));
        assert_eq!(alloc::format!("{alias}"), "fe80::5efe:7f00:3");
        assert_eq!([mapped.ip(), alias.ip()], [address; 2]);
        let other: IpAddr = "fe80::1".parse().unwrap();
        assert_eq!(Gid::table(other), [Gid::from(other)]);
        assert_eq!(Gid::from(other).ip(), other);
    }
}
