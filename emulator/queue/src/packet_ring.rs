//! A ring of packets between two processes: one sends, the other receives. Packets are copied in and out, so that neither
//! process can change what the other has read.

use crate::sync::{AtomicU64, Ordering, fence};
use crate::{MemoryBlock, SharedWords};
use alloc::sync::Arc;
use softhca_types::CorruptRing;

/// The words before the bytes, each in a cache line of its own.
const PRODUCER_INDEX: usize = 0;
const CONSUMER_INDEX: usize = 8;
/// Set while the consumer sleeps.
const ASLEEP: usize = 16;
/// Set while the producer waits for room.
const BLOCKED: usize = 24;
const CONTROL_WORDS: usize = 32;
/// Entries are aligned to this. The first eight bytes of an entry are its header.
const ALIGNMENT: u64 = 16;
const HEADER: u64 = 16;
/// The length of an entry that fills the rest of the ring: the next one begins at its start.
const PADDING: u32 = u32::MAX;
/// An empty ring begins again once this many of its bytes were used. These bytes are in the caches of both processes,
/// and pages that no entry has reached take no memory.
const REUSED: u64 = 64 << 10;

/// Packets of one size with one addressing; the last may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketChunk {
    /// The bytes of all packets.
    pub length: usize,
    /// The bytes of each packet but the last.
    pub segment_size: usize,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// Which address of the host the packets are sent from and to: 0 or 1.
    pub address: u8,
}

/// The memory of a ring.
#[derive(Clone)]
pub struct PacketRing {
    words: SharedWords,
    memory: Arc<MemoryBlock>,
    /// Offset of the bytes in the memory.
    offset: u64,
    capacity: u64,
}

impl PacketRing {
    /// The words of a ring with room for `capacity` bytes.
    pub const fn words(capacity: usize) -> usize {
        CONTROL_WORDS + capacity / 8
    }

    /// The ring in `words`, which are the same memory as those of `memory` from `offset` on.
    ///
    /// # Panics
    /// If the memory is too short, or `capacity` is no power of two.
    pub fn new(words: SharedWords, memory: Arc<MemoryBlock>, offset: usize, capacity: usize) -> PacketRing {
        assert!(
            capacity.is_power_of_two() && words.len() >= Self::words(capacity),
            "a ring of {capacity} bytes"
        );
        let offset = (offset + CONTROL_WORDS * 8) as u64;
        assert!(offset + capacity as u64 <= memory.len() as u64, "a ring of {capacity} bytes");
        PacketRing { words, memory, offset, capacity: capacity as u64 }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.words[index]
    }

    fn at(&self, index: u64) -> u64 {
        self.offset + (index & (self.capacity - 1))
    }

    fn header(&self, index: u64) -> u64 {
        self.memory.load(self.at(index)).unwrap_or(0)
    }
}

/// The bytes that an entry occupies.
const fn entry_size(length: u64) -> u64 {
    (HEADER + length).next_multiple_of(ALIGNMENT)
}

/// The sending side.
pub struct PacketProducer {
    ring: PacketRing,
    next: u64,
    consumed: u64,
}

impl PacketProducer {
    /// The only producer of a ring. It continues where an earlier one ended.
    pub fn new(ring: PacketRing) -> PacketProducer {
        let [next, consumed] =
            [PRODUCER_INDEX, CONSUMER_INDEX].map(|index| ring.word(index).load(Ordering::Acquire));
        let is_valid = next.wrapping_sub(consumed) <= ring.capacity && next % ALIGNMENT == 0;
        // The other process can have changed them: what it reads then is no concern of this one.
        let (next, consumed) = if is_valid { (next, consumed) } else { (0, 0) };
        PacketProducer { ring, next, consumed }
    }

    /// The bytes of packets that fit into the next entry.
    pub fn room(&mut self) -> usize {
        let PacketRing { capacity, .. } = self.ring;
        let consumed = self.ring.word(CONSUMER_INDEX).load(Ordering::Acquire);
        // A consumer that claims to have read what was never sent gets nothing more.
        if consumed <= self.next && self.next - consumed <= capacity {
            self.consumed = self.consumed.max(consumed);
        }
        let free = capacity - (self.next - self.consumed);
        let to_end = capacity - self.next % capacity;
        let usable = free.min(to_end).max(free.saturating_sub(to_end));
        usable.saturating_sub(HEADER) as usize
    }

    /// The position of the oldest packets that the consumer has not read, if there are any.
    pub fn oldest_unread(&mut self) -> Option<u64> {
        self.room();
        (self.consumed != self.next).then_some(self.consumed)
    }

    /// Sends packets, if they fit.
    pub fn push(&mut self, chunk: PacketChunk, bytes: &[u8]) -> bool {
        let size = entry_size(bytes.len() as u64);
        if self.room() < bytes.len() {
            return false;
        }
        let offset = self.next % self.ring.capacity;
        let to_end = self.ring.capacity - offset;
        let begins_again = self.consumed == self.next && offset >= size.max(REUSED);
        if to_end < size || begins_again {
            if self.ring.capacity - (self.next - self.consumed) < to_end + size {
                return false;
            }
            self.write_header(u64::from(PADDING));
            self.next += to_end;
        }
        let header = bytes.len() as u64
            | (chunk.segment_size as u64 & 0xffff) << 32
            | u64::from(chunk.traffic_class) << 48
            | u64::from(chunk.address) << 56;
        self.write_header(header);
        let at = self.ring.at(self.next) + HEADER;
        if self.ring.memory.write(at, bytes).is_err() {
            return false;
        }
        self.next += size;
        self.ring.word(PRODUCER_INDEX).store(self.next, Ordering::Release);
        true
    }

    fn write_header(&self, header: u64) {
        // Inside the memory, as the constructor has checked.
        let _ = self.ring.memory.write(self.ring.at(self.next), &header.to_ne_bytes());
    }

    /// Whether the consumer sleeps and must be woken, after a push.
    pub fn must_wake(&self) -> bool {
        fence(Ordering::SeqCst);
        self.ring.word(ASLEEP).load(Ordering::Relaxed) != 0
    }

    /// Asks the consumer for a wake-up when it has made room. Look at [`PacketProducer::room`] again afterwards.
    pub fn wait_for_room(&self) {
        self.ring.word(BLOCKED).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

/// The receiving side.
pub struct PacketConsumer {
    ring: PacketRing,
    next: u64,
}

impl PacketConsumer {
    /// The only consumer of a new ring.
    pub fn new(ring: PacketRing) -> PacketConsumer {
        PacketConsumer { ring, next: 0 }
    }

    /// Whether nothing has arrived.
    pub fn is_empty(&self) -> bool {
        self.ring.word(PRODUCER_INDEX).load(Ordering::Acquire) == self.next
    }

    /// Copies the next packets out of the ring to the start of `into`. The producer is not trusted.
    pub fn pop(&mut self, into: &mut [u8]) -> Result<Option<PacketChunk>, CorruptRing> {
        let capacity = self.ring.capacity;
        loop {
            let produced = self.ring.word(PRODUCER_INDEX).load(Ordering::Acquire);
            let filled = produced.wrapping_sub(self.next);
            if filled == 0 {
                return Ok(None);
            }
            let corrupt = CorruptRing { index: produced, min: self.next, max: self.next + capacity };
            if filled > capacity {
                return Err(corrupt);
            }
            let header = self.ring.header(self.next);
            let to_end = capacity - self.next % capacity;
            if header as u32 == PADDING {
                if to_end > filled {
                    return Err(corrupt);
                }
                self.advance(to_end);
                continue;
            }
            let length = header & 0xffff_ffff;
            let size = entry_size(length);
            if size > filled.min(to_end) || length > into.len() as u64 {
                return Err(corrupt);
            }
            let segment_size = (header >> 32 & 0xffff) as usize;
            let into = &mut into[..length as usize];
            if segment_size == 0 || self.ring.memory.read(self.ring.at(self.next) + HEADER, into).is_err() {
                return Err(corrupt);
            }
            self.advance(size);
            return Ok(Some(PacketChunk {
                length: length as usize,
                segment_size,
                traffic_class: (header >> 48) as u8,
                address: (header >> 56) as u8,
            }));
        }
    }

    fn advance(&mut self, bytes: u64) {
        self.next += bytes;
        self.ring.word(CONSUMER_INDEX).store(self.next, Ordering::Release);
    }

    /// Says that the consumer sleeps, or is about to. Look at [`PacketConsumer::is_empty`] before it does.
    pub fn set_asleep(&self, is_asleep: bool) {
        self.ring.word(ASLEEP).store(is_asleep.into(), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Whether the producer waits for room and must be woken, after a pop. True once for each request.
    pub fn must_wake(&self) -> bool {
        fence(Ordering::SeqCst);
        let blocked = self.ring.word(BLOCKED);
        blocked.load(Ordering::Relaxed) != 0 && blocked.swap(0, Ordering::AcqRel) != 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    /// A ring on the heap.
    fn ring(capacity: usize) -> (PacketProducer, PacketConsumer, PacketRing) {
        let words = SharedWords::heap(PacketRing::words(capacity));
        let base = core::ptr::NonNull::from(&words[..]).cast();
        let owner = Arc::new(words.clone());
        // SAFETY: the words stay allocated as long as their owner, and only atomics and copies access them.
        #[allow(unsafe_code)]
        let memory = unsafe { MemoryBlock::mapped(base, words.len() * 8, true, owner) };
        let ring = PacketRing::new(words, Arc::new(memory), 0, capacity);
        (PacketProducer::new(ring.clone()), PacketConsumer::new(ring.clone()), ring)
    }

    fn chunk(length: usize) -> PacketChunk {
        PacketChunk { length, segment_size: length.max(1), traffic_class: 3, address: 1 }
    }

    #[test]
    fn packets_of_every_size_arrive_in_order_around_the_ring() {
        let (mut producer, mut consumer, _) = ring(4096);
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        let mut buffer = vec![0; 4096];
        for round in 0..if cfg!(miri) { 20 } else { 3000usize } {
            let bytes = vec![round as u8; 1 + round * 7 % 1900];
            while !producer.push(chunk(bytes.len()), &bytes) {
                let popped = consumer.pop(&mut buffer).unwrap().expect("a full ring is not empty");
                assert_eq!(popped, chunk(popped.length));
                received.push(buffer[..popped.length].to_vec());
            }
            sent.push(bytes);
        }
        while let Some(popped) = consumer.pop(&mut buffer).unwrap() {
            received.push(buffer[..popped.length].to_vec());
        }
        assert!(sent == received && consumer.is_empty());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it copies megabytes")]
    fn a_ring_that_is_empty_begins_again() {
        let (mut producer, mut consumer, ring) = ring(8 * REUSED as usize);
        let (bytes, mut buffer) = (vec![5; 10_000], vec![0; 10_000]);
        for _ in 0..200 {
            assert!(producer.push(chunk(10_000), &bytes));
            assert_eq!(consumer.pop(&mut buffer).unwrap(), Some(chunk(10_000)));
            let end = (producer.next - 1) % ring.capacity;
            assert!(end < REUSED + entry_size(10_000), "{end} was used");
        }
        // All of it is used if nothing is received.
        let sent = (0..).take_while(|_| producer.push(chunk(10_000), &bytes)).count();
        assert!(sent as u64 > 7 * REUSED / entry_size(10_000), "{sent} were sent");
        for _ in 0..sent {
            assert_eq!(consumer.pop(&mut buffer).unwrap(), Some(chunk(10_000)));
        }
        assert!(consumer.is_empty());
    }

    #[test]
    fn what_fits_is_what_room_says() {
        let (mut producer, mut consumer, _) = ring(1024);
        let mut buffer = vec![0; 1024];
        for round in 0..if cfg!(miri) { 20 } else { 2000usize } {
            let room = producer.room();
            assert!(!producer.push(chunk(room + 1), &vec![1; room + 1]));
            if room > 0 {
                let length = 1 + round * 13 % room;
                assert!(producer.push(chunk(length), &vec![2; length]), "{length} of {room}");
            }
            if round % 3 != 0 {
                let _ = consumer.pop(&mut buffer).unwrap();
            }
        }
    }

    #[test]
    fn the_sides_learn_when_to_wake_each_other() {
        let (mut producer, mut consumer, _) = ring(1024);
        assert!(!producer.must_wake() && !consumer.must_wake());
        consumer.set_asleep(true);
        assert!(producer.push(chunk(10), &[0; 10]) && producer.must_wake());
        consumer.set_asleep(false);
        assert!(!producer.must_wake());
        producer.wait_for_room();
        consumer.pop(&mut [0; 64]).unwrap();
        assert!(consumer.must_wake());
        assert!(!consumer.must_wake(), "once");
    }

    #[test]
    fn a_second_producer_continues_after_the_first() {
        let (mut first, mut consumer, ring) = ring(1024);
        let mut buffer = [0; 1024];
        for byte in 0..200u8 {
            assert!(first.push(chunk(100), &[byte; 100]));
            first = PacketProducer::new(ring.clone());
            assert_eq!(consumer.pop(&mut buffer).unwrap(), Some(chunk(100)));
            assert_eq!(buffer[..100], [byte; 100]);
        }
        for index in [8, u64::MAX - 15] {
            ring.word(PRODUCER_INDEX).store(index, Ordering::Relaxed);
            assert!(PacketProducer::new(ring.clone()).room() <= 1024, "no index is trusted");
        }
    }

    #[test]
    fn a_corrupt_ring_is_an_error_and_nothing_is_read_outside_it() {
        let (mut producer, mut consumer, ring) = ring(1024);
        for header in [2000, u64::from(u32::MAX) - 1, 10, 1 << 32 | 1020] {
            assert!(producer.push(chunk(16), &[7; 16]));
            let at = ring.at(consumer.next);
            ring.memory.write(at, &u64::to_ne_bytes(header)).unwrap();
            assert!(consumer.pop(&mut [0; 1024]).is_err(), "{header:#x}");
            consumer.next = producer.next;
            ring.word(CONSUMER_INDEX).store(producer.next, Ordering::Relaxed);
        }
        ring.word(PRODUCER_INDEX).store(u64::MAX, Ordering::Relaxed);
        assert!(consumer.pop(&mut [0; 1024]).is_err());
        ring.word(CONSUMER_INDEX).store(u64::MAX, Ordering::Relaxed);
        let before = producer.room();
        assert!(before < 1024, "an index that was never sent frees nothing");
    }
}
