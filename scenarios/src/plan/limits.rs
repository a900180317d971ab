//! Limits of a scenario. Larger runs would not end or not fit into memory.

/// Maximum number of hosts.
pub(super) const MAX_HOSTS: usize = 4096;
/// Maximum number of cards of a host, as of a daemon.
pub(super) const MAX_CARDS: usize = 64;
/// Maximum number of switches of one kind in a topology.
pub(super) const MAX_SWITCHES: u32 = 1024;
/// Maximum number of links in a topology.
pub(super) const MAX_LINKS: u64 = 16_384;
/// Maximum size of an area of a queue pair.
pub(super) const MAX_AREA_BYTES: u64 = 4 << 30;
/// Maximum number of repetitions of a step.
pub(super) const MAX_REPEATS: u32 = 100_000;
/// Maximum number of messages of all workloads.
pub(super) const MAX_MESSAGES: u64 = 1 << 22;
/// Maximum number of copies of a packet.
pub(super) const MAX_COPIES: u32 = 1000;
/// Maximum number of flaps of a link.
pub(super) const MAX_FLAPS: u32 = 10_000;
/// Maximum number of completions of a run.
pub(crate) const MAX_COMPLETIONS: usize = 1 << 22;
/// The time limit of external programs, unless the file sets its duration: 2 min.
pub(super) const PROGRAM_TIMEOUT_NS: u64 = 120_000_000_000;
