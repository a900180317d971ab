//! A packet on an InfiniBand link: LRH, GRH if it has one, and from the BTH to the VCRC.

use crate::{Bth, Grh, ICRC_LEN, Icrc, Lrh, Malformed, TransportPacket, VCRC_LEN, Vcrc};
use alloc::vec::Vec;
use core::fmt;

/// An InfiniBand packet whose VCRC is correct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalPacket<'a> {
    /// The local route header.
    pub lrh: Lrh,
    /// The global route header of a packet that has one.
    pub grh: Option<Grh>,
    /// The packet, from the BTH to the ICRC.
    pub packet: &'a [u8],
}

impl<'a> LocalPacket<'a> {
    /// Parses the headers of a packet that fills `bytes`, and checks its lengths and its VCRC.
    ///
    /// [`LocalPacket::transport`] parses the rest; [`LocalPacket::icrc_is_valid`] checks the ICRC.
    pub fn parse(bytes: &'a [u8]) -> Result<LocalPacket<'a>, Malformed> {
        let lrh = Lrh::parse(bytes)?;
        let (covered, vcrc) = bytes.split_last_chunk::<VCRC_LEN>().expect("an LRH is longer");
        let stated = usize::from(lrh.words) * 4;
        if stated != covered.len() {
            return Err(Malformed::Length { what: "LRH packet", stated, actual: covered.len() });
        }
        if Vcrc::compute(covered) != Vcrc(*vcrc) {
            return Err(Malformed::Checksum { what: "VCRC" });
        }
        let rest = &covered[Lrh::LEN..];
        let (grh, packet) = match lrh.has_grh {
            false => (None, rest),
            true => {
                let (grh, packet, padding) = Grh::parse(rest)?;
                let (stated, actual) = (packet.len(), rest.len() - Grh::LEN);
                if !padding.is_empty() {
                    return Err(Malformed::Length { what: "GRH payload", stated, actual });
                }
                (Some(grh), packet)
            }
        };
        Icrc::split(packet)?;
        Ok(LocalPacket { lrh, grh, packet })
    }

    /// Writes a packet around `transport`, which goes from the BTH to the pad bytes, behind the contents of `bytes`. The
    /// lengths in the headers are those of the packet.
    ///
    /// # Errors
    /// If the packet exceeds the longest one, or its length is no multiple of four.
    pub fn emit(
        lrh: &Lrh,
        grh: Option<&Grh>,
        transport: &[u8],
        bytes: &mut Vec<u8>,
    ) -> Result<(), Malformed> {
        let length = transport.len() + ICRC_LEN;
        let whole = Lrh::packet_length(grh.is_some(), length);
        if whole > Lrh::MAX_PACKET || !whole.is_multiple_of(4) || transport.len() < Bth::LEN {
            return Err(Malformed::Field { what: "packet length", value: whole as u64 });
        }
        let lrh = Lrh { has_grh: grh.is_some(), words: (whole / 4) as u16, ..*lrh };
        let grh = grh.map(|grh| Grh { payload_length: length as u16, ..*grh });
        let start = bytes.len();
        bytes.reserve(whole + VCRC_LEN);
        bytes.extend(lrh.emit());
        if let Some(grh) = &grh {
            let mut header = [0; Grh::LEN];
            grh.emit(&mut header);
            bytes.extend(header);
        }
        bytes.extend(transport);
        bytes.extend(Icrc::compute_local(&lrh, grh.as_ref(), transport).0);
        bytes.extend(Vcrc::compute(&bytes[start..]).0);
        Ok(())
    }

    /// The headers and the payload of the packet.
    pub fn transport(&self) -> Result<TransportPacket<'a>, Malformed> {
        TransportPacket::parse(Icrc::split(self.packet)?.0)
    }

    /// Whether the ICRC is correct.
    pub fn icrc_is_valid(&self) -> bool {
        Icrc::split(self.packet).is_ok_and(|(transport, icrc)| {
            Icrc::compute_local(&self.lrh, self.grh.as_ref(), transport) == icrc
        })
    }
}

impl fmt::Display for LocalPacket<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.lrh)?;
        match self.transport() {
            Ok(transport) => write!(f, "{transport}"),
            Err(reason) => write!(f, "malformed: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Gid;
    use crate::smp::Lid;
    use alloc::string::ToString;
    use proptest::prelude::*;

    /// The example of a local packet in the specification (IBA 7.8.4), whose ICRC it prints.
    const LOCAL: [u8; 56] = [
        0x70, 0x12, 0x37, 0x5c, 0x00, 0x0e, 0x17, 0xd2, 0x0a, 0x20, 0x24, 0x87, 0x00, 0x87, 0xb1, 0xb3, 0x00,
        0x0d, 0xec, 0x2a, 0x01, 0x71, 0x0a, 0x1c, 0x01, 0x5d, 0x40, 0x02, 0x38, 0xf2, 0x7a, 0x05, 0x00, 0x00,
        0x00, 0x0e, 0xbb, 0x88, 0x4d, 0x85, 0xfd, 0x5c, 0xfb, 0xa4, 0x72, 0x8b, 0xc0, 0x69, 0x0e, 0xd4, 0x00,
        0x00, 0x96, 0x25, 0xb7, 0x5a,
    ];

    #[test]
    fn the_example_of_the_specification_has_its_icrc() {
        let whole = [&LOCAL[..], &Vcrc::compute(&LOCAL).0].concat();
        let packet = LocalPacket::parse(&whole).expect("a packet");
        assert!(packet.icrc_is_valid());
        let Lrh { virtual_lane, service_level, has_grh, dlid, slid, words } = packet.lrh;
        assert_eq!((virtual_lane, service_level, has_grh), (7, 1, false));
        assert_eq!((dlid, slid, words), (Lid(0x375c), Lid(0x17d2), 14));
        assert_eq!(packet.transport().expect("a WRITE").payload.len(), 14);
        assert_eq!(whole[56..], [0x45, 0xfa]);
        let mut written = Vec::new();
        LocalPacket::emit(&packet.lrh, None, &LOCAL[8..52], &mut written).expect("it fits");
        assert_eq!(written, whole);
        // Switches change the virtual lane, which only the VCRC covers.
        let mut changed = Vec::new();
        LocalPacket::emit(&Lrh { virtual_lane: 3, ..packet.lrh }, None, &LOCAL[8..52], &mut changed)
            .expect("it fits");
        assert_eq!(changed[1..56], whole[1..56]);
        assert_ne!(changed[56..], whole[56..]);
    }

    #[test]
    fn impossible_headers_are_refused_with_their_reason() {
        let with = |change: &dyn Fn(&mut [u8])| {
            let mut bytes = LOCAL.to_vec();
            change(&mut bytes);
            let vcrc = Vcrc::compute(&bytes);
            bytes.extend(vcrc.0);
            LocalPacket::parse(&bytes).err().map(|reason| reason.to_string()).unwrap_or_default()
        };
        assert_eq!(with(&|_| {}), "");
        assert_eq!(with(&|bytes| bytes[0] |= 1), "LRH link version 1 is not supported");
        assert_eq!(with(&|bytes| bytes[1] &= !2), "LRH link next header has invalid value 0x0");
        assert_eq!(with(&|bytes| bytes[5] = 13), "LRH packet: stated 52 bytes, found 56");
        assert_eq!(with(&|bytes| bytes[5] = 5), "LRH packet: stated 20 bytes, found 24");
        assert_eq!(with(&|bytes| bytes[4] = 8), "reserved bits of the LRH has invalid value 0x8");
        assert_eq!(with(&|bytes| bytes[1] |= 3), "LRH packet: stated 56 bytes, found 64");
        let whole = [&LOCAL[..], &[0, 0]].concat();
        assert_eq!(LocalPacket::parse(&whole), Err(Malformed::Checksum { what: "VCRC" }));
        assert!(LocalPacket::parse(&whole[..7]).is_err());
        let long = alloc::vec![0; Lrh::MAX_PACKET - Lrh::LEN];
        assert!(LocalPacket::emit(&Lrh::default(), None, &long, &mut Vec::new()).is_err());
        assert!(LocalPacket::emit(&Lrh::default(), None, &long[..13], &mut Vec::new()).is_err());
    }

    proptest! {
        #[test]
        fn what_is_written_is_parsed(
            (virtual_lane, service_level) in (0u8..16, 0u8..16),
            (dlid, slid) in any::<(u16, u16)>(),
            route in proptest::option::of(any::<([u8; 16], [u8; 16], u8, u8)>()),
            words in 3usize..300,
            seed in any::<u8>(),
        ) {
            let lrh = Lrh { virtual_lane, service_level, dlid: Lid(dlid), slid: Lid(slid), ..Lrh::default() };
            let grh = route.map(|(source, destination, traffic_class, hop_limit)| Grh {
                source: Gid(source), destination: Gid(destination), traffic_class, hop_limit,
                flow_label: u32::from(dlid), payload_length: 0,
            });
            let transport: Vec<u8> = (0..words * 4).map(|index| seed.wrapping_mul(index as u8)).collect();
            let mut bytes = Vec::new();
            LocalPacket::emit(&lrh, grh.as_ref(), &transport, &mut bytes).expect("it fits");
            let parsed = LocalPacket::parse(&bytes).expect("it was just written");
            prop_assert!(parsed.icrc_is_valid());
            prop_assert_eq!(&parsed.packet[..transport.len()], &transport[..]);
            prop_assert_eq!((parsed.lrh.dlid, parsed.lrh.slid), (lrh.dlid, lrh.slid));
            prop_assert_eq!(parsed.grh.map(|grh| grh.destination), grh.map(|grh| grh.destination));
            // Any change is found, by the VCRC at the latest.
            let at = usize::from(seed) % bytes.len();
            bytes[at] ^= 0x10;
            prop_assert!(LocalPacket::parse(&bytes).is_err());
        }
    }
}
