//! The 64 bytes of an attribute or of a path.

use crate::layout::{BitSpan, Field};
use core::fmt;

/// The data of an SMP, or one of its paths.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Block(pub [u8; Block::LEN]);

impl Block {
    /// Bytes in a block.
    pub const LEN: usize = 64;

    /// The 16-bit number with this index, modulo 32.
    pub fn word(&self, index: usize) -> u16 {
        let at = index % 32 * 2;
        u16::from_be_bytes([self.0[at], self.0[at + 1]])
    }

    /// A block of 16-bit numbers.
    pub fn from_words(words: [u16; 32]) -> Block {
        let mut block = Block::default();
        for (bytes, word) in block.0.chunks_exact_mut(2).zip(words) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        block
    }
}

impl Default for Block {
    fn default() -> Self {
        Block([0; Block::LEN])
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = self.0.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        write!(f, "Block({:02x?})", &self.0[..used])
    }
}

impl Field for Block {
    const WIDTH: usize = Block::LEN * 8;
    fn read(bytes: &[u8], at: BitSpan) -> Self {
        Block(Field::read(bytes, at))
    }
    fn write(&self, bytes: &mut [u8], at: BitSpan) {
        self.0.write(bytes, at);
    }
}
