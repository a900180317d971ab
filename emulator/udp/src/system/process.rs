//! Distinguishes a process from the children that it forks.
//!
//! A child has copies of its parent's handles but not its threads, and shared objects (rings, doorbells, sockets)
//! belong to the parent. A page that the kernel wipes in the child distinguishes the two with one load, even if
//! process IDs are reused.

use std::sync::atomic::{AtomicU64, Ordering};

/// The process that owns an object.
#[derive(Clone, Copy, Debug)]
pub struct ProcessIdentity {
    generation: u64,
    /// The process ID, for messages.
    pub pid: u32,
    page: Option<&'static AtomicU64>,
}

impl PartialEq for ProcessIdentity {
    fn eq(&self, other: &ProcessIdentity) -> bool {
        self.generation == other.generation
    }
}

impl Eq for ProcessIdentity {}

/// The generations assigned so far in this process and its ancestors. A child continues to count.
static GENERATIONS: AtomicU64 = AtomicU64::new(0);

impl ProcessIdentity {
    /// The current process.
    pub fn current() -> ProcessIdentity {
        let pid = std::process::id();
        let page = wiped_page();
        let Some(word) = page else { return ProcessIdentity { generation: pid.into(), pid, page } };
        let generation = GENERATIONS.fetch_add(1, Ordering::Relaxed) + 1;
        let generation = match word.compare_exchange(0, generation, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => generation,
            Err(existing) => existing,
        };
        ProcessIdentity { generation, pid, page }
    }

    /// Whether this is the current process, and not a parent of it.
    #[inline]
    pub fn is_current(&self) -> bool {
        match self.page {
            Some(page) => page.load(Ordering::Relaxed) == self.generation,
            None => u64::from(std::process::id()) == self.generation,
        }
    }
}

/// Calls `act` when the process exits, unless it is killed.
pub fn at_exit(act: extern "C" fn()) {
    // SAFETY: the function has no arguments and stays as long as the library that contains it, with which the C library
    // calls it at the latest.
    unsafe { libc::atexit(act) };
}

/// The word that is zero in a child until the child is identified. `None` where the kernel does not wipe pages.
#[cfg(target_os = "linux")]
fn wiped_page() -> Option<&'static AtomicU64> {
    use std::ptr;
    use std::sync::atomic::AtomicPtr;

    const SIZE: usize = 4096;
    /// Null: not mapped yet. `UNSUPPORTED`: the kernel has no such pages. Lock-free, because a fork can happen at any
    /// time.
    static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
    static UNSUPPORTED: AtomicU64 = AtomicU64::new(0);

    let unsupported = ptr::from_ref(&UNSUPPORTED).cast_mut();
    let mut at = PAGE.load(Ordering::Acquire);
    if at.is_null() {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let mapped = unsafe { libc::mmap(ptr::null_mut(), SIZE, access, kind, -1, 0) };
        let mut made = mapped.cast::<AtomicU64>();
        // SAFETY: the page was just mapped and is not shared yet.
        if mapped == libc::MAP_FAILED || unsafe { libc::madvise(mapped, SIZE, libc::MADV_WIPEONFORK) } != 0 {
            made = unsupported;
        }
        // If two threads map a page at once, the second page stays mapped and unused.
        at = match PAGE.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => made,
            Err(other) => other,
        };
    }
    // SAFETY: a page that stays mapped, or a static; both are only accessed as atomics.
    (at != unsupported).then(|| unsafe { &*at })
}

#[cfg(not(target_os = "linux"))]
fn wiped_page() -> Option<&'static AtomicU64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forked_child_has_an_identity_of_its_own() {
        let mark = ProcessIdentity::current();
        assert_eq!(mark, ProcessIdentity::current());
        assert!(mark.is_current());
        // SAFETY: the child calls nothing but atomics, `getpid` and `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let differs = !mark.is_current();
            let own = ProcessIdentity::current();
            let right = differs && own.is_current() && !mark.is_current() && own != mark;
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!right)) };
        }
        let mut status = -1;
        // SAFETY: `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child saw itself as its parent");
        assert!(mark.is_current());
    }
}
