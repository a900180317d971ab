//! Every operation, end to end in virtual time.

use softhca_engine::State;
use softhca_queue::Operation;
use softhca_tests::pair::{Pair, Setup, pattern};
use softhca_wire::Mtu;

#[test]
fn a_write_arrives_whole_at_every_path_mtu_and_odd_length() {
    for mtu in Mtu::ALL {
        for length in [0, 1, 3, 4, 255, 256, 257, 1000, 4096, 4097, 10_001] {
            let mut pair = Setup::default().mtu(mtu).build();
            let (a, b) = (pair.a, pair.b);
            let data = pattern(7, length);
            pair.fill(a, 5, &data);
            pair.post_write(1, 5, 9, length as u32);
            pair.run();
            assert_eq!(pair.outcomes(a), [(1, "success")], "{mtu:?} {length}");
            assert_eq!(pair.read(b, 9, length), data, "{mtu:?} {length}");
            assert_eq!(pair.read(b, 9 + length as u64, 8), [0; 8]);
        }
    }
}

#[test]
fn a_send_lands_in_the_posted_receive() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    let data = pattern(3, 2500);
    pair.fill(a, 0, &data);
    pair.post_receive(77, 100, 4000);
    pair.post_send(1, 0, 2500);
    pair.run();
    assert_eq!(pair.outcomes(a), [(1, "success")]);
    let received = pair.completions(b);
    assert_eq!((received[0].id, received[0].bytes, received.len()), (77, 2500, 1));
    assert_eq!(pair.read(b, 100, 2500), data);
}

#[test]
fn a_read_brings_the_peers_bytes() {
    for length in [0, 1, 1024, 5000] {
        let mut pair = Pair::new();
        let (a, b) = (pair.a, pair.b);
        let data = pattern(11, length);
        pair.fill(b, 64, &data);
        pair.post_read(1, 8, 64, length as u32);
        pair.run();
        assert_eq!(pair.outcomes(a), [(1, "success")]);
        assert_eq!(pair.read(a, 8, length), data);
    }
}

#[test]
fn atomics_return_what_they_found() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    pair.fill(b, 16, &40u64.to_ne_bytes());
    let remote = pair.b.remote(16);
    pair.post(1, Operation::FetchAdd { remote, add: 2 }, &[a.sge(0, 8)]);
    pair.post(2, Operation::CompareSwap { remote, compare: 42, swap: 7 }, &[a.sge(8, 8)]);
    pair.post(3, Operation::CompareSwap { remote, compare: 42, swap: 9 }, &[a.sge(16, 8)]);
    pair.run();
    assert_eq!(pair.outcomes(a), [(1, "success"), (2, "success"), (3, "success")]);
    let words: Vec<u64> =
        (0..3).map(|i| u64::from_ne_bytes(pair.read(a, i * 8, 8).try_into().unwrap())).collect();
    assert_eq!(words, [40, 42, 7]);
    assert_eq!(pair.read(b, 16, 8), 7u64.to_ne_bytes());
    assert_eq!(pair.state(a), State::ReadyToSend);
}
