use super::*;
use crate::MadHeader;
use alloc::format;
use proptest::prelude::*;

fn block() -> impl Strategy<Value = Block> {
    prop::collection::vec(any::<u8>(), Block::LEN)
        .prop_map(|bytes| Block(bytes.try_into().expect("64 bytes")))
}

/// Writing what was read keeps the value, and all bits that are not reserved.
fn round_trip<A: Attribute + PartialEq + core::fmt::Debug>(block: &Block) -> Block {
    let value = A::from_block(block);
    let written = value.to_block();
    assert_eq!(A::from_block(&written), value);
    for (written, read) in written.0.iter().zip(block.0) {
        assert_eq!(written & !read, 0, "{:?} has bits that {block:?} has not", A::ID);
    }
    written
}

proptest! {
    #[test]
    fn attributes_survive_a_round_trip(block in block()) {
        round_trip::<NodeInfo>(&block);
        round_trip::<SwitchInfo>(&block);
        round_trip::<PortInfo>(&block);
        round_trip::<SmInfo>(&block);
        round_trip::<VlArbitration>(&block);
        round_trip::<SlToVl>(&block);
        round_trip::<Notice>(&block);
        prop_assert_eq!(round_trip::<NodeDescription>(&block), block);
        prop_assert_eq!(round_trip::<GuidTable>(&block), block);
        prop_assert_eq!(round_trip::<PartitionKeyTable>(&block), block);
        let notice = Notice::from_block(&block);
        prop_assert_eq!(notice.with_link_state(Lid(7)).link_state(), Lid(7));
        prop_assert_eq!(notice.with_key_violation(notice.key_violation()).key_violation(), notice.key_violation());
    }

    #[test]
    fn packets_survive_a_round_trip(mut bytes in prop::collection::vec(any::<u8>(), MadHeader::DATAGRAM_LEN)) {
        (bytes[0], bytes[1], bytes[2]) = (1, if bytes[1] & 1 == 0 { 0x01 } else { 0x81 }, 1);
        (bytes[6], bytes[7]) = (bytes[6] & 63, bytes[7] & 63);
        let smp = Smp::parse(&bytes).expect("a valid packet");
        prop_assert_eq!(Smp::parse(&smp.emit()), Ok(smp));
        bytes[18..20].fill(0);
        bytes[36..64].fill(0);
        prop_assert_eq!(&smp.emit()[..], &bytes[..]);
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Smp::parse(&bytes);
    }
}

/// The places of fields by their bit offsets in the specification.
#[test]
fn fields_are_where_the_specification_has_them() {
    let info = PortInfo {
        lid: Lid(0x1234),
        state: PortState::ACTIVE,
        physical_state: PhysicalState::LINK_UP,
        lmc: 3,
        mtu_cap: 5,
        hoq_life: 18,
        client_reregister: true,
        extended_speed_enabled: 3,
        ..PortInfo::default()
    };
    let block = info.to_block().0;
    assert_eq!(block[16..18], [0x12, 0x34]);
    assert_eq!([block[32] & 0xf, block[33] >> 4, block[34], block[41], block[42]], [4, 5, 3, 5, 18]);
    assert_eq!([block[51], block[63]], [0x80, 3]);
    let switch =
        SwitchInfo { lifetime: 18, state_change: true, enhanced_port_0: true, ..SwitchInfo::default() };
    assert_eq!([switch.to_block().0[11], switch.to_block().0[16]], [18 << 3 | 4, 0x08]);
}

#[test]
fn a_directed_route_starts_at_index_1() {
    let smp = Smp::new(Method::GET, AttributeId::NodeInfo, 0, 7).directed(&[1, 5, 9]);
    assert_eq!(smp.hop_count, 3);
    assert_eq!(smp.initial_path.0[..5], [0, 1, 5, 9, 0]);
    assert_eq!(Smp::new(Method::GET, AttributeId::NodeInfo, 0, 7).directed(&[1; 200]).hop_count, MAX_HOPS);
}

#[test]
fn descriptions_are_cut_between_characters() {
    let text = "é".repeat(40);
    assert_eq!(NodeDescription::new(&text).text(), "é".repeat(32));
    assert_eq!(NodeDescription::new(&format!("x{text}")).text(), format!("x{}", "é".repeat(31)));
}
