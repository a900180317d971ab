//! The part of a queue pair in the window of a foreign peer.

use super::QueuePair;
use crate::core::hca_state::HcaState;

impl QueuePair {
    /// Whether the window of a foreign peer is closed. If so, the queue pair waits for it.
    pub(crate) fn waits_for_window(&self, hca: &mut HcaState) -> bool {
        if hca.peers.windows.is_empty() || !self.kind.is_reliable() {
            return false;
        }
        match hca.peers.windows.get_mut(&self.addressing.destination) {
            Some(window) if !window.is_open() => {
                window.waiting.insert(self.qpn);
                true
            }
            _ => false,
        }
    }

    /// Whether the queue pair waits for the window before the peer was asked to acknowledge its packets.
    pub(crate) fn waits_unacknowledged(&self, hca: &HcaState) -> bool {
        let window = hca.peers.windows.get(&self.addressing.destination);
        self.requester.packets_since_ack_request > 0
            && window.is_some_and(|window| window.waiting.contains(&self.qpn))
    }

    /// Whether the next packet must request an ACK from a foreign peer.
    pub(crate) fn needs_ack_for_window(&self, hca: &HcaState) -> bool {
        let window = hca.peers.windows.get(&self.addressing.destination);
        window.is_some_and(|window| window.needs_ack(self.requester.packets_since_ack_request))
    }

    /// Updates the window after the progress of the requester changed. `acked` says that an ACK changed it.
    #[inline]
    pub(crate) fn update_window(&mut self, hca: &mut HcaState, acked: bool) {
        if !hca.peers.windows.is_empty() && self.kind.is_reliable() {
            self.count_unacked(hca, acked);
        }
    }

    fn count_unacked(&mut self, hca: &mut HcaState, acked: bool) {
        let unacked = self.requester.next_psn.since(self.requester.unacked_psn);
        let before = core::mem::replace(&mut self.requester.windowed, unacked);
        let Some(window) = hca.peers.windows.get_mut(&self.addressing.destination) else { return };
        window.unacked = (window.unacked + unacked).saturating_sub(before);
        if acked {
            window.on_ack(before.saturating_sub(unacked));
        }
        if window.is_open() {
            hca.egress.queue.extend(core::mem::take(&mut window.waiting));
        }
    }

    /// A packet to a foreign peer was lost.
    pub(crate) fn shrink_window(&mut self, hca: &mut HcaState) {
        if let Some(window) = hca.peers.windows.get_mut(&self.addressing.destination) {
            window.on_loss();
        }
    }
}
