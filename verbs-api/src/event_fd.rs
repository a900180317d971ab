//! A descriptor that is readable while events wait.

#[cfg(feature = "sockets")]
pub(crate) use softhca_udp::Waker as EventFd;

/// Without sockets, no call returns a descriptor.
#[cfg(not(feature = "sockets"))]
pub(crate) struct EventFd;

#[cfg(not(feature = "sockets"))]
impl EventFd {
    pub fn new() -> std::io::Result<EventFd> {
        Ok(EventFd)
    }

    pub fn wake(&self) {}

    pub fn clear(&self) {}
}
