//! Devices on real sockets: embedded ones, and the daemon with its clients. Many tests start processes.

mod counting_allocator;
mod daemon;
mod driving;
mod equivalence;
mod frame_reordering;
mod link_attacks;
mod many_connections;
mod no_loss;
mod slow_port;

use softhca_tests::process;

/// A role of this binary in a process of its own, with its name.
type Role = (&'static str, fn());

/// Runs this binary in a role: see `softhca_tests::process`.
#[test]
fn role() {
    let Some(role) = process::role() else { return };
    let roles = [daemon::ROLES, driving::ROLES, many_connections::ROLES, no_loss::ROLES].concat();
    let (_, run) = roles.into_iter().find(|(name, _)| *name == role).expect("a role of this binary");
    run();
}
