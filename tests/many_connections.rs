//! A thousand connections made and ended in a row, with queue pairs, leave nothing behind: no memory, no descriptor, no port.

#![allow(unsafe_code, reason = "a global allocator is unsafe to write; this one only counts")]

use softhca::rdma_cm::{CmOption, ConnectionParameters, EventChannel, EventType, Id, PortSpace};
use softhca::{CompletionQueue, Context, Device, Error, ProtectionDomain, QpType};
use softhca_tests::process::TEST_TIMEOUT;
use std::alloc::{GlobalAlloc, Layout, System};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

struct CountingAllocator;

/// Bytes that were allocated and not freed.
static LIVE_BYTES: AtomicI64 = AtomicI64::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promises are those that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: CountingAllocator = CountingAllocator;

/// The port that every client connects from: it has to be free again each time.
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

/// Makes and ends so many connections, one after the other.
fn connect(client: &Endpoint, server: &Endpoint, own: SocketAddr, peer: SocketAddr, count: usize) {
    for _ in 0..count {
        let id = client.channel.create_id(PortSpace::Tcp).unwrap();
        // Ended connections are remembered for as long as this says.
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

#[test]
fn a_thousand_connections_of_embedded_cards_leave_nothing_behind() {
    let [near, far] = [(); 2].map(|()| Device::embedded().unwrap());
    let [client, server] = [near.open(), far.open()].map(|context| Endpoint::new(&context));
    let listener = server.channel.create_id(PortSpace::Tcp).unwrap();
    listener.bind(SocketAddr::new(far.address(), 0)).unwrap();
    listener.listen(0).unwrap();
    let (own, peer) = (SocketAddr::new(near.address(), CLIENT_PORT), listener.local_address().unwrap());
    // Tables grow to their size first.
    connect(&client, &server, own, peer, 100);
    let (before, open) = (LIVE_BYTES.load(Ordering::Relaxed), descriptors());
    connect(&client, &server, own, peer, 1000);
    assert_eq!(descriptors(), open);
    // A queue pair has thousands of bytes, the identifiers of a connection have hundreds: one of them per connection would
    // show. The heap of the card's timers doubles now and then, since timers of the past leave it when their time comes.
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
