//! The part of a queue pair in the window of a foreign peer.

use super::QueuePair;
use crate::core::hca_state::HcaState;
use core::time::Duration;
use softhca_types::Operation;

/// A READ asks for its tail after this part of the ACK timeout.
const TAIL_PROBE_FRACTION: u32 = 4;

impl QueuePair {
    /// Whether the window of a foreign peer admits no request for so many packets. If so, the queue pair waits for it.
    pub(crate) fn waits_for_window(&self, hca: &mut HcaState, packets: u32) -> bool {
        if hca.peers.windows.is_empty() || !self.kind.is_reliable() {
            return false;
        }
        match hca.peers.windows.get_mut(&self.addressing.destination) {
            Some(window) if !window.admits(packets) => {
                window.waiting.insert(self.qpn);
                true
            }
            _ => false,
        }
    }

    /// The responses that a READ may ask for at once.
    pub(crate) fn window_room(&self, hca: &HcaState) -> u32 {
        hca.peers.windows.get(&self.addressing.destination).map_or(u32::MAX, |window| window.room())
    }

    /// The time after which a READ whose responses from a foreign peer stopped asks for the rest, before the ACK timeout:
    /// no later packet reveals that the last responses are lost. Every pause in the responses has one such probe.
    pub(super) fn tail_probe_after(&self, hca: &HcaState, ack_timeout: Duration) -> Option<Duration> {
        let is_foreign = hca.peers.windows.contains_key(&self.addressing.destination);
        if !is_foreign || self.requester.is_tail_probed {
            return None;
        }
        let unacked = self.requester.unacked_psn;
        let wqe = self.requester.wqes.front()?;
        let is_read = matches!(wqe.operation.0, Operation::Read { .. });
        let is_answered_in_part =
            wqe.first_psn.is_before(unacked) && unacked.is_within(wqe.first_psn, wqe.packets);
        let goes_on = self.recovery(hca).policy().retransmit_from(unacked, wqe.first_psn) == Some(unacked);
        (is_read && is_answered_in_part && goes_on).then_some(ack_timeout / TAIL_PROBE_FRACTION)
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
