//! The data path allocates nothing per packet, counted by the allocator of this binary.

#![allow(unsafe_code, reason = "a global allocator is unsafe to write; this one only counts")]

use softhca_engine::QpType;
use softhca_tests::pair::{Pair, Setup};
use softhca_tests::verbs::{ConnectOptions, QpOptions};
use softhca_types::{Operation, SendImmOrInvalidate};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct CountingAllocator;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // The thread-local is gone while a thread exits.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are those that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: CountingAllocator = CountingAllocator;

fn allocations_of(act: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    act();
    ALLOCATIONS.get() - before
}

#[test]
fn the_allocator_counts() {
    assert!(allocations_of(|| drop(std::hint::black_box(Box::new(5)))) > 0);
}

/// Runs each operation of the transport once, with messages of several packets.
fn exchange_messages(pair: &mut Pair, kind: QpType) {
    let (a, b) = (pair.a, pair.b);
    let size = if kind.is_datagram() { 900 } else { 5000 };
    let gather = [a.sge(0, size / 2), a.sge(10_000, size / 2)];
    for id in 0..4 {
        pair.post_receive(id, 0, 6000);
        pair.post(id, Operation::Send(SendImmOrInvalidate::None), &gather);
        if !kind.is_datagram() {
            pair.post(id, Operation::Write { remote: b.remote(0), imm_data: None }, &gather);
        }
        if kind.is_reliable() {
            pair.post(id, Operation::Read { remote: b.remote(0) }, &gather);
            pair.post(id, Operation::FetchAdd { remote: b.remote(0), add: 1 }, &gather[..1]);
        }
    }
    pair.world.run();
    for end in [a, b] {
        while let Some(done) = pair.on(end).poll(end.cq) {
            assert!(done.status.is_success(), "{done:?}");
        }
    }
}

#[test]
fn the_data_path_allocates_nothing() {
    for kind in [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcInitiator] {
        let mut pair = Setup::with_kind(kind).build();
        pair.world.set_sink(());
        let warm = |pair: &mut Pair| (0..20).for_each(|_| exchange_messages(pair, kind));
        warm(&mut pair);
        let before = pair.counters(pair.a).sent_pkts + pair.counters(pair.b).sent_pkts;
        let counted = allocations_of(|| warm(&mut pair));
        let packets = pair.counters(pair.a).sent_pkts + pair.counters(pair.b).sent_pkts - before;
        assert!(packets >= 80, "{kind:?}: {packets}");
        assert_eq!(counted, 0, "{kind:?}: in {packets} packets");
    }
}

/// The number of simulation steps shows what is examined; the benchmarks measure the time.
#[test]
fn ten_thousand_idle_queue_pairs_add_no_steps_and_no_allocations() {
    let steps = |idle: usize| {
        let mut pair = Pair::new();
        pair.world.set_sink(());
        let (a, b) = (pair.a, pair.b);
        let options = QpOptions {
            max_send_wr: 1,
            max_recv_wr: 1,
            max_sge: 1,
            max_inline_data: 0,
            ..QpOptions::default()
        };
        for _ in 0..idle {
            let qa = pair.on(a).create_queue_pair(QpType::Rc, a.domain, a.cq, options).unwrap();
            let qb = pair.on(b).create_queue_pair(QpType::Rc, b.domain, b.cq, options).unwrap();
            pair.world.connect((a.host, qa), (b.host, qb), &ConnectOptions::default()).unwrap();
        }
        let mut work = || {
            let mut steps = 0;
            for id in 0..50 {
                pair.post_write(id, 0, 0, 5000);
                while pair.world.step() {
                    steps += 1;
                }
                while pair.world.verbs(a.host).poll(a.cq).is_some() {}
            }
            steps
        };
        work();
        let mut steps = 0;
        let counted = allocations_of(|| steps = work());
        (steps, counted)
    };
    let alone = steps(0);
    assert_eq!(steps(10_000), alone);
    assert_eq!(alone.1, 0);
}
