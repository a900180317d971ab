//! Memory windows of both types.

use softhca_engine::{AccessError, MemoryWindowType, QpType, Reason, RequestError, VerbsError};
use softhca_tests::pair::{Pair, PairEnd};
use softhca_tests::verbs::{ConnectOptions, QpOptions};
use softhca_types::{
    AccessFlags, MemoryWindowBind, Operation, RemoteAddress, SendImmOrInvalidate, SendWorkRequest,
};
use softhca_wire::{LocalKey, Qpn, RemoteKey};

/// Binds the second end's window to bytes 1000..2000 of its region; returns the rkey.
fn bind(pair: &mut Pair, window: RemoteKey, new_key: RemoteKey, access: AccessFlags) -> RemoteKey {
    let b = pair.b;
    let (region, address) = (LocalKey(b.rkey.0), b.base + 1000);
    let bind = MemoryWindowBind {
        mw_rkey: window,
        new_rkey: new_key,
        mr_lkey: region,
        address,
        length: 1000,
        access,
    };
    post_at(pair, b, 500, Operation::BindMemoryWindow(bind));
    new_key
}

fn post_at(pair: &mut Pair, end: PairEnd, id: u64, operation: Operation) {
    pair.on(end).post_send(end.qp, &SendWorkRequest::new(id, operation, &[])).unwrap();
    pair.run();
}

fn variant(key: RemoteKey, add: u8) -> RemoteKey {
    RemoteKey(key.0 & !0xff | u32::from((key.0 as u8).wrapping_add(add)))
}

fn write_through(pair: &mut Pair, key: RemoteKey, offset: u64, length: u32) -> &'static str {
    let (a, b) = (pair.a, pair.b);
    let remote = RemoteAddress { address: b.base + offset, rkey: key };
    pair.post(1, Operation::Write { remote, imm_data: None }, &[a.sge(0, length)]);
    pair.run();
    pair.completion_statuses(a)[0].1
}

fn window(pair: &mut Pair, kind: MemoryWindowType) -> RemoteKey {
    let b = pair.b;
    pair.on(b).allocate_memory_window(b.domain, kind).unwrap()
}

#[test]
fn a_bound_window_allows_access_to_its_range_only() {
    for kind in [MemoryWindowType::Type1, MemoryWindowType::Type2] {
        for (offset, length, outcome) in [
            (1000, 1000, "SUCCESS"),
            (1999, 1, "SUCCESS"),
            (999, 1, "REM_ACCESS_ERR"),
            (1999, 2, "REM_ACCESS_ERR"),
            (2000, 1, "REM_ACCESS_ERR"),
        ] {
            let mut pair = Pair::new();
            let b = pair.b;
            let fresh = window(&mut pair, kind);
            let key = bind(&mut pair, fresh, variant(fresh, 1), AccessFlags::REMOTE_WRITE);
            assert_eq!(pair.completion_statuses(b), [(500, "SUCCESS")]);
            assert_eq!(write_through(&mut pair, key, offset, length), outcome, "{kind:?} {offset}+{length}");
        }
    }
}

#[test]
fn a_window_has_its_own_access_flags() {
    let mut pair = Pair::new();
    let fresh = window(&mut pair, MemoryWindowType::Type1);
    let key = bind(&mut pair, fresh, variant(fresh, 1), AccessFlags::REMOTE_READ);
    assert_eq!(write_through(&mut pair, key, 1000, 8), "REM_ACCESS_ERR");
}

#[test]
fn an_unbound_window_allows_no_access() {
    let mut pair = Pair::new();
    let key = window(&mut pair, MemoryWindowType::Type2);
    assert_eq!(write_through(&mut pair, key, 1000, 8), "REM_ACCESS_ERR");
}

#[test]
fn rebinding_a_type_1_window_revokes_the_old_rkey() {
    let mut pair = Pair::new();
    let b = pair.b;
    let fresh = window(&mut pair, MemoryWindowType::Type1);
    let first = bind(&mut pair, fresh, variant(fresh, 1), AccessFlags::REMOTE_WRITE);
    let second = bind(&mut pair, first, variant(first, 1), AccessFlags::REMOTE_WRITE);
    assert_eq!(write_through(&mut pair, second, 1000, 8), "SUCCESS");
    assert_eq!(write_through(&mut pair, first, 1000, 8), "REM_ACCESS_ERR");
    let rejected = pair.recording.borrow().events.iter().find_map(|(.., event)| match event {
        softhca_engine::Event::RequestRejected { error, .. } => Some(*error),
        _ => None,
    });
    let stale = AccessError::StaleKey { key: first.0, current: second.0 };
    assert_eq!(rejected, Some(RequestError::Access(stale)), "the event contains both keys");
    assert_eq!(pair.state(b).name(), "ERR");
}

#[test]
fn a_type_1_window_bound_with_length_0_allows_no_access() {
    let mut pair = Pair::new();
    let b = pair.b;
    let fresh = window(&mut pair, MemoryWindowType::Type1);
    let first = bind(&mut pair, fresh, variant(fresh, 1), AccessFlags::REMOTE_WRITE);
    let nothing = MemoryWindowBind { mw_rkey: first, ..MemoryWindowBind::default() };
    post_at(&mut pair, b, 501, Operation::BindMemoryWindow(nothing));
    assert_eq!(pair.completion_statuses(b), [(500, "SUCCESS"), (501, "SUCCESS")]);
    assert_eq!(write_through(&mut pair, variant(first, 1), 1000, 8), "REM_ACCESS_ERR");
}

#[test]
fn a_type_2_window_can_be_rebound_only_after_invalidation() {
    let mut pair = Pair::new();
    let b = pair.b;
    let fresh = window(&mut pair, MemoryWindowType::Type2);
    let first = bind(&mut pair, fresh, variant(fresh, 7), AccessFlags::REMOTE_WRITE);
    post_at(&mut pair, b, 501, Operation::LocalInvalidate { rkey: first });
    let second = bind(&mut pair, first, variant(first, 3), AccessFlags::REMOTE_WRITE);
    assert_eq!(write_through(&mut pair, second, 1000, 8), "SUCCESS");
    bind(&mut pair, second, variant(second, 1), AccessFlags::REMOTE_WRITE);
    let outcomes = pair.completion_statuses(b);
    assert_eq!(outcomes, [(500, "SUCCESS"), (501, "SUCCESS"), (500, "SUCCESS"), (500, "MW_BIND_ERR")]);
}

#[test]
fn a_type_2_bind_takes_only_the_low_byte_of_its_key() {
    let mut pair = Pair::new();
    let b = pair.b;
    let fresh = window(&mut pair, MemoryWindowType::Type2);
    bind(
        &mut pair,
        fresh,
        RemoteKey(0xdead_be00 | u32::from(variant(fresh, 9).0 as u8)),
        AccessFlags::REMOTE_WRITE,
    );
    assert_eq!(pair.completion_statuses(b), [(500, "SUCCESS")]);
    assert_eq!(write_through(&mut pair, variant(fresh, 9), 1000, 8), "SUCCESS");
}

#[test]
fn a_zero_based_window_starts_at_0() {
    for kind in [MemoryWindowType::Type1, MemoryWindowType::Type2] {
        for (address, outcome) in [(0, "SUCCESS"), (992, "SUCCESS"), (993, "REM_ACCESS_ERR")] {
            let mut pair = Pair::new();
            let (a, b) = (pair.a, pair.b);
            let fresh = window(&mut pair, kind);
            let access = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::ZERO_BASED;
            let key = bind(&mut pair, fresh, variant(fresh, 1), access);
            assert_eq!(pair.completion_statuses(b), [(500, "SUCCESS")]);
            pair.write_memory(a, 0, &[7; 8]);
            let remote = RemoteAddress { address, rkey: key };
            pair.post(1, Operation::Write { remote, imm_data: None }, &[a.sge(0, 8)]);
            pair.post(2, Operation::Read { remote }, &[a.sge(64, 8)]);
            pair.run();
            assert_eq!(pair.completion_statuses(a)[0], (1, outcome), "{kind:?} at {address}");
            if outcome == "SUCCESS" {
                assert_eq!(pair.read_memory(b, 1000 + address, 8), [7; 8]);
                assert_eq!(pair.read_memory(a, 64, 8), [7; 8]);
            }
        }
    }
}

#[test]
fn a_failed_bind_does_not_change_the_window() {
    for kind in [MemoryWindowType::Type1, MemoryWindowType::Type2] {
        // The program restores its copy of the key, or continues from the one that the failed bind would have set.
        for next in [1, 2] {
            let mut pair = Pair::new();
            let (a, b) = (pair.a, pair.b);
            let fresh = window(&mut pair, kind);
            let unknown = MemoryWindowBind {
                mw_rkey: fresh,
                new_rkey: variant(fresh, 1),
                mr_lkey: LocalKey(0x7777_7777),
                address: b.base,
                length: 100,
                access: AccessFlags::REMOTE_WRITE,
            };
            post_at(&mut pair, b, 500, Operation::BindMemoryWindow(unknown));
            assert_eq!(pair.completion_statuses(b), [(500, "MW_BIND_ERR")]);
            let (qa, qb) = second_connection(&mut pair);
            let bind =
                MemoryWindowBind { new_rkey: variant(fresh, next), mr_lkey: LocalKey(b.rkey.0), ..unknown };
            let request = SendWorkRequest::new(501, Operation::BindMemoryWindow(bind), &[]);
            pair.on(b).post_send(qb, &request).unwrap();
            pair.run();
            assert_eq!(pair.completion_statuses(b), [(501, "SUCCESS")], "{kind:?}");
            let remote = RemoteAddress { address: b.base, rkey: variant(fresh, next) };
            let gather = [a.sge(0, 8)];
            let request = SendWorkRequest::new(1, Operation::Write { remote, imm_data: None }, &gather);
            pair.on(a).post_send(qa, &request).unwrap();
            pair.run();
            assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")], "{kind:?}");
        }
    }
}

/// Another connection between the hosts.
fn second_connection(pair: &mut Pair) -> (Qpn, Qpn) {
    let (a, b) = (pair.a, pair.b);
    let options = QpOptions::default();
    let qa = pair.on(a).create_queue_pair(QpType::Rc, a.domain, a.cq, options).unwrap();
    let qb = pair.on(b).create_queue_pair(QpType::Rc, b.domain, b.cq, options).unwrap();
    pair.world.connect((a.host, qa), (b.host, qb), &ConnectOptions::default()).unwrap();
    (qa, qb)
}

#[test]
fn a_send_with_invalidate_invalidates_a_type_2_window() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    let fresh = window(&mut pair, MemoryWindowType::Type2);
    let key = bind(&mut pair, fresh, variant(fresh, 1), AccessFlags::REMOTE_WRITE);
    pair.post_receive(100, 0, 100);
    pair.post(2, Operation::Send(SendImmOrInvalidate::Invalidate(key)), &[a.sge(0, 8)]);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(2, "SUCCESS")]);
    let received = pair.completions(b)[1];
    assert_eq!((received.imm_data, received.flags), (key.0, softhca_types::CompletionFlags::INVALIDATED));
    assert_eq!(write_through(&mut pair, key, 1000, 8), "REM_ACCESS_ERR");
}

#[test]
fn a_type_2_window_is_bound_to_its_queue_pair_and_type_1_to_the_domain() {
    for (kind, outcome) in [(MemoryWindowType::Type1, "SUCCESS"), (MemoryWindowType::Type2, "REM_ACCESS_ERR")]
    {
        let mut pair = Pair::new();
        let (a, b) = (pair.a, pair.b);
        let fresh = window(&mut pair, kind);
        let key = bind(&mut pair, fresh, variant(fresh, 1), AccessFlags::REMOTE_WRITE);
        let (qa, _) = second_connection(&mut pair);
        let remote = RemoteAddress { address: b.base + 1000, rkey: key };
        let gather = [a.sge(0, 8)];
        let request = SendWorkRequest::new(1, Operation::Write { remote, imm_data: None }, &gather);
        pair.on(a).post_send(qa, &request).unwrap();
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, outcome)], "{kind:?}");
    }
}

#[test]
fn a_region_with_a_bound_window_cannot_be_deregistered() {
    let mut pair = Pair::new();
    let b = pair.b;
    let fresh = window(&mut pair, MemoryWindowType::Type1);
    let key = bind(&mut pair, fresh, variant(fresh, 1), AccessFlags::REMOTE_WRITE);
    assert!(matches!(pair.on(b).deregister_memory(b.rkey), Err(VerbsError::Busy { .. })));
    pair.on(b).deallocate_memory_window(key).unwrap();
    pair.on(b).deregister_memory(b.rkey).unwrap();
}

/// A type 2 window belongs to the queue pair that it was bound through, a type 1 window to its protection domain.
#[test]
fn destroying_a_queue_pair_invalidates_its_type_2_windows() {
    let mut pair = Pair::new();
    let b = pair.b;
    let [first, second] = [MemoryWindowType::Type2, MemoryWindowType::Type1].map(|kind| {
        let fresh = window(&mut pair, kind);
        bind(&mut pair, fresh, variant(fresh, 1), AccessFlags::REMOTE_WRITE)
    });
    let (_, other) = second_connection(&mut pair);
    pair.on(b).destroy_queue_pair(other).unwrap();
    pair.on(b).deallocate_memory_window(second).unwrap();
    let busy = pair.on(b).deregister_memory(b.rkey);
    assert!(matches!(busy, Err(VerbsError::Busy { .. })), "another queue pair was destroyed: {busy:?}");
    pair.on(b).destroy_queue_pair(b.qp).unwrap();
    pair.on(b).deregister_memory(b.rkey).unwrap();
    pair.on(b).deallocate_memory_window(first).unwrap();
}

#[test]
fn a_type_1_window_stays_bound_without_the_queue_pair_that_bound_it() {
    let mut pair = Pair::new();
    let b = pair.b;
    let fresh = window(&mut pair, MemoryWindowType::Type1);
    bind(&mut pair, fresh, variant(fresh, 1), AccessFlags::REMOTE_WRITE);
    pair.on(b).destroy_queue_pair(b.qp).unwrap();
    let busy = pair.on(b).deregister_memory(b.rkey);
    assert!(matches!(busy, Err(VerbsError::Busy { .. })), "{busy:?}");
}

#[test]
fn a_window_cannot_exceed_the_access_flags_of_its_region() {
    let mut pair = Pair::new();
    let b = pair.b;
    let access = AccessFlags::MW_BIND | AccessFlags::REMOTE_READ;
    let (region, address) = pair.on(b).register_memory(b.domain, 4096, access).unwrap();
    let fresh = window(&mut pair, MemoryWindowType::Type1);
    let bind = MemoryWindowBind {
        mw_rkey: fresh,
        new_rkey: fresh,
        mr_lkey: LocalKey(region.0),
        address,
        length: 100,
        access: AccessFlags::REMOTE_WRITE,
    };
    post_at(&mut pair, b, 500, Operation::BindMemoryWindow(bind));
    assert_eq!(pair.completion_statuses(b), [(500, "MW_BIND_ERR")]);
    assert!(matches!(
        pair.completion_reason(b, 500),
        Reason::MemoryWindowBind(AccessError::InsufficientAccess { .. })
    ));
}
