//! The decisions of a recovery mode.

use core::time::Duration;
use softhca_wire::Psn;

/// The responder's reaction to a request whose PSN is ahead of the expected one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GapAction {
    /// Send a NAK and move the queue pair to the error state.
    Fail,
    /// Send a NAK and expect the request at `resume_at` next. A PSN before the expected one discards the message in
    /// progress.
    Nak { resume_at: Psn },
}

/// The time of all tries of a requester with this ACK timeout.
pub(crate) type DetectionTime<'a> = dyn Fn(Duration) -> Duration + 'a;

/// The decisions of one recovery mode.
pub(crate) trait RecoveryPolicy {
    /// Requester: the silence after which it assumes a loss. `timeout` is the queue pair's attribute, `min` the device's
    /// lower bound for modes without retransmission.
    fn ack_timeout(&self, timeout: Duration, min: Duration, detection_time: &DetectionTime<'_>) -> Duration;

    /// Requester: the PSN to retransmit from when the packet `lost` of the message that starts at `message` is lost.
    /// `None` fails the queue pair.
    fn retransmit_from(&self, lost: Psn, message: Psn) -> Option<Psn>;

    /// Responder: the reaction to a gap before the `expected` PSN arrived. `in_progress` is the first PSN of a message
    /// of which a part has arrived.
    fn on_sequence_gap(&self, expected: Psn, in_progress: Option<Psn>) -> GapAction;

    /// Completer: whether a sequence NAK may name the first PSN of a message that is acknowledged in part.
    fn peer_may_restart_message(&self) -> bool;
}
