//! The completion queue.
//!
//! The card produces, the application consumes. The control word says what the application wants to be
//! woken for; the card clears it when it wakes.

use crate::ring::{Ring, high, load, low, pair, store};
use crate::{RingLayout, SharedWords};
use alloc::boxed::Box;
use bitflags::bitflags;
use core::sync::atomic::{Ordering, fence};
use softhca_wire::Qpn;

const STRIDE: u32 = 8;

/// Declares an enum whose values have a number in verbs and a name in logs and scenarios.
macro_rules! named_enum {
    ($(#[$meta:meta])* pub enum $type:ident { $($variant:ident = $number:literal, $name:literal;)* }) => {
        $(#[$meta])*
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum $type {
            $(#[cfg_attr(feature = "serde", serde(rename = $name))] $variant = $number,)*
        }

        impl $type {
            const ALL: &[$type] = &[$($type::$variant,)*];

            /// The name in logs and scenarios.
            pub const fn name(self) -> &'static str {
                match self {
                    $($type::$variant => $name,)*
                }
            }

            /// The value with this name.
            pub fn from_name(name: &str) -> Option<$type> {
                $type::ALL.iter().copied().find(|value| value.name() == name)
            }
        }
    };
}

named_enum! {
    /// How a work request ended. The numbers are those of `enum ibv_wc_status`.
    #[allow(missing_docs, reason = "the names are those of every verbs text")]
    pub enum CompletionStatus {
        Success = 0, "success";
        LocalLengthError = 1, "local-length";
        LocalQpOperationError = 2, "local-qp-operation";
        LocalProtectionError = 4, "local-protection";
        WrFlushError = 5, "flushed";
        MwBindError = 6, "window-bind";
        BadResponseError = 7, "bad-response";
        LocalAccessError = 8, "local-access";
        RemoteInvalidRequestError = 9, "remote-invalid-request";
        RemoteAccessError = 10, "remote-access";
        RemoteOperationError = 11, "remote-operation";
        RetryExceededError = 12, "retry-exceeded";
        RnrRetryExceededError = 13, "rnr-retry-exceeded";
        RemoteAbortedError = 16, "remote-abort";
        FatalError = 19, "fatal";
        GeneralError = 21, "general";
    }
}

impl CompletionStatus {
    /// Whether the work request was done.
    pub const fn is_success(self) -> bool {
        matches!(self, CompletionStatus::Success)
    }
}

named_enum! {
    /// What completed.
    #[allow(missing_docs, reason = "the names are those of every verbs text")]
    pub enum CompletionOpcode {
        Send = 0, "send";
        Write = 1, "write";
        Read = 2, "read";
        CompareSwap = 3, "compare-swap";
        FetchAdd = 4, "fetch-add";
        BindMemoryWindow = 5, "bind-window";
        LocalInvalidate = 6, "local-invalidate";
        Receive = 7, "receive";
        ReceiveWriteWithImm = 8, "receive-write-immediate";
    }
}

impl CompletionOpcode {
    /// Whether this is the receiving side of something.
    pub const fn is_receive(self) -> bool {
        matches!(self, CompletionOpcode::Receive | CompletionOpcode::ReceiveWriteWithImm)
    }
}

bitflags! {
    /// What else a completion says.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct CompletionFlags: u8 {
        /// A global routing header stands before the data.
        const GRH = 1;
        /// The immediate data is valid.
        const IMMEDIATE = 1 << 1;
        /// The immediate field names a key that was invalidated.
        const INVALIDATED = 1 << 2;
        /// The sender asked for an event.
        const SOLICITED = 1 << 3;
        /// The datagram came in an IPv4 packet: its header is the last half of what stands before the data.
        const IPV4 = 1 << 4;
    }
}

/// A completed work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The work request's id.
    pub wr_id: u64,
    /// How it ended.
    pub status: CompletionStatus,
    /// What it was. Not to be relied on unless it succeeded.
    pub opcode: CompletionOpcode,
    /// Which fields are valid.
    pub flags: CompletionFlags,
    /// Bytes transferred.
    pub byte_len: u32,
    /// Immediate data, or the key that was invalidated.
    pub imm_data: u32,
    /// The local queue pair.
    pub qpn: Qpn,
    /// The sender, for datagrams.
    pub src_qp: Qpn,
    /// The service level of a datagram.
    pub service_level: u8,
    /// Why it failed, in the card's own words: a reason code.
    pub vendor_error: u32,
    /// When, in the card's nanoseconds.
    pub timestamp: u64,
}

/// What the application wants to be woken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum CqNotify {
    /// Completions that the sender solicited, and errors.
    SolicitedOnly = 1,
    /// Every completion.
    NextCompletion = 2,
}

/// The card's end.
pub struct CompletionProducer {
    ring: Ring,
    produced: u64,
    /// Called after every completion: the consumer may sleep in another process.
    notifier: Option<Box<dyn Fn() + Send + Sync>>,
}

/// The application's end.
pub struct CompletionConsumer {
    ring: Ring,
    consumed: u64,
}

/// A completion queue on the heap of this process.
pub fn completion_ring(slots: u32) -> (CompletionProducer, CompletionConsumer) {
    let words = SharedWords::heap(CompletionProducer::layout(slots).words());
    (CompletionProducer::new(words.clone(), slots), CompletionConsumer::new(words, slots))
}

impl CompletionProducer {
    /// The ring's shape.
    pub const fn layout(slots: u32) -> RingLayout {
        RingLayout { slots, stride: STRIDE }
    }

    /// The card's end of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32) -> CompletionProducer {
        CompletionProducer { ring: Ring::new(words, Self::layout(slots)), produced: 0, notifier: None }
    }

    /// The card's end of a ring whose card is gone: goes on where that one stopped.
    pub fn resume(words: SharedWords, slots: u32) -> CompletionProducer {
        let mut producer = CompletionProducer::new(words, slots);
        producer.produced = producer.ring.producer_index().load(Ordering::Acquire);
        producer
    }

    /// Calls `tell` after every completion that is added.
    pub fn with_notifier(mut self, tell: impl Fn() + Send + Sync + 'static) -> CompletionProducer {
        self.notifier = Some(Box::new(tell));
        self
    }

    /// How many completions may wait.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// How many completions wait to be polled. A consumer that lies only hurts itself.
    #[inline]
    pub fn pending(&self) -> u64 {
        let consumed = self.ring.consumer_index().load(Ordering::Acquire).min(self.produced);
        self.produced - consumed
    }

    /// Adds a completion, or gives it back if the queue is full.
    #[inline]
    pub fn push(&mut self, completion: &Completion) -> Result<(), Completion> {
        if self.pending() >= u64::from(self.ring.slots()) {
            return Err(*completion);
        }
        for (word, value) in self.ring.slot(self.produced).iter().zip(encode(completion)) {
            store(word, value);
        }
        self.produced += 1;
        self.ring.producer_index().store(self.produced, Ordering::Release);
        if let Some(tell) = &self.notifier {
            tell();
        }
        Ok(())
    }

    /// Whether the application is to be woken for a completion; if so the wish is used up.
    #[inline]
    pub fn claim_notification(&self, solicited: bool) -> bool {
        fence(Ordering::SeqCst);
        let control = self.ring.control();
        let wanted = control.load(Ordering::Relaxed);
        let due = wanted == CqNotify::NextCompletion as u64
            || wanted == CqNotify::SolicitedOnly as u64 && solicited;
        due && control.swap(0, Ordering::AcqRel) != 0
    }

    /// Moves everything that waits, and the wish to be woken, into a new ring. False if it has too few slots.
    pub fn move_to(&self, other: &mut CompletionProducer) -> bool {
        let waiting = self.pending();
        if waiting > u64::from(other.slots()) {
            return false;
        }
        for index in self.produced - waiting..self.produced {
            for (to, from) in other.ring.slot(other.produced).iter().zip(self.ring.slot(index)) {
                store(to, load(from));
            }
            other.produced += 1;
        }
        other.ring.producer_index().store(other.produced, Ordering::Release);
        other.ring.control().store(self.ring.control().load(Ordering::Acquire), Ordering::Release);
        true
    }
}

impl CompletionConsumer {
    /// The application's end of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32) -> CompletionConsumer {
        CompletionConsumer { ring: Ring::new(words, CompletionProducer::layout(slots)), consumed: 0 }
    }

    /// How many completions may wait.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// Takes the oldest completion.
    #[inline]
    pub fn pop(&mut self) -> Option<Completion> {
        if self.is_empty() {
            return None;
        }
        let mut words = [0; STRIDE as usize];
        for (value, word) in words.iter_mut().zip(self.ring.slot(self.consumed)) {
            *value = load(word);
        }
        self.consumed += 1;
        self.ring.consumer_index().store(self.consumed, Ordering::Release);
        Some(decode(words))
    }

    /// Whether nothing waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.ring.producer_index().load(Ordering::Acquire) == self.consumed
    }

    /// Asks to be woken once. Poll again afterwards: what came before the wish does not wake.
    pub fn request_notification(&self, notify: CqNotify) {
        // "Solicited" does not weaken an earlier wish for everything (IBA C11-29).
        self.ring.control().fetch_max(notify as u64, Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }
}

fn encode(c: &Completion) -> [u64; STRIDE as usize] {
    [
        c.wr_id,
        pair(
            u32::from(c.status as u8)
                | u32::from(c.opcode as u8) << 8
                | u32::from(c.flags.bits()) << 16
                | u32::from(c.service_level) << 24,
            c.vendor_error,
        ),
        pair(c.byte_len, c.imm_data),
        pair(c.qpn.value(), c.src_qp.value()),
        c.timestamp,
        0,
        0,
        0,
    ]
}

/// The words come from the card, yet a client library must not crash on a broken mapping: unknown numbers
/// become a general error.
fn decode(words: [u64; STRIDE as usize]) -> Completion {
    let [id, kind, sizes, pairs, timestamp, ..] = words;
    let [status, operation, flags, service_level] = low(kind).to_le_bytes();
    Completion {
        wr_id: id,
        status: CompletionStatus::ALL
            .iter()
            .copied()
            .find(|s| *s as u8 == status)
            .unwrap_or(CompletionStatus::GeneralError),
        opcode: *CompletionOpcode::ALL.get(usize::from(operation)).unwrap_or(&CompletionOpcode::Send),
        flags: CompletionFlags::from_bits_truncate(flags),
        service_level,
        vendor_error: high(kind),
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
            vendor_error: 42,
            timestamp: u64::MAX,
        }
    }

    #[test]
    fn completions_come_out_as_they_went_in_and_overflow_is_told() {
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
    fn a_notification_is_claimed_once_and_solicited_does_not_weaken_next() {
        let (producer, consumer) = completion_ring(2);
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
    fn a_resize_keeps_what_waits_in_order() {
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
