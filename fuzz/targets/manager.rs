//! Arbitrary messages to a connection manager with listeners, a connection and a pending one: it must keep its
//! invariants.

#![no_main]

#[path = "../../emulator/fabric/tests/verbs/mod.rs"]
mod verbs;

use libfuzzer_sys::fuzz_target;
use softhca_engine::{CmChannelId, CmId, QpType, Settings};
use softhca_engine::Instant;
use softhca_fabric::{EventSink, Frame, HostId, LinkSettings, NetworkEvent, Stage};
use softhca_types::cm::{Command, ConnectionParameters, EventType, PortSpace, Reply};
use softhca_wire::{
    Bth, Deth, AddressHeaders, TransportHeader, Icrc, MadHeader, Mtu, Opcode, Operation, Position, Psn, Qpn, QueueKey, Service,
    ImmOrInvalidate,
};
use verbs::{QpOptions, World};
use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

const PORT: u16 = 7471;
const HEADERS: usize = Bth::LEN + Deth::LEN;
const MAD: usize = MadHeader::LEN;
const DATAGRAM: usize = MadHeader::DATAGRAM_LEN;
const ICRC: usize = 4;

/// The communication IDs on the wire.
type CommunicationIds = Rc<RefCell<Vec<[u8; 4]>>>;

/// Records the two communication IDs at the start of every message.
struct IdRecorder(CommunicationIds);

impl EventSink for IdRecorder {
    fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
        let NetworkEvent::Frame { stage, packet, .. } = event else { return };
        let body = packet.get(HEADERS + MAD..HEADERS + MAD + 8);
        for name in body.filter(|_| *stage == Stage::Admitted).into_iter().flat_map(|body| body.chunks(4)) {
            let name: [u8; 4] = name.try_into().expect("four bytes");
            if !self.0.borrow().contains(&name) {
                self.0.borrow_mut().push(name);
            }
        }
    }
}

/// Handles all events of a channel: accepts requests, establishes and disconnects.
fn handle_events(world: &mut World, host: HostId, channel: CmChannelId, qpn: Qpn) {
    while let Ok(Reply::Event(Some(event), _)) = world.verbs(host).cm(Command::GetEvent(channel)) {
        let id = event.id;
        let parameters = ConnectionParameters { qpn, ..ConnectionParameters::default() };
        let call = match event.event_type {
            EventType::ConnectRequest => Command::Accept { id, parameters },
            EventType::ConnectResponse => Command::Establish(id),
            EventType::Disconnected => Command::Disconnect(id),
            _ => continue,
        };
        let _ = world.verbs(host).cm(call);
    }
}

fn create(world: &mut World, host: HostId, channel: CmChannelId, port_space: PortSpace) -> CmId {
    match world.verbs(host).cm(Command::CreateId { channel, port_space, qp_type: QpType::Rc }) {
        Ok(Reply::Id(id)) => id,
        other => panic!("an identifier: {other:?}"),
    }
}

fn connect(world: &mut World, host: HostId, channel: CmChannelId, peer: SocketAddr, qpn: Qpn) -> CmId {
    let id = create(world, host, channel, PortSpace::Tcp);
    let mut verbs = world.verbs(host);
    verbs.cm(Command::ResolveAddress { id, source: None, destination: peer }).unwrap();
    verbs.cm(Command::ResolveRoute { id, path_mtu: Mtu::B1024 }).unwrap();
    verbs.cm(Command::Connect { id, parameters: ConnectionParameters { qpn, ..ConnectionParameters::default() } }).unwrap();
    id
}

fuzz_target!(|data: &[u8]| {
    let mut world = World::new(1);
    let ids = CommunicationIds::default();
    world.set_sink(IdRecorder(ids.clone()));
    let hosts = ["a", "b"].map(|name| world.add_host(name, Settings::default()));
    world.add_link(hosts[0], hosts[1], LinkSettings::default());
    let ends = hosts.map(|host| {
        let mut verbs = world.verbs(host);
        let pd = verbs.allocate_protection_domain().unwrap();
        let cq = verbs.create_completion_queue(16).unwrap();
        let qp = verbs.create_queue_pair(QpType::Rc, pd, cq, QpOptions::default()).unwrap();
        match verbs.cm(Command::CreateEventChannel) {
            Ok(Reply::EventChannel(channel)) => (host, channel, qp),
            other => panic!("a channel: {other:?}"),
        }
    });
    let [here, there] = ends;
    let address = SocketAddr::new(world.host(there.0).address(), PORT);
    for port_space in [PortSpace::Tcp, PortSpace::Udp] {
        let id = create(&mut world, there.0, there.1, port_space);
        world.verbs(there.0).cm(Command::BindAddress { id, address }).unwrap();
        world.verbs(there.0).cm(Command::Listen { id, backlog: 4 }).unwrap();
    }
    // One connection is established, and one waits for its reply.
    connect(&mut world, here.0, here.1, address, here.2);
    for _ in 0..4 {
        world.run_for(Duration::from_micros(10));
        ends.into_iter().for_each(|(host, channel, qp)| handle_events(&mut world, host, channel, qp));
    }
    connect(&mut world, here.0, here.1, address, Qpn::new(77));
    world.run_for(Duration::from_micros(10));

    let addressing = AddressHeaders::between(world.host(here.0).address(), world.host(there.0).address());
    // Messages of the fuzzer's making: what it is, whose ids it has and whether the program attends, then its body.
    let mut rest = data;
    while let [kind, choice, length, tail @ ..] = rest {
        let (body, after) = tail.split_at(usize::from(*length).min(tail.len()).min(DATAGRAM - MAD));
        rest = after;
        let mut packet = vec![0; HEADERS + DATAGRAM + ICRC];
        let opcode = Opcode::new(Service::Ud, Operation::Send, Position::Only, ImmOrInvalidate::None);
        let mut header = TransportHeader::new(Bth::new(opcode.expect("UD has SEND"), Qpn::GSI, Psn::new(0)));
        header.deth = Some(Deth { qkey: QueueKey::GSI, source_qp: Qpn::GSI });
        assert_eq!(header.emit(&mut packet), HEADERS);
        let datagram = &mut packet[HEADERS..];
        datagram[..4].copy_from_slice(&[1, 7, 2, 3]);
        datagram[17] = 0x10 + kind % 12;
        datagram[MAD..MAD + body.len()].copy_from_slice(body);
        let ids = ids.borrow();
        for (at, choice) in [(MAD, choice & 15), (MAD + 4, choice >> 4)] {
            if let Some(name) = ids.iter().cycle().nth(choice.into()).filter(|_| choice > 2) {
                datagram[at..at + 4].copy_from_slice(name);
            }
        }
        drop(ids);
        Icrc::write(&addressing, &mut packet);
        world.inject(there.0, Frame::new(addressing, packet));
        world.run_for(Duration::from_micros(10));
        if kind & 0x80 == 0 {
            handle_events(&mut world, there.0, there.1, there.2);
        }
    }
    world.run_for(Duration::from_secs(200));
    ends.into_iter().for_each(|(host, channel, qp)| handle_events(&mut world, host, channel, qp));
    assert!(world.frame_counters().is_balanced());
});
