//! Queue pairs of an HCA without a world.

#![allow(dead_code, reason = "not everybody needs all of it")]

use softhca_engine::{
    AddressVector, ClientId, Context, CqId, Hca, ModifyQp, PdId, QpInitAttributes, QpState, QpType,
};
use softhca_types::AccessFlags;
use softhca_wire::{Gid, Mtu, Psn, Qpn, RnrTimer};

pub const RIGHTS: AccessFlags =
    AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE).union(AccessFlags::REMOTE_READ);

/// An RC queue pair with one completion queue.
pub fn reliable(domain: PdId, queue: CqId) -> QpInitAttributes {
    QpInitAttributes {
        qp_type: QpType::Rc,
        pd: Some(domain),
        send_cq: Some(queue),
        recv_cq: Some(queue),
        srq: None,
        xrcd: None,
        sq_sig_all: false,
    }
}

/// The transitions to RTS, with the same first PSN in both directions.
pub fn steps((gid, destination): (Gid, Qpn), mtu: Mtu, first: Psn) -> [ModifyQp; 3] {
    let modify = ModifyQp::default();
    [
        modify.state(QpState::Init).pkey_index(0).port(1).access_flags(RIGHTS),
        modify
            .state(QpState::ReadyToReceive)
            .address_vector(AddressVector::to(gid))
            .path_mtu(mtu)
            .dest_qpn(destination)
            .rq_psn(first)
            .max_dest_rd_atomic(16)
            .min_rnr_timer(RnrTimer::new(12)),
        modify
            .state(QpState::ReadyToSend)
            .sq_psn(first)
            .timeout(14)
            .retry_count(7)
            .rnr_retry(7)
            .max_rd_atomic(16),
    ]
}

/// Moves a queue pair to RTS with its peer.
pub fn connect(
    hca: &mut Hca,
    ctx: &mut Context<'_>,
    (client, number): (ClientId, Qpn),
    peer: (Gid, Qpn),
    mtu: Mtu,
    first: Psn,
) {
    for step in steps(peer, mtu, first) {
        hca.modify_queue_pair(ctx, client, number, &step).unwrap();
    }
}
