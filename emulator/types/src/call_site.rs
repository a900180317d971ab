//! The place in a program that calls a verb.

use core::fmt;

/// The most call sites that a client can name.
pub const MAX_CALL_SITES: u16 = 1024;

/// The longest name; a longer one is cut.
const MAX_NAME: usize = 31;

/// The place of a call in the program: a line of a source file, or an offset in a module (the program or one of its
/// libraries). It is equal in every run although addresses are random.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallSite {
    name: [u8; MAX_NAME],
    is_source: bool,
    /// The line or the offset.
    place: u64,
}

impl CallSite {
    /// The return address at an offset in the module with this file name.
    pub fn new(module: &str, offset: u64) -> CallSite {
        CallSite::named(module, false, offset)
    }

    /// A line of the source file with this name.
    pub fn in_source(file: &str, line: u32) -> CallSite {
        CallSite::named(file, true, line.into())
    }

    fn named(text: &str, is_source: bool, place: u64) -> CallSite {
        let mut name = [0; MAX_NAME];
        for (to, from) in name.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        CallSite { name, is_source, place }
    }
}

/// `rping.c:42` or `rping+0x2f31`
impl fmt::Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A client can send any bytes, and a name can be cut within a character.
        for byte in self.name.iter().take_while(|byte| **byte != 0) {
            let printable = byte.is_ascii_graphic();
            write!(f, "{}", if printable { char::from(*byte) } else { '?' })?;
        }
        match self.is_source {
            true => write!(f, ":{}", self.place),
            false => write!(f, "+{:#x}", self.place),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn a_call_site_is_a_line_or_an_offset() {
        assert_eq!(CallSite::in_source("rping.c", 42).to_string(), "rping.c:42");
        assert_eq!(CallSite::new("rping", 0x2f31).to_string(), "rping+0x2f31");
        assert_eq!(
            CallSite::new("a-library-with-a-very-long-name.so.1", 1).to_string(),
            "a-library-with-a-very-long-name+0x1"
        );
        assert_eq!(CallSite::new("two words\u{e9}", 16).to_string(), "two?words??+0x10");
    }

    #[test]
    fn the_numbers_of_call_sites_are_limited() {
        let named =
            |number| crate::Command::NameCallSite { number, call_site: CallSite::in_source("a.c", 1) };
        let is_valid =
            [0, 1, MAX_CALL_SITES, MAX_CALL_SITES + 1].map(|number| named(number).check_sizes().is_ok());
        assert_eq!(is_valid, [false, true, true, false]);
    }
}
