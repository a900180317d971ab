//! A card that goes and comes back on the same address, sooner than anybody could miss it.

use softhca::{
    Access, AddressVector, Device, EmbeddedOptions, Endpoint, Path, QpKind, QueueKey, ReceiveRequest,
    SendRequest,
};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn a_card_that_restarts_within_its_lease_is_known_to_be_another() {
    let alice = Device::embedded().unwrap();
    let context = alice.open();
    let domain = context.allocate_domain().unwrap();
    let queue = context.create_completion_queue(64).unwrap();
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let source = domain.register(1 << 20, rights).unwrap();
    let mut bob = Device::embedded().unwrap();
    let address = bob.address();
    for life in 0..8u64 {
        let other = bob.open();
        let other_domain = other.allocate_domain().unwrap();
        let other_queue = other.create_completion_queue(64).unwrap();
        let target = other_domain.register(1 << 20, rights).unwrap();
        let from = domain.queue_pair(QpKind::Rc, &queue).create().unwrap();
        let to = other_domain.queue_pair(QpKind::Rc, &other_queue).create().unwrap();
        from.connect_both(&to, &Path::default()).unwrap();
        source.write_at((1 << 20) - 8, &life.to_ne_bytes());
        // More than the first grant: what the earlier life had granted would not be enough, nor right.
        for id in 0..8 {
            from.post(&SendRequest::write(id, &[source.entry(0, 1 << 20)], target.remote(0))).unwrap();
        }
        for id in 0..8 {
            let completion = queue.wait_for(PATIENCE).expect("a completion");
            assert!(completion.id == id && completion.status.is_success(), "life {life}: {completion:?}");
        }
        assert_eq!(target.load((1 << 20) - 8), life);
        drop((from, to, target, other_domain, other_queue, other, bob));
        let options = EmbeddedOptions { address: Some(address), ..EmbeddedOptions::default() };
        bob = Device::embedded_with(options).unwrap();
    }
}

#[test]
fn datagrams_to_a_card_that_is_gone_hold_up_nobody() {
    const KEY: QueueKey = QueueKey(0x1111_1111);
    let [alice, gone, bob] = [(); 3].map(|()| Device::embedded().unwrap());
    let room = |device: &Device| {
        let context = device.open();
        let domain = context.allocate_domain().unwrap();
        let queue = context.create_completion_queue(64).unwrap();
        let pair = domain.queue_pair(QpKind::Ud, &queue).create().unwrap();
        pair.start_datagrams(KEY).unwrap();
        let region = domain.register(4096, Access::LOCAL_WRITE).unwrap();
        pair.post_receive(&ReceiveRequest { id: 9, scatter: &[region.entry(0, 4096)] }).unwrap();
        (domain, queue, pair, region)
    };
    let (domain, queue, pair, region) = room(&alice);
    let send = |id, to: &Endpoint| {
        let handle = domain.create_address_handle(AddressVector::to(to.gid)).unwrap();
        pair.post(&SendRequest::send(id, &[region.entry(0, 8)]).to(&handle, to.queue_pair, KEY)).unwrap();
        let completion = queue.wait_for(PATIENCE).expect("a datagram leaves, whoever is there");
        assert!(completion.id == id && completion.status.is_success(), "{completion:?}");
    };
    let there = room(&gone);
    let lost = there.2.endpoint();
    send(1, &lost);
    assert!(there.1.wait_for(PATIENCE).expect("it came").status.is_success());
    drop((there, gone));
    // First with what was granted, then when the network has said that nobody is there.
    for id in 2..6 {
        send(id, &lost);
        std::thread::sleep(Duration::from_millis(300));
    }
    let other = room(&bob);
    send(6, &other.2.endpoint());
    assert!(other.1.wait_for(PATIENCE).expect("it came").status.is_success());
}
