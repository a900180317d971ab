//! The words for what a card tells.

use super::Emphasis;
use super::label::relative_psn;
use crate::describe::duration;
use softhca_engine::{CmFailure, DropReason, Event, RateCause, Reason, RequestError, RetransmitCause};
use softhca_queue::{Completion, CompletionStatus};
use softhca_wire::{Psn, Qpn};

/// The zeros of relative PSNs at one queue pair.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BasePsns {
    /// Of its own requests.
    pub own: Option<Psn>,
    /// Of its peer's.
    pub peer: Option<Psn>,
}

/// The queue pair that an event is about, if it is about one.
pub(super) fn qpn_of_event(event: &Event) -> Option<Qpn> {
    Some(match *event {
        Event::QpConfigured { qp, .. }
        | Event::WqeFetched { qp, .. }
        | Event::PacketSent { qp, .. }
        | Event::PacketReceived { qp, .. }
        | Event::PacketDropped { qp, .. }
        | Event::DuplicateRequestHandled { qp, .. }
        | Event::RequestRejected { qp, .. }
        | Event::Retransmitted { qp, .. }
        | Event::RnrWaitStarted { qp, .. }
        | Event::AckTimedOut { qp, .. }
        | Event::EcnMarkReceived { qp, .. }
        | Event::RateChanged { qp, .. }
        | Event::MemoryWritten { qp, .. }
        | Event::QpStateChanged { qp, .. }
        | Event::UnsignaledCompleted { qp, .. }
        | Event::ClientFaulted { qp, .. } => qp,
        Event::Completed { completion, .. } => completion.qpn,
        Event::AsyncEventRaised { event, .. } => return event.qpn(),
        Event::CmSent { .. }
        | Event::CmReceived { .. }
        | Event::CmDropped { .. }
        | Event::CmStateChanged { .. }
        | Event::CmFailed { .. }
        | Event::CmEventRaised { .. } => Qpn::GSI,
        Event::CompletionNotified { .. } => return None,
    })
}

/// The sentence for an event that is no packet, work request, state change or completion; none for what
/// the arrows show already.
pub(super) fn describe(event: &Event, zeros: BasePsns, now_ns: i64) -> Option<(Emphasis, String)> {
    Some(match *event {
        Event::PacketDropped { packet, reason, .. } => {
            let response = packet.is_some_and(|packet| !packet.opcode.operation().is_request());
            let zero = if response { zeros.own } else { zeros.peer };
            let what = packet.map_or("a packet".into(), |packet| {
                format!("{} {}", packet.opcode.name(), relative_psn(packet.psn, zero))
            });
            (Emphasis::Unusual, format!("{what} not taken: {}", drop_reason_text(reason, zero)))
        }
        Event::DuplicateRequestHandled { psn, .. } => (
            Emphasis::Unusual,
            format!("{} is a duplicate: answered, not done again", relative_psn(psn, zeros.peer)),
        ),
        Event::RequestRejected { error: refusal, .. } => {
            (Emphasis::Error, request_error_text(refusal, zeros.peer))
        }
        Event::Retransmitted { from_psn: to, cause, retries_left, .. } => {
            let why = match cause {
                RetransmitCause::SequenceNak => "sequence NAK",
                RetransmitCause::ResponseGap => "a response is missing",
                RetransmitCause::Timeout => "no answer in time",
                RetransmitCause::ReceiverNotReady => "the wait is over",
            };
            let to = relative_psn(to, zeros.own);
            (Emphasis::Unusual, format!("goes back to {to}: {why}, {}", retries_text(retries_left)))
        }
        Event::RnrWaitStarted { psn, until, retries_left, .. } => {
            let wait = duration(until.nanos().saturating_sub(now_ns.max(0) as u64));
            let psn = relative_psn(psn, zeros.own);
            (
                Emphasis::Unusual,
                format!("waits {wait} before {psn} is sent again, {}", retries_text(retries_left)),
            )
        }
        Event::AckTimedOut { oldest_psn: oldest, .. } => {
            (Emphasis::Unusual, format!("no answer to {} in time", relative_psn(oldest, zeros.own)))
        }
        Event::EcnMarkReceived { psn, cnp_queued: true, .. } => {
            (Emphasis::Unusual, format!("{} came with a congestion mark", relative_psn(psn, zeros.peer)))
        }
        Event::RateChanged { bits_per_second, cause: RateCause::CnpReceived, .. } => {
            (Emphasis::Unusual, format!("slows down to {} Mb/s", bits_per_second / 1_000_000))
        }
        Event::AsyncEventRaised { event, .. } => (Emphasis::Unusual, format!("async event {}", event.name())),
        Event::ClientFaulted { why, .. } => {
            (Emphasis::Error, format!("the application broke its ring: {why}"))
        }
        Event::CmSent { message, retransmission: again, .. } => {
            let again = if again { ", again" } else { "" };
            (Emphasis::Normal, format!("sends {}{again}", message.name()))
        }
        Event::CmDropped { message, reason, .. } => {
            (Emphasis::Unusual, format!("{} not taken: {reason}", message.name()))
        }
        Event::CmStateChanged { id, from, to } => {
            (Emphasis::Normal, format!("connection {:#x}: {from} → {to}", id.0))
        }
        Event::CmFailed { id, failure } => {
            let why = match failure {
                CmFailure::TimedOut => "no answer, in every try",
                CmFailure::PeerUnreachable => "the peer's port is gone",
            };
            (Emphasis::Error, format!("connection {:#x} given up: {why}", id.0))
        }
        Event::CmEventRaised { kind, status, .. } => {
            let tone = if status == 0 { Emphasis::Normal } else { Emphasis::Error };
            (tone, format!("{kind}, status {status}"))
        }
        _ => return None,
    })
}

fn retries_text(left: u8) -> String {
    match left {
        0 => "for the last time".into(),
        1 => "1 more try left".into(),
        _ => format!("{left} more tries left"),
    }
}

/// How a work request ended.
pub(super) fn outcome(completion: &Completion, reason: Reason, zeros: BasePsns) -> (Emphasis, String) {
    let status = completion.status.name();
    match completion.status {
        CompletionStatus::Success if completion.opcode.is_receive() => {
            (Emphasis::Success, format!("{status}, {} B", completion.byte_len))
        }
        CompletionStatus::Success => (Emphasis::Success, status.into()),
        CompletionStatus::WrFlushError => (Emphasis::Error, status.into()),
        _ => (Emphasis::Error, format!("{status}: {}", reason_text(reason, zeros))),
    }
}

/// Why, with relative PSNs.
pub(super) fn reason_text(reason: Reason, zeros: BasePsns) -> String {
    let own = |psn| relative_psn(psn, zeros.own);
    match reason {
        Reason::Nak { code, psn } => format!("the peer refused {}: {}", own(psn), code.name()),
        Reason::SequenceNak { psn } => format!("the peer missed PSN {}", own(psn)),
        Reason::RnrRetryExceeded { psn } => {
            format!("the peer had no receive posted for {}, in every try", own(psn))
        }
        Reason::AckTimeout { psn } => format!("no answer to {} in time", own(psn)),
        Reason::ResponseGap { expected, got } => {
            format!("response {} is missing, {} came", own(expected), own(got))
        }
        Reason::BadResponse { psn } => format!("the response {} does not fit its request", own(psn)),
        Reason::RequestRejected(refusal) => request_error_text(refusal, zeros.peer),
        other => other.to_string(),
    }
}

fn request_error_text(refusal: RequestError, zero: Option<Psn>) -> String {
    match refusal {
        RequestError::PsnOutOfSequence { expected: missing, got } => {
            format!("PSN {} is missing, {} came", relative_psn(missing, zero), relative_psn(got, zero))
        }
        other => other.to_string(),
    }
}

fn drop_reason_text(reason: DropReason, zero: Option<Psn>) -> String {
    match reason {
        DropReason::NakOutstanding { expected } => {
            format!("a NAK is outstanding, only {} is taken", relative_psn(expected, zero))
        }
        DropReason::StaleResponse { oldest } => {
            format!("an old response, {} is awaited", relative_psn(oldest, zero))
        }
        DropReason::AlreadyRetransmitting { expected } => {
            format!("it was on its way when {} was asked for again", relative_psn(expected, zero))
        }
        DropReason::UcSequenceGap { expected } => {
            format!("the message lacks its packet {}", relative_psn(expected, zero))
        }
        other => other.to_string(),
    }
}
