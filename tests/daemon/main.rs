//! The daemon with real processes: this binary runs itself again as a daemon and as its clients.

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
mod process;
mod process_death;
mod recordings;
mod soak;

/// Runs this binary in a role: see `process::spawn`.
#[test]
fn role() {
    match std::env::var("SOFTHCA_TEST_ROLE").as_deref() {
        Ok("daemon") => process::run_daemon(),
        Ok("echo") => data::run_echo(),
        Ok("sleeper") => process_death::run_sleeper(),
        Ok("member") => multicast::run_member(),
        Ok("blocker") => hostile_clients::run_blocker(),
        Ok("forker") => fork::run_forker(),
        Ok("stranger") => limits::run_unprivileged(),
        Ok("owner") => memory::run_owner(),
        Ok("hoarder") => limits::run_hoarder(),
        Ok("soaker") => soak::run_soaker(),
        Ok("one-core") => one_core::run_one_core(),
        Ok("flooded") => flood::run_flooded(),
        Ok("flooder") => flood::run_flooder(),
        Ok("connector") => direct_connections::run_connector(),
        Ok("suicide") => direct::run_suicide(),
        Ok("mapper") => hostile_clients::run_mapper(),
        _ => {}
    }
}
