//! The memory behind memory regions, as the HCA accesses it.

use crate::Instant;
use alloc::sync::Arc;
use alloc::vec::Vec;
use softhca_queue::MemoryBlock;
pub use softhca_queue::{AtomicOperation, MemoryFault, WriteOrigin, WriterRole};
use softhca_wire::Qpn;

/// The driver's identifier of a memory object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryId(pub u32);

/// Accesses the memory behind memory regions. The caller has checked all ranges against the region.
///
/// The last bytes of a write (up to eight) become visible after all others.
pub trait Memory {
    /// Reads the bytes at `offset` into `into`.
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault>;

    /// Writes `from` at `offset`.
    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault>;

    /// Executes an atomic operation on the aligned eight bytes at `offset` and returns their original value.
    fn atomic(
        &mut self,
        memory: MemoryId,
        offset: u64,
        operation: AtomicOperation,
    ) -> Result<u64, MemoryFault>;

    /// As [`Memory::write`], for data of a message. Memory with a [`PlacementOrder`] chooses when it becomes visible.
    fn place(
        &mut self,
        memory: MemoryId,
        offset: u64,
        from: &[u8],
        origin: &WriteOrigin,
    ) -> Result<(), MemoryFault> {
        let _ = origin;
        self.write(memory, offset, from)
    }

    /// As [`Memory::atomic`], for an atomic operation of a message.
    fn place_atomic(
        &mut self,
        memory: MemoryId,
        offset: u64,
        operation: AtomicOperation,
        origin: &WriteOrigin,
    ) -> Result<u64, MemoryFault> {
        let _ = origin;
        self.atomic(memory, offset, operation)
    }

    /// As [`Memory::read`], for a READ that began at `since`, a value of [`Memory::start_read`].
    fn sample(&self, memory: MemoryId, offset: u64, into: &mut [u8], since: u64) -> Result<(), MemoryFault> {
        let _ = since;
        self.read(memory, offset, into)
    }

    /// A READ begins to read memory.
    fn start_read(&mut self, now: Instant) -> u64 {
        let _ = now;
        0
    }

    /// All data of a queue pair's side that was placed becomes visible.
    fn order(&mut self, qp: Qpn, role: WriterRole) {
        let _ = (qp, role);
    }
}

/// Chooses the order in which data becomes visible in the memory of a simulated host.
pub trait PlacementOrder: Send + Sync {
    /// All data of a queue pair's side that was placed becomes visible.
    fn order(&self, qp: Qpn, role: WriterRole);
    /// A READ begins. Returns a number that grows with every change of visible memory.
    fn start_read(&self, now: Instant) -> u64;
    /// When data that is hidden becomes visible at the latest.
    fn next_deadline(&self) -> Option<Instant>;
    /// Data whose deadline has passed becomes visible.
    fn expire(&self, now: Instant);
}

/// The memory of regions, by identifier. The identifier of removed memory is used again.
#[derive(Default)]
pub struct MemoryObjects {
    objects: Vec<Option<Arc<MemoryBlock>>>,
    free: Vec<u32>,
    /// Present if [`Settings::placement`](crate::Settings::placement) is not in order.
    placement_order: Option<Arc<dyn PlacementOrder>>,
}

impl MemoryObjects {
    /// Lets `order` choose when data becomes visible.
    pub fn set_placement_order(&mut self, order: Arc<dyn PlacementOrder>) {
        self.placement_order = Some(order);
    }

    /// When data that is hidden becomes visible at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.placement_order.as_ref()?.next_deadline()
    }

    /// Data whose deadline has passed becomes visible.
    pub fn expire(&mut self, now: Instant) {
        if let Some(order) = &self.placement_order {
            order.expire(now);
        }
    }

    /// Adds memory.
    pub fn add(&mut self, block: Arc<MemoryBlock>) -> MemoryId {
        let index = self.free.pop().unwrap_or(self.objects.len() as u32);
        self.objects.resize_with(self.objects.len().max(index as usize + 1), || None);
        self.objects[index as usize] = Some(block);
        MemoryId(index)
    }

    /// Removes memory that no region uses any more.
    pub fn remove(&mut self, memory: MemoryId) -> Option<Arc<MemoryBlock>> {
        let removed = self.unmap(memory)?;
        self.free.push(memory.0);
        Some(removed)
    }

    /// Unmaps the memory of a region: later accesses fault. The identifier is not used again.
    pub fn unmap(&mut self, memory: MemoryId) -> Option<Arc<MemoryBlock>> {
        self.objects.get_mut(memory.0 as usize)?.take()
    }

    /// The memory with this identifier.
    pub fn get(&self, memory: MemoryId) -> Result<&Arc<MemoryBlock>, MemoryFault> {
        self.objects.get(memory.0 as usize).and_then(Option::as_ref).ok_or(MemoryFault)
    }
}

impl Memory for MemoryObjects {
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.get(memory)?.read(offset, into)
    }

    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.get(memory)?.write(offset, from)
    }

    fn atomic(
        &mut self,
        memory: MemoryId,
        offset: u64,
        operation: AtomicOperation,
    ) -> Result<u64, MemoryFault> {
        self.get(memory)?.atomic(offset, operation)
    }

    fn place(
        &mut self,
        memory: MemoryId,
        offset: u64,
        from: &[u8],
        origin: &WriteOrigin,
    ) -> Result<(), MemoryFault> {
        self.get(memory)?.place(offset, from, origin)
    }

    fn place_atomic(
        &mut self,
        memory: MemoryId,
        offset: u64,
        operation: AtomicOperation,
        origin: &WriteOrigin,
    ) -> Result<u64, MemoryFault> {
        self.get(memory)?.place_atomic(offset, operation, origin)
    }

    fn sample(&self, memory: MemoryId, offset: u64, into: &mut [u8], since: u64) -> Result<(), MemoryFault> {
        self.get(memory)?.sample(offset, into, since)
    }

    fn start_read(&mut self, now: Instant) -> u64 {
        self.placement_order.as_ref().map_or(0, |order| order.start_read(now))
    }

    fn order(&mut self, qp: Qpn, role: WriterRole) {
        if let Some(order) = &self.placement_order {
            order.order(qp, role);
        }
    }
}
