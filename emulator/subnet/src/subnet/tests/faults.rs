//! Faults of links, switches and agents.

use super::*;
use crate::fault::{MAX_SCHEDULED, MIN_FLAP_TIME};

const MILLISECOND: u64 = 1_000_000;

/// The switch of a host.
fn switch_of(subnet: &Subnet, host: usize) -> PortId {
    PortId { port: 0, ..subnet.topology().peer(hca(subnet, host)).expect("a link") }
}

/// Hands everything that arrived at the manager to it, and lets it sweep.
fn manage(subnet: &mut Subnet, manager: &mut Manager) {
    while let Some((_, packet)) = subnet.take_arrived() {
        manager.receive(subnet, &packet);
    }
    manager.sweep_if_needed(subnet);
}

/// Does everything that is due until a time.
fn run_until(subnet: &mut Subnet, manager: &mut Manager, end: u64) {
    while let Some(at) = subnet.next_timeout().filter(|at| *at <= end) {
        subnet.expire(at);
        manage(subnet, manager);
    }
    subnet.expire(end);
    manage(subnet, manager);
}

/// Counts the responses of a host's agent to so many requests of host 0.
fn responses(subnet: &mut Subnet, to: PortId, requests: usize) -> usize {
    let dlid = subnet.port_info(to).lid;
    let from = hca(subnet, 0);
    (0..requests).filter(|_| get::<NodeInfo>(subnet, from, dlid, 0).is_some()).count()
}

#[test]
fn a_link_flaps_as_often_as_it_should_and_ends_up() {
    let (mut subnet, mut manager) = managed("ring:4", RoutingEngine::UpDown);
    let port = PortId { port: 2, ..switch_of(&subnet, 0) };
    let peer = subnet.topology().peer(port).expect("a link");
    let fault = Fault::Flap { down: 5 * MILLISECOND, up: 3 * MILLISECOND, times: 4 };
    subnet.schedule(10 * MILLISECOND, port, fault).expect("room");
    let downs = |subnet: &Subnet| [port, peer].map(|end| subnet.counters(end).get(PortCounter::LinkDowned));
    for (time, count, state) in
        [(9, 0, true), (10, 1, false), (14, 1, false), (15, 1, true), (18, 2, false), (60, 4, true)]
    {
        run_until(&mut subnet, &mut manager, time * MILLISECOND);
        let is_up = subnet.port_info(port).state == PortState::ACTIVE;
        assert_eq!((downs(&subnet), is_up), ([count; 2], state), "after {time} ms");
    }
    run_until(&mut subnet, &mut manager, 100_000 * MILLISECOND);
    all_reach_all(&mut subnet);
    assert_eq!(subnet.next_timeout(), None);
}

#[test]
fn a_flap_without_times_keeps_the_subnet_no_busier_than_once_a_millisecond() {
    let mut subnet = subnet("one-switch");
    let port = hca(&subnet, 0);
    subnet.apply(port, Fault::Flap { down: 0, up: 0, times: u32::MAX }).expect("a link");
    // As after a long sleep of the machine.
    subnet.expire(3_600_000 * MILLISECOND);
    assert!(subnet.counters(port).get(PortCounter::LinkDowned) <= 2);
    assert!(subnet.next_timeout().is_some_and(|at| at >= 3_600_000 * MILLISECOND + MIN_FLAP_TIME));
    subnet.apply(port, Fault::Flap { down: 1, up: 1, times: 0 }).expect("nothing");
}

#[test]
fn errors_of_a_link_are_counted_where_they_arrive() {
    let (mut subnet, _) = managed("one-switch", RoutingEngine::UpDown);
    let to = hca(&subnet, 1);
    let received = |subnet: &Subnet| subnet.counters(to).get(PortCounter::ReceivePackets);
    let before = received(&subnet);
    subnet.apply(to, Fault::BitErrors { every: 3 }).expect("a port");
    assert_eq!(responses(&mut subnet, to, 9), 6);
    let count = |counter| subnet.counters(to).get(counter);
    assert_eq!([PortCounter::SymbolErrors, PortCounter::ReceiveErrors].map(count), [3, 3]);
    assert_eq!((received(&subnet), subnet.dropped(DropReason::BitError)), (before + 6, 3));

    subnet.apply(to, Fault::BitErrors { every: 0 }).expect("a port");
    subnet.apply(to, Fault::LoseSmps { every: 2 }).expect("a port");
    assert_eq!(responses(&mut subnet, to, 8), 4);
    assert_eq!(subnet.counters(to).get(PortCounter::Vl15Dropped), 4);

    subnet.apply(to, Fault::LoseSmps { every: 0 }).expect("a port");
    let fault = Fault::Count { counter: PortCounter::LinkErrorRecovery, count: 7 };
    subnet.apply(to, fault).expect("a port");
    assert_eq!(responses(&mut subnet, to, 3), 3);
    assert_eq!(subnet.counters(to).get(PortCounter::LinkErrorRecovery), 7);
}

#[test]
fn a_switch_that_reboots_forgets_everything_and_is_set_up_again() {
    let (mut subnet, mut manager) = managed("ring:4", RoutingEngine::UpDown);
    let switch = switch_of(&subnet, 2);
    let lid = subnet.port_info(switch).lid;
    subnet.apply(switch, Fault::Reboot { down: 20 * MILLISECOND }).expect("a switch");
    manage(&mut subnet, &mut manager);
    assert_eq!(subnet.port_info(switch).lid, Lid(0));
    assert_eq!(subnet.port_info(hca(&subnet, 2)).state, PortState::DOWN);
    // The neighbours report it, and the others are routed around it.
    let other = hca(&subnet, 1);
    assert_eq!(responses(&mut subnet, other, 1), 1);
    let neighbour = subnet.topology().peer(PortId { port: 2, ..switch }).expect("a link");
    assert_eq!(subnet.counters(neighbour).get(PortCounter::LinkDowned), 1);

    run_until(&mut subnet, &mut manager, 100_000 * MILLISECOND);
    assert_eq!(subnet.port_info(switch).lid, lid, "the manager remembers");
    all_reach_all(&mut subnet);
}

#[test]
fn a_later_reboot_replaces_an_earlier_one() {
    let (mut subnet, mut manager) = managed("one-switch:3", RoutingEngine::UpDown);
    let switch = switch_of(&subnet, 0);
    subnet.apply(switch, Fault::Reboot { down: 1000 * MILLISECOND }).expect("a switch");
    subnet.apply(switch, Fault::Reboot { down: 2000 * MILLISECOND }).expect("a switch");
    run_until(&mut subnet, &mut manager, 1500 * MILLISECOND);
    assert_eq!(subnet.port_info(hca(&subnet, 1)).state, PortState::DOWN);
    subnet.apply(switch, Fault::Reboot { down: 0 }).expect("a switch");
    run_until(&mut subnet, &mut manager, 1900 * MILLISECOND);
    all_reach_all(&mut subnet);
    run_until(&mut subnet, &mut manager, 2100 * MILLISECOND);
    all_reach_all(&mut subnet);
}

#[test]
fn the_manager_notices_that_its_own_link_was_down() {
    let (mut subnet, mut manager) = managed("one-switch:3", RoutingEngine::UpDown);
    let switch = switch_of(&subnet, 0);
    subnet.apply(switch, Fault::Reboot { down: MILLISECOND }).expect("a switch");
    manage(&mut subnet, &mut manager);
    run_until(&mut subnet, &mut manager, 100 * MILLISECOND);
    all_reach_all(&mut subnet);
}

#[test]
fn a_manager_that_reached_nobody_tries_again() {
    let (mut subnet, mut manager) = managed("ring:4", RoutingEngine::UpDown);
    let port = manager.port();
    subnet.apply(port, Fault::BitErrors { every: 1 }).expect("a port");
    let switch = switch_of(&subnet, 0);
    subnet.apply(switch, Fault::Reboot { down: 0 }).expect("a switch");
    run_until(&mut subnet, &mut manager, 10_000 * MILLISECOND);
    // The sweeps become rare.
    let received = subnet.counters(port).get(PortCounter::ReceiveErrors);
    assert!((1..100).contains(&received), "{received}");
    subnet.apply(port, Fault::BitErrors { every: 0 }).expect("a port");
    run_until(&mut subnet, &mut manager, 20_000 * MILLISECOND);
    all_reach_all(&mut subnet);
}

#[test]
fn a_slow_agent_answers_later_and_only_so_many_wait() {
    let (mut subnet, mut manager) = managed("one-switch", RoutingEngine::UpDown);
    let (from, to) = (hca(&subnet, 0), hca(&subnet, 1));
    let [slid, dlid] = [from, to].map(|port| subnet.port_info(port).lid);
    let request = |id| Packet::subnet(slid, dlid, Smp::new(Method::GET, AttributeId::NodeInfo, 0, id));
    subnet.apply(to, Fault::SlowAgent { delay: 30 * MILLISECOND }).expect("a port");
    subnet.send(from, request(1));
    assert_eq!((subnet.take_arrived(), subnet.next_timeout()), (None, Some(30 * MILLISECOND)));
    subnet.expire(29 * MILLISECOND);
    assert_eq!(subnet.take_arrived(), None);
    subnet.expire(30 * MILLISECOND);
    assert_eq!(subnet.take_arrived().map(|(at, _)| at), Some(from));

    // A manager waits as long, and not for ever.
    assert_eq!(responses(&mut subnet, to, 1), 1);
    subnet.apply(to, Fault::SlowAgent { delay: 300 * MILLISECOND }).expect("a port");
    assert_eq!(responses(&mut subnet, to, 1), 0);

    for id in 0..10_000 {
        subnet.send(from, request(id));
    }
    assert!(subnet.dropped(DropReason::QueueFull) > 5000);
    run_until(&mut subnet, &mut manager, 1000 * MILLISECOND);
    subnet.apply(to, Fault::SlowAgent { delay: 0 }).expect("a port");
    assert_eq!(responses(&mut subnet, to, 1), 1);
}

#[test]
fn an_agent_with_a_foreign_key_answers_nobody_and_reports_it() {
    let (mut subnet, manager) = managed("one-switch:3", RoutingEngine::UpDown);
    let to = hca(&subnet, 2);
    subnet.apply(to, Fault::ManagementKey { key: 0x1234 }).expect("a port");
    assert_eq!(responses(&mut subnet, to, 2), 0);
    assert_eq!(subnet.port_info(to).m_key_violations, 2);
    let due = subnet.next_timeout().expect("a trap");
    subnet.expire(due);
    let traps = core::iter::from_fn(|| subnet.take_arrived()).filter_map(|(at, packet)| match packet.mad {
        Mad::Subnet(smp) if smp.method == Method::TRAP => {
            Some((at, Notice::from_block(&smp.data).header.trap))
        }
        _ => None,
    });
    assert!(traps.collect::<Vec<_>>().contains(&(manager.port(), TrapNumber::BAD_M_KEY)));
    subnet.apply(to, Fault::ManagementKey { key: 0 }).expect("a port");
    assert_eq!(responses(&mut subnet, to, 1), 1);
}

#[test]
fn a_trap_that_cannot_be_repressed_keeps_nobody_busy() {
    let (mut subnet, mut manager) = managed("one-switch:3", RoutingEngine::UpDown);
    let switch = switch_of(&subnet, 0);
    subnet.apply(switch, Fault::ManagementKey { key: 7 }).expect("a switch");
    subnet.apply(PortId { port: 3, ..switch }, Fault::LinkDown).expect("a link");
    manage(&mut subnet, &mut manager);
    let violations = subnet.port_info(switch).m_key_violations;
    assert!((1..100).contains(&violations), "{violations}");
    let next = subnet.next_timeout().expect("the traps are repeated");
    assert!(next >= MILLISECOND, "{next}");
}

#[test]
fn what_is_impossible_is_refused_at_once() {
    let mut subnet = subnet("torus:2x2:1");
    let host = hca(&subnet, 0);
    let switch = switch_of(&subnet, 0);
    let down = Fault::Reboot { down: 1 };
    for (port, fault, error) in [
        (PortId { node: 999, port: 1 }, Fault::LinkDown, FaultError::NoPort),
        (PortId { port: 0, ..host }, Fault::LinkDown, FaultError::NoPort),
        (PortId { port: 200, ..switch }, Fault::BitErrors { every: 1 }, FaultError::NoPort),
        (switch, Fault::Flap { down: 1, up: 1, times: 1 }, FaultError::NoLink),
        (host, down, FaultError::NoSwitch),
        (PortId { port: 1, ..switch }, down, FaultError::NoSwitch),
    ] {
        assert_eq!(subnet.apply(port, fault), Err(error), "{fault:?}");
        assert_eq!(subnet.schedule(5, port, fault), Err(error), "{fault:?}");
    }
    for _ in 0..MAX_SCHEDULED {
        subnet.schedule(5, host, Fault::LinkDown).expect("room");
    }
    assert_eq!(subnet.schedule(5, host, Fault::LinkUp), Err(FaultError::TooMany));
    subnet.expire(5);
    assert_eq!(subnet.schedule(6, host, Fault::LinkUp), Ok(()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever fails, a manager sets the subnet up again when the faults have ended.
    #[test]
    fn a_subnet_heals(faults in prop::collection::vec((0u64..50, 0usize..8, 0u8..4, 0u8..8, 0u32..5), 0..20)) {
        let (mut subnet, mut manager) = managed("ring:4", RoutingEngine::UpDown);
        for (at, node, port, kind, number) in faults {
            let fault = match kind {
                0 => Fault::LinkDown,
                1 => Fault::Flap { down: MILLISECOND, up: MILLISECOND, times: number },
                2 => Fault::BitErrors { every: number },
                3 => Fault::LoseSmps { every: number },
                4 => Fault::SlowAgent { delay: u64::from(number) * 100 * MILLISECOND },
                5 => Fault::Reboot { down: u64::from(number) * MILLISECOND },
                6 => Fault::ManagementKey { key: number.into() },
                _ => Fault::Count { counter: PortCounter::SymbolErrors, count: number.into() },
            };
            let _ = subnet.schedule(at * MILLISECOND, PortId { node, port }, fault);
        }
        run_until(&mut subnet, &mut manager, 200 * MILLISECOND);
        for node in 0..8 {
            for port in 0..4 {
                let port = PortId { node, port };
                for fault in [
                    Fault::BitErrors { every: 0 },
                    Fault::LoseSmps { every: 0 },
                    Fault::SlowAgent { delay: 0 },
                    Fault::ManagementKey { key: 0 },
                    Fault::LinkDown,
                    Fault::LinkUp,
                ] {
                    let _ = subnet.apply(port, fault);
                }
            }
        }
        manage(&mut subnet, &mut manager);
        run_until(&mut subnet, &mut manager, 100_000 * MILLISECOND);
        all_reach_all(&mut subnet);
    }
}
