//! The send queue.
//!
//! A slot (WQE) is a header of eight words, followed by SGEs of two words each or by inline data. The HCA copies a
//! WQE once. The application may reuse the slot when the work request has completed.

use crate::ring::{Ring, high, load, load_all, low, pair, read_sges, store, store_all, write_sges};
use crate::sync::{AtomicU64, Ordering};
use crate::{DoorbellProducer, QueueFull, RingLayout, SharedWords};
use softhca_types::{
    AccessFlags, CompletionOpcode, CorruptRing, MemoryWindowBind, Operation, Payload, RemoteAddress,
    SendFlags, SendImmOrInvalidate, SendWorkRequest, Sge, UdDestination,
};
use softhca_wire::{ImmOrInvalidate, LocalKey, Qpn, QueueKey, RemoteKey};
use thiserror::Error;

const HEADER: usize = 8;

/// A work request that a queue cannot hold, or that the HCA cannot decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum InvalidWorkRequest {
    /// The work request has more SGEs than the queue pair allows.
    #[error("the work request has {sges} SGEs, the queue pair allows {limit}")]
    TooManySges { sges: usize, limit: usize },
    /// The work request has more inline data than the queue pair allows.
    #[error("the work request has {bytes} bytes of inline data, the queue pair allows {limit}")]
    InlineTooLong { bytes: usize, limit: usize },
    /// The queue is full.
    #[error(transparent)]
    Full(#[from] QueueFull),
    /// The opcode is unknown: only a broken client writes it.
    #[error("{0} is not a send opcode")]
    UnknownOpcode(u8),
}

/// The limits that determine the size of a WQE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WqeLimits {
    max_sge: usize,
    max_inline_data: usize,
}

impl WqeLimits {
    const fn layout(self, slots: u32) -> RingLayout {
        let gather = self.max_sge * 2;
        let inline = self.max_inline_data.div_ceil(8);
        RingLayout { slots, stride: (HEADER + if gather > inline { gather } else { inline }) as u32 }
    }
}

/// The application's side of a send queue.
pub struct SendProducer {
    ring: Ring,
    limits: WqeLimits,
    produced: u64,
}

/// The HCA's side of a send queue.
pub struct SendConsumer {
    ring: Ring,
    limits: WqeLimits,
    dequeued: u64,
    retired: u64,
}

/// Creates a send queue on the heap of this process.
pub fn send_ring(slots: u32, max_sge: usize, max_inline_data: usize) -> (SendProducer, SendConsumer) {
    let words = SharedWords::heap(SendProducer::layout(slots, max_sge, max_inline_data).words());
    (
        SendProducer::new(words.clone(), slots, max_sge, max_inline_data),
        SendConsumer::new(words, slots, max_sge, max_inline_data),
    )
}

impl SendProducer {
    /// The layout of a ring with these limits.
    pub const fn layout(slots: u32, max_sge: usize, max_inline_data: usize) -> RingLayout {
        WqeLimits { max_sge, max_inline_data }.layout(slots)
    }

    /// The application's side of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32, max_sge: usize, max_inline_data: usize) -> SendProducer {
        let limits = WqeLimits { max_sge, max_inline_data };
        let ring = Ring::new(words, limits.layout(slots));
        SendProducer { ring, limits, produced: 0 }
    }

    /// The number of WQEs that the queue holds.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// Writes a WQE. The HCA sees it after [`SendProducer::publish`].
    #[inline]
    pub fn enqueue(&mut self, request: &SendWorkRequest<'_>) -> Result<(), InvalidWorkRequest> {
        let slots = self.ring.slots();
        let used = self.produced.wrapping_sub(self.ring.consumer_index().load(Ordering::Acquire));
        if used >= u64::from(slots) {
            return Err(QueueFull { slots }.into());
        }
        let WqeLimits { max_sge, max_inline_data } = self.limits;
        match request.payload {
            Payload::Gather(sg_list) if sg_list.len() > max_sge => {
                return Err(InvalidWorkRequest::TooManySges { sges: sg_list.len(), limit: max_sge });
            }
            Payload::Inline(bytes) if bytes.len() > max_inline_data => {
                return Err(InvalidWorkRequest::InlineTooLong { bytes: bytes.len(), limit: max_inline_data });
            }
            _ => {}
        }
        let slot = self.ring.slot(self.produced);
        store_all(self.ring.slot_head(self.produced), encode(request));
        match request.payload {
            Payload::Gather(sg_list) => write_sges(&slot[HEADER..], sg_list),
            Payload::Inline(bytes) => write_inline(&slot[HEADER..], bytes),
        }
        self.produced += 1;
        Ok(())
    }

    /// Makes all written WQEs visible to the HCA.
    #[inline]
    pub fn publish(&mut self) {
        self.ring.producer_index().store(self.produced, Ordering::Release);
    }

    /// Discards WQEs that are written but not published.
    #[inline]
    pub fn discard_unpublished(&mut self) {
        self.produced = self.ring.producer_index().load(Ordering::Relaxed);
    }

    /// Rings the doorbell for `qpn`, the queue pair of this queue, unless its last doorbell is still pending.
    #[inline]
    pub fn ring(&self, doorbell: &DoorbellProducer, qpn: Qpn) {
        doorbell.ring(qpn, self.ring.control());
    }
}

impl SendConsumer {
    /// The HCA's side of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32, max_sge: usize, max_inline_data: usize) -> SendConsumer {
        let limits = WqeLimits { max_sge, max_inline_data };
        let ring = Ring::new(words, limits.layout(slots));
        SendConsumer { ring, limits, dequeued: 0, retired: 0 }
    }

    /// Takes over the HCA's side of a ring whose HCA is gone. WQEs that the HCA did not retire are pending again.
    pub fn resume(words: SharedWords, slots: u32, max_sge: usize, max_inline_data: usize) -> SendConsumer {
        let mut consumer = SendConsumer::new(words, slots, max_sge, max_inline_data);
        consumer.retired = consumer.ring.consumer_index().load(Ordering::Acquire);
        consumer.dequeued = consumer.retired;
        consumer
    }

    /// The number of WQEs that the queue holds.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// The most SGEs of a WQE.
    pub fn max_sge(&self) -> usize {
        self.limits.max_sge
    }

    /// The most bytes of inline data in a WQE.
    pub fn max_inline_data(&self) -> usize {
        self.limits.max_inline_data
    }

    /// Whether a WQE is pending.
    #[inline]
    pub fn has_pending(&self) -> Result<bool, CorruptRing> {
        Ok(self.ring.checked_producer_index(self.dequeued, self.retired)? > self.dequeued)
    }

    /// Copies the next WQE out of the ring. Replaces the contents of `sg_list` by its SGEs and of `inline` by its inline
    /// data; the returned work request borrows from them.
    #[inline]
    pub fn dequeue<'a>(
        &mut self,
        sg_list: &'a mut alloc::vec::Vec<Sge>,
        inline: &'a mut alloc::vec::Vec<u8>,
    ) -> Result<Option<Result<SendWorkRequest<'a>, InvalidWorkRequest>>, CorruptRing> {
        if !self.has_pending()? {
            return Ok(None);
        }
        let slot = self.ring.slot(self.dequeued);
        self.dequeued += 1;
        let header = load_all(self.ring.slot_head(self.dequeued - 1));
        sg_list.clear();
        inline.clear();
        let (flags, size) = (flags_of(header[1]), high(header[1]) as usize);
        if flags.contains(SendFlags::INLINE) {
            read_inline(&slot[HEADER..], size.min(self.limits.max_inline_data), inline);
            Ok(Some(decode(header, flags, Payload::Inline(inline))))
        } else {
            let count = size.min(self.limits.max_sge);
            read_sges(&slot[HEADER..], count, sg_list);
            Ok(Some(decode(header, flags, Payload::Gather(sg_list))))
        }
    }

    /// As [`SendConsumer::dequeue`], if the next WQE is a SEND or a WRITE without immediate data that has inline data or at
    /// most one SGE. Leaves all others.
    #[inline]
    pub fn dequeue_simple(
        &mut self,
        sg_list: &mut alloc::vec::Vec<Sge>,
        inline: &mut alloc::vec::Vec<u8>,
    ) -> Option<SimpleRequest> {
        if !self.has_pending().ok()? {
            return None;
        }
        let slot = self.ring.slot(self.dequeued);
        let [wr_id, control, address, keys] = load_all(slot.first_chunk()?);
        let (flags, size) = (flags_of(control), high(control) as usize);
        let remote = match control as u8 {
            SEND => None,
            WRITE => Some(RemoteAddress { address, rkey: RemoteKey(low(keys)) }),
            _ => return None,
        };
        sg_list.clear();
        inline.clear();
        let length = if flags.contains(SendFlags::INLINE) {
            read_inline(&slot[HEADER..], size.min(self.limits.max_inline_data), inline);
            inline.len() as u32
        } else {
            match size.min(self.limits.max_sge) {
                0 => 0,
                1 => {
                    let [address, second] = load_all(slot[HEADER..].first_chunk()?);
                    sg_list.push(Sge { address, length: low(second), lkey: LocalKey(high(second)) });
                    low(second)
                }
                _ => return None,
            }
        };
        self.dequeued += 1;
        Some(SimpleRequest { wr_id, remote, flags, call_site: (control >> 16) as u16, length })
    }

    /// The id of the first pending WQE whose SGEs have this key. The application may write WQEs meanwhile.
    pub fn find_pending(&self, lkey: LocalKey) -> Option<u64> {
        let end = self.ring.checked_producer_index(self.dequeued, self.retired).ok()?;
        (self.dequeued..end).find(|index| self.uses(*index, lkey)).map(|index| self.id(index))
    }

    /// The id of a retired WQE whose SGEs have this key. `unpolled` has the ids of the completions that the application has
    /// not polled, the newest first: WQEs before the oldest of them are not considered, nor are overwritten ones.
    pub fn find_retired(&self, lkey: LocalKey, unpolled: &mut dyn Iterator<Item = u64>) -> Option<u64> {
        let end = self.ring.checked_producer_index(self.dequeued, self.retired).ok()?;
        let first = end.saturating_sub(self.slots().into());
        let mut unpolled = unpolled.peekable();
        for index in (first..self.retired).rev() {
            unpolled.peek()?;
            let id = self.id(index);
            // A WQE without a completion has that of the next one.
            unpolled.next_if_eq(&id);
            if self.uses(index, lkey) {
                return Some(id);
            }
        }
        None
    }

    fn id(&self, index: u64) -> u64 {
        load(&self.ring.slot(index)[0])
    }

    /// Whether the SGEs of a WQE have this key.
    fn uses(&self, index: u64, lkey: LocalKey) -> bool {
        let slot = self.ring.slot(index);
        let control = load(&slot[1]);
        let count = (high(control) as usize).min(self.limits.max_sge);
        let mut keys = slot[HEADER..].chunks_exact(2).take(count).map(|words| high(load(&words[1])));
        !flags_of(control).contains(SendFlags::INLINE) && keys.any(|key| key == lkey.0)
    }

    /// Returns the slot of the oldest dequeued WQE to the application.
    #[inline]
    pub fn retire(&mut self) {
        debug_assert!(self.retired < self.dequeued, "a WQE is dequeued before it is retired");
        self.retired += 1;
        self.ring.consumer_index().store(self.retired, Ordering::Release);
    }

    /// Discards all WQEs, dequeued or pending: the queue pair was reset.
    pub fn reset(&mut self) {
        self.dequeued = self.ring.producer_index().load(Ordering::Acquire);
        self.retired = self.dequeued;
        self.ring.consumer_index().store(self.retired, Ordering::Release);
    }

    /// Clears the doorbell flag, so that the next post rings again. Poll the ring afterwards.
    pub fn clear_doorbell(&self) {
        // Reads the flag of a producer that found it set, and with it what that producer published.
        self.ring.control().swap(0, Ordering::AcqRel);
    }
}

/// A SEND, or a WRITE if it has a remote address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimpleRequest {
    /// The ID of the work request.
    pub wr_id: u64,
    /// The target of a WRITE.
    pub remote: Option<RemoteAddress>,
    /// Its flags.
    pub flags: SendFlags,
    /// The number of the place in the program that posted it.
    pub call_site: u16,
    /// The bytes of its data.
    pub length: u32,
}

fn write_inline(words: &[AtomicU64], bytes: &[u8]) {
    let (full, rest) = bytes.as_chunks::<8>();
    for (word, bytes) in words.iter().zip(full) {
        store(word, u64::from_le_bytes(*bytes));
    }
    if let (Some(word), false) = (words.get(full.len()), rest.is_empty()) {
        let mut value = [0; 8];
        value[..rest.len()].copy_from_slice(rest);
        store(word, u64::from_le_bytes(value));
    }
}

/// Replaces the contents of `into` by `length` bytes.
fn read_inline(words: &[AtomicU64], length: usize, into: &mut alloc::vec::Vec<u8>) {
    into.clear();
    for word in &words[..length.div_ceil(8).min(words.len())] {
        into.extend_from_slice(&load(word).to_le_bytes());
    }
    into.truncate(length);
}

/// The bits of an opcode above those of its [`CompletionOpcode`]: immediate data, or a key to invalidate.
const IMMEDIATE: u8 = 1 << 4;
const INVALIDATE: u8 = 2 << 4;
const SEND: u8 = CompletionOpcode::Send as u8;
const SEND_IMMEDIATE: u8 = SEND | IMMEDIATE;
const SEND_INVALIDATE: u8 = SEND | INVALIDATE;
const WRITE: u8 = CompletionOpcode::Write as u8;
const WRITE_IMMEDIATE: u8 = WRITE | IMMEDIATE;
const READ: u8 = CompletionOpcode::Read as u8;
const COMPARE_SWAP: u8 = CompletionOpcode::CompareSwap as u8;
const FETCH_ADD: u8 = CompletionOpcode::FetchAdd as u8;
const BIND_WINDOW: u8 = CompletionOpcode::BindMemoryWindow as u8;
const LOCAL_INVALIDATE: u8 = CompletionOpcode::LocalInvalidate as u8;

/// The words: wr_id; opcode, flags, call site and size; address; rkey and immediate data; two operands; two words of addressing.
fn encode(request: &SendWorkRequest<'_>) -> [u64; HEADER] {
    let (imm_or_invalidate, mut word) = request.operation.imm_or_invalidate();
    let mut addressing = [
        pair(request.ud.ah, request.ud.remote_qpn.value()),
        pair(request.ud.remote_qkey.0, request.remote_srqn),
    ];
    let (remote, operands) = match request.operation {
        Operation::Send(_) => (RemoteAddress::default(), [0; 2]),
        Operation::Write { remote, .. } | Operation::Read { remote } => (remote, [0; 2]),
        Operation::CompareSwap { remote, compare, swap } => (remote, [swap, compare]),
        Operation::FetchAdd { remote, add } => (remote, [add, 0]),
        Operation::BindMemoryWindow(bind) => {
            addressing = [pair(bind.mr_lkey.0, bind.access.bits()), 0];
            word = bind.new_rkey.0;
            (RemoteAddress { address: bind.address, rkey: bind.mw_rkey }, [bind.length, 0])
        }
        Operation::LocalInvalidate { rkey } => (RemoteAddress { address: 0, rkey }, [0; 2]),
    };
    let kind = request.operation.completion_opcode() as u8
        | match imm_or_invalidate {
            ImmOrInvalidate::None => 0,
            ImmOrInvalidate::Immediate => IMMEDIATE,
            ImmOrInvalidate::Invalidate => INVALIDATE,
        };
    let (inline, size) = match request.payload {
        Payload::Gather(sg_list) => (SendFlags::empty(), sg_list.len()),
        Payload::Inline(bytes) => (SendFlags::INLINE, bytes.len()),
    };
    let flags = (request.flags - SendFlags::INLINE) | inline;
    let site = u32::from(request.call_site) << 16;
    let control = pair(u32::from(kind) | u32::from(flags.bits()) << 8 | site, size as u32);
    let keys = pair(remote.rkey.0, word);
    [request.wr_id, control, remote.address, keys, operands[0], operands[1], addressing[0], addressing[1]]
}

fn flags_of(control: u64) -> SendFlags {
    SendFlags::from_bits_truncate((control >> 8) as u8)
}

#[inline]
fn decode<'a>(
    header: [u64; HEADER],
    flags: SendFlags,
    payload: Payload<'a>,
) -> Result<SendWorkRequest<'a>, InvalidWorkRequest> {
    let [id, control, address, keys, first, second, route, extra] = header;
    let remote = RemoteAddress { address, rkey: RemoteKey(low(keys)) };
    let word = high(keys);
    let operation = match control as u8 {
        SEND => Operation::Send(SendImmOrInvalidate::None),
        SEND_IMMEDIATE => Operation::Send(SendImmOrInvalidate::Immediate(word)),
        SEND_INVALIDATE => Operation::Send(SendImmOrInvalidate::Invalidate(RemoteKey(word))),
        WRITE => Operation::Write { remote, imm_data: None },
        WRITE_IMMEDIATE => Operation::Write { remote, imm_data: Some(word) },
        READ => Operation::Read { remote },
        COMPARE_SWAP => Operation::CompareSwap { remote, swap: first, compare: second },
        FETCH_ADD => Operation::FetchAdd { remote, add: first },
        BIND_WINDOW => Operation::BindMemoryWindow(MemoryWindowBind {
            mw_rkey: remote.rkey,
            new_rkey: RemoteKey(word),
            mr_lkey: LocalKey(low(route)),
            address,
            length: first,
            access: AccessFlags::from_bits_truncate(high(route)),
        }),
        LOCAL_INVALIDATE => Operation::LocalInvalidate { rkey: remote.rkey },
        other => return Err(InvalidWorkRequest::UnknownOpcode(other)),
    };
    let datagram = match operation {
        Operation::BindMemoryWindow(_) => UdDestination::default(),
        _ => UdDestination {
            ah: low(route),
            remote_qpn: Qpn::new(high(route)),
            remote_qkey: QueueKey(low(extra)),
        },
    };
    let call_site = (control >> 16) as u16;
    Ok(SendWorkRequest {
        wr_id: id,
        operation,
        flags,
        payload,
        ud: datagram,
        remote_srqn: high(extra),
        call_site,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    fn operation() -> impl Strategy<Value = Operation> {
        let remote = || {
            (any::<u64>(), any::<u32>())
                .prop_map(|(address, key)| RemoteAddress { address, rkey: RemoteKey(key) })
        };
        prop_oneof![
            Just(Operation::Send(SendImmOrInvalidate::None)),
            any::<u32>().prop_map(|v| Operation::Send(SendImmOrInvalidate::Immediate(v))),
            any::<u32>().prop_map(|v| Operation::Send(SendImmOrInvalidate::Invalidate(RemoteKey(v)))),
            (remote(), any::<Option<u32>>())
                .prop_map(|(remote, imm_data)| Operation::Write { remote, imm_data }),
            remote().prop_map(|remote| Operation::Read { remote }),
            (remote(), any::<u64>(), any::<u64>())
                .prop_map(|(remote, compare, swap)| Operation::CompareSwap { remote, compare, swap }),
            (remote(), any::<u64>()).prop_map(|(remote, add)| Operation::FetchAdd { remote, add }),
            any::<u32>().prop_map(|key| Operation::LocalInvalidate { rkey: RemoteKey(key) }),
            (remote(), any::<u32>(), any::<u32>(), any::<u64>(), 0u32..32).prop_map(
                |(remote, new_key, region, length, access)| Operation::BindMemoryWindow(MemoryWindowBind {
                    mw_rkey: remote.rkey,
                    new_rkey: RemoteKey(new_key),
                    mr_lkey: LocalKey(region),
                    address: remote.address,
                    length,
                    access: AccessFlags::from_bits_truncate(access),
                })
            ),
        ]
    }

    proptest! {
        #[test]
        fn the_hca_dequeues_what_the_application_enqueued(
            id: u64,
            operation in operation(),
            call_site: u16,
            entries in prop::collection::vec((any::<u64>(), any::<u32>(), any::<u32>()), 0..4),
            inline in prop::option::of(prop::collection::vec(any::<u8>(), 0..40)),
        ) {
            let entries: Vec<Sge> = entries
                .into_iter()
                .map(|(address, length, key)| Sge { address, length, lkey: LocalKey(key) })
                .collect();
            let (mut producer, mut consumer) = send_ring(2, 4, 40);
            let mut request = SendWorkRequest::new(id, operation, &entries);
            request.call_site = call_site;
            if let Some(bytes) = &inline {
                request.payload = Payload::Inline(bytes);
                request.flags |= SendFlags::INLINE;
            }
            producer.enqueue(&request).unwrap();
            let (mut e, mut i) = (Vec::new(), Vec::new());
            prop_assert_eq!(consumer.dequeue(&mut e, &mut i).unwrap(), None);
            producer.publish();
            if let Some(simple) = consumer.dequeue_simple(&mut e, &mut i) {
                let (is_inline, size) = (inline.is_some(), entries.first().map_or(0, |sge| sge.length));
                let data = if is_inline { Payload::Inline(&i) } else { Payload::Gather(&e) };
                prop_assert!(is_inline || entries.len() < 2);
                prop_assert_eq!(data, request.payload);
                let remote = match operation {
                    Operation::Write { remote, imm_data: None } => Some(remote),
                    _ => None,
                };
                prop_assert_eq!(remote.is_none(), operation == Operation::Send(SendImmOrInvalidate::None));
                let length = inline.as_ref().map_or(size, |bytes| bytes.len() as u32);
                let flags = request.flags;
                prop_assert_eq!(simple, SimpleRequest { wr_id: id, remote, flags, call_site, length });
                return Ok(());
            }
            prop_assert_eq!(consumer.dequeue(&mut e, &mut i).unwrap(), Some(Ok(request)));
        }
    }

    #[test]
    fn a_pending_wqe_is_found_by_the_key_of_its_memory() {
        let (mut producer, mut consumer) = send_ring(4, 2, 16);
        let sge = |key| Sge { address: 0, length: 8, lkey: LocalKey(key) };
        let lists = [[sge(1), sge(2)], [sge(3), sge(4)]];
        for (id, list) in lists.iter().enumerate() {
            let send = Operation::Send(SendImmOrInvalidate::None);
            producer.enqueue(&SendWorkRequest::new(10 + id as u64, send, list)).unwrap();
        }
        assert_eq!(consumer.find_pending(LocalKey(4)), None, "it is not published");
        producer.publish();
        assert_eq!([2, 4, 5].map(|key| consumer.find_pending(LocalKey(key))), [Some(10), Some(11), None]);
        let (mut e, mut i) = (Vec::new(), Vec::new());
        consumer.dequeue(&mut e, &mut i).unwrap().unwrap().unwrap();
        assert_eq!(consumer.find_pending(LocalKey(2)), None, "it is not pending any more");
        let retired = |consumer: &SendConsumer, unpolled: &[u64]| {
            consumer.find_retired(LocalKey(2), &mut unpolled.iter().copied())
        };
        assert_eq!(retired(&consumer, &[10]), None, "it has not completed");
        consumer.retire();
        assert_eq!(retired(&consumer, &[10]), Some(10));
        assert_eq!(retired(&consumer, &[]), None, "its completion is polled");
    }

    #[test]
    fn a_slot_is_free_again_when_its_wqe_is_retired() {
        let (mut producer, mut consumer) = send_ring(1, 1, 0);
        let request = SendWorkRequest::new(7, Operation::Send(SendImmOrInvalidate::None), &[]);
        producer.enqueue(&request).unwrap();
        producer.publish();
        let (mut e, mut i) = (Vec::new(), Vec::new());
        consumer.dequeue(&mut e, &mut i).unwrap().unwrap().unwrap();
        assert_eq!(producer.enqueue(&request), Err(QueueFull { slots: 1 }.into()));
        consumer.retire();
        producer.enqueue(&request).unwrap();
    }

    #[test]
    fn an_index_out_of_range_is_an_error() {
        let words = SharedWords::heap(SendProducer::layout(4, 1, 0).words());
        let mut consumer = SendConsumer::new(words.clone(), 4, 1, 0);
        words[0].store(5, Ordering::Relaxed);
        let (mut e, mut i) = (Vec::new(), Vec::new());
        assert_eq!(consumer.dequeue(&mut e, &mut i), Err(CorruptRing { index: 5, min: 0, max: 4 }));
    }
}
