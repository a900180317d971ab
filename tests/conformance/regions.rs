//! Memory regions: bounds, access flags, re-registration, zero-based addresses.

use softhca_engine::{ModifyQp, QpState, VerbsError};
use softhca_tests::pair::{ALL_ACCESS, Pair, pattern};
use softhca_types::{AccessFlags, Operation, RemoteAddress, Sge};
use softhca_wire::{LocalKey, RemoteKey};

fn write_to(pair: &mut Pair, address: u64, key: RemoteKey, length: u32) -> &'static str {
    let a = pair.a;
    let remote = RemoteAddress { address, rkey: key };
    pair.post(1, Operation::Write { remote, imm_data: None }, &[a.sge(0, length)]);
    pair.run();
    pair.completion_statuses(a)[0].1
}

#[test]
fn access_is_limited_to_the_first_and_the_last_byte() {
    for (offset, length, outcome) in [
        (0i64, 1u32, "SUCCESS"),
        (99, 1, "SUCCESS"),
        (0, 100, "SUCCESS"),
        (-1, 1, "REM_ACCESS_ERR"),
        (100, 1, "REM_ACCESS_ERR"),
        (1, 100, "REM_ACCESS_ERR"),
        (0, 101, "REM_ACCESS_ERR"),
    ] {
        let mut pair = Pair::new();
        let b = pair.b;
        let (key, base) = pair.on(b).register_memory(b.domain, 100, ALL_ACCESS).unwrap();
        let address = base.wrapping_add_signed(offset);
        assert_eq!(write_to(&mut pair, address, key, length), outcome, "{offset}+{length}");
    }
}

#[test]
fn an_address_range_that_wraps_is_rejected() {
    let mut pair = Pair::new();
    let b = pair.b;
    assert_eq!(write_to(&mut pair, u64::MAX - 3, b.rkey, 8), "REM_ACCESS_ERR");
}

#[test]
fn a_zero_length_write_checks_and_writes_nothing() {
    let mut pair = Pair::new();
    assert_eq!(write_to(&mut pair, 0x1234, RemoteKey(0x7777_7777), 0), "SUCCESS");
}

#[test]
fn a_region_without_bytes_allows_only_access_to_none() {
    let mut pair = Pair::new();
    let b = pair.b;
    let (key, base) = pair.on(b).register_memory(b.domain, 0, ALL_ACCESS).unwrap();
    assert_eq!(write_to(&mut pair, base, key, 0), "SUCCESS");
    assert_eq!(write_to(&mut pair, base, key, 1), "REM_ACCESS_ERR");
    pair.on(b).deregister_memory(key).unwrap();
}

#[test]
fn a_key_that_is_taken_does_not_use_its_protection_domain() {
    let mut pair = Pair::new();
    let b = pair.b;
    let domain = pair.on(b).allocate_protection_domain().unwrap();
    let key = RemoteKey(0x0012_3456);
    pair.on(b).register_memory_with_key(b.domain, 0, 64, ALL_ACCESS, key).unwrap();
    let taken = pair.on(b).register_memory_with_key(domain, 0, 64, ALL_ACCESS, key);
    assert!(matches!(taken, Err(VerbsError::Busy { .. })));
    pair.on(b).deallocate_protection_domain(domain).unwrap();
}

#[test]
fn a_zero_based_region_starts_at_0() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    let (key, base) =
        pair.on(b).register_memory(b.domain, 100, ALL_ACCESS | AccessFlags::ZERO_BASED).unwrap();
    assert_eq!(base, 0);
    let data = pattern(1, 50);
    pair.write_memory(a, 0, &data);
    assert_eq!(write_to(&mut pair, 50, key, 50), "SUCCESS");
    assert_eq!(pair.on(b).read_memory(key, 50, 50), data);
    assert_eq!(write_to(&mut pair, 51, key, 50), "REM_ACCESS_ERR");
}

#[test]
fn re_registration_changes_access_flags_and_keeps_the_key() {
    let mut pair = Pair::new();
    let b = pair.b;
    let read_only = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
    let new = pair.on(b).reregister_memory(b.rkey, |region| region.access_flags = read_only).unwrap();
    assert_eq!(new, b.rkey, "the rkey stays valid for peers");
    let a = pair.a;
    let remote = RemoteAddress { address: b.base, rkey: b.rkey };
    pair.post(1, Operation::Read { remote }, &[a.sge(0, 8)]);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    assert_eq!(write_to(&mut pair, b.base, b.rkey, 8), "REM_ACCESS_ERR");
}

#[test]
fn re_registration_of_other_memory_changes_the_key_and_revokes_the_old_one() {
    for use_old in [false, true] {
        let mut pair = Pair::new();
        let b = pair.b;
        let new = pair.on(b).reregister_memory(b.rkey, |region| region.length -= 8).unwrap();
        assert_ne!(new, b.rkey);
        assert_eq!(new.0 >> 8, b.rkey.0 >> 8, "the index stays, the variant changes");
        let (key, outcome) = if use_old { (b.rkey, "REM_ACCESS_ERR") } else { (new, "SUCCESS") };
        assert_eq!(write_to(&mut pair, b.base, key, 8), outcome);
    }
}

#[test]
fn re_registration_can_move_a_region_to_another_domain() {
    let mut pair = Pair::new();
    let b = pair.b;
    let other = pair.on(b).allocate_protection_domain().unwrap();
    let new = pair.on(b).reregister_memory(b.rkey, |region| region.pd = other).unwrap();
    assert_eq!(write_to(&mut pair, b.base, new, 8), "REM_ACCESS_ERR");
    assert!(matches!(pair.on(b).deallocate_protection_domain(other), Err(VerbsError::Busy { .. })));
}

#[test]
fn a_deregistered_key_is_rejected_locally_and_remotely() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    pair.on(b).deregister_memory(b.rkey).unwrap();
    assert!(matches!(pair.on(b).deregister_memory(b.rkey), Err(VerbsError::NotFound { .. })));
    assert_eq!(write_to(&mut pair, b.base, b.rkey, 8), "REM_ACCESS_ERR");
    let mut pair = Pair::new();
    pair.on(a).deregister_memory(a.rkey).unwrap();
    assert_eq!(write_to(&mut pair, b.base, b.rkey, 8), "LOC_PROT_ERR");
}

#[test]
fn a_freed_key_is_not_reused_by_the_next_region() {
    let mut pair = Pair::new();
    let b = pair.b;
    let (old, _) = pair.on(b).register_memory(b.domain, 64, ALL_ACCESS).unwrap();
    pair.on(b).deregister_memory(old).unwrap();
    for _ in 0..100 {
        let (new, _) = pair.on(b).register_memory(b.domain, 64, ALL_ACCESS).unwrap();
        assert_ne!(new, old);
        pair.on(b).deregister_memory(new).unwrap();
    }
}

#[test]
fn remote_write_requires_local_write() {
    let mut pair = Pair::new();
    let b = pair.b;
    for access in [AccessFlags::REMOTE_WRITE, AccessFlags::REMOTE_ATOMIC] {
        assert!(matches!(pair.on(b).register_memory(b.domain, 64, access), Err(VerbsError::Invalid { .. })));
    }
    pair.on(b).register_memory(b.domain, 64, AccessFlags::REMOTE_READ).unwrap();
}

#[test]
fn a_list_of_32_sges_is_gathered_and_scattered_in_order() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    let data = pattern(3, 32 * 33);
    let (mut gather, mut scatter, mut at) = (Vec::new(), Vec::new(), 0usize);
    // SGEs of 2 to 64 bytes in reverse memory order, and a receive with other boundaries.
    for piece in 0..32usize {
        let length = (piece + 1) * 2;
        let place = 50_000 - 100 * piece as u64;
        pair.write_memory(a, place, &data[at..at + length]);
        gather.push(a.sge(place, length as u32));
        scatter.push(b.sge(90_000 - 100 * piece as u64, 33));
        at += length;
    }
    pair.post_receive_into(100, &scatter);
    pair.post(1, Operation::Send(softhca_types::SendImmOrInvalidate::None), &gather);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    for piece in 0..32usize {
        let found = pair.read_memory(b, 90_000 - 100 * piece as u64, 33);
        assert_eq!(found, data[piece * 33..(piece + 1) * 33], "SGE {piece}");
    }
    pair.post(2, Operation::Read { remote: b.remote(90_000) }, &gather[..8]);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(2, "SUCCESS")]);
}

#[test]
fn a_list_with_one_bad_sge_sends_nothing() {
    let mut pair = Pair::new();
    let a = pair.a;
    let bad = Sge { address: 0, length: 1, lkey: LocalKey(0x5555_5555) };
    pair.post(1, Operation::Send(softhca_types::SendImmOrInvalidate::None), &[a.sge(0, 2000), bad]);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "LOC_PROT_ERR")]);
    assert_eq!(pair.packets(), Vec::<String>::new());
}

#[test]
fn protection_domains_and_regions_in_use_cannot_be_destroyed() {
    let mut pair = Pair::new();
    let a = pair.a;
    assert!(matches!(pair.on(a).deallocate_protection_domain(a.domain), Err(VerbsError::Busy { .. })));
    pair.on(a).modify_queue_pair(a.qp, ModifyQp::default().state(QpState::Reset)).unwrap();
    pair.on(a).destroy_queue_pair(a.qp).unwrap();
    assert!(matches!(pair.on(a).deallocate_protection_domain(a.domain), Err(VerbsError::Busy { .. })));
    pair.on(a).deregister_memory(a.rkey).unwrap();
    pair.on(a).deallocate_protection_domain(a.domain).unwrap();
}

#[test]
fn deregistering_the_source_of_a_send_is_a_local_error() {
    let mut pair = softhca_tests::pair::Setup::default().one_gigabit().build();
    let a = pair.a;
    pair.post_write(1, 0, 0, 100_000);
    pair.post_write(2, 0, 0, 8);
    pair.world.run_for(std::time::Duration::from_micros(100));
    pair.on(a).deregister_memory(a.rkey).unwrap();
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "LOC_PROT_ERR"), (2, "WR_FLUSH_ERR")]);
    assert_eq!(pair.states(), ["ERR", "RTS"]);
}

#[test]
fn deregistering_the_target_of_a_write_is_a_remote_access_error() {
    let mut pair = softhca_tests::pair::Setup::default().one_gigabit().build();
    let (a, b) = (pair.a, pair.b);
    pair.post_write(1, 0, 0, 100_000);
    pair.world.run_for(std::time::Duration::from_micros(100));
    pair.on(b).deregister_memory(b.rkey).unwrap();
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "REM_ACCESS_ERR")]);
    assert_eq!(pair.states(), ["ERR", "ERR"]);
}

#[test]
fn deregistering_the_destination_of_a_read_is_a_local_error() {
    let mut pair = softhca_tests::pair::Setup::default().one_gigabit().build();
    let a = pair.a;
    pair.post_read(1, 0, 0, 100_000);
    pair.world.run_for(std::time::Duration::from_micros(100));
    pair.on(a).deregister_memory(a.rkey).unwrap();
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "LOC_PROT_ERR")]);
}
