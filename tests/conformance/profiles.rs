//! Profiles of cards: the faults that were measured on cards, in virtual time. Writes `docs/reference/profiles.md` and
//! `docs/reference/reproductions.md`.

use softhca_engine::{ModifyQp, Profile, QpState, Recovery, Settings};
use softhca_fabric::InclusiveRange;
use softhca_tests::pair::{ALL_ACCESS, Pair, Setup, pattern, requests};
use softhca_types::{
    AccessFlags, CompletionFlags, CompletionStatus, MemoryWindowBind, Operation, RemoteAddress,
    SendImmOrInvalidate, Sge,
};
use softhca_wire::{LocalKey, Mtu, RemoteKey};
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

const UNKNOWN_KEY: u32 = 0x1234_5678;

fn profile(name: &str) -> &'static Profile {
    Profile::from_name(name).unwrap()
}

fn with_profile(name: &str) -> Setup {
    Setup { settings: Settings::with_profile(profile(name)), ..Setup::default() }
}

/// The first failed completion of the requester: status and vendor error.
fn first_failure(pair: &mut Pair) -> (CompletionStatus, u32) {
    pair.run();
    let a = pair.a;
    let failed = pair.completions(a).into_iter().find(|completion| !completion.status.is_success());
    let failed = failed.expect("the request fails");
    (failed.status, failed.vendor_error)
}

/// Replaces the text between two marks of a page, or compares it.
fn check_part(page: &str, name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference").join(page);
    let start = format!(
        "<!-- {name}: SOFTHCA_BLESS=1 cargo test -p softhca-tests --test conformance profiles writes this part -->\n"
    );
    let end = format!("<!-- end of {name} -->\n");
    let written = std::fs::read_to_string(&path).unwrap();
    let (head, rest) = written.split_once(&start).expect("the page has the start mark");
    let (_, tail) = rest.split_once(&end).expect("the page has the end mark");
    let wanted = [head, &start, "\n", text, "\n", &end, tail].concat();
    if std::env::var_os("SOFTHCA_BLESS").is_some() {
        return std::fs::write(&path, wanted).unwrap();
    }
    assert_eq!(written, wanted, "run again with SOFTHCA_BLESS=1");
}

#[test]
fn the_reference_lists_every_fact_of_every_profile() {
    let mut text = String::from("| fact |");
    for profile in Profile::ALL {
        let _ = write!(text, " `{profile}` |");
    }
    let _ = writeln!(text, "\n|---|{}", "---|".repeat(Profile::ALL.len()));
    let values = Profile::ALL.map(Profile::values);
    let limits = Profile::ALL.map(limit_values);
    for (index, (name, meaning)) in Profile::DESCRIPTIONS.iter().enumerate() {
        let _ = write!(text, "| {} (`{name}`) |", meaning.trim().trim_end_matches('.'));
        for (column, profile) in Profile::ALL.into_iter().enumerate() {
            let value = &values[column][index];
            let offered = limits[column].iter().find(|(limit, _)| limit == name).map(|(_, value)| value);
            let value = match offered {
                Some(offered) if offered != value => format!("{offered} [{value}]"),
                _ => value.clone(),
            };
            let is_known = column == 0 || profile.source(name).is_some();
            let _ = write!(text, " {} |", if is_known { &value } else { "as softhca" });
        }
        text.push('\n');
    }
    for profile in &Profile::ALL[1..] {
        let _ = writeln!(text, "\nSources of `{profile}` ({}):\n", profile.card);
        for (facts, source) in profile.sources {
            let facts: Vec<String> = facts.iter().map(|fact| format!("`{fact}`")).collect();
            let _ = writeln!(text, "- {source}: {}.", facts.join(", "));
        }
    }
    check_part("profiles.md", "facts", &text);
}

/// The limits that a device with this profile offers, by the name of the fact.
fn limit_values(profile: &Profile) -> Vec<(&'static str, String)> {
    let limits = profile.limits();
    [
        ("max_qp", limits.max_qp),
        ("max_qp_wr", limits.max_qp_wr),
        ("max_sge", limits.max_sge),
        ("max_cq", limits.max_cq),
        ("max_cqe", limits.max_cqe),
        ("max_mr", limits.max_mr),
        ("max_pd", limits.max_pd),
        ("max_qp_rd_atom", limits.max_qp_rd_atom.into()),
        ("max_mcast_grp", limits.max_mcast_grp),
        ("max_mcast_qp_attach", limits.max_mcast_qp_attach),
    ]
    .map(|(name, value)| (name, value.to_string()))
    .into()
}

fn post_send_of(pair: &mut Pair, sge: Sge) {
    pair.post(1, Operation::Send(SendImmOrInvalidate::None), &[sge]);
}

fn write_beyond_the_region(pair: &mut Pair, length: u32) {
    let (remote, gather) = (pair.b.remote((1 << 20) - 8), [pair.a.sge(0, length)]);
    pair.post(1, Operation::Write { remote, imm_data: None }, &gather);
}

/// A fault, the status and vendor error of a card, and the fault in a pair.
type MeasuredFault = (&'static str, CompletionStatus, u32, fn(Setup) -> (CompletionStatus, u32));

const MEASURED_FAULTS: [MeasuredFault; 10] = [
    ("SGE longer than the memory region", CompletionStatus::LocalProtectionError, 0x53, |setup| {
        let mut pair = setup.build();
        let sge = pair.a.sge((1 << 20) - 4, 8);
        post_send_of(&mut pair, sge);
        first_failure(&mut pair)
    }),
    ("bad lkey", CompletionStatus::LocalProtectionError, 0x52, |setup| {
        let mut pair = setup.build();
        post_send_of(&mut pair, Sge { address: 0, length: 8, lkey: LocalKey(UNKNOWN_KEY) });
        first_failure(&mut pair)
    }),
    ("READ into a region without local write", CompletionStatus::LocalProtectionError, 0x33, |setup| {
        let mut pair = setup.build();
        let domain = pair.a.domain;
        let mut verbs = pair.world.verbs(pair.a.host);
        let (key, address) = verbs.register_memory(domain, 64, AccessFlags::REMOTE_READ).unwrap();
        let remote = pair.b.remote(0);
        pair.post(1, Operation::Read { remote }, &[Sge { address, length: 8, lkey: LocalKey(key.0) }]);
        first_failure(&mut pair)
    }),
    ("flush", CompletionStatus::WrFlushError, 0xf5, |setup| {
        let mut pair = setup.build();
        let a = pair.a;
        pair.on(a).modify_queue_pair(a.qp, ModifyQp::default().state(QpState::Error)).unwrap();
        pair.post_write(1, 0, 0, 8);
        first_failure(&mut pair)
    }),
    ("queue pair without remote write", CompletionStatus::RemoteInvalidRequestError, 0x8a, |setup| {
        let mut pair = setup.connection(|c| c.access = AccessFlags::REMOTE_READ).build();
        pair.post_write(1, 0, 0, 8);
        first_failure(&mut pair)
    }),
    ("bad rkey", CompletionStatus::RemoteAccessError, 0x88, |setup| {
        let mut pair = setup.build();
        let (remote, gather) =
            (RemoteAddress { address: 0, rkey: RemoteKey(UNKNOWN_KEY) }, [pair.a.sge(0, 8)]);
        pair.post(1, Operation::Write { remote, imm_data: None }, &gather);
        first_failure(&mut pair)
    }),
    ("WRITE out of range", CompletionStatus::RemoteAccessError, 0x88, |setup| {
        let mut pair = setup.build();
        write_beyond_the_region(&mut pair, 64);
        first_failure(&mut pair)
    }),
    ("no receive", CompletionStatus::RnrRetryExceededError, 0x87, |setup| {
        let mut pair = setup.connection(|c| c.rnr_retry = 2).build();
        pair.post_send(1, 0, 8);
        first_failure(&mut pair)
    }),
    ("peer's queue pair in ERR", CompletionStatus::RetryExceededError, 0x81, |setup| {
        let mut pair = setup.build();
        let b = pair.b;
        pair.on(b).modify_queue_pair(b.qp, ModifyQp::default().state(QpState::Error)).unwrap();
        pair.post_write(1, 0, 0, 8);
        first_failure(&mut pair)
    }),
    ("peer's process killed", CompletionStatus::RetryExceededError, 0x81, |setup| {
        let mut pair = setup.build();
        let b = pair.b;
        // The kernel destroys the queue pairs of a process that ends, and the other cards are told.
        pair.on(b).destroy_queue_pair(b.qp).unwrap();
        pair.post_write(1, 0, 0, 8);
        let peer = pair.world.host(b.host).address();
        pair.world.with_hca(pair.a.host, |hca, ctx| hca.on_process_gone(ctx, peer.into()));
        first_failure(&mut pair)
    }),
];

fn table_of_faults(text: &mut String) {
    text.push_str(
        "## Faults\n\n| fault | cards: status | ours | cards: vendor_err | ours | why they differ |\n",
    );
    text.push_str("|---|---|---|---|---|---|\n");
    for (fault, status, code, run) in MEASURED_FAULTS {
        let (seen, seen_code) = run(with_profile("mlx5"));
        assert_eq!((seen, seen_code), (status, code), "{fault}");
        let _ = writeln!(text, "| {fault} | {status} | {seen} | {code:#x} | {seen_code:#x} | — |");
    }
}

/// The time until a WRITE that nobody answers fails, and the counters of its card.
fn detection_time(name: &str, timeout: u8) -> (Duration, [u64; 2]) {
    let setup = with_profile(name).recovery(Recovery::GoBackN);
    let mut pair = setup.connection(|c| (c.timeout, c.retry_count) = (timeout, 7)).build();
    pair.drop_packets(requests(InclusiveRange::at_least(0)), u64::MAX);
    pair.post_write(1, 0, 0, 8);
    let (status, _) = first_failure(&mut pair);
    assert_eq!(status, CompletionStatus::RetryExceededError);
    let a = pair.a;
    let counters = pair.counters(a);
    (
        Duration::from_nanos(pair.world.now().nanos()),
        [counters.local_ack_timeout_err, counters.roce_adp_retrans],
    )
}

fn in_words(time: Duration) -> String {
    match time.as_millis() {
        0..=999 => format!("{:.2} ms", time.as_secs_f64() * 1e3),
        _ => format!("{:.2} s", time.as_secs_f64()),
    }
}

fn table_of_times(text: &mut String) {
    const SPREAD: &str =
        "the cards draw the intervals of adaptive retransmissions at random; here they are fixed";
    const NO_FLOOR: &str = "what the card does with the floor off is not known; beside it, the times of the IBTA (profile \
                            `softhca`, go-back-n)";
    let rows = [
        ("mlx5", 14, "14", "3.66 s in a row, 3.50–3.76 s in a new process", 3_500..3_760, SPREAD),
        ("mlx5", 20, "20", "59.8 s in a row, 58.5–58.8 s in a new process", 58_500..59_800, SPREAD),
        ("softhca", 8, "8, floor off", "9.5 ms", 8..9, NO_FLOOR),
        ("softhca", 14, "14, floor off", "575 ms", 536..537, NO_FLOOR),
        ("softhca", 20, "20, floor off", "37.9 s", 34_359..34_360, NO_FLOOR),
    ];
    text.push_str("\n## Time to RETRY_EXC_ERR, retry_cnt 7\n\n| timeout | cards | ours | why they differ |\n|---|---|---|---|\n");
    for (name, timeout, shown, measured, expected_ms, why) in rows {
        let (time, _) = detection_time(name, timeout);
        assert!(expected_ms.contains(&(time.as_millis() as u64)), "timeout {shown}: {time:?}");
        let _ = writeln!(text, "| {shown} | {measured} | {} | {why} |", in_words(time));
    }
}

/// The counters of the responder that a rejected request moves, without those of traffic, and its state.
fn responder_after(run: fn(&mut Pair), setup: Setup) -> (String, &'static str) {
    let mut pair = setup.build();
    run(&mut pair);
    pair.run();
    let b = pair.b;
    let traffic = ["sent_pkts", "rcvd_pkts", "sent_bytes", "rcvd_bytes", "rx_write_requests", "wr_flushed"];
    let moved: Vec<&str> = pair
        .counters(b)
        .iter()
        .filter(|(name, value)| *value > 0 && !traffic.contains(name))
        .map(|(name, _)| name)
        .collect();
    (if moved.is_empty() { "none".into() } else { moved.join(", ") }, pair.states()[1])
}

fn table_of_effects(text: &mut String) {
    let mut row = |what: &str, card: &str, ours: String, why: &str| {
        let _ = writeln!(text, "| {what} | {card} | {ours} | {why} |");
    };
    let (_, [timeouts, adaptive]) = detection_time("mlx5", 14);
    let seen = [
        responder_after(|pair| write_beyond_the_region(pair, 64), with_profile("mlx5")),
        responder_after(
            |pair| pair.post_send(1, 0, 8),
            with_profile("mlx5").connection(|connection| connection.rnr_retry = 1),
        ),
    ];
    assert_eq!(seen[0], ("none".to_owned(), "ERR"));
    assert_eq!(seen[1].1, "RTS");
    let writes = |run: fn(&mut Pair), access| {
        let mut pair = with_profile("mlx5").connection(|c| c.access = access).build();
        run(&mut pair);
        pair.run();
        let b = pair.b;
        pair.counters(b).rx_write_requests
    };
    let refused = writes(|pair| pair.post_write(1, 0, 0, 8), AccessFlags::REMOTE_READ);
    let out_of_range = writes(|pair| write_beyond_the_region(pair, 64), ALL_ACCESS);
    assert_eq!((refused, out_of_range), (0, 1));
    assert_eq!((timeouts, adaptive), (6, 8));
    let left = bytes_left_by_a_range_error("mlx5");
    assert_eq!(left, 2 * 1024);
    row("`local_ack_timeout_err` when retries are exhausted", "+6", format!("+{timeouts}"), "—");
    row(
        "`roce_adp_retrans` when retries are exhausted",
        "+8, 4 to 11 in other runs",
        format!("+{adaptive}"),
        "8 in every run here",
    );
    row("responder: error counters of a rejected WRITE", "none", seen[0].0.clone(), "—");
    row("responder: state after a rejected WRITE", "ERR", seen[0].1.into(), "—");
    row("responder: state after RNR NAKs", "RTS", seen[1].1.into(), "—");
    row("`rx_write_requests`, queue pair without remote write", "+0", format!("+{refused}"), "—");
    row("`rx_write_requests`, bad rkey or range", "+1", format!("+{out_of_range}"), "—");
    row(
        "memory after a WRITE of 4 packets whose third is out of range",
        "has the first packets",
        format!("has {left} bytes: 2 packets"),
        "—",
    );
}

/// The bytes that a WRITE of four packets of 1024 bytes changes, of which two lie in the region.
fn bytes_left_by_a_range_error(name: &str) -> usize {
    let mut pair = with_profile(name).mtu(Mtu::B1024).build();
    let (a, b) = (pair.a, pair.b);
    let at = (1 << 20) - 2 * 1024;
    pair.write_memory(a, 0, &pattern(7, 4096));
    let remote = b.remote(at);
    pair.post(1, Operation::Write { remote, imm_data: None }, &[a.sge(0, 4096)]);
    assert_eq!(first_failure(&mut pair).0, CompletionStatus::RemoteAccessError);
    let (memory, sent) = (pair.read_memory(b, at, 2048), pattern(7, 2048));
    memory.iter().zip(&sent).take_while(|(is, was)| is == was).count()
}

#[test]
fn measurements_of_cards_are_reproduced() {
    let mut text = String::new();
    table_of_faults(&mut text);
    table_of_times(&mut text);
    text.push_str(
        "\n## Counters and effects\n\n| what | cards | ours | why they differ |\n|---|---|---|---|\n",
    );
    table_of_effects(&mut text);
    check_part("reproductions.md", "tables", &text);
}

#[test]
fn the_default_profile_keeps_its_codes_and_its_memory() {
    for (fault, _, _, run) in MEASURED_FAULTS {
        let (_, code) = run(Setup::default());
        assert!((1..=30).contains(&code), "{fault}: {code}");
    }
    assert_eq!(bytes_left_by_a_range_error("softhca"), 0);
    assert_eq!(bytes_left_by_a_range_error("rxe"), 0);
}

#[test]
fn progress_gives_a_card_its_adaptive_retransmissions_back() {
    let mut pair = with_profile("mlx5").connection(|c| (c.timeout, c.retry_count) = (14, 7)).build();
    let a = pair.a;
    // The first request is lost three times, the second one twice.
    pair.drop_packets(requests(InclusiveRange::exactly(0)), 3);
    pair.post_write(1, 0, 0, 8);
    pair.run();
    pair.drop_packets(requests(InclusiveRange::exactly(1)), 2);
    pair.post_write(2, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")]);
    let counters = pair.counters(a);
    assert_eq!((counters.roce_adp_retrans, counters.local_ack_timeout_err), (5, 0));
}

#[test]
fn a_fatal_connection_fails_after_the_time_of_all_tries_of_the_card() {
    let (with_retries, _) = detection_time("mlx5", 14);
    let mut pair = with_profile("mlx5").recovery(Recovery::Fatal).connection(|c| c.timeout = 14).build();
    pair.drop_packets(requests(InclusiveRange::at_least(0)), u64::MAX);
    pair.post_write(1, 0, 0, 8);
    assert_eq!(first_failure(&mut pair), (CompletionStatus::RetryExceededError, 0x81));
    assert_eq!(pair.world.now().nanos(), with_retries.as_nanos() as u64);
    assert_eq!(pair.packets().len(), 1, "nothing is sent again");
}

#[test]
fn a_failed_invalidate_is_acknowledged_by_rxe_only() {
    for (name, status) in [("softhca", "RETRY_EXC_ERR"), ("mlx5", "RETRY_EXC_ERR"), ("rxe", "SUCCESS")] {
        let mut pair = with_profile(name).build();
        let a = pair.a;
        pair.post_receive(100, 0, 100);
        let gather = [a.sge(0, 8)];
        let invalidate = SendImmOrInvalidate::Invalidate(RemoteKey(UNKNOWN_KEY));
        pair.post(1, Operation::Send(invalidate), &gather);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, status)], "{name}");
        assert_eq!(pair.states()[1], "ERR", "{name}");
    }
}

#[test]
fn receives_of_connections_have_the_grh_flag_on_rxe_only() {
    for (name, has_flag) in [("softhca", false), ("rxe", true)] {
        let mut pair = with_profile(name).build();
        let b = pair.b;
        pair.post_receive(100, 0, 100);
        pair.post_send(1, 0, 8);
        pair.run();
        let flags = pair.completions(b)[0].flags;
        assert_eq!(flags.contains(CompletionFlags::GRH), has_flag, "{name}");
    }
}

#[test]
fn a_send_that_is_too_long_has_the_nak_of_the_card() {
    for (name, status) in [("softhca", "REM_INV_REQ_ERR"), ("rxe", "REM_OP_ERR")] {
        let mut pair = with_profile(name).build();
        let a = pair.a;
        pair.post_receive(100, 0, 100);
        pair.post_send(1, 0, 101);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, status)], "{name}");
    }
}

#[test]
fn a_rejected_write_with_immediate_completes_its_receive_as_on_the_card() {
    for (name, status) in [("softhca", "LOC_ACCESS_ERR"), ("rxe", "REM_ACCESS_ERR")] {
        let mut pair = with_profile(name).build();
        let b = pair.b;
        pair.post_receive(100, 0, 100);
        let (remote, gather) =
            (RemoteAddress { address: 0, rkey: RemoteKey(UNKNOWN_KEY) }, [pair.a.sge(0, 8)]);
        pair.post(1, Operation::Write { remote, imm_data: Some(1) }, &gather);
        pair.run();
        assert_eq!(pair.completion_statuses(b), [(100, status)], "{name}");
    }
}

#[test]
fn limits_are_those_of_the_card() {
    let mut pair = with_profile("mlx5").build();
    let a = pair.a;
    let drained = ModifyQp::default().state(QpState::SendQueueDrained);
    pair.on(a).modify_queue_pair(a.qp, drained).unwrap();
    pair.run();
    let error = pair.on(a).modify_queue_pair(a.qp, drained.max_rd_atomic(17)).unwrap_err();
    assert!(error.to_string().contains("the limit is 16"), "{error}");
}

#[test]
fn deregistering_a_bound_region_has_the_errno_of_the_card() {
    for (name, errno) in [("softhca", 16), ("rxe", 22)] {
        let mut pair = with_profile(name).build();
        let a = pair.a;
        let window =
            pair.on(a).allocate_memory_window(a.domain, softhca_engine::MemoryWindowType::Type1).unwrap();
        let bind = MemoryWindowBind {
            mw_rkey: window,
            new_rkey: window,
            mr_lkey: LocalKey(a.rkey.0),
            address: a.base,
            length: 64,
            access: AccessFlags::REMOTE_READ,
        };
        pair.post(1, Operation::BindMemoryWindow(bind), &[]);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
        let error = pair.on(a).deregister_memory(a.rkey).unwrap_err();
        assert_eq!(error.errno(), errno, "{name}: {error}");
    }
}
