//! Connection management over real IPv6 sockets: two devices in a network namespace whose loopback interface has
//! additional addresses. Without permission for namespaces the tests count as ignored.

use super::Role;
use libtest_mimic::Trial;
use softhca::cm::{ConnectionParameters, EventChannel, EventType, Id, PortSpace};
use softhca::{
    AccessFlags, CompletionQueue, Device, EmbeddedOptions, Error, MemoryRegion, ProtectionDomain, QpType,
    QueuePair, ReceiveRequest, SendRequest,
};
use softhca_tests::process::{self, Process, TEST_TIMEOUT, send_line};
use softhca_tests::{namespace, tools};
use std::net::SocketAddr;
use std::process::Command;

/// The roles of this binary inside the namespace.
pub const ROLES: &[Role] = &[
    ("a_connection_is_made_used_and_ended_over_ipv6", || in_namespace(connect_and_send)),
    ("a_listener_on_the_ipv6_wildcard_is_found", || in_namespace(listen_on_wildcard)),
    ("a_listener_on_the_ipv4_wildcard_refuses_ipv6_with_reason_8", || in_namespace(refuse_ipv6)),
    ("a_datagram_service_is_found_over_ipv6", || in_namespace(find_service)),
    ("a_host_is_its_own_loopback_address", || in_namespace(connect_to_self)),
];

fn in_namespace(test: fn()) {
    for address in ["fd77::1", "fd77::2"] {
        let arguments = ["-6", "addr", "add", &format!("{address}/128"), "dev", "lo", "nodad"];
        assert!(Command::new("ip").args(arguments).status().unwrap().success(), "{address}");
    }
    test();
    send_line("done");
}

pub fn trials() -> Vec<Trial> {
    ROLES.iter().map(|(name, _)| tools::needs_namespace(name, || run(name))).collect()
}

/// Runs this program in a role, in a namespace.
fn run(role: &str) {
    let wrapper = namespace::wrapper().expect("the test needs it");
    let mut inside = Process::start(&mut process::command(wrapper, role));
    assert_eq!(inside.receive_line(), "done");
    inside.finish();
}

/// A device at `fd77::host` with the resources of a connection.
struct Endpoint {
    device: Device,
    domain: ProtectionDomain,
    channel: EventChannel,
    queue: CompletionQueue,
    region: MemoryRegion,
    pair: QueuePair,
}

impl Endpoint {
    fn new(host: u32, kind: QpType) -> Endpoint {
        let address = Some(format!("fd77::{host}").parse().unwrap());
        let device =
            Device::embedded_with(EmbeddedOptions { address, ..EmbeddedOptions::default() }).unwrap();
        let context = device.open();
        let domain = context.allocate_protection_domain().unwrap();
        let queue = context.create_completion_queue(16).unwrap();
        let region = domain.allocate_region(4096, AccessFlags::LOCAL_WRITE).unwrap();
        let pair = domain.create_queue_pair(kind, &queue).build().unwrap();
        Endpoint { channel: EventChannel::new(&context).unwrap(), device, domain, queue, region, pair }
    }

    fn listen(&self, space: PortSpace, address: &str) -> Id {
        let id = self.channel.create_id(space).unwrap();
        id.bind(address.parse().unwrap()).unwrap();
        id.listen(0).unwrap();
        id
    }

    /// Starts to connect; an event reports the result.
    fn connect(&self, space: PortSpace, peer: &str, words: &[u8]) -> Id {
        let id = self.channel.create_id(space).unwrap();
        id.attach_queue_pair(&self.pair).unwrap();
        id.resolve_address(None, peer.parse().unwrap()).unwrap();
        self.expect_event(EventType::AddressResolved);
        id.resolve_route().unwrap();
        self.expect_event(EventType::RouteResolved);
        id.connect(&ConnectionParameters { private_data: words.to_vec(), ..ConnectionParameters::default() })
            .unwrap();
        id
    }

    fn event(&self) -> softhca::cm::Event {
        self.channel.wait_for(TEST_TIMEOUT).unwrap().expect("an event")
    }

    fn expect_event(&self, kind: EventType) -> softhca::cm::Event {
        self.event().expect(kind).unwrap_or_else(|error: Error| panic!("{kind}: {error}"))
    }

    fn address(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.device.address(), port)
    }
}

/// The server accepts the request, receives the client's message and the disconnect.
fn serve(server: &Endpoint, client: &Endpoint, id: &Id) {
    let request = server.expect_event(EventType::ConnectRequest);
    assert_eq!(&request.private_data[..5], b"hello");
    assert_eq!(request.id.peer_address().unwrap().ip(), client.device.address());
    request.id.attach_queue_pair(&server.pair).unwrap();
    let scatter = [server.region.sge(0, 4096)];
    server.pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &scatter }).unwrap();
    request
        .id
        .accept(&ConnectionParameters {
            private_data: b"welcome".to_vec(),
            ..ConnectionParameters::default()
        })
        .unwrap();
    assert_eq!(&client.expect_event(EventType::Established).private_data[..7], b"welcome");
    server.expect_event(EventType::Established);
    assert_eq!(id.peer_address(), Some(server.address(7471)));
    client.region.write_at(0, b"over IPv6");
    client.pair.post_send(&SendRequest::send(2, &[client.region.sge(0, 4000)])).unwrap();
    for side in [server, client] {
        assert!(side.queue.wait_for(TEST_TIMEOUT).expect("a completion").status.is_success());
    }
    assert_eq!(server.region.read_at(0, 9), b"over IPv6");
    id.disconnect().unwrap();
    server.expect_event(EventType::Disconnected);
    request.id.disconnect().unwrap();
    client.expect_event(EventType::Disconnected);
}

fn connect_and_send() {
    let [client, server] = [1, 2].map(|host| Endpoint::new(host, QpType::Rc));
    let _listener = server.listen(PortSpace::Tcp, "[fd77::2]:7471");
    let id = client.connect(PortSpace::Tcp, "[fd77::2]:7471", b"hello");
    serve(&server, &client, &id);
}

/// `rping -s -a ::`.
fn listen_on_wildcard() {
    let [client, server] = [1, 2].map(|host| Endpoint::new(host, QpType::Rc));
    let _listener = server.listen(PortSpace::Tcp, "[::]:7471");
    let id = client.connect(PortSpace::Tcp, "[fd77::2]:7471", b"hello");
    serve(&server, &client, &id);
}

/// `rping -s` listens on 0.0.0.0: as on Linux, the IPv4 wildcard accepts IPv4 only.
fn refuse_ipv6() {
    let [client, server] = [1, 2].map(|host| Endpoint::new(host, QpType::Rc));
    let _listener = server.listen(PortSpace::Tcp, "0.0.0.0:7471");
    let _id = client.connect(PortSpace::Tcp, "[fd77::2]:7471", b"hello");
    let event = client.event();
    assert_eq!((event.kind, event.status), (EventType::Rejected, 8));
}

fn find_service() {
    let [client, server] = [1, 2].map(|host| Endpoint::new(host, QpType::Ud));
    let _listener = server.listen(PortSpace::Udp, "[::]:7471");
    let _id = client.connect(PortSpace::Udp, "[fd77::2]:7471", b"who");
    let request = server.expect_event(EventType::ConnectRequest);
    request.id.attach_queue_pair(&server.pair).unwrap();
    let scatter = [server.region.sge(0, 4096)];
    server.pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &scatter }).unwrap();
    request.id.accept(&ConnectionParameters::default()).unwrap();
    let target = client.expect_event(EventType::Established).target().expect("where datagrams go");
    assert_eq!(target.qpn, server.pair.qpn());
    let handle = client.domain.create_address_handle(target.address_vector).unwrap();
    let gather = [client.region.sge(0, 100)];
    let request = SendRequest::send(2, &gather).ud_address(&handle, target.qpn, target.qkey);
    client.pair.post_send(&request).unwrap();
    assert!(client.queue.wait_for(TEST_TIMEOUT).expect("a completion").status.is_success());
    let received = server.queue.wait_for(TEST_TIMEOUT).expect("a datagram");
    assert_eq!((received.status.is_success(), received.byte_len), (true, 140), "{received:?}");
}

/// ::1 is the emulated host itself, whatever its address.
fn connect_to_self() {
    let both = Endpoint::new(1, QpType::Rc);
    let _listener = both.listen(PortSpace::Tcp, "[::1]:7471");
    let id = both.connect(PortSpace::Tcp, "[::1]:7471", b"hello");
    assert_eq!(id.peer_address(), Some(both.address(7471)));
    let request = both.expect_event(EventType::ConnectRequest);
    request.id.reject(b"no").unwrap();
    let event = both.event();
    assert_eq!((event.kind, event.status), (EventType::Rejected, 28));
}
