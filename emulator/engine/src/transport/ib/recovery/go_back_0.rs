//! `go-back-0`: the requester retransmits the whole message, the responder discards the part that it has received.

use super::policy::{DetectionTime, GapAction, RecoveryPolicy};
use core::time::Duration;
use softhca_wire::Psn;

pub(super) struct GoBack0;

impl RecoveryPolicy for GoBack0 {
    fn ack_timeout(&self, timeout: Duration, _: Duration, _: &DetectionTime<'_>) -> Duration {
        timeout
    }

    fn retransmit_from(&self, _: Psn, message: Psn) -> Option<Psn> {
        Some(message)
    }

    fn on_sequence_gap(&self, expected: Psn, in_progress: Option<Psn>) -> GapAction {
        GapAction::Nak { resume_at: in_progress.unwrap_or(expected) }
    }

    fn peer_may_restart_message(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_message_is_retransmitted() {
        let (message, lost) = (Psn::new(5), Psn::new(7));
        assert_eq!(GoBack0.retransmit_from(lost, message), Some(message));
        assert_eq!(GoBack0.on_sequence_gap(lost, Some(message)), GapAction::Nak { resume_at: message });
    }

    #[test]
    fn a_gap_between_messages_resumes_at_the_expected_packet() {
        assert_eq!(GoBack0.on_sequence_gap(Psn::new(7), None), GapAction::Nak { resume_at: Psn::new(7) });
    }
}
