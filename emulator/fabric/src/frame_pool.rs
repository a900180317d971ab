//! The pool of frames in flight and scheduled events, one cache line per slot.
//!
//! A network of a thousand hosts has tens of thousands of frames in flight, more than the cache holds. Forwarding a
//! frame touches only its slot. The slot holds the fields that nodes read, and is itself the link of the list that the
//! frame is in. The frame is stored apart until it arrives.

use crate::sim_event::SimEvent;
use crate::{Frame, FrameContent};
use alloc::vec::Vec;
use core::hint::black_box;
use softhca_wire::AddressHeaders;

/// No slot: ends a list.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// A frame in flight or a scheduled event.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct Slot {
    /// Sequence number of scheduling.
    pub serial: u64,
    pub event: SimEvent,
    /// The next slot in the same list: a bucket of the event queue, the queue of a port, or the free slots.
    pub next: u32,
    /// The destination host, or [`Slot::MULTICAST`]. This field and those below apply only to frames.
    pub host: u32,
    /// Hash of the flow.
    pub flow: u64,
    /// Destination queue pair and PSN, as in the BTH.
    pub packet: u64,
    /// Bytes in a buffer.
    pub bytes: u32,
    /// The ingress port at the switch that queues the frame.
    pub ingress: u16,
    pub priority: u8,
    pub is_pause: bool,
    /// Switches change this field and the next here; [`FramePool::frame`] copies them to the frame.
    pub traffic_class: u8,
    pub hop_limit: u8,
}

impl Slot {
    pub const MULTICAST: u32 = u32::MAX;

    const fn for_event(event: SimEvent) -> Slot {
        Slot {
            serial: 0,
            event,
            next: NO_SLOT,
            host: 0,
            flow: 0,
            packet: 0,
            bytes: 0,
            ingress: 0,
            priority: 0,
            is_pause: false,
            traffic_class: 0,
            hop_limit: 0,
        }
    }
}

/// Slots, and the frames of those that hold one. The last freed slot is reused first, because it is likely in
/// the cache.
pub(crate) struct FramePool {
    slots: Vec<Slot>,
    /// The frame of each slot. A free slot keeps the buffer of its last frame.
    frames: Vec<Frame>,
    free: u32,
    in_flight: usize,
}

impl Default for FramePool {
    fn default() -> FramePool {
        FramePool { slots: Vec::new(), frames: Vec::new(), free: NO_SLOT, in_flight: 0 }
    }
}

impl FramePool {
    #[inline]
    pub fn slot_mut(&mut self, slot: u32) -> &mut Slot {
        &mut self.slots[slot as usize]
    }

    /// Reserves a slot for an event, or for a frame to be stored.
    #[inline]
    pub fn reserve(&mut self) -> u32 {
        match self.slots.get(self.free as usize) {
            Some(slot) => core::mem::replace(&mut self.free, slot.next),
            None => {
                self.slots.push(Slot::for_event(SimEvent::Loopback));
                (self.slots.len() - 1) as u32
            }
        }
    }

    /// Frees the slot of an event.
    #[inline]
    pub fn free(&mut self, slot: u32) {
        self.slots[slot as usize].next = core::mem::replace(&mut self.free, slot);
    }

    /// Stores a frame.
    pub fn insert(&mut self, frame: Frame, host: u32, flow: u64) -> u32 {
        let slot = self.reserve_frame();
        self.frames[slot as usize] = frame;
        self.fill_slot(slot, host, flow);
        slot
    }

    /// Stores a frame with these bytes.
    pub fn insert_bytes(
        &mut self,
        addressing: &AddressHeaders,
        bytes: &[u8],
        content: FrameContent,
        service_level: u8,
        host: u32,
        flow: u64,
    ) -> u32 {
        let slot = self.reserve_frame();
        let frame = &mut self.frames[slot as usize];
        (frame.addressing, frame.content, frame.service_level) = (*addressing, content, service_level);
        frame.bytes.clear();
        frame.bytes.extend_from_slice(bytes);
        self.fill_slot(slot, host, flow);
        slot
    }

    fn reserve_frame(&mut self) -> u32 {
        let slot = self.reserve();
        if slot as usize >= self.frames.len() {
            self.frames.resize_with(slot as usize + 1, Frame::empty);
        }
        self.in_flight += 1;
        slot
    }

    fn fill_slot(&mut self, slot: u32, host: u32, flow: u64) {
        let frame = &self.frames[slot as usize];
        let packet = frame.bytes.get(4..12).and_then(|bytes| bytes.try_into().ok());
        let this = &mut self.slots[slot as usize];
        (this.host, this.flow) = (host, flow);
        this.packet = packet.map_or(0, u64::from_be_bytes);
        this.bytes = frame.buffer_length() as u32;
        this.priority = frame.priority();
        this.is_pause = frame.content == FrameContent::Pause;
        this.traffic_class = frame.addressing.traffic_class;
        this.hop_limit = frame.addressing.hop_limit;
    }

    /// Touches the frame's first cache line: see [`crate::network::Network::prefetch`].
    #[inline]
    pub fn prefetch_frame(&self, slot: u32) {
        black_box(self.frames.get(slot as usize).map(|frame| frame.service_level));
    }

    /// A frame with the changes that switches made.
    pub fn frame(&mut self, slot: u32) -> &Frame {
        let Slot { traffic_class, hop_limit, .. } = self.slots[slot as usize];
        let frame = &mut self.frames[slot as usize];
        (frame.addressing.traffic_class, frame.addressing.hop_limit) = (traffic_class, hop_limit);
        frame
    }

    /// Removes a frame.
    pub fn remove(&mut self, slot: u32) -> Frame {
        self.frame(slot);
        let frame = core::mem::replace(&mut self.frames[slot as usize], Frame::empty());
        self.release(slot);
        frame
    }

    /// Frees the slot of a frame.
    pub fn release(&mut self, slot: u32) {
        self.in_flight -= 1;
        self.free(slot);
    }

    pub fn frames_in_flight(&self) -> usize {
        self.in_flight
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Packet;
    use softhca_wire::Operation;

    #[test]
    fn slot_is_one_cache_line() {
        assert_eq!((size_of::<Slot>(), align_of::<Slot>()), (64, 64));
    }

    #[test]
    fn frame_includes_the_changes_of_switches() {
        let mut slots = FramePool::default();
        let sent = Packet::rc(Operation::Write, 7).frame();
        let slot = slots.insert(sent.clone(), 3, 5);
        assert_eq!(slots.slot_mut(slot).bytes as usize, sent.buffer_length());
        (slots.slot_mut(slot).hop_limit, slots.slot_mut(slot).traffic_class) = (9, 3);
        let mut expected = sent;
        (expected.addressing.hop_limit, expected.addressing.traffic_class) = (9, 3);
        assert_eq!(*slots.frame(slot), expected);
        assert_eq!(slots.frames_in_flight(), 1);
        assert_eq!((slots.remove(slot), slots.frames_in_flight()), (expected, 0));
    }

    #[test]
    fn last_freed_slot_is_reused_first_without_stale_content() {
        let mut slots = FramePool::default();
        let long = Packet::rc(Operation::Write, 7).payload(100).frame();
        let [first, second] = [long.clone(), long].map(|frame| slots.insert(frame, 0, 0));
        slots.release(first);
        slots.release(second);
        let short = Packet::rc(Operation::Acknowledge, 1).frame();
        let slot = slots.insert_bytes(&short.addressing, &short.bytes, short.content, 0, 1, 2);
        assert_eq!((slot, slots.frame(slot)), (second, &short));
        assert_eq!((slots.reserve(), slots.reserve()), (first, 2));
    }
}
