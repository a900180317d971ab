//! What a plan means in verbs, alike for cards in virtual and in real time: the memory of queue pairs, their work
//! requests, and what they offer when they connect.

use crate::language::Placement;
use crate::plan::{Area, Job, PairPlan, Work};
use softhca_engine::QpKind;
use softhca_queue::cm::{DATAGRAM_KEY, Parameters, PortSpace};
use softhca_queue::{Operation, RemoteAddress, SendFlags, SendRequest, SendTrailer, Sge};
use softhca_wire::{LocalKey, Qpn, QueueKey, RemoteKey};

/// The Q_Key of datagram pairs.
pub(crate) const QUEUE_KEY: QueueKey = QueueKey(0x1111_1111);

/// The Q_Key of a datagram queue pair, and of the groups that it sends to.
pub(crate) fn key_of(pair: &PairPlan) -> QueueKey {
    if pair.by_cm { DATAGRAM_KEY } else { QUEUE_KEY }
}

/// What is larger than this is left as zeroes: nobody looks at every byte of it.
pub(crate) const LARGEST_FILLED: u64 = 1 << 20;

/// The length of the region behind four areas. Large ones are made so large that the store keeps only what is
/// not zero.
pub(crate) const fn region_length(area: u64) -> u64 {
    let length = 4 * area;
    if area > LARGEST_FILLED && length < 64 << 20 { 64 << 20 } else { length }
}

/// What a queue pair sends: bytes that differ at every place and for every queue pair.
pub(crate) fn pattern(qp: usize, length: usize) -> Vec<u8> {
    let salt = (qp as u64 + 1) << 32;
    (0..length as u64).map(|at| ((at + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// A work request in terms of keys and addresses.
pub(crate) fn request_of(
    id: u64,
    work: &Work,
    (base, key, area): (u64, RemoteKey, u64),
    (peer_base, peer_key, peer_area): (u64, RemoteKey, u64),
) -> (SendRequest<'static>, Sge) {
    let local = match work.job {
        Job::Send { .. } | Job::Write { .. } => Area::Source,
        Job::Read | Job::CompareSwap { .. } | Job::FetchAdd { .. } => Area::Fetched,
    };
    let sge =
        Sge { address: base + local.start(area) + work.offset, length: work.bytes, key: LocalKey(key.0) };
    let target = peer_base + Area::Target.start(peer_area) + work.remote_offset;
    let remote = match work.remote {
        Placement::Region => RemoteAddress { address: target, key: peer_key },
        Placement::WrongKey => RemoteAddress { address: target, key: RemoteKey(peer_key.0 ^ 0xff00) },
        Placement::OutOfBounds => {
            RemoteAddress { address: peer_base + region_length(peer_area), key: peer_key }
        }
        Placement::Misaligned => RemoteAddress { address: target + 1, key: peer_key },
    };
    let operation = match work.job {
        Job::Send { immediate: None } => Operation::Send(SendTrailer::None),
        Job::Send { immediate: Some(immediate) } => Operation::Send(SendTrailer::Immediate(immediate)),
        Job::Write { immediate } => Operation::Write { remote, immediate },
        Job::Read => Operation::Read { remote },
        Job::CompareSwap { compare, swap } => Operation::CompareSwap { remote, compare, swap },
        Job::FetchAdd { add } => Operation::FetchAdd { remote, add },
    };
    let mut request = SendRequest::new(id, operation, &[]);
    request.flags = SendFlags::empty();
    for (wanted, flag) in [
        (work.signaled, SendFlags::SIGNALED),
        (work.fence, SendFlags::FENCE),
        (work.solicited, SendFlags::SOLICITED),
        (work.inline, SendFlags::INLINE),
    ] {
        if wanted {
            request.flags |= flag;
        }
    }
    (request, sge)
}

/// The port space of queue pairs of this kind.
pub(crate) const fn space(kind: QpKind) -> PortSpace {
    match kind {
        QpKind::Ud => PortSpace::Udp,
        QpKind::Rc => PortSpace::Tcp,
        _ => PortSpace::Ib,
    }
}

/// What a side of a pair offers and asks for.
pub(crate) fn parameters(pair: &PairPlan, queue_pair: Qpn, private_data: &[u8]) -> Parameters {
    Parameters {
        private_data: private_data.to_vec(),
        responder_resources: pair.reads,
        initiator_depth: pair.reads,
        retry_count: pair.retry_count,
        rnr_retry_count: pair.rnr_retry,
        queue_pair,
        ..Parameters::default()
    }
}
