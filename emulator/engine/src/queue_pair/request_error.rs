//! Refusals: the one place that maps a reason to NAK, state, counter and asynchronous event.

use super::QueuePair;
use super::responder_state::PendingResponse;
use crate::hca_state::HcaState;
use crate::{AsyncEvent, Context, Event, Reason, Recovery, RequestError};
use softhca_queue::CompletionStatus;
use softhca_wire::{NakCode, Psn, Syndrome};

impl QueuePair {
    /// Refuses a request: one NAK, and what the reason does to the queue pair.
    pub(crate) fn reject_request(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        psn: Psn,
        refusal: RequestError,
    ) {
        ctx.emit(Event::RequestRejected { qp: self.qpn, psn, error: refusal });
        let number = self.qpn;
        let mut at = self.responder.expected_psn;
        let (syndrome, event, receive) = match refusal {
            RequestError::PsnOutOfSequence { .. } => {
                if card.settings.recovery == Recovery::GoBack0
                    && let Some(open) = self.responder.in_progress_message.take()
                {
                    at = open.first_psn;
                    self.responder.expected_psn = at;
                }
                let syndrome = Syndrome::Nak(NakCode::PsnSequenceError);
                if card.settings.recovery != Recovery::Fatal {
                    self.responder.nak_sent = true;
                    self.queue_separate_ack(at, syndrome);
                    return self.schedule_transmit(card);
                }
                (syndrome, Some(AsyncEvent::QueuePairFatal(number)), None)
            }
            RequestError::ReceiverNotReady => {
                card.counters.sent_rnr_err += 1;
                self.responder.nak_sent = true;
                let syndrome = Syndrome::RnrNak(self.attributes.min_rnr_timer);
                let waits = matches!(
                    self.responder.pending_responses.back(),
                    Some(PendingResponse::Ack { psn, syndrome: Syndrome::RnrNak(_), .. }) if *psn == at
                );
                if !waits {
                    self.queue_separate_ack(at, syndrome);
                }
                return self.schedule_transmit(card);
            }
            RequestError::OpcodeOutOfSequence { .. }
            | RequestError::UnsupportedOpcode { .. }
            | RequestError::PayloadLength { .. }
            | RequestError::MessageLength { .. }
            | RequestError::TooManyRdAtomic { .. }
            | RequestError::MisalignedAtomic { .. }
            | RequestError::NoSuchSrq { .. } => {
                card.counters.resp_remote_invalid_request += 1;
                let event = AsyncEvent::QueuePairRequestError(number);
                (Syndrome::Nak(NakCode::InvalidRequest), Some(event), None)
            }
            RequestError::Access(_) | RequestError::InvalidateFailed(_) => {
                card.counters.resp_remote_access_errors += 1;
                let event = AsyncEvent::QueuePairAccessError(number);
                (Syndrome::Nak(NakCode::RemoteAccessError), Some(event), None)
            }
            RequestError::ReceiveTooSmall { .. } => {
                card.counters.resp_local_length_error += 1;
                (Syndrome::Nak(NakCode::InvalidRequest), None, Some(CompletionStatus::LocalLengthError))
            }
            RequestError::ReceiveAccess(_) => (
                Syndrome::Nak(NakCode::RemoteOperationalError),
                None,
                Some(CompletionStatus::LocalProtectionError),
            ),
            RequestError::ReadAccess(_) | RequestError::CorruptRing(_) => {
                let event = AsyncEvent::QueuePairFatal(number);
                (Syndrome::Nak(NakCode::RemoteOperationalError), Some(event), None)
            }
        };
        self.queue_separate_ack(nak_psn(refusal, at, psn), syndrome);
        let reason = Reason::RequestRejected(refusal);
        if let Some(status) = receive
            && let Some(buffer) = self.responder.receive_wqe.take()
        {
            self.complete_receive_with_error(card, ctx, buffer, status, reason);
        }
        self.enter_error(card, ctx, reason, event);
        self.schedule_transmit(card);
    }
}

/// A gap is reported at the missing packet, everything else at the refused one.
fn nak_psn(refusal: RequestError, expected: Psn, psn: Psn) -> Psn {
    match refusal {
        RequestError::PsnOutOfSequence { .. } => expected,
        _ => psn,
    }
}
