//! Constants and functions of both ends of a grant: the issuer and the senders.

pub(super) const MILLISECOND: u64 = 1_000_000;
/// How often senders are asked to return unused grants while others wait.
pub(super) const RECLAIM_INTERVAL: u64 = 5 * MILLISECOND;
/// How far ahead a busy sender requests. Larger than any buffer, so that receivers grant without further REQUESTs.
pub(super) const REQUEST_AHEAD: u64 = 1 << 28;

/// A total in a message that its sender cannot mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfBounds;

/// The most that the kernel charges a receive buffer for `segments` datagrams of `len` bytes sent as one batch.
///
/// Measured on loopback with SO_MEMINFO (Linux 6.18). A single datagram costs its allocation and a descriptor of 256
/// bytes. The allocation is the power of two that holds the datagram and 379 bytes of headers and bookkeeping, 20 more
/// over IPv6. A batch costs its bytes and one allocation of 832 bytes. Both are rounded up here for other kernel
/// builds.
pub const fn charge(len: usize, segments: usize) -> u64 {
    if segments <= 1 {
        let allocation = (len as u64 + 448).next_power_of_two();
        256 + if allocation < 768 { 768 } else { allocation }
    } else {
        1024 + len as u64 * segments as u64
    }
}

/// The charge of the largest RoCE frame. Every sender that requests a grant gets at least this much in time.
pub const MAX_FRAME_CHARGE: u64 = charge(4096 + 128, 1);

/// How much of a receive buffer can be granted. Up to a quarter stays charged after it is read. Linux 6.18 also charges
/// a datagram twice until it has woken the reader. A hypervisor can preempt a processor during that time while another
/// continues. All granted bytes may thus be charged twice.
pub const fn grant_budget(receive_buffer: usize) -> u64 {
    let safe = receive_buffer as u64 / 4 * 3 / 2;
    if safe < MAX_FRAME_CHARGE { MAX_FRAME_CHARGE } else { safe }
}
