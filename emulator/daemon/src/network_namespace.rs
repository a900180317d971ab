//! Network namespaces in which hosts have their sockets.

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

/// Calls `act` in a network namespace, or in that of the caller. Sockets that it opens and threads that it starts stay
/// there.
pub fn within<T: Send>(namespace: Option<&Path>, act: impl FnOnce() -> T + Send) -> io::Result<T> {
    let Some(path) = namespace else { return Ok(act()) };
    let failed = |error: io::Error| {
        io::Error::new(error.kind(), format!("network namespace {}: {error}", path.display()))
    };
    let file = File::open(path).map_err(failed)?;
    // A thread changes its namespace for good.
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(|error| failed(error.into()))?;
            Ok(act())
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
