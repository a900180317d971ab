//! The device list: a process sees the devices of its host.

use crate::abi::*;
use crate::errno::{Rejection, check};
use crate::faults;
use core::ffi::{CStr, c_char, c_int};
use parking_lot::Mutex;
use softhca::{DaemonControl, Error, HostDevice, Verb};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::sync::Once;

/// A device, with the fields that programs for older providers read behind it.
#[repr(C)]
pub struct DeviceState {
    abi: ibv_device,
    /// Providers compare a pointer here with null.
    provider_private: [usize; 8],
    pub host: HostDevice,
    guid: u64,
}

/// The device behind a pointer of a list.
///
/// # Safety
/// `device` is one of [`get_device_list`]; devices are never freed.
pub unsafe fn of<'a>(device: *mut ibv_device) -> &'a DeviceState {
    // SAFETY: the caller guarantees it: the pointer is the start of a leaked `DeviceState`.
    unsafe { &*device.cast::<DeviceState>() }
}

fn fill(field: &mut [c_char], text: &str) {
    let room = field.len() - 1;
    for (to, from) in field[..room].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// The device of a host: the same one on every call.
fn device_for_host(host: HostDevice) -> *mut ibv_device {
    static KNOWN: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());
    let key = format!("{} {}", host.device_name, host.address);
    let mut known = KNOWN.lock();
    let address = *known.entry(key).or_insert_with(|| {
        let mut abi = ibv_device {
            ops: [0; 2],
            node_type: IBV_NODE_CA,
            transport_type: IBV_TRANSPORT_IB,
            name: [0; 64],
            dev_name: [0; 64],
            dev_path: [0; 256],
            ibdev_path: [0; 256],
        };
        let verbs = format!("uverbs{}", host.device_number());
        fill(&mut abi.name, &host.device_name);
        fill(&mut abi.dev_name, &verbs);
        fill(&mut abi.dev_path, &format!("/sys/class/infiniband_verbs/{verbs}"));
        fill(&mut abi.ibdev_path, &format!("/sys/class/infiniband/{}", host.device_name));
        let guid = softhca::Gid::from(host.address).guid();
        Box::into_raw(Box::new(DeviceState { abi, provider_private: [0; 8], host, guid })) as usize
    });
    address as *mut ibv_device
}

/// The devices of this process's host. If there is none, prints the reason to stderr the first time.
pub fn host_devices() -> Vec<*mut ibv_device> {
    connect_to_host(|_| DaemonControl::connect(None)).map_or(Vec::new(), |(_, devices)| devices)
}

/// A connection to the daemon, and the devices of this process's host. If there are none, prints the reason to stderr the
/// first time. `connect` gets the name of the host, if the environment has one.
pub fn connect_to_host(
    connect: impl FnOnce(Option<&str>) -> Result<DaemonControl, Error>,
) -> Option<(DaemonControl, Vec<*mut ibv_device>)> {
    static REPORTED: Once = Once::new();
    faults::prepare();
    let wanted = std::env::var(softhca::HOST_VARIABLE).ok();
    let found = connect(wanted.as_deref()).map_err(|error| error.to_string()).and_then(|control| {
        let devices = control.hosts();
        let host = wanted.or_else(|| devices.first().map(|device| device.host.clone())).unwrap_or_default();
        let of_host: Vec<_> = devices.iter().filter(|device| device.host == host).cloned().collect();
        if of_host.is_empty() {
            let mut names: Vec<_> = devices.iter().map(|device| device.host.as_str()).collect();
            names.dedup();
            return Err(format!("no host {host:?}; available hosts: {}", names.join(", ")));
        }
        Ok((control, of_host))
    });
    match found {
        Ok((control, devices)) => {
            mark_use();
            let present = devices.into_iter().filter(|device| !device.is_removed);
            Some((control, present.map(device_for_host).collect()))
        }
        Err(reason) => {
            REPORTED.call_once(|| eprintln!("softhca: no device: {reason}"));
            None
        }
    }
}

/// Tells `softhca exec` that the program looks for devices here: it writes to the file that the variable names.
fn mark_use() {
    const MARK_VARIABLE: &str = "SOFTHCA_USED_MARK";
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Some(path) = std::env::var_os(MARK_VARIABLE) {
            // If it cannot be written, `exec` warns without need.
            let _ = OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(b"1"));
        }
    });
}

pub unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    check!("ibv_get_device_list", null, faults::announce(Verb::GetDeviceList, None));
    let found = host_devices();
    // SAFETY: plain allocation, checked below; programs free it with `free_device_list`.
    let list =
        unsafe { libc::calloc(found.len() + 1, size_of::<*mut ibv_device>()) }.cast::<*mut ibv_device>();
    if list.is_null() {
        return Rejection::new(libc::ENOMEM, "no memory for the list").null("ibv_get_device_list");
    }
    for (index, device) in found.iter().enumerate() {
        // SAFETY: the list has one entry more, the last of which stays null.
        unsafe { *list.add(index) = *device };
    }
    if !count.is_null() {
        // SAFETY: a valid pointer of the caller.
        unsafe { *count = found.len() as c_int };
    }
    list
}

pub unsafe extern "C" fn free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: it came from `get_device_list`.
    unsafe { libc::free(list.cast()) };
}

pub unsafe extern "C" fn get_device_name(device: *mut ibv_device) -> *const c_char {
    if device.is_null() {
        return core::ptr::null();
    }
    // SAFETY: a device of this library; the name is a field of it.
    unsafe { (&raw const (*device).name).cast() }
}

pub unsafe extern "C" fn get_device_guid(device: *mut ibv_device) -> u64 {
    // SAFETY: a device of this library.
    if device.is_null() { 0 } else { unsafe { of(device) }.guid.to_be() }
}

/// Unknown: an index is the number of a device in the kernel, which programs ask about it.
pub unsafe extern "C" fn get_device_index(_: *mut ibv_device) -> c_int {
    -1
}

impl DeviceState {
    pub fn guid(&self) -> u64 {
        self.guid
    }

    /// The content of a file in the device's sysfs folder.
    fn file(&self, name: &str) -> Option<String> {
        let guid = self.guid;
        let dotted = || {
            let [a, b, c, d] = [guid >> 48, guid >> 32 & 0xffff, guid >> 16 & 0xffff, guid & 0xffff];
            format!("{a:04x}:{b:04x}:{c:04x}:{d:04x}")
        };
        Some(match name {
            "board_id" => "SoftHCA".into(),
            "hca_type" => "SoftHCA".into(),
            "fw_ver" => env!("CARGO_PKG_VERSION").into(),
            "hw_rev" => "0".into(),
            "node_type" => "1: CA".into(),
            "node_desc" => format!("SoftHCA {}", self.host.name),
            "node_guid" | "sys_image_guid" => dotted(),
            _ => return None,
        })
    }
}

/// Reads a file below a sysfs folder. Emulated devices have no such folder and generate the content.
pub unsafe extern "C" fn read_sysfs_file(
    folder: *const c_char,
    file: *const c_char,
    into: *mut c_char,
    size: usize,
) -> c_int {
    const VERB: &str = "ibv_read_sysfs_file";
    if folder.is_null() || file.is_null() || into.is_null() || size == 0 {
        return Rejection::invalid("a null pointer, or no room").minus_one(VERB);
    }
    // SAFETY: valid strings of the caller.
    let [folder, file] = [folder, file].map(|text| unsafe { CStr::from_ptr(text) }.to_string_lossy());
    let ours = host_devices().into_iter().find(|device| {
        // SAFETY: a device of this library; the path is a null-terminated field of it.
        folder == unsafe { CStr::from_ptr((&raw const (**device).ibdev_path).cast()) }.to_string_lossy()
    });
    let text = match ours {
        // SAFETY: a device of this library.
        Some(device) => unsafe { of(device) }.file(&file).ok_or(libc::ENOENT),
        None => std::fs::read_to_string(format!("{folder}/{file}"))
            .map(|text| text.trim_end_matches('\n').into())
            .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)),
    };
    match text {
        Ok(text) => {
            let length = text.len().min(size - 1);
            // SAFETY: the caller's buffer has `size` bytes.
            unsafe {
                core::ptr::copy_nonoverlapping(text.as_ptr(), into.cast(), length);
                *into.add(length) = 0;
            }
            length as c_int
        }
        Err(errno) => Rejection::new(errno, format!("{folder} has no file {file}")).minus_one(VERB),
    }
}

pub unsafe extern "C" fn get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// The daemon accesses the memory of the process that registered it, regardless of its children: a fork needs no
/// preparation.
pub unsafe extern "C" fn fork_init() -> c_int {
    0
}

pub unsafe extern "C" fn is_fork_initialized() -> c_int {
    IBV_FORK_UNNEEDED
}

pub unsafe extern "C" fn fork_range(_: *mut core::ffi::c_void, _: usize) -> c_int {
    0
}
