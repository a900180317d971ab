//! The device list: a process sees the devices of its host.

use crate::abi::*;
use crate::errno::{self, Rejection};
use crate::faults;
use core::ffi::{CStr, c_char, c_int, c_void};
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

fn fill(field: &mut [c_char], text: &str) {
    let room = field.len() - 1;
    for (to, from) in field[..room].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

fn sysfs_folder(host: &HostDevice) -> String {
    format!("/sys/class/infiniband/{}", host.device_name)
}

/// The device of a host: the same one on every call.
fn device_for_host(host: HostDevice) -> &'static DeviceState {
    static KNOWN: Mutex<BTreeMap<String, &'static DeviceState>> = Mutex::new(BTreeMap::new());
    let key = format!("{} {}", host.device_name, host.address);
    let mut known = KNOWN.lock();
    known.entry(key).or_insert_with(|| {
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
        fill(&mut abi.ibdev_path, &sysfs_folder(&host));
        let guid = host.node_guid.unwrap_or_else(|| softhca::Gid::from(host.address).guid());
        Box::leak(Box::new(DeviceState { abi, provider_private: [0; 8], host, guid }))
    })
}

/// The devices of this process's host. If there is none, prints the reason to stderr the first time.
pub fn host_devices() -> Vec<&'static DeviceState> {
    connect_to_host(|_| DaemonControl::connect(None)).map_or(Vec::new(), |(_, devices)| devices)
}

/// A connection to the daemon, and the devices of this process's host. If there are none, prints the reason to stderr the
/// first time. `connect` gets the name of the host, if the environment has one.
pub fn connect_to_host(
    connect: impl FnOnce(Option<&str>) -> Result<DaemonControl, Error>,
) -> Option<(DaemonControl, Vec<&'static DeviceState>)> {
    static REPORTED: Once = Once::new();
    faults::prepare();
    let wanted = std::env::var(softhca::HOST_VARIABLE).ok();
    let found = connect(wanted.as_deref()).map_err(|error| error.to_string()).and_then(|mut control| {
        if control.subnet_settings().is_some() {
            let devices = control.subnet_devices(wanted.as_deref()).map_err(|error| error.to_string())?;
            return Ok((control, devices));
        }
        let devices = control.hosts();
        if devices.is_empty() {
            return Err("the daemon has no devices".into());
        }
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

/// The loader calls it when a program has loaded the library: a program that ends at once is not seen otherwise.
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = mark_load;

extern "C" fn mark_load() {
    mark(b"l", |length| length == 0);
}

/// The program looks for devices here.
fn mark_use() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| mark(b"u", |_| true));
}

/// Tells `softhca exec`: adds a letter to the file that the variable names, if its length is `wanted`.
fn mark(letter: &[u8], wanted: impl FnOnce(u64) -> bool) {
    const MARK_VARIABLE: &str = "SOFTHCA_USED_MARK";
    let Some(path) = std::env::var_os(MARK_VARIABLE) else { return };
    // If it cannot be written, `exec` warns without need.
    if let Ok(mut file) = OpenOptions::new().append(true).open(path)
        && file.metadata().is_ok_and(|file| wanted(file.len()))
    {
        let _ = file.write_all(letter);
    }
}

/// Allocates a list that ends with a null pointer, for programs, which free it with [`free_list`].
pub fn new_list<T: Copy>(entries: &[T], count: Option<&mut c_int>) -> Result<*mut T, Rejection> {
    const { assert!(size_of::<T>() == size_of::<usize>(), "a list of pointers") };
    // SAFETY: plain allocation, checked below.
    let list = unsafe { libc::calloc(entries.len() + 1, size_of::<T>()) }.cast::<T>();
    if list.is_null() {
        return Err(Rejection::new(libc::ENOMEM, "no memory for the list"));
    }
    // SAFETY: the list has one entry more.
    unsafe { core::ptr::copy_nonoverlapping(entries.as_ptr(), list, entries.len()) };
    if let Some(count) = count {
        *count = entries.len() as c_int;
    }
    Ok(list)
}

/// # Safety
/// `list` came from [`new_list`].
pub unsafe extern "C" fn free_list(list: *mut c_void) {
    // SAFETY: the caller guarantees it.
    unsafe { libc::free(list) };
}

pub extern "C" fn get_device_list(count: Option<&mut c_int>) -> *mut &'static DeviceState {
    errno::pointer("ibv_get_device_list", || {
        faults::announce(Verb::GetDeviceList, None)?;
        new_list(&host_devices(), count)
    })
}

pub extern "C" fn get_device_name(device: Option<&'static DeviceState>) -> *const c_char {
    device.map_or(core::ptr::null(), |device| device.abi.name.as_ptr())
}

pub extern "C" fn get_device_guid(device: Option<&'static DeviceState>) -> u64 {
    device.map_or(0, |device| device.guid.to_be())
}

/// Unknown: an index is the number of a device in the kernel, which programs ask about it.
pub extern "C" fn get_device_index(_: Option<&'static DeviceState>) -> c_int {
    -1
}

impl DeviceState {
    /// Whether the port is one of an InfiniBand subnet.
    pub fn is_infiniband(&self) -> bool {
        self.host.node_guid.is_some()
    }

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
///
/// # Safety
/// The strings are valid, and `into` has `size` bytes.
pub unsafe extern "C" fn read_sysfs_file(
    folder: *const c_char,
    file: *const c_char,
    into: *mut c_char,
    size: usize,
) -> c_int {
    errno::number("ibv_read_sysfs_file", || {
        if folder.is_null() || file.is_null() || into.is_null() || size == 0 {
            return Err(Rejection::invalid("a null pointer, or no room"));
        }
        // SAFETY: the caller guarantees it.
        let [folder, file] = [folder, file].map(|text| unsafe { CStr::from_ptr(text) }.to_string_lossy());
        let text = match host_devices().into_iter().find(|device| folder == sysfs_folder(&device.host)) {
            Some(device) => device.file(&file).ok_or(libc::ENOENT),
            None => std::fs::read_to_string(format!("{folder}/{file}"))
                .map(|text| text.trim_end_matches('\n').into())
                .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)),
        };
        let text = text.map_err(|errno| Rejection::new(errno, format!("{folder} has no file {file}")))?;
        let length = text.len().min(size - 1);
        // SAFETY: the caller guarantees it.
        unsafe {
            core::ptr::copy_nonoverlapping(text.as_ptr(), into.cast(), length);
            *into.add(length) = 0;
        }
        Ok(length as c_int)
    })
}

pub extern "C" fn get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// The daemon accesses the memory of the process that registered it, regardless of its children: a fork needs no
/// preparation.
pub extern "C" fn fork_init() -> c_int {
    0
}

pub extern "C" fn is_fork_initialized() -> c_int {
    IBV_FORK_UNNEEDED
}

pub extern "C" fn fork_range(_: *mut c_void, _: usize) -> c_int {
    0
}
