//! The daemon with real processes: this binary runs itself again as a daemon and as its clients.

mod congestion;
mod connections;
mod data;
mod death;
mod faults;
mod fork;
mod hostile;
mod last_byte;
mod limits;
mod memory;
mod multicast;
mod process;

/// What this binary is when another test started it: see `process::spawn`.
#[test]
fn role() {
    match std::env::var("SOFTHCA_TEST_ROLE").as_deref() {
        Ok("daemon") => process::be_daemon(),
        Ok("echo") => data::be_echo(),
        Ok("sleeper") => death::be_sleeper(),
        Ok("member") => multicast::be_member(),
        Ok("blocker") => hostile::be_blocker(),
        Ok("forker") => fork::be_forker(),
        Ok("stranger") => limits::be_stranger(),
        Ok("owner") => memory::be_owner(),
        _ => {}
    }
}
