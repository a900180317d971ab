use super::*;
use crate::node::{NO_PORT, default_sl_to_vl};
use crate::subnet::data::MAX_IN_FLIGHT;
use alloc::vec;
use softhca_wire::smp::{Block, SlToVl};
use softhca_wire::{Bth, Gid, Grh, LocalPacket, Lrh, Opcode, PartitionKey, Psn};

const UC_SEND_ONLY: u8 = 0x24;
const UD_SEND_ONLY: u8 = 0x64;
const GROUP: Lid = Lid(0xc003);

/// A packet with so many bytes of payload.
fn packet(slid: Lid, dlid: Lid, payload: usize) -> Vec<u8> {
    packet_with(Lrh { slid, dlid, ..Lrh::default() }, PartitionKey::DEFAULT, payload)
}

fn packet_with(lrh: Lrh, pkey: PartitionKey, payload: usize) -> Vec<u8> {
    let is_multicast = !lrh.dlid.is_unicast();
    let opcode = Opcode::from_byte(if is_multicast { UD_SEND_ONLY } else { UC_SEND_ONLY });
    let header = if is_multicast { Bth::LEN + 8 } else { Bth::LEN };
    let mut transport = vec![0; header + payload];
    Bth { pkey, ..Bth::new(opcode.expect("it is defined"), Qpn::new(9), Psn::new(0)) }.emit(&mut transport);
    let mut group = [0; 16];
    group[0] = 0xff;
    let (source, destination) = (Gid::default(), Gid(group));
    let (traffic_class, flow_label, payload_length, hop_limit) = (0, 0, 0, 0);
    let grh = Grh { source, destination, traffic_class, flow_label, payload_length, hop_limit };
    let mut bytes = Vec::new();
    LocalPacket::emit(&lrh, is_multicast.then_some(&grh), &transport, &mut bytes).expect("it fits");
    bytes
}

/// A subnet with a manager and a device at every HCA; the ports and their LIDs.
fn with_devices(topology: &str) -> (Subnet, Manager, Vec<PortId>, Vec<Lid>) {
    let (mut subnet, manager) = managed(topology, RoutingEngine::UpDown);
    let ports: Vec<PortId> = subnet.topology().hcas().map(|node| PortId { node, port: 1 }).collect();
    ports.iter().for_each(|port| subnet.attach_device(*port));
    let lids = ports.iter().map(|port| subnet.port_info(*port).lid).collect();
    (subnet, manager, ports, lids)
}

fn switch_port(subnet: &Subnet, hca: PortId) -> PortId {
    subnet.topology().peer(hca).expect("a link")
}

#[test]
fn packets_arrive_in_order_at_the_port_with_the_lid_and_are_counted() {
    let (mut subnet, _, ports, lids) = with_devices("fat-tree:4");
    let before = *subnet.counters(ports[9]);
    let sent: Vec<Vec<u8>> = (0..20).map(|words| packet(lids[2], lids[9], words * 4)).collect();
    sent.iter().for_each(|bytes| subnet.send_data(ports[2], bytes));
    assert_eq!(subnet.take_ready(), BTreeSet::from([ports[9]]));
    let received: Vec<Vec<u8>> = core::iter::from_fn(|| subnet.receive_data(ports[9])).collect();
    assert_eq!(received, sent);
    let grown = |counter| subnet.counters(ports[9]).get(counter) - before.get(counter);
    assert_eq!(grown(PortCounter::ReceivePackets), 20);
    let words: usize = sent.iter().map(|bytes| (bytes.len() - 2) / 4).sum();
    assert_eq!(grown(PortCounter::ReceiveData), words as u64);
    // The own LID needs no link.
    subnet.send_data(ports[2], &packet(lids[2], lids[2], 8));
    assert!(subnet.receive_data(ports[2]).is_some());
}

#[test]
fn each_lid_of_a_port_with_path_bits_reaches_it() {
    let (mut subnet, _, ports, lids) = with_devices("one-switch:2");
    let base = Lid(0x40);
    let switch = switch_port(&subnet, ports[1]).node;
    let out = switch_port(&subnet, ports[1]).port;
    let info = subnet.port_mut(ports[1]);
    (info.lid, info.lmc) = (base, 2);
    let forwarding = subnet.nodes[switch].forwarding.as_mut().expect("a switch");
    forwarding.linear.resize(0x50, NO_PORT);
    forwarding.info.linear_top = 0x4f;
    forwarding.linear[0x40..0x44].fill(out);
    forwarding.linear[0x44] = out;
    for path in 0..5 {
        subnet.send_data(ports[0], &packet(lids[0], Lid(base.0 + path), 0));
        assert_eq!(subnet.receive_data(ports[1]).is_some(), path < 4, "{path}");
    }
    assert_eq!(subnet.dropped(DropReason::WrongLid), 1);
    // Any of its LIDs is a source.
    subnet.send_data(ports[1], &packet(Lid(base.0 + 3), lids[0], 0));
    assert!(subnet.receive_data(ports[0]).is_some());
}

#[test]
fn impossible_packets_are_dropped_counted_and_harm_nobody() {
    let (mut subnet, _, ports, lids) = with_devices("ring:4");
    let (from, own, peer) = (ports[0], lids[0], lids[2]);
    let mut expect = |bytes: &[u8], reason: DropReason| {
        let before = subnet.dropped(reason);
        subnet.send_data(from, bytes);
        assert_eq!(subnet.dropped(reason), before + 1, "{reason}");
        assert!(ports.iter().all(|port| subnet.receive_data(*port).is_none()), "{reason}");
    };
    expect(&packet(own, Lid(0x7777), 0), DropReason::NoRoute);
    expect(&packet(own, Lid(0), 0), DropReason::NoRoute);
    expect(&packet(own, Lid::PERMISSIVE, 0), DropReason::NoRoute);
    expect(&packet(peer, lids[1], 0), DropReason::WrongLid);
    expect(&packet(own, peer, 4100), DropReason::TooLong);
    expect(&[], DropReason::Malformed);
    let mut damaged = packet(own, peer, 40);
    damaged[30] ^= 1;
    expect(&damaged, DropReason::Malformed);
    let switch = (0..subnet.nodes.len()).find(|node| subnet.nodes[*node].is_switch()).expect("a switch");
    let lid = subnet.port_info(PortId { node: switch, port: 0 }).lid;
    subnet.send_data(from, &packet(own, lid, 0));
    assert_eq!(subnet.dropped(DropReason::NoAgent), 1);
    assert_eq!(subnet.counters(from).get(PortCounter::SymbolErrors), 1);
    subnet.send_data(from, &packet(own, peer, 4096));
    assert!(subnet.receive_data(ports[2]).is_some());
}

#[test]
fn a_loop_of_forwarding_tables_ends() {
    let (mut subnet, _, ports, lids) = with_devices("ring:4");
    let loops = Lid(0x300);
    for node in &mut subnet.nodes {
        let Some(forwarding) = &mut node.forwarding else { continue };
        forwarding.info.linear_top = loops.0;
        forwarding.linear.resize(usize::from(loops.0) + 1, NO_PORT);
        // Port 2 of each switch leads to the next one.
        forwarding.linear[usize::from(loops.0)] = 2;
        forwarding.multicast.insert((0, 0), Block::from_words([0b1100; 32]));
    }
    subnet.send_data(ports[0], &packet(lids[0], loops, 0));
    assert_eq!(subnet.dropped(DropReason::TooManyHops), 1);
    subnet.send_data(ports[0], &packet(lids[0], GROUP, 0));
    assert!(subnet.dropped(DropReason::TooManyHops) > 1);
    assert!(subnet.receive_data(ports[0]).is_some(), "the own copy");
}

#[test]
fn multicast_reaches_the_ports_in_the_tables_once() {
    let (mut subnet, _, ports, lids) = with_devices("one-switch:5");
    let switch = switch_port(&subnet, ports[0]);
    let mask = ports[1..4].iter().fold(0, |mask, port| mask | 1 << switch_port(&subnet, *port).port);
    let mut words = [0; 32];
    words[usize::from(GROUP.0 & 31)] = mask | 1 << switch.port;
    let forwarding = subnet.nodes[switch.node].forwarding.as_mut().expect("a switch");
    forwarding.multicast.insert((0, 0), Block::from_words(words));
    subnet.send_data(ports[0], &packet(lids[0], GROUP, 64));
    let copies: Vec<usize> =
        ports.iter().map(|port| core::iter::from_fn(|| subnet.receive_data(*port)).count()).collect();
    assert_eq!(copies, [1, 1, 1, 1, 0], "the sender has the one that its HCA passes to its members");
    subnet.send_data(ports[0], &packet(lids[0], Lid(0xfffe), 64));
    assert_eq!(subnet.dropped(DropReason::NoRoute), 1);
}

#[test]
fn data_passes_active_ports_only_and_a_link_that_is_down_drops_it() {
    let (mut subnet, mut manager, ports, lids) = with_devices("one-switch:2");
    let bytes = packet(lids[0], lids[1], 4);
    subnet.apply(ports[1], Fault::LinkDown).expect("a link");
    subnet.send_data(ports[0], &bytes);
    assert_eq!(subnet.dropped(DropReason::LinkDown), 1);
    subnet.apply(ports[1], Fault::LinkUp).expect("a link");
    // Nobody has configured the port yet.
    assert_eq!(subnet.port_info(ports[1]).state, PortState::INITIALIZE);
    subnet.send_data(ports[0], &bytes);
    assert_eq!(subnet.dropped(DropReason::PortState), 1);
    while let Some((at, packet)) = subnet.take_arrived() {
        assert!(at == manager.port() && manager.receive(&mut subnet, &packet));
    }
    manager.sweep_if_needed(&mut subnet);
    subnet.send_data(ports[0], &bytes);
    assert!(subnet.receive_data(ports[1]).is_some());
}

#[test]
fn a_service_level_without_a_lane_and_a_key_that_a_switch_enforces_are_checked() {
    let (mut subnet, _, ports, lids) = with_devices("one-switch:2");
    let lrh = Lrh { slid: lids[0], dlid: lids[1], service_level: 5, ..Lrh::default() };
    let mut table = default_sl_to_vl();
    table.0[5] = 15;
    let (input, output) = (switch_port(&subnet, ports[0]), switch_port(&subnet, ports[1]));
    let forwarding = subnet.nodes[input.node].forwarding.as_mut().expect("a switch");
    forwarding.sl_to_vl.insert((input.port, output.port), SlToVl(table.0));
    subnet.send_data(ports[0], &packet_with(lrh, PartitionKey::DEFAULT, 0));
    assert_eq!(subnet.dropped(DropReason::NoLane), 1);
    let lrh = Lrh { service_level: 4, ..lrh };
    subnet.send_data(ports[0], &packet_with(lrh, PartitionKey(0x8001), 0));
    assert!(subnet.receive_data(ports[1]).is_some(), "no switch enforces partitions");
    subnet.port_mut(output).outbound_enforcement = true;
    subnet.send_data(ports[0], &packet_with(lrh, PartitionKey(0x8001), 0));
    assert_eq!(subnet.dropped(DropReason::PartitionKey), 1);
    assert_eq!(subnet.port_info(output).p_key_violations, 1);
    subnet.send_data(ports[0], &packet_with(lrh, PartitionKey(0x7fff), 0));
    assert!(subnet.receive_data(ports[1]).is_some(), "a limited member and a full one");
}

#[test]
fn a_bad_key_at_a_device_raises_a_trap() {
    let (mut subnet, _, ports, lids) = with_devices("one-switch:2");
    let violation = KeyViolation {
        source: lids[0],
        destination: lids[1],
        key: 0x8001,
        destination_qp: Qpn::new(6),
        ..KeyViolation::default()
    };
    for (trap, reason) in
        [(TrapNumber::BAD_P_KEY, DropReason::PartitionKey), (TrapNumber::BAD_Q_KEY, DropReason::QueueKey)]
    {
        subnet.report_bad_key(ports[1], trap, violation);
        assert_eq!(subnet.dropped(reason), 1);
        let (at, packet) = subnet.take_arrived().expect("the trap");
        let Mad::Subnet(smp) = packet.mad else { panic!("an SMP") };
        let notice = Notice::from_block(&smp.data);
        assert_eq!((at, notice.header.trap), (ports[0], trap));
        let details = notice.key_violation();
        assert_eq!((details.key, details.source, details.destination_qp), (0x8001, lids[0], Qpn::new(6)));
    }
    let info = subnet.port_info(ports[1]);
    assert_eq!((info.p_key_violations, info.q_key_violations), (1, 1));
    assert!(subnet.take_changed().contains(&ports[1]));
}

#[test]
fn a_flood_waits_for_its_receiver_and_is_bounded() {
    let (mut subnet, _, ports, lids) = with_devices("one-switch:3");
    let bytes = packet(lids[0], lids[1], 4096);
    let mut sent = 0;
    while subnet.has_room(ports[0]) {
        subnet.send_data(ports[0], &bytes);
        sent += 1;
    }
    assert!((MAX_IN_FLIGHT..MAX_IN_FLIGHT + bytes.len()).contains(&(sent * bytes.len())));
    assert!(subnet.has_room(ports[2]), "others send");
    subnet.take_ready();
    assert!(subnet.receive_data(ports[1]).is_some());
    assert_eq!(subnet.take_ready(), BTreeSet::from([ports[0]]));
    assert!(subnet.has_room(ports[0]));
    // A device that does not ask loses what exceeds the limit.
    for _ in 0..10 * sent {
        subnet.send_data(ports[0], &bytes);
    }
    assert!(subnet.dropped(DropReason::QueueFull) > 0);
    let received = core::iter::from_fn(|| subnet.receive_data(ports[1])).count();
    assert!(received * bytes.len() < 5 * MAX_IN_FLIGHT);
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..100),
        (slid, dlid, sl) in any::<(u16, u16, u8)>(),
    ) {
        let (mut subnet, _, ports, _) = with_devices("one-switch:2");
        subnet.send_data(ports[0], &bytes);
        let lrh = Lrh { slid: Lid(slid), dlid: Lid(dlid), service_level: sl & 15, ..Lrh::default() };
        subnet.send_data(ports[0], &packet_with(lrh, PartitionKey(dlid), 0));
        subnet.send_data(ports[0], &packet_with(Lrh { slid: Lid(1), ..lrh }, PartitionKey(dlid), 0));
    }
}
