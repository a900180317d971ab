//! The fetched work requests of a queue pair, in slots that are filled and read in place.

use super::requester_state::SendWqe;
use alloc::vec::Vec;
use core::ops::{Index, IndexMut};

/// A ring of WQEs. A slot keeps the memory of its lists, so that a message allocates and copies nothing.
#[derive(Default)]
pub(crate) struct WqeQueue {
    /// A power of two of slots, or none.
    slots: Vec<SendWqe>,
    head: usize,
    length: usize,
}

impl WqeQueue {
    const FIRST_SLOTS: usize = 4;

    #[inline]
    fn slot(&self, index: usize) -> usize {
        (self.head + index) & (self.slots.len() - 1)
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.length
    }

    /// The free slot behind the last WQE. [`WqeQueue::push_spare`] adds it.
    #[inline]
    pub fn spare(&mut self) -> &mut SendWqe {
        if self.length == self.slots.len() {
            self.grow();
        }
        let slot = self.slot(self.length);
        &mut self.slots[slot]
    }

    #[cold]
    fn grow(&mut self) {
        self.slots.rotate_left(self.head);
        self.head = 0;
        let slots = (self.slots.len() * 2).max(Self::FIRST_SLOTS);
        self.slots.resize_with(slots, SendWqe::default);
    }

    /// Adds the WQE that the caller has put into [`WqeQueue::spare`].
    #[inline]
    pub fn push_spare(&mut self) {
        debug_assert!(self.length < self.slots.len());
        self.length += 1;
    }

    #[inline]
    pub fn front(&self) -> Option<&SendWqe> {
        self.get(0)
    }

    #[inline]
    pub fn get(&self, index: usize) -> Option<&SendWqe> {
        (index < self.length).then(|| &self.slots[self.slot(index)])
    }

    #[inline]
    pub fn get_mut(&mut self, index: usize) -> Option<&mut SendWqe> {
        if index >= self.length {
            return None;
        }
        let slot = self.slot(index);
        Some(&mut self.slots[slot])
    }

    pub fn iter(&self) -> impl Iterator<Item = &SendWqe> {
        (0..self.length).map(|index| &self.slots[self.slot(index)])
    }

    /// Removes the oldest WQE. Its slot becomes the last spare one.
    #[inline]
    pub fn pop_front(&mut self) {
        if self.length > 0 {
            self.head = self.slot(1);
            self.length -= 1;
        }
    }

    pub fn clear(&mut self) {
        self.length = 0;
    }
}

impl Index<usize> for WqeQueue {
    type Output = SendWqe;

    #[inline]
    fn index(&self, index: usize) -> &SendWqe {
        debug_assert!(index < self.length);
        &self.slots[self.slot(index)]
    }
}

impl IndexMut<usize> for WqeQueue {
    #[inline]
    fn index_mut(&mut self, index: usize) -> &mut SendWqe {
        debug_assert!(index < self.length);
        let slot = self.slot(index);
        &mut self.slots[slot]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wqes_keep_their_order_when_the_ring_wraps_and_grows() {
        let mut queue = WqeQueue::default();
        let (mut posted, mut popped) = (0, 0);
        for burst in [3, 4, 9, 1, 30] {
            for _ in 0..burst {
                queue.spare().wr_id = posted;
                queue.push_spare();
                posted += 1;
            }
            assert!(queue.iter().map(|wqe| wqe.wr_id).eq(popped..posted));
            while queue.len() > 2 {
                assert_eq!(queue.front().map(|wqe| wqe.wr_id), Some(popped));
                queue.pop_front();
                popped += 1;
            }
        }
        queue.clear();
        assert!(queue.front().is_none() && queue.get(0).is_none());
    }
}
