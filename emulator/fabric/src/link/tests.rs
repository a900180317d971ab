//! Tests of fault rules on a link.

use super::*;
use crate::testing::{ALICE, BOB, Collected, Packet, flow, host, psn};
use crate::{
    BitPosition, Choice, FieldValue, FlowId, GilbertElliott, HeaderField, IcrcPolicy, InclusiveRange,
    PER_BILLION, PacketClasses, Pattern, Repeat, Scope, Selector,
};
use Direction::{Backward, Forward};
use alloc::vec;
use core::num::{NonZeroU32, NonZeroU64};
use proptest::prelude::*;
use softhca_wire::{Ecn, Icrc, Operation};

/// A link with one flow from Alice to Bob, first PSN 0, and its output.
struct Bench {
    link: Link,
    flows: FlowTable,
    out: Collected,
}

impl Bench {
    /// A link without delay or rate limit.
    fn new(rules: impl IntoIterator<Item = (Selector, Repeat, Action)>) -> Bench {
        Bench::on(LinkSettings::default(), rules)
    }

    fn on(settings: LinkSettings, rules: impl IntoIterator<Item = (Selector, Repeat, Action)>) -> Bench {
        let mut link = Link::new(Seed(1), settings);
        for (index, (selector, repeat, action)) in rules.into_iter().enumerate() {
            link.add_rule(Rule { id: RuleId(index as u32), selector, repeat, action });
        }
        let mut flows = FlowTable::new();
        flows.insert(flow(1, ALICE, BOB, 0));
        Bench { link, flows, out: Collected::default() }
    }

    fn admit(&mut self, now_ns: u64, direction: Direction, frame: Frame) {
        self.link.admit(now_ns, direction, frame, &self.flows, &mut self.out);
    }

    fn writes(&mut self, now_ns: u64, psns: impl IntoIterator<Item = u32>) {
        for psn in psns {
            self.admit(now_ns, Forward, Packet::rc(Operation::Write, psn).frame());
        }
    }

    fn effects(&self) -> Vec<FaultEffect> {
        self.out.faults.iter().map(|fault| fault.effect).collect()
    }

    fn counters(&self, index: usize) -> (u64, u64) {
        let (_, counters) = self.link.rules().nth(index).expect("a rule");
        (counters.matched, counters.fired)
    }
}

fn relative(psn: u64) -> Selector {
    Selector { psn: Some(InclusiveRange::exactly(psn)), ..Selector::default() }
}

fn all() -> Selector {
    Selector::default()
}

fn reorder(by: u32, within_ns: u64) -> Action {
    Action::Reorder { by: NonZeroU32::new(by).expect("not zero"), within_ns }
}

fn has_valid_icrc(frame: &Frame) -> bool {
    let (transport, icrc) = Icrc::split(&frame.bytes).expect("an ICRC");
    Icrc::compute(&frame.addressing, transport) == icrc
}

#[test]
fn link_without_rules_delivers_frames_unchanged() {
    let mut bench = Bench::new([]);
    let frame = Packet::rc(Operation::Write, 3).frame();
    bench.admit(5, Backward, frame.clone());
    assert_eq!(bench.out.deliveries, [(5, Backward, frame)]);
    assert_eq!(bench.out.faults, []);
}

#[test]
fn dropped_packet_is_reported_and_its_retransmission_passes() {
    let data = Selector { classes: Some(PacketClasses::Data), ..relative(1) };
    let mut bench = Bench::new([(data, Repeat::times(1), Action::Drop)]);
    bench.writes(7, [0, 1, 2, 1]);
    assert_eq!(bench.out.psns(), [0, 2, 1]);
    let [fault] = bench.out.faults[..] else { panic!("one fault") };
    assert_eq!((fault.at_ns, fault.direction, fault.cause), (7, Forward, FaultCause::Rule(RuleId(0))));
    assert_eq!(fault.effect, FaultEffect::Dropped { copies: 0 });
    assert_eq!((fault.packet.flow_id, fault.packet.relative_psn), (Some(FlowId(1)), Some(1)));
    assert_eq!(bench.counters(0), (2, 1));
}

#[test]
fn retransmission_can_be_dropped() {
    let second = Selector { transmission: Some(InclusiveRange::exactly(2)), ..relative(1) };
    let mut bench = Bench::new([(second, Repeat::default(), Action::Drop)]);
    bench.writes(0, [0, 1, 2, 1, 2, 1]);
    assert_eq!(bench.out.psns(), [0, 1, 2, 2, 1]);
}

#[test]
fn later_rule_does_not_see_dropped_packets() {
    let drop = || (relative(1), Repeat::times(1), Action::Drop);
    let count = || (relative(1), Repeat::default(), Action::Count);
    let mut bench = Bench::new([count(), drop(), drop(), count()]);
    bench.writes(0, [1, 1, 1]);
    assert_eq!([0, 1, 2, 3].map(|index| bench.counters(index)), [(3, 3), (3, 1), (2, 1), (1, 1)]);
}

#[test]
fn duplicates_arrive_right_after_their_original() {
    let mut bench = Bench::new([(relative(1), Repeat::times(1), Action::Duplicate { copies: 2 })]);
    bench.writes(0, [0, 1, 2]);
    assert_eq!(bench.out.psns(), [0, 1, 1, 1, 2]);
    assert_eq!(bench.out.deliveries[1], bench.out.deliveries[3]);
    assert_eq!(bench.effects(), [FaultEffect::Duplicated { copies: 2 }]);
}

#[test]
fn held_frame_follows_the_frames_that_passed_it() {
    let mut bench = Bench::new([(relative(1), Repeat::times(1), reorder(2, 100))]);
    bench.writes(0, [0, 1, 2]);
    assert_eq!(bench.out.psns(), [0, 2]);
    assert_eq!(bench.link.counters(Forward).held, 1);
    bench.admit(0, Backward, Packet::rc(Operation::Acknowledge, 2).between(BOB, ALICE).frame());
    bench.writes(0, [3, 4]);
    assert_eq!(bench.out.psns(), [0, 2, 2, 3, 1, 4]);
    assert_eq!(bench.link.next_timeout(), None);
}

#[test]
fn held_frame_is_released_at_its_deadline() {
    let mut bench = Bench::new([(all(), Repeat::times(2), reorder(9, 100))]);
    bench.writes(50, [0, 1]);
    assert_eq!(bench.link.next_timeout(), Some(150));
    bench.link.expire(149, &mut bench.out);
    assert!(bench.out.psns().is_empty());
    bench.link.expire(200, &mut bench.out);
    assert_eq!((bench.out.psns(), bench.out.times()), (vec![0, 1], vec![150, 150]));
    assert!(bench.link.may_reorder());
}

#[test]
fn late_expire_call_does_not_reorder() {
    let mut bench = Bench::new([(all(), Repeat::times(1), reorder(9, 100))]);
    bench.writes(0, [0]);
    bench.writes(300, [1]);
    assert_eq!((bench.out.psns(), bench.out.times()), (vec![0, 1], vec![100, 300]));
}

#[test]
fn delayed_frame_is_overtaken() {
    let mut bench = Bench::new([(relative(0), Repeat::default(), Action::Delay { ns: 1000 })]);
    bench.writes(5, [0, 1]);
    assert_eq!((bench.out.psns(), bench.out.times()), (vec![0, 1], vec![1005, 5]));
}

#[test]
fn corruption_is_detected_unless_the_icrc_is_recomputed() {
    let original = Packet::rc(Operation::Write, 0).frame();
    for place in [BitPosition::Bit(8 * 9), BitPosition::PayloadBit(3), BitPosition::Random] {
        for icrc in [IcrcPolicy::Stale, IcrcPolicy::Recomputed] {
            let mut bench = Bench::new([(all(), Repeat::default(), Action::Corrupt { bit: place, icrc })]);
            bench.admit(0, Forward, original.clone());
            let (_, _, frame) = &bench.out.deliveries[0];
            assert_eq!(has_valid_icrc(frame), icrc == IcrcPolicy::Recomputed);
            let [FaultEffect::Corrupted { bit, .. }] = bench.effects()[..] else { panic!("one corruption") };
            let at = bit as usize / 8;
            assert_eq!(frame.bytes[at] ^ original.bytes[at], 0x80 >> (bit % 8));
            let end = frame.bytes.len() - 4;
            let differing = (0..end).filter(|at| frame.bytes[*at] != original.bytes[*at]).count();
            assert_eq!(differing, 1);
        }
    }
}

#[test]
fn random_corruption_hits_only_bits_that_the_icrc_covers() {
    let action = Action::Corrupt { bit: BitPosition::Random, icrc: IcrcPolicy::Stale };
    let mut bench = Bench::new([(all(), Repeat::default(), action)]);
    bench.writes(0, 0..2000);
    assert!(bench.out.deliveries.iter().all(|(_, _, frame)| !has_valid_icrc(frame)));
}

#[test]
fn rule_does_not_match_packets_without_its_field() {
    let field = Action::Rewrite { field: HeaderField::RemoteKey, value: FieldValue::Set(1) };
    let payload = Action::Corrupt { bit: BitPosition::PayloadBit(0), icrc: IcrcPolicy::Stale };
    let bit = Action::Corrupt { bit: BitPosition::Bit(1 << 20), icrc: IcrcPolicy::Stale };
    let mut bench = Bench::new([field, payload, bit].map(|action| (all(), Repeat::default(), action)));
    bench.admit(0, Backward, Packet::rc(Operation::Acknowledge, 0).between(BOB, ALICE).frame());
    assert_eq!([0, 1, 2].map(|index| bench.counters(index)), [(0, 0); 3]);
    assert_eq!(bench.out.faults, []);
}

#[test]
fn ce_mark_keeps_the_icrc_valid() {
    let mut bench = Bench::new([(all(), Repeat::default(), Action::MarkCe)]);
    bench.writes(0, [0]);
    let (_, _, frame) = &bench.out.deliveries[0];
    assert_eq!(frame.addressing.ecn(), Ecn::CongestionExperienced);
    assert!(has_valid_icrc(frame));
    assert_eq!(bench.effects(), [FaultEffect::MarkedCe]);
}

#[test]
fn rewritten_packet_has_a_valid_icrc() {
    let action = Action::Rewrite { field: HeaderField::Psn, value: FieldValue::Add(5) };
    let mut bench = Bench::new([(all(), Repeat::default(), action)]);
    bench.writes(0, [0xff_fffe]);
    let (_, _, frame) = &bench.out.deliveries[0];
    assert_eq!(psn(frame), 3);
    assert!(has_valid_icrc(frame));
    assert_eq!(bench.effects(), [FaultEffect::Rewritten { field: HeaderField::Psn, from: 0xff_fffe, to: 3 }]);
}

#[test]
fn link_down_in_one_direction_carries_frames_in_the_other() {
    let mut bench = Bench::new([]);
    bench.link.set_state(Forward, LinkState::Down);
    bench.writes(0, [0]);
    bench.admit(0, Backward, Packet::rc(Operation::Acknowledge, 9).between(BOB, ALICE).frame());
    assert_eq!(bench.out.psns(), [9]);
    assert_eq!(bench.out.faults[0].cause, FaultCause::LinkDown);
    bench.link.set_state(Forward, LinkState::Up);
    bench.writes(0, [1]);
    assert_eq!(bench.out.psns(), [9, 1]);
}

#[test]
fn packet_can_take_the_link_down_for_a_duration() {
    let action = Action::LinkDown { directions: DownDirections::BothWays, for_ns: 100 };
    let mut bench = Bench::new([(relative(1), Repeat::times(1), action)]);
    bench.writes(10, [0, 1, 2]);
    assert_eq!(bench.link.state(109, Backward), LinkState::Down);
    assert_eq!(bench.link.state(110, Backward), LinkState::Up);
    bench.writes(110, [1]);
    assert_eq!(bench.out.psns(), [0, 1]);
    let cut = FaultEffect::LinkTakenDown { directions: DownDirections::BothWays, until_ns: 110 };
    assert_eq!(
        bench.effects(),
        [cut, FaultEffect::Dropped { copies: 0 }, FaultEffect::Dropped { copies: 0 }]
    );
}

#[test]
fn fast_path_requires_no_rules_no_held_frames_and_link_up() {
    let settings = LinkSettings { mtu: 1_000, ..LinkSettings::default() };
    let mut bench = Bench::on(settings, []);
    let passes = |bench: &mut Bench, bytes| bench.link.fast_transmit(0, Forward, bytes, false).is_some();
    assert!(passes(&mut bench, 1_018));
    assert!(!passes(&mut bench, 1_019), "larger than the MTU");
    bench.link.set_state(Forward, LinkState::Down);
    assert!(!passes(&mut bench, 100));
    bench.link.set_state(Forward, LinkState::Up);
    assert!(passes(&mut bench, 100));
    let rule = Rule { id: RuleId(0), selector: all(), repeat: Repeat::times(1), action: reorder(1, 50) };
    bench.link.add_rule(rule);
    assert!(!passes(&mut bench, 100));
    bench.writes(0, [0]);
    bench.link.remove_rule(RuleId(0));
    assert!(!passes(&mut bench, 100), "a frame is held back");
    bench.link.expire(50, &mut bench.out);
    assert!(passes(&mut bench, 100));
    let counters = bench.link.counters(Forward);
    assert!(counters.is_balanced());
    assert_eq!((counters.admitted, counters.delivered), (4, 4));
}

#[test]
fn a_limited_rate_spaces_the_packets_that_match_and_keeps_their_order() {
    let bits_per_second = NonZeroU64::new(8_000_000).expect("not zero");
    let mut bench = Bench::new([(relative(0), Repeat::default(), Action::LimitRate { bits_per_second })]);
    bench.writes(0, [0]);
    let first = bench.out.deliveries[0].0;
    let bytes = bench.out.deliveries[0].2.wire_length() as u64;
    assert_eq!(first, 1_000 * bytes);
    bench.writes(0, [0, 1]);
    let times: Vec<u64> = bench.out.deliveries.iter().map(|(at, ..)| *at).collect();
    assert_eq!(times, [first, 2 * first, 0]);
    assert!(!bench.link.may_reorder() && bench.out.faults.is_empty());
}

#[test]
fn a_hold_stops_its_packet_and_all_later_ones_once() {
    let mut bench = Bench::new([(relative(1), Repeat::default(), Action::Hold { ns: 5000 })]);
    bench.writes(0, [0, 1]);
    bench.writes(7, [2, 1]);
    bench.writes(6000, [1]);
    let times: Vec<u64> = bench.out.deliveries.iter().map(|(at, ..)| *at).collect();
    assert_eq!(times, [0, 5000, 5000, 5000, 6000]);
    assert!(!bench.link.may_reorder());
}

#[test]
fn a_time_per_packet_spaces_packets_of_any_size() {
    let mut bench = Bench::new([(all(), Repeat::default(), Action::PacketTime { ns: 700 })]);
    bench.writes(0, [0, 1]);
    bench.writes(5_000, [2]);
    let times: Vec<u64> = bench.out.deliveries.iter().map(|(at, ..)| *at).collect();
    assert_eq!(times, [700, 1_400, 5_700]);
    assert!(!bench.link.may_reorder() && bench.out.faults.is_empty());
}

#[test]
fn a_frame_that_waits_for_a_delayed_one_arrives_after_it() {
    let hold = (relative(1), Repeat::default(), reorder(1, 1_000_000));
    let mut bench = Bench::new([hold, (all(), Repeat::default(), Action::PacketTime { ns: 700 })]);
    bench.writes(0, [0, 1, 2]);
    assert_eq!((bench.out.psns(), bench.out.times()), (vec![0, 2, 1], vec![700, 1_400, 1_400]));
}

#[test]
fn jitter_delays_each_packet_by_another_time_and_keeps_their_order() {
    let delays = || {
        let mut bench = Bench::new([(all(), Repeat::default(), Action::Jitter { up_to_ns: 1_000 })]);
        (0..40u32).for_each(|psn| bench.writes(u64::from(psn) * 500, [psn]));
        assert!(!bench.link.may_reorder() && bench.out.faults.is_empty());
        let times: Vec<u64> = bench.out.deliveries.iter().map(|(at, ..)| *at).collect();
        assert!(times.is_sorted(), "{times:?}");
        times.iter().enumerate().map(|(index, at)| at - index as u64 * 500).collect::<Vec<u64>>()
    };
    let found = delays();
    assert!(found.len() == 40 && found.iter().all(|delay| *delay <= 1_000), "{found:?}");
    assert!(found.iter().collect::<alloc::collections::BTreeSet<_>>().len() > 20, "{found:?}");
    assert_eq!(found, delays(), "the seed decides");
}

#[test]
fn removed_rule_returns_its_counters_and_stops_acting() {
    let mut bench = Bench::new([(relative(0), Repeat::default(), Action::Drop)]);
    bench.writes(0, [0]);
    assert_eq!(bench.link.remove_rule(RuleId(0)), Some(RuleCounters { matched: 1, fired: 1 }));
    assert_eq!(bench.link.remove_rule(RuleId(0)), None);
    bench.writes(0, [0]);
    assert_eq!(bench.out.psns(), [0]);
}

fn any_action() -> impl Strategy<Value = Action> {
    prop_oneof![
        Just(Action::Count),
        Just(Action::Drop),
        (0u32..4).prop_map(|copies| Action::Duplicate { copies }),
        (1u32..5, 0u64..50).prop_map(|(by, within_ns)| reorder(by, within_ns)),
        (0u64..100).prop_map(|ns| Action::Delay { ns }),
        (1u64..1 << 40)
            .prop_map(|rate| Action::LimitRate { bits_per_second: NonZeroU64::new(rate).expect("not zero") }),
        (0u64..100).prop_map(|up_to_ns| Action::Jitter { up_to_ns }),
        (0u64..100).prop_map(|ns| Action::PacketTime { ns }),
        (0u64..100).prop_map(|ns| Action::Hold { ns }),
        (any::<bool>(), 0u32..400).prop_map(|(repaired, bit)| Action::Corrupt {
            bit: if repaired { BitPosition::Bit(bit) } else { BitPosition::Random },
            icrc: if repaired { IcrcPolicy::Recomputed } else { IcrcPolicy::Stale },
        }),
        Just(Action::MarkCe),
        prop_oneof![
            Just(HeaderField::Opcode),
            Just(HeaderField::Pad),
            Just(HeaderField::Psn),
            Just(HeaderField::RemoteKey)
        ]
        .prop_flat_map(|field| any::<i64>().prop_map(move |more| (field, more)))
        .prop_map(|(field, more)| Action::Rewrite { field, value: FieldValue::Add(more) }),
        (any::<bool>(), 0u64..20).prop_map(|(both, for_ns)| Action::LinkDown {
            directions: if both { DownDirections::BothWays } else { DownDirections::OneWay },
            for_ns,
        }),
    ]
}

fn any_choice() -> impl Strategy<Value = Choice> {
    let probability = || 0..=PER_BILLION;
    prop_oneof![
        Just(Choice::All),
        (1u64..5).prop_map(|n| Choice::Every(NonZeroU64::new(n).expect("not zero"))),
        "[XO]{1,8}".prop_map(|text| Choice::Pattern(Pattern::parse(&text).expect("a pattern"))),
        probability().prop_map(|per_billion| Choice::Probability { per_billion }),
        (probability(), probability(), probability(), probability()).prop_map(
            |(good_to_bad, bad_to_good, hit_in_good, hit_in_bad)| {
                Choice::Burst(GilbertElliott { good_to_bad, bad_to_good, hit_in_good, hit_in_bad })
            }
        ),
    ]
}

fn any_repeat(scope: Scope) -> impl Strategy<Value = Repeat> {
    (0u64..3, prop::option::of(0u64..5), any_choice()).prop_map(move |(skip, times, choice)| Repeat {
        skip,
        times,
        choice,
        scope,
    })
}

fn any_rule() -> impl Strategy<Value = (Selector, Repeat, Action)> {
    let selector = (prop::option::of(0u64..6), prop::option::of(1u64..3)).prop_map(|(psn, nth)| Selector {
        psn: psn.map(InclusiveRange::at_least),
        transmission: nth.map(InclusiveRange::exactly),
        ..Selector::default()
    });
    (selector, any_repeat(Scope::Rule), any_action())
}

fn any_line() -> impl Strategy<Value = LinkSettings> {
    (0u64..3, 0u64..50, 80u32..120).prop_map(|(gigabits, delay_ns, mtu)| LinkSettings {
        bits_per_second: NonZeroU64::new(gigabits * 1_000_000_000),
        delay_ns,
        mtu,
    })
}

/// Time since the previous frame, direction, PSN.
fn any_traffic() -> impl Strategy<Value = Vec<(u64, bool, u32)>> {
    prop::collection::vec((0u64..10, any::<bool>(), 0u32..10), 0..60)
}

fn play(bench: &mut Bench, traffic: &[(u64, bool, u32)]) {
    let mut now_ns = 0;
    for (later_ns, forward, psn) in traffic {
        now_ns += later_ns;
        match forward {
            true => bench.writes(now_ns, [*psn]),
            false => {
                let ack = Packet::rc(Operation::Acknowledge, *psn).between(BOB, ALICE);
                bench.admit(now_ns, Backward, ack.frame());
            }
        }
    }
}

proptest! {
    #[test]
    fn every_frame_is_delivered_dropped_or_held(
        settings in any_line(),
        rules in prop::collection::vec(any_rule(), 0..6),
        traffic in any_traffic(),
    ) {
        let mut bench = Bench::on(settings, rules);
        play(&mut bench, &traffic);
        for direction in [Forward, Backward] {
            let counters = bench.link.counters(direction);
            prop_assert!(counters.is_balanced(), "{:?}", counters);
        }
        bench.link.expire(u64::MAX - 1, &mut bench.out);
        let (forward, backward) = (bench.link.counters(Forward), bench.link.counters(Backward));
        prop_assert!(forward.is_balanced() && backward.is_balanced());
        prop_assert_eq!(forward.held + backward.held, 0);
        prop_assert_eq!(forward.admitted + backward.admitted, traffic.len() as u64);
        prop_assert_eq!(forward.delivered + backward.delivered, bench.out.deliveries.len() as u64);
        let dropped = |effect| if let FaultEffect::Dropped { copies } = effect { 1 + copies } else { 0 };
        let reported: u64 = bench.effects().into_iter().map(dropped).sum();
        prop_assert_eq!(forward.dropped + backward.dropped, reported);
    }

    #[test]
    fn same_seed_gives_the_same_bytes_and_faults(
        settings in any_line(),
        rules in prop::collection::vec(any_rule(), 0..6),
        traffic in any_traffic(),
    ) {
        let run = || {
            let mut bench = Bench::on(settings, rules.clone());
            play(&mut bench, &traffic);
            bench.link.expire(u64::MAX - 1, &mut bench.out);
            bench.out
        };
        prop_assert_eq!(run(), run());
    }

    #[test]
    fn other_flows_do_not_change_which_packets_of_a_flow_are_hit(
        repeat in any_repeat(Scope::Flow),
        traffic in prop::collection::vec((any::<bool>(), 0u32..10), 0..80),
        seed in any::<u64>(),
    ) {
        let run = |noise: bool| {
            let mut bench = Bench::new([]);
            bench.link = Link::new(Seed(seed), LinkSettings::default());
            let rule = Rule { id: RuleId(7), selector: all(), repeat, action: Action::Drop };
            bench.link.add_rule(rule);
            bench.flows.insert(flow(2, host(3), BOB, 0));
            for (other, psn) in &traffic {
                match other {
                    false => bench.writes(0, [*psn]),
                    true if noise => {
                        let packet = Packet::rc(Operation::Write, *psn).between(host(3), BOB);
                        bench.admit(0, Forward, packet.frame());
                    }
                    true => {}
                }
            }
            let mut deliveries = bench.out.deliveries;
            deliveries.retain(|(_, _, frame)| frame.addressing.source == ALICE.address);
            bench.out.faults.retain(|fault| fault.packet.flow_id == Some(FlowId(1)));
            (deliveries, bench.out.faults)
        };
        prop_assert_eq!(run(false), run(true));
    }
}
