//! Switched networks: delivery, ECN marking, PFC and drops.

use super::net::verbs::ConnectOptions;
use super::net::*;
use proptest::prelude::*;
use softhca_engine::Settings;
use softhca_fabric::{
    EcnMarking, FabricEvent, FrameDropReason, Node, PER_BILLION, PfcSettings, SwitchSettings, Topology,
};
use softhca_wire::Mtu;

/// A 16-to-1 incast through one switch.
fn incast(senders: u32, switch: SwitchSettings, settings: Settings) -> (Net, Vec<Flow>) {
    incast_over(senders, line(100, 1_000), switch, settings)
}

fn incast_over(
    senders: u32,
    line: softhca_fabric::LinkSettings,
    switch: SwitchSettings,
    settings: Settings,
) -> (Net, Vec<Flow>) {
    let mut net = Net::new(7, Topology::Star { hosts: senders + 1 }, line, switch, settings);
    let flows: Vec<_> = (0..senders).map(|from| net.connect(from as usize, senders as usize)).collect();
    for flow in &flows {
        net.write(*flow, REGION as u32, 2);
    }
    (net, flows)
}

#[test]
fn write_arrives_through_every_topology() {
    for topology in [
        Topology::Pair,
        Topology::Star { hosts: 2 },
        Topology::Dumbbell { left: 2, right: 2 },
        Topology::LeafSpine { leaves: 3, spines: 2, hosts_per_leaf: 2 },
        Topology::FatTree { k: 4 },
        Topology::Ring { switches: 4, hosts_per_switch: 1 },
    ] {
        let mut net = Net::new(1, topology, line(100, 1_000), SwitchSettings::default(), Settings::default());
        let last = net.hosts.len() - 1;
        let flow = net.connect(0, last);
        net.world.verbs(flow.from.host).write_memory(flow.from.key, flow.from.base, b"through the fabric");
        net.write(flow, 10_000, 1);
        net.world.run();
        assert_eq!(net.completions(flow), (1, true), "{topology:?}");
        let read = net.world.verbs(flow.to.host).read_memory(flow.to.key, flow.to.base, 18);
        assert_eq!(read, b"through the fabric", "{topology:?}");
        assert_eq!(net.record.borrow().lost(), 0);
    }
}

#[test]
fn latency_is_the_sum_of_links_and_hops() {
    let mut net =
        Net::new(1, Topology::Star { hosts: 2 }, line(100, 1_000), SwitchSettings::default(), plain());
    let flow = net.connect_with(0, 1, &ConnectOptions { path_mtu: Mtu::B4096, ..ConnectOptions::default() });
    net.write(flow, 4_096, 1);
    net.world.run();
    // 4096 bytes payload, 12 + 16 + 4 transport, 28 IP and UDP, 38 Ethernet: 4194 bytes take 335.52 ns. The
    // ACK has 12 + 4 + 4 + 28 + 38 = 86 bytes: 6.88 ns. Both cross two links with 1 µs delay.
    let done = net.record.borrow().cards.iter().rev().find_map(|(at, host, event)| {
        matches!(event, softhca_engine::Event::Completed { .. }).then_some((*at, *host))
    });
    assert_eq!(done, Some((2 * (335 + 1_000) + 2 * (6 + 1_000), net.hosts[0])));
}

#[test]
fn pfc_with_sufficient_headroom_drops_nothing() {
    let frame = 4_096 + 100;
    let headroom = PfcSettings::headroom_for(100 * GBIT, 1_000, frame);
    let flow = PfcSettings { xoff: 40_000, xon: 30_000, headroom, ..PfcSettings::default() };
    let switch = SwitchSettings { ecn_marking: None, pfc: Some(flow), ..SwitchSettings::default() };
    let (mut net, flows) = incast(16, switch, plain());
    net.world.run();
    for flow in flows {
        assert_eq!(net.completions(flow), (2, true));
    }
    let record = net.record.borrow();
    assert_eq!(record.lost(), 0);
    assert!(record.paused() > 16, "{}", record.paused());
    // A resume frame ends every pause.
    let resumed = record.count(|event| matches!(event, FabricEvent::PauseSent { quanta: 0, .. }));
    assert!(resumed > 0);
    let counters = net.world.frame_counters();
    assert!(counters.is_balanced() && counters.in_flight == 0 && counters.dropped == 0, "{counters:?}");
}

#[test]
fn headroom_for_a_short_cable_drops_frames_on_a_long_one() {
    // Headroom for a 5 m cable (25 ns), on 100 m (500 ns) and on 5 m.
    let headroom = PfcSettings::headroom_for(100 * GBIT, 25, 4_196);
    let flow = PfcSettings { xoff: 40_000, xon: 30_000, headroom, ..PfcSettings::default() };
    let switch = SwitchSettings { ecn_marking: None, pfc: Some(flow), ..SwitchSettings::default() };
    let run = |delay_ns| {
        let (mut net, _) = incast_over(16, line(100, delay_ns), switch, plain());
        net.run_us(20_000);
        let record = net.record.borrow();
        let full = |event: &FabricEvent| {
            matches!(event, FabricEvent::FrameDropped { reason: FrameDropReason::HeadroomFull, .. })
        };
        assert_eq!(record.count(full), record.lost());
        record.lost()
    };
    assert_eq!(run(25), 0);
    assert!(run(500) > 0);
}

#[test]
fn full_queue_without_pfc_drops_frames() {
    let switch = SwitchSettings { ecn_marking: None, pfc: None, ..SwitchSettings::default() };
    let (mut net, _) = incast(16, switch, plain());
    net.run_us(5_000);
    let record = net.record.borrow();
    assert!(
        record.count(|event| matches!(
            event,
            FabricEvent::FrameDropped { reason: FrameDropReason::QueueFull, .. }
        )) > 0
    );
    assert_eq!(record.paused(), 0);
    assert!(net.world.frame_counters().is_balanced());
}

#[test]
fn ecn_marks_match_the_settings() {
    // A queue depth between the thresholds, where the marking probability is linear.
    let marking = EcnMarking { kmin: 0, kmax: u64::MAX / 2, pmax_per_billion: PER_BILLION };
    let flat = EcnMarking { kmin: 10_000, kmax: 10_001, pmax_per_billion: 0 };
    let capable =
        ConnectOptions { path_mtu: Mtu::B1024, traffic_class: 3 << 5 | 2, ..ConnectOptions::default() };
    for (marking, all) in [(marking, false), (flat, true)] {
        let switch = SwitchSettings { ecn_marking: Some(marking), ..SwitchSettings::default() };
        let mut net = Net::new(3, Topology::Star { hosts: 3 }, line(100, 1_000), switch, plain());
        let flows = [net.connect_with(0, 2, &capable), net.connect_with(1, 2, &capable)];
        for flow in flows {
            net.write(flow, 200_000, 1);
        }
        net.world.run();
        let record = net.record.borrow();
        let depths = record.fabric.iter().filter_map(|(_, event)| match event {
            FabricEvent::EcnMarked { depth, .. } => Some(*depth),
            _ => None,
        });
        match all {
            // Marks every packet behind more than 10,000 bytes and no other.
            true => assert!(depths.clone().count() > 100 && depths.clone().all(|depth| depth > 10_000)),
            // A probability of depth / 2^62 never marks.
            false => assert_eq!(depths.count(), 0),
        }
        let seen: u64 = [2]
            .iter()
            .map(|host| net.world.host(net.hosts[*host]).hca().counters().np_ecn_marked_roce_packets)
            .sum();
        assert_eq!(seen as usize, record.marked());
    }
}

#[test]
fn marked_share_matches_the_probability() {
    let marking = EcnMarking { kmin: 4_000, kmax: 200_000_000, pmax_per_billion: PER_BILLION };
    let switch = SwitchSettings {
        ecn_marking: Some(marking),
        pfc: None,
        queue_limit: 128 << 20,
        buffer: 128 << 20,
        ..SwitchSettings::default()
    };
    let capable =
        ConnectOptions { path_mtu: Mtu::B1024, traffic_class: 3 << 5 | 2, ..ConnectOptions::default() };
    let mut net = Net::new(3, Topology::Star { hosts: 5 }, line(100, 1_000), switch, plain());
    for from in 0..4 {
        let flow = net.connect_with(from, 4, &capable);
        net.write(flow, REGION as u32, 20);
    }
    net.world.run();
    let record = net.record.borrow();
    // Four links fill what one drains: the depth rises linearly to 3/4 of all bytes, and the probability with
    // it.
    let link = net.laid.links[4];
    let deepest = net.world.switch(net.laid.switches[0]).counters(link).unwrap().max_queue_bytes;
    let packets = 4 * 20 * 1024;
    let expected = packets as f64 * (deepest as f64 - 4_000.0) / 2.0 / 199_996_000.0;
    let marked = record.marked() as f64;
    assert!((marked - expected).abs() < 0.03 * expected, "{marked} of {expected}");
}

#[test]
fn same_seed_repeats_the_run_and_another_seed_differs() {
    let run = |seed| {
        let mut net = Net::new(
            seed,
            Topology::LeafSpine { leaves: 3, spines: 2, hosts_per_leaf: 3 },
            line(100, 1_000),
            SwitchSettings::default(),
            dcqcn(),
        );
        for from in 0..8 {
            let flow = net.connect(from, 8);
            net.write(flow, 400_000, 2);
        }
        net.run_us(3_000);
        let record = net.record.borrow();
        assert!(record.marked() > 0);
        record.digest
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn flows_of_a_leaf_spread_over_the_spines() {
    let topology = Topology::LeafSpine { leaves: 2, spines: 4, hosts_per_leaf: 8 };
    let mut net = Net::new(1, topology, line(100, 1_000), SwitchSettings::default(), plain());
    for n in 0..8 {
        for _ in 0..4 {
            let flow = net.connect(n, 8 + n);
            net.write(flow, 4_096, 1);
        }
    }
    net.world.run();
    let used = net.laid.switches[2..].iter().filter(|spine| {
        let spine = net.world.switch(**spine);
        spine.links().any(|(link, _)| spine.counters(link).unwrap().sent_frames > 0)
    });
    assert_eq!(used.count(), 4);
}

#[test]
fn static_route_is_used() {
    let topology = Topology::LeafSpine { leaves: 2, spines: 2, hosts_per_leaf: 1 };
    let mut net = Net::new(1, topology, line(100, 1_000), SwitchSettings::default(), plain());
    let [leaf, _, first, second] = net.laid.switches[..] else { panic!("four switches") };
    let link = net
        .laid
        .links
        .iter()
        .copied()
        .find(|link| net.world.link_ends(*link) == [Node::Switch(leaf), Node::Switch(second)]);
    net.world.set_route(leaf, net.hosts[1], &[link.unwrap()]);
    for _ in 0..8 {
        let flow = net.connect(0, 1);
        net.write(flow, 4_096, 1);
    }
    net.world.run();
    let sent_to_leaf2 = |spine| {
        let spine = net.world.switch(spine);
        spine.links().map(|(link, _)| spine.counters(link).unwrap().received_frames).max().unwrap()
    };
    assert!(sent_to_leaf2(second) >= 8);
    assert!(sent_to_leaf2(first) <= 8, "only acknowledgements take the other spine");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// All frames are accounted for with any settings, and none is dropped with sufficient headroom.
    #[test]
    fn every_frame_is_accounted_for(
        seed in any::<u64>(),
        senders in 2u32..6,
        delay_ns in 0u64..3_000,
        xoff in 5_000u64..60_000,
        slack in 0u64..5_000,
        enough in any::<bool>(),
        size in 1u32..200_000,
    ) {
        let headroom = if enough { PfcSettings::headroom_for(100 * GBIT, delay_ns, 4_196) } else { 0 };
        let flow = PfcSettings { xoff, xon: xoff.saturating_sub(slack), headroom, ..PfcSettings::default() };
        let switch = SwitchSettings { pfc: Some(flow), ..SwitchSettings::default() };
        let topology = Topology::Dumbbell { left: senders, right: 2 };
        let mut net = Net::new(seed, topology, line(100, delay_ns), switch, plain());
        let flows: Vec<_> =
            (0..senders).map(|from| net.connect(from as usize, senders as usize + (from % 2) as usize)).collect();
        for flow in &flows {
            net.write(*flow, size, 3);
        }
        net.run_us(300);
        prop_assert!(net.world.frame_counters().is_balanced());
        net.run_us(100_000);
        let counters = net.world.frame_counters();
        prop_assert!(counters.is_balanced());
        if enough {
            prop_assert_eq!(net.record.borrow().lost(), 0);
            for flow in flows {
                prop_assert_eq!(net.completions(flow), (3, true));
            }
            let used: u64 = net.world.switches().map(|(_, switch)| switch.buffer_used()).sum();
            prop_assert_eq!(used, 0);
        }
    }
}
