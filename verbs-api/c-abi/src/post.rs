//! Posting work requests.

use crate::abi::*;
use crate::address::Ah;
use crate::errno::{Rejection, check};
use crate::faults;
use crate::protection::Mw;
use crate::queue_pair::{self, Qp};
use crate::{errno, object};
use core::ffi::{c_int, c_uint};
use softhca::{
    AccessFlags, Error, LocalKey, MemoryWindowBind, Operation, QpState, QpType, Qpn, QueueKey,
    ReceiveRequest, RemoteAddress, RemoteKey, SendBatch, SendFlags, SendImmOrInvalidate, SendRequest, Sge,
};
use softhca::{Resource, Verb};

/// The most scatter/gather entries in a work request.
pub const MAX_SGE: usize = 32;
/// The most inline data in a work request, in bytes.
const MAX_INLINE_DATA: usize = 1024;

/// The entries of a list.
///
/// # Safety
/// `list` has `count` entries.
pub unsafe fn read_sge_list(
    list: *const ibv_sge,
    count: c_int,
    into: &mut [Sge; MAX_SGE],
) -> Result<&[Sge], Rejection> {
    let known = usize::try_from(count).ok().filter(|count| *count <= MAX_SGE);
    let count = known.ok_or_else(|| Rejection::too_large("num_sge", count, MAX_SGE))?;
    for (index, entry) in into[..count].iter_mut().enumerate() {
        // SAFETY: the caller guarantees it. The entries of libiscsi are in a packed structure.
        let ibv_sge { addr, length, lkey } = unsafe { list.add(index).read_unaligned() };
        *entry = Sge { address: addr, length, lkey: LocalKey(lkey) };
    }
    Ok(&into[..count])
}

/// The flags of a work request.
pub fn send_flags(bits: c_uint) -> Result<SendFlags, Rejection> {
    let known = u8::try_from(bits).ok().and_then(SendFlags::from_bits);
    known.ok_or_else(|| Rejection::invalid(format!("send_flags {bits:#x} has unknown bits")))
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

/// The operation of a work request.
unsafe fn operation(wr: &ibv_send_wr) -> Result<Operation, Rejection> {
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
            unsafe { bind_operation(wr.bind_mw.mw, wr.bind_mw.rkey, info) }.ok_or_else(invalid_bind)?
        }
        other => return Err(Rejection::unsupported(format!("opcode {other} is not supported"))),
    })
}

/// A bind without a window or a region.
pub fn invalid_bind() -> Rejection {
    Rejection::invalid("the memory window was destroyed, or the memory region of the bind is null")
}

/// Adds one work request to a batch.
unsafe fn add_to_batch(state: &Qp, batch: &mut SendBatch<'_>, wr: &ibv_send_wr) -> Result<(), Rejection> {
    let flags = send_flags(wr.send_flags)?;
    // SAFETY: the caller guarantees it.
    let operation = unsafe { operation(wr) }?;
    let mut gather = [Sge::default(); MAX_SGE];
    let mut inline = [0; MAX_INLINE_DATA];
    // SAFETY: the caller guarantees it.
    let list = unsafe { read_sge_list(wr.sg_list, wr.num_sge, &mut gather) }?;
    let mut request = SendRequest::new(wr.wr_id, operation, list).flags(flags);
    if flags.contains(SendFlags::INLINE) {
        let mut length = 0;
        for entry in list {
            let size = entry.length as usize;
            let too_long = || Rejection::too_large("inline data", length + size, MAX_INLINE_DATA);
            let room = inline.get_mut(length..length + size).ok_or_else(too_long)?;
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
            let ah = unsafe { object::find_on_data_path::<Ah>(ud.ah) }?;
            request = request.ud_address(&ah.handle, Qpn::new(ud.remote_qpn), QueueKey(ud.remote_qkey));
        }
        QpType::XrcInitiator => request = request.xrc_srqn(wr.qp_type.xrc.remote_srqn),
        _ => {}
    }
    Ok(batch.add(&request)?)
}

pub unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    const VERB: &str = "ibv_post_send";
    // SAFETY: a queue pair of this library.
    let ready = unsafe { queue_pair::find_after(qp, QpState::ReadyToReceive) };
    let ready = ready.and_then(|state| Ok((state, state.pair.send_batch()?)));
    let (state, mut batch) = match ready {
        Ok(ready) => ready,
        Err(rejection) => {
            // SAFETY: a valid pointer of the caller.
            unsafe { *bad = wr };
            return rejection.code(VERB);
        }
    };
    let mut code = 0;
    // SAFETY: the caller's list, to its end.
    while let Some(request) = unsafe { wr.as_ref() } {
        // SAFETY: the caller guarantees it.
        if let Err(rejection) = unsafe { add_to_batch(state, &mut batch, request) } {
            // SAFETY: a valid pointer of the caller.
            unsafe { *bad = wr };
            code = rejection.code(VERB);
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
    verb: &str,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    post: impl Fn(&ReceiveRequest<'_>) -> Result<(), Error>,
) -> c_int {
    // SAFETY: the caller's list, to its end.
    while let Some(request) = unsafe { wr.as_ref() } {
        let mut scatter = [Sge::default(); MAX_SGE];
        // SAFETY: the caller guarantees it.
        let list = unsafe { read_sge_list(request.sg_list, request.num_sge, &mut scatter) };
        let posted = list.and_then(|sg_list| Ok(post(&ReceiveRequest { wr_id: request.wr_id, sg_list })?));
        if let Err(rejection) = posted {
            // SAFETY: a valid pointer of the caller.
            unsafe { *bad = wr };
            return rejection.code(verb);
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
    const VERB: &str = "ibv_post_recv";
    // SAFETY: a queue pair of this library; in RESET it takes nothing.
    let state = match unsafe { queue_pair::find_after(qp, QpState::Reset) } {
        Ok(state) => state,
        Err(rejection) => {
            // SAFETY: a valid pointer of the caller.
            unsafe { *bad = wr };
            return rejection.code(VERB);
        }
    };
    // SAFETY: the caller guarantees it.
    unsafe { post_recv_list(VERB, wr, bad, |receive| state.pair.post_recv(receive)) }
}

/// Binds a type 1 memory window. Its next rkey is the successor of `mw->rkey`, which the program restores after a bind
/// that failed, as ibv_bind_mw(3) says.
pub unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, info: *mut ibv_mw_bind) -> c_int {
    const VERB: &str = "ibv_bind_mw";
    // SAFETY: a queue pair of this library.
    let state = check!(VERB, code, unsafe { object::find_on_data_path::<Qp>(qp.cast()) });
    // SAFETY: the caller's attributes.
    let info = unsafe { &*info };
    // SAFETY: as above.
    let window = check!(VERB, code, unsafe { object::find_on_data_path::<Mw>(mw) });
    let object = Some((Resource::QueuePair, state.pair.qpn().value()));
    check!(VERB, code, faults::announce(Verb::BindMw, object));
    let flags = check!(VERB, code, send_flags(info.send_flags));
    // SAFETY: as above.
    let present = unsafe { (*mw).rkey };
    let next = window.window.rkey().0 & !0xff | present.wrapping_add(1) & 0xff;
    // SAFETY: as above.
    let Some(operation) = (unsafe { bind_operation(mw, next, &info.bind_info) }) else {
        return invalid_bind().code(VERB);
    };
    match state.pair.post_send(&SendRequest::new(info.wr_id, operation, &[]).flags(flags)) {
        Ok(()) => {
            // SAFETY: a window of this library.
            unsafe { (*mw).rkey = next };
            0
        }
        Err(error) => errno::from_result(VERB, Err(error)),
    }
}
