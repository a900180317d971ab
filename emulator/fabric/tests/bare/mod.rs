//! Queue pairs of a card that no world drives.

#![allow(dead_code, reason = "not everybody needs all of it")]

use softhca_engine::{AddressVector, ClientId, Context, CqId, Hca, Modify, PdId, QpInit, QpKind, State};
use softhca_queue::Access;
use softhca_wire::{Gid, Mtu, Psn, Qpn, RnrTimer};

pub const RIGHTS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ);

/// A reliable connection whose completions all go to one queue.
pub fn reliable(domain: PdId, queue: CqId) -> QpInit {
    QpInit {
        kind: QpKind::Rc,
        domain: Some(domain),
        send_cq: Some(queue),
        receive_cq: Some(queue),
        shared_receive_queue: None,
        xrc_domain: None,
        signal_all: false,
    }
}

/// The steps to a queue pair that is ready to send to its peer, with the same first PSN both ways.
pub fn steps((gid, destination): (Gid, Qpn), mtu: Mtu, first: Psn) -> [Modify; 3] {
    let modify = Modify::default();
    [
        modify.state(State::Init).partition_index(0).port(1).access(RIGHTS),
        modify
            .state(State::ReadyToReceive)
            .path(AddressVector::to(gid))
            .mtu(mtu)
            .destination(destination)
            .receive_psn(first)
            .max_reads_in(16)
            .min_rnr_timer(RnrTimer::new(12)),
        modify
            .state(State::ReadyToSend)
            .send_psn(first)
            .timeout(14)
            .retry_count(7)
            .rnr_retry(7)
            .max_reads_out(16),
    ]
}

/// Makes a queue pair ready to send to its peer.
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
