//! Forged packets in every state and for every QP type: nothing panics, nothing invalid is executed, and the HCA works
//! afterwards.

use proptest::prelude::*;
use softhca_engine::{DropReason, Event, ModifyQp, QpState, QpType, Recovery, Settings};
use softhca_fabric::{Action, BitPosition, Choice, Frame, IcrcPolicy, Repeat, Selector};
use softhca_tests::pair::{Pair, PairEnd, Setup};
use softhca_types::{Operation, SendWorkRequest};
use softhca_wire::{
    AddressHeaders, Aeth, AtomicAckEth, AtomicEth, Bth, Deth, ExtendedHeaders, Feth, Icrc, Ieth, Immediate,
    Opcode, Psn, Qpn, QueueKey, RemoteKey, Reth, Syndrome, TransportHeader, XrcEth,
};

/// The fields that a hostile peer chooses.
#[derive(Clone, Copy, Debug)]
struct ForgedPacket {
    opcode: Opcode,
    psn: u32,
    ack_request: bool,
    length: u32,
    payload: usize,
    known_key: bool,
    offset: u64,
    syndrome: u8,
    extended: u32,
}

fn any_forged_packet() -> impl Strategy<Value = ForgedPacket> {
    let opcodes: Vec<Opcode> = Opcode::all().collect();
    let near = prop_oneof![0u32..12, Just(0xff_ffff), Just(0x80_0000), Just(0x7f_ffff), any::<u32>()];
    let lengths = prop_oneof![0u32..5000, Just(u32::MAX), Just(1 << 31), Just((1 << 31) + 1)];
    let payloads = prop_oneof![Just(0usize), Just(1), Just(4), Just(1024), Just(1025), 0usize..4200];
    (
        (prop::sample::select(opcodes), near, any::<bool>(), lengths, payloads),
        (any::<bool>(), prop_oneof![0u64..4096, any::<u64>()], any::<u8>(), 0u32..4),
    )
        .prop_map(
            |((opcode, psn, ack_request, length, payload), (known_key, offset, syndrome, extended))| {
                ForgedPacket {
                    opcode,
                    psn,
                    ack_request,
                    length,
                    payload,
                    known_key,
                    offset,
                    syndrome,
                    extended,
                }
            },
        )
}

fn forge(pair: &Pair, to: PairEnd, from: PairEnd, forgery: ForgedPacket) -> Frame {
    let ForgedPacket { opcode, psn, length, offset, .. } = forgery;
    let mut bth = Bth::new(opcode, to.qp, Psn::new(psn));
    let pad = forgery.payload.wrapping_neg() & 3;
    (bth.ack_request, bth.pad) = (forgery.ack_request, pad as u8);
    let mut header = TransportHeader::new(bth);
    let key = if forgery.known_key { to.rkey } else { RemoteKey(offset as u32) };
    let address = to.base.wrapping_add(offset);
    let wanted = opcode.headers();
    let has = |headers| wanted.contains(headers);
    let syndrome = Syndrome::from_byte(forgery.syndrome).unwrap_or(Syndrome::ACK);
    let srq = to.srq.map_or(0, |srq| srq.0);
    header.deth = has(ExtendedHeaders::DETH).then_some(Deth { qkey: QueueKey(0x1111), source_qp: from.qp });
    header.xrceth = has(ExtendedHeaders::XRCETH).then_some(XrcEth(srq ^ u32::from(forgery.extended == 3)));
    header.feth = has(ExtendedHeaders::FETH).then(|| Feth::parse(&[0; 8]).unwrap());
    header.reth = has(ExtendedHeaders::RETH).then_some(Reth {
        virtual_address: address,
        rkey: key,
        dma_length: length,
    });
    header.atomic = has(ExtendedHeaders::ATOMIC).then_some(AtomicEth {
        virtual_address: address,
        rkey: key,
        swap_or_add: 1,
        compare: 0,
    });
    header.aeth = has(ExtendedHeaders::AETH).then_some(Aeth { syndrome, msn: 0 });
    header.atomic_ack = has(ExtendedHeaders::ATOMIC_ACK).then_some(AtomicAckEth(5));
    header.immediate = has(ExtendedHeaders::IMMEDIATE).then_some(Immediate(5));
    header.ieth = has(ExtendedHeaders::IETH).then_some(Ieth(key.0));
    let mut bytes = vec![0; TransportHeader::MAX_LEN + forgery.payload + pad + 64];
    let at = header.emit(&mut bytes);
    bytes.truncate(at + forgery.payload + pad + 4);
    let [source, destination] = [from, to].map(|end| pair.world.host(end.host).address());
    let addressing = AddressHeaders::between(source, destination);
    Icrc::write(&addressing, &mut bytes);
    Frame::new(addressing, bytes)
}

const STATES: [QpState; 5] =
    [QpState::Reset, QpState::Init, QpState::ReadyToReceive, QpState::ReadyToSend, QpState::Error];

/// Outstanding work of every kind at both ends, for forged responses to match.
fn busy_pair(kind: QpType, recovery: Recovery) -> Pair {
    let setup = Setup::with_kind(kind).connection(|c| (c.timeout, c.rnr_retry) = (0, 1));
    let mut pair = Setup { settings: Settings { recovery, ..Settings::default() }, ..setup }.build();
    let (a, b) = (pair.a, pair.b);
    // The real peer does not respond to the first end.
    pair.add_rule(Selector::default(), Repeat::default(), Action::Drop);
    pair.post_receive(100, 0, 4096);
    pair.post_send(1, 0, 2000);
    if kind.is_reliable() {
        pair.post_read(2, 0, 0, 3000);
        pair.post(3, Operation::FetchAdd { remote: b.remote(0), add: 1 }, &[a.sge(0, 8)]);
        pair.post_write(4, 0, 0, 2000);
        pair.post_read(5, 0, 0, 100);
    }
    pair
}

const KINDS: [QpType; 4] = [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcInitiator];

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn forged_packets_never_panic(
        kind in prop::sample::select(&KINDS[..]),
        recovery in prop::sample::select(vec![Recovery::Fatal, Recovery::GoBackN, Recovery::GoBack0]),
        forgeries in prop::collection::vec((any_forged_packet(), any::<bool>()), 1..24),
        deregister in 0usize..48,
    ) {
        let mut pair = busy_pair(kind, recovery);
        for (index, (forgery, to_first)) in forgeries.into_iter().enumerate() {
            if index == deregister {
                let a = pair.a;
                let _ = pair.on(a).deregister_memory(a.rkey);
            }
            let (to, from) = if to_first { (pair.a, pair.b) } else { (pair.b, pair.a) };
            let frame = forge(&pair, to, from, forgery);
            pair.world.inject(to.host, frame);
            pair.world.run_for(std::time::Duration::from_millis(1));
        }
        pair.world.run_for(std::time::Duration::from_secs(10));
        let (a, b) = (pair.a, pair.b);
        for end in [a, b] {
            pair.on(end).modify_queue_pair(end.qp, ModifyQp::default().state(QpState::Reset)).unwrap();
            let view = pair.on(end).query_queue_pair(end.qp).unwrap();
            prop_assert_eq!((view.state, view.outstanding), (QpState::Reset, 0));
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
        let mut pair = busy_pair(QpType::Rc, Recovery::Fatal);
        let (a, b) = (pair.a, pair.b);
        let [source, destination] = [a, b].map(|end| pair.world.host(end.host).address());
        let addressing = AddressHeaders::between(source, destination);
        let mut bytes = bytes;
        if bytes.len() >= Bth::LEN + softhca_wire::ICRC_LEN {
            Icrc::write(&addressing, &mut bytes);
        }
        pair.world.inject(b.host, Frame::new(addressing, bytes));
        prop_assert_eq!(pair.state(b), QpState::ReadyToSend);
    }
}

#[test]
fn every_opcode_in_every_state_is_dropped_with_a_reason_unless_the_state_receives() {
    for kind in KINDS {
        for state in STATES {
            for opcode in Opcode::all() {
                let mut pair = Setup::with_kind(kind).build();
                let (a, b) = (pair.a, pair.b);
                pair.post_receive(100, 0, 4096);
                bring_to(&mut pair, b, state);
                pair.recording.borrow_mut().events.clear();
                let forgery = ForgedPacket {
                    opcode,
                    psn: 0,
                    ack_request: true,
                    length: 8,
                    payload: if opcode.has_payload() { 8 } else { 0 },
                    known_key: true,
                    offset: 0,
                    syndrome: 0x1f,
                    extended: 0,
                };
                let frame = forge(&pair, b, a, forgery);
                pair.world.inject(b.host, frame);
                let record = pair.recording.borrow();
                let context = format!("{kind:?} in {state}: {opcode}");
                assert!(!record.events.is_empty(), "{context}: silence");
                if matches!(state, QpState::Reset | QpState::Init | QpState::Error) {
                    let dropped = |event: &Event| matches!(event, Event::PacketDropped { .. });
                    let counted = |event: &Event| matches!(event, Event::PacketReceived { .. });
                    let all = record.events.iter().all(|(.., event)| dropped(event) || counted(event));
                    assert!(all, "{context}: {:?}", record.events);
                }
            }
        }
    }
}

fn bring_to(pair: &mut Pair, end: PairEnd, state: QpState) {
    let view = pair.on(end).query_queue_pair(end.qp).unwrap();
    let modify = ModifyQp::default();
    if matches!(state, QpState::ReadyToSend | QpState::Error) {
        if state == QpState::Error {
            pair.on(end).modify_queue_pair(end.qp, modify.state(QpState::Error)).unwrap();
        }
        return;
    }
    pair.on(end).modify_queue_pair(end.qp, modify.state(QpState::Reset)).unwrap();
    let mut init = modify.state(QpState::Init).pkey_index(0).port(1);
    init = match view.qp_type.is_datagram() {
        true => init.qkey(view.attributes.qkey),
        false => init.access_flags(view.attributes.access_flags),
    };
    let mut receive = modify.state(QpState::ReadyToReceive);
    if !view.qp_type.is_datagram() {
        let old = view.attributes;
        receive = receive
            .address_vector(old.address_vector)
            .path_mtu(old.path_mtu)
            .dest_qpn(old.dest_qpn)
            .rq_psn(Psn::new(0));
    }
    if matches!(view.qp_type, QpType::Rc | QpType::XrcTarget) {
        receive = receive.max_dest_rd_atomic(4).min_rnr_timer(view.attributes.min_rnr_timer);
    }
    for (step, reached) in [(init, QpState::Init), (receive, QpState::ReadyToReceive)] {
        if state == QpState::Reset {
            break;
        }
        pair.on(end).modify_queue_pair(end.qp, step).unwrap();
        if reached == state {
            break;
        }
    }
}

#[test]
fn a_packet_from_another_host_does_not_affect_a_connection() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    let forgery = ForgedPacket {
        opcode: Opcode::all().find(|opcode| opcode.name() == "WRITE_ONLY").unwrap(),
        psn: 0,
        ack_request: true,
        length: 8,
        payload: 8,
        known_key: true,
        offset: 0,
        syndrome: 0,
        extended: 0,
    };
    let mut frame = forge(&pair, b, a, forgery);
    frame.addressing.source = "10.0.0.66".parse().unwrap();
    Icrc::write(&frame.addressing, &mut frame.bytes);
    pair.world.inject(b.host, frame);
    let record = pair.recording.borrow();
    let reason = record.events.iter().find_map(|(.., event)| match event {
        Event::PacketDropped { reason, .. } => Some(*reason),
        _ => None,
    });
    assert_eq!(reason, Some(DropReason::AddressMismatch));
}

/// A SEND of eight bytes.
fn forged_send(psn: u32) -> ForgedPacket {
    ForgedPacket {
        opcode: Opcode::all().find(|opcode| opcode.name() == "SEND_ONLY").unwrap(),
        psn,
        ack_request: true,
        length: 0,
        payload: 8,
        known_key: true,
        offset: 0,
        syndrome: 0,
        extended: 0,
    }
}

#[test]
fn spoofed_psns_outside_the_window_do_not_end_a_connection() {
    for recovery in [Recovery::Fatal, Recovery::GoBackN, Recovery::GoBack0] {
        let first = Psn::new(0xff_f000);
        let mut pair = Setup::default().recovery(recovery).connection(|c| c.first_psns[0] = first).build();
        let (a, b) = (pair.a, pair.b);
        pair.post_receive(100, 0, 100);
        // Every multiple of 12,289 but those that a lost packet of the peer could explain.
        let psns: Vec<u32> = (0..Psn::SPACE).step_by(12_289).collect();
        let ahead = |psn: u32| Psn::new(psn).distance(first);
        let spoofed: Vec<u32> = psns.into_iter().filter(|psn| !(0..=2048).contains(&ahead(*psn))).collect();
        assert!(spoofed.len() > 1300);
        for psn in &spoofed {
            let frame = forge(&pair, b, a, forged_send(*psn));
            pair.world.inject(b.host, frame);
            pair.world.run_for(std::time::Duration::from_micros(10));
        }
        let far = spoofed.iter().filter(|psn| ahead(**psn) > 0).count() as u64;
        assert!(far > 600 && pair.counters(b).rx_dropped == far, "each of {far} is counted");
        let dropped = pair.recording.borrow().events.iter().any(|(.., event)| {
            let expected = DropReason::BeyondWindow { expected: first };
            matches!(event, Event::PacketDropped { reason, .. } if *reason == expected)
        });
        assert!(dropped, "and has its reason in the log");
        pair.post_send(1, 0, 100);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")], "{recovery:?}");
        assert_eq!(pair.completion_statuses(b), [(100, "SUCCESS")]);
    }
}

#[test]
fn queue_pair_numbers_cannot_be_guessed() {
    let qpn = |seed| {
        let setup = Setup { seed, ..Setup::default() };
        setup.build().b.qp.value()
    };
    assert_eq!(qpn(7), qpn(7), "the same in every run");
    let low: std::collections::BTreeSet<u16> = (0..64).map(|seed| qpn(seed) as u16).collect();
    assert!(low.len() > 60, "{low:x?}");
    // The numbers that a card with consecutive ones would have.
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    pair.post_receive(100, 0, 100);
    for tag in 0..0x80u32 {
        for index in 2..6 {
            let guess = PairEnd { qp: Qpn::new(tag << 16 | index), ..b };
            let frame = forge(&pair, guess, a, forged_send(1));
            pair.world.inject(b.host, frame);
        }
    }
    assert_eq!(pair.counters(b).rx_dropped, 512);
    pair.post_send(1, 0, 100);
    pair.run();
    assert_eq!(pair.completion_statuses(b), [(100, "SUCCESS")]);
}

#[test]
fn corrupted_traffic_never_panics_and_every_frame_is_counted() {
    for seed in 0..60 {
        for recovery in [Recovery::Fatal, Recovery::GoBackN, Recovery::GoBack0] {
            let mut setup = Setup::default().recovery(recovery).connection(|c| c.timeout = 5);
            setup.seed = seed;
            let mut pair = setup.build();
            let (a, b) = (pair.a, pair.b);
            let action = Action::Corrupt { bit: BitPosition::Random, icrc: IcrcPolicy::Recomputed };
            let repeat = Repeat::choice(Choice::Probability { per_billion: 200_000_000 });
            pair.add_rule(Selector::default(), repeat, action);
            for id in 0..4 {
                pair.post_receive(id, 0, 4000);
                pair.post_send(id, 0, 3000);
                pair.post_read(id, 0, 0, 3000);
                pair.post(id, Operation::FetchAdd { remote: b.remote(0), add: 1 }, &[a.sge(0, 8)]);
                let gather = [b.sge(0, 3000)];
                let back = SendWorkRequest::new(
                    id,
                    Operation::Write { remote: a.remote(0), imm_data: None },
                    &gather,
                );
                pair.on(b).post_send(b.qp, &back).unwrap();
            }
            pair.world.run_for(std::time::Duration::from_secs(1));
            assert!(pair.world.frame_counters().is_balanced());
        }
    }
}

#[test]
fn a_flood_of_requests_without_a_receive_queues_one_response() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    // The link is busy for a long time, so that nothing can be sent.
    let slow = softhca_fabric::LinkSettings {
        bits_per_second: std::num::NonZeroU64::new(1000),
        ..Default::default()
    };
    let link = pair.link;
    *pair.world.link_mut(link) = softhca_fabric::Link::new(softhca_fabric::Seed(1), slow);
    for _ in 0..1000 {
        let frame = forge(&pair, b, a, forged_send(0));
        pair.world.inject(b.host, frame);
    }
    pair.world.run_for(std::time::Duration::from_secs(60));
    assert_eq!(pair.packets().len(), 2, "one response was sent at once, one waited");
}
