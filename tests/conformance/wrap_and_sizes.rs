//! PSN wrap-around, and messages of every size.
//!
//! Messages of 2 GiB at every path MTU take minutes: `cargo test -- --ignored` runs them.

use softhca_engine::{QpType, Recovery};
use softhca_fabric::InclusiveRange;
use softhca_tests::pair::{Pair, Setup, pattern, requests, responses};
use softhca_tests::verbs::World;
use softhca_types::{Operation, SendImmOrInvalidate, SendWorkRequest};
use softhca_wire::{Mtu, Psn};

fn near_psn_wrap(before: u32) -> Setup {
    let psn = Psn::new(0).minus(before);
    Setup::default().connection(|c| c.first_psns = [psn, psn.minus(1)])
}

#[test]
fn psns_wrap_in_the_middle_of_every_operation() {
    for kind in [QpType::Rc, QpType::Uc, QpType::XrcInitiator] {
        for before in 0..14 {
            let mut pair = near_psn_wrap(before).kind(kind).build();
            let (a, b) = (pair.a, pair.b);
            let data = pattern(before.into(), 3000);
            pair.write_memory(a, 0, &data);
            pair.write_memory(b, 50_000, &data);
            pair.post_receive(100, 0, 3000);
            let mut done = vec![(1, "SUCCESS"), (2, "SUCCESS")];
            pair.post_write(1, 0, 10_000, 3000);
            pair.post_send(2, 0, 3000);
            if kind != QpType::Uc {
                pair.post_read(3, 50_000, 50_000, 3000);
                pair.post(4, Operation::FetchAdd { remote: b.remote(60_000), add: 1 }, &[a.sge(60_000, 8)]);
                pair.post_write(5, 0, 20_000, 3000);
                done.extend((3..6).map(|id| (id, "SUCCESS")));
            }
            pair.run();
            assert_eq!(pair.completion_statuses(a), done, "{kind:?} {before}");
            assert_eq!(pair.completion_statuses(b), [(100, "SUCCESS")], "{kind:?} {before}");
            assert_eq!(pair.read_memory(b, 10_000, 3000), data);
            assert_eq!(pair.read_memory(b, 0, 3000), data);
            if kind != QpType::Uc {
                assert_eq!(pair.read_memory(a, 50_000, 3000), data);
                assert_eq!(pair.read_memory(b, 20_000, 3000), data);
            }
        }
    }
}

#[test]
fn loss_around_the_wrap_is_recovered() {
    for recovery in [Recovery::GoBackN, Recovery::GoBack0] {
        for before in 1..6 {
            for lost in 0..6 {
                for of_answers in [false, true] {
                    let mut pair = near_psn_wrap(before).recovery(recovery).build();
                    let (a, b) = (pair.a, pair.b);
                    let data = pattern(lost, 3000);
                    pair.write_memory(a, 0, &data);
                    pair.write_memory(b, 50_000, &data);
                    let span = InclusiveRange::exactly(lost);
                    pair.drop_packets(if of_answers { responses(span) } else { requests(span) }, 1);
                    pair.post_read(1, 50_000, 50_000, 3000);
                    pair.post_write(2, 0, 10_000, 3000);
                    pair.run();
                    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")]);
                    assert_eq!(pair.read_memory(a, 50_000, 3000), data);
                    assert_eq!(pair.read_memory(b, 10_000, 3000), data);
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
            pair.write_memory(a, 1, &data);
            pair.post_receive(100, 3, length);
            pair.post_send(1, 1, length);
            pair.post_read(2, 30_001, 3, length);
            pair.run();
            assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")], "{mtu:?} {length}");
            assert_eq!(pair.completions(b)[0].byte_len, length);
            assert_eq!(pair.read_memory(b, 3, length as usize), data, "{mtu:?} {length}");
            assert_eq!(pair.read_memory(a, 30_001, length as usize), data, "{mtu:?} {length}");
            assert_eq!(pair.read_memory(a, 30_001 + u64::from(length), 4), [0; 4]);
        }
    }
}

/// Transfers one message of `length` bytes and checks its start, middle and end.
fn huge(mtu: Mtu, length: u32, operation: &str) {
    let mut setup = Setup::default().mtu(mtu);
    setup.region_bytes = 1 << 31;
    setup.connection.first_psns = [Psn::new(0xff_0000); 2];
    setup.connection.timeout = 0;
    // A link without a rate would hold the whole message at once.
    setup.link.bits_per_second = std::num::NonZeroU64::new(100_000_000_000);
    let mut pair: Pair = setup.build();
    // A full recording would be larger than the message.
    pair.world.set_sink(());
    let (a, b) = (pair.a, pair.b);
    let (from, to) = if operation == "read" { (b, a) } else { (a, b) };
    let places = [0, u64::from(length) / 2, u64::from(length) - 100];
    for place in places {
        pair.write_memory(from, place, &pattern(place, 100));
    }
    pair.post_receive(100, 0, length);
    match operation {
        "read" => pair.post_read(1, 0, 0, length),
        "write" => pair.post_write(1, 0, 0, length),
        _ => pair.post_send(1, 0, length),
    }
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")], "{operation} of {length} at {mtu:?}");
    for place in places {
        assert_eq!(pair.read_memory(to, place, 100), pattern(place, 100), "{operation} at {mtu:?}");
    }
    if operation == "send" {
        assert_eq!(pair.completions(b)[0].byte_len, length);
    }
    // The next message continues with the next PSN.
    pair.post_write(2, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(2, "SUCCESS")]);
}

#[test]
fn a_send_of_2_gib_minus_1_arrives_at_the_largest_path_mtu() {
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
fn traffic_of_a_host_to_itself_arrives_in_order() {
    let mut world = World::new(3);
    let host = world.add_host("alice", Default::default());
    let mut verbs = world.verbs(host);
    let domain = verbs.allocate_protection_domain().unwrap();
    let cq = verbs.create_completion_queue(64).unwrap();
    let [x, y] = [0; 2].map(|_| verbs.create_queue_pair(QpType::Rc, domain, cq, Default::default()).unwrap());
    let (key, base) = verbs.register_memory(domain, 1 << 20, softhca_tests::pair::ALL_ACCESS).unwrap();
    world.connect((host, x), (host, y), &Default::default()).unwrap();
    let data = pattern(5, 300_000);
    let mut verbs = world.verbs(host);
    verbs.write_memory(key, base, &data);
    let sge = |offset, length| softhca_types::Sge {
        address: base + offset,
        length,
        lkey: softhca_wire::LocalKey(key.0),
    };
    let scatter = [sge(500_000, 300_000)];
    verbs.post_receive(y, &softhca_types::ReceiveWorkRequest { wr_id: 7, sg_list: &scatter }).unwrap();
    let gather = [sge(0, 300_000)];
    verbs
        .post_send(x, &SendWorkRequest::new(1, Operation::Send(SendImmOrInvalidate::None), &gather))
        .unwrap();
    world.run();
    let mut verbs = world.verbs(host);
    let outcomes: Vec<_> = verbs.poll_all(cq).iter().map(|c| (c.wr_id, c.status.name())).collect();
    assert_eq!(outcomes, [(7, "SUCCESS"), (1, "SUCCESS")]);
    assert_eq!(verbs.read_memory(key, base + 500_000, 300_000), data);
}
