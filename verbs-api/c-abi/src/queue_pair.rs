//! Queue pairs.

pub mod create;
pub mod destroy;

use crate::abi::*;
use crate::errno::{self, Rejection};
use crate::object::{self, Found, Handle};
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

const QP_TYPES: [(c_int, QpType); 5] = [
    (IBV_QPT_RC, QpType::Rc),
    (IBV_QPT_UC, QpType::Uc),
    (IBV_QPT_UD, QpType::Ud),
    (IBV_QPT_XRC_SEND, QpType::XrcInitiator),
    (IBV_QPT_XRC_RECV, QpType::XrcTarget),
];

/// The type with a number of the headers.
pub fn qp_type(number: c_int) -> Option<QpType> {
    QP_TYPES.iter().find(|(known, _)| *known == number).map(|(_, kind)| *kind)
}

/// The number of a type in the headers.
pub fn qp_type_number(kind: QpType) -> c_int {
    QP_TYPES.iter().find(|(_, known)| *known == kind).map_or(IBV_QPT_UD, |(number, _)| *number)
}

/// Finds a queue pair, if its state is after `state`, in which it takes no work requests yet.
#[inline]
pub fn find_after<'a>(qp: Handle<Qp>, state: QpState) -> Result<Found<'a, Qp>, Rejection> {
    let found = qp.find_on_data_path()?;
    let now = found.abi().base.state;
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

/// Every queue pair is extended, but only those that were created so have operations.
pub extern "C" fn qp_to_qp_ex(qp: Handle<Qp>) -> Handle<Qp> {
    errno::handle("ibv_qp_to_qp_ex", || match qp.find()?.operations {
        0 => Err(Rejection::invalid("the queue pair was created without send_ops_flags")),
        _ => Ok(qp),
    })
}

fn change_multicast(
    verb: &str,
    qp: Handle<Qp>,
    gid: Option<&[u8; 16]>,
    act: fn(&QueuePair, Gid) -> Result<(), Error>,
) -> c_int {
    errno::code(verb, || {
        let qp = qp.find()?;
        let gid = Gid(*gid.ok_or_else(|| Rejection::invalid("the GID is null"))?);
        act(&qp.pair, gid).map_err(|error| match error {
            Error::Verbs(VerbsError::NetworkUnreachable { .. }) => {
                let remedy = "use an IPv6 group, or a host with an IPv4 address";
                Rejection::new(error.errno(), format!("{error}: {remedy}"))
            }
            error => error.into(),
        })
    })
}

pub extern "C" fn attach_mcast(qp: Handle<Qp>, gid: Option<&[u8; 16]>, _: u16) -> c_int {
    change_multicast("ibv_attach_mcast", qp, gid, QueuePair::attach_multicast)
}

pub extern "C" fn detach_mcast(qp: Handle<Qp>, gid: Option<&[u8; 16]>, _: u16) -> c_int {
    change_multicast("ibv_detach_mcast", qp, gid, QueuePair::detach_multicast)
}

/// Packets are written in PSN order, and the last bytes of each after all others.
pub extern "C" fn query_qp_data_in_order(_: Handle<Qp>, _: c_int, flags: c_uint) -> c_int {
    c_int::from(flags == 0)
}
