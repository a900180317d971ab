//! Loss recovery of reliable connections: the reaction of requester, completer and responder to a lost packet.
//!
//! Each mode is one file. A mode decides; `queue_pair` counts retries, rewinds the requester and queues the NAK.

mod fatal;
mod go_back_0;
mod go_back_n;

use core::time::Duration;
use softhca_wire::Psn;

/// The effect of a lost packet on a reliable connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Recovery {
    /// The connection fails, as on a lossless fabric.
    #[default]
    Fatal,
    /// The requester retransmits from the lost packet (IBA 9.7.5).
    GoBackN,
    /// The requester retransmits the whole message; the responder discards the part that it has received.
    GoBack0,
}

impl Recovery {
    const ALL: [Recovery; 3] = [Recovery::Fatal, Recovery::GoBackN, Recovery::GoBack0];

    /// The name in settings, configuration files and scenarios.
    pub const fn name(self) -> &'static str {
        match self {
            Recovery::Fatal => "fatal",
            Recovery::GoBackN => "go-back-n",
            Recovery::GoBack0 => "go-back-0",
        }
    }

    /// The mode with this name.
    pub fn from_name(name: &str) -> Option<Recovery> {
        Recovery::ALL.into_iter().find(|mode| mode.name() == name)
    }

    pub(crate) const fn policy(self) -> &'static dyn RecoveryPolicy {
        match self {
            Recovery::Fatal => &fatal::Fatal,
            Recovery::GoBackN => &go_back_n::GoBackN,
            Recovery::GoBack0 => &go_back_0::GoBack0,
        }
    }
}

/// The responder's reaction to a request whose PSN is ahead of the expected one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GapAction {
    /// Send a NAK and move the queue pair to the error state.
    Fail,
    /// Send a NAK and expect the request at `resume_at` next. A PSN before the expected one discards the message in
    /// progress.
    Nak { resume_at: Psn },
}

/// The decisions of one recovery mode.
pub(crate) trait RecoveryPolicy {
    /// Requester: the silence after which it assumes a loss. `timeout` is the queue pair's attribute, `min` the device's
    /// lower bound for modes without retransmission.
    fn ack_timeout(&self, timeout: Duration, min: Duration, retry_count: u8) -> Duration;

    /// Requester: the PSN to retransmit from when the packet `lost` of the message that starts at `message` is lost.
    /// `None` fails the queue pair.
    fn retransmit_from(&self, lost: Psn, message: Psn) -> Option<Psn>;

    /// Responder: the reaction to a gap before the `expected` PSN arrived. `in_progress` is the first PSN of a message
    /// of which a part has arrived.
    fn on_sequence_gap(&self, expected: Psn, in_progress: Option<Psn>) -> GapAction;

    /// Completer: whether a sequence NAK may name the first PSN of a message that is acknowledged in part.
    fn peer_may_restart_message(&self) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_is_found_by_its_name() {
        for mode in Recovery::ALL {
            assert_eq!(Recovery::from_name(mode.name()), Some(mode));
        }
        assert_eq!(Recovery::from_name("selective"), None);
    }
}
