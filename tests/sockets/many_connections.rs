//! A thousand consecutive connections with queue pairs leak no memory, no descriptor and no port.

use crate::Role;
use crate::counting_allocator::LIVE_BYTES;
use softhca::cm::{CmOption, ConnectionParameters, EventChannel, EventType, Id, PortSpace};
use softhca::{CompletionQueue, Context, Device, Error, ProtectionDomain, QpType};
use softhca_tests::process::{self, Process, TEST_TIMEOUT};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The source port of every client, which must be free again each time.
const CLIENT_PORT: u16 = 5000;

struct Endpoint {
    channel: EventChannel,
    domain: ProtectionDomain,
    queue: CompletionQueue,
}

impl Endpoint {
    fn new(context: &Context) -> Endpoint {
        let channel = EventChannel::new(context).unwrap();
        let (domain, queue) =
            (context.allocate_protection_domain().unwrap(), context.create_completion_queue(16).unwrap());
        Endpoint { channel, domain, queue }
    }

    fn attach(&self, id: &Id) -> Result<(), Error> {
        id.attach_queue_pair(&self.domain.create_queue_pair(QpType::Rc, &self.queue).build()?)
    }

    fn expect_event(&self, kind: EventType) -> Id {
        loop {
            let event = self.channel.wait_for(TEST_TIMEOUT).unwrap().expect("an event");
            if event.kind != EventType::TimewaitExit {
                return event.expect(kind).unwrap_or_else(|error| panic!("{kind}: {error}")).id;
            }
        }
    }
}

/// Connects and disconnects `count` times.
fn connect(client: &Endpoint, server: &Endpoint, own: SocketAddr, peer: SocketAddr, count: usize) {
    for _ in 0..count {
        let id = client.channel.create_id(PortSpace::Tcp).unwrap();
        // Connections stay in timewait for this long.
        id.set_option(CmOption::AckTimeout(1)).unwrap();
        id.resolve_address(Some(own), peer).unwrap();
        client.expect_event(EventType::AddressResolved);
        id.resolve_route().unwrap();
        client.expect_event(EventType::RouteResolved);
        client.attach(&id).unwrap();
        id.connect(&ConnectionParameters::default()).unwrap();
        let request = server.expect_event(EventType::ConnectRequest);
        server.attach(&request).unwrap();
        request.accept(&ConnectionParameters::default()).unwrap();
        client.expect_event(EventType::Established);
        server.expect_event(EventType::Established);
        id.disconnect().unwrap();
        server.expect_event(EventType::Disconnected);
        request.disconnect().unwrap();
        client.expect_event(EventType::Disconnected);
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

pub const ROLES: &[Role] = &[("thousand connections", run_thousand_connections)];

/// Another process counts, because other tests of this one allocate and open files, too.
#[test]
fn a_thousand_connections_of_embedded_devices_leak_nothing() {
    Process::start(&mut process::command(&[], "thousand connections")).finish();
}

fn run_thousand_connections() {
    let [near, far] = [(); 2].map(|()| Device::embedded().unwrap());
    let [client, server] = [near.open(), far.open()].map(|context| Endpoint::new(&context));
    let listener = server.channel.create_id(PortSpace::Tcp).unwrap();
    listener.bind(SocketAddr::new(far.address(), 0)).unwrap();
    listener.listen(0).unwrap();
    let (own, peer) = (SocketAddr::new(near.address(), CLIENT_PORT), listener.local_address().unwrap());
    // Let tables grow to their size first.
    connect(&client, &server, own, peer, 100);
    let (before, open) = (LIVE_BYTES.load(Ordering::Relaxed), descriptors());
    connect(&client, &server, own, peer, 1000);
    assert_eq!(descriptors(), open);
    // A queue pair has thousands of bytes and a connection id hundreds, so one leak per connection would show. The timer
    // heap doubles now and then, because cancelled timers stay in it until they expire.
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        let grown = LIVE_BYTES.load(Ordering::Relaxed) - before;
        if grown < 200 * 1024 {
            break;
        }
        assert!(Instant::now() < deadline, "{grown} bytes more than before");
        std::thread::sleep(Duration::from_millis(20));
    }
}
