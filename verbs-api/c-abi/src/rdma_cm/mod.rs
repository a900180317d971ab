//! librdmacm: connections by IP address, over the HCA's connection manager.

mod connection;
mod endpoint;
mod event;
mod identifier;
mod lookup;
mod multicast;

pub use connection::*;
pub use endpoint::*;
pub use event::*;
pub use identifier::*;
pub use lookup::*;
pub use multicast::*;

use crate::abi::*;
use crate::errno::Rejection;
use crate::{context, device, protection};
use core::ffi::c_int;
use parking_lot::Mutex;
use softhca::Error;

/// The default of every identifier: the device, opened once, and a protection domain for identifiers without one.
#[derive(Clone, Copy)]
struct DefaultDevice {
    context: usize,
    pd: usize,
}

impl DefaultDevice {
    fn context(self) -> *mut ibv_context {
        self.context as *mut ibv_context
    }

    fn pd(self) -> *mut ibv_pd {
        self.pd as *mut ibv_pd
    }

    fn state<'a>(self) -> Option<&'a context::ContextState> {
        // SAFETY: it is opened below; only a faulty program closes it, which is detected.
        unsafe { context::of(self.context()) }
    }
}

/// The process's device, opened on first use, and again after the daemon was lost.
fn default_device() -> Result<DefaultDevice, Rejection> {
    static DEVICE: Mutex<Option<(u32, DefaultDevice)>> = Mutex::new(None);
    let mut current = DEVICE.lock();
    let process = std::process::id();
    // A forked child opens a device of its own.
    if let Some((owner, found)) = *current
        && owner == process
        && found.state().is_some_and(|open| open.context.is_alive())
    {
        return Ok(found);
    }
    let no_device = || Rejection::new(libc::ENODEV, "the process has no device");
    let device = device::default_device().ok_or_else(no_device)?;
    let last = || {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENODEV);
        Rejection::system(errno, "opening the device of the process")
    };
    // SAFETY: a device of this library.
    let context = unsafe { context::open_device(device) };
    if context.is_null() {
        return Err(last());
    }
    // SAFETY: it was just opened.
    let domain = unsafe { protection::alloc_pd(context) };
    if domain.is_null() {
        return Err(last());
    }
    let found = DefaultDevice { context: context as usize, pd: domain as usize };
    *current = Some((process, found));
    Ok(found)
}

/// The return value of a librdmacm call: zero, or −1 with errno set.
fn return_code(call: &str, result: Result<(), Error>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => Rejection::from(error).minus_one(call),
    }
}

pub unsafe extern "C" fn get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    let found = default_device();
    // SAFETY: plain allocation, checked below; programs free it with `free_devices`.
    let list = unsafe { libc::calloc(2, size_of::<*mut ibv_context>()) }.cast::<*mut ibv_context>();
    if list.is_null() {
        return Rejection::new(libc::ENOMEM, "no memory for the list").null("rdma_get_devices");
    }
    let found = found.map_err(|rejection| rejection.code("rdma_get_devices"));
    // SAFETY: the list has two entries, the last of which stays null; the count is a valid pointer of the caller.
    unsafe {
        if let Ok(default) = found {
            *list = default.context();
        }
        if let Some(count) = count.as_mut() {
            *count = c_int::from(found.is_ok());
        }
    }
    list
}

pub unsafe extern "C" fn free_devices(list: *mut *mut ibv_context) {
    // SAFETY: it came from `get_devices`.
    unsafe { libc::free(list.cast()) };
}
