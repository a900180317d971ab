//! Ports on real sockets, and their link control.

#[path = "../../../fabric/tests/bare/mod.rs"]
mod bare;
mod congestion;
mod flood;
mod foreign;
mod grants;
mod loopback;
mod socket;
