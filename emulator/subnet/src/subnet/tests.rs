mod data;
mod faults;

use super::*;
use crate::{Manager, RoutingEngine};
use alloc::string::ToString;
use proptest::prelude::*;
use softhca_wire::smp::{Attribute, NodeInfo, NodeType, SmInfo, SmState};

fn subnet(topology: &str) -> Subnet {
    Subnet::new(Topology::generate(topology).expect("a generator").expect("valid arguments"))
}

/// The port of the n-th HCA.
fn hca(subnet: &Subnet, index: usize) -> PortId {
    PortId { node: subnet.topology().hcas().nth(index).expect("an HCA"), port: 1 }
}

fn managed(topology: &str, engine: RoutingEngine) -> (Subnet, Manager) {
    let mut subnet = subnet(topology);
    let port = hca(&subnet, 0);
    let mut manager = Manager::new(&mut subnet, port, engine);
    let report = manager.sweep_if_needed(&mut subnet).expect("the first sweep");
    assert_eq!((report.nodes, report.failed, report.without_lid), (subnet.nodes.len(), 0, 0));
    (subnet, manager)
}

fn get<A: Attribute>(subnet: &mut Subnet, from: PortId, dlid: Lid, modifier: u32) -> Option<A> {
    let slid = subnet.port_info(from).lid;
    let smp = Smp::new(Method::GET, A::ID, modifier, 77);
    let response = subnet.request(from, Packet::subnet(slid, dlid, smp))?;
    (response.status == Status::OK).then(|| A::from_block(&response.data))
}

fn directed(subnet: &mut Subnet, from: PortId, path: &[u8], smp: Smp) -> Option<Smp> {
    subnet.request(from, Packet::subnet(Lid(0), Lid::PERMISSIVE, smp.directed(path)))
}

fn all_reach_all(subnet: &mut Subnet) {
    let ports: Vec<PortId> = subnet.topology().hcas().map(|node| PortId { node, port: 1 }).collect();
    for from in &ports {
        for to in &ports {
            let dlid = subnet.port_info(*to).lid;
            let info = get::<NodeInfo>(subnet, *from, dlid, 0);
            let found = info.map(|info| info.node_guid);
            assert_eq!(found, Some(subnet.nodes[to.node].info.node_guid), "{from:?} to {to:?}, LID {dlid}");
        }
    }
}

#[test]
fn a_directed_route_reaches_the_node_at_its_end_and_returns() {
    let mut subnet = subnet("ring:4");
    let from = hca(&subnet, 0);
    // Port 1 of a switch has the host, port 2 leads to the next switch, port 3 to the one before.
    for (path, kind, arrived) in [
        (&[][..], NodeType::CHANNEL_ADAPTER, 1),
        (&[1][..], NodeType::SWITCH, 1),
        (&[1, 2], NodeType::SWITCH, 3),
        (&[1, 2, 2, 2, 2, 1], NodeType::CHANNEL_ADAPTER, 1),
    ] {
        let smp = Smp::new(Method::GET, AttributeId::NodeInfo, 0, 5);
        let response = directed(&mut subnet, from, path, smp).expect("a response");
        assert_eq!((response.hop_pointer, response.is_returning), (0, true), "{path:?}");
        let info = NodeInfo::from_block(&response.data);
        assert_eq!((info.node_type, info.local_port), (kind, arrived), "{path:?}");
    }
    for path in [&[2][..], &[1, 9], &[1, 0], &[1, 1, 1], &[1, 1, 2]] {
        let smp = Smp::new(Method::GET, AttributeId::NodeInfo, 0, 5);
        assert_eq!(directed(&mut subnet, from, path, smp), None, "{path:?}");
    }
}

#[test]
fn a_directed_route_between_lid_routes_reaches_its_target() {
    let (mut subnet, _) = managed("ring:6", RoutingEngine::MinHop);
    let from = hca(&subnet, 0);
    let switch_lid = |index: usize, subnet: &Subnet| {
        let node = (0..subnet.nodes.len()).filter(|node| subnet.nodes[*node].is_switch()).nth(index);
        subnet.port_info(PortId { node: node.expect("a switch"), port: 0 }).lid
    };
    let slid = subnet.port_info(from).lid;
    let (start, end) = (switch_lid(2, &subnet), subnet.port_info(hca(&subnet, 5)).lid);
    // From the third switch one hop on, then by LID to the last host.
    let mut smp = Smp::new(Method::GET, AttributeId::NodeInfo, 0, 9).directed(&[2]);
    (smp.dr_slid, smp.dr_dlid) = (slid, end);
    let response = subnet.request(from, Packet::subnet(slid, start, smp)).expect("a response");
    let target = hca(&subnet, 5).node;
    assert_eq!(NodeInfo::from_block(&response.data).node_guid, subnet.nodes[target].info.node_guid);
}

#[test]
fn the_manager_connects_every_pair_in_every_topology() {
    for topology in ["one-switch:3", "fat-tree:4", "dragonfly:3x1x1", "torus:3x3", "torus:2x2x2", "ring:7:2"]
    {
        for engine in RoutingEngine::ALL {
            let (mut subnet, _) = managed(topology, engine);
            all_reach_all(&mut subnet);
            for (index, node) in subnet.nodes.iter().enumerate() {
                for port in 1..node.ports.len() {
                    let linked = subnet.topology.peer(PortId { node: index, port: port as u8 }).is_some();
                    let expected = if linked { PortState::ACTIVE } else { PortState::DOWN };
                    assert_eq!(node.ports[port].info.state, expected, "{topology}");
                }
            }
        }
    }
}

#[test]
fn two_hcas_need_no_switch() {
    let topology = Topology::parse("Hca 1 \"a\"\n[1] \"b\"[1]\nHca 1 \"b\"\n").expect("a topology");
    let mut subnet = Subnet::new(topology);
    let port = PortId { node: 0, port: 1 };
    Manager::new(&mut subnet, port, RoutingEngine::MinHop).sweep_if_needed(&mut subnet);
    all_reach_all(&mut subnet);
}

/// A route that goes up after it went down would close a cycle of waiting buffers in a ring.
#[test]
fn up_down_routes_have_no_cycle_of_channels_and_min_hop_routes_of_a_ring_have_one() {
    for (engine, has_cycle) in [(RoutingEngine::MinHop, true), (RoutingEngine::UpDown, false)] {
        let (subnet, _) = managed("ring:6", engine);
        let mut waits: BTreeSet<(PortId, PortId)> = BTreeSet::new();
        let lids: Vec<Lid> =
            subnet.topology.hcas().map(|node| subnet.port_info(PortId { node, port: 1 }).lid).collect();
        for from in subnet.topology.hcas() {
            for lid in &lids {
                let mut at = subnet.topology.peer(PortId { node: from, port: 1 }).expect("a link");
                let mut last = None;
                while subnet.nodes[at.node].is_switch() {
                    let out =
                        PortId { port: subnet.nodes[at.node].output_port(*lid).expect("a route"), ..at };
                    waits.extend(last.map(|last| (last, out)));
                    (last, at) = (Some(out), subnet.topology.peer(out).expect("a link"));
                }
            }
        }
        // Without the channels that wait for none, nothing is left unless there is a cycle.
        while let Some(end) = waits.iter().find(|(_, to)| !waits.iter().any(|(from, _)| from == to)).copied()
        {
            waits.remove(&end);
        }
        assert_eq!(!waits.is_empty(), has_cycle, "{engine}");
    }
}

#[test]
fn a_failed_link_is_reported_until_repressed_and_routed_around() {
    let (mut subnet, mut manager) = managed("ring:4", RoutingEngine::MinHop);
    let switch = subnet.topology.peer(hca(&subnet, 0)).expect("a link").node;
    subnet.apply(PortId { node: switch, port: 2 }, Fault::LinkDown).expect("a link");
    let (at, packet) = subnet.take_arrived().expect("a trap at the manager");
    let Mad::Subnet(trap) = packet.mad else { panic!("an SMP") };
    let notice = Notice::from_block(&trap.data);
    assert_eq!((at, notice.header.trap), (manager.port(), TrapNumber::LINK_STATE));
    assert_eq!(notice.link_state(), notice.header.issuer);
    while subnet.take_arrived().is_some() {}

    let due = subnet.next_timeout().expect("the trap is repeated");
    subnet.expire(due);
    let (_, again) = subnet.take_arrived().expect("the trap again");
    assert_eq!(again.mad, Mad::Subnet(trap));
    assert!(manager.receive(&mut subnet, &again));
    let report = manager.sweep_if_needed(&mut subnet).expect("a sweep");
    assert_eq!((report.nodes, report.failed), (8, 0));
    all_reach_all(&mut subnet);

    // The other switch's trap was lost with its route, and arrives now.
    let due = subnet.next_timeout().expect("the other trap is repeated");
    subnet.expire(due);
    while let Some((_, trap)) = subnet.take_arrived() {
        assert!(manager.receive(&mut subnet, &trap));
    }
    manager.sweep_if_needed(&mut subnet);
    assert_eq!(subnet.next_timeout(), None, "all traps are repressed");

    subnet.apply(PortId { node: switch, port: 2 }, Fault::LinkUp).expect("a link");
    while let Some((_, trap)) = subnet.take_arrived() {
        assert!(manager.receive(&mut subnet, &trap));
    }
    manager.sweep_if_needed(&mut subnet);
    all_reach_all(&mut subnet);
    assert_eq!(subnet.port_info(PortId { node: switch, port: 2 }).state, PortState::ACTIVE);
}

#[test]
fn every_node_answers_for_the_counters_of_its_ports() {
    let (mut subnet, _) = managed("one-switch", RoutingEngine::MinHop);
    let (from, to) = (hca(&subnet, 0), hca(&subnet, 1));
    let switch = subnet.topology().peer(from).expect("a link").node;
    let switch_port = PortId { node: switch, port: 0 };
    let mut ask = |at: PortId, port: u8| {
        let mut mad = [0; 256];
        mad[..4].copy_from_slice(&[1, 4, 1, 1]);
        (mad[17], mad[65]) = (0x12, port);
        let [slid, dlid] = [from, at].map(|port| subnet.port_info(port).lid);
        let mad = Mad::General(mad);
        let packet = Packet {
            q_key: GENERAL_Q_KEY,
            source_qp: 1,
            destination_qp: 1,
            mad,
            ..Packet::subnet(slid, dlid, Smp::default())
        };
        subnet.send(from, packet);
        let Some((_, Packet { mad: Mad::General(mad), .. })) = subnet.take_arrived() else {
            panic!("a response")
        };
        assert_eq!(mad[3], 0x81);
        u32::from_be_bytes(mad[64 + 36..64 + 40].try_into().expect("four bytes"))
    };
    let before = ask(to, 1);
    assert_eq!(ask(to, 1), before + 1, "received packets");
    assert!(ask(switch_port, 1) > before);
    subnet.apply(to, Fault::LinkDown).expect("a link");
    assert_eq!(subnet.counters(to).get(PortCounter::LinkDowned), 1);
}

#[test]
fn only_management_passes_before_ports_are_active() {
    let (mut subnet, _) = managed("one-switch", RoutingEngine::MinHop);
    let (from, to) = (hca(&subnet, 0), hca(&subnet, 1));
    let [slid, dlid] = [from, to].map(|port| subnet.port_info(port).lid);
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 0x32, 1, 1]);
    let packet = |q_key, p_key| Packet {
        q_key,
        p_key,
        source_qp: 1,
        destination_qp: 1,
        mad: Mad::General(mad),
        ..Packet::subnet(slid, dlid, Smp::default())
    };
    subnet.send(from, packet(GENERAL_Q_KEY, 0xffff));
    assert_eq!(subnet.take_arrived().map(|(at, _)| at), Some(to));

    subnet.port_mut(to).state = PortState::ARMED;
    subnet.send(from, packet(GENERAL_Q_KEY, 0xffff));
    assert!(subnet.take_arrived().is_some());
    assert_eq!(subnet.port_info(to).state, PortState::ACTIVE, "a packet makes an armed port active");

    subnet.port_mut(to).state = PortState::INITIALIZE;
    subnet.send(from, packet(GENERAL_Q_KEY, 0xffff));
    assert_eq!((subnet.take_arrived(), subnet.dropped(DropReason::PortState)), (None, 1));
    assert!(get::<NodeInfo>(&mut subnet, from, dlid, 0).is_some());
}

#[test]
fn wrong_keys_are_counted_and_reported() {
    let (mut subnet, mut manager) = managed("one-switch:3", RoutingEngine::MinHop);
    let (from, to) = (hca(&subnet, 1), hca(&subnet, 2));
    let [slid, dlid] = [from, to].map(|port| subnet.port_info(port).lid);
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 0x32, 1, 1]);
    for (p_key, q_key, trap) in [(0x1234, GENERAL_Q_KEY, 257), (0xffff, 5, 258)] {
        let mad = Mad::General(mad);
        subnet.send(
            from,
            Packet { p_key, q_key, destination_qp: 1, mad, ..Packet::subnet(slid, dlid, Smp::default()) },
        );
        let (at, packet) = subnet.take_arrived().expect("a trap");
        let Mad::Subnet(smp) = packet.mad else { panic!("an SMP") };
        let notice = Notice::from_block(&smp.data);
        assert_eq!((at, notice.header.trap.0), (manager.port(), trap));
        let details = notice.key_violation();
        assert_eq!((details.source, details.destination), (slid, dlid));
        assert_eq!(details.key, if trap == 257 { 0x1234 } else { 5 });
        assert!(manager.receive(&mut subnet, &packet));
    }
    assert_eq!([subnet.port_info(to).p_key_violations, subnet.port_info(to).q_key_violations], [1, 1]);
    assert_eq!(subnet.next_timeout(), None, "both are repressed");

    subnet.port_mut(to).m_key = 0x5ec;
    subnet.port_mut(to).m_key_lease = 2;
    subnet.port_mut(to).m_key_protect = 1;
    let info = get::<PortInfo>(&mut subnet, from, dlid, 1).expect("a Get is permitted");
    assert_eq!(info.m_key, 0, "hidden");
    let set = Smp::new(Method::SET, AttributeId::PortInfo, 1, 78).with(&info);
    assert_eq!(subnet.request(from, Packet::subnet(slid, dlid, set)), None);
    assert_eq!((subnet.port_info(to).m_key_violations, subnet.dropped(DropReason::ManagementKey)), (1, 1));
    let (_, packet) = subnet.take_arrived().expect("a trap");
    let Mad::Subnet(smp) = packet.mad else { panic!("an SMP") };
    assert_eq!(Notice::from_block(&smp.data).header.trap, TrapNumber::BAD_M_KEY);
    subnet.expire(3_000_000_000);
    let set = Smp::new(Method::SET, AttributeId::PortInfo, 1, 79).with(&info);
    let with_key = Smp { m_key: 0x5ec, ..set };
    assert!(subnet.request(from, Packet::subnet(slid, dlid, with_key)).is_some());
}

#[test]
fn a_loop_of_forwarding_tables_ends() {
    let (mut subnet, _) = managed("ring:3", RoutingEngine::MinHop);
    let from = hca(&subnet, 0);
    for node in &mut subnet.nodes {
        if let Some(forwarding) = &mut node.forwarding {
            forwarding.linear[40..48].fill(2);
            forwarding.info.linear_top = 48;
        }
    }
    assert!(get::<NodeInfo>(&mut subnet, from, Lid(42), 0).is_none());
    assert_eq!(subnet.dropped(DropReason::TooManyHops), 1);
}

#[test]
fn only_the_changes_of_state_that_the_specification_lists_are_possible() {
    let mut subnet = subnet("one-switch");
    let port = hca(&subnet, 0);
    let mut set = |state| {
        let info = PortInfo { state, physical_state: PhysicalState::NO_CHANGE, ..*subnet.port_info(port) };
        let smp = Smp::new(Method::SET, AttributeId::PortInfo, 1, 1).with(&info);
        directed(&mut subnet, port, &[], smp).expect("a response").status
    };
    assert_eq!(set(PortState::ACTIVE), Status::INVALID_FIELD);
    assert_eq!(set(PortState::INITIALIZE), Status::INVALID_FIELD);
    assert_eq!([set(PortState::ARMED), set(PortState::ACTIVE), set(PortState::ACTIVE)], [Status::OK; 3]);
    assert_eq!(set(PortState::ARMED), Status::INVALID_FIELD);
    assert_eq!(set(PortState::DOWN), Status::OK);
    assert_eq!(subnet.port_info(port).state, PortState::INITIALIZE, "the link has trained again");
}

#[test]
fn a_disabled_port_stays_down_until_it_is_enabled() {
    let (mut subnet, _) = managed("one-switch:3", RoutingEngine::MinHop);
    let (from, victim) = (hca(&subnet, 0), hca(&subnet, 2));
    let mut set = |physical_state| {
        let out = subnet.topology.peer(victim).expect("a link").port;
        let smp = Smp::new(Method::GET, AttributeId::PortInfo, out.into(), 1);
        let now = directed(&mut subnet, from, &[1], smp).expect("a response").data;
        let info = PortInfo { state: PortState::NO_CHANGE, physical_state, ..PortInfo::from_block(&now) };
        let smp = Smp::new(Method::SET, AttributeId::PortInfo, out.into(), 2).with(&info);
        directed(&mut subnet, from, &[1], smp).expect("a response");
        subnet.port_info(victim).state
    };
    assert_eq!(set(PhysicalState::DISABLED), PortState::DOWN);
    assert_eq!(set(PhysicalState::POLLING), PortState::INITIALIZE);
}

#[test]
fn the_manager_answers_sm_info() {
    let (mut subnet, mut manager) = managed("one-switch", RoutingEngine::MinHop);
    let from = hca(&subnet, 1);
    let (slid, dlid) = (subnet.port_info(from).lid, subnet.port_info(from).sm_lid);
    let smp = Smp::new(Method::GET, AttributeId::SmInfo, 0, 3);
    subnet.send(from, Packet::subnet(slid, dlid, smp));
    let (_, request) = subnet.take_arrived().expect("the request");
    assert!(manager.receive(&mut subnet, &request));
    let (at, response) = subnet.take_arrived().expect("the response");
    let Mad::Subnet(smp) = response.mad else { panic!("an SMP") };
    assert_eq!((at, SmInfo::from_block(&smp.data).state), (from, SmState::MASTER));
}

#[test]
fn changed_capabilities_are_reported() {
    let (mut subnet, mut manager) = managed("one-switch:3", RoutingEngine::MinHop);
    let port = hca(&subnet, 2);
    subnet.set_is_sm(port, true);
    let (at, packet) = subnet.take_arrived().expect("a trap");
    let Mad::Subnet(smp) = packet.mad else { panic!("an SMP") };
    let change = Notice::from_block(&smp.data).capability_change();
    assert_eq!((at, change.lid), (manager.port(), subnet.port_info(port).lid));
    assert!(PortCapabilities::from_bits_retain(change.capabilities).contains(PortCapabilities::SM));
    assert!(manager.receive(&mut subnet, &packet));
    subnet.set_description(port.node, "another name");
    assert!(subnet.take_arrived().is_some());
}

#[test]
fn two_thousand_hosts_are_set_up() {
    let (mut subnet, _) = managed("fat-tree:20", RoutingEngine::MinHop);
    let (from, to) = (hca(&subnet, 0), hca(&subnet, 1999));
    let dlid = subnet.port_info(to).lid;
    assert!(get::<NodeInfo>(&mut subnet, from, dlid, 0).is_some());
}

proptest! {
    /// Whatever a program sends, the subnet stays usable: counted, answered or ignored.
    #[test]
    fn no_mad_panics(
        mads in prop::collection::vec((prop::collection::vec(any::<u8>(), 256), any::<[u16; 3]>(), 0usize..3, any::<u32>()), 1..20),
        changes in prop::collection::vec((0usize..256, any::<u8>()), 0..6),
    ) {
        let (mut subnet, mut manager) = managed("ring:3", RoutingEngine::UpDown);
        for (bytes, [slid, dlid, kind], host, now) in mads {
            let mut bytes: [u8; 256] = bytes.try_into().expect("256 bytes");
            // Half of the packets are valid but for some changes.
            let qp = u32::from(kind & 1);
            if kind & 2 != 0 {
                let id = AttributeId::ALL[usize::from(kind >> 2) % AttributeId::ALL.len()];
                let method = if kind & 0x100 == 0 { Method::SET } else { Method::GET };
                let smp = Smp::new(method, id, u32::from(slid % 8), 1).directed(&[1, 2][..usize::from(dlid % 3)]);
                let data = bytes;
                bytes = smp.emit();
                bytes[64..128].copy_from_slice(&data[64..128]);
                changes.iter().for_each(|(at, value)| bytes[*at] = *value);
            }
            let from = hca(&subnet, host);
            if let Ok(mad) = Packet::parse_mad(qp, &bytes) {
                let dlid = if kind & 2 != 0 { Lid::PERMISSIVE } else { Lid(dlid % 9) };
                subnet.send(from, Packet { mad, destination_qp: qp, ..Packet::subnet(Lid(slid), dlid, Smp::default()) });
            }
            subnet.expire(now.into());
            while let Some((at, packet)) = subnet.take_arrived() {
                if at == manager.port() {
                    manager.receive(&mut subnet, &packet);
                }
            }
            manager.sweep_if_needed(&mut subnet);
            while subnet.take_arrived().is_some() {}
        }
        prop_assert!(DropReason::ALL.iter().all(|reason| !reason.to_string().is_empty()));
    }
}
