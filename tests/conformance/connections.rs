//! The connection manager of the HCA: leaks, hostile messages, stale connections, determinism.

use softhca_engine::{ClientId, CmId, QpType};
use softhca_fabric::HostId;
use softhca_tests::verbs::World;
use softhca_types::CmChannelId;
use softhca_types::cm::{CmState, Command, ConnectionParameters, Event, EventType, PortSpace, Reply};
use softhca_wire::cm::{Apr, CommunicationId, Datagram, Dreq, Lap, Message, Rep, Req, Rtu, ServiceId};
use softhca_wire::{
    AddressHeaders, Bth, Deth, Gid, ImmOrInvalidate, Mtu, Opcode, Operation, Position, Psn, Qpn, QueueKey,
    Service, TransportHeader, TransportPacket,
};
use std::time::Duration;

/// The first client of a host.
const CLIENT: ClientId = ClientId(0);

struct CmPair {
    world: World,
    hosts: [HostId; 2],
    channels: [CmChannelId; 2],
}

impl CmPair {
    fn new(seed: u64) -> CmPair {
        CmPair::with_addresses(seed, ["10.0.0.1", "10.0.0.2"])
    }

    /// A client and a server at these addresses.
    fn with_addresses(seed: u64, addresses: [&str; 2]) -> CmPair {
        let mut world = World::new(seed);
        let hosts = [("client", addresses[0]), ("server", addresses[1])]
            .map(|(name, address)| world.add_host_at(name, address.parse().unwrap(), Default::default()));
        world.add_link(
            hosts[0],
            hosts[1],
            softhca_fabric::LinkSettings { delay_ns: 1_000, ..Default::default() },
        );
        let mut pair = CmPair { world, hosts, channels: [CmChannelId(0); 2] };
        for side in 0..2 {
            let Reply::EventChannel(channel) = pair.call(side, Command::CreateEventChannel) else {
                panic!("a channel")
            };
            pair.channels[side] = channel;
        }
        pair
    }

    fn try_call(&mut self, side: usize, call: Command) -> Result<Reply, softhca_engine::VerbsError> {
        self.world.with_hca(self.hosts[side], |hca, ctx| hca.execute_cm(ctx, CLIENT, call))
    }

    fn call(&mut self, side: usize, call: Command) -> Reply {
        self.try_call(side, call).unwrap()
    }

    fn create(&mut self, side: usize) -> CmId {
        let (channel, space, kind) = (self.channels[side], PortSpace::Tcp, QpType::Rc);
        let Reply::Id(id) = self.call(side, Command::CreateId { channel, port_space: space, qp_type: kind })
        else {
            panic!("an id")
        };
        id
    }

    fn poll_event(&mut self, side: usize) -> Option<Event> {
        let Reply::Event(event, _) = self.call(side, Command::GetEvent(self.channels[side])) else {
            panic!("an event")
        };
        event
    }

    fn expect_event(&mut self, side: usize, kind: EventType) -> Event {
        let event = self.poll_event(side).unwrap_or_else(|| panic!("side {side} expects {kind}"));
        assert_eq!(event.event_type, kind, "{event:?}");
        event
    }

    fn listen(&mut self) -> CmId {
        self.listen_at("0.0.0.0:7174")
    }

    fn listen_at(&mut self, address: &str) -> CmId {
        let id = self.create(1);
        self.call(1, Command::BindAddress { id, address: address.parse().unwrap() });
        self.call(1, Command::Listen { id, backlog: 0 });
        id
    }

    /// Sends a REQ for this queue pair.
    fn send_request(&mut self, queue_pair: u32) -> CmId {
        let id = self.create(0);
        let destination = (self.world.host(self.hosts[1]).address(), 7174).into();
        self.call(0, Command::ResolveAddress { id, source: None, destination });
        self.expect_event(0, EventType::AddressResolved);
        self.call(0, Command::ResolveRoute { id, path_mtu: Mtu::B1024 });
        self.expect_event(0, EventType::RouteResolved);
        let parameters =
            ConnectionParameters { qpn: Qpn::new(queue_pair), ..ConnectionParameters::default() };
        self.call(0, Command::Connect { id, parameters });
        self.settle();
        id
    }

    fn accept(&mut self, queue_pair: u32) -> CmId {
        let id = self.expect_event(1, EventType::ConnectRequest).id;
        let parameters =
            ConnectionParameters { qpn: Qpn::new(queue_pair), ..ConnectionParameters::default() };
        self.call(1, Command::Accept { id, parameters });
        self.settle();
        id
    }

    /// Connects at the level of the connection manager.
    fn connect(&mut self, queue_pair: u32) -> [CmId; 2] {
        let active = self.send_request(queue_pair);
        let passive = self.accept(queue_pair + 0x1000);
        self.expect_event(0, EventType::ConnectResponse);
        self.call(0, Command::Establish(active));
        self.settle();
        self.expect_event(1, EventType::Established);
        [active, passive]
    }

    fn state(&mut self, side: usize, id: CmId) -> CmState {
        let Reply::Query(view) = self.call(side, Command::QueryId(id)) else { panic!("a view") };
        view.state
    }

    /// Lets packets in flight arrive without expiring a CM timer.
    fn settle(&mut self) {
        self.world.run_for(Duration::from_millis(1));
    }

    fn resource_counts(&self) -> [[usize; 3]; 2] {
        self.hosts.map(|host| self.world.host(host).hca().cm_resource_counts())
    }

    /// Delivers a message to QP1 of the server as if the client's host had sent it.
    fn deliver(&mut self, source: std::net::IpAddr, message: impl Into<Message>) {
        self.deliver_bytes(source, &Datagram::new(7, message).emit(), QueueKey::GSI);
    }

    fn deliver_bytes(&mut self, source: std::net::IpAddr, payload: &[u8], queue_key: QueueKey) {
        let opcode =
            Opcode::new(Service::Ud, Operation::Send, Position::Only, ImmOrInvalidate::None).unwrap();
        let mut header = TransportHeader::new(Bth::new(opcode, Qpn::GSI, Psn::new(0)));
        header.deth = Some(Deth { qkey: queue_key, source_qp: Qpn::GSI });
        let pad = payload.len().next_multiple_of(4) - payload.len();
        header.bth.pad = pad as u8;
        let transport = TransportPacket { header, payload, padding: &[0; 3][..pad] };
        let mut bytes = vec![0; transport.len()];
        transport.emit(&mut bytes);
        let addressing = AddressHeaders::between(source, "10.0.0.2".parse().unwrap());
        self.world.with_hca(self.hosts[1], |hca, ctx| hca.receive(ctx, &addressing, &bytes));
        self.settle();
    }
}

const CLIENT_ADDRESS: std::net::IpAddr = std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const OTHER_ADDRESS: std::net::IpAddr = std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 9, 9, 9));

#[test]
fn a_thousand_connections_leak_nothing() {
    let mut pair = CmPair::new(1);
    pair.listen();
    let before = pair.resource_counts();
    for queue_pair in 0..1_000 {
        let [active, passive] = pair.connect(0x100 + queue_pair);
        pair.call(0, Command::Disconnect(active));
        pair.settle();
        pair.expect_event(1, EventType::Disconnected);
        pair.call(1, Command::Disconnect(passive));
        pair.settle();
        pair.expect_event(0, EventType::Disconnected);
        pair.call(0, Command::DestroyId(active));
        pair.call(1, Command::DestroyId(passive));
    }
    let timewait = pair.resource_counts().map(|side| side[2]);
    assert!(timewait.iter().all(|count| *count > 0), "ids stay in timewait");
    pair.world.run();
    assert_eq!(pair.resource_counts(), before);
    assert!(pair.poll_event(0).is_none() && pair.poll_event(1).is_none());
}

#[test]
fn a_thousand_connections_end_when_their_process_exits() {
    let mut pair = CmPair::new(1);
    let listener = pair.listen();
    let all: Vec<[CmId; 2]> = (0..1_000).map(|number| pair.connect(0x100 + number)).collect();
    assert_eq!(pair.resource_counts().map(|side| side[0]), [1_000, 1_001]);
    let host = pair.hosts[0];
    pair.world.with_hca(host, |hca, ctx| hca.close_client(ctx, CLIENT));
    pair.settle();
    for _ in &all {
        pair.expect_event(1, EventType::Disconnected);
    }
    for [_, passive] in all {
        pair.call(1, Command::DestroyId(passive));
    }
    pair.call(1, Command::DestroyId(listener));
    pair.world.run();
    assert_eq!(pair.resource_counts(), [[0, 0, 0], [0, 1, 0]]);
}

#[test]
fn ports_are_reserved_for_processes_with_a_slot_only() {
    let mut pair = CmPair::new(1);
    let reserve_with = |address: &str, [reuse_address, only_ipv6]: [bool; 2]| Command::ReservePort {
        port_space: PortSpace::Tcp,
        qp_type: QpType::Rc,
        reuse_address,
        only_ipv6,
        address: address.parse().unwrap(),
    };
    let reserve = |address| reserve_with(address, [false; 2]);
    let refused = pair.try_call(0, reserve("[::]:0")).unwrap_err();
    assert!(refused.to_string().contains("without a slot"), "{refused}");
    pair.world.with_hca(pair.hosts[0], |hca, _| hca.set_client_slot(CLIENT, 1));
    let Reply::Reserved(bound, port) = pair.call(0, reserve("[::]:0")) else { panic!("a port") };
    assert_ne!(port, 0);
    let taken = format!("[::]:{port}");
    let before = pair.resource_counts();
    pair.try_call(0, reserve(&taken)).unwrap_err();
    assert_eq!(pair.resource_counts(), before, "an identifier without its port is removed");
    pair.call(0, Command::DestroyId(bound));
    let Reply::Reserved(again, same) = pair.call(0, reserve(&taken)) else { panic!("the port is free") };
    assert_eq!(same, port);
    pair.call(0, Command::DestroyId(again));
    // The options hold for the reservation.
    let any_ipv4 = format!("0.0.0.0:{port}");
    pair.call(0, reserve_with(&taken, [true, true]));
    pair.call(0, reserve_with(&taken, [true, true]));
    pair.call(0, reserve(&any_ipv4));
    pair.try_call(0, reserve_with(&taken, [false, true])).unwrap_err();
}

#[test]
fn the_same_seed_gives_the_same_identifiers() {
    let names = |seed| {
        let mut pair = CmPair::new(seed);
        pair.listen();
        let id = pair.send_request(0x100);
        let Reply::Query(view) = pair.call(0, Command::QueryId(id)) else { panic!("a view") };
        (view.local, view.address_vector.flow_label)
    };
    assert_eq!(names(5), names(5));
    assert_ne!(names(5), names(6));
}

#[test]
fn a_new_req_for_a_connected_queue_pair_ends_the_stale_connection() {
    let mut pair = CmPair::new(1);
    pair.listen();
    let [old, passive] = pair.connect(0x100);
    // The client process died without a DREQ, and its QPN is reused.
    let new = pair.send_request(0x100);
    let event = pair.expect_event(0, EventType::Rejected);
    assert_eq!((event.id, event.status), (new, 10));
    let event = pair.expect_event(0, EventType::Disconnected);
    assert_eq!(event.id, old, "the server disconnects the stale connection");
    assert_eq!(pair.state(1, passive), CmState::DreqSent);
}

#[test]
fn ipv6_hosts_connect_and_a_wildcard_listener_accepts_both_versions() {
    for (addresses, listen) in [
        (["fd00::1", "fd00::2"], "[::]:7174"),
        (["fd00::1", "fd00::2"], "[fd00::2]:7174"),
        (["fd00::1", "fd00::2"], "[::1]:7174"),
        (["10.0.0.1", "10.0.0.2"], "[::]:7174"),
    ] {
        let mut pair = CmPair::with_addresses(1, addresses);
        pair.listen_at(listen);
        let [active, passive] = pair.connect(0x100);
        let Reply::Query(view) = pair.call(1, Command::QueryId(passive)) else { panic!("a view") };
        assert_eq!(view.peer.unwrap().ip().to_string(), addresses[0]);
        assert_eq!(view.local.unwrap().port(), 7174);
        assert_eq!(pair.state(0, active), CmState::Established);
    }
    let mut pair = CmPair::with_addresses(1, ["fd00::1", "fd00::2"]);
    pair.listen_at("0.0.0.0:7174");
    pair.send_request(0x100);
    assert_eq!(pair.expect_event(0, EventType::Rejected).status, 8, "an IPv4 listener does not accept IPv6");
}

#[test]
fn both_sides_may_disconnect_at_once() {
    let mut pair = CmPair::new(1);
    pair.listen();
    let ids = pair.connect(0x100);
    pair.call(0, Command::Disconnect(ids[0]));
    pair.call(1, Command::Disconnect(ids[1]));
    pair.settle();
    for (side, id) in ids.into_iter().enumerate() {
        pair.expect_event(side, EventType::Disconnected);
        assert_eq!(pair.state(side, id), CmState::TimeWait);
    }
}

#[test]
fn a_lap_is_rejected_with_an_apr() {
    let mut pair = CmPair::new(1);
    pair.listen();
    pair.connect(0x100);
    let sent = |pair: &CmPair| pair.world.host(pair.hosts[1]).hca().counters().sent_pkts;
    let before = sent(&pair);
    pair.deliver(CLIENT_ADDRESS, Lap::default());
    assert_eq!(sent(&pair), before + 1, "an APR");
    pair.deliver(CLIENT_ADDRESS, Apr::default());
    assert_eq!(sent(&pair), before + 1);
}

#[test]
fn messages_from_other_hosts_change_no_connection() {
    let mut pair = CmPair::new(1);
    pair.listen();
    let [_, passive] = pair.connect(0x100);
    for name in 0..64 {
        let (local_id, remote_id) = (CommunicationId(name), CommunicationId(name.wrapping_mul(0x9e37_79b9)));
        pair.deliver(OTHER_ADDRESS, Dreq { local_id, remote_id, ..Dreq::default() });
        pair.deliver(OTHER_ADDRESS, Rtu { local_id, remote_id, ..Rtu::default() });
        pair.deliver(OTHER_ADDRESS, Rep { local_id, remote_id, ..Rep::default() });
    }
    assert_eq!(pair.state(1, passive), CmState::Established);
    assert!(pair.poll_event(1).is_none());
}

#[test]
fn a_flood_of_requests_stops_at_the_backlog() {
    let mut pair = CmPair::new(1);
    pair.listen();
    for name in 1..5_000 {
        let mut req =
            Req { local_id: CommunicationId(name), local_qpn: Qpn::new(0x100 + name), ..Req::default() };
        req.service_id = ServiceId::new(PortSpace::Tcp, 7174);
        req.path_mtu_code = Mtu::B1024.code();
        req.primary_path.local_gid = Gid::from(CLIENT_ADDRESS);
        req.primary_path.remote_gid = Gid::from("10.0.0.2".parse::<std::net::IpAddr>().unwrap());
        let header = softhca_wire::cm::RdmaCmHeader {
            source: CLIENT_ADDRESS,
            source_port: 1,
            destination: "10.0.0.2".parse().unwrap(),
        };
        req.private_data.0[..36].copy_from_slice(&header.emit());
        pair.deliver(CLIENT_ADDRESS, req);
    }
    assert_eq!(pair.resource_counts()[1][0], 1 + 1024, "the listener and a full backlog");
}

#[test]
fn invalid_mads_are_dropped() {
    let mut pair = CmPair::new(1);
    pair.listen();
    let good = Datagram::new(7, Req::default()).emit();
    let dropped = |pair: &CmPair| pair.world.host(pair.hosts[1]).hca().counters().rx_dropped;
    let before = dropped(&pair);
    pair.deliver_bytes(CLIENT_ADDRESS, &good, QueueKey(1));
    pair.deliver_bytes(CLIENT_ADDRESS, &good[..255], QueueKey::GSI);
    pair.deliver_bytes(CLIENT_ADDRESS, &[], QueueKey::GSI);
    for (at, value) in [(0, 9), (1, 3), (2, 9), (3, 0x81), (17, 0x55)] {
        let mut bad = good;
        bad[at] = value;
        pair.deliver_bytes(CLIENT_ADDRESS, &bad, QueueKey::GSI);
    }
    assert_eq!(dropped(&pair), before + 8);
    assert_eq!(pair.resource_counts()[1][0], 1);
}

#[test]
fn calls_in_the_wrong_state_are_rejected_with_the_state() {
    let mut pair = CmPair::new(1);
    let id = pair.create(0);
    let error = pair.try_call(0, Command::Disconnect(id)).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("connection identifier {:#x} is idle: disconnect is not possible now", id.0)
    );
    let parameters = ConnectionParameters { private_data: vec![0; 57], ..ConnectionParameters::default() };
    assert!(pair.try_call(0, Command::Connect { id, parameters }).is_err());
    assert_eq!(pair.try_call(0, Command::DestroyId(CmId(99))).unwrap_err().errno(), 2);
    let busy = pair.try_call(0, Command::DestroyEventChannel(CmChannelId(pair.channels[0].0))).unwrap_err();
    assert_eq!(busy.errno(), 16);
}
