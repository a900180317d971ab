//! The completion status of every kind of error: the rows of `docs/reference/errors.md`.
//!
//! Each test causes one error and compares everything observable with its row.

use softhca_engine::{Event, MemoryWindowType, QpState, QpType, Reason};
use softhca_fabric::{Action, FieldValue, HeaderField, InclusiveRange, Repeat};
use softhca_tests::pair::{ALL_ACCESS, Pair, PairEnd, Setup, requests, responses};
use softhca_types::{AccessFlags, MemoryWindowBind, Operation, RemoteAddress, SendImmOrInvalidate, Sge};
use softhca_wire::{LocalKey, Mtu, Opcode, QueueKey, RemoteKey, Syndrome, TransportPacket};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The cells of the table rows. The last cell is the name of the test.
fn table() -> Vec<Vec<String>> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/errors.md");
    let text = std::fs::read_to_string(path).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| ") && line.ends_with("` |"));
    let cells =
        |row: &str| row.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect();
    rows.map(cells).collect()
}

fn or_dash(found: Vec<String>) -> String {
    if found.is_empty() { "—".into() } else { found.join(", ") }
}

impl PairErrors for Pair {
    fn first_failure(&self, end: PairEnd) -> String {
        let record = self.recording.borrow();
        let failed = record.events.iter().find_map(|(_, host, event)| match event {
            Event::Completed { completion, .. } if *host == end.host && !completion.status.is_success() => {
                Some(completion.status.name().into())
            }
            _ => None,
        });
        failed.unwrap_or_else(|| "—".into())
    }

    fn naks(&self) -> String {
        let mut naks: Vec<String> = Vec::new();
        for (_, frame) in &self.recording.borrow().sent {
            let transport = TransportPacket::parse(&frame.bytes[..frame.bytes.len() - 4]).unwrap();
            let nak = match transport.header.aeth.map(|aeth| aeth.syndrome) {
                Some(Syndrome::Nak(code)) => code.name().into(),
                Some(Syndrome::RnrNak(_)) => "RNR".into(),
                _ => continue,
            };
            if !naks.contains(&nak) {
                naks.push(nak);
            }
        }
        or_dash(naks)
    }

    fn events(&self) -> String {
        let of =
            |end, role: &'static str| self.async_events(end).into_iter().map(move |e| format!("{role} {e}"));
        or_dash(of(self.a, "requester").chain(of(self.b, "responder")).collect())
    }

    fn anomalies(&self) -> String {
        const TRAFFIC: [&str; 9] = [
            "sent_pkts",
            "rcvd_pkts",
            "sent_bytes",
            "rcvd_bytes",
            "rx_read_requests",
            "rx_write_requests",
            "rx_atomic_requests",
            "wr_flushed",
            "completion_errors",
        ];
        let of = |end, role: &'static str| {
            let counters: Vec<_> = self.counters(end).iter().collect();
            let nonzero = counters.into_iter().filter(|(name, n)| *n > 0 && !TRAFFIC.contains(name));
            nonzero.map(move |(name, _)| format!("{role} {name}"))
        };
        or_dash(of(self.a, "requester").chain(of(self.b, "responder")).collect())
    }

    fn assert_row(&mut self, test: &str) {
        self.run();
        let [a, b] = self.states();
        let (requester, responder) = (self.first_failure(self.a), self.first_failure(self.b));
        let seen = [requester, responder, self.naks(), self.events(), format!("{a} / {b}"), self.anomalies()];
        for (.., event) in &self.recording.borrow().events {
            if let Event::Completed { completion, reason, .. } = event {
                assert_eq!(completion.status.is_success(), *reason == Reason::None, "{event:?}");
            }
        }
        let rows = table();
        let row = rows.iter().find(|row| row.last().is_some_and(|name| name == test));
        let row = row.unwrap_or_else(|| panic!("errors.md lacks:\n| … | {} | `{test}` |", seen.join(" | ")));
        assert_eq!(row[1..row.len() - 1], seen, "the row of {test}");
    }
}

/// The contents of a row.
trait PairErrors {
    fn first_failure(&self, end: PairEnd) -> String;
    fn naks(&self) -> String;
    fn events(&self) -> String;
    fn anomalies(&self) -> String;
    /// Runs until no event is left, and compares with the row of `test`.
    fn assert_row(&mut self, test: &str);
}

/// A pair whose second end has a posted receive of 100 bytes.
fn pair(setup: Setup) -> Pair {
    let mut pair = setup.build();
    pair.post_receive(100, 0, 100);
    pair
}

fn rc() -> Pair {
    pair(Setup::default())
}

fn write_to(pair: &mut Pair, remote: RemoteAddress, length: u32) {
    let gather = [pair.a.sge(0, length)];
    pair.post(1, Operation::Write { remote, imm_data: None }, &gather);
}

fn send() -> Operation {
    Operation::Send(SendImmOrInvalidate::None)
}

/// A region of the second end with these access flags only.
fn region_of_b(pair: &mut Pair, access: AccessFlags) -> RemoteAddress {
    let domain = pair.b.domain;
    let (key, address) = pair.world.verbs(pair.b.host).register_memory(domain, 4096, access).unwrap();
    RemoteAddress { address, rkey: key }
}

const UNKNOWN_RKEY: LocalKey = LocalKey(0x7777_7777);

#[test]
fn every_row_has_a_test_and_every_test_a_row() {
    let rows: Vec<String> = table().iter().map(|row| row.last().unwrap().clone()).collect();
    let distinct: BTreeSet<String> = rows.iter().cloned().collect();
    assert_eq!(distinct.len(), rows.len(), "a test has two rows");
    let source = include_str!("errors.rs");
    let named = source
        .lines()
        .filter_map(|line| line.trim().strip_prefix("pair.assert_row(\"")?.strip_suffix("\");"));
    assert_eq!(distinct, named.map(String::from).collect());
    for name in &distinct {
        assert!(source.contains(&format!("#[test]\nfn {name}() {{")), "{name}");
    }
}

#[test]
fn an_unknown_lkey_is_a_local_protection_error() {
    let mut pair = rc();
    pair.post(1, send(), &[Sge { address: 0, length: 8, lkey: UNKNOWN_RKEY }]);
    pair.assert_row("an_unknown_lkey_is_a_local_protection_error");
}

#[test]
fn an_sge_outside_the_region_is_a_local_protection_error() {
    let mut pair = rc();
    let gather = [pair.a.sge((1 << 20) - 4, 8)];
    pair.post(1, send(), &gather);
    pair.assert_row("an_sge_outside_the_region_is_a_local_protection_error");
}

#[test]
fn a_read_into_a_region_without_local_write_is_a_local_protection_error() {
    let mut pair = rc();
    let domain = pair.a.domain;
    let (key, address) =
        pair.world.verbs(pair.a.host).register_memory(domain, 64, AccessFlags::REMOTE_READ).unwrap();
    let remote = pair.b.remote(0);
    pair.post(1, Operation::Read { remote }, &[Sge { address, length: 8, lkey: LocalKey(key.0) }]);
    pair.assert_row("a_read_into_a_region_without_local_write_is_a_local_protection_error");
}

#[test]
fn an_atomic_with_an_unknown_lkey_changes_the_remote_memory() {
    let mut pair = rc();
    pair.write_memory(pair.b, 0, &7u64.to_ne_bytes());
    let remote = pair.b.remote(0);
    let result = [Sge { address: 0, length: 8, lkey: UNKNOWN_RKEY }];
    pair.post(1, Operation::FetchAdd { remote, add: 5 }, &result);
    pair.assert_row("an_atomic_with_an_unknown_lkey_changes_the_remote_memory");
    assert_eq!(pair.read_memory(pair.b, 0, 8), 12u64.to_ne_bytes());
}

#[test]
fn the_error_of_the_responder_precedes_that_of_a_bad_lkey() {
    let remote = RemoteAddress { address: 0, rkey: RemoteKey(0x1234_5678) };
    for operation in [Operation::Read { remote }, Operation::CompareSwap { remote, compare: 0, swap: 1 }] {
        let mut pair = rc();
        pair.post(1, operation, &[Sge { address: 0, length: 8, lkey: UNKNOWN_RKEY }]);
        pair.assert_row("the_error_of_the_responder_precedes_that_of_a_bad_lkey");
    }
}

#[test]
fn a_message_over_2_gib_is_a_local_length_error() {
    let mut pair = rc();
    let gather = [pair.a.sge(0, 1 << 31), pair.a.sge(0, 1)];
    pair.post(1, send(), &gather);
    pair.assert_row("a_message_over_2_gib_is_a_local_length_error");
}

#[test]
fn an_atomic_with_a_short_sge_fails_locally() {
    let mut pair = rc();
    let (remote, gather) = (pair.b.remote(0), [pair.a.sge(0, 7)]);
    pair.post(1, Operation::FetchAdd { remote, add: 1 }, &gather);
    pair.assert_row("an_atomic_with_a_short_sge_fails_locally");
}

#[test]
fn a_read_with_max_rd_atomic_0_fails_locally() {
    let mut pair = pair(Setup::default().connection(|c| c.max_rd_atomic = 0));
    pair.post_read(1, 0, 0, 8);
    pair.assert_row("a_read_with_max_rd_atomic_0_fails_locally");
}

#[test]
fn a_read_on_uc_fails_locally() {
    let mut pair = pair(Setup::with_kind(QpType::Uc));
    pair.post_read(1, 0, 0, 8);
    pair.assert_row("a_read_on_uc_fails_locally");
}

#[test]
fn a_datagram_over_the_path_mtu_is_a_local_length_error() {
    let mut pair = pair(Setup::with_kind(QpType::Ud));
    pair.post_send(1, 0, 4097);
    pair.assert_row("a_datagram_over_the_path_mtu_is_a_local_length_error");
}

#[test]
fn a_datagram_needs_an_address_handle() {
    let mut pair = pair(Setup::with_kind(QpType::Ud));
    let gather = [pair.a.sge(0, 8)];
    pair.post_with(1, send(), &gather, |request| request.ud.ah = 0x5555);
    pair.assert_row("a_datagram_needs_an_address_handle");
}

#[test]
fn binding_a_window_to_a_region_without_mw_bind_fails() {
    let mut pair = rc();
    let a = pair.a;
    let (region, address) = pair.on(a).register_memory(a.domain, 64, AccessFlags::LOCAL_WRITE).unwrap();
    let window = pair.on(a).allocate_memory_window(a.domain, MemoryWindowType::Type1).unwrap();
    let (region, access) = (LocalKey(region.0), AccessFlags::REMOTE_READ);
    let bind =
        MemoryWindowBind { mw_rkey: window, new_rkey: window, mr_lkey: region, address, length: 64, access };
    pair.post(1, Operation::BindMemoryWindow(bind), &[]);
    pair.assert_row("binding_a_window_to_a_region_without_mw_bind_fails");
}

#[test]
fn invalidating_an_unknown_key_fails() {
    let mut pair = rc();
    pair.post(1, Operation::LocalInvalidate { rkey: RemoteKey(0x1234_5678) }, &[]);
    pair.assert_row("invalidating_an_unknown_key_fails");
}

#[test]
fn cq_overflow_stops_its_queue_pairs() {
    let mut pair = rc();
    let (a, cq) = (pair.a, pair.a.cq);
    pair.on(a).resize_completion_queue(cq, 1).unwrap();
    pair.post_write(1, 0, 0, 8);
    pair.post_write(2, 0, 0, 8);
    pair.assert_row("cq_overflow_stops_its_queue_pairs");
}

#[test]
fn a_transition_to_error_flushes() {
    let mut pair = rc();
    let a = pair.a;
    pair.post_send(1, 0, 8);
    let error = softhca_engine::ModifyQp::default().state(QpState::Error);
    pair.on(a).modify_queue_pair(a.qp, error).unwrap();
    pair.assert_row("a_transition_to_error_flushes");
}

#[test]
fn a_write_with_an_unknown_rkey_is_a_remote_access_error() {
    let mut pair = rc();
    write_to(&mut pair, RemoteAddress { address: 0, rkey: RemoteKey(0x1234_5678) }, 8);
    pair.assert_row("a_write_with_an_unknown_rkey_is_a_remote_access_error");
}

#[test]
fn a_write_outside_the_region_is_a_remote_access_error() {
    let mut pair = rc();
    let remote = pair.b.remote((1 << 20) - 4);
    write_to(&mut pair, remote, 8);
    pair.assert_row("a_write_outside_the_region_is_a_remote_access_error");
}

#[test]
fn a_write_without_the_access_flag_of_the_region_is_a_remote_access_error() {
    let mut pair = rc();
    let remote = region_of_b(&mut pair, AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ);
    write_to(&mut pair, remote, 8);
    pair.assert_row("a_write_without_the_access_flag_of_the_region_is_a_remote_access_error");
}

#[test]
fn a_write_without_the_access_flag_of_the_queue_pair_is_a_remote_access_error() {
    let mut pair = pair(Setup::default().connection(|c| c.access = AccessFlags::REMOTE_READ));
    pair.post_write(1, 0, 0, 8);
    pair.assert_row("a_write_without_the_access_flag_of_the_queue_pair_is_a_remote_access_error");
}

#[test]
fn the_event_names_the_object_that_refuses_the_access() {
    let mut pair = pair(Setup::default().connection(|c| c.access = AccessFlags::REMOTE_WRITE));
    pair.post_read(1, 0, 0, 8);
    pair.run();
    let record = pair.recording.borrow();
    let refusal = record.events.iter().find_map(|(.., event)| match event {
        Event::RequestRejected { error, .. } => Some(error.to_string()),
        _ => None,
    });
    let refused = "the queue pair allows REMOTE_WRITE; the access requires REMOTE_READ";
    assert_eq!(refusal.as_deref(), Some(refused));
}

#[test]
fn a_write_to_another_protection_domain_is_a_remote_access_error() {
    let mut pair = rc();
    let b = pair.b;
    let other = pair.on(b).allocate_protection_domain().unwrap();
    let (key, address) = pair.on(b).register_memory(other, 4096, ALL_ACCESS).unwrap();
    write_to(&mut pair, RemoteAddress { address, rkey: key }, 8);
    pair.assert_row("a_write_to_another_protection_domain_is_a_remote_access_error");
}

#[test]
fn a_write_to_unmapped_memory_is_a_remote_access_error() {
    let mut pair = rc();
    let b = pair.b;
    pair.on(b).unmap(b.rkey).unwrap();
    pair.post_write(1, 0, 0, 8);
    pair.assert_row("a_write_to_unmapped_memory_is_a_remote_access_error");
}

#[test]
fn a_read_without_the_access_flag_is_a_remote_access_error() {
    let mut pair = rc();
    let remote = region_of_b(&mut pair, AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE);
    let gather = [pair.a.sge(0, 8)];
    pair.post(1, Operation::Read { remote }, &gather);
    pair.assert_row("a_read_without_the_access_flag_is_a_remote_access_error");
}

#[test]
fn an_atomic_without_the_access_flag_is_a_remote_access_error() {
    let mut pair = rc();
    let remote = region_of_b(&mut pair, AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE);
    let gather = [pair.a.sge(0, 8)];
    pair.post(1, Operation::FetchAdd { remote, add: 1 }, &gather);
    pair.assert_row("an_atomic_without_the_access_flag_is_a_remote_access_error");
}

#[test]
fn a_send_with_invalidate_of_an_unknown_rkey_fails_the_responder() {
    let mut pair = rc();
    let gather = [pair.a.sge(0, 8)];
    pair.post(1, Operation::Send(SendImmOrInvalidate::Invalidate(RemoteKey(0x1234_5678))), &gather);
    pair.assert_row("a_send_with_invalidate_of_an_unknown_rkey_fails_the_responder");
    assert_eq!(pair.completion_statuses(pair.a), [(1, "RETRY_EXC_ERR")]);
}

fn write_with_imm_and_unknown_rkey(length: u32) -> Pair {
    let mut pair = rc();
    let (remote, gather) =
        (RemoteAddress { address: 0, rkey: RemoteKey(0x1234_5678) }, [pair.a.sge(0, length)]);
    pair.post(1, Operation::Write { remote, imm_data: Some(1) }, &gather);
    pair
}

#[test]
fn a_write_with_imm_and_an_unknown_rkey_fails_its_receive() {
    let mut pair = write_with_imm_and_unknown_rkey(8);
    pair.assert_row("a_write_with_imm_and_an_unknown_rkey_fails_its_receive");
}

#[test]
fn a_long_write_with_imm_and_an_unknown_rkey_takes_no_receive() {
    let mut pair = write_with_imm_and_unknown_rkey(3000);
    pair.assert_row("a_long_write_with_imm_and_an_unknown_rkey_takes_no_receive");
}

#[test]
fn a_misaligned_atomic_is_an_invalid_request() {
    let mut pair = rc();
    let (remote, gather) = (pair.b.remote(4), [pair.a.sge(0, 8)]);
    pair.post(1, Operation::FetchAdd { remote, add: 1 }, &gather);
    pair.assert_row("a_misaligned_atomic_is_an_invalid_request");
}

#[test]
fn a_send_longer_than_the_receive_is_an_invalid_request() {
    let mut pair = rc();
    pair.post_send(1, 0, 101);
    pair.assert_row("a_send_longer_than_the_receive_is_an_invalid_request");
}

#[test]
fn a_receive_with_a_bad_lkey_is_a_remote_operational_error() {
    let mut pair = Pair::new();
    pair.post_receive_into(100, &[Sge { address: 0, length: 100, lkey: UNKNOWN_RKEY }]);
    pair.post_send(1, 0, 8);
    pair.assert_row("a_receive_with_a_bad_lkey_is_a_remote_operational_error");
}

#[test]
fn more_reads_than_max_dest_rd_atomic_are_an_invalid_request() {
    let setup = Setup::default().one_gigabit();
    let mut pair = setup.build();
    let (a, b) = (pair.a, pair.b);
    // The responder accepts one at a time; the requester is configured for 16.
    for (end, peer, reads) in [(a, b, 16), (b, a, 1)] {
        let reset = softhca_engine::ModifyQp::default().state(QpState::Reset);
        pair.on(end).modify_queue_pair(end.qp, reset).unwrap();
        let connection = softhca_tests::verbs::ConnectOptions { max_rd_atomic: reads, ..setup.connection };
        pair.on(end).connect(end.qp, (peer.host, peer.qp), &connection, connection.first_psns).unwrap();
    }
    pair.post_receive(100, 0, 100);
    pair.post_read(1, 0, 0, 50_000);
    pair.post_read(2, 0, 0, 8);
    pair.assert_row("more_reads_than_max_dest_rd_atomic_are_an_invalid_request");
}

#[test]
fn deregistering_a_region_during_a_read_is_a_remote_operational_error() {
    let mut pair = pair(Setup::default().one_gigabit());
    let b = pair.b;
    pair.post_read(1, 0, 0, 100_000);
    pair.world.run_for(std::time::Duration::from_micros(100));
    pair.on(b).deregister_memory(b.rkey).unwrap();
    pair.assert_row("deregistering_a_region_during_a_read_is_a_remote_operational_error");
}

#[test]
fn a_middle_packet_without_a_first_is_an_invalid_request() {
    let mut pair = rc();
    let value = FieldValue::Set(u64::from(opcode("SEND_MIDDLE").byte()));
    pair.add_rule(
        requests(InclusiveRange::exactly(0)),
        Repeat::times(1),
        Action::Rewrite { field: HeaderField::Opcode, value },
    );
    pair.post_send(1, 0, 3000);
    pair.assert_row("a_middle_packet_without_a_first_is_an_invalid_request");
}

#[test]
fn a_flush_is_an_invalid_request() {
    let mut pair = rc();
    let value = FieldValue::Set(u64::from(opcode("FLUSH").byte()));
    pair.add_rule(
        requests(InclusiveRange::exactly(0)),
        Repeat::times(1),
        Action::Rewrite { field: HeaderField::Opcode, value },
    );
    // RETH and four bytes of payload have the length of FETH and RETH.
    pair.post_write(1, 0, 0, 4);
    pair.assert_row("a_flush_is_an_invalid_request");
}

#[test]
fn an_atomic_write_is_an_invalid_request() {
    let mut pair = rc();
    let value = FieldValue::Set(u64::from(opcode("ATOMIC_WRITE").byte()));
    pair.add_rule(
        requests(InclusiveRange::exactly(0)),
        Repeat::times(1),
        Action::Rewrite { field: HeaderField::Opcode, value },
    );
    pair.post_write(1, 0, 0, 8);
    pair.assert_row("an_atomic_write_is_an_invalid_request");
}

#[test]
fn a_write_with_a_wrong_length_is_an_invalid_request() {
    let mut pair = rc();
    let action = Action::Rewrite { field: HeaderField::Length, value: FieldValue::Set(7) };
    pair.add_rule(requests(InclusiveRange::exactly(0)), Repeat::times(1), action);
    pair.post_write(1, 0, 0, 8);
    pair.assert_row("a_write_with_a_wrong_length_is_an_invalid_request");
}

#[test]
fn a_path_mtu_mismatch_is_an_invalid_request() {
    let setup = Setup::default();
    let mut pair = setup.build();
    let (a, b) = (pair.a, pair.b);
    let reset = softhca_engine::ModifyQp::default().state(QpState::Reset);
    pair.on(b).modify_queue_pair(b.qp, reset).unwrap();
    let connection = softhca_tests::verbs::ConnectOptions { path_mtu: Mtu::B512, ..setup.connection };
    pair.on(b).connect(b.qp, (a.host, a.qp), &connection, connection.first_psns).unwrap();
    pair.post_receive(100, 0, 100);
    pair.post_write(1, 0, 0, 3000);
    pair.assert_row("a_path_mtu_mismatch_is_an_invalid_request");
}

#[test]
fn an_xrc_request_to_an_unknown_srq_is_an_invalid_request() {
    let mut pair = pair(Setup::with_kind(QpType::XrcInitiator));
    let gather = [pair.a.sge(0, 8)];
    pair.post_with(1, send(), &gather, |request| request.remote_srqn = 0x77);
    pair.assert_row("an_xrc_request_to_an_unknown_srq_is_an_invalid_request");
}

#[test]
fn a_receiver_that_never_posts_exhausts_rnr_retry() {
    let mut pair = Setup::default().connection(|c| c.rnr_retry = 2).build();
    pair.post_send(1, 0, 8);
    pair.assert_row("a_receiver_that_never_posts_exhausts_rnr_retry");
}

#[test]
fn a_lost_packet_is_a_sequence_error() {
    let mut pair = rc();
    pair.drop_packets(requests(InclusiveRange::exactly(1)), 1);
    pair.post_write(1, 0, 0, 4000);
    pair.assert_row("a_lost_packet_is_a_sequence_error");
}

#[test]
fn a_lost_last_packet_is_an_ack_timeout() {
    let mut pair = rc();
    pair.drop_packets(requests(InclusiveRange::exactly(0)), 1);
    pair.post_write(1, 0, 0, 8);
    pair.assert_row("a_lost_last_packet_is_an_ack_timeout");
}

#[test]
fn a_lost_read_response_is_a_gap() {
    let mut pair = rc();
    pair.drop_packets(responses(InclusiveRange::exactly(1)), 1);
    pair.post_read(1, 0, 0, 4000);
    pair.assert_row("a_lost_read_response_is_a_gap");
}

#[test]
fn a_response_that_does_not_match_its_request_is_a_bad_response() {
    let mut pair = rc();
    let value = FieldValue::Set(u64::from(opcode("READ_RESPONSE_MIDDLE").byte()));
    let action = Action::Rewrite { field: HeaderField::Opcode, value };
    pair.add_rule(responses(InclusiveRange::exactly(0)), Repeat::times(1), action);
    pair.post_read(1, 0, 0, 8);
    pair.assert_row("a_response_that_does_not_match_its_request_is_a_bad_response");
}

#[test]
fn a_packet_with_another_p_key_is_dropped() {
    let mut pair = rc();
    let action = Action::Rewrite { field: HeaderField::PartitionKey, value: FieldValue::Set(0x8123) };
    pair.add_rule(requests(InclusiveRange::at_least(0)), Repeat::default(), action);
    pair.post_write(1, 0, 0, 8);
    pair.assert_row("a_packet_with_another_p_key_is_dropped");
}

#[test]
fn a_packet_with_a_bad_icrc_is_dropped() {
    let mut pair = rc();
    let (place, icrc) = (softhca_fabric::BitPosition::PayloadBit(3), softhca_fabric::IcrcPolicy::Stale);
    pair.add_rule(
        requests(InclusiveRange::exactly(0)),
        Repeat::times(1),
        Action::Corrupt { bit: place, icrc },
    );
    pair.post_write(1, 0, 0, 8);
    pair.assert_row("a_packet_with_a_bad_icrc_is_dropped");
}

#[test]
fn a_peer_in_reset_does_not_respond() {
    let mut pair = Pair::new();
    let b = pair.b;
    pair.on(b).modify_queue_pair(b.qp, softhca_engine::ModifyQp::default().state(QpState::Reset)).unwrap();
    pair.post_write(1, 0, 0, 8);
    pair.assert_row("a_peer_in_reset_does_not_respond");
}

#[test]
fn a_uc_send_longer_than_the_receive_is_dropped() {
    let mut pair = pair(Setup::with_kind(QpType::Uc));
    pair.post_send(1, 0, 101);
    pair.assert_row("a_uc_send_longer_than_the_receive_is_dropped");
    pair.post_send(2, 0, 100);
    pair.run();
    assert_eq!(pair.completion_statuses(pair.b), [(100, "SUCCESS")], "the receive stays");
}

#[test]
fn a_uc_send_without_a_receive_is_dropped() {
    let mut pair = Setup::with_kind(QpType::Uc).build();
    pair.post_send(1, 0, 8);
    pair.assert_row("a_uc_send_without_a_receive_is_dropped");
}

#[test]
fn a_uc_write_with_an_unknown_rkey_is_dropped() {
    let mut pair = pair(Setup::with_kind(QpType::Uc));
    write_to(&mut pair, RemoteAddress { address: 0, rkey: RemoteKey(0x1234_5678) }, 8);
    pair.assert_row("a_uc_write_with_an_unknown_rkey_is_dropped");
}

#[test]
fn a_datagram_longer_than_the_receive_is_dropped() {
    let mut pair = pair(Setup::with_kind(QpType::Ud));
    pair.post_send(1, 0, 61);
    pair.assert_row("a_datagram_longer_than_the_receive_is_dropped");
    assert_eq!(pair.read_memory(pair.b, 0, 100), [0; 100], "nothing of it is placed, not even the GRH");
    pair.post_send(2, 0, 60);
    pair.run();
    assert_eq!(pair.completion_statuses(pair.b), [(100, "SUCCESS")], "the receive stays");
}

#[test]
fn a_datagram_longer_than_a_shared_receive_fails_that_receive() {
    let mut pair = pair(Setup::with_kind(QpType::Ud).with_shared_receive_queue());
    pair.post_send(1, 0, 61);
    pair.assert_row("a_datagram_longer_than_a_shared_receive_fails_that_receive");
    pair.completions(pair.b);
    pair.post_receive(101, 0, 100);
    pair.post_send(2, 0, 60);
    pair.run();
    assert_eq!(pair.completion_statuses(pair.b), [(101, "SUCCESS")], "the queue pair continues");
}

#[test]
fn a_datagram_with_another_q_key_is_dropped() {
    let mut pair = pair(Setup::with_kind(QpType::Ud));
    let gather = [pair.a.sge(0, 8)];
    pair.post_with(1, send(), &gather, |request| request.ud.remote_qkey = QueueKey(5));
    pair.assert_row("a_datagram_with_another_q_key_is_dropped");
}

fn opcode(name: &str) -> Opcode {
    let mut reliable = Opcode::all().filter(|opcode| opcode.service() == softhca_wire::Service::Rc);
    reliable.find(|opcode| opcode.name().ends_with(name)).unwrap_or_else(|| panic!("no opcode {name}"))
}
