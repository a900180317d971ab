//! The place in a program that calls a verb.

use core::fmt;

/// The longest name of a module; a longer one is cut.
const MAX_MODULE: usize = 24;

/// The return address of a call in the program: a module (the program or one of its libraries) and an offset in it. It
/// is equal in every run although addresses are random.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallSite {
    module: [u8; MAX_MODULE],
    offset: u64,
}

impl CallSite {
    /// An offset in the module with this file name.
    pub fn new(module: &str, offset: u64) -> CallSite {
        let mut name = [0; MAX_MODULE];
        for (to, from) in name.iter_mut().zip(module.bytes()) {
            *to = from;
        }
        CallSite { module: name, offset }
    }
}

/// `rping+0x2f31`
impl fmt::Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A client can send any bytes, and a name can be cut within a character.
        for byte in self.module.iter().take_while(|byte| **byte != 0) {
            let printable = byte.is_ascii_graphic();
            write!(f, "{}", if printable { char::from(*byte) } else { '?' })?;
        }
        write!(f, "+{:#x}", self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn a_call_site_is_a_module_and_an_offset() {
        assert_eq!(CallSite::new("rping", 0x2f31).to_string(), "rping+0x2f31");
        assert_eq!(
            CallSite::new("a-library-with-a-long-name.so.1", 1).to_string(),
            "a-library-with-a-long-na+0x1"
        );
        assert_eq!(CallSite::new("two words\u{e9}", 16).to_string(), "two?words??+0x10");
    }
}
