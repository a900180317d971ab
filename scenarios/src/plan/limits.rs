//! How much a file may ask for: what is beyond would not end, or not fit into memory.

/// Hosts.
pub(super) const MAX_HOSTS: usize = 4096;
/// Switches that a topology has of one kind.
pub(super) const MAX_SWITCHES: u32 = 1024;
/// Cables.
pub(super) const MAX_LINKS: u64 = 16_384;
/// Bytes of each area of a queue pair's memory.
pub(super) const MAX_AREA_BYTES: u64 = 4 << 30;
/// How often a step is done.
pub(super) const MAX_REPEATS: u32 = 100_000;
/// Messages of all workloads together.
pub(super) const MAX_MESSAGES: u64 = 1 << 22;
/// Copies of a packet.
pub(super) const MAX_COPIES: u32 = 1000;
/// How often a cable goes down and up.
pub(super) const MAX_FLAPS: u32 = 10_000;
/// Completions that a run may have.
pub(crate) const MAX_COMPLETIONS: usize = 1 << 22;
