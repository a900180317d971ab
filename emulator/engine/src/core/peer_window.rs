//! The window of unacknowledged packets to a foreign peer.
//!
//! A native peer grants what its buffer holds. A foreign peer (rxe, a hardware HCA) grants nothing, and the queues on
//! the way to it are small. All queue pairs that are connected to it share one window. The window opens with every
//! acknowledged packet, up to a limit, and halves when a packet is lost.

use alloc::collections::BTreeSet;
use softhca_wire::Qpn;

/// The first size of a window.
const INITIAL_SIZE: u32 = 16;
/// The smallest size of a window: losses at its end are still detected by a sequence NAK.
const MIN_SIZE: u32 = 4;

/// The window of one peer. A READ counts its response packets, and is split into parts that the window admits.
#[derive(Debug)]
pub(crate) struct PeerWindow {
    size: u32,
    max: u32,
    /// Below it the window grows by every acknowledged packet, above it by one packet per window.
    threshold: u32,
    acked: u32,
    pub unacked: u32,
    /// Queue pairs that wait for the window to open.
    pub waiting: BTreeSet<Qpn>,
}

impl PeerWindow {
    pub fn new(max: u32) -> PeerWindow {
        let max = max.max(MIN_SIZE);
        let size = INITIAL_SIZE.min(max);
        PeerWindow { size, max, threshold: max, acked: 0, unacked: 0, waiting: BTreeSet::new() }
    }

    pub fn is_open(&self) -> bool {
        self.room() > 0
    }

    /// The packets that the window admits now.
    pub fn room(&self) -> u32 {
        self.size.saturating_sub(self.unacked)
    }

    /// Whether the window admits a request for so many packets, or half a window of them: parts of READs are not smaller.
    pub fn admits(&self, packets: u32) -> bool {
        self.room() >= packets.min(self.size / 2)
    }

    /// Whether the next packet must request an ACK, `since_request` packets after the last one that did: without it
    /// the window might never open again.
    pub fn needs_ack(&self, since_request: u32) -> bool {
        self.unacked + 1 >= self.size || since_request + 1 >= self.size / 4
    }

    pub fn on_ack(&mut self, packets: u32) {
        if self.size < self.threshold {
            self.size = self.size.saturating_add(packets).min(self.threshold);
            return;
        }
        self.acked += packets;
        if self.acked >= self.size {
            self.acked -= self.size;
            self.size = (self.size + 1).min(self.max);
        }
    }

    pub fn on_loss(&mut self) {
        self.size = (self.size / 2).max(MIN_SIZE);
        (self.threshold, self.acked) = (self.size, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_opens_with_acks_and_closes_on_loss() {
        let mut window = PeerWindow::new(128);
        assert_eq!(window.size, INITIAL_SIZE);
        (0..20).for_each(|_| window.on_ack(8));
        assert_eq!(window.size, 128, "the limit");
        window.on_loss();
        assert_eq!(window.size, 64);
        window.on_ack(63);
        assert_eq!(window.size, 64);
        window.on_ack(1);
        assert_eq!(window.size, 65, "one packet per window after a loss");
        (0..10).for_each(|_| window.on_loss());
        assert_eq!(window.size, MIN_SIZE);
        assert_eq!(PeerWindow::new(0).size, MIN_SIZE);
    }

    #[test]
    fn packet_that_closes_the_window_requests_an_ack() {
        let mut window = PeerWindow::new(16);
        assert!(!window.needs_ack(0) && window.needs_ack(3), "four ACKs per window");
        window.unacked = 15;
        assert!(window.needs_ack(0) && window.is_open());
        window.unacked = 16;
        assert!(!window.is_open());
    }

    #[test]
    fn parts_of_a_read_are_not_smaller_than_half_a_window() {
        let mut window = PeerWindow::new(16);
        assert!(window.admits(64) && window.room() == 16);
        window.unacked = 9;
        assert!(!window.admits(64) && !window.admits(8) && window.admits(7));
        window.unacked = 15;
        assert!(window.admits(1) && !window.admits(2));
    }
}
