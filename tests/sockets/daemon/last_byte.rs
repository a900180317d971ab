//! The last byte of a packet is written last: a program that polls it then sees the whole packet. In memory of the
//! device's process, in memory shared with a daemon, and in client memory that the daemon accesses.

use super::data::{ALL_ACCESS, ConnectedHost};
use super::process::{TEST_TIMEOUT, TestDaemon};
use softhca::{ConnectOptions, Device, MemoryRegion, Mtu, SendRequest};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The number of buffers in a region, which is the number of concurrent WRITEs, and their size.
const SLOTS: u64 = 32;
const SLOT: u64 = 8192;
const QUICK: u64 = 20_000;
const MILLION: u64 = 1_000_000;

/// The size of a WRITE, from 1 to 8192 bytes, and its fill byte, which is never 0 because the reader clears the buffer.
/// Every other batch has WRITEs of one size, whose packets arrive together.
fn address_plan(round: u64) -> (usize, u8) {
    let number = if (round / SLOTS).is_multiple_of(2) { round } else { round / SLOTS };
    let mixed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let bits = 1 + (mixed >> 60) % 13;
    let size = 1 + (mixed >> 20) % (1 << bits).min(SLOT);
    (size as usize, 1 + (round % 255) as u8)
}

/// Writes `rounds` buffers at one end, and reads each at the other as soon as its last byte has arrived.
fn check_last_byte_written_last(a: &ConnectedHost, b: &ConnectedHost, target: &MemoryRegion, rounds: u64) {
    a.pair
        .connect_both(&b.pair, &ConnectOptions { path_mtu: Mtu::B4096, ..ConnectOptions::default() })
        .unwrap();
    let read = AtomicU64::new(0);
    let wait = |what: &str, held: &mut dyn FnMut() -> bool| {
        let deadline = Instant::now() + TEST_TIMEOUT;
        for turn in 1u64.. {
            if held() {
                return;
            }
            if turn % 64 == 0 {
                std::thread::yield_now();
                assert!(Instant::now() < deadline, "{what}");
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..rounds {
                let (at, (size, fill)) = (round % SLOTS * SLOT, address_plan(round));
                wait("the last byte never came", &mut || target.read_at(at + size as u64 - 1, 1) == [fill]);
                let seen = target.read_at(at, size as u64);
                let stale = seen.iter().position(|byte| *byte != fill);
                assert_eq!(stale, None, "round {round}, {size} bytes: an earlier byte arrived later");
                target.write_at(at, &vec![0; size]);
                read.store(round + 1, Ordering::Release);
            }
        });
        for first in (0..rounds).step_by(SLOTS as usize) {
            let batch = first..(first + SLOTS).min(rounds);
            for round in batch.clone() {
                let (at, (size, fill)) = (round % SLOTS * SLOT, address_plan(round));
                a.region.write_at(at, &vec![fill; size]);
                let entries = [a.region.sge(at, size as u32)];
                a.pair
                    .post_send(&SendRequest::rdma_write(round, &entries, target.remote_address(at)))
                    .unwrap();
            }
            for _ in batch.clone() {
                a.finish();
            }
            wait("the reader stopped", &mut || read.load(Ordering::Acquire) == batch.end);
        }
    });
}

fn in_process_memory(rounds: u64) {
    let [a, b] = [(); 2].map(|()| ConnectedHost::new(&Device::embedded().unwrap(), SLOTS * SLOT));
    check_last_byte_written_last(&a, &b, &b.region, rounds);
}

fn ends(daemon: &TestDaemon) -> [ConnectedHost; 2] {
    ["alice", "bob"].map(|host| ConnectedHost::new(&daemon.open(host), SLOTS * SLOT))
}

fn in_shared_memory(rounds: u64) {
    let daemon = TestDaemon::start();
    let [a, b] = ends(&daemon);
    check_last_byte_written_last(&a, &b, &b.region, rounds);
}

#[allow(unsafe_code)]
fn in_client_memory(rounds: u64) {
    let daemon = TestDaemon::start();
    let [a, b] = ends(&daemon);
    let memory: &'static mut [u8] = vec![0u8; (SLOTS * SLOT) as usize].leak();
    let base = NonNull::new(memory.as_mut_ptr()).unwrap();
    // SAFETY: the memory is leaked, and no reference to it exists from here on.
    let own = unsafe { b.domain.register_memory(base, (SLOTS * SLOT) as usize, ALL_ACCESS) }.unwrap();
    check_last_byte_written_last(&a, &b, &own, rounds);
}

#[test]
fn the_last_byte_is_written_last_in_process_memory() {
    in_process_memory(QUICK);
}

#[test]
fn the_last_byte_is_written_last_in_shared_memory() {
    in_shared_memory(QUICK);
}

#[test]
pub fn the_last_byte_is_written_last_in_client_memory() {
    in_client_memory(QUICK);
}

#[test]
#[ignore = "a million rounds take a while"]
fn a_million_last_bytes_are_written_last_in_process_memory() {
    in_process_memory(MILLION);
}

#[test]
#[ignore = "a million rounds take a while"]
fn a_million_last_bytes_are_written_last_in_shared_memory() {
    in_shared_memory(MILLION);
}

#[test]
#[ignore = "a million rounds take a while"]
fn a_million_last_bytes_are_written_last_in_client_memory() {
    in_client_memory(MILLION);
}
