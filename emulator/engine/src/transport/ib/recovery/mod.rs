//! Loss recovery of reliable connections: the reaction of requester, completer and responder to a lost packet.
//!
//! Each mode is one file. A mode decides; the completer counts retries, rewinds the requester and queues the NAK.

mod fatal;
mod go_back_0;
mod go_back_n;
mod policy;

pub(crate) use policy::{GapAction, RecoveryPolicy};

use crate::Recovery;

impl Recovery {
    pub(crate) const fn policy(self) -> &'static dyn RecoveryPolicy {
        match self {
            Recovery::Fatal => &fatal::Fatal,
            Recovery::GoBackN => &go_back_n::GoBackN,
            Recovery::GoBack0 => &go_back_0::GoBack0,
        }
    }
}
