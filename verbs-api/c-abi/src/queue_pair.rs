//! Queue pairs.

pub mod create;
pub mod destroy;

use crate::abi::*;
use crate::errno::{Rejection, check};
use crate::object;
use crate::protection::UseCount;
use crate::started_requests::WorkRequestBuilder;
use crate::unacknowledged::Unacknowledged;
use core::ffi::{c_int, c_uint};
use softhca::{Error, Gid, QpState, QpType, QueuePair, VerbsError};

/// The state of an `ibv_qp`, extended or not.
pub struct Qp {
    pub pair: QueuePair,
    pub kind: QpType,
    pub init: ibv_qp_init_attr,
    pub events: Unacknowledged,
    /// The operations of the extended interface; zero without it.
    operations: u64,
    pub builder: WorkRequestBuilder,
    /// `None` for an XRC target.
    _domain: Option<UseCount>,
}

// SAFETY: the pointers of `init` are only returned to the program.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

object::kinds! {
    Qp = ibv_qp_ex, "queue pair", |qp| Some((qp.base.context, qp.base.handle));
}

/// The queue pair behind a pointer; `None` if it is destroyed.
///
/// # Safety
/// `qp` is null or a queue pair of this library.
#[inline]
pub unsafe fn of<'a>(qp: *mut ibv_qp) -> Option<&'a Qp> {
    // SAFETY: the caller guarantees it: every queue pair is extended.
    unsafe { object::state::<Qp>(qp.cast()) }
}

/// The queue pair behind a pointer, or why it cannot be used.
///
/// # Safety
/// As [`of`].
#[inline]
pub unsafe fn find<'a>(qp: *mut ibv_qp) -> Result<&'a Qp, Rejection> {
    // SAFETY: the caller guarantees it: every queue pair is extended.
    unsafe { object::find::<Qp>(qp.cast()) }
}

/// Finds a queue pair, if its state is after `state`, in which it takes no work requests yet.
///
/// # Safety
/// As [`of`].
#[inline]
pub unsafe fn find_after<'a>(qp: *mut ibv_qp, state: QpState) -> Result<&'a Qp, Rejection> {
    // SAFETY: the caller guarantees it: every queue pair is extended.
    let found = unsafe { object::find_on_data_path::<Qp>(qp.cast()) }?;
    // SAFETY: as above.
    let now = unsafe { (*qp).state };
    if now > state as c_int { Ok(found) } else { Err(too_early(now, state)) }
}

#[cold]
fn too_early(now: c_int, until: QpState) -> Rejection {
    let now = QpState::ALL.get(now as usize).copied().unwrap_or(QpState::Reset);
    let queue = if until == QpState::Reset { "receive" } else { "send" };
    let next = QpState::ALL[until as usize + 1];
    Rejection::invalid(format!(
        "the queue pair is in {now}: the {queue} queue takes work requests from {next} on"
    ))
}

pub unsafe extern "C" fn qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: a queue pair of this library.
    let state = check!("ibv_qp_to_qp_ex", null, unsafe { find(qp) });
    if state.operations == 0 {
        return Rejection::invalid("the queue pair was created without send_ops_flags")
            .null("ibv_qp_to_qp_ex");
    }
    qp.cast()
}

unsafe fn change_multicast(
    verb: &str,
    qp: *mut ibv_qp,
    gid: *const [u8; 16],
    act: fn(&QueuePair, Gid) -> Result<(), Error>,
) -> c_int {
    // SAFETY: a queue pair of this library.
    let state = check!(verb, code, unsafe { find(qp) });
    if gid.is_null() {
        return Rejection::invalid("the GID is null").code(verb);
    }
    // SAFETY: a valid pointer of the caller.
    let gid = Gid(unsafe { *gid });
    match act(&state.pair, gid) {
        Ok(()) => 0,
        Err(error @ Error::Verbs(VerbsError::NetworkUnreachable { .. })) => {
            let remedy = match gid.ip().is_ipv4() {
                true => "use an IPv6 group",
                false => {
                    "use an IPv4 group such as ::ffff:239.1.2.3, or a host with an IPv6 address (softhca lab)"
                }
            };
            Rejection::new(error.errno(), format!("{error}: {remedy}")).code(verb)
        }
        Err(error) => Rejection::from(error).code(verb),
    }
}

pub unsafe extern "C" fn attach_mcast(qp: *mut ibv_qp, gid: *const [u8; 16], _: u16) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe { change_multicast("ibv_attach_mcast", qp, gid, QueuePair::attach_multicast) }
}

pub unsafe extern "C" fn detach_mcast(qp: *mut ibv_qp, gid: *const [u8; 16], _: u16) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe { change_multicast("ibv_detach_mcast", qp, gid, QueuePair::detach_multicast) }
}

/// Packets are written in PSN order, and the last bytes of each after all others.
pub unsafe extern "C" fn query_qp_data_in_order(_: *mut ibv_qp, _: c_int, flags: c_uint) -> c_int {
    c_int::from(flags == 0)
}
