//! The completion queue.
//!
//! The HCA produces CQEs, the application consumes them. The control word holds the requested notification, and the
//! number of CQEs that the application had consumed at the request. The HCA clears it when it notifies.

use crate::ring::{CONSUMER_INDEX, PRODUCER_INDEX, Ring, high, load_all, low, pair, store_all};
use crate::sync::{AtomicU64, Ordering, fence};
use crate::{RingLayout, SharedWords};
use softhca_types::{
    Completion, CompletionFlags, CompletionOpcode, CompletionStatus, CqNotify, ReceivedRoute,
};
use softhca_wire::Qpn;

const STRIDE: u32 = 8;
/// The words of a CQE. The rest of its slot is not used.
const CQE: usize = 5;

/// The low bits of the control word are a [`CqNotify`], or zero.
const NOTIFY_BITS: u32 = 2;
const NOTIFY_MASK: u64 = (1 << NOTIFY_BITS) - 1;

/// The HCA's side of a completion queue.
pub struct CompletionProducer {
    ring: Ring,
    produced: u64,
}

/// The application's side of a completion queue.
pub struct CompletionConsumer {
    ring: Ring,
    consumed: u64,
}

/// Shows whether a completion queue is empty, without the consumer.
pub struct CompletionView {
    words: SharedWords,
}

impl CompletionView {
    /// Whether every CQE is polled.
    #[inline]
    pub fn is_empty(&self) -> bool {
        let index = |index: &AtomicU64| index.load(Ordering::Acquire);
        self.words.get(PRODUCER_INDEX).map(index) == self.words.get(CONSUMER_INDEX).map(index)
    }
}

/// Creates a completion queue on the heap of this process.
pub fn completion_ring(slots: u32) -> (CompletionProducer, CompletionConsumer) {
    let words = SharedWords::heap(CompletionProducer::layout(slots).words());
    (CompletionProducer::new(words.clone(), slots), CompletionConsumer::new(words, slots))
}

impl CompletionProducer {
    /// The layout of a ring with this many CQEs.
    pub const fn layout(slots: u32) -> RingLayout {
        RingLayout { slots, stride: STRIDE }
    }

    /// The HCA's side of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32) -> CompletionProducer {
        CompletionProducer { ring: Ring::new(words, Self::layout(slots)), produced: 0 }
    }

    /// Takes over the HCA's side of a ring whose HCA is gone, behind the last CQE of that HCA.
    pub fn resume(words: SharedWords, slots: u32) -> CompletionProducer {
        let mut producer = CompletionProducer::new(words, slots);
        producer.produced = producer.ring.producer_index().load(Ordering::Acquire);
        producer
    }

    /// The number of CQEs that the queue holds.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// The number of CQEs that are not polled yet. A consumer that writes a wrong index harms only itself.
    #[inline]
    pub fn pending(&self) -> u64 {
        let consumed = self.ring.consumer_index().load(Ordering::Acquire).min(self.produced);
        self.produced - consumed
    }

    /// The CQEs that are not polled yet, the newest first.
    pub fn unpolled(&self) -> impl Iterator<Item = Completion> {
        let indices = (self.produced - self.pending()..self.produced).rev();
        indices.map(|index| decode(load_all(self.ring.slot_head(index))))
    }

    /// Adds a CQE. Returns the completion if the queue is full.
    #[inline]
    pub fn push(&mut self, completion: &Completion) -> Result<(), Completion> {
        if self.pending() >= u64::from(self.ring.slots()) {
            return Err(*completion);
        }
        store_all(self.ring.slot_head(self.produced), encode(completion));
        self.produced += 1;
        self.ring.producer_index().store(self.produced, Ordering::Release);
        Ok(())
    }

    /// Whether to notify the application of the last CQE. True consumes the requested notification.
    /// A CQE that the application polled before its request does not notify.
    #[inline]
    pub fn claim_notification(&self, solicited: bool) -> bool {
        fence(Ordering::SeqCst);
        let due = |request| {
            let (notify, consumed) = (request & NOTIFY_MASK, request >> NOTIFY_BITS);
            let applies = notify == CqNotify::NextCompletion as u64
                || notify == CqNotify::SolicitedOnly as u64 && solicited;
            (applies && consumed < self.produced).then_some(0)
        };
        self.ring.control().fetch_update(Ordering::AcqRel, Ordering::Relaxed, due).is_ok()
    }

    /// Moves pending CQEs and the requested notification into another ring. False if that ring is too small.
    pub fn move_to(&self, other: &mut CompletionProducer) -> bool {
        let pending = self.pending();
        if pending > u64::from(other.slots()) {
            return false;
        }
        for index in self.produced - pending..self.produced {
            store_all::<CQE>(other.ring.slot_head(other.produced), load_all(self.ring.slot_head(index)));
            other.produced += 1;
        }
        other.ring.producer_index().store(other.produced, Ordering::Release);
        // The other ring counts its CQEs from zero, and none of those moved is a new one.
        let notify = self.ring.control().load(Ordering::Acquire) & NOTIFY_MASK;
        other.ring.control().store(notify, Ordering::Release);
        true
    }
}

impl CompletionConsumer {
    /// The application's side of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32) -> CompletionConsumer {
        CompletionConsumer { ring: Ring::new(words, CompletionProducer::layout(slots)), consumed: 0 }
    }

    /// The number of CQEs that the queue holds.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// A view of this ring.
    pub fn view(&self) -> CompletionView {
        CompletionView { words: self.ring.words().clone() }
    }

    /// Removes the oldest CQE.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<Completion> {
        if self.is_empty() {
            return None;
        }
        let words = load_all(self.ring.slot_head(self.consumed));
        self.consumed += 1;
        self.ring.consumer_index().store(self.consumed, Ordering::Release);
        Some(decode(words))
    }

    /// Removes the pending CQEs of a queue pair. The others stay in order.
    pub fn discard_qp(&mut self, queue_pair: Qpn) {
        let produced = self.ring.producer_index().load(Ordering::Acquire);
        let mut kept = produced;
        // The slots up to `produced` are the consumer's until it publishes its index.
        for index in (self.consumed..produced).rev() {
            let words = load_all(self.ring.slot_head(index));
            if decode(words).qpn != queue_pair {
                kept -= 1;
                store_all(self.ring.slot_head(kept), words);
            }
        }
        self.consumed = kept;
        self.ring.consumer_index().store(kept, Ordering::Release);
    }

    /// Whether no CQE is pending.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.ring.producer_index().load(Ordering::Acquire) == self.consumed
    }

    /// Requests one notification. Poll again afterwards: an earlier completion does not notify.
    pub fn request_notification(&self, notify: CqNotify) {
        // A request for solicited completions does not replace one for the next completion (IBA C11-29).
        let request =
            |before: u64| Some(self.consumed << NOTIFY_BITS | (before & NOTIFY_MASK).max(notify as u64));
        let _ = self.ring.control().fetch_update(Ordering::AcqRel, Ordering::Relaxed, request);
        fence(Ordering::SeqCst);
    }
}

/// The statuses by their numbers. A client library must not crash on a corrupt mapping: an unknown status becomes a
/// general error.
const STATUSES: [CompletionStatus; 32] = {
    let mut statuses = [CompletionStatus::GeneralError; 32];
    let mut index = 0;
    while index < CompletionStatus::ALL.len() {
        statuses[CompletionStatus::ALL[index] as usize] = CompletionStatus::ALL[index];
        index += 1;
    }
    statuses
};

#[inline]
fn encode(c: &Completion) -> [u64; CQE] {
    [
        c.wr_id,
        pair(
            u32::from(c.status as u8)
                | u32::from(c.opcode as u8) << 8
                | u32::from(c.flags.bits()) << 16
                | u32::from(c.service_level) << 24,
            // A success has no error, and a failure no route.
            c.vendor_error | u32::from(c.route.slid) | u32::from(c.route.dlid_path_bits) << 16,
        ),
        pair(c.byte_len, c.imm_data),
        pair(c.qpn.value(), c.src_qp.value()),
        c.timestamp,
    ]
}

#[inline(always)]
fn decode(words: [u64; CQE]) -> Completion {
    let [id, kind, sizes, pairs, timestamp] = words;
    let [status, operation, flags, service_level] = low(kind).to_le_bytes();
    let (vendor_error, route) = match status == CompletionStatus::Success as u8 {
        true => (0, high(kind)),
        false => (high(kind), 0),
    };
    Completion {
        wr_id: id,
        status: *STATUSES.get(usize::from(status)).unwrap_or(&CompletionStatus::GeneralError),
        opcode: *CompletionOpcode::ALL.get(usize::from(operation)).unwrap_or(&CompletionOpcode::Send),
        flags: CompletionFlags::from_bits_truncate(flags),
        service_level,
        vendor_error,
        route: ReceivedRoute { slid: route as u16, dlid_path_bits: (route >> 16) as u8 },
        byte_len: low(sizes),
        imm_data: high(sizes),
        qpn: Qpn::new(low(pairs)),
        src_qp: Qpn::new(high(pairs)),
        timestamp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    fn completion(id: u64) -> Completion {
        Completion {
            wr_id: id,
            status: CompletionStatus::RnrRetryExceededError,
            opcode: CompletionOpcode::ReceiveWriteWithImm,
            flags: CompletionFlags::IMMEDIATE | CompletionFlags::GRH,
            byte_len: 0x8000_0000,
            imm_data: 0xdead_beef,
            qpn: Qpn::new(0xabcdef),
            src_qp: Qpn::new(0x123456),
            service_level: 7,
            route: ReceivedRoute::default(),
            vendor_error: 42,
            timestamp: u64::MAX,
        }
    }

    #[test]
    fn completions_are_polled_in_order_and_overflow_is_reported() {
        let (mut producer, mut consumer) = completion_ring(2);
        producer.push(&completion(1)).unwrap();
        producer.push(&completion(2)).unwrap();
        assert_eq!(producer.push(&completion(3)), Err(completion(3)));
        assert_eq!(consumer.pop(), Some(completion(1)));
        producer.push(&completion(3)).unwrap();
        assert_eq!(consumer.pop(), Some(completion(2)));
        assert_eq!(consumer.pop(), Some(completion(3)));
        assert_eq!(consumer.pop(), None);
    }

    #[test]
    fn a_success_has_a_route_and_a_failure_has_a_reason() {
        let (mut producer, mut consumer) = completion_ring(2);
        let route = ReceivedRoute { slid: 0xbfff, dlid_path_bits: 127 };
        let (status, vendor_error) = (CompletionStatus::Success, 0);
        let datagram = Completion { status, vendor_error, route, ..completion(1) };
        producer.push(&datagram).unwrap();
        producer.push(&completion(2)).unwrap();
        assert_eq!([consumer.pop(), consumer.pop()], [Some(datagram), Some(completion(2))]);
    }

    #[test]
    fn the_completions_of_a_queue_pair_are_discarded_and_the_others_stay_in_order() {
        let (mut producer, mut consumer) = completion_ring(4);
        let of = |id, qpn| Completion { qpn: Qpn::new(qpn), ..completion(id) };
        for (id, qpn) in [(0, 7), (1, 7), (2, 8), (3, 7)] {
            producer.push(&of(id, qpn)).unwrap();
        }
        consumer.pop();
        let view = consumer.view();
        consumer.discard_qp(Qpn::new(7));
        assert!(!view.is_empty());
        producer.push(&of(4, 7)).unwrap();
        producer.push(&of(5, 8)).unwrap();
        let left: Vec<_> = core::iter::from_fn(|| consumer.pop()).map(|c| c.wr_id).collect();
        assert_eq!(left, [2, 4, 5]);
        consumer.discard_qp(Qpn::new(7));
        assert!(consumer.is_empty() && view.is_empty());
    }

    #[test]
    fn a_notification_is_claimed_once_and_solicited_does_not_replace_next() {
        let (mut producer, consumer) = completion_ring(2);
        producer.push(&completion(0)).unwrap();
        assert!(!producer.claim_notification(true));
        consumer.request_notification(CqNotify::SolicitedOnly);
        assert!(!producer.claim_notification(false));
        assert!(producer.claim_notification(true));
        assert!(!producer.claim_notification(true));
        consumer.request_notification(CqNotify::NextCompletion);
        consumer.request_notification(CqNotify::SolicitedOnly);
        assert!(producer.claim_notification(false));
    }

    #[test]
    fn a_completion_polled_before_the_request_does_not_notify() {
        let (mut producer, mut consumer) = completion_ring(2);
        producer.push(&completion(0)).unwrap();
        assert_eq!(consumer.pop(), Some(completion(0)));
        consumer.request_notification(CqNotify::NextCompletion);
        assert!(!producer.claim_notification(false));
        producer.push(&completion(1)).unwrap();
        assert!(producer.claim_notification(false));
    }

    #[test]
    fn a_resize_keeps_pending_completions_in_order() {
        let (mut old, mut consumer) = completion_ring(3);
        for id in 0..3 {
            old.push(&completion(id)).unwrap();
        }
        consumer.pop();
        let (mut small, _) = completion_ring(1);
        assert!(!old.move_to(&mut small));
        let (mut new, mut reader) = completion_ring(8);
        assert!(old.move_to(&mut new));
        assert_eq!(reader.pop().unwrap().wr_id, 1);
        assert_eq!(reader.pop().unwrap().wr_id, 2);
        assert_eq!(reader.pop(), None);
    }
}
