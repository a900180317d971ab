//! The texts of HCA events in a ladder, with relative PSNs.

use super::Emphasis;
use super::label::relative_psn;
use crate::log::{LogEvent, TextContext};
use softhca_engine::{DropReason, Event, RateCause, Reason, RequestError};
use softhca_types::{Completion, CompletionStatus};
use softhca_wire::{Psn, Qpn};

/// The PSNs that relative PSNs of a queue pair count from.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BasePsns {
    /// Of its own requests.
    pub own: Option<Psn>,
    /// Of the requests of its peer.
    pub peer: Option<Psn>,
}

/// The queue pair of an event, if it has one. CM events belong to QP1.
pub(super) fn qpn_of_event(event: &Event) -> Option<Qpn> {
    match event {
        Event::AsyncEventRaised { event, .. } => event.qpn(),
        Event::CmSent { .. }
        | Event::CmReceived { .. }
        | Event::CmDropped { .. }
        | Event::CmStateChanged { .. }
        | Event::CmFailed { .. }
        | Event::CmEventRaised { .. } => Some(Qpn::GSI),
        event => LogEvent::from_event(event).0.queue_pair().map(Qpn::new),
    }
}

/// The text of an event; none if the ladder shows it otherwise or not at all.
pub(super) fn describe(event: &Event, bases: BasePsns, now_ns: i64) -> Option<(Emphasis, String)> {
    let mut packet_base = bases.peer;
    let trigger = match *event {
        Event::QpConfigured { .. }
        | Event::WqeFetched { .. }
        | Event::Completed { .. }
        | Event::UnsignaledCompleted { .. }
        | Event::PacketSent { .. }
        | Event::PacketReceived { .. }
        | Event::MemoryWritten { .. }
        | Event::QpStateChanged { .. }
        | Event::CompletionNotified { .. }
        | Event::CmReceived { .. }
        | Event::EcnMarkReceived { cnp_queued: false, .. } => return None,
        Event::RateChanged { cause, .. } if cause != RateCause::CnpReceived => return None,
        Event::PacketDropped { packet, reason, .. } => {
            if packet.is_some_and(|packet| !packet.opcode.operation().is_request()) {
                packet_base = bases.own;
            }
            Some(drop_reason_text(reason, packet_base))
        }
        Event::RequestRejected { error, .. } => Some(request_error_text(error, bases.peer)),
        _ => None,
    };
    let (log_event, absolute) = LogEvent::from_event(event);
    let psn = |of: &str, psn: u32| {
        let base = match of {
            "own" => bases.own,
            "peer" => bases.peer,
            _ => packet_base,
        };
        relative_psn(Psn::new(psn), base)
    };
    let context = TextContext {
        now_ns: now_ns.max(0) as u64,
        trigger: trigger.as_deref().or(absolute.as_deref()),
        psn: &psn,
    };
    let emphasis = match event {
        Event::CmEventRaised { status, .. } if *status != 0 => Emphasis::Error,
        _ => log_event.schema().emphasis,
    };
    Some((emphasis, log_event.text(&context)))
}

/// How a work request ended.
pub(super) fn outcome(completion: &Completion, reason: Reason, bases: BasePsns) -> (Emphasis, String) {
    let status = completion.status.name();
    match completion.status {
        CompletionStatus::Success if completion.opcode.is_receive() => {
            (Emphasis::Success, format!("{status}, {} B", completion.byte_len))
        }
        CompletionStatus::Success => (Emphasis::Success, status.into()),
        CompletionStatus::WrFlushError => (Emphasis::Error, status.into()),
        _ => (Emphasis::Error, format!("{status}: {}", reason_text(reason, bases))),
    }
}

/// Why, with relative PSNs.
pub(super) fn reason_text(reason: Reason, bases: BasePsns) -> String {
    let own = |psn| relative_psn(psn, bases.own);
    match reason {
        Reason::Nak { code, psn } => format!("the peer rejected {}: {}", own(psn), code.name()),
        Reason::SequenceNak { psn } => format!("the peer did not receive {}", own(psn)),
        Reason::RnrRetryExceeded { psn } => {
            format!("the peer had no receive posted for {} in any retry", own(psn))
        }
        Reason::AckTimeout { psn } => format!("no ACK for {} within the ACK timeout", own(psn)),
        Reason::ResponseGap { expected, got } => {
            format!("expected response {}, received {}", own(expected), own(got))
        }
        Reason::BadResponse { psn } => format!("response {} does not match its request", own(psn)),
        Reason::RequestRejected(error) => request_error_text(error, bases.peer),
        other => other.to_string(),
    }
}

fn request_error_text(error: RequestError, base: Option<Psn>) -> String {
    match error {
        RequestError::PsnOutOfSequence { expected: missing, got } => {
            format!("expected {}, received {}", relative_psn(missing, base), relative_psn(got, base))
        }
        other => other.to_string(),
    }
}

fn drop_reason_text(reason: DropReason, base: Option<Psn>) -> String {
    match reason {
        DropReason::NakOutstanding { expected } => {
            format!("a NAK is outstanding: the responder accepts only {}", relative_psn(expected, base))
        }
        DropReason::BeyondWindow { expected } => {
            let expected = relative_psn(expected, base);
            format!("the PSN is too far ahead of {expected}, the expected one, to follow a loss")
        }
        DropReason::StaleResponse { oldest } => {
            format!("a stale response: {} is the oldest outstanding", relative_psn(oldest, base))
        }
        DropReason::AlreadyRetransmitting { expected } => {
            format!("response {} is missing and already requested again", relative_psn(expected, base))
        }
        DropReason::UcSequenceGap { expected } => {
            format!("packet {} of the message is missing", relative_psn(expected, base))
        }
        other => other.to_string(),
    }
}
