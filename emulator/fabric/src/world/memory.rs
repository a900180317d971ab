//! Memory of regions in virtual time.

use alloc::boxed::Box;
use alloc::sync::Arc;
use once_cell::race::OnceBox;
use softhca_engine::{AtomicOperation, MemoryFault, PayloadMode};
use softhca_queue::{ExternalMemory, MemoryBlock};

/// Blocks of this size or more allocate chunks on the first write.
const SPARSE_FROM: u64 = 64 << 20;
const CHUNK: usize = 1 << 20;

/// Allocates zeroed memory for a region of a simulated device. A large block costs only what is written. With elided
/// payloads the block reads as zero and ignores writes.
pub fn simulated_memory(length: u64, payload_mode: PayloadMode) -> Arc<MemoryBlock> {
    let external = |memory: Box<dyn ExternalMemory>| MemoryBlock::external(length as usize, memory);
    Arc::new(match payload_mode {
        PayloadMode::Elided => external(Box::new(NullMemory { length })),
        PayloadMode::Carried if length < SPARSE_FROM => MemoryBlock::new(length as usize),
        PayloadMode::Carried => external(Box::new(SparseMemory::new(length))),
    })
}

/// Reads as zero; ignores writes.
struct NullMemory {
    length: u64,
}

impl ExternalMemory for NullMemory {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        check_range(offset, into.len(), self.length)?;
        into.fill(0);
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        check_range(offset, from.len(), self.length)
    }

    fn atomic(&self, offset: u64, _: AtomicOperation) -> Result<u64, MemoryFault> {
        check_range(offset, 8, self.length).map(|()| 0)
    }
}

/// Allocates each chunk when something other than zero is written to it.
struct SparseMemory {
    length: u64,
    chunks: Box<[OnceBox<MemoryBlock>]>,
}

impl SparseMemory {
    fn new(length: u64) -> SparseMemory {
        let count = length.div_ceil(CHUNK as u64) as usize;
        SparseMemory { length, chunks: core::iter::repeat_with(OnceBox::new).take(count).collect() }
    }

    /// The pieces of a range: the chunk, the offset in it, the offset in the range, and the size.
    fn pieces(
        &self,
        offset: u64,
        length: usize,
    ) -> Result<impl Iterator<Item = (&OnceBox<MemoryBlock>, u64, usize, usize)>, MemoryFault> {
        check_range(offset, length, self.length)?;
        let mut done = 0;
        Ok(core::iter::from_fn(move || {
            let at = offset + done as u64;
            let (begin, place) = (done, at % CHUNK as u64);
            let size = (CHUNK - place as usize).min(length - done);
            done += size;
            (size > 0).then(|| (&self.chunks[(at / CHUNK as u64) as usize], place, begin, size))
        }))
    }
}

fn new_chunk() -> Box<MemoryBlock> {
    Box::new(MemoryBlock::new(CHUNK))
}

impl ExternalMemory for SparseMemory {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        for (chunk, place, begin, size) in self.pieces(offset, into.len())? {
            let into = &mut into[begin..begin + size];
            match chunk.get() {
                Some(chunk) => chunk.read(place, into)?,
                None => into.fill(0),
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        for (chunk, place, begin, size) in self.pieces(offset, from.len())? {
            let from = &from[begin..begin + size];
            // A missing chunk already reads as zero.
            if chunk.get().is_some() || from.iter().any(|byte| *byte != 0) {
                chunk.get_or_init(new_chunk).write(place, from)?;
            }
        }
        Ok(())
    }

    fn atomic(&self, offset: u64, operation: AtomicOperation) -> Result<u64, MemoryFault> {
        match self.pieces(offset, 8)?.next() {
            Some((chunk, place, _, 8)) => chunk.get_or_init(new_chunk).atomic(place, operation),
            _ => Err(MemoryFault),
        }
    }
}

fn check_range(offset: u64, length: usize, total: u64) -> Result<(), MemoryFault> {
    match offset.checked_add(length as u64) {
        Some(end) if end <= total => Ok(()),
        _ => Err(MemoryFault),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADD: AtomicOperation = AtomicOperation::FetchAdd { add: 5 };

    #[test]
    fn large_memory_reads_zero_until_written_also_across_chunks() {
        let block = simulated_memory(2 << 30, PayloadMode::Carried);
        let at = CHUNK as u64 - 3;
        let mut bytes = [9; 6];
        block.read(at, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 6]);
        block.write(at, &[1, 2, 3, 4, 5, 6]).unwrap();
        block.read(at, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6]);
        assert_eq!((block.atomic(80 << 20, ADD), block.atomic(80 << 20, ADD)), (Ok(0), Ok(5)));
        assert_eq!(block.atomic(at, ADD), Err(MemoryFault), "not aligned");
        assert_eq!(block.read((2 << 30) - 3, &mut bytes), Err(MemoryFault));
    }

    #[test]
    fn elided_memory_stays_zero() {
        let block = simulated_memory(16, PayloadMode::Elided);
        let mut bytes = [9; 16];
        assert_eq!(
            (block.write(0, &bytes), block.atomic(8, ADD), block.atomic(8, ADD)),
            (Ok(()), Ok(0), Ok(0))
        );
        block.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 16]);
        assert_eq!(block.write(9, &[1; 8]), Err(MemoryFault));
    }
}
