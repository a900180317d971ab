//! How much a file may ask for: what is beyond would not end, or not fit into memory.

/// Hosts.
pub(super) const HOSTS: usize = 4096;
/// Switches that a topology has of one kind.
pub(super) const SWITCHES: u32 = 1024;
/// Cables.
pub(super) const CABLES: u64 = 16_384;
/// Bytes of each area of a queue pair's memory.
pub(super) const AREA: u64 = 4 << 30;
/// How often a step is done.
pub(super) const REPEATS: u32 = 100_000;
/// Messages of all workloads together.
pub(super) const MESSAGES: u64 = 1 << 22;
/// Copies of a packet.
pub(super) const COPIES: u32 = 1000;
/// How often a cable goes down and up.
pub(super) const FLAPS: u32 = 10_000;
/// Completions that a run may have.
pub(crate) const COMPLETIONS: usize = 1 << 22;
