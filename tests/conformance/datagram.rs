//! Datagrams: addressing, Q_Keys, the GRH, multicast.

use softhca_engine::{AddressVector, DropReason, Event, QpState, QpType};
use softhca_fabric::HostId;
use softhca_tests::pair::{ALL_ACCESS, Pair, QUEUE_KEY, Setup, pattern};
use softhca_tests::verbs::QpOptions;
use softhca_types::{
    CompletionFlags, Operation, ReceiveWorkRequest, SendImmOrInvalidate, Sge, UdDestination,
};
use softhca_wire::{Gid, LocalKey, Psn, Qpn, QueueKey};
use std::net::{IpAddr, Ipv4Addr};

fn ud() -> Pair {
    Setup::with_kind(QpType::Ud).build()
}

#[test]
fn every_length_up_to_the_port_mtu_arrives_after_a_40_byte_grh() {
    let mut pair = ud();
    let (a, b) = (pair.a, pair.b);
    for length in [0, 1, 2, 3, 1024, 4095, 4096] {
        let data = pattern(length.into(), length as usize);
        pair.write_memory(a, 0, &data);
        pair.post_receive(100, 0, 40 + length);
        pair.post_send(1, 0, length);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
        let received = pair.completions(b)[0];
        assert_eq!(
            (received.byte_len, received.src_qp, received.status.name()),
            (40 + length, a.qp, "SUCCESS")
        );
        assert_eq!(received.flags, CompletionFlags::GRH | CompletionFlags::IPV4);
        assert_eq!(pair.read_memory(b, 40, length as usize), data);
    }
}

#[test]
fn what_was_posted_is_sent_although_the_queue_pair_is_destroyed() {
    for kind in [QpType::Ud, QpType::Uc] {
        // The port is busy for 33 µs with each packet.
        let mut pair = Setup::with_kind(kind).mtu(softhca_wire::Mtu::B4096).one_gigabit().build();
        let (a, b) = (pair.a, pair.b);
        let length = if kind == QpType::Ud { 4096 } else { 10_000 };
        for id in 0..20 {
            pair.post_receive(id, 20_000 * id, 20_000);
            pair.write_memory(a, 20_000 * id, &pattern(id, length as usize));
            pair.post_send(id, 20_000 * id, length);
        }
        pair.on(a).destroy_queue_pair(a.qp).unwrap();
        pair.on(a).deregister_memory(a.rkey).unwrap();
        pair.run();
        let received: Vec<u64> = pair.completions(b).iter().map(|c| c.wr_id).collect();
        assert_eq!(received, (0..20).collect::<Vec<_>>(), "{kind:?}");
        let header = if kind == QpType::Ud { 40 } else { 0 };
        let last = pair.read_memory(b, 19 * 20_000 + header, length as usize);
        assert_eq!(last, pattern(19, length as usize), "{kind:?}");
    }
}

#[test]
fn the_second_half_of_the_grh_is_the_ipv4_header() {
    let mut pair = ud();
    let b = pair.b;
    pair.write_memory(b, 0, &[9; 60]);
    pair.post_receive(100, 0, 60);
    pair.post_send(1, 0, 8);
    pair.run();
    let grh = pair.read_memory(b, 0, 40);
    // 20 (IP) + 8 (UDP) + 12 (BTH) + 8 (DETH) + 8 (data) + 4 (ICRC).
    let header = [0x45, 0, 0, 60, 0, 0, 0x40, 0, 64, 17];
    assert_eq!((&grh[..20], &grh[20..30]), (&[0; 20][..], &header[..]));
    assert_eq!(grh[32..40], [10, 0, 0, 1, 10, 0, 0, 2]);
}

#[test]
fn the_grh_is_the_ipv6_header() {
    let mut pair = Setup::with_kind(QpType::Ud).ipv6().build();
    let b = pair.b;
    pair.post_receive(100, 0, 60);
    pair.post_send(1, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(b), [(100, "SUCCESS")]);
    let grh = pair.read_memory(b, 0, 40);
    assert_eq!(grh[..8], [0x60, 0, 0, 0, 0, 40, 17, 64]);
    let address = |last| [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last];
    assert_eq!((&grh[8..24], &grh[24..]), (&address(1)[..], &address(2)[..]));
}

#[test]
fn connections_work_between_ipv6_addresses() {
    for kind in [QpType::Rc, QpType::Uc] {
        let mut pair = Setup::with_kind(kind).ipv6().build();
        let (a, b) = (pair.a, pair.b);
        let data = pattern(1, 3000);
        pair.write_memory(a, 0, &data);
        pair.post_write(1, 0, 0, 3000);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
        assert_eq!(pair.read_memory(b, 0, 3000), data);
    }
}

#[test]
fn immediate_data_arrives() {
    let mut pair = ud();
    let (a, b) = (pair.a, pair.b);
    pair.post_receive(100, 0, 100);
    pair.post(1, Operation::Send(SendImmOrInvalidate::Immediate(0xabcd)), &[a.sge(0, 4)]);
    pair.run();
    let received = pair.completions(b)[0];
    assert_eq!(received.imm_data, 0xabcd);
    let expected = CompletionFlags::GRH | CompletionFlags::IPV4 | CompletionFlags::IMMEDIATE;
    assert_eq!(received.flags, expected);
}

#[test]
fn a_controlled_q_key_is_replaced_by_that_of_the_sender() {
    let mut pair = ud();
    let (a, b) = (pair.a, pair.b);
    pair.post_receive(100, 0, 100);
    let gather = [a.sge(0, 4)];
    pair.post_with(1, Operation::Send(SendImmOrInvalidate::None), &gather, |request| {
        request.ud.remote_qkey = QueueKey(0x8000_0000);
    });
    pair.run();
    assert_eq!(pair.completion_statuses(b), [(100, "SUCCESS")]);
}

#[test]
fn a_wrong_q_key_consumes_no_receive() {
    let mut pair = ud();
    let (a, b) = (pair.a, pair.b);
    pair.post_receive(100, 0, 100);
    for key in [0, 0x1110, 0x1111_0000] {
        let gather = [a.sge(0, 4)];
        pair.post_with(1, Operation::Send(SendImmOrInvalidate::None), &gather, |request| {
            request.ud.remote_qkey = QueueKey(key);
        });
    }
    pair.post_send(2, 0, 4);
    pair.run();
    assert_eq!(pair.completion_statuses(b), [(100, "SUCCESS")]);
    assert_eq!(pair.counters(b).rx_dropped, 3);
}

#[test]
fn a_datagram_to_an_unknown_qpn_is_dropped() {
    let mut pair = ud();
    let (a, b) = (pair.a, pair.b);
    let gather = [a.sge(0, 4)];
    pair.post_with(1, Operation::Send(SendImmOrInvalidate::None), &gather, |request| {
        request.ud.remote_qpn = Qpn::new(0x123);
    });
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    assert_eq!(pair.counters(b).rx_dropped, 1);
}

#[test]
fn psns_increment_and_gaps_are_ignored() {
    let mut pair = ud();
    let b = pair.b;
    for id in 0..3 {
        pair.post_receive(id, 0, 100);
    }
    let lose_second = softhca_fabric::Selector {
        absolute_psn: Some(softhca_fabric::InclusiveRange::exactly(1)),
        ..softhca_fabric::Selector::default()
    };
    pair.drop_packets(lose_second, 1);
    for id in 0..3 {
        pair.post_send(id, 0, 4);
    }
    pair.run();
    assert_eq!(pair.completion_statuses(b), [(0, "SUCCESS"), (1, "SUCCESS")]);
    let psns: Vec<_> = pair.packets().iter().map(|p| p.split(' ').nth(2).unwrap().to_owned()).collect();
    assert_eq!(psns, ["0", "1", "2"]);
}

#[test]
fn a_local_error_moves_to_sqe_and_receives_continue() {
    let mut pair = ud();
    let (a, b) = (pair.a, pair.b);
    pair.post_send(1, 0, 4097);
    pair.post_send(2, 0, 4);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "LOC_LEN_ERR"), (2, "WR_FLUSH_ERR")]);
    assert_eq!(pair.states(), ["SQE", "RTS"]);
    // The receive direction still works, and new sends are flushed.
    let to = AddressVector::to(Gid::from(pair.world.host(a.host).address()));
    let handle = pair.on(b).create_address_handle(b.domain, to).unwrap();
    let scatter = [a.sge(0, 100)];
    pair.on(a).post_receive(a.qp, &ReceiveWorkRequest { wr_id: 50, sg_list: &scatter }).unwrap();
    let gather = [b.sge(0, 4)];
    let mut request =
        softhca_types::SendWorkRequest::new(9, Operation::Send(SendImmOrInvalidate::None), &gather);
    request.ud = UdDestination { ah: handle.0, remote_qpn: a.qp, remote_qkey: QUEUE_KEY };
    pair.on(b).post_send(b.qp, &request).unwrap();
    pair.post_send(3, 0, 4);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(3, "WR_FLUSH_ERR"), (50, "SUCCESS")]);
    // After a transition to RTS it sends again.
    pair.on(a)
        .modify_queue_pair(a.qp, softhca_engine::ModifyQp::default().state(QpState::ReadyToSend))
        .unwrap();
    pair.post_receive(100, 0, 100);
    pair.post_send(4, 0, 4);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(4, "SUCCESS")]);
}

fn group() -> Gid {
    Gid::from(IpAddr::V4(Ipv4Addr::new(239, 1, 2, 3)))
}

/// Creates another UD queue pair on a host with a posted receive.
fn member(pair: &mut Pair, host: HostId, key: QueueKey) -> (Qpn, softhca_engine::CqId) {
    let mut verbs = pair.world.verbs(host);
    let domain = verbs.allocate_protection_domain().unwrap();
    let cq = verbs.create_completion_queue(8).unwrap();
    let qp = verbs.create_queue_pair(QpType::Ud, domain, cq, QpOptions::default()).unwrap();
    verbs.start_datagrams(qp, key, Psn::new(0)).unwrap();
    let (region, address) = verbs.register_memory(domain, 100, ALL_ACCESS).unwrap();
    let scatter = [Sge { address, length: 100, lkey: LocalKey(region.0) }];
    verbs.post_receive(qp, &ReceiveWorkRequest { wr_id: 7, sg_list: &scatter }).unwrap();
    verbs.attach_multicast(qp, group()).unwrap();
    (qp, cq)
}

fn send_to_group(pair: &mut Pair) {
    let a = pair.a;
    let handle = pair.on(a).create_address_handle(a.domain, AddressVector::to(group())).unwrap();
    let gather = [a.sge(0, 4)];
    pair.post_with(1, Operation::Send(SendImmOrInvalidate::None), &gather, |request| {
        request.ud.ah = handle.0;
        request.ud.remote_qpn = Qpn::MULTICAST;
    });
    pair.run();
}

#[test]
fn a_multicast_reaches_every_member_except_the_sender() {
    let mut pair = ud();
    let (a, b) = (pair.a, pair.b);
    let members = [member(&mut pair, a.host, QUEUE_KEY), member(&mut pair, b.host, QUEUE_KEY)];
    let stranger = member(&mut pair, b.host, QueueKey(5));
    pair.on(a).attach_multicast(a.qp, group()).unwrap();
    send_to_group(&mut pair);
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    for ((_, cq), host) in members.into_iter().zip([a.host, b.host]) {
        let received = pair.world.verbs(host).poll_all(cq);
        assert_eq!(
            received.iter().map(|c| (c.wr_id, c.byte_len, c.src_qp)).collect::<Vec<_>>(),
            [(7, 44, a.qp)]
        );
    }
    assert_eq!(pair.world.verbs(b.host).poll_all(stranger.1), []);
    let own = pair
        .recording
        .borrow()
        .events
        .iter()
        .filter(|(_, host, event)| {
            *host == a.host && matches!(event, Event::PacketReceived { qp, .. } if *qp == a.qp)
        })
        .count();
    assert_eq!(own, 0);
}

#[test]
fn a_multicast_without_members_is_dropped() {
    let mut pair = ud();
    let b = pair.b;
    let (qp, cq) = member(&mut pair, b.host, QUEUE_KEY);
    pair.on(b).detach_multicast(qp, group()).unwrap();
    assert!(pair.on(b).detach_multicast(qp, group()).is_err());
    send_to_group(&mut pair);
    assert_eq!(pair.world.verbs(b.host).poll_all(cq), []);
    let lost = pair.recording.borrow().events.iter().any(|(_, host, event)| {
        *host == b.host
            && matches!(event, Event::PacketDropped { reason: DropReason::NotMulticastMember, .. })
    });
    assert!(lost);
}

#[test]
fn only_ud_queue_pairs_and_multicast_gids_can_attach() {
    let mut pair = Pair::new();
    let a = pair.a;
    assert!(pair.on(a).attach_multicast(a.qp, group()).is_err());
    let mut pair = ud();
    let a = pair.a;
    let single = Gid::from(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)));
    assert!(pair.on(a).attach_multicast(a.qp, single).is_err());
}
