//! Congestion over real sockets: marks travel in the IP header, notifications answer them, pauses stop a port.

use softhca_engine::{
    AddressVector, ClientId, Congestion, CqId, Instant, Limits, Memory, MemoryFault, MemoryId, Modify, PdId,
    QpInit, QpKind, QpRings, Region, Settings, State,
};
use softhca_fabric::{
    Action, Classes, FlowControl, Line, Receiver, Repeat, Rule, RuleId, Selector, SwitchSettings, Topology,
};
use softhca_queue::{
    Access, DoorbellProducer, Operation, RemoteAddress, SendProducer, SendRequest, Sge, completion_ring,
    doorbell, receive_ring, send_ring,
};
use softhca_udp::{Backbone, Driver, DriverOptions, HostSockets, Passage, SocketOptions, Witness};
use softhca_wire::link::Pause;
use softhca_wire::{Bth, Envelope, Gid, LocalKey, Mtu, Opcode, Psn, Qpn, RemoteKey, RnrTimer};
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant as Clock};

const RIGHTS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);
const LENGTH: u32 = 1 << 20;

/// Memory that nobody looks at.
struct Blank;

impl Memory for Blank {
    fn read(&self, _: MemoryId, _: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        into.fill(0);
        Ok(())
    }

    fn write(&mut self, _: MemoryId, _: u64, _: &[u8]) -> Result<(), MemoryFault> {
        Ok(())
    }

    fn atomic(&mut self, _: MemoryId, _: u64, _: softhca_engine::Atomic) -> Result<u64, MemoryFault> {
        Err(MemoryFault)
    }
}

/// Remembers the opcode and traffic class of everything that was received.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<(Opcode, u8)>>>);

impl Witness for Seen {
    fn frame(&mut self, _: Instant, passage: Passage, envelope: &Envelope, packet: &[u8]) {
        if let (Passage::Received, Ok(bth)) = (passage, Bth::parse(packet)) {
            self.0.lock().unwrap().push((bth.opcode, envelope.traffic_class));
        }
    }
}

struct Host {
    driver: Driver<Blank>,
    client: ClientId,
    qp: Qpn,
    send: SendProducer,
    doorbell: DoorbellProducer,
    key: RemoteKey,
    seen: Seen,
    completions: softhca_queue::CompletionConsumer,
}

impl Host {
    fn new(last: u8) -> Host {
        let address = IpAddr::V4(Ipv4Addr::new(127, 94, std::process::id() as u8, last));
        let sockets = HostSockets::bind(address, SocketOptions::default()).expect("a free loopback address");
        let settings = Settings { congestion: Congestion::DCQCN, ..Settings::default() };
        let seen = Seen::default();
        let options = DriverOptions { settings, ..DriverOptions::default() };
        let mut driver = Driver::new(sockets, options, Blank, Box::new(seen.clone()));
        let (doorbell, heard) = doorbell(Limits::CARD.queue_pairs as u32);
        let (completed, completions) = completion_ring(64);
        let (send, taken) = send_ring(64, 1, 0);
        let (_, receive) = receive_ring(1, 1);
        let (client, qp, key) = driver.control(|hca, _| {
            let client = hca.open_client(heard).unwrap();
            let domain: PdId = hca.allocate_domain(client).unwrap();
            let cq: CqId = hca.create_completion_queue(client, completed).unwrap();
            let init = QpInit {
                kind: QpKind::Rc,
                domain: Some(domain),
                send_cq: Some(cq),
                receive_cq: Some(cq),
                shared_receive_queue: None,
                xrc_domain: None,
                signal_all: true,
            };
            let rings = QpRings { send: Some(taken), receive: Some(receive) };
            let qp = hca.create_queue_pair(client, init, rings).unwrap();
            let memory = MemoryId(0);
            let length = LENGTH.into();
            let region = Region { client, domain, base: 0, length, access: RIGHTS, memory };
            (client, qp, hca.register(region).unwrap())
        });
        Host { driver, client, qp, send, doorbell, key, seen, completions }
    }

    fn connect(&mut self, peer: (IpAddr, Qpn)) {
        let modify = Modify::default();
        let path = AddressVector { traffic_class: 3 << 5, ..AddressVector::to(Gid::from(peer.0)) };
        let (client, qp) = (self.client, self.qp);
        self.driver.control(|hca, ctx| {
            for step in [
                modify.state(State::Init).partition_index(0).port(1).access(RIGHTS),
                modify
                    .state(State::ReadyToReceive)
                    .path(path)
                    .mtu(Mtu::B1024)
                    .destination(peer.1)
                    .receive_psn(Psn::new(0))
                    .max_reads_in(1)
                    .min_rnr_timer(RnrTimer::new(12)),
                modify
                    .state(State::ReadyToSend)
                    .send_psn(Psn::new(0))
                    .timeout(18)
                    .retry_count(7)
                    .rnr_retry(7)
                    .max_reads_out(1),
            ] {
                hca.modify_queue_pair(ctx, client, qp, &step).unwrap();
            }
        });
    }

    fn write(&mut self, to: RemoteKey, length: u32) {
        let sge = [Sge { address: 0, length, key: LocalKey(self.key.0) }];
        let remote = RemoteAddress { address: 0, key: to };
        let request = SendRequest::new(0, Operation::Write { remote, immediate: None }, &sge);
        self.send.place(&request).unwrap();
        self.send.publish();
        self.send.ring(&self.doorbell, self.qp);
    }
}

fn pair(first: u8) -> [Host; 2] {
    let mut hosts = [Host::new(first), Host::new(first + 1)];
    let ends = [0, 1].map(|n: usize| (hosts[n].driver.address(), hosts[n].qp));
    hosts[0].connect(ends[1]);
    hosts[1].connect(ends[0]);
    hosts
}

/// Turns both hosts until `done`; a busy machine has a minute.
fn drive(hosts: &mut [Host; 2], mut done: impl FnMut(&mut [Host; 2]) -> bool) {
    let deadline = Clock::now() + Duration::from_secs(60);
    while !done(hosts) {
        assert!(Clock::now() < deadline, "nothing happened for a minute");
        for host in &mut *hosts {
            host.driver.turn().unwrap();
        }
    }
}

#[test]
fn a_mark_crosses_the_network_and_its_notification_comes_back() {
    let mut hosts = pair(10);
    let mark = Rule {
        id: RuleId(0),
        selector: Selector { classes: Some(Classes::Data), ..Selector::default() },
        repeat: Repeat::times(1),
        action: Action::MarkCe,
    };
    hosts[0].driver.add_rule(1, mark);
    let key = hosts[1].key;
    hosts[0].write(key, 100_000);
    drive(&mut hosts, |hosts| hosts[0].driver.card().counters().rp_cnp_handled > 0);
    let receiver = hosts[1].driver.card().counters();
    assert_eq!((receiver.np_ecn_marked_roce_packets, receiver.np_cnp_sent), (1, 1));
    let came = hosts[1].seen.0.lock().unwrap().clone();
    assert!(came.contains(&(came[0].0, 3 << 5 | 3)), "marked on the wire");
    assert!(came.iter().skip(1).any(|(_, class)| *class == 3 << 5 | 2), "others only say that they could be");
    let back = hosts[0].seen.0.lock().unwrap().clone();
    assert!(back.contains(&(Opcode::CNP, 48 << 2)), "{back:?}");
}

#[test]
fn frames_between_hosts_on_a_backbone_pass_its_switch_and_no_socket() {
    let mut hosts = pair(30);
    let addresses = [0, 1].map(|n: usize| hosts[n].driver.address());
    let line = Line { bits_per_second: NonZeroU64::new(1_000_000_000), delay_ns: 10_000, ..Line::default() };
    let settings = SwitchSettings::default();
    let backbone = Backbone::new(1, &addresses, &Topology::Star { hosts: 2 }, line, settings).unwrap();
    for host in &mut hosts {
        assert!(host.driver.plug_in(backbone.clone()));
    }
    let key = hosts[1].key;
    hosts[0].write(key, 200_000);
    drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
    // 196 packets of 1 KiB, and at least one acknowledgement.
    let census = backbone.census();
    assert!(census.balances() && census.dropped == 0, "{census:?}");
    assert!(census.delivered > 196, "{census:?}");
    let switch = backbone.laid().switches[0];
    let out = backbone.laid().cables[1];
    let counters = backbone.ask(|fabric| fabric.switch(switch).counters(out)).unwrap();
    assert_eq!(counters.sent_frames, 196);
    assert_eq!(hosts[1].driver.card().counters().rcvd_bytes, 200_000);
    let two = [addresses[0], addresses[1]];
    let wrong = Backbone::new(1, &two, &Topology::Star { hosts: 3 }, line, settings).err().unwrap();
    assert_eq!(wrong.to_string(), "the topology: 2 hosts for a topology of 3");
}

#[test]
fn a_pause_stops_a_priority_of_the_other_port_until_it_is_lifted() {
    let mut hosts = pair(20);
    let (key, peer) = (hosts[1].key, hosts[0].driver.address());
    // The link has to know its peer first.
    hosts[0].write(key, 1_000);
    drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
    let stop = Pause { classes: 1 << 3, quanta: [0xffff; 8] };
    hosts[1].driver.pause_peer(peer, stop);
    drive(&mut hosts, |hosts| hosts[0].driver.card().paused() == 1 << 3);
    // The pause of 65535 quanta at 100 Gb/s is over after 336 µs, by itself.
    drive(&mut hosts, |hosts| hosts[0].driver.card().paused() == 0);
    hosts[0].write(key, 1_000);
    drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
}

#[test]
fn a_pause_of_a_peer_does_not_end_that_of_the_backbone() {
    let mut hosts = pair(40);
    let (key, peer) = (hosts[1].key, hosts[0].driver.address());
    // The link has to know its peer first.
    hosts[0].write(key, 1_000);
    drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
    let addresses = [0, 1].map(|n: usize| hosts[n].driver.address());
    let line = Line { bits_per_second: NonZeroU64::new(1_000_000_000), delay_ns: 1_000, ..Line::default() };
    let flow_control = Some(FlowControl { xoff: 32 << 10, xon: 16 << 10, ..FlowControl::default() });
    let settings = SwitchSettings { flow_control, ..SwitchSettings::default() };
    let backbone = Backbone::new(1, &addresses, &Topology::Star { hosts: 2 }, line, settings).unwrap();
    for host in &mut hosts {
        assert!(host.driver.plug_in(backbone.clone()));
    }
    // Bob's port takes nothing: it pauses the switch, and the switch pauses Alice.
    let receiver = Receiver { bits_per_second: Some(0), ..Receiver::default() };
    assert!(backbone.set_receiver(addresses[1], receiver));
    hosts[0].write(key, 400_000);
    drive(&mut hosts, |hosts| hosts[0].driver.card().paused() == 1 << 3);
    hosts[1].driver.pause_peer(peer, Pause { classes: 1 << 5, quanta: [0xffff; 8] });
    drive(&mut hosts, |hosts| {
        let paused = hosts[0].driver.card().paused();
        assert_eq!(paused >> 3 & 1, 1, "the backbone did not let it go on");
        paused == 1 << 3 | 1 << 5
    });
    assert!(backbone.set_receiver(addresses[1], Receiver::default()));
    drive(&mut hosts, |hosts| hosts[0].completions.pop().is_some());
    assert_eq!(backbone.census().dropped, 0);
    assert!(hosts[0].driver.card().counters().rx_pause_frames >= 3);
}
