//! The devices that librdmacm opens.

use crate::abi::*;
use crate::errno::Rejection;
use crate::{context, device, ops, protection};
use core::ffi::c_int;
use parking_lot::Mutex;
use softhca::{DaemonControl, Error};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::Arc;

/// A device that librdmacm has opened, and a protection domain for identifiers without one.
#[derive(Clone, Copy)]
pub(super) struct CmDevice {
    context: usize,
    pd: usize,
    pub address: IpAddr,
}

impl CmDevice {
    /// Opens a device over this connection to the daemon, or a new one.
    fn open(control: Option<DaemonControl>, device: *mut ibv_device) -> Result<CmDevice, Rejection> {
        let last = || {
            let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENODEV);
            Rejection::system(errno, "opening a device of the process")
        };
        // SAFETY: a device of this library.
        let (context, address) =
            unsafe { (ops::open_device_over(control, device), device::of(device).host.address) };
        if context.is_null() {
            return Err(last());
        }
        // SAFETY: it was just opened.
        let domain = unsafe { protection::alloc_pd(context) };
        if domain.is_null() {
            return Err(last());
        }
        Ok(CmDevice { context: context as usize, pd: domain as usize, address })
    }

    pub fn context(self) -> *mut ibv_context {
        self.context as *mut ibv_context
    }

    pub fn pd(self) -> *mut ibv_pd {
        self.pd as *mut ibv_pd
    }

    pub fn state<'a>(self) -> Option<&'a context::ContextState> {
        // SAFETY: it was opened; only a faulty program closes it, which is detected.
        unsafe { context::of(self.context()) }
    }
}

/// The devices of the process's host, opened on first use, and again after the daemon was lost. There is at least one.
pub(super) fn cm_devices() -> Result<Arc<[CmDevice]>, Rejection> {
    static DEVICES: Mutex<Option<(u32, Arc<[CmDevice]>)>> = Mutex::new(None);
    let mut current = DEVICES.lock();
    let process = std::process::id();
    let is_alive = |device: &CmDevice| device.state().is_some_and(|open| open.context.is_alive());
    // A forked child opens devices of its own.
    if let Some((owner, found)) = &*current
        && *owner == process
        && found.iter().all(is_alive)
    {
        return Ok(found.clone());
    }
    let found =
        device::connect_to_host(DaemonControl::connect_to_open).filter(|(_, devices)| !devices.is_empty());
    let (control, devices) = found.ok_or(Rejection::new(libc::ENODEV, "the process has no device"))?;
    let mut control = Some(control);
    let opened: Arc<[CmDevice]> =
        devices.into_iter().map(|device| CmDevice::open(control.take(), device)).collect::<Result<_, _>>()?;
    *current = Some((process, opened.clone()));
    Ok(opened)
}

/// The first device of the process.
pub(super) fn default_device() -> Result<CmDevice, Rejection> {
    Ok(cm_devices()?[0])
}

/// The card that connections from and to these addresses use. It is the card with the source address, else the card
/// with the destination address. Otherwise it is the card whose address the kernel would send from, else the first.
pub(super) fn card_for(source: Option<IpAddr>, destination: Option<IpAddr>) -> usize {
    let Ok(devices) = cm_devices() else { return 0 };
    let with_address = |address: IpAddr| devices.iter().position(|device| device.address == address);
    if let Some(source) = source.filter(|source| !source.is_unspecified()) {
        return with_address(source).unwrap_or(0);
    }
    let Some(destination) = destination.filter(|_| devices.len() > 1) else { return 0 };
    let routed = || {
        let any: IpAddr = match destination {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        // Connecting a datagram socket sends nothing.
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect((destination, 4791)).ok()?;
        with_address(socket.local_addr().ok()?.ip())
    };
    with_address(destination).or_else(routed).unwrap_or(0)
}

/// The return value of a librdmacm call: zero, or −1 with errno set.
pub(super) fn return_code(call: &str, result: Result<(), Error>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => Rejection::from(error).minus_one(call),
    }
}

pub unsafe extern "C" fn get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    const VERB: &str = "rdma_get_devices";
    let devices = cm_devices().unwrap_or_else(|rejection| {
        rejection.code(VERB);
        Arc::default()
    });
    // SAFETY: plain allocation, checked below; programs free it with `free_devices`.
    let list = unsafe { libc::calloc(devices.len() + 1, size_of::<*mut ibv_context>()) };
    let list = list.cast::<*mut ibv_context>();
    if list.is_null() {
        return Rejection::new(libc::ENOMEM, "no memory for the list").null(VERB);
    }
    // SAFETY: the list has one entry more, which stays null; the count is a valid pointer of the caller.
    unsafe {
        for (index, device) in devices.iter().enumerate() {
            *list.add(index) = device.context();
        }
        if let Some(count) = count.as_mut() {
            *count = devices.len() as c_int;
        }
    }
    list
}

pub unsafe extern "C" fn free_devices(list: *mut *mut ibv_context) {
    // SAFETY: it came from `get_devices`.
    unsafe { libc::free(list.cast()) };
}
