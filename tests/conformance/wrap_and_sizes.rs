//! PSNs that wrap, and messages of every size.
//!
//! Messages of 2 GiB at every path MTU take minutes: `cargo test -- --ignored` runs them.

use softhca_engine::{QpKind, Recovery};
use softhca_fabric::{Span, World};
use softhca_queue::{Operation, SendRequest, SendTrailer};
use softhca_tests::pair::{Pair, Setup, answers, pattern, requests};
use softhca_wire::{Mtu, Psn};

fn near_the_end(before: u32) -> Setup {
    let psn = Psn::new(0).minus(before);
    Setup::default().connection(|c| c.psns = [psn, psn.minus(1)])
}

#[test]
fn psns_wrap_in_the_middle_of_every_operation() {
    for kind in [QpKind::Rc, QpKind::Uc, QpKind::XrcInitiator] {
        for before in 0..14 {
            let mut pair = near_the_end(before).kind(kind).build();
            let (a, b) = (pair.a, pair.b);
            let data = pattern(before.into(), 3000);
            pair.fill(a, 0, &data);
            pair.fill(b, 50_000, &data);
            pair.post_receive(100, 0, 3000);
            let mut done = vec![(1, "success"), (2, "success")];
            pair.post_write(1, 0, 10_000, 3000);
            pair.post_send(2, 0, 3000);
            if kind != QpKind::Uc {
                pair.post_read(3, 50_000, 50_000, 3000);
                pair.post(4, Operation::FetchAdd { remote: b.remote(60_000), add: 1 }, &[a.sge(60_000, 8)]);
                pair.post_write(5, 0, 20_000, 3000);
                done.extend((3..6).map(|id| (id, "success")));
            }
            pair.run();
            assert_eq!(pair.outcomes(a), done, "{kind:?} {before}");
            assert_eq!(pair.outcomes(b), [(100, "success")], "{kind:?} {before}");
            assert_eq!(pair.read(b, 10_000, 3000), data);
            assert_eq!(pair.read(b, 0, 3000), data);
            if kind != QpKind::Uc {
                assert_eq!(pair.read(a, 50_000, 3000), data);
                assert_eq!(pair.read(b, 20_000, 3000), data);
            }
        }
    }
}

#[test]
fn loss_around_the_wrap_is_repaired() {
    for recovery in [Recovery::GoBackN, Recovery::GoBack0] {
        for before in 1..6 {
            for lost in 0..6 {
                for of_answers in [false, true] {
                    let mut pair = near_the_end(before).recovery(recovery).build();
                    let (a, b) = (pair.a, pair.b);
                    let data = pattern(lost, 3000);
                    pair.fill(a, 0, &data);
                    pair.fill(b, 50_000, &data);
                    let span = Span::exactly(lost);
                    pair.lose(if of_answers { answers(span) } else { requests(span) }, 1);
                    pair.post_read(1, 50_000, 50_000, 3000);
                    pair.post_write(2, 0, 10_000, 3000);
                    pair.run();
                    assert_eq!(pair.outcomes(a), [(1, "success"), (2, "success")]);
                    assert_eq!(pair.read(a, 50_000, 3000), data);
                    assert_eq!(pair.read(b, 10_000, 3000), data);
                }
            }
        }
    }
}

#[test]
fn every_length_around_every_path_mtu_arrives() {
    for mtu in Mtu::ALL {
        let bytes = mtu.bytes();
        for length in [0, 1, 2, 3, bytes - 1, bytes, bytes + 1, 2 * bytes - 1, 2 * bytes, 2 * bytes + 1] {
            let mut pair = Setup::default().mtu(mtu).build();
            let (a, b) = (pair.a, pair.b);
            let data = pattern(7, length as usize);
            pair.fill(a, 1, &data);
            pair.post_receive(100, 3, length);
            pair.post_send(1, 1, length);
            pair.post_read(2, 30_001, 3, length);
            pair.run();
            assert_eq!(pair.outcomes(a), [(1, "success"), (2, "success")], "{mtu:?} {length}");
            assert_eq!(pair.completions(b)[0].bytes, length);
            assert_eq!(pair.read(b, 3, length as usize), data, "{mtu:?} {length}");
            assert_eq!(pair.read(a, 30_001, length as usize), data, "{mtu:?} {length}");
            assert_eq!(pair.read(a, 30_001 + u64::from(length), 4), [0; 4]);
        }
    }
}

/// Sends one message of `length` bytes each way round, and looks at its ends and its middle.
fn huge(mtu: Mtu, length: u32, operation: &str) {
    let mut setup = Setup::default().mtu(mtu);
    setup.region = 1 << 31;
    setup.connection.psns = [Psn::new(0xff_0000); 2];
    setup.connection.timeout = 0;
    // A line without a rate would hold the whole message at once.
    setup.line.bits_per_second = std::num::NonZeroU64::new(100_000_000_000);
    let mut pair: Pair = setup.build();
    // A record of everything would be larger than the message.
    pair.world.observe(());
    let (a, b) = (pair.a, pair.b);
    let (from, to) = if operation == "read" { (b, a) } else { (a, b) };
    let places = [0, u64::from(length) / 2, u64::from(length) - 100];
    for place in places {
        pair.fill(from, place, &pattern(place, 100));
    }
    pair.post_receive(100, 0, length);
    match operation {
        "read" => pair.post_read(1, 0, 0, length),
        "write" => pair.post_write(1, 0, 0, length),
        _ => pair.post_send(1, 0, length),
    }
    pair.run();
    assert_eq!(pair.outcomes(a), [(1, "success")], "{operation} of {length} at {mtu:?}");
    for place in places {
        assert_eq!(pair.read(to, place, 100), pattern(place, 100), "{operation} at {mtu:?}");
    }
    if operation == "send" {
        assert_eq!(pair.completions(b)[0].bytes, length);
    }
    // PSNs go on from where the message left them.
    pair.post_write(2, 0, 0, 8);
    pair.run();
    assert_eq!(pair.outcomes(a), [(2, "success")]);
}

#[test]
fn a_send_of_2_gib_less_one_arrives_at_the_largest_path_mtu() {
    huge(Mtu::B4096, (1 << 31) - 1, "send");
}

#[test]
fn a_read_of_2_gib_arrives_at_the_largest_path_mtu() {
    huge(Mtu::B4096, 1 << 31, "read");
}

#[test]
#[ignore = "moves 60 GiB, which takes minutes"]
fn every_operation_of_2_gib_arrives_at_every_path_mtu() {
    for mtu in Mtu::ALL {
        for operation in ["send", "write", "read"] {
            for length in [(1 << 31) - 1, 1 << 31] {
                huge(mtu, length, operation);
            }
        }
    }
}

#[test]
fn a_host_that_talks_to_itself_hears_everything_in_order() {
    let mut world = World::new(3);
    let host = world.add_host("alice", Default::default());
    let mut verbs = world.on(host);
    let domain = verbs.allocate_domain().unwrap();
    let cq = verbs.create_completion_queue(64).unwrap();
    let [x, y] = [0; 2].map(|_| verbs.create_queue_pair(QpKind::Rc, domain, cq, Default::default()).unwrap());
    let (key, base) = verbs.register(domain, 1 << 20, softhca_tests::pair::ALL).unwrap();
    world.connect((host, x), (host, y), &Default::default()).unwrap();
    let data = pattern(5, 300_000);
    let mut verbs = world.on(host);
    verbs.write(key, base, &data);
    let sge = |offset, length| softhca_queue::Sge {
        address: base + offset,
        length,
        key: softhca_wire::LocalKey(key.0),
    };
    let scatter = [sge(500_000, 300_000)];
    verbs.post_receive(y, &softhca_queue::Receive { id: 7, scatter: &scatter }).unwrap();
    let gather = [sge(0, 300_000)];
    verbs.post_send(x, &SendRequest::new(1, Operation::Send(SendTrailer::None), &gather)).unwrap();
    world.run();
    let mut verbs = world.on(host);
    let outcomes: Vec<_> = verbs.poll_all(cq).iter().map(|c| (c.id, c.status.name())).collect();
    assert_eq!(outcomes, [(7, "success"), (1, "success")]);
    assert_eq!(verbs.read(key, base + 500_000, 300_000), data);
}
