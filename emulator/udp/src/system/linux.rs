//! Linux: GSO and GRO, control messages, the error queue, socket memory.

use crate::batch::{BATCH_SLOTS, MAX_BATCH_SEGMENTS, ReceiveBatch, SLOT_BYTES, Slot};
use crate::slot_field::{SlotField, SlotSet};
use crate::socket_report::{NetworkError, NetworkErrorCause, ReceiveMemory};
use socket2::{SockAddr, SockAddrStorage, Socket};
use softhca_wire::cm::{MessageKind, PacketTarget};
use softhca_wire::link_control::Message;
use softhca_wire::{MadHeader, Qpn, QpnSlot};
use std::io;
use std::mem::{MaybeUninit, size_of, size_of_val, zeroed};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

/// The index of the drop counter in SO_MEMINFO, and the number of values.
const MEMINFO_DROPS: usize = 8;
const MEMINFO_LEN: usize = 9;
const SO_MEMINFO: libc::c_int = 55;

/// Space for the control messages of one datagram.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct ControlBuffer([u8; 256]);

impl ControlBuffer {
    const EMPTY: ControlBuffer = ControlBuffer([0; 256]);
}

fn set_option<T>(socket: &Socket, level: libc::c_int, name: libc::c_int, value: T) -> io::Result<()> {
    // SAFETY: `value` outlives the call and the length is its own.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            ptr::from_ref(&value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sets every option but the address. Returns whether the kernel supports GSO.
pub(crate) fn configure(socket: &Socket, ipv6: bool, receive_buffer: usize) -> io::Result<bool> {
    const ON: libc::c_int = 1;
    if ipv6 {
        set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)?;
        set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVERR, ON)?;
        set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, ON)?;
        // The destination's flow label goes into the header; the kernel chooses one if it is zero.
        set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_FLOWINFO_SEND, ON)?;
        // rxe sends without a UDP checksum.
        set_option(socket, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, ON)?;
    } else {
        set_option(socket, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
        set_option(socket, libc::IPPROTO_IP, libc::IP_RECVERR, ON)?;
        set_option(socket, libc::IPPROTO_IP, libc::IP_RECVTOS, ON)?;
    }
    // Without these two (before Linux 5.0) the socket works, but slowly.
    let offload = supports_gso(socket);
    let _ = set_option(socket, libc::SOL_UDP, libc::UDP_GRO, ON);
    // With CAP_NET_ADMIN beyond the system limit, otherwise up to it.
    let size = libc::c_int::try_from(receive_buffer).unwrap_or(libc::c_int::MAX);
    if set_option(socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, size).is_err() {
        set_option(socket, libc::SOL_SOCKET, libc::SO_RCVBUF, size)?;
    }
    Ok(offload)
}

/// Whether the kernel splits a batch into datagrams.
pub(crate) fn supports_gso(socket: &Socket) -> bool {
    set_option(socket, libc::SOL_UDP, libc::UDP_SEGMENT, 0 as libc::c_int).is_ok()
}

/// Receives each datagram on its own.
pub(crate) fn disable_gro(socket: &Socket) {
    const OFF: libc::c_int = 0;
    let _ = set_option(socket, libc::SOL_UDP, libc::UDP_GRO, OFF);
}

/// Attaches the filter that gives each datagram to the socket of its slot to the group of a socket: that of slot 0 if its
/// slot is not in `slots`. An attached filter is replaced in one step.
pub(crate) fn steer_by_slot(socket: BorrowedFd<'_>, field: SlotField, slots: &SlotSet) -> io::Result<()> {
    let mut filter = steering_filter(field, slots);
    let program = libc::sock_fprog { len: filter.len() as libc::c_ushort, filter: filter.as_mut_ptr() };
    // SAFETY: the kernel copies the program, which outlives the call and has the stated length.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            ptr::from_ref(&program).cast(),
            size_of_val(&program) as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Rejects further filters on a socket, and on its group through this socket.
pub(crate) fn lock_filter(socket: &Socket) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_LOCK_FILTER, 1 as libc::c_int)
}

/// Offsets count from the UDP payload. A datagram that is too short goes to the first socket, slot 0.
fn steering_filter(field: SlotField, slots: &SlotSet) -> Vec<libc::sock_filter> {
    use libc::{
        BPF_A, BPF_ABS, BPF_ALU, BPF_AND, BPF_B, BPF_H, BPF_IMM, BPF_JA, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_K,
        BPF_LD, BPF_MEM, BPF_MISC, BPF_RET, BPF_RSH, BPF_ST, BPF_TAX, BPF_W, BPF_X,
    };
    let instruction = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = |size: u32, offset: usize| instruction(BPF_LD | size | BPF_ABS, offset as u32, 0, 0);
    // Skips the first number of instructions if the value is equal, and the second if not.
    let branch =
        |value: u32, equal: u8, other: u8| instruction(BPF_JMP | BPF_JEQ | BPF_K, value, equal, other);
    let skip = |count: usize| instruction(BPF_JMP | BPF_JA, count as u32, 0, 0);
    let to_slot_0 = instruction(BPF_RET | BPF_K, 0, 0, 0);
    let shift_right = |bits: u32| instruction(BPF_ALU | BPF_RSH | BPF_K, bits, 0, 0);
    let slot_in = |bits: u32| shift_right(bits - u32::from(QpnSlot::BITS));
    let mut filter = match field {
        SlotField::Target => vec![
            load(BPF_W, 4),
            instruction(BPF_ALU | BPF_AND | BPF_K, Qpn::MULTICAST.value(), 0, 0),
            branch(Qpn::GSI.value(), 4, 0),
            branch(Qpn::MULTICAST.value(), 0, 1),
            to_slot_0,
            slot_in(24),
            skip(13),
            load(BPF_B, PacketTarget::CLASS_OFFSET),
            branch(MadHeader::CLASS_CM.into(), 1, 0),
            to_slot_0,
            load(BPF_H, PacketTarget::ATTRIBUTE_OFFSET),
            branch(MessageKind::Req as u32, 7, 0),
            branch(MessageKind::SidrReq as u32, 6, 0),
            branch(MessageKind::SidrRep as u32, 0, 2),
            load(BPF_W, PacketTarget::REQUEST_ID_OFFSET),
            skip(1),
            load(BPF_W, PacketTarget::REMOTE_ID_OFFSET),
            slot_in(32),
            skip(1),
            load(BPF_W, PacketTarget::LISTENER_SLOT_OFFSET),
        ],
        SlotField::LinkControl => vec![load(BPF_H, Message::DESTINATION_SLOT_OFFSET)],
    };
    // The slot is loaded. Its bit in the set decides.
    let load_slot = instruction(BPF_LD | BPF_MEM, 0, 0, 0);
    filter.extend([
        instruction(BPF_JMP | BPF_JGE | BPF_K, 1 << QpnSlot::BITS, 0, 1),
        to_slot_0,
        instruction(BPF_ST, 0, 0, 0),
        instruction(BPF_ALU | BPF_AND | BPF_K, 31, 0, 0),
        instruction(BPF_MISC | BPF_TAX, 0, 0, 0),
        load_slot,
        shift_right(5),
    ]);
    let used = slots.words.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
    for (index, word) in slots.words[..used].iter().enumerate() {
        let rest = 3 * (used - 1 - index) + 1;
        filter.extend([branch(index as u32, 0, 2), instruction(BPF_LD | BPF_IMM, *word, 0, 0), skip(rest)]);
    }
    filter.extend([
        to_slot_0,
        instruction(BPF_ALU | BPF_RSH | BPF_X, 0, 0, 0),
        instruction(BPF_ALU | BPF_AND | BPF_K, 1, 0, 0),
        branch(1, 0, 2),
        load_slot,
        instruction(BPF_RET | BPF_A, 0, 0, 0),
        to_slot_0,
    ]);
    filter
}

/// Excludes datagrams to groups that another socket of the machine has joined.
pub(crate) fn disable_multicast_all(socket: &Socket, ipv6: bool) {
    const OFF: libc::c_int = 0;
    // Linux before 4.20 has no such option for IPv6; the bound address has the same effect.
    let _ = if ipv6 {
        set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_ALL, OFF)
    } else {
        set_option(socket, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, OFF)
    };
}

/// Appends a control message and returns the offset of the next.
fn push_cmsg<T: Copy>(
    control: &mut ControlBuffer,
    at: usize,
    level: libc::c_int,
    kind: libc::c_int,
    value: T,
) -> usize {
    // SAFETY: these only compute sizes.
    let (len, space) = unsafe {
        (libc::CMSG_LEN(size_of::<T>() as u32) as usize, libc::CMSG_SPACE(size_of::<T>() as u32) as usize)
    };
    let place = &mut control.0[at..at + space];
    // SAFETY: a control message header is integers.
    let mut header: libc::cmsghdr = unsafe { zeroed() };
    header.cmsg_len = len as _;
    header.cmsg_level = level;
    header.cmsg_type = kind;
    // SAFETY: `place` has room for the header and the value, as CMSG_SPACE guarantees, and neither write needs
    // alignment.
    unsafe {
        ptr::write_unaligned(place.as_mut_ptr().cast(), header);
        ptr::write_unaligned(place.as_mut_ptr().add(len - size_of::<T>()).cast(), value);
    }
    at + space
}

/// Appends the control message for `traffic_class` and returns its length.
fn push_traffic_class(control: &mut ControlBuffer, destination: SocketAddr, traffic_class: u8) -> usize {
    let value = libc::c_int::from(traffic_class);
    match destination {
        _ if traffic_class == 0 => 0,
        SocketAddr::V4(_) => push_cmsg(control, 0, libc::IPPROTO_IP, libc::IP_TOS, value),
        SocketAddr::V6(_) => push_cmsg(control, 0, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, value),
    }
}

/// A message header for `part`, sent to `name` with the first `control_len` bytes of `control`. Its pointers are
/// valid as long as the arguments.
fn message_header(
    name: &SockAddr,
    part: &mut libc::iovec,
    control: &mut ControlBuffer,
    control_len: usize,
) -> libc::msghdr {
    // SAFETY: a message header is pointers, which may be null, and integers.
    let mut header: libc::msghdr = unsafe { zeroed() };
    header.msg_name = name.as_ptr().cast_mut().cast();
    header.msg_namelen = name.len();
    header.msg_iov = part;
    header.msg_iovlen = 1;
    if control_len > 0 {
        header.msg_control = ptr::from_mut(control).cast();
        header.msg_controllen = control_len as _;
    }
    header
}

fn iovec_of(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

/// Sends a batch in one call.
pub(crate) fn send_batch(
    socket: &Socket,
    destination: SocketAddr,
    traffic_class: u8,
    segment_size: usize,
    bytes: &[u8],
) -> io::Result<()> {
    let name = SockAddr::from(destination);
    let mut control = ControlBuffer::EMPTY;
    let mut control_len = push_traffic_class(&mut control, destination, traffic_class);
    if bytes.len() > segment_size {
        control_len =
            push_cmsg(&mut control, control_len, libc::SOL_UDP, libc::UDP_SEGMENT, segment_size as u16);
    }
    let mut part = iovec_of(bytes);
    let header = message_header(&name, &mut part, &mut control, control_len);
    // SAFETY: name, part, bytes and control outlive the call; sendmsg only reads them.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &header, libc::MSG_DONTWAIT) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sends a batch datagram by datagram. Returns how many were sent.
pub(crate) fn send_datagrams(
    socket: &Socket,
    destination: SocketAddr,
    traffic_class: u8,
    segment_size: usize,
    bytes: &[u8],
) -> io::Result<usize> {
    let name = SockAddr::from(destination);
    let mut control = ControlBuffer::EMPTY;
    let control_len = push_traffic_class(&mut control, destination, traffic_class);
    let mut parts = [iovec_of(&[]); MAX_BATCH_SEGMENTS];
    // SAFETY: message headers are pointers, which may be null, and integers.
    let mut headers: [libc::mmsghdr; MAX_BATCH_SEGMENTS] = unsafe { zeroed() };
    let mut count = 0;
    for ((header, part), segment) in headers.iter_mut().zip(&mut parts).zip(bytes.chunks(segment_size)) {
        *part = iovec_of(segment);
        header.msg_hdr = message_header(&name, part, &mut control, control_len);
        count += 1;
    }
    // SAFETY: the first `count` headers point to name, parts, bytes and control, which outlive the call; sendmmsg
    // only reads them.
    let sent =
        unsafe { libc::sendmmsg(socket.as_raw_fd(), headers.as_mut_ptr(), count, libc::MSG_DONTWAIT as _) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
}

/// Fills `batch`.
pub(crate) fn receive(socket: &Socket, batch: &mut ReceiveBatch) -> io::Result<()> {
    // Not zeroed: only memory that the kernel has filled is read, and empty sockets are polled often.
    let mut headers = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; BATCH_SLOTS];
    let mut names = [const { MaybeUninit::<libc::sockaddr_storage>::uninit() }; BATCH_SLOTS];
    let mut controls = [const { MaybeUninit::<ControlBuffer>::uninit() }; BATCH_SLOTS];
    let mut parts = [iovec_of(&[]); BATCH_SLOTS];
    let offered = batch.offered;
    for (index, bytes) in batch.bytes.chunks_exact_mut(SLOT_BYTES).enumerate().take(offered) {
        parts[index] = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: a message header is pointers, which may be null, and integers.
        let header = headers[index].write(unsafe { zeroed() });
        header.msg_hdr.msg_name = names[index].as_mut_ptr().cast();
        header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        header.msg_hdr.msg_iov = &mut parts[index];
        header.msg_hdr.msg_iovlen = 1;
        header.msg_hdr.msg_control = controls[index].as_mut_ptr().cast();
        header.msg_hdr.msg_controllen = size_of::<ControlBuffer>() as _;
    }
    let (descriptor, first) = (socket.as_raw_fd(), headers.as_mut_ptr().cast::<libc::mmsghdr>());
    // SAFETY: each of the first `offered` headers points to its own name, part, control buffer and SLOT_BYTES of the
    // batch, which outlive the call, with their true lengths.
    let received = unsafe {
        if offered == 1 {
            // Faster for one message.
            let len = libc::recvmsg(descriptor, &mut (*first).msg_hdr, libc::MSG_DONTWAIT);
            (*first).msg_len = len as libc::c_uint;
            if len < 0 { -1 } else { 1 }
        } else {
            let count = offered as libc::c_uint;
            libc::recvmmsg(descriptor, first, count, libc::MSG_DONTWAIT as _, ptr::null_mut())
        }
    };
    if received < 0 {
        return Err(io::Error::last_os_error());
    }
    for (index, header) in headers[..received as usize].iter().enumerate() {
        // SAFETY: the first `offered` headers are initialised above, and no more can be received.
        let header = unsafe { header.assume_init_ref() };
        let len = header.msg_len as usize;
        let mut slot = Slot { len, segment_size: len, ..Slot::EMPTY };
        // SAFETY: the kernel wrote `msg_namelen` bytes of an address.
        if let Some(source) = unsafe { address(names[index].as_ptr(), header.msg_hdr.msg_namelen) } {
            slot.source = source;
        }
        // SAFETY: the kernel has filled the control messages of this header.
        unsafe {
            for_each_cmsg(&header.msg_hdr, |level, kind, data| match (level, kind) {
                (libc::SOL_UDP, libc::UDP_GRO) => slot.segment_size = cmsg_integer(data) as usize,
                (libc::IPPROTO_IP, libc::IP_TOS) => slot.traffic_class = data.first().copied().unwrap_or(0),
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => slot.traffic_class = cmsg_integer(data) as u8,
                _ => {}
            });
        }
        batch.slots[index] = slot;
    }
    batch.filled = received as usize;
    Ok(())
}

fn cmsg_integer(data: &[u8]) -> i32 {
    data.first_chunk().map_or(0, |bytes| i32::from_ne_bytes(*bytes))
}

/// The address of `len` bytes that the kernel wrote to `storage`.
///
/// # Safety
/// `storage` can be read for `len` bytes, all of which have been written.
unsafe fn address(storage: *const libc::sockaddr_storage, len: libc::socklen_t) -> Option<SocketAddr> {
    let mut copy = SockAddrStorage::zeroed();
    let len = len.min(copy.size_of());
    // SAFETY: `len` bytes can be read, as the caller guarantees, and fit; any bytes are a valid address storage.
    unsafe {
        ptr::copy_nonoverlapping(storage.cast::<u8>(), ptr::from_mut(&mut copy).cast::<u8>(), len as usize);
    }
    // SAFETY: `len` bytes of the copy are an address.
    unsafe { SockAddr::new(copy, len) }.as_socket()
}

/// Calls `visit` with level, type and data of every control message of `header`.
///
/// # Safety
/// A receive call has filled `header`, and its control buffer still exists.
unsafe fn for_each_cmsg(header: &libc::msghdr, mut visit: impl FnMut(libc::c_int, libc::c_int, &[u8])) {
    // SAFETY: the kernel wrote well-formed control messages of `msg_controllen` bytes; each is read within its own
    // length.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(header);
        while !at.is_null() {
            let data = libc::CMSG_DATA(at);
            let len = ((*at).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
            visit((*at).cmsg_level, (*at).cmsg_type, std::slice::from_raw_parts(data, len));
            at = libc::CMSG_NXTHDR(header, at);
        }
    }
}

/// The oldest entry of the error queue.
pub(crate) fn poll_error(socket: &Socket) -> io::Result<Option<NetworkError>> {
    // SAFETY: a socket address is integers; so is a message header but for pointers, which may be null.
    let (mut name, mut header): (libc::sockaddr_storage, libc::msghdr) = unsafe { (zeroed(), zeroed()) };
    let mut control = ControlBuffer::EMPTY;
    header.msg_name = ptr::from_mut(&mut name).cast();
    header.msg_namelen = size_of_val(&name) as libc::socklen_t;
    header.msg_control = ptr::from_mut(&mut control).cast();
    header.msg_controllen = size_of::<ControlBuffer>() as _;
    // SAFETY: name and control outlive the call and have the lengths in the header. Without an iovec the kernel
    // truncates the datagram that it returns.
    let received =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &mut header, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) };
    if received < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
    }
    let mut cause = None;
    // SAFETY: the kernel has filled the control messages of this header.
    unsafe {
        for_each_cmsg(&header, |level, kind, data| {
            if matches!(
                (level, kind),
                (libc::IPPROTO_IP, libc::IP_RECVERR) | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR)
            ) && data.len() >= size_of::<libc::sock_extended_err>()
            {
                let error: libc::sock_extended_err = ptr::read_unaligned(data.as_ptr().cast());
                cause = Some(match error.ee_errno as i32 {
                    libc::ECONNREFUSED => NetworkErrorCause::PortUnreachable,
                    libc::EMSGSIZE => NetworkErrorCause::TooLarge { mtu: error.ee_info },
                    other => NetworkErrorCause::Other(other),
                });
            }
        });
    }
    // SAFETY: the name is zeroed except for what the kernel wrote.
    let peer = unsafe { address(&name, header.msg_namelen) };
    Ok(Some(NetworkError { peer, cause: cause.unwrap_or(NetworkErrorCause::Other(0)) }))
}

/// Reads SO_MEMINFO.
pub(crate) fn receive_memory(socket: &Socket) -> io::Result<ReceiveMemory> {
    let mut figures = [0u32; MEMINFO_LEN];
    let mut len = size_of_val(&figures) as libc::socklen_t;
    // SAFETY: `figures` has `len` bytes.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_MEMINFO,
            figures.as_mut_ptr().cast(),
            &mut len,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(ReceiveMemory { charged: figures[0], limit: figures[1], dropped: figures[MEMINFO_DROPS] })
}

/// Asks the scheduler for short time slices for the calling thread. When it wakes, it then preempts a program that
/// polls on its processor, instead of waiting for the end of that program's slice. Kernels before Linux 6.12 ignore it.
pub(crate) fn request_short_time_slices() {
    /// The shortest that the kernel accepts.
    const SLICE_NS: u64 = 100_000;
    // SAFETY: the size limits what the kernel writes, and the structure has more room than that.
    unsafe {
        let mut attributes: [u64; 7] = [0; 7];
        let size = size_of_val(&attributes) as libc::c_uint;
        if libc::syscall(libc::SYS_sched_getattr, 0, attributes.as_mut_ptr(), size, 0) != 0 {
            return;
        }
        // size and policy, flags, nice and priority, runtime, deadline, period, utilization.
        if attributes[0] >> 32 == libc::SCHED_OTHER as u64 {
            attributes[3] = SLICE_NS;
            libc::syscall(libc::SYS_sched_setattr, 0, attributes.as_mut_ptr(), 0);
        }
    }
}
