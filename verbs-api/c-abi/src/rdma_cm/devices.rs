//! The devices that librdmacm opens.

use crate::context::ContextHandle;
use crate::device::{self, DeviceState};
use crate::errno::{self, Rejection};
use crate::object::Handle;
use crate::ops;
use crate::protection::{self, Pd};
use core::ffi::c_int;
use parking_lot::Mutex;
use softhca::DaemonControl;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::Arc;

/// A device that librdmacm has opened, and a protection domain for identifiers without one.
#[derive(Clone, Copy)]
pub(super) struct CmDevice {
    pub context: ContextHandle,
    pub pd: Handle<Pd>,
    pub address: IpAddr,
}

impl CmDevice {
    /// Opens a device over this connection to the daemon, or a new one.
    fn open(control: Option<DaemonControl>, device: &'static DeviceState) -> Result<CmDevice, Rejection> {
        let context = ops::open_device_over(control, Some(device))?;
        Ok(CmDevice { context, pd: protection::allocate(context)?, address: device.host.address })
    }
}

pub(super) fn no_device() -> Rejection {
    Rejection::new(libc::ENODEV, "the process has no device")
}

/// The devices of the process's host, opened on first use, and again after the daemon was lost. There is at least one.
pub(super) fn cm_devices() -> Result<Arc<[CmDevice]>, Rejection> {
    static DEVICES: Mutex<Option<(u32, Arc<[CmDevice]>)>> = Mutex::new(None);
    let mut current = DEVICES.lock();
    let process = std::process::id();
    let is_alive = |device: &CmDevice| device.context.get().is_some_and(|open| open.context.is_alive());
    // A forked child opens devices of its own.
    if let Some((owner, found)) = &*current
        && *owner == process
        && found.iter().all(is_alive)
    {
        return Ok(found.clone());
    }
    let found =
        device::connect_to_host(DaemonControl::connect_to_open).filter(|(_, devices)| !devices.is_empty());
    let (control, devices) = found.ok_or_else(no_device)?;
    if devices.iter().any(|device| device.is_infiniband()) {
        return Err(Rejection::new(
            libc::ENODEV,
            "the connection manager of an InfiniBand subnet is not available: exchange LIDs, or use --fabric roce",
        ));
    }
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

pub extern "C" fn get_devices(count: Option<&mut c_int>) -> *mut ContextHandle {
    errno::pointer("rdma_get_devices", || {
        let devices = cm_devices().unwrap_or_else(|rejection| {
            rejection.code("rdma_get_devices");
            Arc::default()
        });
        let contexts: Vec<ContextHandle> = devices.iter().map(|device| device.context).collect();
        device::new_list(&contexts, count)
    })
}
