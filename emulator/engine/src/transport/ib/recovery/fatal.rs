//! `fatal`: a lost packet fails the connection. Nothing is retransmitted.

use super::policy::{DetectionTime, GapAction, RecoveryPolicy};
use core::time::Duration;
use softhca_wire::Psn;

pub(super) struct Fatal;

impl RecoveryPolicy for Fatal {
    /// Without retransmission the peer gets the time of all tries at once.
    fn ack_timeout(&self, timeout: Duration, min: Duration, detection_time: &DetectionTime<'_>) -> Duration {
        detection_time(timeout.max(min))
    }

    fn retransmit_from(&self, _: Psn, _: Psn) -> Option<Psn> {
        None
    }

    fn on_sequence_gap(&self, _: Psn, _: Option<Psn>) -> GapAction {
        GapAction::Fail
    }

    fn peer_may_restart_message(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_packet_fails_both_ends() {
        assert_eq!(Fatal.retransmit_from(Psn::new(7), Psn::new(5)), None);
        assert_eq!(Fatal.on_sequence_gap(Psn::new(7), Some(Psn::new(5))), GapAction::Fail);
    }

    #[test]
    fn the_ack_timeout_covers_all_retries() {
        let (short, long) = (Duration::from_micros(16), Duration::from_millis(1));
        assert_eq!(Fatal.ack_timeout(short, long, &|timeout| timeout * 8), 8 * long);
        assert_eq!(Fatal.ack_timeout(long, short, &|timeout| timeout), long);
    }
}
