//! Refusals: the one place that maps a reason to NAK, state, counter and asynchronous event.

use crate::card::Card;
use crate::inbound::Owed;
use crate::queue_pair::QueuePair;
use crate::{AsyncEvent, Context, Event, Reason, Recovery, Refusal};
use softhca_queue::Status;
use softhca_wire::{NakCode, Psn, Syndrome};

impl QueuePair {
    /// Refuses a request: one NAK, and what the reason does to the queue pair.
    pub(crate) fn refuse(&mut self, card: &mut Card, ctx: &mut Context<'_>, psn: Psn, refusal: Refusal) {
        ctx.tell(Event::Refused { qp: self.number, psn, refusal });
        let number = self.number;
        let mut at = self.inbound.expected;
        let (syndrome, event, receive) = match refusal {
            Refusal::Gap { .. } => {
                if card.settings.recovery == Recovery::GoBack0
                    && let Some(open) = self.inbound.open.take()
                {
                    at = open.first;
                    self.inbound.expected = at;
                }
                let syndrome = Syndrome::Nak(NakCode::SequenceError);
                if card.settings.recovery != Recovery::Fatal {
                    self.inbound.refused = true;
                    self.owe(at, syndrome);
                    return self.wake(card);
                }
                (syndrome, Some(AsyncEvent::QueuePairFatal(number)), None)
            }
            Refusal::NotReady => {
                card.counters.sent_rnr_err += 1;
                self.inbound.refused = true;
                let syndrome = Syndrome::RnrNak(self.attributes.min_rnr_timer);
                let waits = matches!(
                    self.inbound.owed.back(),
                    Some(Owed::Acknowledge { psn, syndrome: Syndrome::RnrNak(_), .. }) if *psn == at
                );
                if !waits {
                    self.owe(at, syndrome);
                }
                return self.wake(card);
            }
            Refusal::OpcodeOutOfPlace { .. }
            | Refusal::Unsupported { .. }
            | Refusal::PayloadLength { .. }
            | Refusal::MessageLength { .. }
            | Refusal::TooManyReads { .. }
            | Refusal::Misaligned { .. }
            | Refusal::NoSharedReceiveQueue { .. } => {
                card.counters.resp_remote_invalid_request += 1;
                let event = AsyncEvent::QueuePairRequestError(number);
                (Syndrome::Nak(NakCode::InvalidRequest), Some(event), None)
            }
            Refusal::Access(_) | Refusal::InvalidateFailed(_) => {
                card.counters.resp_remote_access_errors += 1;
                let event = AsyncEvent::QueuePairAccessError(number);
                (Syndrome::Nak(NakCode::RemoteAccess), Some(event), None)
            }
            Refusal::ReceiveTooSmall { .. } => {
                card.counters.resp_local_length_error += 1;
                (Syndrome::Nak(NakCode::InvalidRequest), None, Some(Status::LocalLength))
            }
            Refusal::ReceiveDenied(_) => {
                (Syndrome::Nak(NakCode::RemoteOperational), None, Some(Status::LocalProtection))
            }
            Refusal::ReadFailed(_) | Refusal::BrokenRing(_) => {
                let event = AsyncEvent::QueuePairFatal(number);
                (Syndrome::Nak(NakCode::RemoteOperational), Some(event), None)
            }
        };
        self.owe(psn_of_refusal(refusal, at, psn), syndrome);
        let reason = Reason::Refused(refusal);
        if let Some(status) = receive
            && let Some(buffer) = self.inbound.buffer.take()
        {
            self.complete_receive(card, ctx, buffer, status, reason);
        }
        self.enter_error(card, ctx, reason, event);
        self.wake(card);
    }
}

/// A gap is reported at the missing packet, everything else at the refused one.
fn psn_of_refusal(refusal: Refusal, expected: Psn, psn: Psn) -> Psn {
    match refusal {
        Refusal::Gap { .. } => expected,
        _ => psn,
    }
}
