//! Rejected requests: maps a request error to NAK, queue pair state, counter and asynchronous event.

use super::QueuePair;
use super::responder_state::PendingResponse;
use crate::core::hca_state::HcaState;
use crate::transport::ib::recovery::GapAction;
use crate::{AccessError, AsyncEvent, Context, Event, InvalidateAnswer, Profile, Reason, RequestError};
use softhca_types::CompletionStatus;
use softhca_wire::{NakCode, Psn, Syndrome};

impl QueuePair {
    /// Rejects a request: queues one NAK and applies the effect of the error to the queue pair.
    pub(crate) fn reject_request(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        psn: Psn,
        error: RequestError,
    ) {
        ctx.emit(Event::RequestRejected { qp: self.qpn, psn, error });
        let number = self.qpn;
        let at = self.responder.expected_psn;
        let profile = hca.settings.profile;
        let counted = u64::from(profile.counts_rejected_requests);
        let (nak, event, receive) = match error {
            RequestError::PsnOutOfSequence { .. } => {
                let in_progress = self.responder.in_progress_message.map(|message| message.first_psn);
                let action = self.recovery(hca).policy().on_sequence_gap(at, in_progress);
                if let GapAction::Nak { resume_at } = action {
                    if resume_at != at {
                        self.responder.in_progress_message = None;
                        self.responder.expected_psn = resume_at;
                    }
                    self.responder.nak_sent = true;
                    self.responder.queue_ack(resume_at, Syndrome::Nak(NakCode::PsnSequenceError));
                    return self.schedule_transmit(hca);
                }
                (Some(NakCode::PsnSequenceError), Some(AsyncEvent::QueuePairFatal(number)), None)
            }
            RequestError::ReceiverNotReady => {
                hca.counters.sent_rnr_err += 1;
                self.responder.nak_sent = true;
                let syndrome = Syndrome::RnrNak(self.attributes.min_rnr_timer);
                let waits = matches!(
                    self.responder.pending_responses.back(),
                    Some(PendingResponse::Ack { psn, syndrome: Syndrome::RnrNak(_), .. }) if *psn == at
                );
                if !waits {
                    self.responder.queue_ack(at, syndrome);
                }
                return self.schedule_transmit(hca);
            }
            RequestError::OpcodeOutOfSequence { .. }
            | RequestError::UnsupportedOpcode { .. }
            | RequestError::PayloadLength { .. }
            | RequestError::MessageLength { .. }
            | RequestError::TooManyRdAtomic { .. }
            | RequestError::MisalignedAtomic { .. }
            | RequestError::NoSuchSrq { .. } => {
                hca.counters.resp_remote_invalid_request += counted;
                let event = AsyncEvent::QueuePairRequestError(number);
                (Some(NakCode::InvalidRequest), Some(event), None)
            }
            RequestError::Access(error) => {
                hca.counters.resp_remote_access_errors += counted;
                let event = AsyncEvent::QueuePairAccessError(number);
                (Some(nak_of_access(profile, error)), Some(event), None)
            }
            RequestError::WriteWithImmAccess(error) => {
                hca.counters.resp_remote_access_errors += counted;
                (Some(nak_of_access(profile, error)), None, Some(profile.receive_of_rejected_write))
            }
            RequestError::InvalidateFailed(_) => {
                hca.counters.resp_remote_invalid_request += counted;
                if profile.answer_to_failed_invalidate == InvalidateAnswer::Ack {
                    self.responder.queue_ack(psn, Syndrome::ACK);
                }
                (None, None, Some(CompletionStatus::RemoteInvalidRequestError))
            }
            RequestError::ReceiveTooSmall { .. } => {
                hca.counters.resp_local_length_error += counted;
                (Some(profile.nak_of_long_send), None, Some(CompletionStatus::LocalLengthError))
            }
            RequestError::ReceiveAccess(_) => {
                (Some(NakCode::RemoteOperationalError), None, Some(CompletionStatus::LocalProtectionError))
            }
            RequestError::ReadAccess(_) | RequestError::CorruptRing(_) => {
                let event = AsyncEvent::QueuePairFatal(number);
                (Some(NakCode::RemoteOperationalError), Some(event), None)
            }
        };
        if let Some(code) = nak {
            // The NAK of a gap names the missing packet, others the rejected one.
            let psn = if code == NakCode::PsnSequenceError { at } else { psn };
            self.responder.queue_ack(psn, Syndrome::Nak(code));
        }
        let reason = Reason::RequestRejected(error);
        if let Some(status) = receive
            && let Some(buffer) = self.responder.receive_wqe.take()
        {
            self.complete_receive_with_error(hca, ctx, buffer, status, reason);
        }
        self.enter_error(hca, ctx, reason, event);
        self.schedule_transmit(hca);
    }
}

fn nak_of_access(profile: &Profile, error: AccessError) -> NakCode {
    match error {
        AccessError::QueuePairAccess { .. } => profile.nak_of_queue_pair_access,
        _ => NakCode::RemoteAccessError,
    }
}
