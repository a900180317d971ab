//! Connection management on the direct data path: each process has its own connection manager, and the daemon keeps the
//! ports.

use super::direct::{DIRECT, DIRECT_SOCKETS};
use super::process::{self, TEST_TIMEOUT, TestDaemon, receive_line, send_line};
use softhca::cm::{ConnectionParameters, Event, EventChannel, EventType, Id, PortSpace};
use softhca::{Context, Device, QpType, QueuePair};
use softhca_trace::{CaptureReader, EventLogReader};
use softhca_udp::{RoceSocket, SocketOptions};
use softhca_wire::cm::{
    CommunicationId, Datagram, Dreq, Message, Path, PrivateData, RdmaCmHeader, Req, ServiceId,
};
use softhca_wire::{
    AddressHeaders, Bth, Deth, Gid, ICRC_LEN, Icrc, ImmOrInvalidate, MadHeader, Mtu, Opcode, Operation,
    PartitionKey, Position, Psn, Qpn, QueueKey, ROCE_PORT, Service, TransportHeader, TransportPacket,
};
use std::fs::File;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;

const PORT: u16 = 7174;

fn create_queue_pair(context: &Context) -> QueuePair {
    let queue = context.create_completion_queue(16).unwrap();
    context.allocate_protection_domain().unwrap().create_queue_pair(QpType::Rc, &queue).build().unwrap()
}

fn listen(channel: &EventChannel, port: u16) -> Id {
    let listener = channel.create_id(PortSpace::Tcp).unwrap();
    listener.bind(SocketAddr::from(([0, 0, 0, 0], port))).unwrap();
    listener.listen(0).unwrap();
    listener
}

fn next(channel: &EventChannel, kind: EventType) -> Event {
    let event = channel.wait_for(TEST_TIMEOUT).unwrap().unwrap_or_else(|| panic!("no {kind:?}"));
    assert_eq!(event.kind, kind, "{event:?}");
    event
}

fn resolve(id: &Id, peer: IpAddr) {
    let channel = id.channel();
    id.resolve_address(None, (peer, PORT).into()).unwrap();
    next(&channel, EventType::AddressResolved);
    id.resolve_route().unwrap();
    next(&channel, EventType::RouteResolved);
}

/// A process that connects from alice and waits.
pub fn run_connector() {
    let context = Device::daemon_host(None, Some("alice")).unwrap().open();
    let channel = EventChannel::new(&context).unwrap();
    let id = channel.create_id(PortSpace::Tcp).unwrap();
    resolve(&id, std::env::var("TEST_PEER").unwrap().parse().unwrap());
    id.attach_queue_pair(&create_queue_pair(&context)).unwrap();
    id.connect(&ConnectionParameters::default()).unwrap();
    send_line("connecting");
    if std::env::var_os("TEST_ESTABLISH").is_some() {
        next(&channel, EventType::Established);
        send_line("established");
    }
    while receive_line().is_some() {}
}

/// The peers of a killed process are informed: of an established connection, and of one that is being set up.
#[test]
fn a_killed_process_ends_its_connections() {
    for (variables, theirs) in [(&DIRECT, "alice"), (&DIRECT, "bob"), (&DIRECT_SOCKETS, "alice")] {
        let daemon = TestDaemon::with(variables);
        let device = daemon.open(theirs);
        let (context, peer) = (device.open(), device.address().to_string());
        let channel = EventChannel::new(&context).unwrap();
        let _listener = listen(&channel, PORT);
        let mut connector = process::spawn("connector", &daemon.name, &[("TEST_PEER", &peer)]);
        let pending = next(&channel, EventType::ConnectRequest).id;
        assert_eq!(connector.receive_line(), "connecting");
        connector.kill();
        let rejected = next(&channel, EventType::Rejected);
        assert_eq!(rejected.id.handle(), pending.handle(), "{theirs}");
        let variables = [("TEST_PEER", peer.as_str()), ("TEST_ESTABLISH", "yes")];
        let mut connector = process::spawn("connector", &daemon.name, &variables);
        let request = next(&channel, EventType::ConnectRequest).id;
        request.attach_queue_pair(&create_queue_pair(&context)).unwrap();
        request.accept(&ConnectionParameters::default()).unwrap();
        next(&channel, EventType::Established);
        assert_eq!(connector.receive_line(), "connecting");
        assert_eq!(connector.receive_line(), "established");
        connector.kill();
        let ended = next(&channel, EventType::Disconnected);
        assert_eq!(ended.id.handle(), request.handle(), "{theirs}");
    }
}

/// The REJ of a peer that has no answer yet does not have the communication ID that the listener's process chose.
#[test]
fn a_withdrawn_request_is_rejected_in_the_process_that_has_it() {
    let daemon = TestDaemon::with(&DIRECT);
    let [alice, bob] = [daemon.open("alice"), daemon.open("bob")];
    let (client, peer) = (alice.open(), bob.address());
    let servers = [bob.open(), daemon.open("bob").open()];
    let channels = servers.each_ref().map(|context| EventChannel::new(context).unwrap());
    let _listeners = [listen(&channels[0], PORT + 1), listen(&channels[1], PORT)];
    let own = EventChannel::new(&client).unwrap();
    let id = own.create_id(PortSpace::Tcp).unwrap();
    resolve(&id, peer);
    id.attach_queue_pair(&create_queue_pair(&client)).unwrap();
    id.connect(&ConnectionParameters::default()).unwrap();
    let request = next(&channels[1], EventType::ConnectRequest).id;
    drop(id);
    assert_eq!(next(&channels[1], EventType::Rejected).id.handle(), request.handle());
    assert!(channels[0].poll().unwrap().is_none());
}

/// Connects and disconnects. `server` has the channel of the listener.
fn connect(client: &EventChannel, server: &EventChannel, peer: IpAddr) {
    let id = client.create_id(PortSpace::Tcp).unwrap();
    resolve(&id, peer);
    id.attach_queue_pair(&create_queue_pair(client.context())).unwrap();
    id.connect(&ConnectionParameters::default()).unwrap();
    let request = next(server, EventType::ConnectRequest).id;
    request.attach_queue_pair(&create_queue_pair(server.context())).unwrap();
    request.accept(&ConnectionParameters::default()).unwrap();
    next(client, EventType::Established);
    next(server, EventType::Established);
    id.disconnect().unwrap();
    next(server, EventType::Disconnected);
    request.disconnect().unwrap();
    next(client, EventType::Disconnected);
}

/// The messages and events of both connection managers are recorded, each once. The second REQ names the slot of the
/// process that has answered the first.
#[test]
fn recordings_have_the_messages_of_connections() {
    let daemon = TestDaemon::with(&DIRECT);
    let bob = daemon.open("bob");
    let contexts = [daemon.open("alice").open(), bob.open()];
    let [own, channel] = contexts.each_ref().map(|context| EventChannel::new(context).unwrap());
    let slot = create_queue_pair(&contexts[1]).qpn().value() >> 15;
    let folder = std::env::temp_dir().join(format!("softhca-connections-{}", daemon.name));
    let paths = ["pcapng", "jsonl"].map(|kind| folder.with_extension(kind));
    let [capture, log] = paths.each_ref().map(|path| File::create(path).unwrap());
    let mut control = daemon.control();
    control.start_recording(Some(capture.as_fd()), Some(log.as_fd())).unwrap();
    let _listener = listen(&channel, PORT);
    (0..2).for_each(|_| connect(&own, &channel, bob.address()));
    control.stop_recording().unwrap();
    let [capture, log] = paths.each_ref().map(|path| std::fs::read(path).unwrap());
    paths.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    let messages: Vec<Datagram> = CaptureReader::new(&capture[..])
        .unwrap()
        .filter_map(|packet| {
            let packet = packet.unwrap();
            let frame = packet.frame().ok()?;
            let (transport, _) = Icrc::split(frame.packet).ok()?;
            Datagram::parse(TransportPacket::parse(transport).ok()?.payload).ok()
        })
        .collect();
    let names: Vec<&str> = messages.iter().map(|datagram| datagram.message.name()).collect();
    let one = ["REQ", "REP", "RTU", "DREQ", "DREP"];
    assert_eq!(names, [one, one].concat());
    assert_eq!(messages[0].header.attribute_modifier, 0);
    assert_eq!(messages[5].header.attribute_modifier, slot);
    let entries: Vec<_> = EventLogReader::new(&log[..]).unwrap().map(|entry| entry.unwrap()).collect();
    let count = |host: &str, name| {
        entries.iter().filter(|entry| entry.host == host && entry.event.name() == name).count()
    };
    assert_eq!([count("alice", "cm:message_sent"), count("bob", "cm:message_received")], [6, 6]);
    assert_eq!([count("bob", "cm:message_sent"), count("alice", "cm:message_received")], [4, 4]);
    // Bound and listening are states of one identifier of the process, not of that which reserves its port too.
    let text = String::from_utf8(log).unwrap();
    let listens = |line: &&str| line.contains("cm:state_changed") && line.contains("listening");
    let lines: Vec<&str> = text.lines().filter(listens).collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
}

/// Between two processes of a host, a REQ is handed over by the daemon and the other messages are in rings: none has the
/// port of a socket for a slot.
#[test]
fn a_connection_within_a_host_needs_no_socket() {
    let daemon = TestDaemon::with(&DIRECT);
    let contexts = [daemon.open("alice").open(), daemon.open("alice").open()];
    let [client, server] = contexts.each_ref().map(|context| EventChannel::new(context).unwrap());
    let path = std::env::temp_dir().join(format!("softhca-within-{}.pcapng", daemon.name));
    let capture = File::create(&path).unwrap();
    let mut control = daemon.control();
    control.start_recording(Some(capture.as_fd()), None).unwrap();
    let _listener = listen(&server, PORT);
    connect(&client, &server, daemon.open("alice").address());
    control.stop_recording().unwrap();
    let capture = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let packets = CaptureReader::new(&capture[..]).unwrap().map(|packet| packet.unwrap());
    let ports: Vec<u16> =
        packets.filter_map(|packet| Some(packet.frame().ok()?.network.addressing()?.source_port)).collect();
    assert_eq!(ports, [ROCE_PORT; 5]);
}

/// A client sends requests to the process that answered the last one, also if another one listens now.
#[test]
fn a_service_that_another_process_takes_over_is_found() {
    for (variables, theirs) in [(&DIRECT, "alice"), (&DIRECT, "bob"), (&DIRECT_SOCKETS, "alice")] {
        let daemon = TestDaemon::with(variables);
        let own = EventChannel::new(&daemon.open("alice").open()).unwrap();
        let devices: Vec<Device> = (0..3).map(|_| daemon.open(theirs)).collect();
        let peer = devices[0].address();
        let mut channels: Vec<_> =
            devices.iter().map(|device| EventChannel::new(&device.open()).unwrap()).collect();
        drop(devices);
        for round in 0..3 {
            let channel = channels.remove(0);
            let listener = listen(&channel, PORT);
            connect(&own, &channel, peer);
            connect(&own, &channel, peer);
            drop(listener);
            // The first process lives on without a listener.
            if round == 0 {
                channels.push(channel);
            }
        }
    }
}

/// The port of a listener is free when its process is gone, and connections have ports that no other process has.
#[test]
fn the_daemon_keeps_the_ports_of_all_processes() {
    let daemon = TestDaemon::with(&DIRECT);
    let contexts: Vec<Context> = (0..3).map(|_| daemon.open("alice").open()).collect();
    let peer = daemon.open("bob").address();
    let channels: Vec<_> = contexts.iter().map(|context| EventChannel::new(context).unwrap()).collect();
    let ids: Vec<Id> = channels
        .iter()
        .flat_map(|channel| (0..20).map(|_| channel.create_id(PortSpace::Tcp).unwrap()))
        .collect();
    ids.iter().for_each(|id| resolve(id, peer));
    let mut ports: Vec<u16> = ids.iter().map(|id| id.local_address().unwrap().port()).collect();
    ports.sort();
    ports.dedup();
    assert_eq!(ports.len(), ids.len());
    let other = channels[0].create_id(PortSpace::Tcp).unwrap();
    let address = SocketAddr::from(([0, 0, 0, 0], ids[59].local_address().unwrap().port()));
    assert_eq!(other.bind(address).unwrap_err().errno(), libc::EADDRINUSE);
    let listener = listen(&channels[1], PORT);
    assert_eq!(daemon.control().status().unwrap().hosts[0].listening_ports, [PORT]);
    let address = listener.local_address().unwrap();
    assert_eq!(other.bind(address).unwrap_err().errno(), libc::EADDRINUSE);
    drop((ids, listener, other, channels, contexts));
    daemon.wait_until("the end of all", |status| status.hosts[0].listening_ports.is_empty());
}

/// A packet of a foreign sender to QP1.
fn mad(from: SocketAddr, to: IpAddr, message: impl Into<Message>) -> Vec<u8> {
    let opcode = Opcode::new(Service::Ud, Operation::Send, Position::Only, ImmOrInvalidate::None).unwrap();
    let mut header = TransportHeader::new(Bth::new(opcode, Qpn::GSI, Psn::new(7)));
    header.deth = Some(Deth { qkey: QueueKey::GSI, source_qp: Qpn::GSI });
    let mut bytes = vec![0; Bth::LEN + Deth::LEN + MadHeader::DATAGRAM_LEN + ICRC_LEN];
    let at = header.emit(&mut bytes);
    bytes[at..at + MadHeader::DATAGRAM_LEN].copy_from_slice(&Datagram::new(1, message).emit());
    let addressing = AddressHeaders { source_port: from.port(), ..AddressHeaders::between(from.ip(), to) };
    Icrc::write(&addressing, &mut bytes);
    bytes
}

fn request(from: SocketAddr, to: IpAddr, port: u16, id: u32) -> Vec<u8> {
    let header = RdmaCmHeader { source: from.ip(), source_port: 5000, destination: to };
    let primary_path =
        Path { local_gid: Gid::from(from.ip()), remote_gid: Gid::from(to), hop_limit: 64, ..Path::default() };
    let request = Req {
        local_id: CommunicationId(id),
        service_id: ServiceId::new(PortSpace::Tcp, port),
        local_qpn: Qpn::new(0x100 + id),
        pkey: PartitionKey::DEFAULT,
        path_mtu_code: Mtu::B1024.code(),
        primary_path,
        private_data: PrivateData::new(&header.emit()).unwrap(),
        ..Req::default()
    };
    mad(from, to, request)
}

/// The kernel gives requests to the listener, and a batch of a foreign sender to the slot of its first packet.
#[test]
fn requests_of_a_foreign_sender_reach_their_listeners() {
    let daemon = TestDaemon::with(&DIRECT);
    let contexts: Vec<Context> = (0..2).map(|_| daemon.open("alice").open()).collect();
    let channels: Vec<_> = contexts.iter().map(|context| EventChannel::new(context).unwrap()).collect();
    let _listeners: Vec<_> =
        channels.iter().zip(PORT..).map(|(channel, port)| listen(channel, port)).collect();
    let slots: Vec<u32> =
        contexts.iter().map(|context| create_queue_pair(context).qpn().value() >> 15).collect();
    let to = daemon.control().hosts()[0].address;
    let [.., high, low] = std::process::id().to_be_bytes();
    let own = IpAddr::from([127, 200 | high & 15, low, 78]);
    let mut socket = RoceSocket::bind(SocketAddr::new(own, 0), SocketOptions::default()).unwrap();
    let from = socket.local_address();
    let disconnect = |slot: u32| {
        let (local_id, remote_id) = (CommunicationId(9), CommunicationId(slot << 23 | 5));
        mad(from, to, Dreq { local_id, remote_id, ..Dreq::default() })
    };
    let firsts =
        [disconnect(slots[0]), disconnect(slots[1]), disconnect(0), request(from, to, PORT + 2, 1000)];
    for (round, first) in (1u32..).zip(firsts) {
        let mut batch = first;
        let segment_size = batch.len();
        for index in [0u32, 1] {
            batch.extend(request(from, to, PORT + index as u16, 10 * round + index));
        }
        let sent = socket.send_batch_to(SocketAddr::new(to, ROCE_PORT), 0, segment_size, &batch).unwrap();
        assert_eq!(sent, 3);
        for channel in &channels {
            let event = next(channel, EventType::ConnectRequest);
            assert_eq!(event.id.peer_address(), Some(SocketAddr::new(own, 5000)));
        }
    }
}

/// A process that has received a request gets it again, also if it does not listen any more.
#[test]
fn a_repeated_request_reaches_the_process_that_has_it() {
    let daemon = TestDaemon::with(&DIRECT);
    let contexts: Vec<Context> = (0..2).map(|_| daemon.open("alice").open()).collect();
    let channels: Vec<_> = contexts.iter().map(|context| EventChannel::new(context).unwrap()).collect();
    let to = daemon.control().hosts()[0].address;
    let [.., high, low] = std::process::id().to_be_bytes();
    let from = SocketAddr::from(([127, 200 | high & 15, low, 79], ROCE_PORT));
    let socket = UdpSocket::bind(from).unwrap();
    socket.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let listener = listen(&channels[1], PORT);
    let send = || socket.send_to(&request(from, to, PORT, 1), (to, ROCE_PORT)).unwrap();
    send();
    let _pending = next(&channels[1], EventType::ConnectRequest).id;
    drop(listener);
    send();
    let mut buffer = [0; 2048];
    let length = socket.recv(&mut buffer).unwrap();
    let (transport, _) = Icrc::split(&buffer[..length]).unwrap();
    let reply = Datagram::parse(TransportPacket::parse(transport).unwrap().payload).unwrap();
    assert!(matches!(reply.message, Message::Mra(_)), "{reply}");
}

/// A request that arrives between bind and listen waits in the process that has bound the port.
#[test]
fn a_request_waits_until_its_process_listens() {
    let daemon = TestDaemon::with(&DIRECT);
    let context = daemon.open("alice").open();
    let channel = EventChannel::new(&context).unwrap();
    let to = daemon.control().hosts()[0].address;
    let [.., high, low] = std::process::id().to_be_bytes();
    let from = SocketAddr::from(([127, 200 | high & 15, low, 80], ROCE_PORT));
    let socket = UdpSocket::bind(from).unwrap();
    let bound = channel.create_id(PortSpace::Tcp).unwrap();
    bound.bind(SocketAddr::from(([0, 0, 0, 0], PORT))).unwrap();
    let _listener = listen(&channel, PORT + 1);
    for (port, id) in [(PORT, 1), (PORT + 1, 2)] {
        socket.send_to(&request(from, to, port, id), (to, ROCE_PORT)).unwrap();
    }
    let requested_port = || {
        let request = next(&channel, EventType::ConnectRequest).id;
        request.local_address().unwrap().port()
    };
    assert_eq!(requested_port(), PORT + 1);
    bound.listen(0).unwrap();
    assert_eq!(requested_port(), PORT);
}
