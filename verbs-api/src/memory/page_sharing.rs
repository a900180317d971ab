//! Memory of the program that a card in another process reaches as its own.
//!
//! Such a card reaches into the program through the kernel, at the price of a call and of a look for every page. Pages
//! that it maps too cost neither. So, when a program registers private memory, shared pages with the same
//! bytes take the place of its own, and private ones again when it deregisters them. The program cannot tell the
//! difference, if nobody writes while pages change places: that happens only while the calling thread is the
//! only one that runs the program's code, and with its signals blocked. Otherwise, and for what is not whole pages, the
//! kernel carries the bytes as before.

#![allow(unsafe_code)]

use super::ForkSafe;
use super::library_threads::{self, SignalsBlocked, is_only_program_thread};
use super::mappings::{Mapping, Mappings, PageMap};
use softhca_queue::{MapMode, SharedMemory};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
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
static REGISTRATIONS: ForkSafe<Registrations> = ForkSafe::new();

/// Where shared pages are, for the child of a fork, which takes no lock.
static SHARED_RANGES: [SharedRangeSlot; MAX_SHARED_RANGES] = [const {
    SharedRangeSlot { start: AtomicUsize::new(0), end: AtomicUsize::new(0), file: AtomicI32::new(-1) }
}; MAX_SHARED_RANGES];

/// A slot of [`SHARED_RANGES`], in use while `end` is not zero. The other fields are written before.
struct SharedRangeSlot {
    start: AtomicUsize,
    end: AtomicUsize,
    file: AtomicI32,
}

#[derive(Default)]
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
    /// Its slot in [`SHARED_RANGES`], once it is complete.
    slot: Option<&'static SharedRangeSlot>,
}

impl Drop for SharedPages {
    fn drop(&mut self) {
        // The child of a fork may have reused the slot; its files have other numbers.
        if let Some(slot) =
            self.slot.filter(|slot| slot.file.load(Ordering::Relaxed) == self.file.as_raw_fd())
        {
            slot.end.store(0, Ordering::Release);
        }
    }
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
                if matches!(shared.restore_private(), Ok(true)) {
                    return;
                }
            }
            // The child of a fork still needs the file to get pages of its own.
            std::mem::forget(shared);
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
        let mut shared = SharedPages { range: pages.start..pages.start, file, slot: None };
        // Registered first: a child that is forked in between gets private pages too.
        let slot = SHARED_RANGES.iter().find(|slot| slot.end.load(Ordering::Acquire) == 0)?;
        slot.start.store(pages.start, Ordering::Relaxed);
        slot.file.store(shared.file.as_raw_fd(), Ordering::Relaxed);
        slot.end.store(pages.end, Ordering::Release);
        shared.slot = Some(slot);
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
        map(self.file.as_raw_fd(), step, (step.start - start) as u64, libc::MAP_SHARED)
    }

    /// Puts private pages with the same bytes back. Returns whether it did: not if another thread could write.
    fn restore_private(&self) -> io::Result<bool> {
        let _quiet = SignalsBlocked::begin();
        if !is_only_program_thread() {
            return Ok(false);
        }
        for place in still_mapped(&self.range, self.file.as_raw_fd())? {
            for step in chunks(&place) {
                self.restore_chunk(&step)?;
            }
        }
        Ok(true)
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

/// Maps a file from `offset` on at a place that has its bytes already.
fn map(file: RawFd, place: &Range<usize>, offset: u64, kind: libc::c_int) -> io::Result<()> {
    let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, kind | libc::MAP_FIXED);
    let at = place.start as *mut libc::c_void;
    // SAFETY: what was mapped there, which the caller has looked at, has the same bytes and rights.
    let mapped = unsafe { libc::mmap(at, place.len(), rights, kind, file, offset as libc::off_t) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Where a file is still mapped as it was in `range`: the program may have mapped something else, or nothing.
fn still_mapped(range: &Range<usize>, file: RawFd) -> io::Result<Vec<Range<usize>>> {
    // SAFETY: zero is valid for every field.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `status` is ours.
    if unsafe { libc::fstat(file, &mut status) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let inode = status.st_ino;
    let maps = Mappings::read()?;
    let is_ours = |mapping: &Mapping<'_>| {
        let place = (mapping.range.start as u64).wrapping_sub(range.start as u64);
        mapping.inode == inode && mapping.permissions == "rw-s" && mapping.offset == place
    };
    let found = maps.overlapping(range).filter(is_ours).map(|mapping| mapping.range);
    Ok(found.map(|found| found.start..found.end.min(range.end)).collect())
}

/// The child of a fork gets pages of its own: what it writes is not the parent's. No handler takes a lock: handlers of
/// the program, which may deregister memory, run before and after.
fn install_fork_handlers() {
    static ONCE: Once = Once::new();
    unsafe extern "C" fn child() {
        library_threads::forget_in_child();
        REGISTRATIONS.replace();
        for slot in &SHARED_RANGES {
            let end = slot.end.swap(0, Ordering::Acquire);
            let range = slot.start.load(Ordering::Relaxed)..end;
            let file = slot.file.load(Ordering::Relaxed);
            if range.is_empty() {
                continue;
            }
            for place in still_mapped(&range, file).unwrap_or_default() {
                let _ = map(file, &place, (place.start - range.start) as u64, libc::MAP_PRIVATE);
            }
        }
    }
    ONCE.call_once(|| {
        // SAFETY: the function stays as long as this library, with which it is forgotten.
        unsafe { libc::pthread_atfork(None, None, Some(child)) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_overlaps_what_has_a_part_of_its_pages() {
        let page = page_size();
        let mut all = Registrations::default();
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
