//! Who else is in this process: threads of the library that never touch the program's memory, and others.

#![allow(unsafe_code)]

use super::ForkSafe;
use softhca_udp::SignalsBlocked;
use std::io;
use std::sync::mpsc;
use std::thread::JoinHandle;

/// The library's own threads.
static LIBRARY_THREADS: ForkSafe<Vec<libc::pid_t>> = ForkSafe::new();

/// Leaves the list when the thread ends, however it does.
struct ThreadRegistration(libc::pid_t);

impl Drop for ThreadRegistration {
    fn drop(&mut self) {
        LIBRARY_THREADS.lock().retain(|other| *other != self.0);
    }
}

fn current_tid() -> libc::pid_t {
    // SAFETY: it has no arguments and cannot fail.
    unsafe { libc::gettid() }
}

/// Starts a thread of the library's own. It never touches memory that the program registers, and takes none of
/// the program's signals.
pub(crate) fn spawn(name: &str, act: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let _quiet = SignalsBlocked::begin();
    let (tell, is_listed) = mpsc::channel();
    let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
        let listed = ThreadRegistration(current_tid());
        LIBRARY_THREADS.lock().push(listed.0);
        // The caller waits for it.
        let _ = tell.send(());
        act();
    })?;
    let _ = is_listed.recv();
    Ok(thread)
}

/// Whether no thread of this process but the caller and bystanders could run the program's code.
pub(super) fn is_only_program_thread() -> bool {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return false };
    let (own, bystanders) = (current_tid(), LIBRARY_THREADS.lock());
    threads.into_iter().all(|thread| {
        let number = thread.ok().and_then(|thread| thread.file_name().to_str()?.parse().ok());
        number.is_some_and(|number| number == own || bystanders.contains(&number))
    })
}

/// In the child of a fork, which has none of the threads. No thread of the parent can hold the new list.
pub(super) fn forget_in_child() {
    LIBRARY_THREADS.replace();
}
