//! Memory of the program that a card in another process reaches as its own.
//!
//! Such a card reaches into the program through the kernel, at the price of a call and of a look for every page. Pages
//! that it maps too cost neither. So, when a program registers private memory, shared pages with the same
//! bytes take the place of its own, and private ones again when it deregisters them. The program cannot tell the
//! difference, if nobody writes while pages change places: that happens only while the calling thread is the
//! only one that runs the program's code, and with its signals blocked. Otherwise, and for what is not whole pages, the
//! kernel carries the bytes as before.

#![allow(unsafe_code)]

use super::bystanders::{self, Quiet, is_alone};
use super::mappings::{Mapping, Mappings, PageMap};
use parking_lot::Mutex;
use softhca_queue::{Rights, SharedMemory};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, LazyLock, Once};

/// Set to `off`, it leaves the memory of programs as it is.
const VARIABLE: &str = "SOFTHCA_SHARE";
/// How much changes places at once, so that no more is there twice.
const STEP: usize = 2 << 20;
/// The longest range: copying more would hold up the program when it begins and ends.
const LONGEST: usize = 256 << 20;
/// The most places at a time: a process may not have many mappings.
const MOST: usize = 1024;
/// After as many were given up again, a program registers as it goes, and would pay more than it gains.
const MOST_ENDED: u32 = 8;

/// What is registered of this process's memory, over all of its devices.
static REGISTERED: Mutex<Registered> =
    Mutex::new(Registered { ranges: BTreeMap::new(), longest: 0, shared: Vec::new(), ended: 0 });

struct Registered {
    /// Where each range begins and ends, and how often it is registered.
    ranges: BTreeMap<(usize, usize), u32>,
    /// How long the longest was so far.
    longest: usize,
    shared: Vec<Arc<Shared>>,
    ended: u32,
}

/// Pages that are those of a memory file, at the place where the program's were.
struct Shared {
    range: Range<usize>,
    file: File,
}

/// A range of the program's memory, while it is registered.
pub(crate) struct Tenure {
    range: Range<usize>,
    shared: Option<Arc<Shared>>,
}

impl Tenure {
    /// Begins for `length` bytes at `address`, of which whole pages are shared if that can be.
    pub fn begin(address: usize, length: usize) -> Tenure {
        let range = address..address.saturating_add(length);
        let mut registered = REGISTERED.lock();
        let shared = registered.may_share(&range).then(|| Shared::take_place(&range)).flatten().map(Arc::new);
        registered.add(&range);
        registered.shared.extend(shared.clone());
        Tenure { range, shared }
    }

    /// Where shared pages are in it, and their memory file.
    pub fn shared(&self) -> Option<(Range<u64>, BorrowedFd<'_>)> {
        let shared = self.shared.as_ref()?;
        let offset = |at: usize| (at - self.range.start) as u64;
        Some((offset(shared.range.start)..offset(shared.range.end), shared.file.as_fd()))
    }

    /// Goes on without shared pages.
    pub fn unshare(&mut self) {
        let mut registered = REGISTERED.lock();
        registered.end(self);
        registered.add(&self.range);
        self.shared = None;
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        REGISTERED.lock().end(self);
    }
}

impl Registered {
    fn add(&mut self, range: &Range<usize>) {
        self.longest = self.longest.max(range.len());
        *self.ranges.entry((range.start, range.end)).or_default() += 1;
    }

    /// Whether pages of a range may change places: not if a card reaches them already.
    fn may_share(&self, range: &Range<usize>) -> bool {
        static IS_OFF: LazyLock<bool> =
            LazyLock::new(|| std::env::var(VARIABLE).is_ok_and(|value| value == "off"));
        !*IS_OFF && self.shared.len() < MOST && self.ended < MOST_ENDED && !self.overlap(range)
    }

    /// Whether something that is registered has a part of the pages of a range.
    fn overlap(&self, range: &Range<usize>) -> bool {
        let page = page_size();
        let start = range.start / page * page;
        let end = range.end.checked_next_multiple_of(page).unwrap_or(usize::MAX);
        let begun = (start.saturating_sub(self.longest), 0)..(end, 0);
        self.ranges.range(begun).any(|((_, other_end), _)| *other_end > start)
    }

    /// Forgets a range. Its shared pages stay if another region has a part of them.
    fn end(&mut self, tenure: &Tenure) {
        // The child of a fork finds neither.
        if let Entry::Occupied(mut count) = self.ranges.entry((tenure.range.start, tenure.range.end)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        let is_ended =
            |other: &Arc<Shared>| tenure.shared.as_ref().is_some_and(|shared| Arc::ptr_eq(other, shared));
        if let Some(place) = self.shared.iter().position(is_ended) {
            let shared = self.shared.swap_remove(place);
            self.ended += 1;
            if !self.overlap(&shared.range) {
                // What cannot be put back stays shared with nobody.
                let _ = shared.give_place();
            }
        }
    }
}

fn page_size() -> usize {
    // SAFETY: asks for a constant.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Whether a file of this length may be made: a signal would end the program otherwise.
fn is_allowed(length: usize) -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is ours.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) } == 0;
    known && length as u64 <= limit.rlim_cur
}

fn steps(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = range.end;
    range.clone().step_by(STEP).map(move |at| at..end.min(at + STEP))
}

impl Shared {
    /// Shares the whole pages of a range in place. `None`, and nothing has changed, if that cannot be.
    fn take_place(range: &Range<usize>) -> Option<Shared> {
        let page = page_size();
        let pages = range.start.checked_next_multiple_of(page)?..range.end / page * page;
        if pages.is_empty() || pages.len() > LONGEST || !is_allowed(pages.len()) {
            return None;
        }
        watch_forks();
        let _quiet = Quiet::begin();
        if !is_alone() || !Mappings::read().ok()?.are_private(&pages) {
            return None;
        }
        let used = PageMap::open().ok()?;
        let memory = SharedMemory::create("softhca-in-place", pages.len(), Rights::ReadWrite).ok()?;
        let file = File::from(memory.take_descriptor()?);
        let mut shared = Shared { range: pages.start..pages.start, file };
        for step in steps(&pages) {
            if shared.replace(&step, pages.start, &used, page).is_err() {
                break;
            }
            shared.range.end = step.end;
        }
        (!shared.range.is_empty()).then_some(shared)
    }

    /// Copies what pages have into the file, and maps that in their place.
    fn replace(&self, step: &Range<usize>, start: usize, used: &PageMap, page: usize) -> io::Result<()> {
        let used = used.are_used(step, page)?;
        let mut at = step.start;
        for run in used.chunk_by(|one, next| one == next) {
            let length = run.len() * page;
            if run[0] {
                // SAFETY: private pages that can be read, and that nobody writes now.
                let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, length) };
                self.file.write_all_at(bytes, (at - start) as u64)?;
            }
            at += length;
        }
        self.map(step, (step.start - start) as u64, libc::MAP_SHARED)
    }

    /// Maps the file from `offset` on at a place that has its bytes already.
    fn map(&self, place: &Range<usize>, offset: u64, kind: libc::c_int) -> io::Result<()> {
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, kind | libc::MAP_FIXED);
        let (at, file) = (place.start as *mut libc::c_void, self.file.as_raw_fd());
        // SAFETY: what was mapped there, which the caller has looked at, has the same bytes and rights.
        let mapped = unsafe { libc::mmap(at, place.len(), rights, kind, file, offset as libc::off_t) };
        if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Where the file is still mapped as it was: the program may have mapped something else, or nothing.
    fn remains(&self) -> io::Result<Vec<Range<usize>>> {
        let inode = self.file.metadata()?.ino();
        let maps = Mappings::read()?;
        let is_ours = |mapping: &Mapping<'_>| {
            let place = (mapping.range.start as u64).wrapping_sub(self.range.start as u64);
            mapping.inode == inode && mapping.rights == "rw-s" && mapping.offset == place
        };
        let found = maps.within(&self.range).filter(is_ours).map(|mapping| mapping.range);
        Ok(found.map(|range| range.start..range.end.min(self.range.end)).collect())
    }

    /// Puts private pages with the same bytes back.
    fn give_place(&self) -> io::Result<()> {
        let _quiet = Quiet::begin();
        if !is_alone() {
            return Ok(());
        }
        for place in self.remains()? {
            for step in steps(&place) {
                self.put_back(&step)?;
            }
        }
        Ok(())
    }

    fn put_back(&self, step: &Range<usize>) -> io::Result<()> {
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at a place that the kernel chooses.
        let fresh = unsafe { libc::mmap(std::ptr::null_mut(), step.len(), rights, kind, -1, 0) };
        if fresh == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just mapped, as long, and nobody else knows of it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(fresh.cast::<u8>(), step.len()) };
        let copied = self.copy_out(bytes, (step.start - self.range.start) as u64);
        if copied.is_ok() {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let place = step.start as *mut libc::c_void;
            // SAFETY: what is mapped there are pages of ours with the same bytes, and nobody touches them now.
            let moved = unsafe { libc::mremap(fresh, step.len(), step.len(), flags, place) };
            if moved != libc::MAP_FAILED {
                return Ok(());
            }
        }
        let error = copied.err().unwrap_or_else(io::Error::last_os_error);
        // SAFETY: mapped above, and moved nowhere.
        unsafe { libc::munmap(fresh, step.len()) };
        Err(error)
    }

    /// Copies what the file has from `offset` on. Where it has nothing, the fresh pages stay as they are.
    fn copy_out(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let seek = |from: u64, whence| {
            // SAFETY: no memory is passed. The file's position is nobody's.
            let found = unsafe { libc::lseek(self.file.as_raw_fd(), from as libc::off_t, whence) };
            u64::try_from(found).ok()
        };
        let (mut at, end) = (offset, offset + into.len() as u64);
        // No data behind a place is an error to `lseek`.
        while let Some(from) = seek(at, libc::SEEK_DATA).filter(|from| *from < end) {
            let to = seek(from, libc::SEEK_HOLE).unwrap_or(end).min(end);
            let part = &mut into[(from - offset) as usize..(to - offset) as usize];
            self.file.read_exact_at(part, from)?;
            at = to;
        }
        Ok(())
    }
}

/// The child of a fork gets pages of its own: what it writes is not the parent's.
fn watch_forks() {
    static ONCE: Once = Once::new();
    unsafe extern "C" fn prepare() {
        std::mem::forget(REGISTERED.lock());
        bystanders::hold();
    }
    unsafe extern "C" fn parent() {
        // SAFETY: held by `prepare`.
        unsafe { bystanders::let_go(false) };
        // SAFETY: as above.
        unsafe { REGISTERED.force_unlock() };
    }
    unsafe extern "C" fn child() {
        // SAFETY: held by `prepare`.
        unsafe { bystanders::let_go(true) };
        // SAFETY: as above, and the child has no other thread.
        let registered = unsafe { &mut *REGISTERED.data_ptr() };
        registered.ranges.clear();
        for shared in registered.shared.drain(..) {
            for place in shared.remains().unwrap_or_default() {
                let _ = shared.map(&place, (place.start - shared.range.start) as u64, libc::MAP_PRIVATE);
            }
        }
        // SAFETY: held by `prepare`.
        unsafe { REGISTERED.force_unlock() };
    }
    ONCE.call_once(|| {
        // SAFETY: the functions stay as long as this library, with which they are forgotten.
        unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_overlaps_what_has_a_part_of_its_pages() {
        let page = page_size();
        let mut all = Registered { ranges: BTreeMap::new(), longest: 0, shared: Vec::new(), ended: 0 };
        assert!(!all.overlap(&(0..usize::MAX)));
        let ranges = [10 * page + 5..10 * page + 6, 20 * page..50 * page, 30 * page..31 * page];
        ranges.iter().for_each(|range| all.add(range));
        for (from, to, expected) in
            [(0, 10, false), (10, 11, true), (11, 20, false), (49, 50, true), (50, 60, false)]
        {
            assert_eq!(all.overlap(&(from * page..to * page)), expected, "{from} to {to}");
        }
        assert!(all.overlap(&(10 * page + 100..10 * page + 200)), "another part of the page");
        assert!(all.overlap(&(0..usize::MAX)));
        // One that is there twice is gone when both have ended.
        all.add(&ranges[0]);
        for is_left in [true, false] {
            all.end(&std::mem::ManuallyDrop::new(Tenure { range: ranges[0].clone(), shared: None }));
            assert_eq!(all.overlap(&ranges[0]), is_left);
        }
    }
}
