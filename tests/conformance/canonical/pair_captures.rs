//! Captures of a pair of queue pairs, from basic operations to faults.

use softhca_engine::{AddressVector, MemoryWindowType, QpType, Recovery};
use softhca_fabric::{Action, InclusiveRange, PacketClass, PacketClasses, Repeat, Selector};
use softhca_tests::pair::{Pair, Setup, requests, responses};
use softhca_tests::verbs::QpOptions;
use softhca_types::{
    AccessFlags, MemoryWindowBind, Operation, ReceiveWorkRequest, RemoteAddress, SendFlags,
    SendImmOrInvalidate, SendWorkRequest, Sge,
};
use softhca_wire::{Gid, LocalKey, Psn, Qpn, QueueKey, RemoteKey, RnrTimer};
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU32;
use std::time::Duration;

/// One capture.
pub struct PairCapture {
    pub name: &'static str,
    pub about: &'static str,
    /// The name of the first fault rule; empty if there is none.
    pub rule: &'static str,
    pub setup: fn() -> Setup,
    pub run: fn(&mut Pair),
}

fn rc() -> Setup {
    Setup::default().connection(|connection| {
        connection.first_psns = [Psn::new(1000), Psn::new(2000)];
        connection.rnr_retry = 3;
    })
}

fn with_kind(kind: QpType) -> Setup {
    rc().kind(kind)
}

fn go_back_n() -> Setup {
    rc().recovery(Recovery::GoBackN)
}

const fn capture(
    name: &'static str,
    about: &'static str,
    setup: fn() -> Setup,
    act: fn(&mut Pair),
) -> PairCapture {
    PairCapture { name, about, rule: "", setup, run: act }
}

const fn capture_with_fault(
    name: &'static str,
    about: &'static str,
    rule: &'static str,
    setup: fn() -> Setup,
    act: fn(&mut Pair),
) -> PairCapture {
    PairCapture { name, about, rule, setup, run: act }
}

/// Every capture.
pub const PAIR_CAPTURES: &[PairCapture] = &[
    capture("rc-send", "RC: a SEND of three packets, and one of a single packet", rc, |pair| {
        pair.post_receive(1, 0, 4096);
        pair.post_receive(2, 4096, 4096);
        write_text(pair);
        pair.post_send(1, 0, 2500);
        pair.post_send(2, 0, 45);
    }),
    capture(
        "rc-send-immediate",
        "RC: SENDs with immediate data, of one and of several packets",
        rc,
        |pair| {
            for (id, length) in [(1, 5), (2, 2500)] {
                pair.post_receive(id, 0, 4096);
                let gather = [pair.a.sge(0, length)];
                pair.post(id, Operation::Send(SendImmOrInvalidate::Immediate(0xcafe)), &gather);
            }
        },
    ),
    capture("rc-send-invalidate", "RC: SENDs that invalidate a window of the receiver", rc, invalidate),
    capture("rc-ping-pong", "RC: three messages in each direction", rc, ping_pong),
    capture("rc-write", "RC: a WRITE of four packets, and one of a single packet", rc, |pair| {
        pair.post_write(1, 0, 0, 4000);
        pair.post_write(2, 0, 8192, 10);
    }),
    capture("rc-write-immediate", "RC: WRITEs with immediate data, which consume a receive", rc, |pair| {
        for (id, length) in [(1, 5), (2, 2500)] {
            pair.post_receive_into(id, &[]);
            let (remote, gather) = (pair.b.remote(0), [pair.a.sge(0, length)]);
            pair.post(id, Operation::Write { remote, imm_data: Some(7) }, &gather);
        }
    }),
    capture("rc-read", "RC: READs of several packets, two packets and one", rc, |pair| {
        pair.post_read(1, 0, 0, 3000);
        pair.post_read(2, 4096, 0, 2000);
        pair.post_read(3, 8192, 0, 5);
    }),
    capture(
        "rc-atomics",
        "RC: fetch-and-add, then compare-and-swap, once with success and once without",
        rc,
        atomics,
    ),
    capture("rc-unsignalled", "RC: four WRITEs, of which only the last is signaled", rc, |pair| {
        for id in 1..=4 {
            let (remote, gather) = (pair.b.remote(0), [pair.a.sge(0, 64)]);
            let flags = if id == 4 { SendFlags::SIGNALED } else { SendFlags::empty() };
            let write = Operation::Write { remote, imm_data: None };
            pair.post_with(id, write, &gather, |request| request.flags = flags);
        }
    }),
    capture(
        "uc",
        "UC: SEND and WRITE, with and without immediate data; no ACKs",
        || with_kind(QpType::Uc),
        sends_and_writes,
    ),
    capture_with_fault(
        "uc-loss",
        "UC: the middle of a message is lost; the receiver drops the message and receives the next one",
        "lose the second packet",
        || with_kind(QpType::Uc),
        |pair| {
            pair.post_receive(1, 0, 4096);
            pair.drop_packets(requests(InclusiveRange::exactly(1)), 1);
            pair.post_send(1, 0, 2500);
            pair.post_send(2, 0, 100);
        },
    ),
    capture(
        "ud",
        "UD: datagrams with and without immediate data, and one without a posted receive",
        || with_kind(QpType::Ud),
        |pair| {
            let gather = [pair.a.sge(0, 100)];
            pair.post_receive(1, 0, 140);
            pair.post_receive(2, 256, 140);
            pair.post(1, Operation::Send(SendImmOrInvalidate::None), &gather);
            pair.post(2, Operation::Send(SendImmOrInvalidate::Immediate(9)), &gather);
            pair.post(3, Operation::Send(SendImmOrInvalidate::None), &gather);
        },
    ),
    capture(
        "ud-multicast",
        "UD: a datagram to a multicast group; bob has two members, one of them with another Q_Key",
        || with_kind(QpType::Ud),
        multicast,
    ),
    capture(
        "xrc",
        "XRC: SEND and WRITE, with and without immediate data, through a shared receive queue",
        || with_kind(QpType::XrcInitiator),
        sends_and_writes,
    ),
    capture(
        "xrc-read-atomics",
        "XRC: READs of several packets and of one, and both atomics",
        || with_kind(QpType::XrcInitiator),
        |pair| {
            let (a, b) = (pair.a, pair.b);
            pair.post_read(1, 8192, 0, 2500);
            pair.post_read(2, 8192, 0, 5);
            pair.post(3, Operation::FetchAdd { remote: b.remote(0), add: 2 }, &[a.sge(0, 8)]);
            pair.post(4, Operation::CompareSwap { remote: b.remote(0), compare: 2, swap: 7 }, &[a.sge(8, 8)]);
        },
    ),
    capture(
        "xrc-send-invalidate",
        "XRC: a SEND with invalidate of several packets: rejected, because no window can be bound to an XRC target",
        || with_kind(QpType::XrcInitiator),
        |pair| invalidate_nothing(pair, 2500),
    ),
    capture(
        "xrc-send-invalidate-only",
        "XRC: the same with a single packet",
        || with_kind(QpType::XrcInitiator),
        |pair| invalidate_nothing(pair, 5),
    ),
    capture(
        "psn-wrap",
        "RC: PSNs wrap from 16777215 to 0 in the middle of a message",
        || rc().connection(|connection| connection.first_psns = [Psn::new(0xff_fffe), Psn::new(0)]),
        |pair| pair.post_write(1, 0, 0, 4000),
    ),
    capture(
        "rnr",
        "A SEND arrives before its receive is posted: RNR NAK, wait, retry, success",
        || rc().connection(|connection| connection.min_rnr_timer = RnrTimer::new(12)),
        |pair| {
            pair.post_send(1, 0, 100);
            pair.world.run_for(Duration::from_micros(300));
            pair.post_receive(1, 0, 100);
        },
    ),
    capture(
        "rnr-exhausted",
        "No receive is posted: the sender gives up after rnr_retry retries",
        rc,
        |pair| {
            pair.post_send(1, 0, 100);
        },
    ),
    capture("nak-invalid-request", "A SEND longer than its receive: NAK, invalid request", rc, |pair| {
        pair.post_receive(1, 0, 50);
        pair.post_send(1, 0, 100);
    }),
    capture("nak-misaligned-atomic", "A misaligned atomic: NAK, invalid request", rc, |pair| {
        let (remote, gather) = (pair.b.remote(4), [pair.a.sge(0, 8)]);
        pair.post(1, Operation::FetchAdd { remote, add: 1 }, &gather);
    }),
    capture("nak-remote-access", "A WRITE with an unknown rkey: NAK, remote access error", rc, |pair| {
        let gather = [pair.a.sge(0, 8)];
        let remote = RemoteAddress { address: 0, rkey: RemoteKey(0x1234_5678) };
        pair.post(1, Operation::Write { remote, imm_data: None }, &gather);
    }),
    capture(
        "nak-remote-operational",
        "A receive with an invalid lkey: NAK, remote operational error",
        rc,
        |pair| {
            pair.post_receive_into(1, &[Sge { address: 0, length: 100, lkey: LocalKey(0x7777_7777) }]);
            pair.post_send(1, 0, 64);
        },
    ),
    capture_with_fault(
        "loss-fatal",
        "Recovery `fatal`: a lost packet breaks the connection with NAK sequence error; later requests are flushed",
        "lose the second packet",
        rc,
        |pair| {
            pair.drop_packets(requests(InclusiveRange::exactly(1)), 1);
            pair.post_write(1, 0, 0, 4000);
            pair.post_write(2, 0, 0, 10);
        },
    ),
    capture_with_fault(
        "loss-go-back-n",
        "Recovery `go-back-n`: retransmission from the lost packet",
        "lose the second packet",
        go_back_n,
        |pair| {
            pair.drop_packets(requests(InclusiveRange::exactly(1)), 1);
            pair.post_write(1, 0, 0, 4000);
            pair.post_write(2, 0, 0, 10);
        },
    ),
    capture_with_fault(
        "loss-go-back-0",
        "Recovery `go-back-0`: retransmission of the whole message",
        "lose the third packet",
        || rc().recovery(Recovery::GoBack0),
        |pair| {
            pair.drop_packets(requests(InclusiveRange::exactly(2)), 1);
            pair.post_write(1, 0, 0, 4000);
        },
    ),
    capture_with_fault(
        "loss-of-the-last-packet",
        "No packet follows the lost one, so only the ACK timeout detects the loss; `go-back-n`",
        "lose the last packet",
        go_back_n,
        |pair| {
            pair.drop_packets(requests(InclusiveRange::exactly(3)), 1);
            pair.post_write(1, 0, 0, 4000);
        },
    ),
    capture_with_fault(
        "loss-of-an-ack",
        "The ACK of an executed request is lost: the duplicate is acknowledged, not executed again; `go-back-n`",
        "lose the ACK",
        go_back_n,
        |pair| {
            pair.drop_packets(
                Selector { classes: Some(PacketClasses::Only(PacketClass::Ack)), ..Selector::default() },
                1,
            );
            pair.post_write(1, 0, 0, 100);
        },
    ),
    capture_with_fault(
        "loss-of-a-read-response",
        "A READ response is lost: the requester requests the rest again; `go-back-n`",
        "lose the second response",
        go_back_n,
        |pair| {
            pair.drop_packets(responses(InclusiveRange::exactly(1)), 1);
            pair.post_read(1, 0, 0, 4000);
        },
    ),
    capture_with_fault(
        "reordered",
        "Two packets are reordered, which the receiver treats as a loss; `go-back-n`",
        "hold the second packet back",
        go_back_n,
        |pair| {
            let by = NonZeroU32::new(1).expect("not zero");
            pair.add_rule(
                requests(InclusiveRange::exactly(1)),
                Repeat::times(1),
                Action::Reorder { by, within_ns: 1_000_000 },
            );
            pair.post_write(1, 0, 0, 4000);
        },
    ),
    capture_with_fault(
        "duplicated",
        "The network duplicates a packet: the receiver acknowledges it and does not execute it again",
        "copy the packet",
        rc,
        |pair| {
            pair.add_rule(
                requests(InclusiveRange::exactly(0)),
                Repeat::times(1),
                Action::Duplicate { copies: 1 },
            );
            let (remote, gather) = (pair.b.remote(0), [pair.a.sge(0, 8)]);
            pair.post(1, Operation::FetchAdd { remote, add: 1 }, &gather);
        },
    ),
    capture_with_fault(
        "marked",
        "A packet gets a CE mark in the network: a comment in the capture, because frames are captured before the mark",
        "mark the first packet",
        rc,
        |pair| {
            pair.add_rule(requests(InclusiveRange::exactly(0)), Repeat::times(1), Action::MarkCe);
            pair.post_write(1, 0, 0, 2000);
        },
    ),
];

/// SENDs and WRITEs of one and of several packets, with and without immediate data.
fn sends_and_writes(pair: &mut Pair) {
    let (a, b) = (pair.a, pair.b);
    for length in [5, 2500] {
        let gather = [a.sge(0, length)];
        for imm_or_invalidate in [SendImmOrInvalidate::None, SendImmOrInvalidate::Immediate(0xcafe)] {
            pair.post_receive(1, 0, 4096);
            pair.post(1, Operation::Send(imm_or_invalidate), &gather);
        }
        for immediate in [None, Some(7)] {
            pair.post_receive(2, 0, 4096);
            pair.post(2, Operation::Write { remote: b.remote(8192), imm_data: immediate }, &gather);
        }
        pair.world.run();
    }
}

fn ping_pong(pair: &mut Pair) {
    let (a, b) = (pair.a, pair.b);
    for round in 0..3 {
        pair.post_receive(round, 0, 64);
        pair.on(a)
            .post_receive(a.qp, &ReceiveWorkRequest { wr_id: round, sg_list: &[a.sge(4096, 64)] })
            .unwrap();
        pair.post_send(round, 0, 64);
        pair.world.run_for(Duration::from_micros(5));
        let gather = [b.sge(4096, 64)];
        let answer = SendWorkRequest::new(round, Operation::Send(SendImmOrInvalidate::None), &gather);
        pair.on(b).post_send(b.qp, &answer).unwrap();
        pair.world.run_for(Duration::from_micros(5));
    }
}

fn multicast(pair: &mut Pair) {
    let (a, b) = (pair.a, pair.b);
    let group = Gid::from(IpAddr::V4(Ipv4Addr::new(239, 1, 2, 3)));
    pair.post_receive(1, 0, 140);
    pair.on(b).attach_multicast(b.qp, group).unwrap();
    let other = pair.on(b).create_queue_pair(QpType::Ud, b.domain, b.cq, QpOptions::default()).unwrap();
    pair.on(b).start_datagrams(other, QueueKey(0x2222), Psn::new(0)).unwrap();
    pair.on(b).attach_multicast(other, group).unwrap();
    let handle = pair.on(a).create_address_handle(a.domain, AddressVector::to(group)).unwrap();
    let gather = [a.sge(0, 100)];
    pair.post_with(1, Operation::Send(SendImmOrInvalidate::None), &gather, |request| {
        request.ud.ah = handle.0;
        request.ud.remote_qpn = Qpn::MULTICAST;
    });
}

fn atomics(pair: &mut Pair) {
    let (a, b) = (pair.a, pair.b);
    pair.write_memory(b, 0, &40u64.to_ne_bytes());
    pair.post(1, Operation::FetchAdd { remote: b.remote(0), add: 2 }, &[a.sge(0, 8)]);
    pair.post(2, Operation::CompareSwap { remote: b.remote(0), compare: 42, swap: 7 }, &[a.sge(8, 8)]);
    pair.post(3, Operation::CompareSwap { remote: b.remote(0), compare: 42, swap: 8 }, &[a.sge(16, 8)]);
}

/// Writes text to the memory of the first end. Wireshark takes a SEND of zeros for RPC-over-RDMA.
fn write_text(pair: &mut Pair) {
    let text = b"The payload of a SEND. ".repeat(128);
    pair.write_memory(pair.a, 0, &text);
}

/// Binds a window of the second end and invalidates it from the first end, with one packet and with several.
fn invalidate(pair: &mut Pair) {
    let b = pair.b;
    write_text(pair);
    for (id, length) in [(1, 45), (2, 2500)] {
        let window = pair.on(b).allocate_memory_window(b.domain, MemoryWindowType::Type2).unwrap();
        let new_key = RemoteKey(window.0 ^ 1);
        let (region, address, access) = (LocalKey(b.rkey.0), b.base, AccessFlags::REMOTE_WRITE);
        let bind = MemoryWindowBind {
            mw_rkey: window,
            new_rkey: new_key,
            mr_lkey: region,
            address,
            length: 4096,
            access,
        };
        let request = SendWorkRequest::new(id, Operation::BindMemoryWindow(bind), &[]);
        pair.on(b).post_send(b.qp, &request).unwrap();
        pair.world.run();
        pair.post_receive(id, 0, 4096);
        let gather = [pair.a.sge(0, length)];
        pair.post(id, Operation::Send(SendImmOrInvalidate::Invalidate(new_key)), &gather);
        pair.world.run();
    }
}

/// Invalidates an unknown rkey.
fn invalidate_nothing(pair: &mut Pair, length: u32) {
    pair.post_receive(1, 0, 4096);
    let gather = [pair.a.sge(0, length)];
    pair.post(1, Operation::Send(SendImmOrInvalidate::Invalidate(RemoteKey(0x1234_5678))), &gather);
}
