//! The QP state machine: required and optional attributes of each transition.

use softhca_engine::{
    AddressVector, ModifyQp, QpAttributeMask, QpState, QpType, Transition, VerbsError, transition,
};
use softhca_fabric::HostId;
use softhca_tests::verbs::{QpOptions, World};
use softhca_types::AccessFlags;
use softhca_wire::{Gid, Mtu, Psn, Qpn, QueueKey, RnrTimer};
use std::fmt::Write;

const KINDS: [QpType; 6] =
    [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcInitiator, QpType::XrcTarget, QpType::Gsi];

#[test]
fn the_transition_table() {
    let mut text = String::new();
    for kind in KINDS {
        writeln!(text, "{kind:?}").unwrap();
        for from in QpState::ALL {
            for to in QpState::ALL {
                let Some(Transition { required, optional }) = transition(kind, from, to) else { continue };
                let optional = optional - QpAttributeMask::STATE;
                writeln!(text, "  {from} -> {to}: needs {required}; allows {optional}").unwrap();
            }
        }
    }
    insta::assert_snapshot!(text);
}

/// A modify with exactly the attributes of `mask`, with valid values.
fn set(mask: QpAttributeMask) -> ModifyQp {
    use QpAttributeMask as M;
    let peer = Gid::from(std::net::IpAddr::from([10, 0, 0, 2]));
    let mut modify = ModifyQp::default();
    for flag in mask.iter() {
        modify = match flag {
            M::EN_SQD_ASYNC_NOTIFY => modify.sqd_async_notify(true),
            M::ACCESS_FLAGS => modify.access_flags(AccessFlags::REMOTE_READ),
            M::PKEY_INDEX => modify.pkey_index(0),
            M::PORT => modify.port(1),
            M::QKEY => modify.qkey(QueueKey(5)),
            M::AV => modify.address_vector(AddressVector::to(peer)),
            M::PATH_MTU => modify.path_mtu(Mtu::B1024),
            M::TIMEOUT => modify.timeout(14),
            M::RETRY_CNT => modify.retry_count(7),
            M::RNR_RETRY => modify.rnr_retry(7),
            M::RQ_PSN => modify.rq_psn(Psn::new(7)),
            M::MAX_QP_RD_ATOMIC => modify.max_rd_atomic(1),
            M::MIN_RNR_TIMER => modify.min_rnr_timer(RnrTimer::new(1)),
            M::SQ_PSN => modify.sq_psn(Psn::new(9)),
            M::MAX_DEST_RD_ATOMIC => modify.max_dest_rd_atomic(1),
            M::DEST_QPN => modify.dest_qpn(Qpn::new(0x1234)),
            M::RATE_LIMIT => modify.rate_limit(0),
            M::ALT_PATH => modify.alt_path(()),
            M::PATH_MIG_STATE => modify.path_mig_state(()),
            _ => modify,
        };
    }
    modify
}

/// A queue pair of this type in this state, if a caller can reach it.
fn queue_pair(kind: QpType, state: QpState) -> Option<(World, HostId, Qpn)> {
    let mut world = World::new(1);
    let host = world.add_host("alice", Default::default());
    let mut verbs = world.verbs(host);
    let domain = verbs.allocate_protection_domain().unwrap();
    let cq = verbs.create_completion_queue(8).unwrap();
    let xrc_domain = (kind == QpType::XrcTarget).then(|| verbs.open_xrc_domain().unwrap());
    let options = QpOptions { xrc_domain, ..QpOptions::default() };
    let qp = verbs.create_queue_pair(kind, domain, cq, options).unwrap();
    let path: &[QpState] = match state {
        QpState::Reset => &[],
        QpState::Init => &[QpState::Init],
        QpState::ReadyToReceive => &[QpState::Init, QpState::ReadyToReceive],
        QpState::ReadyToSend => &[QpState::Init, QpState::ReadyToReceive, QpState::ReadyToSend],
        QpState::SendQueueDrained => {
            &[QpState::Init, QpState::ReadyToReceive, QpState::ReadyToSend, QpState::SendQueueDrained]
        }
        QpState::SendQueueError => return None,
        QpState::Error => &[QpState::Error],
    };
    let mut from = QpState::Reset;
    for to in path {
        let needed = transition(kind, from, *to).unwrap().required;
        verbs.modify_queue_pair(qp, set(needed).state(*to)).unwrap();
        from = *to;
    }
    assert_eq!(verbs.query_queue_pair(qp).unwrap().state, state);
    Some((world, host, qp))
}

#[test]
fn modify_follows_the_transition_table() {
    for kind in KINDS {
        for from in QpState::ALL {
            for to in QpState::ALL {
                let attempt = |mask| {
                    let (mut world, host, qp) = queue_pair(kind, from)?;
                    let modify: ModifyQp = set(mask);
                    let result = world.verbs(host).modify_queue_pair(qp, modify.state(to));
                    let state = world.verbs(host).query_queue_pair(qp).unwrap().state;
                    assert_eq!(state, if result.is_ok() { to } else { from });
                    Some(result)
                };
                let context = format!("{kind:?} {from} -> {to}");
                let Some(Transition { required, optional }) = transition(kind, from, to) else {
                    let result = attempt(QpAttributeMask::empty());
                    assert!(
                        matches!(result, None | Some(Err(VerbsError::InvalidTransition { .. }))),
                        "{context}"
                    );
                    continue;
                };
                if from == QpState::SendQueueError {
                    continue;
                }
                assert_eq!(attempt(required), Some(Ok(to)), "{context}");
                assert_eq!(attempt(required | optional), Some(Ok(to)), "{context}");
                for missing in required.iter() {
                    let result = attempt(required - missing);
                    let reported = matches!(result, Some(Err(VerbsError::InvalidAttributes { missing: m, .. })) if m == missing);
                    assert!(reported, "{context} without {missing}: {result:?}");
                }
                if matches!(to, QpState::Reset | QpState::Error) {
                    continue;
                }
                let settable = set(QpAttributeMask::all()).mask();
                // Linux removes what an XRC queue pair has no use for before it checks the rest.
                let kept = set(settable).without_ignored(kind).mask();
                for extra in (settable - required - optional).iter() {
                    let result = attempt(required | extra);
                    if !kept.contains(extra) {
                        assert_eq!(result, Some(Ok(to)), "{context} with {extra}");
                        continue;
                    }
                    let reported = matches!(result, Some(Err(VerbsError::InvalidAttributes { forbidden, .. })) if forbidden == extra);
                    assert!(reported, "{context} with {extra}: {result:?}");
                }
            }
        }
    }
}

#[test]
fn xrc_queue_pairs_ignore_the_attributes_of_the_other_role() {
    use QpAttributeMask as M;
    let all = set(M::all()).mask();
    for (kind, ignored) in [
        (QpType::XrcInitiator, M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER),
        (QpType::XrcTarget, M::MAX_QP_RD_ATOMIC | M::RETRY_CNT | M::RNR_RETRY),
        (QpType::Rc, M::empty()),
        (QpType::Ud, M::empty()),
    ] {
        assert_eq!(all - set(all).without_ignored(kind).mask(), ignored, "{kind:?}");
    }
    // The attributes of RC bring an initiator to RTR and RTS, and an ignored value is not even checked.
    let (mut world, host, qp) = queue_pair(QpType::XrcInitiator, QpState::Init).unwrap();
    let to_rtr = transition(QpType::Rc, QpState::Init, QpState::ReadyToReceive).unwrap();
    let modify = set(to_rtr.required).max_dest_rd_atomic(255).state(QpState::ReadyToReceive);
    assert_eq!(world.verbs(host).modify_queue_pair(qp, modify), Ok(QpState::ReadyToReceive));
    assert_eq!(world.verbs(host).query_queue_pair(qp).unwrap().attributes.max_dest_rd_atomic, 0);
}

#[test]
fn a_wrong_cur_qp_state_is_rejected() {
    let (mut world, host, qp) = queue_pair(QpType::Rc, QpState::ReadyToSend).unwrap();
    let modify = ModifyQp::default().state(QpState::ReadyToSend);
    assert!(
        world.verbs(host).modify_queue_pair(qp, modify.current_state(QpState::SendQueueDrained)).is_err()
    );
    world.verbs(host).modify_queue_pair(qp, modify.current_state(QpState::ReadyToSend)).unwrap();
}

#[test]
fn values_out_of_range_are_rejected() {
    let (mut world, host, qp) = queue_pair(QpType::Rc, QpState::Init).unwrap();
    let needed = |from, to| transition(QpType::Rc, from, to).unwrap().required;
    let receive = set(needed(QpState::Init, QpState::ReadyToReceive)).state(QpState::ReadyToReceive);
    let nowhere = AddressVector::default();
    for wrong in [
        receive.address_vector(nowhere),
        receive.max_dest_rd_atomic(129),
        receive.pkey_index(1),
        receive.address_vector(AddressVector { sgid_index: 9, ..receive.address_vector.unwrap() }),
    ] {
        assert!(world.verbs(host).modify_queue_pair(qp, wrong).is_err(), "{wrong:?}");
    }
    world.verbs(host).modify_queue_pair(qp, receive).unwrap();
    let send = set(needed(QpState::ReadyToReceive, QpState::ReadyToSend)).state(QpState::ReadyToSend);
    for wrong in [send.timeout(32), send.retry_count(8), send.rnr_retry(8), send.max_rd_atomic(129)] {
        assert!(world.verbs(host).modify_queue_pair(qp, wrong).is_err(), "{wrong:?}");
    }
    world.verbs(host).modify_queue_pair(qp, send).unwrap();
}

#[test]
fn a_path_mtu_above_that_of_the_port_is_rejected() {
    let mut world = World::new(1);
    let settings = softhca_engine::Settings { mtu: Mtu::B1024, ..Default::default() };
    let host = world.add_host("alice", settings);
    let mut verbs = world.verbs(host);
    let domain = verbs.allocate_protection_domain().unwrap();
    let cq = verbs.create_completion_queue(8).unwrap();
    let qp = verbs.create_queue_pair(QpType::Rc, domain, cq, QpOptions::default()).unwrap();
    let needed = |from, to| transition(QpType::Rc, from, to).unwrap().required;
    verbs.modify_queue_pair(qp, set(needed(QpState::Reset, QpState::Init)).state(QpState::Init)).unwrap();
    let receive = set(needed(QpState::Init, QpState::ReadyToReceive)).state(QpState::ReadyToReceive);
    assert!(matches!(
        verbs.modify_queue_pair(qp, receive.path_mtu(Mtu::B2048)),
        Err(VerbsError::LimitExceeded { .. })
    ));
    verbs.modify_queue_pair(qp, receive).unwrap();
}

#[test]
fn the_first_request_raises_comm_est_in_rtr() {
    use softhca_tests::pair::Setup;
    for kind in [QpType::Rc, QpType::Uc] {
        let setup = Setup::with_kind(kind);
        let mut pair = setup.build();
        let (a, b) = (pair.a, pair.b);
        let modify = ModifyQp::default();
        let view = pair.on(b).query_queue_pair(b.qp).unwrap().attributes;
        let mut receive = modify
            .state(QpState::ReadyToReceive)
            .address_vector(view.address_vector)
            .path_mtu(view.path_mtu)
            .dest_qpn(a.qp)
            .rq_psn(Psn::new(0));
        if kind == QpType::Rc {
            receive = receive.max_dest_rd_atomic(1).min_rnr_timer(RnrTimer::new(1));
        }
        let init = modify.state(QpState::Init).pkey_index(0).port(1).access_flags(view.access_flags);
        for step in [modify.state(QpState::Reset), init, receive] {
            pair.on(b).modify_queue_pair(b.qp, step).unwrap();
        }
        pair.post_write(1, 0, 0, 8);
        pair.post_write(2, 0, 0, 8);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")]);
        assert_eq!(pair.async_events(b), ["COMM_EST"], "{kind:?}");
    }
}

#[test]
fn a_queue_pair_can_connect_again_after_reset() {
    use softhca_tests::pair::Setup;
    let setup = Setup::default().connection(|c| c.timeout = 0);
    let mut pair = setup.build();
    let (a, b) = (pair.a, pair.b);
    pair.drop_packets(softhca_tests::pair::requests(softhca_fabric::InclusiveRange::at_least(0)), 3);
    pair.post_receive(100, 0, 8);
    for id in 0..3 {
        pair.post_write(id, 0, 0, 8);
    }
    pair.run();
    for end in [a, b] {
        pair.on(end).modify_queue_pair(end.qp, ModifyQp::default().state(QpState::Reset)).unwrap();
    }
    pair.run();
    assert_eq!(
        (pair.completion_statuses(a), pair.completion_statuses(b)),
        (vec![], vec![]),
        "nothing is reported"
    );
    pair.world.connect((a.host, a.qp), (b.host, b.qp), &setup.connection).unwrap();
    pair.post_receive(101, 0, 8);
    pair.post_send(9, 0, 8);
    pair.run();
    assert_eq!(
        (pair.completion_statuses(a), pair.completion_statuses(b)),
        (vec![(9, "SUCCESS")], vec![(101, "SUCCESS")])
    );
}
