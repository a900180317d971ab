//! Property tests: every wire format round-trips for random bytes.

use proptest::collection::vec;
use proptest::prelude::*;
use softhca_wire::cm::{Datagram, RdmaCmHeader};
use softhca_wire::*;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A value parsed from `$bytes` is unchanged after emit and parse.
macro_rules! assert_round_trip {
    ($kind:ty, $bytes:expr) => {
        if let Ok(value) = <$kind>::parse(&$bytes) {
            let mut written = vec![0xa5; 64];
            value.emit(&mut written);
            prop_assert_eq!(<$kind>::parse(&written), Ok(value), "{}", value);
        }
    };
}

fn address() -> impl Strategy<Value = (IpAddr, IpAddr)> {
    prop_oneof![
        any::<(Ipv4Addr, Ipv4Addr)>().prop_map(|(a, b)| (a.into(), b.into())),
        any::<(Ipv6Addr, Ipv6Addr)>().prop_map(|(a, b)| (a.into(), b.into())),
    ]
}

prop_compose! {
    fn addressing()(
        (source, destination) in address(),
        source_port: u16, traffic_class: u8, label in 0..1u32 << 20, hop_limit: u8, id: u16,
    ) -> AddressHeaders {
        let (flow_label, identification) = if source.is_ipv4() { (0, id) } else { (label, 0) };
        AddressHeaders { source, destination, source_port, traffic_class, flow_label, hop_limit, identification, local: LocalRoute::NONE }
    }
}

/// A packet (BTH to ICRC) with any opcode and matching headers; its ICRC is not valid yet.
fn packet() -> impl Strategy<Value = Vec<u8>> {
    let opcodes: Vec<Opcode> = Opcode::all().collect();
    let bytes = vec(any::<u8>(), 60);
    (proptest::sample::select(opcodes), bytes, vec(any::<u8>(), 0..300), any::<u8>()).prop_map(
        |(opcode, mut bytes, payload, syndrome)| {
            bytes[0] = opcode.byte();
            bytes[1] &= 0xc0;
            bytes.truncate(opcode.header_length());
            if opcode.headers().contains(ExtendedHeaders::AETH) {
                // Another test covers reserved syndromes.
                bytes[Bth::LEN] = Syndrome::from_byte(syndrome).unwrap_or(Syndrome::ACK).byte();
            }
            if opcode.headers().contains(ExtendedHeaders::DETH) {
                bytes[Bth::LEN + 4] = 0;
            }
            if opcode.operation() == Operation::AtomicWrite {
                bytes.extend([7; 8]);
            } else if opcode.has_payload() {
                let pad = payload.len().wrapping_neg() % 4;
                bytes[1] |= (pad as u8) << 4;
                bytes.extend(payload);
                bytes.extend(vec![0x5a; pad]);
            }
            bytes.extend([0; ICRC_LEN]);
            bytes
        },
    )
}

proptest! {
    #[test]
    fn headers_round_trip(bytes in vec(any::<u8>(), 0..64)) {
        assert_round_trip!(Bth, bytes);
        assert_round_trip!(Deth, bytes);
        assert_round_trip!(Reth, bytes);
        assert_round_trip!(AtomicEth, bytes);
        assert_round_trip!(Aeth, bytes);
        assert_round_trip!(AtomicAckEth, bytes);
        assert_round_trip!(Immediate, bytes);
        assert_round_trip!(Ieth, bytes);
        assert_round_trip!(XrcEth, bytes);
        assert_round_trip!(Feth, bytes);
        assert_round_trip!(MadHeader, bytes);
        if let Ok(value) = RdmaCmHeader::parse(&bytes) {
            prop_assert_eq!(RdmaCmHeader::parse(&value.emit()), Ok(value));
        }
        if let Ok((value, rest)) = Ethernet::parse(&bytes) {
            let mut written = bytes.clone();
            let length = value.emit(&mut written);
            prop_assert_eq!(&written, &bytes);
            prop_assert_eq!(&bytes[length..], rest);
        }
    }

    #[test]
    fn packets_with_every_opcode_round_trip_in_frames(addressing in addressing(), mut packet in packet()) {
        Icrc::write(&addressing, &mut packet);
        let bytes = RoceFrame::new(&addressing, &packet).to_vec();
        let frame = RoceFrame::parse(FirstHeader::Ethernet, &bytes).expect("a frame");
        prop_assert_eq!(frame.network.addressing(), Some(addressing));
        prop_assert_eq!(frame.packet, &packet[..]);
        prop_assert!(frame.icrc_is_valid());
        prop_assert_eq!(frame.to_vec(), &bytes[..]);

        let transport = frame.transport().expect("a transport packet");
        let mut written = vec![0; transport.len()];
        prop_assert_eq!(transport.emit(&mut written), written.len());
        prop_assert_eq!(&written, &packet[..packet.len() - ICRC_LEN]);

        for length in 0..bytes.len() {
            prop_assert!(RoceFrame::parse(FirstHeader::Ethernet, &bytes[..length]).is_err());
        }
    }

    #[test]
    fn flipped_bit_is_detected(addressing in addressing(), mut packet in packet(), at: proptest::sample::Index) {
        Icrc::write(&addressing, &mut packet);
        let bit = at.index(packet.len() * 8);
        packet[bit / 8] ^= 1 << (bit % 8);
        let masked = bit / 8 == 4;
        prop_assert_eq!(Icrc::verify(&addressing, &packet), masked);
    }

    #[test]
    fn identification_is_recovered(mut addressing in addressing(), mut packet in packet(), guess: u16) {
        Icrc::write(&addressing, &mut packet);
        let right = addressing.identification;
        addressing.identification = guess;
        let found = Icrc::recover_identification(&addressing, &packet, 1 << 16);
        prop_assert_eq!(found, Some(if addressing.source.is_ipv4() { right } else { guess }));
    }

    #[test]
    fn management_datagrams_round_trip(attribute in 0x10..0x1bu8, bytes in vec(any::<u8>(), 256)) {
        let mut bytes = bytes;
        bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
        bytes[16..18].copy_from_slice(&[0, attribute]);
        if let Ok(datagram) = Datagram::parse(&bytes) {
            let written = datagram.emit();
            prop_assert_eq!(Datagram::parse(&written), Ok(datagram));
            prop_assert!(!datagram.to_string().contains('\n'));
        } else {
            // Only the length of the additional information can be invalid here.
            prop_assert!([0x12, 0x18, 0x1a].contains(&attribute));
        }
        prop_assert!(Datagram::parse(&bytes[..255]).is_err());
        bytes.push(0);
        prop_assert!(Datagram::parse(&bytes).is_err());
    }

    #[test]
    fn pfc_frames_round_trip(source: [u8; 6], pause: [Option<u16>; 8]) {
        let frame = Pfc { source: MacAddress(source), pause };
        prop_assert_eq!(Pfc::parse(&frame.emit()), Ok(frame));
    }

    #[test]
    fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..200), kind: u16) {
        for link in [FirstHeader::Ethernet, FirstHeader::Ip, FirstHeader::Payload(EtherType::ROCE), FirstHeader::Payload(EtherType(kind))] {
            if let Ok(frame) = RoceFrame::parse(link, &bytes) {
                prop_assert_eq!(frame.to_vec(), &bytes[..]);
                let _ = (frame.icrc_is_valid(), frame.to_string());
            }
        }
        let _ = (TransportPacket::parse(&bytes), Pfc::parse(&bytes), Datagram::parse(&bytes));
    }

    #[test]
    fn psn_arithmetic_wraps(a in 0..Psn::SPACE, count in 0..Psn::SPACE) {
        let first = Psn::new(a);
        let later = first.plus(count);
        prop_assert_eq!(later.minus(count), first);
        prop_assert_eq!(later.since(first), count);
        prop_assert_eq!(first.plus(Psn::SPACE), first);
        let ahead = count != 0 && count < Psn::SPACE / 2;
        prop_assert_eq!(first.is_before(later), ahead || count == Psn::SPACE / 2 && later.is_before(first));
        prop_assert_eq!(later.is_within(first, count), false);
        prop_assert_eq!(first.plus(later.distance(first) as u32), later);
    }
}
