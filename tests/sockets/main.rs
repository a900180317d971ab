//! Devices on real sockets: embedded ones, and the daemon with its clients. Many tests start processes.

mod connected_host;
mod counting_allocator;
mod daemon;
mod driving;
mod equivalence;
mod frame_reordering;
mod icrc;
mod link_attacks;
mod many_connections;
mod no_loss;
mod slow_port;
mod stopped_receiver;

use softhca_tests::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

/// A role of this binary in a process of its own, with its name.
type Role = (&'static str, fn());

/// Stops other threads in the end, also in that of a test that fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Held by a test that starts dozens of processes: two of them at once would measure the machine.
fn crowd() -> MutexGuard<'static, ()> {
    static CROWD: Mutex<()> = Mutex::new(());
    CROWD.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Runs this binary in a role: see `softhca_tests::process`.
#[test]
fn role() {
    let Some(role) = process::role() else { return };
    let roles = [daemon::ROLES, driving::ROLES, many_connections::ROLES, no_loss::ROLES].concat();
    let (_, run) = roles.into_iter().find(|(name, _)| *name == role).expect("a role of this binary");
    run();
}
