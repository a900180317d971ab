//! A connection manager with listeners, a connection and one in the making is brought messages that nobody should send,
//! and must stay in order.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_engine::{CmChannelId, CmId, QpKind, Settings};
use softhca_engine::Instant;
use softhca_fabric::{CableId, Direction, Frame, HostId, Line, Observer, QpOptions, Stage, World};
use softhca_queue::cm::{Call, EventKind, Parameters, PortSpace, Reply};
use softhca_wire::{
    Bth, Deth, Envelope, Header, Icrc, MadHeader, Mtu, Opcode, Operation, Position, Psn, Qpn, QueueKey, Service,
    Trailer,
};
use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

const PORT: u16 = 7471;
const HEADERS: usize = Bth::LEN + Deth::LEN;
const MAD: usize = MadHeader::LEN;
const DATAGRAM: usize = MadHeader::DATAGRAM_LEN;
const ICRC: usize = 4;

/// The names that connections have on the wire.
type Names = Rc<RefCell<Vec<[u8; 4]>>>;

/// Reads the two names at the beginning of every message.
struct Reader(Names);

impl Observer for Reader {
    fn frame(&mut self, _: Instant, _: CableId, _: Direction, stage: Stage, frame: &Frame) {
        let body = frame.bytes.get(HEADERS + MAD..HEADERS + MAD + 8);
        for name in body.filter(|_| stage == Stage::Admitted).into_iter().flat_map(|body| body.chunks(4)) {
            let name: [u8; 4] = name.try_into().expect("four bytes");
            if !self.0.borrow().contains(&name) {
                self.0.borrow_mut().push(name);
            }
        }
    }
}

/// Takes every event of a channel, accepts what asks and lets go of what ends.
fn attend(world: &mut World, host: HostId, channel: CmChannelId, queue_pair: Qpn) {
    while let Ok(Reply::Event(Some(event), _)) = world.on(host).cm(Call::Take(channel)) {
        let id = event.id;
        let parameters = Parameters { queue_pair, ..Parameters::default() };
        let call = match event.kind {
            EventKind::ConnectRequest => Call::Accept { id, parameters },
            EventKind::ConnectResponse => Call::Establish(id),
            EventKind::Disconnected => Call::Disconnect(id),
            _ => continue,
        };
        let _ = world.on(host).cm(call);
    }
}

fn create(world: &mut World, host: HostId, channel: CmChannelId, space: PortSpace) -> CmId {
    match world.on(host).cm(Call::Create { channel, space, kind: QpKind::Rc }) {
        Ok(Reply::Id(id)) => id,
        other => panic!("an identifier: {other:?}"),
    }
}

fn connect(world: &mut World, host: HostId, channel: CmChannelId, peer: SocketAddr, queue_pair: Qpn) -> CmId {
    let id = create(world, host, channel, PortSpace::Tcp);
    let mut verbs = world.on(host);
    verbs.cm(Call::ResolveAddress { id, source: None, destination: peer }).unwrap();
    verbs.cm(Call::ResolveRoute { id, mtu: Mtu::B1024 }).unwrap();
    verbs.cm(Call::Connect { id, parameters: Parameters { queue_pair, ..Parameters::default() } }).unwrap();
    id
}

fuzz_target!(|data: &[u8]| {
    let mut world = World::new(1);
    let names = Names::default();
    world.observe(Reader(names.clone()));
    let hosts = ["a", "b"].map(|name| world.add_host(name, Settings::default()));
    world.add_cable(hosts[0], hosts[1], Line::default());
    let ends = hosts.map(|host| {
        let mut verbs = world.on(host);
        let domain = verbs.allocate_domain().unwrap();
        let cq = verbs.create_completion_queue(16).unwrap();
        let qp = verbs.create_queue_pair(QpKind::Rc, domain, cq, QpOptions::default()).unwrap();
        match verbs.cm(Call::CreateChannel) {
            Ok(Reply::Channel(channel)) => (host, channel, qp),
            other => panic!("a channel: {other:?}"),
        }
    });
    let [here, there] = ends;
    let address = SocketAddr::new(world.host(there.0).address(), PORT);
    for space in [PortSpace::Tcp, PortSpace::Udp] {
        let id = create(&mut world, there.0, there.1, space);
        world.on(there.0).cm(Call::Bind { id, address }).unwrap();
        world.on(there.0).cm(Call::Listen { id, backlog: 4 }).unwrap();
    }
    // One connection stands, and one waits for its answer.
    connect(&mut world, here.0, here.1, address, here.2);
    for _ in 0..4 {
        world.run_for(Duration::from_micros(10));
        ends.into_iter().for_each(|(host, channel, qp)| attend(&mut world, host, channel, qp));
    }
    connect(&mut world, here.0, here.1, address, Qpn::new(77));
    world.run_for(Duration::from_micros(10));

    let envelope = Envelope::between(world.host(here.0).address(), world.host(there.0).address());
    // Messages of the fuzzer's making: what it is, whose names it has and whether the program attends, then its body.
    let mut rest = data;
    while let [kind, choice, length, tail @ ..] = rest {
        let (body, after) = tail.split_at(usize::from(*length).min(tail.len()).min(DATAGRAM - MAD));
        rest = after;
        let mut packet = vec![0; HEADERS + DATAGRAM + ICRC];
        let opcode = Opcode::new(Service::Ud, Operation::Send, Position::Only, Trailer::None);
        let mut header = Header::new(Bth::new(opcode.expect("datagrams are sent"), Qpn::GSI, Psn::new(0)));
        header.deth = Some(Deth { queue_key: QueueKey::GSI, source: Qpn::GSI });
        assert_eq!(header.emit(&mut packet), HEADERS);
        let datagram = &mut packet[HEADERS..];
        datagram[..4].copy_from_slice(&[1, 7, 2, 3]);
        datagram[17] = 0x10 + kind % 12;
        datagram[MAD..MAD + body.len()].copy_from_slice(body);
        let names = names.borrow();
        for (at, choice) in [(MAD, choice & 15), (MAD + 4, choice >> 4)] {
            if let Some(name) = names.iter().cycle().nth(choice.into()).filter(|_| choice > 2) {
                datagram[at..at + 4].copy_from_slice(name);
            }
        }
        drop(names);
        Icrc::seal(&envelope, &mut packet);
        world.inject(there.0, Frame::new(envelope, packet));
        world.run_for(Duration::from_micros(10));
        if kind & 0x80 == 0 {
            attend(&mut world, there.0, there.1, there.2);
        }
    }
    world.run_for(Duration::from_secs(200));
    ends.into_iter().for_each(|(host, channel, qp)| attend(&mut world, host, channel, qp));
    assert!(world.census().balances());
});
