//! Devices on links and switches, in virtual time.

#[path = "../bare/mod.rs"]
mod bare;
mod congestion;
mod net;
mod runs;
mod switches;
