//! Rings in shared memory that carry packets between the processes of one host, in place of sockets.

use crate::Waker;
use softhca_engine::Instant;
use softhca_queue::{PacketChunk, PacketConsumer, PacketProducer, PacketRing};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The bytes in flight in each direction.
const CAPACITY: usize = 512 << 10;
/// How long a slot without a process stays absent, in nanoseconds: packets to it are discarded.
const ABSENT_FOR: u64 = 100_000_000;
/// A process that leaves the same packets unread for this long does not run, in nanoseconds: less than any ACK timeout in
/// `fatal`.
const STALLED_AFTER: u64 = 250_000_000;
/// How often it is looked whether processes read their packets, while some are unread, in nanoseconds.
const READER_CHECK_INTERVAL: u64 = 50_000_000;
/// The most chunks that one poll takes from a ring.
const MAX_CHUNKS_PER_POLL: usize = 8;

/// The rings between two processes, one in each direction, and the event descriptors that wake each of them.
pub struct RingPair {
    memory: OwnedFd,
    /// Wakes the process with the lower slot, and the other one.
    wake: [OwnedFd; 2],
}

impl RingPair {
    /// New rings.
    pub fn create() -> io::Result<RingPair> {
        let wake = [Waker::new()?.into(), Waker::new()?.into()];
        Ok(RingPair { memory: shared::create(Self::bytes())?, wake })
    }

    fn bytes() -> usize {
        2 * PacketRing::words(CAPACITY) * 8
    }

    /// The descriptors, to pass to a process.
    pub fn as_fds(&self) -> [BorrowedFd<'_>; 3] {
        let [low, high] = &self.wake;
        [self.memory.as_fd(), low.as_fd(), high.as_fd()]
    }

    /// Copies of the descriptors.
    pub fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        self.as_fds().iter().map(BorrowedFd::try_clone_to_owned).collect()
    }

    /// The rings in descriptors that another process passed.
    pub fn adopt(descriptors: Vec<OwnedFd>) -> io::Result<RingPair> {
        match <[OwnedFd; 3]>::try_from(descriptors) {
            Ok([memory, low, high]) => Ok(RingPair { memory, wake: [low, high] }),
            Err(_) => Err(io::Error::other("rings have a memory and two event descriptors")),
        }
    }

    /// The end of the process in slot `own`, towards that in slot `peer`.
    fn into_end(self, own: u16, peer: u16) -> io::Result<RingEnd> {
        let [first, second] = shared::adopt(self.memory, Self::bytes())?;
        let [low, high] = self.wake;
        let (send, receive, wake, wake_peer) =
            if own < peer { (first, second, low, high) } else { (second, first, high, low) };
        let (producer, consumer) = (PacketProducer::new(send), PacketConsumer::new(receive));
        let [wake, wake_peer] = [wake, wake_peer].map(File::from);
        let (is_blocked, unread, is_stalled) = (false, None, false);
        Ok(RingEnd { producer, consumer, wake, wake_peer, is_blocked, unread, is_stalled })
    }
}

#[cfg(target_os = "linux")]
mod shared {
    use super::CAPACITY;
    use softhca_queue::{MapMode, PacketRing, SharedMemory};
    use std::io;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;

    pub fn create(bytes: usize) -> io::Result<OwnedFd> {
        let memory = SharedMemory::create("softhca-packets", bytes, MapMode::ReadWrite)?;
        memory.take_descriptor().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub fn adopt(memory: OwnedFd, bytes: usize) -> io::Result<[PacketRing; 2]> {
        let words = PacketRing::words(CAPACITY);
        let memory = Arc::new(SharedMemory::adopt(memory, bytes, MapMode::ReadWrite)?);
        let block = Arc::new(memory.block());
        let part = |index: usize| (memory.words(index * words, words), block.clone(), index * words * 8);
        Ok([0, 1].map(|index| {
            let (words, block, offset) = part(index);
            PacketRing::new(words, block, offset, CAPACITY)
        }))
    }
}

/// Only daemons open rings, and daemons run on Linux.
#[cfg(not(target_os = "linux"))]
mod shared {
    use softhca_queue::PacketRing;
    use std::io;
    use std::os::fd::OwnedFd;

    pub fn create(_: usize) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn adopt(_: OwnedFd, _: usize) -> io::Result<[PacketRing; 2]> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// One process's end of a pair of rings.
struct RingEnd {
    producer: PacketProducer,
    consumer: PacketConsumer,
    wake: File,
    wake_peer: File,
    /// A queue pair waits for room.
    is_blocked: bool,
    /// The position of the oldest unread packets, and since when it is known.
    unread: Option<(u64, u64)>,
    /// The other process does not read.
    is_stalled: bool,
}

/// Wakes a process. A full counter has woken it already.
fn wake(mut event: &File) {
    let _ = event.write(&1u64.to_ne_bytes());
}

/// The result of a send to another process of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingSend {
    /// They are in the ring.
    Sent,
    /// No process has the slot.
    NoProcess,
}

/// Asks for rings to the process in a slot.
pub type OpenRings = Box<dyn FnMut(u16) -> io::Result<RingPair> + Send>;

/// The rings of a process.
pub(crate) struct ProcessRings {
    own: u16,
    open: OpenRings,
    /// In the order of their slots.
    ends: Vec<(u16, RingEnd)>,
    /// Slots without a process, and until when they count as such.
    absent: BTreeMap<u16, u64>,
    /// Slots whose process turned out to be gone.
    pub lost: Vec<u16>,
    /// When the last packet arrived.
    pub received_at: Option<Instant>,
    /// A packet must wake this process.
    is_asleep: bool,
    /// When to look whether processes read their packets; `None` while all have read theirs.
    readers_checked_at: Option<u64>,
}

impl ProcessRings {
    pub fn new(own: u16, open: OpenRings) -> ProcessRings {
        ProcessRings {
            own,
            open,
            ends: Vec::new(),
            absent: BTreeMap::new(),
            lost: Vec::new(),
            received_at: None,
            is_asleep: false,
            readers_checked_at: None,
        }
    }

    /// Adds rings that the other process asked for. Returns the descriptor that wakes this process.
    pub fn add(&mut self, peer: u16, rings: RingPair) -> io::Result<Option<BorrowedFd<'_>>> {
        self.absent.remove(&peer);
        let Err(at) = self.position(peer) else { return Ok(None) };
        let end = rings.into_end(self.own, peer)?;
        end.consumer.set_asleep(self.is_asleep);
        // The other process may have sent before it could see the flag.
        if self.is_asleep && !end.consumer.is_empty() {
            wake(&end.wake);
        }
        self.ends.insert(at, (peer, end));
        Ok(Some(self.ends[at].1.wake.as_fd()))
    }

    /// The index of the rings to a slot, or where they belong.
    #[inline]
    fn position(&self, peer: u16) -> Result<usize, usize> {
        self.ends.binary_search_by_key(&peer, |(slot, _)| *slot)
    }

    #[inline]
    fn end(&mut self, peer: u16) -> Option<&mut RingEnd> {
        self.position(peer).ok().map(|at| &mut self.ends[at].1)
    }

    /// The process in a slot is gone. Its last packets must have been received.
    pub fn remove(&mut self, peer: u16) {
        self.ends.retain(|(slot, _)| *slot != peer);
    }

    /// Whether packets of the process in a slot have arrived.
    pub fn has_packets_from(&self, peer: u16) -> bool {
        self.position(peer).is_ok_and(|at| !self.ends[at].1.consumer.is_empty())
    }

    /// Asks for rings to the process in a slot, unless they exist. Returns the descriptor that wakes this process if they
    /// are new.
    pub fn connect(&mut self, peer: u16, now: u64) -> io::Result<Option<BorrowedFd<'_>>> {
        if self.position(peer).is_ok() || self.absent.get(&peer).is_some_and(|until| now < *until) {
            return Ok(None);
        }
        match (self.open)(peer) {
            Ok(rings) => self.add(peer, rings),
            Err(error) => {
                self.absent.insert(peer, now + ABSENT_FOR);
                self.lost.push(peer);
                Err(error)
            }
        }
    }

    /// How many packets of `size` bytes can be sent to a slot now. Packets to a slot without a process are discarded.
    pub fn allowed(&mut self, peer: u16, size: usize) -> usize {
        let Some(end) = self.end(peer) else { return usize::MAX };
        let mut allowed = end.producer.room() / size.max(1);
        if allowed == 0 {
            end.producer.wait_for_room();
            allowed = end.producer.room() / size.max(1);
        }
        end.is_blocked |= allowed == 0;
        allowed
    }

    /// The bytes of packets that can be sent to a slot now.
    pub fn room(&mut self, peer: u16) -> usize {
        self.end(peer).map_or(0, |end| end.producer.room())
    }

    /// Sends packets to a slot, for which [`ProcessRings::allowed`] or [`ProcessRings::room`] has found room.
    pub fn send(&mut self, peer: u16, chunk: PacketChunk, bytes: &[u8], now: u64) -> RingSend {
        self.readers_checked_at.get_or_insert(now + READER_CHECK_INTERVAL);
        let Some(end) = self.end(peer) else { return RingSend::NoProcess };
        let is_sent = end.producer.push(chunk, bytes);
        debug_assert!(is_sent, "the transmit gate has looked for room");
        if is_sent && end.producer.must_wake() {
            wake(&end.wake_peer);
        }
        RingSend::Sent
    }

    /// Takes packets out of every ring, copies them to `buffer` and gives them to `receive`. Returns their number; a chunk
    /// counts as two packets if it has more.
    pub fn receive(&mut self, buffer: &mut [u8], mut receive: impl FnMut(u16, PacketChunk, &[u8])) -> usize {
        let ProcessRings { ends, lost, .. } = self;
        let mut received = 0;
        ends.retain_mut(|(peer, end)| {
            if end.consumer.is_empty() {
                return true;
            }
            for _ in 0..MAX_CHUNKS_PER_POLL {
                match end.consumer.pop(buffer) {
                    Ok(Some(chunk)) => {
                        received += 1 + usize::from(chunk.length > chunk.segment_size);
                        receive(*peer, chunk, &buffer[..chunk.length]);
                    }
                    Ok(None) => break,
                    Err(_) => {
                        lost.push(*peer);
                        return false;
                    }
                }
            }
            if end.consumer.must_wake() {
                wake(&end.wake_peer);
            }
            true
        });
        received
    }

    /// When to call [`ProcessRings::check_readers`].
    #[inline]
    pub fn next_timeout(&self) -> Option<u64> {
        self.readers_checked_at
    }

    /// Returns the slots of the processes that have stopped to read their packets (true), or read again (false).
    pub fn check_readers(&mut self, now: u64) -> Vec<(u16, bool)> {
        if self.readers_checked_at.is_none_or(|at| now < at) {
            return Vec::new();
        }
        let mut changed = Vec::new();
        for (slot, end) in &mut self.ends {
            end.unread = end.producer.oldest_unread().map(|position| match end.unread {
                Some((known, since)) if known == position => (known, since),
                _ => (position, now),
            });
            let is_stalled = end.unread.is_some_and(|(_, since)| now - since >= STALLED_AFTER);
            if is_stalled != end.is_stalled {
                end.is_stalled = is_stalled;
                changed.push((*slot, is_stalled));
            }
        }
        let is_any_unread = self.ends.iter().any(|(_, end)| end.unread.is_some());
        self.readers_checked_at = is_any_unread.then_some(now + READER_CHECK_INTERVAL);
        changed
    }

    /// Whether any packet has arrived.
    pub fn has_packets(&self) -> bool {
        self.ends.iter().any(|(_, end)| !end.consumer.is_empty())
    }

    /// Whether a queue pair waits for room that there is now.
    pub fn unblocked(&mut self) -> bool {
        let mut unblocked = false;
        for (_, end) in self.ends.iter_mut().filter(|(_, end)| end.is_blocked) {
            if end.producer.room() >= CAPACITY / 4 {
                end.is_blocked = false;
                unblocked = true;
            } else {
                end.producer.wait_for_room();
                // The consumer may have made room and slept before it saw the request.
                if end.producer.room() >= CAPACITY / 4 {
                    end.is_blocked = false;
                    unblocked = true;
                }
            }
        }
        unblocked
    }

    /// Informs the other processes whether this one sleeps.
    pub fn set_asleep(&mut self, is_asleep: bool) {
        self.is_asleep = is_asleep;
        self.ends.iter().for_each(|(_, end)| end.consumer.set_asleep(is_asleep));
    }

    /// Whether there are rings.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The descriptors that wake this process.
    pub fn wake_descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.ends.iter().map(|(_, end)| end.wake.as_fd())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_stalled_while_it_does_not_read() {
        let pair = RingPair::create().unwrap();
        let no_rings = || -> OpenRings { Box::new(|_| Err(io::ErrorKind::NotFound.into())) };
        let [mut sender, mut receiver] = [1, 2].map(|own| ProcessRings::new(own, no_rings()));
        receiver.add(1, RingPair::adopt(pair.descriptors().unwrap()).unwrap()).unwrap();
        sender.add(2, pair).unwrap();
        let send = |sender: &mut ProcessRings, now| {
            let chunk = PacketChunk { length: 4, segment_size: 4, traffic_class: 0, address: 0 };
            assert_eq!(sender.send(2, chunk, &[0; 4], now), RingSend::Sent);
        };
        let check = |sender: &mut ProcessRings, until: u64| {
            let mut changes = Vec::new();
            while let Some(at) = sender.next_timeout().filter(|at| *at <= until) {
                changes.extend(sender.check_readers(at));
            }
            changes
        };
        let read = |receiver: &mut ProcessRings| {
            let mut buffer = vec![0; CAPACITY];
            receiver.receive(&mut buffer, |_, _, _| ());
        };
        const SECOND: u64 = 1_000_000_000;
        send(&mut sender, 0);
        read(&mut receiver);
        assert_eq!(check(&mut sender, SECOND), [], "it has read");
        assert_eq!(sender.next_timeout(), None);
        // It reads, but never everything.
        for round in 0..10 {
            send(&mut sender, SECOND + round * STALLED_AFTER / 2);
            send(&mut sender, SECOND + round * STALLED_AFTER / 2);
            assert_eq!(check(&mut sender, SECOND + round * STALLED_AFTER / 2), []);
            let mut buffer = vec![0; CAPACITY];
            let end = receiver.end(1).unwrap();
            end.consumer.pop(&mut buffer).unwrap().expect("packets");
        }
        assert_eq!(check(&mut sender, 4 * SECOND), [(2, true)], "packets stay unread");
        read(&mut receiver);
        read(&mut receiver);
        assert_eq!(check(&mut sender, 5 * SECOND), [(2, false)]);
        assert_eq!(sender.next_timeout(), None, "nothing is unread");
    }
}
