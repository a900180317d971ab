//! The causes of trouble that single entries show, in a log and in what is inferred from a capture alike.

use super::{Certainty, EffectData, Entry, LogEvent};

/// A cause that an entry shows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObservedCause {
    /// Its code: `request-lost`, `nak/remote-access-error`, ….
    pub code: String,
    /// The PSN that it is about.
    pub psn: Option<u32>,
    /// How sure it is.
    pub certainty: Certainty,
}

/// Whether a message of the connection manager is sent again without a reply. The others (RTU, MRA, DREP, …) are sent
/// again only in reply to a repeated message.
pub(crate) fn expects_reply(message: &str) -> bool {
    matches!(message, "REQ" | "REP" | "DREQ" | "LAP" | "SIDR_REQ")
}

impl ObservedCause {
    /// The cause that an entry shows, if any.
    pub fn of(entry: &Entry) -> Option<ObservedCause> {
        let (code, psn) = match &entry.event {
            LogEvent::Fault { effect, class, opcode, psn, .. } => {
                let is_response = opcode.as_ref().map_or(class == "response", |opcode| {
                    opcode.contains("RESPONSE") || opcode.contains("ACKNOWLEDGE") || opcode.contains("CNP")
                });
                let is_datagram = opcode.as_ref().is_some_and(|opcode| opcode.starts_with("UD "));
                let code = match effect {
                    EffectData::Dropped { .. } | EffectData::LinkTakenDown { .. } => match () {
                        () if is_datagram => "datagram-lost",
                        () if is_response => "response-lost",
                        () => "request-lost",
                    },
                    EffectData::Duplicated { .. } => "duplicated",
                    EffectData::Reordered { .. } => "reordered",
                    EffectData::Delayed { .. } => "delayed",
                    EffectData::Corrupted { .. } | EffectData::Rewritten { .. } => "damaged",
                    EffectData::MarkedCe => "marked",
                    EffectData::NotCaptured { .. } => "not-captured",
                    EffectData::Irregular { code } => code,
                };
                (code.to_owned(), *psn)
            }
            LogEvent::FrameDropped { packet, .. } => ("request-lost".into(), packet.psn),
            LogEvent::PacketDropped { packet, reason, .. } if reason == "bad-icrc" => {
                ("damaged".into(), packet.as_ref().map(|packet| packet.psn))
            }
            LogEvent::PacketSent { packet, .. } => {
                let code = match packet.syndrome.as_deref() {
                    Some("rnr-nak") => "rnr".into(),
                    Some(nak) if nak.starts_with("nak/") => nak.to_owned(),
                    _ if packet.opcode.ends_with("CNP") => "cnp".into(),
                    _ => return None,
                };
                (code, Some(packet.psn))
            }
            LogEvent::AckTimedOut { oldest_psn, .. } => ("timeout".into(), Some(*oldest_psn)),
            LogEvent::Retransmitted { from_psn, cause, .. } => {
                (format!("retransmission/{cause}"), Some(*from_psn))
            }
            LogEvent::CmSent { message, .. } if message == "REJ" => ("cm-rejected".into(), None),
            LogEvent::CmSent { message, retransmission: true, .. } if expects_reply(message) => {
                ("cm-retransmission".into(), None)
            }
            _ => return None,
        };
        Some(ObservedCause { code, psn, certainty: entry.certainty.unwrap_or(Certainty::Known) })
    }
}
