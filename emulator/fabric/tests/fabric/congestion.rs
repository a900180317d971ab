//! Published congestion experiments at a small scale: DCQCN, unfairness, victim flows, PFC storms, deadlock.

use super::net::verbs::ConnectOptions;
use super::net::*;
use softhca_engine::{CongestionSettings, Event, Instant, Recovery, Settings};
use softhca_fabric::{
    Action, Direction, FabricEvent, FrameDropReason, Node, PacketClass, PacketClasses, PauseEndReason,
    PfcSettings, PfcWatchdog, ReceiverSettings, Repeat, Rule, RuleId, Selector, Stage, SwitchSettings,
    Topology, WatchdogAction, pause_ns,
};
use softhca_wire::{Mtu, Opcode};
use std::time::Duration;

/// Keeps a flow busy with more data than it can send during any test.
fn fill(net: &mut Net, flow: Flow) {
    net.write(flow, REGION as u32, 1_000);
}

/// Goodput of each flow in Gb/s between two times in microseconds.
fn shares(net: &mut Net, flows: &[Flow], from: u64, to: u64) -> Vec<f64> {
    net.run_us(from);
    let before: Vec<_> = flows.iter().map(|flow| net.received(*flow)).collect();
    net.run_us(to);
    let bits = |(flow, before): (&Flow, u64)| (net.received(*flow) - before) as f64 * 8.0;
    flows.iter().zip(before).map(bits).map(|bits| bits / ((to - from) as f64 * 1_000.0)).collect()
}

#[test]
fn two_flows_from_40_and_5_gbit_converge_to_equal_shares() {
    let mut net =
        Net::new(5, Topology::Star { hosts: 3 }, line(40, 1_000), SwitchSettings::default(), dcqcn());
    let flows = [net.connect(0, 2), net.connect(1, 2)];
    for (flow, rate) in flows.iter().zip([40, 5]) {
        let qp = flow.from.qp;
        assert!(net.world.with_hca(flow.from.host, |hca, ctx| hca.set_rate(ctx, qp, rate * GBIT)));
    }
    flows.iter().for_each(|flow| fill(&mut net, *flow));
    let early = shares(&mut net, &flows, 0, 100);
    assert!(early[0] > 4.0 * early[1], "{early:?}");
    let late = shares(&mut net, &flows, 60_000, 120_000);
    let fairness = (late[0] + late[1]).powi(2) / (2.0 * (late[0].powi(2) + late[1].powi(2)));
    assert!(fairness > 0.98, "{late:?}: Jain's index {fairness}");
    assert!(late[0] + late[1] > 30.0, "{late:?}");
    assert_eq!(net.record.borrow().paused(), 0, "marks come before pauses");
}

#[test]
fn cnps_keep_their_interval_and_traffic_class() {
    let mut net =
        Net::new(5, Topology::Star { hosts: 3 }, line(40, 1_000), SwitchSettings::default(), dcqcn());
    let flows = [net.connect(0, 2), net.connect(1, 2)];
    flows.iter().for_each(|flow| fill(&mut net, *flow));
    net.run_us(2_000);
    let record = net.record.borrow();
    let mut seen = 0;
    for flow in flows {
        let times: Vec<u64> = record
            .cards
            .iter()
            .filter_map(|(at, host, event)| match event {
                Event::EcnMarkReceived { qp, cnp_queued: true, .. }
                    if (*host, *qp) == (flow.to.host, flow.to.qp) =>
                {
                    Some(*at)
                }
                _ => None,
            })
            .collect();
        assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= 50_000), "{times:?}");
        seen += times.len() as u64;
    }
    let counters = net.world.host(net.hosts[2]).hca().counters();
    assert_eq!(counters.np_cnp_sent, seen);
    assert!(counters.np_ecn_marked_roce_packets > seen);
    let handled: u64 = (0..2).map(|n| net.world.host(net.hosts[n]).hca().counters().rp_cnp_handled).sum();
    assert!(handled > 0 && handled <= seen);
}

#[test]
fn hca_without_reaction_point_counts_cnps_and_keeps_its_rate() {
    let notifies = Settings {
        congestion: CongestionSettings { rate_control: None, ..CongestionSettings::DCQCN },
        ..plain()
    };
    let mut net =
        Net::new(5, Topology::Star { hosts: 3 }, line(40, 1_000), SwitchSettings::default(), notifies);
    let capable =
        ConnectOptions { path_mtu: Mtu::B4096, traffic_class: 3 << 5 | 2, ..ConnectOptions::default() };
    let flows = [net.connect_with(0, 2, &capable), net.connect_with(1, 2, &capable)];
    flows.iter().for_each(|flow| fill(&mut net, *flow));
    net.run_us(2_000);
    let record = net.record.borrow();
    assert!(record.paused() > 0, "no sender slows down, so senders are paused");
    assert!(!record.cards.iter().any(|(_, _, event)| matches!(event, Event::RateChanged { .. })));
    assert!(net.world.host(net.hosts[0]).hca().counters().rp_cnp_handled > 0);
}

/// Three senders on the left switch, and one on the right beside the receiver.
fn unfair(settings: Settings) -> Vec<f64> {
    let switch = SwitchSettings::default();
    let mut net = Net::new(5, Topology::Dumbbell { left: 3, right: 2 }, line(40, 1_000), switch, settings);
    let flows: Vec<_> = [0, 1, 2, 3].into_iter().map(|from| net.connect(from, 4)).collect();
    flows.iter().for_each(|flow| fill(&mut net, *flow));
    shares(&mut net, &flows, 60_000, 120_000)
}

#[test]
fn pfc_alone_favors_the_near_sender() {
    let shares = unfair(plain());
    // Two ports of the right switch share the receiver; the near sender has one of them alone.
    assert!(shares[3] > 2.0 * shares[..3].iter().copied().fold(0.0, f64::max), "{shares:?}");
}

#[test]
fn dcqcn_gives_near_and_far_senders_equal_shares() {
    let shares = unfair(dcqcn());
    let (least, most) = shares.iter().fold((f64::MAX, 0.0f64), |(a, b), x| (a.min(*x), b.max(*x)));
    assert!(most < 1.5 * least, "{shares:?}");
    assert!(shares.iter().sum::<f64>() > 30.0, "{shares:?}");
}

/// A victim flow from left to right beside an incast of `senders` from the left to another host on the right.
/// The middle link is ten times as fast as all others and not congested.
fn victim(settings: Settings, senders: usize) -> f64 {
    let topology = Topology::Dumbbell { left: 1 + senders as u32, right: 2 };
    let headroom = PfcSettings::headroom_for(400 * GBIT, 1_000, 4_196);
    let flow = PfcSettings { headroom, ..PfcSettings::default() };
    let switch = SwitchSettings { pfc: Some(flow), ..SwitchSettings::default() };
    let mut net = Net::new(5, topology, line(40, 1_000), switch, settings);
    let middle = *net.laid.links.last().unwrap();
    net.world.link_mut(middle).set_settings(line(400, 1_000));
    let victim = net.connect(0, senders + 1);
    fill(&mut net, victim);
    for from in 1..=senders {
        let flow = net.connect(from, senders + 2);
        fill(&mut net, flow);
    }
    let share = shares(&mut net, &[victim], 60_000, 90_000)[0];
    assert_eq!(net.record.borrow().lost(), 0);
    share
}

#[test]
fn victim_flow_without_a_congested_link_suffers_from_pfc_alone() {
    let alone = victim(plain(), 0);
    assert!(alone > 38.0, "{alone}");
    let paused = victim(plain(), 4);
    assert!(paused < 0.6 * alone, "{paused} of {alone}");
    let controlled = victim(dcqcn(), 4);
    assert!(controlled > 0.9 * alone, "{controlled} of {alone}");
}

#[test]
fn xoff_below_kmin_pauses_and_sends_no_cnps() {
    // XOFF of a port is below Kmin of the queue.
    let flow = PfcSettings { xoff: 20_000, xon: 15_000, ..PfcSettings::default() };
    let switch = SwitchSettings {
        pfc: Some(flow),
        ecn_marking: Some(softhca_fabric::EcnMarking {
            kmin: 200_000,
            kmax: 400_000,
            pmax_per_billion: 10_000_000,
        }),
        ..SwitchSettings::default()
    };
    let mut net = Net::new(5, Topology::Star { hosts: 3 }, line(40, 1_000), switch, dcqcn());
    for from in 0..2 {
        let flow = net.connect(from, 2);
        fill(&mut net, flow);
    }
    net.run_us(5_000);
    let record = net.record.borrow();
    assert!(record.paused() > 100);
    assert_eq!(record.marked(), 0);
    assert_eq!(net.world.host(net.hosts[2]).hca().counters().np_cnp_sent, 0);
}

#[test]
fn a_pause_lasts_exactly_its_quanta() {
    let mut net =
        Net::new(5, Topology::Star { hosts: 2 }, line(40, 1_000), SwitchSettings::default(), plain());
    // A stalled receiver pauses its sender once; the refreshes are dropped.
    let flow = PfcSettings { xoff: 20_000, xon: 10_000, quanta: 1_000, ..PfcSettings::default() };
    net.world.set_receiver(
        net.hosts[1],
        ReceiverSettings { bits_per_second: Some(0), pfc: Some(flow), ..ReceiverSettings::default() },
    );
    let pauses = Selector {
        direction: Some(Direction::Forward),
        classes: Some(PacketClasses::Only(PacketClass::Pause)),
        ..Selector::default()
    };
    let repeat = Repeat { skip: 1, ..Repeat::default() };
    net.world
        .add_rule(net.laid.links[1], Rule { id: RuleId(0), selector: pauses, repeat, action: Action::Drop });
    let flow = net.connect(0, 1);
    fill(&mut net, flow);
    net.run_us(500);
    let record = net.record.borrow();
    let at_switch = Node::Switch(net.laid.switches[0]);
    let started = record.fabric.iter().find_map(|(at, event)| match event {
        FabricEvent::PauseReceived { node, until_ns, .. } if *node == at_switch => Some((*at, *until_ns)),
        _ => None,
    });
    let ended = record.fabric.iter().find_map(|(at, event)| match event {
        FabricEvent::PauseEnded { node, reason: PauseEndReason::Expired, .. } if *node == at_switch => {
            Some(*at)
        }
        _ => None,
    });
    let (from, until) = started.expect("a pause");
    assert_eq!(until - from, 12_800, "1000 quanta of 512 bits at 40 Gb/s");
    assert_eq!(ended, Some(until));
    assert_eq!(pause_ns(1_000, std::num::NonZeroU64::new(40 * GBIT)), 12_800);
    assert!(!record.faults.is_empty(), "the rule asked for pause frames and got them");
    let sent = record.pauses.iter().filter(|(_, _, _, stage, _)| *stage == Stage::Admitted).count();
    assert_eq!(sent, record.count(|event| matches!(event, FabricEvent::PauseSent { .. })));
}

#[test]
fn slow_receiver_pauses_its_sender_without_loss() {
    let mut net =
        Net::new(5, Topology::Star { hosts: 2 }, line(40, 1_000), SwitchSettings::default(), plain());
    let host = net.hosts[1];
    net.world.set_receiver(
        host,
        ReceiverSettings { bits_per_second: Some(10 * GBIT), ..ReceiverSettings::default() },
    );
    let flow = net.connect(0, 1);
    net.write(flow, REGION as u32, 8);
    let share = shares(&mut net, &[flow], 1_000, 4_000)[0];
    assert!((9.0..10.0).contains(&share), "{share} Gb/s");
    net.world.run();
    assert_eq!(net.completions(flow), (8, true));
    assert_eq!(net.record.borrow().lost(), 0);
    assert!(net.world.port_counters(host).pauses_sent[3] > 1);
    assert!(
        net.world.port_counters(net.hosts[0]).paused_ns[3] > 0,
        "the pause reaches the sender in the end"
    );
}

/// A host on the left stalls while others use the network. Returns the goodput of another flow.
fn storm(switch: SwitchSettings, watchdog: Option<Duration>) -> (Net, f64, Flow) {
    let settings = Settings { recovery: Recovery::GoBackN, ..plain() };
    let mut net = Net::new(5, Topology::Dumbbell { left: 3, right: 2 }, line(40, 1_000), switch, settings);
    let flows = [net.connect(3, 0), net.connect(3, 1), net.connect(4, 2)];
    flows.iter().for_each(|flow| fill(&mut net, *flow));
    let broken = ReceiverSettings { bits_per_second: Some(0), watchdog, ..ReceiverSettings::default() };
    net.world.set_receiver(net.hosts[0], broken);
    let share = shares(&mut net, &[flows[2]], 20_000, 30_000)[0];
    (net, share, flows[2])
}

#[test]
fn stalled_receiver_stops_the_network_and_a_watchdog_contains_it() {
    let (net, share, _) = storm(SwitchSettings::default(), None);
    assert_eq!(share, 0.0, "the other flow shares only the middle link with the stalled host");
    assert!(net.world.paused_priorities(net.hosts[3]) >> 3 & 1 == 1, "the pauses reach the senders");

    let time = Duration::from_millis(2);
    for remedy in [WatchdogAction::Drop, WatchdogAction::Forward] {
        let watchdog = PfcWatchdog { detection_time: time, restoration_time: time, action: remedy };
        let (net, share, _) =
            storm(SwitchSettings { watchdog: Some(watchdog), ..SwitchSettings::default() }, None);
        assert!(share > 10.0, "{share} with {remedy:?}");
        let record = net.record.borrow();
        assert!(record.count(|event| matches!(event, FabricEvent::WatchdogFired { .. })) > 0);
        let cause = |event: &FabricEvent| {
            matches!(event, FabricEvent::FrameDropped { reason: FrameDropReason::Watchdog, .. })
        };
        assert_eq!(record.count(cause) > 0, remedy == WatchdogAction::Drop);
    }

    let (net, share, _) = storm(SwitchSettings::default(), Some(time));
    assert!(share > 10.0, "{share} with a watchdog at the host");
    assert_eq!(net.world.port_counters(net.hosts[0]).watchdog_fired, 1);
}

#[test]
fn pause_storm_of_a_host_stops_its_senders() {
    let mut net =
        Net::new(5, Topology::Star { hosts: 3 }, line(40, 1_000), SwitchSettings::default(), plain());
    net.world
        .set_receiver(net.hosts[1], ReceiverSettings { pause_storm: 1 << 3, ..ReceiverSettings::default() });
    let flows = [net.connect(0, 1), net.connect(2, 0)];
    flows.iter().for_each(|flow| fill(&mut net, *flow));
    let stopped = shares(&mut net, &flows, 2_000, 4_000);
    assert_eq!(stopped[0], 0.0);
    net.world.set_receiver(net.hosts[1], ReceiverSettings::default());
    let gone_on = shares(&mut net, &flows, 5_000, 7_000);
    assert!(gone_on[0] > 30.0, "{gone_on:?}");
}

/// Three switches in a ring; each flow crosses two of the links.
fn ring(flows: usize, switch: SwitchSettings, recovery: Recovery) -> (Net, Vec<Flow>, u64) {
    let settings = Settings { recovery, ..plain() };
    let topology = Topology::Ring { switches: 3, hosts_per_switch: 2 };
    let mut net = Net::new(5, topology, line(40, 1_000), switch, settings);
    // Each switch has a sender and a receiver; each flow leaves the ring two switches further.
    let flows: Vec<_> = (0..flows).map(|n| net.connect(2 * n, 2 * ((n + 2) % 3) + 1)).collect();
    flows.iter().for_each(|flow| fill(&mut net, *flow));
    net.run_us(20_000);
    let before: u64 = flows.iter().map(|flow| net.received(*flow)).sum();
    net.run_us(30_000);
    let after: u64 = flows.iter().map(|flow| net.received(*flow)).sum();
    (net, flows, after - before)
}

#[test]
fn two_flows_in_a_ring_progress_and_the_third_deadlocks() {
    let switch = SwitchSettings { ecn_marking: None, ..SwitchSettings::default() };
    let (net, ..) = ring(2, switch, Recovery::Fatal);
    assert_eq!(net.record.borrow().lost(), 0);
    assert!(ring(2, switch, Recovery::Fatal).2 > 10_000_000);

    let (net, _, moved) = ring(3, switch, Recovery::Fatal);
    assert_eq!(moved, 0, "nothing moves any more");
    assert_eq!(net.record.borrow().lost(), 0);
    let stopped = net.laid.switches.iter().filter(|switch| {
        net.world
            .switch(**switch)
            .links()
            .any(|(link, _)| net.world.switch(**switch).paused_priorities(link) != 0)
    });
    assert_eq!(stopped.count(), 3);
}

#[test]
fn watchdog_resolves_a_deadlock() {
    let time = Duration::from_millis(1);
    let watchdog = PfcWatchdog { detection_time: time, restoration_time: time, action: WatchdogAction::Drop };
    let switch = SwitchSettings { ecn_marking: None, watchdog: Some(watchdog), ..SwitchSettings::default() };
    let (net, _, moved) = ring(3, switch, Recovery::GoBackN);
    assert!(moved > 1_000_000, "{moved}");
    let record = net.record.borrow();
    assert!(record.count(|event| matches!(event, FabricEvent::WatchdogFired { .. })) > 0);
    assert!(record.count(|event| matches!(event, FabricEvent::WatchdogRestored { .. })) > 0);
}

#[test]
fn unpaused_priority_keeps_sending() {
    let mut net =
        Net::new(5, Topology::Star { hosts: 3 }, line(40, 1_000), SwitchSettings::default(), plain());
    net.world
        .set_receiver(net.hosts[1], ReceiverSettings { pause_storm: 1 << 3, ..ReceiverSettings::default() });
    // Service level 4 without a DSCP is priority 4.
    let other = ConnectOptions {
        path_mtu: Mtu::B4096,
        traffic_class: 0,
        service_level: 4,
        ..ConnectOptions::default()
    };
    let flows = [net.connect(0, 1), net.connect_with(0, 1, &other)];
    flows.iter().for_each(|flow| fill(&mut net, *flow));
    let shares = shares(&mut net, &flows, 2_000, 4_000);
    assert_eq!(shares[0], 0.0);
    assert!(shares[1] > 35.0, "{shares:?}");
}

#[test]
fn cnp_is_a_packet_with_its_own_priority() {
    let mut net =
        Net::new(5, Topology::Star { hosts: 2 }, line(40, 1_000), SwitchSettings::default(), dcqcn());
    let mark = Rule {
        id: RuleId(0),
        selector: Selector { classes: Some(PacketClasses::Data), ..Selector::default() },
        repeat: Repeat::times(1),
        action: Action::MarkCe,
    };
    net.world.add_rule(net.laid.links[0], mark);
    let count = Rule {
        id: RuleId(1),
        selector: Selector {
            classes: Some(PacketClasses::Only(PacketClass::Cnp)),
            opcodes: vec![Opcode::CNP],
            priority: Some(6),
            ..Selector::default()
        },
        repeat: Repeat::default(),
        action: Action::Count,
    };
    net.world.add_rule(net.laid.links[0], count);
    let flow = net.connect(0, 1);
    net.write(flow, 100_000, 1);
    net.world.run();
    assert_eq!(net.completions(flow), (1, true));
    let (_, counters) = net.world.link(net.laid.links[0]).rules().nth(1).unwrap();
    assert_eq!(counters.fired, 1);
    let record = net.record.borrow();
    let halved = record.cards.iter().find_map(|(_, _, event)| match event {
        Event::RateChanged { bits_per_second, .. } => Some(*bits_per_second),
        _ => None,
    });
    assert_eq!(halved, Some(20 * GBIT));
    assert!(net.world.now() > Instant::from_nanos(0));
}
