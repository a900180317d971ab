//! A card that goes and comes back on the same address, before its lease expires.

use crate::free_address;
use softhca::{
    AccessFlags, AddressVector, ConnectOptions, Device, EmbeddedOptions, Endpoint, QpType, QueueKey,
    ReceiveRequest, SendRequest,
    trace::{EventSink, NetworkEvent},
};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A card at an address that no other card takes while it is free. A child of another test has copies of the last card's
/// sockets until it executes its program.
fn card(address: &str) -> Device {
    let began = Instant::now();
    loop {
        let options =
            EmbeddedOptions { address: Some(address.parse().unwrap()), ..EmbeddedOptions::default() };
        match Device::embedded_with(options) {
            Ok(device) => return device,
            Err(error) => assert!(began.elapsed() < TIMEOUT, "{error}"),
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_card_that_restarts_within_its_lease_is_known_to_be_another() {
    let alice = Device::embedded().unwrap();
    let context = alice.open();
    let domain = context.allocate_protection_domain().unwrap();
    let queue = context.create_completion_queue(64).unwrap();
    let rights = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
    let source = domain.allocate_region(1 << 20, rights).unwrap();
    let address = free_address();
    let mut bob = card(&address);
    for life in 0..8u64 {
        let other = bob.open();
        let other_domain = other.allocate_protection_domain().unwrap();
        let other_queue = other.create_completion_queue(64).unwrap();
        let target = other_domain.allocate_region(1 << 20, rights).unwrap();
        let from = domain.create_queue_pair(QpType::Rc, &queue).build().unwrap();
        let to = other_domain.create_queue_pair(QpType::Rc, &other_queue).build().unwrap();
        from.connect_both(&to, &ConnectOptions::default()).unwrap();
        source.write_at((1 << 20) - 8, &life.to_ne_bytes());
        // More than the first grant: what the earlier life had granted would not be enough, nor right.
        for id in 0..8 {
            from.post_send(&SendRequest::rdma_write(id, &[source.sge(0, 1 << 20)], target.remote_address(0)))
                .unwrap();
        }
        for id in 0..8 {
            let completion = queue.wait_for(TIMEOUT).expect("a completion");
            assert!(completion.wr_id == id && completion.status.is_success(), "life {life}: {completion:?}");
        }
        assert_eq!(target.load((1 << 20) - 8), life);
        drop((from, to, target, other_domain, other_queue, other, bob));
        bob = card(&address);
    }
}

/// Reports that a peer's port is dead.
struct DeadPeers(Sender<std::net::IpAddr>);

impl EventSink for DeadPeers {
    fn on_event(&mut self, _: softhca::Instant, event: &NetworkEvent<'_>) {
        if let NetworkEvent::PeerLinkChanged { peer, change: "dead" } = event {
            let _ = self.0.send(*peer);
        }
    }
}

#[test]
fn datagrams_to_a_closed_card_do_not_delay_others() {
    const KEY: QueueKey = QueueKey(0x1111_1111);
    let (sender, dead) = channel();
    let options = EmbeddedOptions { event_sink: Box::new(DeadPeers(sender)), ..EmbeddedOptions::default() };
    let alice = Device::embedded_with(options).unwrap();
    let (gone, bob) = (card(&free_address()), Device::embedded().unwrap());
    let gone_address = gone.address();
    let room = |device: &Device| {
        let context = device.open();
        let domain = context.allocate_protection_domain().unwrap();
        let queue = context.create_completion_queue(64).unwrap();
        let pair = domain.create_queue_pair(QpType::Ud, &queue).build().unwrap();
        pair.start_ud(KEY).unwrap();
        let region = domain.allocate_region(4096, AccessFlags::LOCAL_WRITE).unwrap();
        pair.post_recv(&ReceiveRequest { wr_id: 9, sg_list: &[region.sge(0, 4096)] }).unwrap();
        (domain, queue, pair, region)
    };
    let (domain, queue, pair, region) = room(&alice);
    let send = |id, to: &Endpoint| {
        let handle = domain.create_address_handle(AddressVector::to(to.gid)).unwrap();
        pair.post_send(&SendRequest::send(id, &[region.sge(0, 8)]).ud_address(&handle, to.qpn, KEY)).unwrap();
        let completion = queue.wait_for(TIMEOUT).expect("a datagram completes without a receiver");
        assert!(completion.wr_id == id && completion.status.is_success(), "{completion:?}");
    };
    let there = room(&gone);
    let lost = there.2.endpoint();
    send(1, &lost);
    assert!(there.1.wait_for(TIMEOUT).expect("it came").status.is_success());
    drop((there, gone));
    // First with what was granted, then after ICMP port unreachable.
    send(2, &lost);
    assert_eq!(dead.recv_timeout(TIMEOUT), Ok(gone_address));
    (3..6).for_each(|id| send(id, &lost));
    let other = room(&bob);
    send(6, &other.2.endpoint());
    assert!(other.1.wait_for(TIMEOUT).expect("it came").status.is_success());
}
