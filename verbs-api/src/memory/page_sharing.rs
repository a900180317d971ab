//! Memory of the program that a card in another process reaches as its own.
//!
//! Such a card reaches into the program through the kernel, at the price of a call and of a look for every page. Pages
//! that it maps too cost neither. So, when a program registers private memory, shared pages with the same
//! bytes take the place of its own, and private ones again when it deregisters them. The program cannot tell the
//! difference, if nobody writes while pages change places: that happens only while the calling thread is the
//! only one that runs the program's code, and with its signals blocked. Otherwise, and for what is not whole pages, the
//! kernel carries the bytes as before.

#![allow(unsafe_code)]

use super::library_threads::{self, SignalsBlocked, is_only_program_thread};
use super::mappings::{Mapping, Mappings, PageMap};
use parking_lot::Mutex;
use softhca_queue::{MapMode, SharedMemory};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, LazyLock, Once};

/// Set to `off`, it leaves the memory of programs as it is.
const SHARE_VARIABLE: &str = "SOFTHCA_SHARE";
/// How much changes places at once, so that no more is there twice.
const CHUNK_SIZE: usize = 2 << 20;
/// The longest range: copying more would hold up the program when it begins and ends.
const MAX_SHARED_LENGTH: usize = 256 << 20;
/// The most places at a time: a process may not have many mappings.
const MAX_SHARED_RANGES: usize = 1024;
/// After as many were given up again, a program registers as it goes, and would pay more than it gains.
const MAX_UNSHARED: u32 = 8;

/// What is registered of this process's memory, over all of its devices.
static REGISTRATIONS: Mutex<Registrations> = Mutex::new(Registrations {
    ranges: BTreeMap::new(),
    longest_range: 0,
    shared: Vec::new(),
    unshared_count: 0,
});

struct Registrations {
    /// Where each range begins and ends, and how often it is registered.
    ranges: BTreeMap<(usize, usize), u32>,
    /// How long the longest was so far.
    longest_range: usize,
    shared: Vec<Arc<SharedPages>>,
    unshared_count: u32,
}

/// Pages that are those of a memory file, at the place where the program's were.
struct SharedPages {
    range: Range<usize>,
    file: File,
}

/// A range of the program's memory, while it is registered.
pub(crate) struct RegisteredRange {
    range: Range<usize>,
    shared: Option<Arc<SharedPages>>,
}

impl RegisteredRange {
    /// Begins for `length` bytes at `address`, of which whole pages are shared if that can be.
    pub fn register(address: usize, length: usize) -> RegisteredRange {
        let range = address..address.saturating_add(length);
        let mut registered = REGISTRATIONS.lock();
        let shared =
            registered.may_share(&range).then(|| SharedPages::share_in_place(&range)).flatten().map(Arc::new);
        registered.add(&range);
        registered.shared.extend(shared.clone());
        RegisteredRange { range, shared }
    }

    /// Where shared pages are in it, and their memory file.
    pub fn shared(&self) -> Option<(Range<u64>, BorrowedFd<'_>)> {
        let shared = self.shared.as_ref()?;
        let offset = |at: usize| (at - self.range.start) as u64;
        Some((offset(shared.range.start)..offset(shared.range.end), shared.file.as_fd()))
    }

    /// Goes on without shared pages.
    pub fn unshare(&mut self) {
        let mut registered = REGISTRATIONS.lock();
        registered.remove(self);
        registered.add(&self.range);
        self.shared = None;
    }
}

impl Drop for RegisteredRange {
    fn drop(&mut self) {
        REGISTRATIONS.lock().remove(self);
    }
}

impl Registrations {
    fn add(&mut self, range: &Range<usize>) {
        self.longest_range = self.longest_range.max(range.len());
        *self.ranges.entry((range.start, range.end)).or_default() += 1;
    }

    /// Whether pages of a range may change places: not if a card reaches them already.
    fn may_share(&self, range: &Range<usize>) -> bool {
        static IS_OFF: LazyLock<bool> =
            LazyLock::new(|| std::env::var(SHARE_VARIABLE).is_ok_and(|value| value == "off"));
        !*IS_OFF
            && self.shared.len() < MAX_SHARED_RANGES
            && self.unshared_count < MAX_UNSHARED
            && !self.overlaps(range)
    }

    /// Whether something that is registered has a part of the pages of a range.
    fn overlaps(&self, range: &Range<usize>) -> bool {
        let page = page_size();
        let start = range.start / page * page;
        let end = range.end.checked_next_multiple_of(page).unwrap_or(usize::MAX);
        let begun = (start.saturating_sub(self.longest_range), 0)..(end, 0);
        self.ranges.range(begun).any(|((_, other_end), _)| *other_end > start)
    }

    /// Forgets a range. Its shared pages stay if another region has a part of them.
    fn remove(&mut self, registered: &RegisteredRange) {
        // The child of a fork finds neither.
        if let Entry::Occupied(mut count) = self.ranges.entry((registered.range.start, registered.range.end))
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        let is_ended = |other: &Arc<SharedPages>| {
            registered.shared.as_ref().is_some_and(|shared| Arc::ptr_eq(other, shared))
        };
        if let Some(place) = self.shared.iter().position(is_ended) {
            let shared = self.shared.swap_remove(place);
            self.unshared_count += 1;
            if !self.overlaps(&shared.range) {
                // What cannot be put back stays shared with nobody.
                let _ = shared.restore_private();
            }
        }
    }
}

fn page_size() -> usize {
    // SAFETY: asks for a constant.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Whether a file of this length may be made: a signal would end the program otherwise.
fn is_within_file_size_limit(length: usize) -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is ours.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) } == 0;
    known && length as u64 <= limit.rlim_cur
}

fn chunks(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = range.end;
    range.clone().step_by(CHUNK_SIZE).map(move |at| at..end.min(at + CHUNK_SIZE))
}

impl SharedPages {
    /// Shares the whole pages of a range in place. `None`, and nothing has changed, if that cannot be.
    fn share_in_place(range: &Range<usize>) -> Option<SharedPages> {
        let page = page_size();
        let pages = range.start.checked_next_multiple_of(page)?..range.end / page * page;
        if pages.is_empty() || pages.len() > MAX_SHARED_LENGTH || !is_within_file_size_limit(pages.len()) {
            return None;
        }
        install_fork_handlers();
        let _quiet = SignalsBlocked::begin();
        if !is_only_program_thread() || !Mappings::read().ok()?.is_private(&pages) {
            return None;
        }
        let used = PageMap::open().ok()?;
        let memory = SharedMemory::create("softhca-in-place", pages.len(), MapMode::ReadWrite).ok()?;
        let file = File::from(memory.take_descriptor()?);
        let mut shared = SharedPages { range: pages.start..pages.start, file };
        for step in chunks(&pages) {
            if shared.share_chunk(&step, pages.start, &used, page).is_err() {
                break;
            }
            shared.range.end = step.end;
        }
        (!shared.range.is_empty()).then_some(shared)
    }

    /// Copies what pages have into the file, and maps that in their place.
    fn share_chunk(&self, step: &Range<usize>, start: usize, used: &PageMap, page: usize) -> io::Result<()> {
        let used = used.pages_in_use(step, page)?;
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
    fn still_mapped(&self) -> io::Result<Vec<Range<usize>>> {
        let inode = self.file.metadata()?.ino();
        let maps = Mappings::read()?;
        let is_ours = |mapping: &Mapping<'_>| {
            let place = (mapping.range.start as u64).wrapping_sub(self.range.start as u64);
            mapping.inode == inode && mapping.permissions == "rw-s" && mapping.offset == place
        };
        let found = maps.overlapping(&self.range).filter(is_ours).map(|mapping| mapping.range);
        Ok(found.map(|range| range.start..range.end.min(self.range.end)).collect())
    }

    /// Puts private pages with the same bytes back.
    fn restore_private(&self) -> io::Result<()> {
        let _quiet = SignalsBlocked::begin();
        if !is_only_program_thread() {
            return Ok(());
        }
        for place in self.still_mapped()? {
            for step in chunks(&place) {
                self.restore_chunk(&step)?;
            }
        }
        Ok(())
    }

    fn restore_chunk(&self, step: &Range<usize>) -> io::Result<()> {
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
fn install_fork_handlers() {
    static ONCE: Once = Once::new();
    unsafe extern "C" fn prepare() {
        std::mem::forget(REGISTRATIONS.lock());
        library_threads::lock_for_fork();
    }
    unsafe extern "C" fn parent() {
        // SAFETY: held by `prepare`.
        unsafe { library_threads::unlock_after_fork(false) };
        // SAFETY: as above.
        unsafe { REGISTRATIONS.force_unlock() };
    }
    unsafe extern "C" fn child() {
        // SAFETY: held by `prepare`.
        unsafe { library_threads::unlock_after_fork(true) };
        // SAFETY: as above, and the child has no other thread.
        let registered = unsafe { &mut *REGISTRATIONS.data_ptr() };
        registered.ranges.clear();
        for shared in registered.shared.drain(..) {
            for place in shared.still_mapped().unwrap_or_default() {
                let _ = shared.map(&place, (place.start - shared.range.start) as u64, libc::MAP_PRIVATE);
            }
        }
        // SAFETY: held by `prepare`.
        unsafe { REGISTRATIONS.force_unlock() };
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
        let mut all = Registrations {
            ranges: BTreeMap::new(),
            longest_range: 0,
            shared: Vec::new(),
            unshared_count: 0,
        };
        assert!(!all.overlaps(&(0..usize::MAX)));
        let ranges = [10 * page + 5..10 * page + 6, 20 * page..50 * page, 30 * page..31 * page];
        ranges.iter().for_each(|range| all.add(range));
        for (from, to, expected) in
            [(0, 10, false), (10, 11, true), (11, 20, false), (49, 50, true), (50, 60, false)]
        {
            assert_eq!(all.overlaps(&(from * page..to * page)), expected, "{from} to {to}");
        }
        assert!(all.overlaps(&(10 * page + 100..10 * page + 200)), "another part of the page");
        assert!(all.overlaps(&(0..usize::MAX)));
        // One that is there twice is gone when both have ended.
        all.add(&ranges[0]);
        for is_left in [true, false] {
            all.remove(&std::mem::ManuallyDrop::new(RegisteredRange {
                range: ranges[0].clone(),
                shared: None,
            }));
            assert_eq!(all.overlaps(&ranges[0]), is_left);
        }
    }
}
