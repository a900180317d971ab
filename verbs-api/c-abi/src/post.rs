//! Posting work requests.

use crate::abi::*;
use crate::call_site;
use crate::errno::{self, Rejection};
use crate::faults;
use crate::object::Handle;
use crate::protection::Mw;
use crate::queue_pair::{self, Qp};
use core::ffi::{c_int, c_uint};
use core::mem::MaybeUninit;
use core::slice;
use softhca::{
    AccessFlags, Error, LocalKey, MemoryWindowBind, Operation, QpState, QpType, Qpn, QueueKey,
    ReceiveRequest, RemoteAddress, RemoteKey, SendBatch, SendFlags, SendImmOrInvalidate, SendRequest, Sge,
};
use softhca::{Resource, Verb};
use std::borrow::Cow;

/// The most scatter/gather entries in a work request.
const MAX_SGE: usize = 32;
/// The most inline data in a work request with several entries, in bytes.
const MAX_INLINE_DATA: usize = 1024;

/// Space for the entries of a work request. Zeroing it would take longer than posting one.
type SgeList = [MaybeUninit<Sge>; MAX_SGE];
const EMPTY: SgeList = [const { MaybeUninit::uninit() }; MAX_SGE];

/// The entries of a list.
///
/// # Safety
/// `list` has `count` entries.
unsafe fn read_sge_list(list: *const ibv_sge, count: c_int, into: &mut SgeList) -> Result<&[Sge], Rejection> {
    let known = usize::try_from(count).ok().filter(|count| *count <= MAX_SGE);
    let count = known.ok_or_else(|| Rejection::too_large("num_sge", count, MAX_SGE))?;
    for (index, entry) in into[..count].iter_mut().enumerate() {
        // SAFETY: the caller guarantees it. The entries of libiscsi are in a packed structure.
        let ibv_sge { addr, length, lkey } = unsafe { list.add(index).read_unaligned() };
        entry.write(Sge { address: addr, length, lkey: LocalKey(lkey) });
    }
    // SAFETY: these entries were written.
    Ok(unsafe { slice::from_raw_parts(into.as_ptr().cast(), count) })
}

/// The inline data that entries of the program's own memory contain.
///
/// # Safety
/// The memory is valid, and not written before the end of the result.
unsafe fn inline_data(list: &[Sge]) -> Result<Cow<'_, [u8]>, Rejection> {
    let piece = |entry: &Sge| match entry.length {
        0 => &[][..],
        // SAFETY: the caller guarantees it.
        length => unsafe { slice::from_raw_parts(entry.address as *const u8, length as usize) },
    };
    if let [entry] = list {
        return Ok(Cow::Borrowed(piece(entry)));
    }
    let length: usize = list.iter().map(|entry| entry.length as usize).sum();
    if length > MAX_INLINE_DATA {
        return Err(Rejection::too_large("inline data", length, MAX_INLINE_DATA));
    }
    Ok(Cow::Owned(list.iter().flat_map(piece).copied().collect()))
}

/// The flags of a work request.
fn send_flags(bits: c_uint) -> Result<SendFlags, Rejection> {
    let known = u8::try_from(bits).ok().and_then(SendFlags::from_bits);
    known.ok_or_else(|| Rejection::invalid(format!("send_flags {bits:#x} has unknown bits")))
}

/// The bind of `mw`. The card identifies the window by its number; its rkey changes when the bind succeeds.
fn bind_operation(mw: Handle<Mw>, new_key: u32, info: &ibv_mw_bind_info) -> Result<Operation, Rejection> {
    let window = mw.find_on_data_path()?;
    // SAFETY: null, or a region of this library, which stays readable.
    let mr_lkey = match (info.length, unsafe { info.mr.as_ptr().as_ref() }) {
        (0, _) => LocalKey(0),
        (_, Some(mr)) => LocalKey(mr.lkey),
        (_, None) => return Err(Rejection::invalid("the memory region of the bind is null")),
    };
    Ok(Operation::BindMemoryWindow(MemoryWindowBind {
        mw_rkey: window.window.rkey(),
        new_rkey: RemoteKey(new_key),
        mr_lkey,
        address: info.addr,
        length: info.length,
        access: AccessFlags::from_bits_truncate(info.mw_access_flags),
    }))
}

/// The operation of a work request.
fn operation(wr: &ibv_send_wr) -> Result<Operation, Rejection> {
    let remote = |address, rkey| RemoteAddress { address, rkey: RemoteKey(rkey) };
    // SAFETY: the opcode determines the union member, and all members are numbers.
    let (rdma, atomic) = unsafe { (wr.wr.rdma, wr.wr.atomic) };
    let immediate = u32::from_be(wr.imm_data);
    let (to, to_atomic) = (remote(rdma.remote_addr, rdma.rkey), remote(atomic.remote_addr, atomic.rkey));
    Ok(match wr.opcode {
        IBV_WR_SEND => Operation::Send(SendImmOrInvalidate::None),
        IBV_WR_SEND_WITH_IMM => Operation::Send(SendImmOrInvalidate::Immediate(immediate)),
        IBV_WR_SEND_WITH_INV => Operation::Send(SendImmOrInvalidate::Invalidate(RemoteKey(wr.imm_data))),
        IBV_WR_RDMA_WRITE => Operation::Write { remote: to, imm_data: None },
        IBV_WR_RDMA_WRITE_WITH_IMM => Operation::Write { remote: to, imm_data: Some(immediate) },
        IBV_WR_RDMA_READ => Operation::Read { remote: to },
        IBV_WR_ATOMIC_CMP_AND_SWP => {
            Operation::CompareSwap { remote: to_atomic, compare: atomic.compare_add, swap: atomic.swap }
        }
        IBV_WR_ATOMIC_FETCH_AND_ADD => Operation::FetchAdd { remote: to_atomic, add: atomic.compare_add },
        IBV_WR_LOCAL_INV => Operation::LocalInvalidate { rkey: RemoteKey(wr.imm_data) },
        IBV_WR_BIND_MW => bind_operation(wr.bind_mw.mw, wr.bind_mw.rkey, &wr.bind_mw.bind_info)?,
        other => return Err(Rejection::unsupported(format!("opcode {other} is not supported"))),
    })
}

/// Adds one work request of a call to a batch.
///
/// # Safety
/// The pointers of the work request are valid.
pub unsafe fn add_to_batch(
    qp: &Qp,
    batch: &mut SendBatch<'_>,
    wr: &ibv_send_wr,
    call_site: u16,
) -> Result<(), Rejection> {
    let flags = send_flags(wr.send_flags)?;
    let operation = operation(wr)?;
    let mut sges = EMPTY;
    // SAFETY: the caller guarantees it.
    let list = unsafe { read_sge_list(wr.sg_list, wr.num_sge, &mut sges) }?;
    let mut request = SendRequest::new(wr.wr_id, operation, list).flags(flags).call_site(call_site);
    let inline;
    if flags.contains(SendFlags::INLINE) {
        // SAFETY: the caller guarantees it.
        inline = unsafe { inline_data(list) }?;
        request = request.inline_data(&inline);
    }
    match qp.kind {
        QpType::Ud => {
            // SAFETY: UD queue pairs set this union member.
            let ud = unsafe { wr.wr.ud };
            let ah = ud.ah.find_on_data_path()?;
            request = request.ud_address(&ah.handle, Qpn::new(ud.remote_qpn), QueueKey(ud.remote_qkey));
        }
        QpType::XrcInitiator => request = request.xrc_srqn(wr.qp_type.xrc.remote_srqn),
        _ => {}
    }
    Ok(batch.add(&request)?)
}

/// Executes a verb that posts a list. `post` advances the pointer: if it fails, to the work request at fault.
pub fn post_list<W>(
    verb: &str,
    mut wr: *mut W,
    bad: Option<&mut *mut W>,
    post: impl FnOnce(&mut *mut W) -> Result<(), Rejection>,
) -> c_int {
    errno::code(verb, || {
        let result = post(&mut wr);
        if let (Err(_), Some(bad)) = (&result, bad) {
            *bad = wr;
        }
        result
    })
}

pub extern "C" fn post_send(
    qp: Handle<Qp>,
    wr: *mut ibv_send_wr,
    bad: Option<&mut *mut ibv_send_wr>,
) -> c_int {
    post_list("ibv_post_send", wr, bad, |next| {
        let qp = queue_pair::find_after(qp, QpState::ReadyToReceive)?;
        let call_site = call_site::of_post(&qp.pair);
        let mut batch = qp.pair.send_batch()?;
        let mut result = Ok(());
        while result.is_ok()
            // SAFETY: the caller's list, to its end.
            && let Some(request) = unsafe { next.as_ref() }
        {
            // SAFETY: the caller's work request.
            result = unsafe { add_to_batch(&qp, &mut batch, request, call_site) };
            if result.is_ok() {
                *next = request.next;
            }
        }
        // The work requests before an invalid one are posted.
        batch.post();
        result
    })
}

/// Posts a list of receive work requests with `post`.
///
/// # Safety
/// The list and its pointers are valid.
pub unsafe fn post_recv_list(
    next: &mut *mut ibv_recv_wr,
    post: impl Fn(&ReceiveRequest<'_>) -> Result<(), Error>,
) -> Result<(), Rejection> {
    // SAFETY: the caller guarantees it.
    while let Some(request) = unsafe { next.as_ref() } {
        let mut sges = EMPTY;
        // SAFETY: the caller guarantees it.
        let sg_list = unsafe { read_sge_list(request.sg_list, request.num_sge, &mut sges) }?;
        post(&ReceiveRequest { wr_id: request.wr_id, sg_list })?;
        *next = request.next;
    }
    Ok(())
}

pub extern "C" fn post_recv(
    qp: Handle<Qp>,
    wr: *mut ibv_recv_wr,
    bad: Option<&mut *mut ibv_recv_wr>,
) -> c_int {
    post_list("ibv_post_recv", wr, bad, |next| {
        // In RESET it takes nothing.
        let qp = queue_pair::find_after(qp, QpState::Reset)?;
        // SAFETY: the caller's list.
        unsafe { post_recv_list(next, |receive| qp.pair.post_recv(receive)) }
    })
}

/// Binds a type 1 memory window. Its next rkey is the successor of `mw->rkey`, which the program restores after a bind
/// that failed, as ibv_bind_mw(3) says.
pub extern "C" fn bind_mw(qp: Handle<Qp>, mw: Handle<Mw>, info: &ibv_mw_bind) -> c_int {
    errno::code("ibv_bind_mw", || {
        let (qp, window) = (qp.find_on_data_path()?, mw.find_on_data_path()?);
        faults::announce(Verb::BindMw, Some((Resource::QueuePair, qp.pair.qpn().value())))?;
        let flags = send_flags(info.send_flags)?;
        let next = window.window.rkey().0 & !0xff | window.abi().rkey.wrapping_add(1) & 0xff;
        let operation = bind_operation(mw, next, &info.bind_info)?;
        qp.pair.post_send(&SendRequest::new(info.wr_id, operation, &[]).flags(flags))?;
        window.update(|abi| abi.rkey = next);
        Ok(())
    })
}
