//! The memory behind regions, by the numbers that a card knows it by.

#[cfg(all(feature = "sockets", target_os = "linux"))]
mod fault_handler;
#[cfg(feature = "sockets")]
mod memory_table;

use crate::Error;
#[cfg(all(feature = "sockets", target_os = "linux"))]
pub(crate) use fault_handler::install as install_fault_handler;
#[cfg(feature = "sockets")]
pub(crate) use memory_table::MemoryTable;
use parking_lot::Mutex;
use softhca_engine::{AtomicOperation, Memory, MemoryFault, MemoryId, PayloadMode};
use softhca_fabric::SparseMemory;
use softhca_queue::ExternalMemory;
pub(crate) use softhca_queue::MemoryBlock;
use softhca_types::Errno;
use std::io;
use std::sync::Arc;

/// Allocates a zeroed block.
pub(crate) fn allocate(length: usize) -> Result<Arc<MemoryBlock>, Error> {
    let missing = || Error::System {
        what: "memory of a region",
        source: io::Error::from_raw_os_error(Errno::ENOMEM.0),
    };
    MemoryBlock::try_new(length).map(Arc::new).ok_or_else(missing)
}

/// A block that a world's host has adopted.
pub(crate) struct AdoptedBlock(pub Arc<MemoryBlock>);

impl Memory for AdoptedBlock {
    fn read(&self, _: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.0.read(offset, into)
    }

    fn write(&mut self, _: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.0.write(offset, from)
    }

    fn atomic(&mut self, _: MemoryId, offset: u64, operation: AtomicOperation) -> Result<u64, MemoryFault> {
        self.0.atomic(offset, operation)
    }
}

/// Memory that a simulated device allocates. A large block costs only what is written.
pub(crate) struct SimulatedMemory {
    memory: Mutex<SparseMemory>,
    id: MemoryId,
}

impl SimulatedMemory {
    /// Allocates a zeroed block; it stays zeroed if payloads are elided.
    pub fn allocate(length: usize, payload_mode: PayloadMode) -> Arc<MemoryBlock> {
        let mut memory = SparseMemory::default();
        let id = match payload_mode {
            PayloadMode::Carried => memory.allocate(length as u64),
            PayloadMode::Elided => memory.allocate_null(length as u64),
        };
        Arc::new(MemoryBlock::external(length, Box::new(SimulatedMemory { memory: Mutex::new(memory), id })))
    }
}

impl ExternalMemory for SimulatedMemory {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.memory.lock().read(self.id, offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.memory.lock().write(self.id, offset, from)
    }

    fn atomic(&self, offset: u64, operation: AtomicOperation) -> Result<u64, MemoryFault> {
        self.memory.lock().atomic(self.id, offset, operation)
    }
}
