//! Traffic of a host to itself, through its socket and inside the HCA: the outcomes are equal, and internal traffic
//! uses no link.

pub mod harness;

use harness::{Host, QKEY, QUARTER, RecordedTraffic, drive, for_each_loopback, free_address, once};
use softhca_engine::{AddressVector, Memory, MemoryId, ModifyQp, PortState, QpState, QpType, Recovery};
use softhca_fabric::{Action, BitPosition, IcrcPolicy, PacketClasses, Repeat, Rule, Stage};
use softhca_queue::{SharedWords, SleepFlag};
use softhca_types::{
    CompletionStatus, Operation, RemoteAddress, SendImmOrInvalidate, SendWorkRequest, UdDestination,
};
use softhca_udp::{DrivePolicy, Loopback, SharedDriver};
use softhca_wire::link_control::Pause;
use softhca_wire::{Bth, Gid, Icrc, Psn};
use std::num::NonZeroU32;
use std::time::{Duration, Instant as Clock};

#[test]
fn messages_of_all_sizes_arrive_in_both_directions() {
    for_each_loopback(|loopback| {
        let mut host = Host::new(loopback, Recovery::Fatal);
        let mut pairs = host.connected_pairs();
        host.fill(0, QUARTER, 1);
        // Sizes around those of packets, batches and messages of several batches.
        let sizes = [0, 1, 1023, 1024, 1025, 5000, 64_000, 65_507, 200_000];
        for round in 0..10 {
            for (index, size) in sizes.into_iter().enumerate() {
                for (number, pair) in pairs.iter_mut().enumerate() {
                    let (id, at) = ((round * 10 + index) as u64, (number as u64 + 1) * QUARTER);
                    let write = host.application.write(at);
                    host.application.post(pair, id, write, 0, size);
                }
            }
            let received = host.completions(2 * sizes.len());
            for pair in &pairs {
                let ids = received.iter().filter(|(qp, _, _)| *qp == pair.qp).map(|(_, id, _)| *id % 10);
                assert!(ids.eq(0..sizes.len() as u64), "in order: {received:?}");
            }
            assert!(received.iter().all(|(_, _, status)| status.is_success()), "{received:?}");
        }
        assert!(host.holds(QUARTER, 200_000, 1) && host.holds(2 * QUARTER, 200_000, 1));
        let counters = *host.driver.hca().counters();
        assert_eq!((counters.retransmitted_pkts, counters.out_of_sequence), (0, 0));
        host.check_links(loopback);
    });
}

#[test]
fn every_operation_has_the_same_result_with_both_loopbacks() {
    let mut ends = Vec::new();
    for_each_loopback(|loopback| {
        let mut host = Host::new(loopback, Recovery::Fatal);
        let [mut a, mut b] = host.connected_pairs();
        host.fill(0, 10_000, 3);
        let Host { application, .. } = &host;
        let word = RemoteAddress { address: 3 * QUARTER, rkey: application.key };
        for id in 0..3 {
            application.receive(&mut b, 100 + id, 2 * QUARTER, 10_000);
        }
        application.post(&mut a, 1, Operation::Send(SendImmOrInvalidate::None), 0, 10_000);
        application.post(&mut a, 2, Operation::Send(SendImmOrInvalidate::Immediate(5)), 0, 10);
        application.post(&mut a, 3, application.write(QUARTER), 0, 10_000);
        let remote = RemoteAddress { address: QUARTER, rkey: application.key };
        application.post(&mut a, 4, Operation::Write { remote, imm_data: Some(9) }, 0, 10_000);
        application.post(&mut a, 5, Operation::Read { remote }, QUARTER + 20_000, 10_000);
        application.post(&mut a, 6, Operation::FetchAdd { remote: word, add: 4 }, 3 * QUARTER + 8, 8);
        let swap = Operation::CompareSwap { remote: word, compare: 4, swap: 6 };
        application.post(&mut a, 7, swap, 3 * QUARTER + 16, 8);
        let received = host.completions(10);
        assert!(host.holds(2 * QUARTER, 10_000, 3) && host.holds(QUARTER, 10_000, 3));
        assert!(host.holds(QUARTER + 20_000, 10_000, 3));
        assert_eq!([0, 8, 16].map(|at| host.word(3 * QUARTER + at)), [6, 0, 4]);
        let of = |qp| received.iter().filter(move |end| end.0 == qp).map(|end| (end.1, end.2));
        ends.push([of(a.qp).collect::<Vec<_>>(), of(b.qp).collect()]);
        assert_eq!(host.driver.hca().counters().rx_atomic_requests, 2);
    });
    assert_eq!(ends[0], ends[1]);
    assert_eq!((ends[0][0].len(), ends[0][1].len()), (7, 3));
}

#[test]
fn internal_message_completes_in_one_poll_without_a_grant() {
    let mut host = Host::new(Loopback::Internal, Recovery::Fatal);
    let [mut a, mut b] = host.connected_pairs();
    host.fill(0, 64, 5);
    host.application.receive(&mut b, 2, QUARTER, 64);
    host.application.post(&mut a, 1, Operation::Send(SendImmOrInvalidate::None), 0, 64);
    assert!(host.poll());
    let ids = std::iter::from_fn(|| host.application.completions.pop()).map(|end| (end.qpn, end.wr_id));
    assert_eq!(ids.collect::<Vec<_>>(), [(b.qp, 2), (a.qp, 1)], "received, then acknowledged");
    assert!(host.holds(QUARTER, 64, 5));
    assert!(!host.driver.has_pending_transmit());
    assert_eq!(host.driver.links().next_timeout(), None, "no heartbeat");
    host.check_links(Loopback::Internal);
}

#[test]
fn poll_is_bounded() {
    let mut host = Host::new(Loopback::Internal, Recovery::Fatal);
    let [mut a, _] = host.connected_pairs();
    for id in 0..8 {
        let write = host.application.write(QUARTER);
        host.application.post(&mut a, id, write, 0, 1 << 20);
    }
    let mut before = 0;
    while before < 8 << 20 {
        assert!(host.poll(), "{before} bytes are there");
        let now = host.driver.hca().counters().rcvd_bytes;
        assert!(now > before && now <= before + 4 * 65_536, "{} bytes in one poll", now - before);
        before = now;
        if now < 8 << 20 {
            assert!(host.driver.has_pending_transmit(), "a thread must not sleep now");
            assert_eq!(host.driver.next_timeout(), Some(Duration::ZERO));
        }
    }
    host.succeed(8);
}

#[test]
fn every_packet_has_an_icrc_and_is_received_unchanged() {
    let mut stories = Vec::new();
    for_each_loopback(|loopback| {
        let mut host = Host::new(loopback, Recovery::Fatal);
        let [mut a, _] = host.connected_pairs();
        let write = host.application.write(QUARTER);
        host.application.post(&mut a, 1, write, 0, 100_000);
        host.succeed(1);
        let RecordedTraffic { frames, .. } = &*host.recorder.0.lock().unwrap();
        assert!(frames.iter().all(|(_, addressing, packet)| Icrc::verify(addressing, packet)));
        let passed = |wanted| {
            let chosen = frames.iter().filter(move |(direction, _, _)| *direction == wanted);
            chosen.map(|(_, addressing, packet)| {
                (addressing.traffic_class, addressing.source_port, packet.clone())
            })
        };
        assert!(passed(Stage::Admitted).eq(passed(Stage::Delivered)));
        let requests = passed(Stage::Delivered).filter_map(|(class, port, packet)| {
            let bth = Bth::parse(&packet).unwrap();
            bth.opcode.operation().is_request().then_some((class, port, bth.opcode, bth.psn))
        });
        stories.push(requests.collect::<Vec<_>>());
    });
    assert_eq!(stories[0], stories[1]);
    assert_eq!(stories[0].len(), 98);
}

#[test]
fn lost_packet_is_fatal_or_retransmitted() {
    for_each_loopback(|loopback| {
        for (recovery, ends) in [
            (Recovery::Fatal, [CompletionStatus::RetryExceededError, CompletionStatus::WrFlushError]),
            (Recovery::GoBackN, [CompletionStatus::Success; 2]),
        ] {
            let mut host = Host::new(loopback, recovery);
            let [mut a, _] = host.connected_pairs();
            host.fill(0, 50_000, 8);
            host.driver.add_rule(1, once(PacketClasses::Data, Action::Drop));
            for id in 0..2 {
                let write = host.application.write(QUARTER);
                host.application.post(&mut a, id, write, 0, 50_000);
            }
            let received = host.completions(2);
            assert_eq!([received[0].2, received[1].2], ends, "{recovery:?}");
            assert_eq!(host.holds(QUARTER, 50_000, 8), recovery == Recovery::GoBackN);
            let counters = host.driver.hca().counters();
            // On a busy machine the ACK timer can run out first. The packet then fills the gap before it is seen.
            let timed_out = recovery == Recovery::GoBackN && counters.local_ack_timeout_err > 0;
            assert!(counters.packet_seq_err == 1 || timed_out, "{recovery:?}: {counters:?}");
            assert_eq!(counters.retransmitted_pkts > 0, recovery == Recovery::GoBackN);
        }
    });
}

#[test]
fn corrupted_packet_is_dropped_for_its_icrc() {
    for_each_loopback(|loopback| {
        let mut host = Host::new(loopback, Recovery::GoBackN);
        let [mut a, _] = host.connected_pairs();
        host.fill(0, 5000, 9);
        let action = Action::Corrupt { bit: BitPosition::PayloadBit(77), icrc: IcrcPolicy::Stale };
        host.driver.add_rule(1, once(PacketClasses::Data, action));
        let write = host.application.write(QUARTER);
        host.application.post(&mut a, 1, write, 0, 5000);
        host.succeed(1);
        assert!(host.holds(QUARTER, 5000, 9), "the corrupted packet was not accepted");
        assert_eq!(host.driver.hca().counters().rx_icrc_encapsulated, 1);
    });
}

#[test]
fn duplicated_delayed_and_reordered_packets_behave_as_on_a_wire() {
    for_each_loopback(|loopback| {
        let by = NonZeroU32::new(2).unwrap();
        for action in [
            Action::Duplicate { copies: 2 },
            Action::Delay { ns: 3_000_000 },
            Action::Reorder { by, within_ns: 100_000_000 },
        ] {
            let mut host = Host::new(loopback, Recovery::GoBackN);
            let [mut a, _] = host.connected_pairs();
            host.fill(0, 20_000, 2);
            host.driver.add_rule(1, once(PacketClasses::Data, action));
            let write = host.application.write(QUARTER);
            host.application.post(&mut a, 1, write, 0, 20_000);
            host.succeed(1);
            assert!(host.holds(QUARTER, 20_000, 2), "{action:?}");
            let counters = host.driver.hca().counters();
            let is_late = !matches!(action, Action::Duplicate { .. });
            assert_eq!(counters.packet_seq_err > 0, is_late, "{action:?}");
            assert!(counters.duplicate_request >= 2 || is_late, "{action:?}");
        }
    });
}

#[test]
fn ce_mark_is_answered_with_a_cnp_to_the_own_host() {
    for_each_loopback(|loopback| {
        let mut host = Host::new(loopback, Recovery::Fatal);
        let [mut a, _] = host.connected_pairs();
        host.driver.add_rule(1, once(PacketClasses::Data, Action::MarkCe));
        let write = host.application.write(QUARTER);
        host.application.post(&mut a, 1, write, 0, 10_000);
        drive(&mut [&mut host], |hosts| hosts[0].driver.hca().counters().rp_cnp_handled > 0);
        let counters = host.driver.hca().counters();
        assert_eq!((counters.np_ecn_marked_roce_packets, counters.np_cnp_sent), (1, 1));
    });
}

#[test]
fn pause_of_the_own_host_stops_a_priority_until_it_ends() {
    for_each_loopback(|loopback| {
        let mut host = Host::new(loopback, Recovery::Fatal);
        let [mut a, _] = host.connected_pairs();
        let own = host.driver.address();
        let mut write = |host: &Host| {
            let write = host.application.write(QUARTER);
            host.application.post(&mut a, 1, write, 0, 1000);
        };
        // Establishes the link, if the host has one to itself.
        write(&host);
        host.succeed(1);
        host.driver.pause_peer(own, Pause { classes: 1 << 3, quanta: [0xffff; 8], rate: 100_000_000 });
        assert_eq!(
            host.driver.priorities_paused_by(own) == 1 << 3,
            loopback == Loopback::Internal,
            "at once with internal loopback"
        );
        drive(&mut [&mut host], |hosts| hosts[0].driver.priorities_paused_by(own) == 1 << 3);
        write(&host);
        drive(&mut [&mut host], |hosts| {
            let is_over = hosts[0].driver.priorities_paused_by(own) == 0;
            assert!(
                is_over || hosts[0].application.completions.pop().is_none(),
                "the write passed the pause"
            );
            is_over
        });
        host.succeed(1);
        assert_eq!(host.driver.hca().counters().rx_pause_frames, 1);
        assert_eq!(host.recorder.0.lock().unwrap().pauses, [Stage::Admitted, Stage::Delivered]);
    });
}

#[test]
fn port_that_is_down_loses_its_own_packets() {
    for_each_loopback(|loopback| {
        let mut host = Host::new(loopback, Recovery::GoBackN);
        let [mut a, _] = host.connected_pairs();
        host.fill(0, 3000, 6);
        host.driver.set_port_state(PortState::Down);
        let write = host.application.write(QUARTER);
        host.application.post(&mut a, 1, write, 0, 3000);
        drive(&mut [&mut host], |hosts| hosts[0].driver.hca().counters().sent_pkts >= 3);
        for _ in 0..10 {
            host.poll();
        }
        assert_eq!(host.driver.hca().counters().rcvd_pkts, 0);
        host.driver.set_port_state(PortState::Active);
        host.succeed(1);
        assert!(host.holds(QUARTER, 3000, 6));
    });
}

#[test]
fn rnr_nak_is_retried() {
    for_each_loopback(|loopback| {
        let mut host = Host::new(loopback, Recovery::Fatal);
        let [mut a, mut b] = host.connected_pairs();
        host.fill(0, 2000, 4);
        host.application.post(&mut a, 1, Operation::Send(SendImmOrInvalidate::None), 0, 2000);
        drive(&mut [&mut host], |hosts| hosts[0].driver.hca().counters().rcvd_rnr_err > 0);
        host.application.receive(&mut b, 2, QUARTER, 2000);
        host.succeed(2);
        assert!(host.holds(QUARTER, 2000, 4));
    });
}

#[test]
fn datagram_to_the_own_host_has_the_same_grh_with_both_loopbacks() {
    let address = free_address();
    let mut headers = Vec::new();
    for_each_loopback(|loopback| {
        let mut host = Host::at(address, loopback, Recovery::Fatal);
        let own = Gid::from(host.driver.address());
        let Host { application, driver, .. } = &mut host;
        let [mut a, mut b] = [(); 2].map(|()| application.add_pair(driver, QpType::Ud));
        let modify = ModifyQp::default();
        let handle = driver.control(|hca, ctx| {
            for qp in [a.qp, b.qp] {
                for step in [
                    modify.state(QpState::Init).pkey_index(0).port(1).qkey(QKEY),
                    modify.state(QpState::ReadyToReceive),
                    modify.state(QpState::ReadyToSend).sq_psn(Psn::new(0)),
                ] {
                    hca.modify_queue_pair(ctx, application.client, qp, &step).unwrap();
                }
            }
            let vector = AddressVector { traffic_class: 0x68, flow_label: 5, ..AddressVector::to(own) };
            hca.create_address_handle(application.client, application.domain, vector).unwrap()
        });
        application.receive(&mut b, 9, QUARTER, 200);
        let entries = [application.entry(0, 100)];
        let datagram = UdDestination { ah: handle.0, remote_qpn: b.qp, remote_qkey: QKEY };
        let send = SendWorkRequest::new(1, Operation::Send(SendImmOrInvalidate::None), &entries);
        application.post_request(&mut a, &SendWorkRequest { ud: datagram, ..send });
        host.fill(0, 100, 7);
        host.succeed(2);
        assert!(host.holds(QUARTER + 40, 100, 7));
        let mut header = [0; 40];
        host.driver.memory().read(MemoryId(0), QUARTER, &mut header).unwrap();
        // The host's own address is both source and destination.
        let offset =
            header.windows(4).position(|four| four == &own.0[12..]).expect("an address in the header");
        header[offset..].fill(0);
        headers.push(header);
    });
    assert_eq!(headers[0], headers[1]);
    assert_ne!(headers[0], [0; 40]);
}

#[test]
fn peers_are_served_during_internal_traffic() {
    for_each_loopback(|loopback| {
        let mut busy = Host::new(loopback, Recovery::Fatal);
        let mut other = Host::new(loopback, Recovery::Fatal);
        let [mut a, _b] = busy.connected_pairs();
        let (mut c, mut d) = (busy.add_pair(), other.add_pair());
        let [here, there] = [busy.driver.address(), other.driver.address()];
        busy.connect(&c, there, d.qp);
        other.connect(&d, here, c.qp);
        other.fill(0, 100_000, 1);
        busy.fill(0, 100_000, 2);
        let (mut outstanding, mut done, mut rounds) = (0, 0, 0);
        let [to_other, to_busy] = [&other, &busy].map(|host| host.application.write(2 * QUARTER));
        drive(&mut [&mut busy, &mut other], |hosts| {
            let [busy, other] = hosts else { panic!("two hosts") };
            while let Some(end) = busy.application.completions.pop() {
                assert!(end.status.is_success(), "{end:?}");
                outstanding -= u32::from(end.qpn == a.qp);
                done += u32::from(end.qpn == c.qp);
            }
            while let Some(end) = other.application.completions.pop() {
                assert!(end.status.is_success(), "{end:?}");
                done += 1;
            }
            while outstanding < 16 {
                let write = busy.application.write(QUARTER);
                busy.application.post(&mut a, 0, write, 0, 1 << 20);
                outstanding += 1;
            }
            if done == 2 * rounds {
                busy.application.post(&mut c, 1, to_other, 0, 100_000);
                other.application.post(&mut d, 1, to_busy, 0, 100_000);
                rounds += 1;
            }
            rounds == 20
        });
        assert!(busy.holds(2 * QUARTER, 100_000, 1) && other.holds(2 * QUARTER, 100_000, 2));
        busy.check_links(loopback);
        assert_eq!(busy.driver.links().state(there.into()), Some(softhca_udp::PeerState::Alive));
    });
}

/// Only the thread polls, and it sleeps as soon as it is idle.
#[test]
fn sleeping_thread_loses_no_internal_packet() {
    for_each_loopback(|loopback| {
        let mut host = Host::new(loopback, Recovery::GoBackN);
        let [mut a, mut b] = host.connected_pairs();
        let delay = once(PacketClasses::Data, Action::Delay { ns: 2_000_000 });
        host.driver.add_rule(1, Rule { repeat: Repeat::times(5), ..delay });
        let Host { driver, mut application, .. } = host;
        let policy = DrivePolicy::Thread { busy_poll: Duration::ZERO };
        let driver = SharedDriver::start(driver, policy, SleepFlag::new(SharedWords::heap(1))).unwrap();
        let deadline = Clock::now() + Duration::from_secs(60);
        for round in 0..50 {
            application.receive(&mut b, round, QUARTER, 10_000);
            application.post(&mut a, round, Operation::Send(SendImmOrInvalidate::None), 0, 10_000);
            driver.on_doorbell();
            let mut left = 2;
            while left > 0 {
                assert!(Clock::now() < deadline, "round {round} did not end");
                match application.completions.pop() {
                    Some(end) => {
                        assert!(end.status.is_success(), "{end:?}");
                        left -= 1;
                    }
                    None => std::thread::sleep(Duration::from_micros(100)),
                }
            }
        }
    });
}

#[test]
fn address_of_a_stopped_host_can_be_bound_again() {
    for_each_loopback(|loopback| {
        let address = free_address();
        for round in 0..3 {
            let mut host = Host::at(address, loopback, Recovery::Fatal);
            let [mut a, _] = host.connected_pairs();
            host.fill(0, 1 << 20, round);
            for id in 0..8 {
                let write = host.application.write(QUARTER);
                host.application.post(&mut a, id, write, 0, 1 << 20);
            }
            drive(&mut [&mut host], |hosts| hosts[0].driver.hca().counters().rcvd_bytes > 100_000);
            assert!(host.driver.has_pending_transmit() || loopback == Loopback::Socket);
            if round == 2 {
                host.succeed(8);
                assert!(host.holds(QUARTER, 1 << 20, round));
            }
        }
    });
}
