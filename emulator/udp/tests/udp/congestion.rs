//! Congestion over real sockets: CE marks in the IP header, CNPs in response, and pauses that stop a port.

use crate::bare::{self, RIGHTS};
use softhca_engine::{
    AddressVector, ClientId, CongestionSettings, CqId, DeviceLimits, Instant, MemoryRegion, PayloadMode,
    PdId, QpInitAttributes, QpRings, Settings,
};
use softhca_fabric::{
    Action, EcnMarking, EventSink, LinkSettings, NetworkEvent, PER_BILLION, PacketClasses, PfcSettings,
    ReceiverSettings, Repeat, Rule, RuleId, Selector, Stage, SwitchSettings, Topology, simulated_memory,
};
use softhca_queue::{
    DoorbellProducer, SendProducer, completion_ring, doorbell_ring, receive_ring, send_ring,
};
use softhca_types::{Operation, RemoteAddress, SendWorkRequest, Sge};
use softhca_udp::{Driver, DriverOptions, HostNetwork, HostSockets, SocketOptions};
use softhca_wire::link_control::Pause;
use softhca_wire::{Bth, Gid, LocalKey, Mtu, Opcode, Psn, Qpn, RemoteKey};
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant as Clock};

const LENGTH: u32 = 1 << 20;

/// Records the opcode and traffic class of every received packet.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<(Opcode, u8)>>>);

impl EventSink for Recorder {
    fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
        if let NetworkEvent::Frame { stage: Stage::Delivered, addressing, packet, .. } = event
            && let Ok(bth) = Bth::parse(packet)
        {
            self.0.lock().unwrap().push((bth.opcode, addressing.traffic_class));
        }
    }
}

struct Host {
    driver: Driver,
    client: ClientId,
    init: QpInitAttributes,
    qp: Qpn,
    send: SendProducer,
    doorbell: DoorbellProducer,
    key: RemoteKey,
    recorder: Recorder,
    completions: softhca_queue::CompletionConsumer,
}

impl Host {
    fn new(last: u8) -> Host {
        let address = IpAddr::V4(Ipv4Addr::new(127, 94, std::process::id() as u8, last));
        let sockets = HostSockets::bind(address, SocketOptions::default()).expect("a free loopback address");
        let settings = Settings { congestion: CongestionSettings::DCQCN, ..Settings::default() };
        let recorder = Recorder::default();
        let options = DriverOptions { settings, ..DriverOptions::default() };
        let mut driver = Driver::new(sockets, options, Box::new(recorder.clone()));
        let memory = driver.memory().add(simulated_memory(LENGTH.into(), PayloadMode::Elided));
        let (doorbell, doorbell_consumer) = doorbell_ring(DeviceLimits::HCA.max_qp);
        let (cq_ring, completions) = completion_ring(64);
        let (send, send_consumer) = send_ring(64, 1, 0);
        let (_, receive) = receive_ring(1, 1);
        let (client, init, qp, key) = driver.control(|hca, _| {
            let client = hca.open_client(doorbell_consumer).unwrap();
            let domain: PdId = hca.allocate_protection_domain(client).unwrap();
            let cq: CqId = hca.create_completion_queue(client, cq_ring).unwrap();
            let init = QpInitAttributes { sq_sig_all: true, ..bare::reliable(domain, cq) };
            let rings = QpRings { send: Some(send_consumer), receive: Some(receive) };
            let qp = hca.create_queue_pair(client, init, rings).unwrap();
            let length = LENGTH.into();
            let region = MemoryRegion { client, pd: domain, iova: 0, length, access_flags: RIGHTS, memory };
            (client, init, qp, hca.register_memory_region(region).unwrap())
        });
        Host { driver, client, init, qp, send, doorbell, key, recorder, completions }
    }

    /// Creates another queue pair. Returns its number and its send ring.
    fn add_queue_pair(&mut self) -> (Qpn, SendProducer) {
        let (send, send_consumer) = send_ring(64, 1, 0);
        let (_, receive) = receive_ring(1, 1);
        let (client, init) = (self.client, self.init);
        let rings = QpRings { send: Some(send_consumer), receive: Some(receive) };
        let qp = self.driver.control(|hca, _| hca.create_queue_pair(client, init, rings).unwrap());
        (qp, send)
    }

    fn connect(&mut self, peer: (IpAddr, Qpn)) {
        self.connect_from(self.qp, peer);
    }

    fn connect_from(&mut self, qp: Qpn, peer: (IpAddr, Qpn)) {
        let gid = Gid::from(peer.0);
        let [init, receive, send] = bare::steps((gid, peer.1), Mtu::B1024, Psn::new(0));
        let path = AddressVector { traffic_class: 3 << 5, ..AddressVector::to(gid) };
        let client = self.client;
        self.driver.control(|hca, ctx| {
            for step in [init, receive.address_vector(path), send.timeout(18)] {
                hca.modify_queue_pair(ctx, client, qp, &step).unwrap();
            }
        });
    }

    fn write(&mut self, to: RemoteKey, length: u32) {
        post(&mut self.send, &self.doorbell, self.qp, self.key, to, length);
    }

    fn write_on(&mut self, (qp, send): &mut (Qpn, SendProducer), to: RemoteKey, length: u32) {
        post(send, &self.doorbell, *qp, self.key, to, length);
    }
}

fn post(
    send: &mut SendProducer,
    doorbell: &DoorbellProducer,
    qp: Qpn,
    from: RemoteKey,
    to: RemoteKey,
    length: u32,
) {
    let sge = [Sge { address: 0, length, lkey: LocalKey(from.0) }];
    let remote = RemoteAddress { address: 0, rkey: to };
    let request = SendWorkRequest::new(0, Operation::Write { remote, imm_data: None }, &sge);
    send.enqueue(&request).unwrap();
    send.publish();
    send.ring(doorbell, qp);
}

fn pair(first: u8) -> [Host; 2] {
    let mut hosts = [Host::new(first), Host::new(first + 1)];
    let ends = [0, 1].map(|n: usize| (hosts[n].driver.address(), hosts[n].qp));
    hosts[0].connect(ends[1]);
    hosts[1].connect(ends[0]);
    hosts
}

/// Polls all hosts until `done`, for at most a minute.
fn drive(hosts: &mut [Host], mut done: impl FnMut(&mut [Host]) -> bool) {
    let deadline = Clock::now() + Duration::from_secs(60);
    while !done(hosts) {
        assert!(Clock::now() < deadline, "nothing happened for a minute");
        for host in &mut *hosts {
            host.driver.poll().unwrap();
        }
    }
}

#[test]
fn ce_mark_is_delivered_and_answered_with_a_cnp() {
    let mut hosts = pair(10);
    let mark = Rule {
        id: RuleId(0),
        selector: Selector { classes: Some(PacketClasses::Data), ..Selector::default() },
        repeat: Repeat::times(1),
        action: Action::MarkCe,
    };
    hosts[0].driver.add_rule(1, mark);
    let key = hosts[1].key;
    hosts[0].write(key, 100_000);
    drive(&mut hosts, |hosts| hosts[0].driver.hca().counters().rp_cnp_handled > 0);
    let receiver = hosts[1].driver.hca().counters();
    assert_eq!((receiver.np_ecn_marked_roce_packets, receiver.np_cnp_sent), (1, 1));
    let received = hosts[1].recorder.0.lock().unwrap().clone();
    assert!(received.contains(&(received[0].0, 3 << 5 | 3)), "marked on the wire");
    assert!(
        received.iter().skip(1).any(|(_, class)| *class == 3 << 5 | 2),
        "other packets are only ECN-capable"
    );
    let responses = hosts[0].recorder.0.lock().unwrap().clone();
    assert!(responses.contains(&(Opcode::CNP, 48 << 2)), "{responses:?}");
}

#[test]
fn packets_between_attached_hosts_pass_the_switch_and_no_socket() {
    let mut hosts = pair(30);
    let addresses = [0, 1].map(|n: usize| hosts[n].driver.address());
    let line = LinkSettings {
        bits_per_second: NonZeroU64::new(1_000_000_000),
        delay_ns: 10_000,
        ..LinkSettings::default()
    };
    let settings = SwitchSettings::default();
    let network = HostNetwork::new(1, &addresses, &Topology::Star { hosts: 2 }, line, settings).unwrap();
    for host in &mut hosts {
        assert!(host.driver.attach_to_network(network.clone()));
    }
    let key = hosts[1].key;
    hosts[0].write(key, 200_000);
    drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
    // 196 packets of 1 KiB, and at least one ACK.
    let frames = network.frame_counters();
    assert!(frames.is_balanced() && frames.dropped == 0, "{frames:?}");
    assert!(frames.delivered > 196, "{frames:?}");
    let switch = network.topology().switches[0];
    let out = network.topology().links[1];
    let counters = network.with_fabric(|fabric| fabric.switch(switch).counters(out)).unwrap();
    assert_eq!(counters.sent_frames, 196);
    assert_eq!(hosts[1].driver.hca().counters().rcvd_bytes, 200_000);
    let two = [addresses[0], addresses[1]];
    let wrong = HostNetwork::new(1, &two, &Topology::Star { hosts: 3 }, line, settings).err().unwrap();
    assert_eq!(wrong.to_string(), "invalid topology: the topology has 3 hosts, got 2");
}

#[test]
fn pause_stops_a_priority_towards_its_sender_until_it_ends() {
    let mut hosts = pair(20);
    let (key, [alice, bob]) = (hosts[1].key, [0, 1].map(|n: usize| hosts[n].driver.address()));
    // Establishes the link.
    hosts[0].write(key, 1_000);
    drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
    // 65535 quanta at 1 Gb/s: 33.6 ms.
    let stop = Pause { classes: 1 << 3, quanta: [0xffff; 8], rate: 1_000_000_000 };
    hosts[1].driver.pause_peer(alice, stop);
    drive(&mut hosts, |hosts| hosts[0].driver.priorities_paused_by(bob) == 1 << 3);
    hosts[0].write(key, 1_000);
    drive(&mut hosts, |hosts| {
        let is_over = hosts[0].driver.priorities_paused_by(bob) == 0;
        assert!(is_over || hosts[0].completions.pop().is_none(), "the write passed the pause");
        is_over
    });
    drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
    assert_eq!(hosts[0].driver.hca().counters().rx_pause_frames, 1);
}

/// Mallory repeatedly pauses all priorities for a year, which stops traffic to her and to no other host.
#[test]
fn peer_that_pauses_forever_stops_only_its_own_link() {
    let mut hosts = [50, 51, 52].map(Host::new);
    let ends = [0, 1, 2].map(|n: usize| (hosts[n].driver.address(), hosts[n].qp));
    let [(alice, _), _, (mallory, _)] = ends;
    let mut second = hosts[0].add_queue_pair();
    hosts[0].connect(ends[1]);
    hosts[1].connect(ends[0]);
    hosts[0].connect_from(second.0, ends[2]);
    hosts[2].connect((alice, second.0));
    let keys = [1, 2].map(|n: usize| hosts[n].key);
    hosts[0].write_on(&mut second, keys[1], 1_000);
    drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
    // The longest pause: 3.4 s.
    let stop = Pause { classes: 0xff, quanta: [0xffff; 8], rate: 10_000_000 };
    hosts[2].driver.pause_peer(alice, stop);
    drive(&mut hosts, |hosts| hosts[0].driver.priorities_paused_by(mallory) == 0xff);
    hosts[0].write_on(&mut second, keys[1], 1_000);
    for _ in 0..5 {
        hosts[2].driver.pause_peer(alice, stop);
        hosts[0].write(keys[0], 100_000);
        drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
    }
    assert_eq!(hosts[1].driver.hca().counters().rcvd_bytes, 5 * 100_000);
    assert_eq!(hosts[2].driver.hca().counters().rcvd_bytes, 1_000, "traffic to Mallory waits");
    let go = Pause { classes: 0xff, quanta: [0; 8], rate: 10_000_000 };
    hosts[2].driver.pause_peer(alice, go);
    drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
    assert_eq!(hosts[2].driver.hca().counters().rcvd_bytes, 2_000);
}

/// Bob's port is slow and behind a switch of its own; Alice is on another machine. The switch marks queued packets
/// and pauses Alice's port. No packet is lost or reordered.
#[test]
fn slow_port_behind_a_switch_pauses_another_machine() {
    let mut hosts = pair(60);
    let [alice, bob] = [0, 1].map(|n: usize| hosts[n].driver.address());
    let line = LinkSettings {
        bits_per_second: NonZeroU64::new(1_000_000_000),
        delay_ns: 1_000,
        ..LinkSettings::default()
    };
    let settings = SwitchSettings {
        pfc: Some(PfcSettings { xoff: 16 << 10, xon: 14 << 10, ..PfcSettings::default() }),
        ecn_marking: Some(EcnMarking { kmin: 1_000, kmax: 2_000, pmax_per_billion: PER_BILLION }),
        ..SwitchSettings::default()
    };
    let network = HostNetwork::new(1, &[bob], &Topology::Star { hosts: 1 }, line, settings).unwrap();
    assert!(hosts[1].driver.attach_to_network(network.clone()));
    let stalled = ReceiverSettings { bits_per_second: Some(0), ..ReceiverSettings::default() };
    assert!(network.set_receiver(bob, stalled));
    let key = hosts[1].key;
    hosts[0].write(key, 900_000);
    drive(&mut hosts, |hosts| hosts[0].driver.priorities_paused_by(bob) == 1 << 3);
    assert_eq!(hosts[1].driver.hca().counters().rcvd_bytes, 0, "Bob has received nothing yet");
    assert!(network.set_receiver(bob, ReceiverSettings { bits_per_second: Some(100_000_000), ..stalled }));
    drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
    drive(&mut hosts, |hosts| hosts[0].driver.priorities_paused_by(bob) == 0);
    let (frames, [sender, receiver]) =
        (network.frame_counters(), [0, 1].map(|n: usize| *hosts[n].driver.hca().counters()));
    assert!(frames.is_balanced() && frames.dropped == 0, "{frames:?}");
    assert_eq!((receiver.rcvd_bytes, receiver.out_of_sequence, sender.retransmitted_pkts), (900_000, 0, 0));
    assert!(sender.rx_pause_frames >= 2, "paused and resumed");
    assert!(receiver.np_ecn_marked_roce_packets > 0 && sender.rp_cnp_handled > 0);
    let ports: Vec<_> = network.with_fabric(|fabric| fabric.external_ports().collect());
    let [(_, peer, cable, port)] = ports[..] else { panic!("{ports:?}") };
    assert_eq!((peer, port.dropped_frames), (alice, 0));
    let switch = network.topology().switches[0];
    let counters = network.with_fabric(|fabric| fabric.switch(switch).counters(cable)).unwrap();
    assert_eq!(counters.pauses_sent[3], port.pauses_received[3]);
    assert!(counters.pauses_sent[3] >= sender.rx_pause_frames);
}

#[test]
fn pause_of_a_peer_does_not_end_a_pause_of_the_switch() {
    let mut hosts = pair(40);
    let (key, peer) = (hosts[1].key, hosts[0].driver.address());
    // Establishes the link.
    hosts[0].write(key, 1_000);
    drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
    let addresses = [0, 1].map(|n: usize| hosts[n].driver.address());
    let line = LinkSettings {
        bits_per_second: NonZeroU64::new(1_000_000_000),
        delay_ns: 1_000,
        ..LinkSettings::default()
    };
    let flow_control = Some(PfcSettings { xoff: 32 << 10, xon: 16 << 10, ..PfcSettings::default() });
    let settings = SwitchSettings { pfc: flow_control, ..SwitchSettings::default() };
    let network = HostNetwork::new(1, &addresses, &Topology::Star { hosts: 2 }, line, settings).unwrap();
    for host in &mut hosts {
        assert!(host.driver.attach_to_network(network.clone()));
    }
    // Bob's port accepts nothing: it pauses the switch, and the switch pauses Alice.
    let receiver = ReceiverSettings { bits_per_second: Some(0), ..ReceiverSettings::default() };
    assert!(network.set_receiver(addresses[1], receiver));
    hosts[0].write(key, 400_000);
    drive(&mut hosts, |hosts| hosts[0].driver.hca().paused_priorities() == 1 << 3);
    hosts[1].driver.pause_peer(peer, Pause { classes: 1 << 5, quanta: [0xffff; 8], rate: 1_000_000_000 });
    drive(&mut hosts, |hosts| {
        assert_eq!(hosts[0].driver.hca().paused_priorities(), 1 << 3, "the switch still pauses it");
        hosts[0].driver.priorities_paused_by(addresses[1]) == 1 << 5
    });
    assert!(network.set_receiver(addresses[1], ReceiverSettings::default()));
    drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
    assert_eq!(network.frame_counters().dropped, 0);
    assert!(hosts[0].driver.hca().counters().rx_pause_frames >= 3);
}
