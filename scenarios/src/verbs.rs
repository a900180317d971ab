//! Translates a plan to verbs: memory layout, work requests and connection parameters. Virtual and real time share it.

use crate::plan::{Area, PairPlan, WorkOperation, WorkRequest};
use crate::spec::RemoteTarget;
use softhca_engine::QpType;
use softhca_types::cm::{ConnectionParameters, PortSpace, RDMA_UDP_QKEY};
use softhca_types::{Operation, RemoteAddress, SendFlags, SendImmOrInvalidate, Sge};
use softhca_wire::{LocalKey, Qpn, QueueKey, RemoteKey};

/// The Q_Key of UD pairs that are connected before the run.
pub(crate) const DATAGRAM_QKEY: QueueKey = QueueKey(0x1111_1111);

/// The Q_Key of a UD queue pair and of the multicast groups that it sends to.
pub(crate) fn qkey_of(pair: &PairPlan) -> QueueKey {
    if pair.uses_cm { RDMA_UDP_QKEY } else { DATAGRAM_QKEY }
}

/// Larger source areas stay zero: no expectation compares every byte of them.
pub(crate) const MAX_PATTERN_BYTES: u64 = 1 << 20;

/// The length of the region that holds the four areas. Large regions are extended so that the memory store keeps only
/// their nonzero pages.
pub(crate) const fn region_length(area: u64) -> u64 {
    let length = 4 * area;
    if area > MAX_PATTERN_BYTES && length < 64 << 20 { 64 << 20 } else { length }
}

/// The source bytes of a queue pair. They differ between offsets and between queue pairs.
pub(crate) fn fill_pattern(qp: usize, length: usize) -> Vec<u8> {
    let salt = (qp as u64 + 1) << 32;
    (0..length as u64).map(|at| ((at + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Converts a work request of the plan to keys and addresses.
pub(crate) fn send_request(
    work: &WorkRequest,
    (base, key, area): (u64, RemoteKey, u64),
    (peer_base, peer_key, peer_area): (u64, RemoteKey, u64),
) -> (Operation, SendFlags, Sge) {
    let local = match work.operation {
        WorkOperation::Send { .. } | WorkOperation::Write { .. } => Area::Source,
        WorkOperation::Read | WorkOperation::CompareSwap { .. } | WorkOperation::FetchAdd { .. } => {
            Area::Fetched
        }
    };
    let sge =
        Sge { address: base + local.start(area) + work.offset, length: work.bytes, lkey: LocalKey(key.0) };
    let target = peer_base + Area::Target.start(peer_area) + work.remote_offset;
    let remote = match work.remote_target {
        RemoteTarget::Valid => RemoteAddress { address: target, rkey: peer_key },
        RemoteTarget::WrongRkey => RemoteAddress { address: target, rkey: RemoteKey(peer_key.0 ^ 0xff00) },
        RemoteTarget::OutOfBounds => {
            RemoteAddress { address: peer_base + region_length(peer_area), rkey: peer_key }
        }
        RemoteTarget::Misaligned => RemoteAddress { address: target + 1, rkey: peer_key },
    };
    let operation = match work.operation {
        WorkOperation::Send { immediate: None } => Operation::Send(SendImmOrInvalidate::None),
        WorkOperation::Send { immediate: Some(immediate) } => {
            Operation::Send(SendImmOrInvalidate::Immediate(immediate))
        }
        WorkOperation::Write { immediate } => Operation::Write { remote, imm_data: immediate },
        WorkOperation::Read => Operation::Read { remote },
        WorkOperation::CompareSwap { compare, swap } => Operation::CompareSwap { remote, compare, swap },
        WorkOperation::FetchAdd { add } => Operation::FetchAdd { remote, add },
    };
    let mut flags = SendFlags::empty();
    for (wanted, flag) in [
        (work.signaled, SendFlags::SIGNALED),
        (work.fence, SendFlags::FENCE),
        (work.solicited, SendFlags::SOLICITED),
        (work.inline, SendFlags::INLINE),
    ] {
        if wanted {
            flags |= flag;
        }
    }
    (operation, flags, sge)
}

pub(crate) const fn port_space(kind: QpType) -> PortSpace {
    match kind {
        QpType::Ud => PortSpace::Udp,
        QpType::Rc => PortSpace::Tcp,
        _ => PortSpace::Ib,
    }
}

/// The connection parameters of one side of a pair.
pub(crate) fn conn_params(pair: &PairPlan, queue_pair: Qpn, private_data: &[u8]) -> ConnectionParameters {
    ConnectionParameters {
        private_data: private_data.to_vec(),
        responder_resources: pair.max_rd_atomic,
        initiator_depth: pair.max_rd_atomic,
        retry_count: pair.retry_count,
        rnr_retry_count: pair.rnr_retry,
        qpn: queue_pair,
        ..ConnectionParameters::default()
    }
}
