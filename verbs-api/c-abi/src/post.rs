//! Posting work requests.

use crate::abi::*;
use crate::address::Ah;
use crate::protection::Mw;
use crate::queue_pair::{self, Qp};
use crate::{errno, object};
use core::ffi::{c_int, c_uint};
use softhca::{
    AccessFlags, Error, LocalKey, MemoryWindowBind, Operation, QpType, Qpn, QueueKey, ReceiveRequest,
    RemoteAddress, RemoteKey, SendBatch, SendFlags, SendImmOrInvalidate, SendRequest, Sge,
};

/// The most scatter/gather entries in a work request.
pub const MAX_SGE: usize = 32;
/// The most inline data in a work request, in bytes.
const MAX_INLINE_DATA: usize = 1024;

/// The entries of a list.
///
/// # Safety
/// `list` has `count` entries.
pub unsafe fn read_sge_list(list: *const ibv_sge, count: c_int, into: &mut [Sge; MAX_SGE]) -> Option<&[Sge]> {
    let count = usize::try_from(count).ok().filter(|count| *count <= MAX_SGE)?;
    for (index, entry) in into[..count].iter_mut().enumerate() {
        // SAFETY: the caller guarantees it.
        let ibv_sge { addr, length, lkey } = unsafe { *list.add(index) };
        *entry = Sge { address: addr, length, lkey: LocalKey(lkey) };
    }
    Some(&into[..count])
}

/// The flags of a work request; `None` if one is unknown.
pub fn send_flags(bits: c_uint) -> Option<SendFlags> {
    u8::try_from(bits).ok().and_then(SendFlags::from_bits)
}

/// The bind of `mw`. The card identifies the window by its number; its rkey changes when the bind succeeds.
///
/// # Safety
/// The pointers are objects of this library.
pub unsafe fn bind_operation(mw: *mut ibv_mw, new_key: u32, info: &ibv_mw_bind_info) -> Option<Operation> {
    // SAFETY: the caller guarantees it.
    let window = unsafe { object::state::<Mw>(mw) }?;
    let region = match info.length {
        0 => LocalKey(0),
        // SAFETY: the caller guarantees it.
        _ => LocalKey(unsafe { info.mr.as_ref() }?.lkey),
    };
    Some(Operation::BindMemoryWindow(MemoryWindowBind {
        mw_rkey: window.window.rkey(),
        new_rkey: RemoteKey(new_key),
        mr_lkey: region,
        address: info.addr,
        length: info.length,
        access: AccessFlags::from_bits_truncate(info.mw_access_flags),
    }))
}

/// The operation of a work request, or the errno.
unsafe fn operation(wr: &ibv_send_wr) -> Result<Operation, c_int> {
    // SAFETY: the opcode determines the union member.
    let remote = |wr: &ibv_send_wr| unsafe {
        RemoteAddress { address: wr.wr.rdma.remote_addr, rkey: RemoteKey(wr.wr.rdma.rkey) }
    };
    let immediate = u32::from_be(wr.imm_data);
    Ok(match wr.opcode {
        IBV_WR_SEND => Operation::Send(SendImmOrInvalidate::None),
        IBV_WR_SEND_WITH_IMM => Operation::Send(SendImmOrInvalidate::Immediate(immediate)),
        IBV_WR_SEND_WITH_INV => Operation::Send(SendImmOrInvalidate::Invalidate(RemoteKey(wr.imm_data))),
        IBV_WR_RDMA_WRITE => Operation::Write { remote: remote(wr), imm_data: None },
        IBV_WR_RDMA_WRITE_WITH_IMM => Operation::Write { remote: remote(wr), imm_data: Some(immediate) },
        IBV_WR_RDMA_READ => Operation::Read { remote: remote(wr) },
        IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
            // SAFETY: as above.
            let atomic = unsafe { wr.wr.atomic };
            let remote = RemoteAddress { address: atomic.remote_addr, rkey: RemoteKey(atomic.rkey) };
            if wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP {
                Operation::CompareSwap { remote, compare: atomic.compare_add, swap: atomic.swap }
            } else {
                Operation::FetchAdd { remote, add: atomic.compare_add }
            }
        }
        IBV_WR_LOCAL_INV => Operation::LocalInvalidate { rkey: RemoteKey(wr.imm_data) },
        IBV_WR_BIND_MW => {
            let info = &wr.bind_mw.bind_info;
            // SAFETY: the caller guarantees it.
            unsafe { bind_operation(wr.bind_mw.mw, wr.bind_mw.rkey, info) }.ok_or(libc::EINVAL)?
        }
        _ => return Err(libc::EOPNOTSUPP),
    })
}

/// Adds one work request to a batch.
unsafe fn add_to_batch(state: &Qp, batch: &mut SendBatch<'_>, wr: &ibv_send_wr) -> Result<(), c_int> {
    let flags = send_flags(wr.send_flags).ok_or(libc::EINVAL)?;
    // SAFETY: the caller guarantees it.
    let operation = unsafe { operation(wr) }?;
    let mut gather = [Sge::default(); MAX_SGE];
    let mut inline = [0; MAX_INLINE_DATA];
    // SAFETY: the caller guarantees it.
    let list = unsafe { read_sge_list(wr.sg_list, wr.num_sge, &mut gather) }.ok_or(libc::EINVAL)?;
    let mut request = SendRequest::new(wr.wr_id, operation, list).flags(flags);
    if flags.contains(SendFlags::INLINE) {
        let mut length = 0;
        for entry in list {
            let size = entry.length as usize;
            let room = inline.get_mut(length..length + size).ok_or(libc::EINVAL)?;
            // SAFETY: the address of inline data points into the program's own memory.
            unsafe { core::ptr::copy_nonoverlapping(entry.address as *const u8, room.as_mut_ptr(), size) };
            length += size;
        }
        request = request.inline_data(&inline[..length]);
    }
    match state.kind {
        QpType::Ud => {
            // SAFETY: UD queue pairs set this union member.
            let ud = unsafe { wr.wr.ud };
            // SAFETY: a handle of this library.
            let ah = unsafe { object::state::<Ah>(ud.ah) }.ok_or(libc::EINVAL)?;
            request = request.ud_address(&ah.handle, Qpn::new(ud.remote_qpn), QueueKey(ud.remote_qkey));
        }
        QpType::XrcInitiator => request = request.xrc_srqn(wr.qp_type.xrc.remote_srqn),
        _ => {}
    }
    batch.add(&request).map_err(|error| errno::report("ibv_post_send", &error))
}

pub unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a queue pair of this library.
    let ready = unsafe { queue_pair::of(qp) }.filter(|_| unsafe { queue_pair::can_post_send(qp) });
    let batch = ready.map(|state| (state, state.pair.send_batch()));
    let Some((state, Ok(mut batch))) = batch else {
        // SAFETY: a valid pointer of the caller.
        unsafe { *bad = wr };
        return libc::EINVAL;
    };
    let mut code = 0;
    // SAFETY: the caller's list, to its end.
    while let Some(request) = unsafe { wr.as_ref() } {
        // SAFETY: the caller guarantees it.
        if let Err(errno) = unsafe { add_to_batch(state, &mut batch, request) } {
            // SAFETY: a valid pointer of the caller.
            unsafe { *bad = wr };
            code = errno;
            break;
        }
        wr = request.next;
    }
    // The work requests before an invalid one are posted.
    batch.post();
    code
}

/// Posts a list of receive work requests with `post`.
pub unsafe fn post_recv_list(
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    post: impl Fn(&ReceiveRequest<'_>) -> Result<(), Error>,
) -> c_int {
    // SAFETY: the caller's list, to its end.
    while let Some(request) = unsafe { wr.as_ref() } {
        let mut scatter = [Sge::default(); MAX_SGE];
        // SAFETY: the caller guarantees it.
        let code = match unsafe { read_sge_list(request.sg_list, request.num_sge, &mut scatter) } {
            None => libc::EINVAL,
            Some(scatter) => match post(&ReceiveRequest { wr_id: request.wr_id, sg_list: scatter }) {
                Ok(()) => 0,
                Err(error) => errno::report("ibv_post_recv", &error),
            },
        };
        if code != 0 {
            // SAFETY: a valid pointer of the caller.
            unsafe { *bad = wr };
            return code;
        }
        wr = request.next;
    }
    0
}

pub unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a queue pair of this library; in RESET it takes nothing.
    let Some(state) = (unsafe { queue_pair::of(qp) }).filter(|_| unsafe { (*qp).state } != 0) else {
        // SAFETY: a valid pointer of the caller.
        unsafe { *bad = wr };
        return libc::EINVAL;
    };
    // SAFETY: the caller guarantees it.
    unsafe { post_recv_list(wr, bad, |receive| state.pair.post_recv(receive)) }
}

/// Binds a type 1 memory window. Its next rkey is the successor of `mw->rkey`, which the program restores after a bind
/// that failed, as ibv_bind_mw(3) says.
pub unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, info: *mut ibv_mw_bind) -> c_int {
    // SAFETY: objects of this library, and the caller's own.
    let (Some(state), info) = (unsafe { queue_pair::of(qp) }, unsafe { &*info }) else { return libc::EINVAL };
    // SAFETY: as above.
    let Some(window) = (unsafe { object::state::<Mw>(mw) }) else { return libc::EINVAL };
    let Some(flags) = send_flags(info.send_flags) else { return libc::EINVAL };
    // SAFETY: as above.
    let present = unsafe { (*mw).rkey };
    let next = window.window.rkey().0 & !0xff | present.wrapping_add(1) & 0xff;
    // SAFETY: as above.
    let Some(operation) = (unsafe { bind_operation(mw, next, &info.bind_info) }) else { return libc::EINVAL };
    match state.pair.post_send(&SendRequest::new(info.wr_id, operation, &[]).flags(flags)) {
        Ok(()) => {
            // SAFETY: a window of this library.
            unsafe { (*mw).rkey = next };
            0
        }
        Err(error) => errno::from_result("ibv_bind_mw", Err(error)),
    }
}
