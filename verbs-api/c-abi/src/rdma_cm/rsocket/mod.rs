//! rsockets: stream sockets over reliable connections, as rsocket(7) describes them.

mod options;
mod socket;
mod stream;
mod wait;

use super::identifier::find_address;
use super::lookup::write_sockaddr;
use crate::abi::Storage;
use crate::errno::{self, Rejection};
use core::ffi::{c_int, c_void};
use libc::{iovec, msghdr, off_t, sockaddr, socklen_t, ssize_t};
use options::{RDMA_INLINE, SOL_RDMA, default_option};
use socket::{Phase, Rsocket, State};
use softhca::cm::CmOption;
use std::net::SocketAddr;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

pub extern "C" fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // The preload library falls back to a socket of the system. It does not know accept4 either, which programs use
    // that pass flags in the type.
    errno::number("rsocket", || match (domain, kind, protocol) {
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => Rsocket::open(),
        (libc::AF_INET | libc::AF_INET6, ..) => {
            let why =
                "only stream sockets without flags are supported, no datagrams: SOCK_STREAM, IPPROTO_TCP";
            Err(Rejection::new(libc::EPROTONOSUPPORT, why))
        }
        _ => {
            let why = format!("address family {domain} is not supported, only AF_INET and AF_INET6");
            Err(Rejection::new(libc::EAFNOSUPPORT, why))
        }
    })
}

pub unsafe extern "C" fn bind(descriptor: c_int, address: *const sockaddr, _: socklen_t) -> c_int {
    errno::minus_one("rbind", || {
        // SAFETY: the caller's address.
        let address = unsafe { find_address(address) }?;
        Ok(Rsocket::find(descriptor)?.lock().cm.bind(address)?)
    })
}

pub extern "C" fn listen(descriptor: c_int, backlog: c_int) -> c_int {
    errno::minus_one("rlisten", || Rsocket::find(descriptor)?.lock().listen(backlog))
}

pub unsafe extern "C" fn accept(descriptor: c_int, into: *mut sockaddr, length: *mut socklen_t) -> c_int {
    errno::number("raccept", || {
        let socket = Rsocket::find(descriptor)?;
        let may_block = !socket.lock().is_nonblocking;
        let accepted = socket.wait_for(may_block, State::accept)?;
        if let Some(peer) = Rsocket::get(accepted).and_then(|accepted| accepted.lock().cm.id().peer_address())
        {
            // SAFETY: the caller's memory.
            unsafe { return_address(peer, into, length) };
        }
        Ok(accepted)
    })
}

pub unsafe extern "C" fn connect(descriptor: c_int, address: *const sockaddr, _: socklen_t) -> c_int {
    errno::minus_one("rconnect", || {
        // SAFETY: the caller's address.
        let address = unsafe { find_address(address) }?;
        let socket = Rsocket::find(descriptor)?;
        let may_block = {
            let mut state = socket.lock();
            state.connect(address)?;
            !state.is_nonblocking
        };
        let is_connected = |state: &mut State| {
            let is_connected = state.connected()?.is_some();
            Ok((is_connected || !may_block).then_some(is_connected))
        };
        match socket.wait_for(true, is_connected)? {
            true => Ok(()),
            false => Err(Rejection::new(libc::EINPROGRESS, "")),
        }
    })
}

/// Ends directions of a connection, and waits until the peer has acknowledged all data.
fn shut_down(socket: &Arc<Rsocket>, how: c_int) -> Result<(), Rejection> {
    let (is_read, is_write) = match how {
        libc::SHUT_RD => (true, false),
        libc::SHUT_WR => (false, true),
        libc::SHUT_RDWR => (true, true),
        _ => return Err(Rejection::invalid(format!("{how} is not a direction"))),
    };
    {
        let mut state = socket.lock();
        if matches!(state.phase, Phase::Unconnected | Phase::Listening) {
            return Err(socket::not_connected());
        }
        state.shut_down(is_read, is_write);
        socket.wake(&mut state);
    }
    let is_flushed = |state: &mut State| {
        let is_over = state.phase != Phase::Connected;
        let is_flushed = state.stream.as_ref().is_none_or(|stream| stream.is_flushed());
        Ok((is_over || is_flushed).then_some(()))
    };
    socket.wait_for(true, is_flushed)
}

pub unsafe extern "C" fn shutdown(descriptor: c_int, how: c_int) -> c_int {
    errno::minus_one("rshutdown", || shut_down(&Rsocket::find(descriptor)?, how))
}

pub extern "C" fn close(descriptor: c_int) -> c_int {
    // A forked child closes its copy of the descriptor only.
    errno::minus_one("rclose", || {
        let socket = Rsocket::find(descriptor)?;
        let is_connected = socket.lock().phase == Phase::Connected;
        // A signal ends the wait; the socket is closed all the same.
        if is_connected {
            let _ = shut_down(&socket, libc::SHUT_RDWR);
        }
        Rsocket::remove(descriptor);
        Ok(())
    })
}

/// The memory of a vector.
///
/// # Safety
/// `count` vectors at `vectors`, whose memory stays valid and is not used otherwise while the result exists.
unsafe fn slices<'a>(vectors: *const iovec, count: usize) -> impl Iterator<Item = &'a mut [u8]> {
    // SAFETY: the caller guarantees it.
    let vectors = unsafe { if count == 0 { &[][..] } else { core::slice::from_raw_parts(vectors, count) } };
    vectors.iter().filter(|vector| vector.iov_len > 0 && !vector.iov_base.is_null()).map(|vector| {
        // SAFETY: the caller guarantees it.
        unsafe { core::slice::from_raw_parts_mut(vector.iov_base.cast::<u8>(), vector.iov_len) }
    })
}

/// Repeats `attempt` until all vectors are done or it returns zero. `attempt` receives into or sends from the rest of a
/// vector, and gets the number of bytes so far. The first byte is waited for; with `waits_for_all`, every byte.
///
/// # Safety
/// As [`slices`].
unsafe fn transfer(
    descriptor: c_int,
    (vectors, count): (*const iovec, usize),
    flags: c_int,
    waits_for_all: bool,
    mut attempt: impl FnMut(&mut State, &mut [u8], usize) -> Result<Option<usize>, Rejection>,
) -> Result<ssize_t, Rejection> {
    let socket = Rsocket::find(descriptor)?;
    let may_block = !socket.lock().is_nonblocking && flags & libc::MSG_DONTWAIT == 0;
    let mut done = 0;
    // SAFETY: the caller guarantees it.
    for mut rest in unsafe { slices(vectors, count) } {
        while !rest.is_empty() {
            let waits = may_block && (waits_for_all || done == 0);
            match socket.wait_for(waits, |state| attempt(state, rest, done)) {
                // The bytes that have arrived are enough.
                Ok(length) if length == 0 || length < rest.len() && !waits_for_all => {
                    return Ok((done + length) as ssize_t);
                }
                Ok(length) => (rest, done) = (&mut rest[length..], done + length),
                Err(_) if done > 0 => return Ok(done as ssize_t),
                Err(rejection) => return Err(rejection),
            }
        }
    }
    Ok(done as ssize_t)
}

/// Receives into vectors.
///
/// # Safety
/// As [`slices`].
unsafe fn receive_into(
    verb: &str,
    descriptor: c_int,
    vectors: *const iovec,
    count: usize,
    flags: c_int,
) -> ssize_t {
    let is_peek = flags & libc::MSG_PEEK != 0;
    let receive = |state: &mut State, into: &mut [u8], done: usize| {
        let is_at_end = state.is_at_end();
        let Some(stream) = state.connected()? else { return Ok(None) };
        let length = if is_peek { stream.peek(into, done) } else { stream.receive(into) };
        Ok(Some(length).filter(|length| *length > 0 || is_at_end))
    };
    let waits_for_all = flags & libc::MSG_WAITALL != 0 && !is_peek;
    // SAFETY: the caller guarantees it.
    errno::number(verb, || unsafe { transfer(descriptor, (vectors, count), flags, waits_for_all, receive) })
}

/// Sends from vectors.
///
/// # Safety
/// As [`slices`].
unsafe fn send_from(
    verb: &str,
    descriptor: c_int,
    vectors: *const iovec,
    count: usize,
    flags: c_int,
) -> ssize_t {
    let send = |state: &mut State, data: &mut [u8], _| {
        let Some(stream) = state.writable()? else { return Ok(None) };
        Ok(Some(stream.send(data)?).filter(|length| *length > 0))
    };
    // SAFETY: the caller guarantees it.
    errno::number(verb, || unsafe { transfer(descriptor, (vectors, count), flags, true, send) })
}

fn vector(base: *const c_void, length: usize) -> iovec {
    iovec { iov_base: base.cast_mut(), iov_len: length }
}

pub unsafe extern "C" fn recv(descriptor: c_int, into: *mut c_void, length: usize, flags: c_int) -> ssize_t {
    // SAFETY: the caller's memory.
    unsafe { receive_into("rrecv", descriptor, &vector(into, length), 1, flags) }
}

pub unsafe extern "C" fn recvfrom(
    descriptor: c_int,
    into: *mut c_void,
    length: usize,
    flags: c_int,
    address: *mut sockaddr,
    address_length: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the caller's memory.
    let received = unsafe { receive_into("rrecvfrom", descriptor, &vector(into, length), 1, flags) };
    if received >= 0 && !address.is_null() {
        // SAFETY: the caller's memory.
        unsafe { getpeername(descriptor, address, address_length) };
    }
    received
}

pub unsafe extern "C" fn recvmsg(descriptor: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's message.
    unsafe {
        let message = &mut *message;
        (message.msg_controllen, message.msg_flags) = (0, 0);
        receive_into("rrecvmsg", descriptor, message.msg_iov, message.msg_iovlen, flags)
    }
}

pub unsafe extern "C" fn send(
    descriptor: c_int,
    data: *const c_void,
    length: usize,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's memory.
    unsafe { send_from("rsend", descriptor, &vector(data, length), 1, flags) }
}

pub unsafe extern "C" fn sendto(
    descriptor: c_int,
    data: *const c_void,
    length: usize,
    flags: c_int,
    _: *const sockaddr,
    _: socklen_t,
) -> ssize_t {
    // SAFETY: the caller's memory. As with TCP, the address is ignored.
    unsafe { send_from("rsendto", descriptor, &vector(data, length), 1, flags) }
}

pub unsafe extern "C" fn sendmsg(descriptor: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's message.
    unsafe {
        if (*message).msg_controllen > 0 {
            let why = "ancillary data is not supported";
            return errno::number("rsendmsg", || Err(Rejection::unsupported(why)));
        }
        send_from("rsendmsg", descriptor, (*message).msg_iov, (*message).msg_iovlen, flags)
    }
}

pub unsafe extern "C" fn read(descriptor: c_int, into: *mut c_void, length: usize) -> ssize_t {
    // SAFETY: the caller's memory.
    unsafe { receive_into("rread", descriptor, &vector(into, length), 1, 0) }
}

pub unsafe extern "C" fn readv(descriptor: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the caller's vectors.
    unsafe { receive_into("rreadv", descriptor, vectors, count.max(0) as usize, 0) }
}

pub unsafe extern "C" fn write(descriptor: c_int, data: *const c_void, length: usize) -> ssize_t {
    // SAFETY: the caller's memory.
    unsafe { send_from("rwrite", descriptor, &vector(data, length), 1, 0) }
}

pub unsafe extern "C" fn writev(descriptor: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the caller's vectors.
    unsafe { send_from("rwritev", descriptor, vectors, count.max(0) as usize, 0) }
}

pub unsafe extern "C" fn poll(entries: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the caller's entries.
    let entries = unsafe {
        if count == 0 { &mut [][..] } else { core::slice::from_raw_parts_mut(entries, count as usize) }
    };
    let timeout = u64::try_from(timeout).ok().map(Duration::from_millis);
    errno::number("rpoll", || socket::poll(entries, timeout))
}

pub unsafe extern "C" fn select(
    count: c_int,
    readable: *mut libc::fd_set,
    writable: *mut libc::fd_set,
    exceptional: *mut libc::fd_set,
    timeout: *mut libc::timeval,
) -> c_int {
    let sets = [
        (readable, libc::POLLIN, libc::POLLIN | libc::POLLHUP | libc::POLLERR),
        (writable, libc::POLLOUT, libc::POLLOUT | libc::POLLERR),
        (exceptional, libc::POLLPRI, libc::POLLPRI),
    ];
    let mut entries = Vec::new();
    for fd in 0..count.clamp(0, libc::FD_SETSIZE as c_int) {
        // SAFETY: the caller's sets; the descriptor is in their range.
        let is_in = |set: *mut libc::fd_set| unsafe { !set.is_null() && libc::FD_ISSET(fd, set) };
        let events =
            sets.iter().filter(|(set, ..)| is_in(*set)).fold(0, |events, (_, event, _)| events | event);
        if events != 0 {
            entries.push(libc::pollfd { fd, events, revents: 0 });
        }
    }
    // SAFETY: null, or the caller's time.
    let timeout = unsafe { timeout.as_ref() }.map(|time| {
        Duration::from_secs(time.tv_sec.max(0) as u64) + Duration::from_micros(time.tv_usec.max(0) as u64)
    });
    if errno::number("rselect", || socket::poll(&mut entries, timeout)) < 0 {
        return -1;
    }
    let mut ready = 0;
    for entry in &entries {
        for (set, event, meaning) in sets {
            if entry.events & event == 0 {
                continue;
            }
            match entry.revents & meaning {
                // SAFETY: the descriptor is in the set, which is therefore not null.
                0 => unsafe { libc::FD_CLR(entry.fd, set) },
                _ => ready += 1,
            }
        }
    }
    ready
}

/// Writes an address to the caller's memory, as far as that goes.
///
/// # Safety
/// Both are null, or `into` has `*length` bytes.
unsafe fn return_address(address: SocketAddr, into: *mut sockaddr, length: *mut socklen_t) {
    if into.is_null() || length.is_null() {
        return;
    }
    let mut storage = Storage([0; 128]);
    let full = write_sockaddr(address, &mut storage);
    // SAFETY: the caller guarantees it.
    unsafe {
        let part = full.min(*length) as usize;
        core::ptr::copy_nonoverlapping((&raw const storage).cast::<u8>(), into.cast::<u8>(), part);
        *length = full;
    }
}

pub unsafe extern "C" fn getpeername(
    descriptor: c_int,
    into: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    errno::minus_one("rgetpeername", || {
        let peer = Rsocket::find(descriptor)?.lock().cm.id().peer_address();
        // SAFETY: the caller's memory.
        unsafe { return_address(peer.ok_or_else(socket::not_connected)?, into, length) };
        Ok(())
    })
}

pub unsafe extern "C" fn getsockname(
    descriptor: c_int,
    into: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    errno::minus_one("rgetsockname", || {
        let local = Rsocket::find(descriptor)?.lock().cm.id().local_address();
        // SAFETY: the caller's memory. A socket that is not bound has no address.
        unsafe { return_address(local.unwrap_or_else(|| SocketAddr::from(([0; 4], 0))), into, length) };
        Ok(())
    })
}

fn unsupported_option(level: c_int, name: c_int) -> Rejection {
    Rejection::unsupported(format!("option {name} of level {level:#x} is not supported"))
}

pub unsafe extern "C" fn setsockopt(
    descriptor: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    errno::minus_one("rsetsockopt", || {
        let socket = Rsocket::find(descriptor)?;
        let default = default_option(level, name).ok_or_else(|| unsupported_option(level, name))?;
        if value.is_null() || (length as usize) < default.len() {
            return Err(Rejection::invalid(format!("option {name} has {} bytes", default.len())));
        }
        // SAFETY: the caller's value has the given length.
        let bytes = unsafe { core::slice::from_raw_parts(value.cast::<u8>(), default.len()) }.to_vec();
        let is_set = bytes.iter().any(|byte| *byte != 0);
        let mut state = socket.lock();
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_TYPE) => return Err(unsupported_option(level, name)),
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => state.cm.set_option(CmOption::ReuseAddress(is_set))?,
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => state.cm.set_option(CmOption::AfOnly(is_set))?,
            (SOL_RDMA, ..=RDMA_INLINE) if state.stream.is_some() => {
                return Err(Rejection::invalid("the queues of the connection exist already"));
            }
            _ => {}
        }
        state.options.insert((level, name), bytes);
        Ok(())
    })
}

pub unsafe extern "C" fn getsockopt(
    descriptor: c_int,
    level: c_int,
    name: c_int,
    into: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    errno::minus_one("rgetsockopt", || {
        let socket = Rsocket::find(descriptor)?;
        let mut state = socket.lock();
        let bytes: Vec<u8> = if (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR) {
            std::mem::take(&mut state.error).to_ne_bytes().into()
        } else {
            let set = state.options.get(&(level, name)).cloned();
            set.or_else(|| default_option(level, name)).ok_or_else(|| unsupported_option(level, name))?
        };
        // SAFETY: the caller's memory of the given length.
        unsafe {
            let part = bytes.len().min(*length as usize);
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), into.cast::<u8>(), part);
            *length = part as socklen_t;
        }
        Ok(())
    })
}

/// `fcntl`: flags only. The argument of a variadic function is passed like that of any other.
pub extern "C" fn fcntl(descriptor: c_int, command: c_int, argument: c_int) -> c_int {
    errno::number("rfcntl", || {
        let socket = Rsocket::find(descriptor)?;
        let mut state = socket.lock();
        Ok(match command {
            libc::F_GETFL => libc::O_RDWR | if state.is_nonblocking { libc::O_NONBLOCK } else { 0 },
            libc::F_SETFL => {
                state.is_nonblocking = argument & libc::O_NONBLOCK != 0;
                0
            }
            // SAFETY: a descriptor of this library.
            libc::F_GETFD | libc::F_SETFD => unsafe { libc::fcntl(descriptor, command, argument) },
            _ => return Err(Rejection::unsupported(format!("command {command} is not supported"))),
        })
    })
}

pub unsafe extern "C" fn iomap(
    descriptor: c_int,
    base: *mut c_void,
    length: usize,
    protection: c_int,
    _flags: c_int,
    offset: off_t,
) -> off_t {
    errno::number("riomap", || {
        let socket = Rsocket::find(descriptor)?;
        let pointer = NonNull::new(base.cast::<u8>()).filter(|_| length > 0 && u32::try_from(length).is_ok());
        let pointer = pointer.ok_or_else(|| Rejection::invalid("no memory, or 4 GiB and more"))?;
        if protection & !libc::PROT_WRITE != 0 {
            return Err(Rejection::invalid("the protection is neither PROT_WRITE nor PROT_NONE"));
        }
        let offset = if offset == -1 { base as off_t } else { offset };
        let mut state = socket.lock();
        state.context().allow_silent_waits();
        // The side that accepts knows the peer before the connection is confirmed.
        let stream = match state.phase {
            Phase::Connecting => state.stream.as_mut().filter(|stream| stream.has_peer()),
            _ => state.connected()?,
        };
        let stream = stream.ok_or_else(Rejection::would_block)?;
        // SAFETY: the program keeps the memory mapped until `riounmap` or `rclose`.
        unsafe { stream.map(pointer, length, protection & libc::PROT_WRITE != 0, offset as u64)? };
        Ok(offset)
    })
}

pub unsafe extern "C" fn iounmap(descriptor: c_int, base: *mut c_void, length: usize) -> c_int {
    errno::minus_one("riounmap", || {
        let socket = Rsocket::find(descriptor)?;
        let is_unmapped =
            socket.lock().stream.as_mut().is_some_and(|stream| stream.unmap(base as usize, length));
        is_unmapped.then_some(()).ok_or_else(|| Rejection::invalid("the memory is not mapped"))
    })
}

pub unsafe extern "C" fn iowrite(
    descriptor: c_int,
    data: *const c_void,
    length: usize,
    offset: off_t,
    flags: c_int,
) -> usize {
    let write = |state: &mut State, data: &mut [u8], done: usize| {
        let Some(stream) = state.writable()? else { return Ok(None) };
        let at = offset as u64 + done as u64;
        let sent = stream.write_mapped(data, at)?;
        let sent =
            sent.ok_or_else(|| Rejection::invalid(format!("the peer has mapped nothing at {at:#x}")))?;
        Ok(Some(sent).filter(|length| *length > 0))
    };
    // SAFETY: the caller's memory.
    let write = || unsafe { transfer(descriptor, (&vector(data, length), 1), flags, true, write) };
    errno::number("riowrite", write) as usize
}
