//! The daemon with real processes: the test binary runs itself again as a daemon and as its clients.

mod attacks;
mod congestion;
mod connections;
mod data;
mod direct;
mod direct_connections;
mod errors;
mod faults;
mod flood;
mod fork;
mod hostile_clients;
mod last_byte;
mod limits;
mod memory;
mod mistakes;
mod multicast;
mod one_core;
mod own_data_path;
mod process;
mod process_death;
mod recordings;
mod soak;

use crate::Role;

/// The roles of the test binary: see `process::spawn`.
pub const ROLES: &[Role] = &[
    ("daemon", process::run_daemon),
    ("echo", data::run_echo),
    ("sleeper", process_death::run_sleeper),
    ("member", multicast::run_member),
    ("blocker", hostile_clients::run_blocker),
    ("forker", fork::run_forker),
    ("stranger", limits::run_unprivileged),
    ("owner", memory::run_owner),
    ("hoarder", limits::run_hoarder),
    ("soaker", soak::run_soaker),
    ("one-core", one_core::run_one_core),
    ("flooded", flood::run_flooded),
    ("flooder", flood::run_flooder),
    ("connector", direct_connections::run_connector),
    ("suicide", direct::run_suicide),
    ("mapper", hostile_clients::run_mapper),
    ("silent", attacks::run_silent),
    ("signalled", attacks::run_signalled),
];
