//! Loss recovery of reliable connections: the reaction of requester, completer and responder to a lost packet.
//!
//! Each mode is one file. A mode decides; `queue_pair` counts retries, rewinds the requester and queues the NAK.

mod fatal;
mod go_back_0;
mod go_back_n;
mod policy;

pub(crate) use policy::{GapAction, RecoveryPolicy};

softhca_wire::named_enum! {
    /// The effect of a lost packet on a reliable connection.
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    #[derive(Default)]
    pub enum Recovery {
        /// The connection fails, as on a lossless fabric.
        #[default]
        Fatal => "fatal",
        /// The requester retransmits from the lost packet (IBA 9.7.5).
        GoBackN => "go-back-n",
        /// The requester retransmits the whole message; the responder discards the part that it has received.
        #[cfg_attr(feature = "serde", serde(rename = "go-back-0"))]
        GoBack0 => "go-back-0",
    }
}

impl Recovery {
    pub(crate) const fn policy(self) -> &'static dyn RecoveryPolicy {
        match self {
            Recovery::Fatal => &fatal::Fatal,
            Recovery::GoBackN => &go_back_n::GoBackN,
            Recovery::GoBack0 => &go_back_0::GoBack0,
        }
    }
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
