//! Host memory in virtual time.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;
use softhca_engine::{AtomicOperation, Memory, MemoryFault, MemoryId};

const PAGE: usize = 4096;

/// Blocks of this size or more allocate pages on the first write.
const SPARSE_FROM: u64 = 64 << 20;

enum MemoryBlock {
    Dense(Vec<u8>),
    Sparse {
        length: u64,
        pages: BTreeMap<u64, Box<[u8; PAGE]>>,
    },
    External(Box<dyn Memory + Send>),
    /// Reads as zero; ignores writes.
    Null {
        length: u64,
    },
}

/// The memory of a host's regions. Large blocks are sparse and cost only what is written.
#[derive(Default)]
pub struct SparseMemory {
    blocks: Vec<Option<MemoryBlock>>,
}

impl SparseMemory {
    /// Allocates a zeroed block.
    pub fn allocate(&mut self, length: u64) -> MemoryId {
        let block = match length {
            0..SPARSE_FROM => MemoryBlock::Dense(vec![0; length as usize]),
            _ => MemoryBlock::Sparse { length, pages: BTreeMap::new() },
        };
        self.add(block)
    }

    /// Allocates a block that reads as zero and ignores writes: for packets with elided payload.
    pub fn allocate_null(&mut self, length: u64) -> MemoryId {
        self.add(MemoryBlock::Null { length })
    }

    /// Adds a block that another owner stores and accesses.
    pub fn attach_external(&mut self, memory: Box<dyn Memory + Send>) -> MemoryId {
        self.add(MemoryBlock::External(memory))
    }

    fn add(&mut self, block: MemoryBlock) -> MemoryId {
        self.blocks.push(Some(block));
        MemoryId(self.blocks.len() as u32 - 1)
    }

    /// Frees a block: later accesses fault.
    pub fn free(&mut self, memory: MemoryId) {
        if let Some(block) = self.blocks.get_mut(memory.0 as usize) {
            *block = None;
        }
    }

    fn block(&self, memory: MemoryId) -> Result<&MemoryBlock, MemoryFault> {
        self.blocks.get(memory.0 as usize).and_then(Option::as_ref).ok_or(MemoryFault)
    }
}

/// Splits `length` bytes at `offset` at page boundaries: page, offset in the page, offset in the whole, size.
fn page_chunks(offset: u64, length: usize) -> impl Iterator<Item = (u64, usize, usize, usize)> {
    let mut done = 0;
    core::iter::from_fn(move || {
        let at = offset + done as u64;
        let place = (at % PAGE as u64) as usize;
        let size = (PAGE - place).min(length - done);
        let piece = (size > 0).then_some((at / PAGE as u64, place, done, size));
        done += size;
        piece
    })
}

fn check_range(offset: u64, length: usize, total: u64) -> Result<(), MemoryFault> {
    match offset.checked_add(length as u64) {
        Some(end) if end <= total => Ok(()),
        _ => Err(MemoryFault),
    }
}

impl Memory for SparseMemory {
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        match self.block(memory)? {
            MemoryBlock::Dense(bytes) => {
                check_range(offset, into.len(), bytes.len() as u64)?;
                let at = offset as usize;
                into.copy_from_slice(&bytes[at..at + into.len()]);
            }
            MemoryBlock::Sparse { length, pages } => {
                check_range(offset, into.len(), *length)?;
                for (page, place, done, size) in page_chunks(offset, into.len()) {
                    let into = &mut into[done..done + size];
                    match pages.get(&page) {
                        Some(page) => into.copy_from_slice(&page[place..place + size]),
                        None => into.fill(0),
                    }
                }
            }
            MemoryBlock::External(keeper) => keeper.read(memory, offset, into)?,
            MemoryBlock::Null { length } => {
                check_range(offset, into.len(), *length)?;
                into.fill(0);
            }
        }
        Ok(())
    }

    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        match self.blocks.get_mut(memory.0 as usize).and_then(Option::as_mut).ok_or(MemoryFault)? {
            MemoryBlock::Dense(bytes) => {
                check_range(offset, from.len(), bytes.len() as u64)?;
                let at = offset as usize;
                bytes[at..at + from.len()].copy_from_slice(from);
            }
            MemoryBlock::Sparse { length, pages } => {
                check_range(offset, from.len(), *length)?;
                for (page, place, done, size) in page_chunks(offset, from.len()) {
                    let from = &from[done..done + size];
                    // A missing page already reads as zero.
                    if pages.contains_key(&page) || *from != [0; PAGE][..size] {
                        let page = pages.entry(page).or_insert_with(|| Box::new([0; PAGE]));
                        page[place..place + size].copy_from_slice(from);
                    }
                }
            }
            MemoryBlock::External(keeper) => keeper.write(memory, offset, from)?,
            MemoryBlock::Null { length } => check_range(offset, from.len(), *length)?,
        }
        Ok(())
    }

    fn atomic(
        &mut self,
        memory: MemoryId,
        offset: u64,
        operation: AtomicOperation,
    ) -> Result<u64, MemoryFault> {
        if let Some(Some(MemoryBlock::External(keeper))) = self.blocks.get_mut(memory.0 as usize) {
            return keeper.atomic(memory, offset, operation);
        }
        let mut bytes = [0; 8];
        self.read(memory, offset, &mut bytes)?;
        let old = u64::from_ne_bytes(bytes);
        self.write(memory, offset, &operation.apply(old).to_ne_bytes())?;
        Ok(old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_memory_reads_zero_until_written_also_across_pages() {
        let mut store = SparseMemory::default();
        let block = store.allocate(2 << 30);
        let mut read = [9; 6];
        store.read(block, PAGE as u64 - 3, &mut read).unwrap();
        assert_eq!(read, [0; 6]);
        store.write(block, PAGE as u64 - 3, &[1, 2, 3, 4, 5, 6]).unwrap();
        store.read(block, PAGE as u64 - 3, &mut read).unwrap();
        assert_eq!(read, [1, 2, 3, 4, 5, 6]);
        assert_eq!(store.read(block, (2 << 30) - 3, &mut read), Err(MemoryFault));
    }

    #[test]
    fn freed_memory_faults() {
        let mut store = SparseMemory::default();
        let block = store.allocate(8);
        assert_eq!(store.atomic(block, 0, AtomicOperation::FetchAdd { add: 5 }), Ok(0));
        assert_eq!(store.atomic(block, 0, AtomicOperation::CompareSwap { compare: 5, swap: 7 }), Ok(5));
        store.free(block);
        assert_eq!(store.atomic(block, 0, AtomicOperation::FetchAdd { add: 5 }), Err(MemoryFault));
    }
}
