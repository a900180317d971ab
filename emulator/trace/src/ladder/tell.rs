//! The words for what a card tells.

use super::Tone;
use super::label::relative;
use crate::words::duration;
use softhca_engine::{BackCause, CmFailure, DropReason, Event, RateCause, Reason, Refusal};
use softhca_queue::{Completion, Status};
use softhca_wire::{Psn, Qpn};

/// The zeros of relative PSNs at one queue pair.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Zeros {
    /// Of its own requests.
    pub own: Option<Psn>,
    /// Of its peer's.
    pub peer: Option<Psn>,
}

/// The queue pair that an event is about, if it is about one.
pub(super) fn queue_pair(event: &Event) -> Option<Qpn> {
    Some(match *event {
        Event::Configured { qp, .. }
        | Event::WorkStarted { qp, .. }
        | Event::PacketSent { qp, .. }
        | Event::PacketReceived { qp, .. }
        | Event::PacketDropped { qp, .. }
        | Event::DuplicateAnswered { qp, .. }
        | Event::Refused { qp, .. }
        | Event::WentBack { qp, .. }
        | Event::RnrWaitStarted { qp, .. }
        | Event::AckTimedOut { qp, .. }
        | Event::CongestionSeen { qp, .. }
        | Event::RateChanged { qp, .. }
        | Event::MemoryWritten { qp, .. }
        | Event::StateChanged { qp, .. }
        | Event::Retired { qp, .. }
        | Event::ClientFaulted { qp, .. } => qp,
        Event::Completed { completion, .. } => completion.queue_pair,
        Event::Raised { event, .. } => return event.queue_pair(),
        Event::CmSent { .. }
        | Event::CmReceived { .. }
        | Event::CmIgnored { .. }
        | Event::CmStateChanged { .. }
        | Event::CmGaveUp { .. }
        | Event::CmRaised { .. } => Qpn::GSI,
        Event::Notified { .. } => return None,
    })
}

/// The sentence for an event that is no packet, work request, state change or completion; none for what
/// the arrows show already.
pub(super) fn sentence(event: &Event, zeros: Zeros, now_ns: i64) -> Option<(Tone, String)> {
    Some(match *event {
        Event::PacketDropped { packet, reason, .. } => {
            let response = packet.is_some_and(|packet| !packet.opcode.operation().is_request());
            let zero = if response { zeros.own } else { zeros.peer };
            let what = packet.map_or("a packet".into(), |packet| {
                format!("{} {}", packet.opcode.name(), relative(packet.psn, zero))
            });
            (Tone::Odd, format!("{what} not taken: {}", drop_reason(reason, zero)))
        }
        Event::DuplicateAnswered { psn, .. } => {
            (Tone::Odd, format!("{} is a duplicate: answered, not done again", relative(psn, zeros.peer)))
        }
        Event::Refused { refusal, .. } => (Tone::Bad, refusal_text(refusal, zeros.peer)),
        Event::WentBack { to, cause, retries_left, .. } => {
            let why = match cause {
                BackCause::SequenceNak => "sequence NAK",
                BackCause::ResponseGap => "a response is missing",
                BackCause::Timeout => "no answer in time",
                BackCause::ReceiverNotReady => "the wait is over",
            };
            let to = relative(to, zeros.own);
            (Tone::Odd, format!("goes back to {to}: {why}, {}", tries(retries_left)))
        }
        Event::RnrWaitStarted { psn, until, retries_left, .. } => {
            let wait = duration(until.nanos().saturating_sub(now_ns.max(0) as u64));
            let psn = relative(psn, zeros.own);
            (Tone::Odd, format!("waits {wait} before {psn} is sent again, {}", tries(retries_left)))
        }
        Event::AckTimedOut { oldest, .. } => {
            (Tone::Odd, format!("no answer to {} in time", relative(oldest, zeros.own)))
        }
        Event::CongestionSeen { psn, notified: true, .. } => {
            (Tone::Odd, format!("{} came with a congestion mark", relative(psn, zeros.peer)))
        }
        Event::RateChanged { bits_per_second, cause: RateCause::Notified, .. } => {
            (Tone::Odd, format!("slows down to {} Mb/s", bits_per_second / 1_000_000))
        }
        Event::Raised { event, .. } => (Tone::Odd, format!("async event {}", event.name())),
        Event::ClientFaulted { why, .. } => (Tone::Bad, format!("the application broke its ring: {why}")),
        Event::CmSent { message, again, .. } => {
            let again = if again { ", again" } else { "" };
            (Tone::Plain, format!("sends {}{again}", message.name()))
        }
        Event::CmIgnored { message, reason, .. } => {
            (Tone::Odd, format!("{} not taken: {reason}", message.name()))
        }
        Event::CmStateChanged { id, from, to } => {
            (Tone::Plain, format!("connection {:#x}: {from} → {to}", id.0))
        }
        Event::CmGaveUp { id, failure } => {
            let why = match failure {
                CmFailure::TimedOut => "no answer, in every try",
                CmFailure::LinkDead => "the peer's port is gone",
            };
            (Tone::Bad, format!("connection {:#x} given up: {why}", id.0))
        }
        Event::CmRaised { kind, status, .. } => {
            let tone = if status == 0 { Tone::Plain } else { Tone::Bad };
            (tone, format!("{kind}, status {status}"))
        }
        _ => return None,
    })
}

fn tries(left: u8) -> String {
    match left {
        0 => "for the last time".into(),
        1 => "1 more try left".into(),
        _ => format!("{left} more tries left"),
    }
}

/// How a work request ended.
pub(super) fn outcome(completion: &Completion, reason: Reason, zeros: Zeros) -> (Tone, String) {
    let status = completion.status.name();
    match completion.status {
        Status::Success if completion.operation.is_receive() => {
            (Tone::Good, format!("{status}, {} B", completion.bytes))
        }
        Status::Success => (Tone::Good, status.into()),
        Status::Flushed => (Tone::Bad, status.into()),
        _ => (Tone::Bad, format!("{status}: {}", reason_text(reason, zeros))),
    }
}

/// Why, with relative PSNs.
pub(super) fn reason_text(reason: Reason, zeros: Zeros) -> String {
    let own = |psn| relative(psn, zeros.own);
    match reason {
        Reason::Nak { code, psn } => format!("the peer refused {}: {}", own(psn), code.name()),
        Reason::SequenceNak { psn } => format!("the peer missed PSN {}", own(psn)),
        Reason::RnrExhausted { psn } => {
            format!("the peer had no receive posted for {}, in every try", own(psn))
        }
        Reason::TimedOut { psn } => format!("no answer to {} in time", own(psn)),
        Reason::ResponseGap { expected, got } => {
            format!("response {} is missing, {} came", own(expected), own(got))
        }
        Reason::BadResponse { psn } => format!("the response {} does not fit its request", own(psn)),
        Reason::Refused(refusal) => refusal_text(refusal, zeros.peer),
        other => other.to_string(),
    }
}

fn refusal_text(refusal: Refusal, zero: Option<Psn>) -> String {
    match refusal {
        Refusal::Gap { missing, got } => {
            format!("PSN {} is missing, {} came", relative(missing, zero), relative(got, zero))
        }
        other => other.to_string(),
    }
}

fn drop_reason(reason: DropReason, zero: Option<Psn>) -> String {
    match reason {
        DropReason::RefusalOutstanding { expected } => {
            format!("a NAK is outstanding, only {} is taken", relative(expected, zero))
        }
        DropReason::StaleResponse { oldest } => {
            format!("an old response, {} is awaited", relative(oldest, zero))
        }
        DropReason::AskedAgain { expected } => {
            format!("it was on its way when {} was asked for again", relative(expected, zero))
        }
        DropReason::UnreliableGap { expected } => {
            format!("the message lacks its packet {}", relative(expected, zero))
        }
        other => other.to_string(),
    }
}
