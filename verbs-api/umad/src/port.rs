//! Open ports: sending and receiving MADs over the stream to the daemon.

use crate::abi::UserMad;
use crate::subnet::{connect, hcas, host, resolve, text};
use core::ffi::{c_char, c_int, c_void};
use core::ptr;
use parking_lot::Mutex;
use softhca::DaemonControl;
use softhca_control::{SubnetRequest, SubnetResponse};
use std::collections::BTreeMap;
use std::os::fd::{IntoRawFd, RawFd};
use std::sync::Arc;

/// The most bytes of a MAD, segments joined. The daemon has the same limit.
const MAX_MAD: usize = 2 << 20;
const POLL_FOREVER: c_int = -1;

/// A port that is open. Its descriptor is the program's, which may close it itself.
pub struct OpenPort {
    /// Registers agents.
    pub control: Mutex<DaemonControl>,
    descriptor: RawFd,
    reader: Mutex<()>,
    writer: Mutex<()>,
}

static PORTS: Mutex<BTreeMap<RawFd, Arc<OpenPort>>> = Mutex::new(BTreeMap::new());

/// The open port with this descriptor.
pub fn find(descriptor: c_int) -> Option<Arc<OpenPort>> {
    PORTS.lock().get(&descriptor).cloned()
}

pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: every thread has an errno.
    unsafe { *libc::__errno_location() = errno };
}

/// Sets errno, and returns it negated.
fn failed(errno: c_int) -> c_int {
    set_errno(errno);
    -errno
}

fn last_errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// `umad_open_port`: returns a descriptor that is readable when a MAD has arrived.
pub unsafe extern "C" fn open_port(name: *const c_char, port: c_int) -> c_int {
    // SAFETY: the caller passes a C string or null.
    let name = unsafe { text(name) };
    let Some((hca, port)) = resolve(&hcas(), name, port) else { return failed(libc::ENODEV) };
    let Some(mut control) = connect() else { return failed(libc::EIO) };
    let request = SubnetRequest::OpenPort { host: host(), hca: hca as u32, port: port as u8 };
    let descriptor = match control.subnet(request) {
        Ok((SubnetResponse::Done, mut descriptors)) if descriptors.len() == 1 => {
            descriptors.remove(0).into_raw_fd()
        }
        Ok(_) => return failed(libc::EIO),
        Err(error) => return failed(error.errno()),
    };
    let control = Mutex::new(control);
    let opened = OpenPort { control, descriptor, reader: Mutex::default(), writer: Mutex::default() };
    PORTS.lock().insert(descriptor, Arc::new(opened));
    descriptor
}

/// `umad_close_port`
pub extern "C" fn close_port(descriptor: c_int) -> c_int {
    if PORTS.lock().remove(&descriptor).is_none() {
        return failed(libc::EBADF);
    }
    // SAFETY: `open_port` returned the descriptor, and the program gives it back.
    unsafe { libc::close(descriptor) };
    0
}

/// `umad_get_fd`
pub extern "C" fn get_fd(descriptor: c_int) -> c_int {
    descriptor
}

/// `umad_poll`
pub extern "C-unwind" fn poll_port(descriptor: c_int, timeout_ms: c_int) -> c_int {
    match wait(descriptor, libc::POLLIN, timeout_ms) {
        Ok(()) => 0,
        Err(errno) => failed(errno),
    }
}

unsafe extern "C-unwind" {
    /// A thread that is cancelled here, as OpenSM's receiver is, unwinds through its callers.
    fn poll(descriptors: *mut libc::pollfd, count: libc::nfds_t, timeout_ms: c_int) -> c_int;
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// Keeps the thread from being cancelled while it holds a lock.
struct CancellationDisabled(c_int);

impl CancellationDisabled {
    fn begin() -> CancellationDisabled {
        const DISABLE: c_int = 1;
        let mut old = 0;
        // SAFETY: the call writes the old state, which outlives it.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut old) };
        CancellationDisabled(old)
    }
}

impl Drop for CancellationDisabled {
    fn drop(&mut self) {
        // SAFETY: the state is one that the thread had.
        unsafe { pthread_setcancelstate(self.0, ptr::null_mut()) };
    }
}

/// Waits for an event of a descriptor. A signal ends it, as it ends a wait for the kernel's device. Nothing here and in
/// callers that can be cancelled has a destructor.
fn wait(descriptor: RawFd, events: i16, timeout_ms: c_int) -> Result<(), c_int> {
    let mut polled = libc::pollfd { fd: descriptor, events, revents: 0 };
    // SAFETY: the array has one element, which outlives the call.
    match unsafe { poll(&raw mut polled, 1, timeout_ms) } {
        1 => Ok(()),
        0 => Err(libc::ETIMEDOUT),
        _ => Err(libc::EIO),
    }
}

/// `umad_get_issm_path`: a program that opens the file is a subnet manager until it closes it.
pub unsafe extern "C" fn get_issm_path(
    name: *const c_char,
    port: c_int,
    path: *mut c_char,
    max: c_int,
) -> c_int {
    // SAFETY: the caller passes a C string or null.
    let name = unsafe { text(name) };
    let hcas = hcas();
    let Some((hca, port)) = resolve(&hcas, name, port) else { return failed(libc::ENODEV) };
    let number: usize =
        hcas[..hca].iter().map(|hca| crate::subnet::ports(hca).count()).sum::<usize>() + port - 1;
    let Some(mut control) = connect() else { return failed(libc::EIO) };
    let root = match control.subnet(SubnetRequest::CreateView { host: host() }) {
        Ok((SubnetResponse::View(root), _)) => root,
        Ok(_) => return failed(libc::EIO),
        Err(error) => return failed(error.errno()),
    };
    let text = format!("{root}/dev/infiniband/issm{number}\0");
    if path.is_null() || text.len() > max.max(0) as usize {
        return failed(libc::ENAMETOOLONG);
    }
    // SAFETY: the caller has room for `max` characters.
    unsafe { ptr::copy_nonoverlapping(text.as_ptr().cast(), path, text.len()) };
    0
}

/// `umad_send`
pub unsafe extern "C" fn send(
    descriptor: c_int,
    agent: c_int,
    umad: *mut UserMad,
    length: c_int,
    timeout_ms: c_int,
    retries: c_int,
) -> c_int {
    let _whole = CancellationDisabled::begin();
    let Some(port) = find(descriptor) else { return failed(libc::EBADF) };
    let Some(length) = usize::try_from(length).ok().filter(|length| *length <= MAX_MAD && !umad.is_null())
    else {
        return failed(libc::EINVAL);
    };
    // SAFETY: the caller passes a buffer with a header.
    let header = unsafe { &mut *umad };
    (header.agent_id, header.timeout_ms, header.retries) = (agent as u32, timeout_ms as u32, retries as u32);
    // The program's header keeps its length.
    let header = UserMad { length: (UserMad::LEN + length) as u32, ..*header };
    let mut parts = [
        libc::iovec { iov_base: (&raw const header).cast_mut().cast(), iov_len: UserMad::LEN },
        libc::iovec { iov_base: umad.wrapping_add(1).cast(), iov_len: length },
    ];
    let _writer = port.writer.lock();
    match write_all(port.descriptor, &mut parts) {
        Ok(()) => 0,
        Err(errno) => failed(errno),
    }
}

/// Writes everything. The daemon always reads, so a full stream has room soon.
fn write_all(descriptor: RawFd, parts: &mut [libc::iovec]) -> Result<(), c_int> {
    while parts.iter().any(|part| part.iov_len > 0) {
        // SAFETY: all zeros is a message without address, data and control data.
        let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (parts.as_mut_ptr(), parts.len() as _);
        // SAFETY: the parts are memory that the caller of this function may read.
        let sent = unsafe { libc::sendmsg(descriptor, &raw const message, libc::MSG_NOSIGNAL) };
        let Ok(mut sent) = usize::try_from(sent) else {
            match last_errno() {
                libc::EINTR => continue,
                libc::EAGAIN => drop(wait(descriptor, libc::POLLOUT, POLL_FOREVER)),
                _ => return Err(libc::EIO),
            }
            continue;
        };
        for part in &mut *parts {
            let done = sent.min(part.iov_len);
            part.iov_base = part.iov_base.wrapping_byte_add(done);
            part.iov_len -= done;
            sent -= done;
        }
    }
    Ok(())
}

/// `umad_recv`: returns the agent that the MAD is for. If the buffer is too short, the MAD stays, `length` has what it
/// needs, and the error is ENOSPC. A thread that waits here can be cancelled.
pub unsafe extern "C-unwind" fn recv(
    descriptor: c_int,
    umad: *mut UserMad,
    length: *mut c_int,
    timeout_ms: c_int,
) -> c_int {
    if umad.is_null() || length.is_null() {
        return failed(libc::EINVAL);
    }
    if timeout_ms != 0
        && let Err(errno) = wait(descriptor, libc::POLLIN, timeout_ms)
    {
        return failed(errno);
    }
    // SAFETY: the caller has room for a header and `length` bytes.
    match unsafe { receive_at(descriptor, umad, &mut *length) } {
        Ok(agent) => agent,
        Err(errno) => failed(errno),
    }
}

/// # Safety
///
/// The buffer has room for a header and `length` bytes.
unsafe fn receive_at(descriptor: RawFd, umad: *mut UserMad, length: &mut c_int) -> Result<c_int, c_int> {
    let _whole = CancellationDisabled::begin();
    let port = find(descriptor).ok_or(libc::EBADF)?;
    let _reader = port.reader.lock();
    // SAFETY: the caller promises it.
    unsafe { receive(descriptor, umad, length) }
}

/// # Safety
///
/// The buffer has room for a header and `length` bytes.
unsafe fn receive(descriptor: RawFd, umad: *mut UserMad, length: &mut c_int) -> Result<c_int, c_int> {
    let mut header = [0u8; UserMad::LEN];
    loop {
        // SAFETY: the buffer has this length.
        let peeked = unsafe {
            libc::recv(
                descriptor,
                header.as_mut_ptr().cast(),
                UserMad::LEN,
                libc::MSG_PEEK | libc::MSG_DONTWAIT,
            )
        };
        match peeked {
            0 => return Err(libc::EIO),
            peeked if peeked == UserMad::LEN as isize => break,
            // The daemon is about to send the rest.
            1.. => std::thread::yield_now(),
            _ => match last_errno() {
                libc::EINTR => {}
                libc::EAGAIN => return Err(libc::EWOULDBLOCK),
                _ => return Err(libc::EIO),
            },
        }
    }
    let total = u32::from_ne_bytes(header[16..20].try_into().expect("four bytes")) as usize;
    let Some(mad) = total.checked_sub(UserMad::LEN).filter(|mad| *mad <= MAX_MAD) else {
        return Err(libc::EIO);
    };
    let room = usize::try_from(*length).unwrap_or(0);
    *length = mad as c_int;
    if mad > room {
        // SAFETY: the buffer has room for a header.
        unsafe { ptr::copy_nonoverlapping(header.as_ptr(), umad.cast(), UserMad::LEN) };
        return Err(libc::ENOSPC);
    }
    // SAFETY: the buffer has room for the whole message.
    unsafe { read_all(descriptor, umad.cast(), total) }?;
    Ok(u32::from_ne_bytes(header[..4].try_into().expect("four bytes")) as c_int)
}

/// # Safety
///
/// The buffer has room for `length` bytes.
unsafe fn read_all(descriptor: RawFd, buffer: *mut c_void, length: usize) -> Result<(), c_int> {
    let mut done = 0;
    while done < length {
        // SAFETY: the rest of the buffer has this length.
        let read = unsafe { libc::recv(descriptor, buffer.byte_add(done), length - done, 0) };
        match read {
            0 => return Err(libc::EIO),
            1.. => done += read as usize,
            _ => match last_errno() {
                libc::EINTR => {}
                libc::EAGAIN => drop(wait(descriptor, libc::POLLIN, POLL_FOREVER)),
                _ => return Err(libc::EIO),
            },
        }
    }
    Ok(())
}
