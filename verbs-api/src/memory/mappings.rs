//! What is mapped in this process, and which pages of it have anything.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// A line of /proc/self/maps.
pub(super) struct Mapping<'a> {
    pub range: Range<usize>,
    /// Such as `rw-p`.
    pub permissions: &'a str,
    /// Where in its file it begins.
    pub offset: u64,
    pub inode: u64,
    pub name: &'a str,
}

impl<'a> Mapping<'a> {
    fn parse(line: &'a str) -> Option<Mapping<'a>> {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let (rights, rest) = rest.split_once(' ')?;
        let (offset, rest) = rest.split_once(' ')?;
        let (_device, rest) = rest.split_once(' ')?;
        let (inode, name) = rest.split_once(' ').unwrap_or((rest, ""));
        Some(Mapping {
            range: usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?,
            permissions: rights,
            offset: u64::from_str_radix(offset, 16).ok()?,
            inode: inode.parse().ok()?,
            name: name.trim_start(),
        })
    }

    /// Whether it is the process's own, to read and write, behind no file, and not a stack.
    fn is_private(&self) -> bool {
        let is_plain = self.name.is_empty() || self.name == "[heap]" || self.name.starts_with("[anon");
        self.permissions == "rw-p" && self.inode == 0 && is_plain
    }
}

/// Everything that is mapped, in the order of addresses.
pub(super) struct Mappings(String);

impl Mappings {
    pub fn read() -> io::Result<Mappings> {
        std::fs::read_to_string("/proc/self/maps").map(Mappings)
    }

    /// Those that have a part in `range`.
    pub fn overlapping<'a>(&'a self, range: &'a Range<usize>) -> impl Iterator<Item = Mapping<'a>> {
        let found = self.0.lines().filter_map(Mapping::parse);
        found.filter(|mapping| mapping.range.start < range.end && range.start < mapping.range.end)
    }

    /// Whether all of `range` is private memory.
    pub fn is_private(&self, range: &Range<usize>) -> bool {
        let mut at = range.start;
        for mapping in self.overlapping(range) {
            if mapping.range.start > at || !mapping.is_private() {
                return false;
            }
            at = mapping.range.end;
        }
        at >= range.end
    }
}

/// Tells pages that have anything from those that were never written.
pub(super) struct PageMap(File);

impl PageMap {
    pub fn open() -> io::Result<PageMap> {
        File::open("/proc/self/pagemap").map(PageMap)
    }

    /// For each page of `range`, whether it has anything, in memory or swapped out.
    pub fn pages_in_use(&self, range: &Range<usize>, page: usize) -> io::Result<Vec<bool>> {
        /// In memory, or swapped out.
        const USED: u64 = 0b11 << 62;
        let mut words = vec![0; range.len() / page * 8];
        self.0.read_exact_at(&mut words, (range.start / page * 8) as u64)?;
        let word = |bytes: &[u8; 8]| u64::from_ne_bytes(*bytes) & USED != 0;
        Ok(words.as_chunks::<8>().0.iter().map(word).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/program
00e03000-00e24000 rw-p 00000000 00:00 0           [heap]
00e24000-00f24000 rw-p 00000000 00:00 0 
00f24000-00f25000 rw-s 00001000 00:01 42          /memfd:softhca-in-place (deleted)
00f25000-00f26000 rw-p 00000000 00:00 0 [anon: pool]
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0           [stack]
";

    #[test]
    fn only_private_memory_behind_no_file_is_private() {
        let maps = Mappings(MAPS.into());
        for range in [0xe03000..0xe04000, 0xe03000..0xf24000, 0xf25000..0xf26000] {
            assert!(maps.is_private(&range), "{range:x?}");
        }
        let none = [
            0x400000..0x401000,
            0xe02000..0xe04000,
            0xf23000..0xf25000,
            0xf25000..0xf27000,
            0x7ffc00000000..0x7ffc00001000,
            0x10..0x20,
        ];
        for range in none {
            assert!(!maps.is_private(&range), "{range:x?}");
        }
    }

    #[test]
    fn a_mapping_of_a_file_says_where_it_begins() {
        let maps = Mappings(MAPS.into());
        let range = 0xf24000..0xf25000;
        let found: Vec<_> = maps.overlapping(&range).collect();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].offset, found[0].inode, found[0].permissions), (0x1000, 42, "rw-s"));
    }

    #[test]
    fn pages_that_were_never_written_have_nothing() {
        let mut memory = vec![0u8; 1 << 20];
        let page = 4096;
        let first = memory.as_ptr().align_offset(page);
        let start = memory.as_ptr() as usize + first;
        let (range, map) = (start..start + 100 * page, PageMap::open().unwrap());
        let before = map.pages_in_use(&range, page).unwrap();
        assert_eq!(before.len(), 100);
        assert!(!before.iter().all(|used| *used), "nothing was written yet");
        std::hint::black_box(&mut memory)[first + 3 * page] = 1;
        assert!(map.pages_in_use(&range, page).unwrap()[3]);
    }
}
