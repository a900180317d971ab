//! `softhca lint`: each mistake is found where it occurs, and nowhere else.

use super::{reader, run_and_log};
use softhca_engine::{AhId, ModifyQp, QpState, QpType, Recovery};
use softhca_fabric::InclusiveRange;
use softhca_tests::pair::{Pair, Setup, requests};
use softhca_tests::verbs::ConnectOptions;
use softhca_trace::lint::{Linter, PITFALLS};
use softhca_types::{AccessFlags, Operation, RemoteAddress, SendFlags, SendImmOrInvalidate};
use softhca_wire::{Mtu, Psn, QueueKey, RemoteKey};
use std::time::Duration;

/// The findings of a run.
fn findings(setup: Setup, act: impl FnOnce(&mut Pair)) -> String {
    let log = run_and_log(setup, act);
    let reader = reader(&log);
    let mut linter = Linter::new(reader.header());
    reader.for_each(|entry| linter.push(&entry.expect("an entry")));
    let found: Vec<String> = linter.findings().map(ToString::to_string).collect();
    if found.is_empty() { "nothing".into() } else { found.join("\n\n") }
}

#[test]
fn a_healthy_run_has_no_findings() {
    for kind in [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcInitiator] {
        let found = findings(Setup::with_kind(kind), |pair| {
            for id in 0..3 {
                pair.post_receive(id, 0, 4096);
                pair.post_send(id, 8192, 1000);
            }
            if kind == QpType::Rc {
                pair.post_write(7, 0, 0, 4000);
                pair.post_read(8, 16384, 0, 4000);
            }
            pair.run();
        });
        assert_eq!(found, "nothing", "{kind:?}");
    }
}

#[test]
fn receive_not_posted() {
    insta::assert_snapshot!(findings(Setup::default(), |pair| {
        pair.post_send(7, 0, 100);
        pair.world.run_for(Duration::from_micros(800));
        pair.post_receive(1, 0, 100);
        pair.run();
    }));
    insta::assert_snapshot!(
        "receive_not_posted_for_a_datagram",
        findings(Setup::with_kind(QpType::Ud), |pair| {
            pair.post_send(7, 0, 100);
            pair.run();
        })
    );
}

#[test]
fn receive_too_small() {
    insta::assert_snapshot!(findings(Setup::default(), |pair| {
        pair.post_receive(1, 0, 50);
        pair.post_send(7, 0, 100);
        pair.run();
    }));
}

#[test]
fn cq_overflow() {
    insta::assert_snapshot!(findings(Setup::default(), |pair| {
        let (a, cq) = (pair.a, pair.a.cq);
        pair.on(a).resize_completion_queue(cq, 1).unwrap();
        pair.post_write(7, 0, 0, 8);
        pair.post_write(8, 0, 0, 8);
        pair.run();
    }));
}

#[test]
fn cq_too_small() {
    let mut setup = Setup::default();
    (setup.options.max_send_wr, setup.options.max_recv_wr) = (1024, 512);
    insta::assert_snapshot!(findings(setup, |_| {}));
}

#[test]
fn unsignaled_send_queue_full() {
    let mut setup = Setup::default();
    setup.options.max_send_wr = 4;
    let run = |signalled: u64| {
        findings(setup, |pair| {
            for id in 0..8 {
                let (remote, gather) = (pair.b.remote(0), [pair.a.sge(0, 8)]);
                let flags = if id == signalled { SendFlags::SIGNALED } else { SendFlags::empty() };
                let write = Operation::Write { remote, imm_data: None };
                pair.post_with(id, write, &gather, |request| request.flags = flags);
                pair.run();
            }
        })
    };
    insta::assert_snapshot!(run(7));
    assert_eq!(run(3), "nothing");
}

#[test]
fn buffer_in_use() {
    insta::assert_snapshot!(findings(Setup::default().one_gigabit(), |pair| {
        // The same memory is the source of a send and the target of a read.
        pair.post_write(7, 0, 0, 4000);
        pair.post_read(8, 1000, 8192, 100);
        pair.run();
    }));
    insta::assert_snapshot!(
        "a_buffer_of_many_reads",
        findings(Setup::default().one_gigabit(), |pair| {
            for id in 0..5 {
                pair.post_read(id, 0, 0, 4000);
            }
            pair.run();
        })
    );
    insta::assert_snapshot!(
        "a_buffer_that_a_peer_writes",
        findings(Setup::default().one_gigabit(), |pair| {
            let (a, b) = (pair.a, pair.b);
            pair.post_write(7, 0, 0, 4000);
            let gather = [b.sge(65536, 16)];
            let write = Operation::Write { remote: a.remote(0), imm_data: None };
            pair.on(b).post_send(b.qp, &softhca_types::SendWorkRequest::new(9, write, &gather)).unwrap();
            pair.run();
        })
    );
}

#[test]
fn missing_access_flag() {
    insta::assert_snapshot!(findings(Setup::default(), |pair| {
        let (b, gather) = (pair.b, [pair.a.sge(0, 8)]);
        let (key, address) = pair.on(b).register_memory(b.domain, 4096, AccessFlags::LOCAL_WRITE).unwrap();
        let write = Operation::Write { remote: RemoteAddress { address, rkey: key }, imm_data: None };
        pair.post(7, write, &gather);
        pair.run();
    }));
}

#[test]
fn unknown_key() {
    insta::assert_snapshot!(findings(Setup::default(), |pair| {
        let gather = [pair.a.sge(0, 8)];
        let remote = RemoteAddress { address: 0, rkey: RemoteKey(0x1234_5678) };
        pair.post(7, Operation::Write { remote, imm_data: None }, &gather);
        pair.run();
    }));
}

/// Reconnects the second end with other attributes than the first.
fn reconnect(pair: &mut Pair, change: impl FnOnce(&mut ConnectOptions)) {
    let (a, b) = (pair.a, pair.b);
    let mut connection = Setup::default().connection;
    change(&mut connection);
    let [first, second] = connection.first_psns;
    pair.on(b).modify_queue_pair(b.qp, ModifyQp::default().state(QpState::Reset)).unwrap();
    pair.on(b).connect(b.qp, (a.host, a.qp), &connection, [second, first]).unwrap();
}

#[test]
fn mtu_mismatch() {
    insta::assert_snapshot!(findings(Setup::default(), |pair| {
        reconnect(pair, |connection| connection.path_mtu = Mtu::B512);
        pair.post_write(7, 0, 0, 3000);
        pair.run();
    }));
}

#[test]
fn psn_mismatch() {
    insta::assert_snapshot!(findings(Setup::default(), |pair| {
        reconnect(pair, |connection| connection.first_psns = [Psn::new(77), Psn::new(0)]);
    }));
}

#[test]
fn max_rd_atomic_mismatch() {
    insta::assert_snapshot!(findings(Setup::default(), |pair| reconnect(pair, |connection| connection
        .max_rd_atomic =
        4)));
}

#[test]
fn retries_hide_faults() {
    insta::assert_snapshot!(findings(Setup::default().recovery(Recovery::GoBackN), |pair| {
        pair.drop_packets(requests(InclusiveRange::exactly(0)), 4);
        pair.post_write(7, 0, 0, 100);
        pair.run();
    }));
    insta::assert_snapshot!(
        "retries_hide_receives_that_are_not_posted",
        findings(Setup::default(), |pair| {
            pair.post_send(7, 0, 100);
            pair.world.run_for(Duration::from_millis(3));
        })
    );
}

#[test]
fn timeout_zero() {
    insta::assert_snapshot!(findings(Setup::default().connection(|c| c.timeout = 0), |_| {}));
}

#[test]
fn waits_for_ever() {
    insta::assert_snapshot!(findings(Setup::default().connection(|c| c.timeout = 0), |pair| {
        let b = pair.b;
        pair.on(b).modify_queue_pair(b.qp, ModifyQp::default().state(QpState::Error)).unwrap();
        pair.post_write(7, 0, 0, 100);
        pair.run();
    }));
}

#[test]
fn wrong_qkey() {
    insta::assert_snapshot!(findings(Setup::with_kind(QpType::Ud), |pair| {
        pair.post_receive(1, 0, 200);
        let gather = [pair.a.sge(0, 100)];
        pair.post_with(7, Operation::Send(SendImmOrInvalidate::None), &gather, |request| {
            request.ud.remote_qkey = QueueKey(0x2222);
        });
        pair.run();
    }));
}

#[test]
fn sent_before_ready() {
    insta::assert_snapshot!(findings(Setup::default(), |pair| {
        let b = pair.b;
        pair.on(b).modify_queue_pair(b.qp, ModifyQp::default().state(QpState::Reset)).unwrap();
        pair.post_write(7, 0, 0, 100);
        pair.run();
    }));
}

#[test]
fn deregistered_in_use() {
    // No receive is posted: the SEND is outstanding.
    let found = findings(Setup::default(), |pair| {
        let a = pair.a;
        pair.post_send(7, 0, 100);
        pair.world.run_for(Duration::from_micros(100));
        pair.on(a).deregister_memory(a.rkey).unwrap();
        pair.post_receive(1, 0, 100);
        pair.run();
    });
    assert!(found.contains("error[deregistered-in-use]: key 0x"), "{found}");
    // The card has not fetched it yet.
    let found = findings(Setup::default(), |pair| {
        let a = pair.a;
        pair.post_write(7, 0, 0, 100);
        pair.on(a).deregister_memory(a.rkey).unwrap();
        pair.run();
    });
    assert!(found.contains("was deregistered while work request 7 of alice.1 uses it"), "{found}");
    // It has completed, but the program does not know.
    let found = findings(Setup::default(), |pair| {
        let a = pair.a;
        pair.post_write(7, 0, 0, 100);
        pair.run();
        pair.on(a).deregister_memory(a.rkey).unwrap();
    });
    let unpolled = "was deregistered before the completion of work request 7 of alice.1 was polled";
    assert!(found.contains("error[deregistered-in-use]: key 0x") && found.contains(unpolled), "{found}");
    // The program has polled it.
    let found = findings(Setup::default(), |pair| {
        let a = pair.a;
        pair.post_write(7, 0, 0, 100);
        pair.run();
        assert_eq!(pair.completions(a).len(), 1);
        pair.on(a).deregister_memory(a.rkey).unwrap();
    });
    assert_eq!(found, "nothing");
}

#[test]
fn memory_gone() {
    let found = findings(Setup::default(), |pair| {
        let a = pair.a;
        pair.on(a).unmap(a.rkey).unwrap();
        pair.post_write(7, 0, 0, 100);
        pair.run();
    });
    assert!(
        found.contains("error[memory-gone]: work request 7 of alice.1 uses memory that is not mapped"),
        "{found}"
    );
}

#[test]
fn address_handle_gone() {
    let found = findings(Setup::with_kind(QpType::Ud), |pair| {
        let (a, handle) = (pair.a, AhId(pair.datagram.ah));
        pair.on(a).destroy_address_handle(handle).unwrap();
        pair.post_send(7, 0, 100);
        pair.run();
    });
    assert!(found.contains("error[address-handle-gone]: work request 7 of alice.1"), "{found}");
}

#[test]
fn every_pitfall_has_a_test_and_a_line_in_the_reference() {
    let source = include_str!("lint.rs");
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/lint.md");
    let page = std::fs::read_to_string(path).unwrap();
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| `")).collect();
    assert_eq!(rows.len(), PITFALLS.len());
    for (pitfall, row) in PITFALLS.iter().zip(rows) {
        let severity = pitfall.severity.name();
        let expected =
            format!("| `{}` | {severity} | {} | {} |", pitfall.code, pitfall.description, pitfall.fix);
        assert_eq!(row, expected);
        let test = format!("#[test]\nfn {}() {{", pitfall.code.replace('-', "_"));
        assert!(source.contains(&test), "{}", pitfall.code);
    }
}
