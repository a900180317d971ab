//! Every operation, end to end in virtual time.

use softhca_engine::{AckPolicy, QpState, Settings};
use softhca_tests::pair::{Pair, Setup, pattern};
use softhca_types::{
    CompletionFlags, CompletionOpcode, Operation, Payload, SendFlags, SendImmOrInvalidate, SendWorkRequest,
};
use softhca_wire::Mtu;

#[test]
fn a_write_arrives_complete_at_every_path_mtu_and_length() {
    for mtu in Mtu::ALL {
        for length in [0, 1, 3, 4, 255, 256, 257, 1000, 4096, 4097, 10_001] {
            let mut pair = Setup::default().mtu(mtu).build();
            let (a, b) = (pair.a, pair.b);
            let data = pattern(7, length);
            pair.write_memory(a, 5, &data);
            pair.post_write(1, 5, 9, length as u32);
            pair.run();
            assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")], "{mtu:?} {length}");
            assert_eq!(pair.read_memory(b, 9, length), data, "{mtu:?} {length}");
            assert_eq!(pair.read_memory(b, 9 + length as u64, 8), [0; 8]);
        }
    }
}

#[test]
fn a_send_fills_the_posted_receive() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    let data = pattern(3, 2500);
    pair.write_memory(a, 0, &data);
    pair.post_receive(77, 100, 4000);
    pair.post_send(1, 0, 2500);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    let received = pair.completions(b);
    assert_eq!((received[0].wr_id, received[0].byte_len, received.len()), (77, 2500, 1));
    assert_eq!(pair.read_memory(b, 100, 2500), data);
}

#[test]
fn a_read_returns_the_bytes_of_the_peer() {
    for length in [0, 1, 1024, 5000] {
        let mut pair = Pair::new();
        let (a, b) = (pair.a, pair.b);
        let data = pattern(11, length);
        pair.write_memory(b, 64, &data);
        pair.post_read(1, 8, 64, length as u32);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
        assert_eq!(pair.read_memory(a, 8, length), data);
    }
}

#[test]
fn atomics_return_the_original_value() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    pair.write_memory(b, 16, &40u64.to_ne_bytes());
    let remote = pair.b.remote(16);
    pair.post(1, Operation::FetchAdd { remote, add: 2 }, &[a.sge(0, 8)]);
    pair.post(2, Operation::CompareSwap { remote, compare: 42, swap: 7 }, &[a.sge(8, 8)]);
    pair.post(3, Operation::CompareSwap { remote, compare: 42, swap: 9 }, &[a.sge(16, 8)]);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS"), (3, "SUCCESS")]);
    let words: Vec<u64> =
        (0..3).map(|i| u64::from_ne_bytes(pair.read_memory(a, i * 8, 8).try_into().unwrap())).collect();
    assert_eq!(words, [40, 42, 7]);
    assert_eq!(pair.read_memory(b, 16, 8), 7u64.to_ne_bytes());
    assert_eq!(pair.state(a), QpState::ReadyToSend);
}

#[test]
fn immediate_data_arrives_with_sends_and_writes() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    pair.post_receive(100, 0, 3000);
    pair.post_receive(101, 0, 0);
    pair.post(1, Operation::Send(SendImmOrInvalidate::Immediate(0xdead_beef)), &[a.sge(0, 3000)]);
    let remote = b.remote(5000);
    pair.post(2, Operation::Write { remote, imm_data: Some(0x1234_5678) }, &[a.sge(0, 2000)]);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")]);
    let received = pair.completions(b);
    let seen: Vec<_> =
        received.iter().map(|c| (c.wr_id, c.opcode, c.byte_len, c.imm_data, c.flags)).collect();
    let flags = CompletionFlags::IMMEDIATE;
    assert_eq!(
        seen,
        [
            (100, CompletionOpcode::Receive, 3000, 0xdead_beef, flags),
            (101, CompletionOpcode::ReceiveWriteWithImm, 2000, 0x1234_5678, flags),
        ]
    );
}

#[test]
fn inline_data_is_copied_when_it_is_posted() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    for length in [0, 1, 7, 8, 9, 64] {
        let data = pattern(length, length as usize);
        let mut request =
            SendWorkRequest::new(1, Operation::Write { remote: b.remote(0), imm_data: None }, &[]);
        request.payload = Payload::Inline(&data);
        pair.on(a).post_send(a.qp, &request).unwrap();
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
        assert_eq!(pair.read_memory(b, 0, length as usize), data);
    }
    let mut request = SendWorkRequest::new(1, Operation::Send(SendImmOrInvalidate::None), &[]);
    request.payload = Payload::Inline(&[0; 65]);
    assert!(pair.on(a).post_send(a.qp, &request).is_err(), "the queue pair was created for 64 bytes");
}

#[test]
fn a_fenced_request_waits_for_earlier_reads() {
    for fence in [false, true] {
        let mut pair = Setup::default().one_gigabit().build();
        let a = pair.a;
        pair.post_read(1, 0, 0, 3000);
        pair.post_receive(100, 5000, 8);
        pair.post_with(2, Operation::Send(SendImmOrInvalidate::None), &[a.sge(2990, 8)], |request| {
            request.flags.set(SendFlags::FENCE, fence);
        });
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")]);
        let packets = pair.packets();
        let place = |name: &str| packets.iter().position(|packet| packet.contains(name)).unwrap();
        assert_eq!(place("SEND_ONLY") > place("READ_RESPONSE_LAST"), fence, "{packets:?}");
    }
}

#[test]
fn at_most_max_rd_atomic_reads_and_atomics_are_outstanding() {
    let mut pair = Setup::default().one_gigabit().connection(|c| c.max_rd_atomic = 3).build();
    let (a, b) = (pair.a, pair.b);
    for id in 0..10 {
        match id % 2 {
            0 => pair.post_read(id, 0, 0, 2000),
            _ => pair.post(id, Operation::FetchAdd { remote: b.remote(0), add: 1 }, &[a.sge(0, 8)]),
        }
    }
    pair.run();
    let done: Vec<_> = (0..10).map(|id| (id, "SUCCESS")).collect();
    assert_eq!(pair.completion_statuses(a), done);
    let (mut outstanding, mut most) = (0i32, 0);
    for packet in pair.packets() {
        outstanding += i32::from(packet.starts_with("->"));
        most = most.max(outstanding);
        let answered = packet.contains("RESPONSE_LAST") || packet.contains("ATOMIC_ACK");
        outstanding -= i32::from(answered);
    }
    assert_eq!(most, 3, "{:#?}", pair.packets());
}

#[test]
fn every_ack_request_is_acknowledged_and_msn_counts_messages() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    pair.post_receive(100, 0, 3000);
    pair.post_send(1, 0, 3000);
    pair.post_write(2, 0, 0, 8);
    pair.post_read(3, 0, 0, 2000);
    pair.post(4, Operation::FetchAdd { remote: b.remote(0), add: 1 }, &[a.sge(0, 8)]);
    pair.run();
    insta::assert_snapshot!(pair.packets().join("\n"));
}

#[test]
fn a_long_message_requests_periodic_acks() {
    let mut pair = Pair::new();
    pair.post_write(1, 0, 0, 200 * 1024);
    pair.run();
    let acks: Vec<String> = pair.packets().into_iter().filter(|packet| packet.starts_with("<-")).collect();
    let expected = ["63 ack msn=0", "127 ack msn=0", "191 ack msn=0", "199 ack msn=1"];
    assert_eq!(acks, expected.map(|ack| format!("<- ACKNOWLEDGE {ack}")));
}

#[test]
fn pending_acks_are_coalesced_if_configured() {
    for (acks, most) in [(AckPolicy::PerRequest, 40), (AckPolicy::Coalesce, 30)] {
        let mut setup = Setup::default();
        setup.settings = Settings { ack_policy: acks, ..setup.settings };
        // Responses alternate with packets that are longer than the incoming requests.
        setup.link.bits_per_second = std::num::NonZeroU64::new(100_000_000);
        let mut pair = setup.build();
        let (a, b) = (pair.a, pair.b);
        for id in 0..40 {
            let gather = [a.sge(0, 8)];
            let back = [b.sge(0, 1024)];
            let to_b = Operation::Write { remote: b.remote(0), imm_data: None };
            let to_a = Operation::Write { remote: a.remote(0), imm_data: None };
            pair.post(id, to_b, &gather);
            pair.on(b).post_send(b.qp, &SendWorkRequest::new(id, to_a, &back)).unwrap();
        }
        pair.run();
        assert_eq!(pair.completion_statuses(a).len(), 40);
        assert_eq!(pair.completion_statuses(b).len(), 40);
        let sent = pair.packets().iter().filter(|packet| packet.starts_with("<- ACK")).count();
        assert!(if acks == AckPolicy::PerRequest { sent == most } else { sent <= most }, "{acks:?}: {sent}");
    }
}

#[test]
fn both_directions_work_at_once() {
    let mut pair = Setup::default().one_gigabit().build();
    let (a, b) = (pair.a, pair.b);
    let [x, y] = [pattern(1, 100_000), pattern(2, 100_000)];
    pair.write_memory(a, 0, &x);
    pair.write_memory(b, 0, &y);
    for id in 0..3 {
        pair.post_write(id, 0, 200_000, 100_000);
        pair.post_read(10 + id, 400_000, 0, 100_000);
        let gather = [b.sge(0, 100_000)];
        let write = Operation::Write { remote: a.remote(200_000), imm_data: None };
        pair.on(b).post_send(b.qp, &SendWorkRequest::new(id, write, &gather)).unwrap();
    }
    pair.run();
    assert_eq!(pair.read_memory(b, 200_000, 100_000), x);
    assert_eq!(pair.read_memory(a, 200_000, 100_000), y);
    assert_eq!(pair.read_memory(a, 400_000, 100_000), y);
    assert_eq!(pair.states(), ["RTS", "RTS"]);
}
