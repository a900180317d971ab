//! `go-back-n`: the requester retransmits from the lost packet, the responder keeps what it has received.

use super::policy::{DetectionTime, GapAction, RecoveryPolicy};
use core::time::Duration;
use softhca_wire::Psn;

pub(super) struct GoBackN;

impl RecoveryPolicy for GoBackN {
    fn ack_timeout(&self, timeout: Duration, _: Duration, _: &DetectionTime<'_>) -> Duration {
        timeout
    }

    fn retransmit_from(&self, lost: Psn, _: Psn) -> Option<Psn> {
        Some(lost)
    }

    fn on_sequence_gap(&self, expected: Psn, _: Option<Psn>) -> GapAction {
        GapAction::Nak { resume_at: expected }
    }

    fn peer_may_restart_message(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lost_packet_is_the_first_to_be_retransmitted() {
        let (message, lost) = (Psn::new(5), Psn::new(7));
        assert_eq!(GoBackN.retransmit_from(lost, message), Some(lost));
        assert_eq!(GoBackN.on_sequence_gap(lost, Some(message)), GapAction::Nak { resume_at: lost });
        let timeout =
            GoBackN.ack_timeout(Duration::from_micros(16), Duration::from_millis(1), &|timeout| timeout * 8);
        assert_eq!(timeout.as_micros(), 16);
    }
}
