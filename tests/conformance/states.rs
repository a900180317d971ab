//! The state machine of queue pairs: which attributes each transition needs and allows.

use softhca_engine::{AddressVector, AttributeMask, Error, Modify, QpKind, State, Transition, transition};
use softhca_fabric::{HostId, QpOptions, World};
use softhca_queue::Access;
use softhca_wire::{Gid, Mtu, Psn, Qpn, QueueKey, RnrTimer};
use std::fmt::Write;

const KINDS: [QpKind; 6] =
    [QpKind::Rc, QpKind::Uc, QpKind::Ud, QpKind::XrcInitiator, QpKind::XrcTarget, QpKind::Gsi];

#[test]
fn the_matrix_of_transitions() {
    let mut text = String::new();
    for kind in KINDS {
        writeln!(text, "{kind:?}").unwrap();
        for from in State::ALL {
            for to in State::ALL {
                let Some(Transition { required, optional }) = transition(kind, from, to) else { continue };
                let optional = optional - AttributeMask::STATE;
                writeln!(text, "  {from} -> {to}: needs {required}; allows {optional}").unwrap();
            }
        }
    }
    insta::assert_snapshot!(text);
}

/// A change that sets exactly the attributes of `mask`, to values that fit.
fn set(mask: AttributeMask) -> Modify {
    use AttributeMask as M;
    let peer = Gid::from(std::net::IpAddr::from([10, 0, 0, 2]));
    let mut modify = Modify::default();
    for flag in mask.iter() {
        modify = match flag {
            M::EN_SQD_ASYNC_NOTIFY => modify.notify_drained(true),
            M::ACCESS_FLAGS => modify.access(Access::REMOTE_READ),
            M::PKEY_INDEX => modify.partition_index(0),
            M::PORT => modify.port(1),
            M::QKEY => modify.queue_key(QueueKey(5)),
            M::AV => modify.path(AddressVector::to(peer)),
            M::PATH_MTU => modify.mtu(Mtu::B1024),
            M::TIMEOUT => modify.timeout(14),
            M::RETRY_CNT => modify.retry_count(7),
            M::RNR_RETRY => modify.rnr_retry(7),
            M::RQ_PSN => modify.receive_psn(Psn::new(7)),
            M::MAX_QP_RD_ATOMIC => modify.max_reads_out(1),
            M::MIN_RNR_TIMER => modify.min_rnr_timer(RnrTimer::new(1)),
            M::SQ_PSN => modify.send_psn(Psn::new(9)),
            M::MAX_DEST_RD_ATOMIC => modify.max_reads_in(1),
            M::DEST_QPN => modify.destination(Qpn::new(0x1234)),
            M::RATE_LIMIT => modify.rate_limit(0),
            M::ALT_PATH => modify.alternate(()),
            M::PATH_MIG_STATE => modify.migration(()),
            _ => modify,
        };
    }
    modify
}

/// A queue pair of this kind in this state, if a caller can take it there.
fn queue_pair(kind: QpKind, state: State) -> Option<(World, HostId, Qpn)> {
    let mut world = World::new(1);
    let host = world.add_host("alice", Default::default());
    let mut verbs = world.on(host);
    let domain = verbs.allocate_domain().unwrap();
    let cq = verbs.create_completion_queue(8).unwrap();
    let xrc_domain = (kind == QpKind::XrcTarget).then(|| verbs.open_xrc_domain().unwrap());
    let options = QpOptions { xrc_domain, ..QpOptions::default() };
    let qp = verbs.create_queue_pair(kind, domain, cq, options).unwrap();
    let path: &[State] = match state {
        State::Reset => &[],
        State::Init => &[State::Init],
        State::ReadyToReceive => &[State::Init, State::ReadyToReceive],
        State::ReadyToSend => &[State::Init, State::ReadyToReceive, State::ReadyToSend],
        State::SendQueueDrained => {
            &[State::Init, State::ReadyToReceive, State::ReadyToSend, State::SendQueueDrained]
        }
        State::SendQueueError => return None,
        State::Error => &[State::Error],
    };
    let mut from = State::Reset;
    for to in path {
        let needed = transition(kind, from, *to).unwrap().required;
        verbs.modify(qp, set(needed).state(*to)).unwrap();
        from = *to;
    }
    assert_eq!(verbs.query(qp).unwrap().state, state);
    Some((world, host, qp))
}

#[test]
fn the_card_follows_the_matrix() {
    for kind in KINDS {
        for from in State::ALL {
            for to in State::ALL {
                let attempt = |mask| {
                    let (mut world, host, qp) = queue_pair(kind, from)?;
                    let modify: Modify = set(mask);
                    let result = world.on(host).modify(qp, modify.state(to));
                    let state = world.on(host).query(qp).unwrap().state;
                    assert_eq!(state, if result.is_ok() { to } else { from });
                    Some(result)
                };
                let context = format!("{kind:?} {from} -> {to}");
                let Some(Transition { required, optional }) = transition(kind, from, to) else {
                    let result = attempt(AttributeMask::empty());
                    assert!(matches!(result, None | Some(Err(Error::Transition { .. }))), "{context}");
                    continue;
                };
                if from == State::SendQueueError {
                    continue;
                }
                assert_eq!(attempt(required), Some(Ok(to)), "{context}");
                assert_eq!(attempt(required | optional), Some(Ok(to)), "{context}");
                for missing in required.iter() {
                    let result = attempt(required - missing);
                    let told =
                        matches!(result, Some(Err(Error::Attributes { missing: m, .. })) if m == missing);
                    assert!(told, "{context} without {missing}: {result:?}");
                }
                if matches!(to, State::Reset | State::Error) {
                    continue;
                }
                let settable = set(AttributeMask::all()).mask();
                for extra in (settable - required - optional).iter() {
                    let result = attempt(required | extra);
                    let told = matches!(result, Some(Err(Error::Attributes { forbidden, .. })) if forbidden == extra);
                    assert!(told, "{context} with {extra}: {result:?}");
                }
            }
        }
    }
}

#[test]
fn a_wrong_belief_about_the_present_state_is_refused() {
    let (mut world, host, qp) = queue_pair(QpKind::Rc, State::ReadyToSend).unwrap();
    let modify = Modify::default().state(State::ReadyToSend);
    assert!(world.on(host).modify(qp, modify.current_state(State::SendQueueDrained)).is_err());
    world.on(host).modify(qp, modify.current_state(State::ReadyToSend)).unwrap();
}

#[test]
fn values_out_of_range_are_refused() {
    let (mut world, host, qp) = queue_pair(QpKind::Rc, State::Init).unwrap();
    let needed = |from, to| transition(QpKind::Rc, from, to).unwrap().required;
    let receive = set(needed(State::Init, State::ReadyToReceive)).state(State::ReadyToReceive);
    let nowhere = AddressVector::default();
    for wrong in [
        receive.path(nowhere),
        receive.max_reads_in(129),
        receive.partition_index(1),
        receive.path(AddressVector { source_index: 9, ..receive.path.unwrap() }),
    ] {
        assert!(world.on(host).modify(qp, wrong).is_err(), "{wrong:?}");
    }
    world.on(host).modify(qp, receive).unwrap();
    let send = set(needed(State::ReadyToReceive, State::ReadyToSend)).state(State::ReadyToSend);
    for wrong in [send.timeout(32), send.retry_count(8), send.rnr_retry(8), send.max_reads_out(129)] {
        assert!(world.on(host).modify(qp, wrong).is_err(), "{wrong:?}");
    }
    world.on(host).modify(qp, send).unwrap();
}

#[test]
fn a_path_mtu_above_the_ports_is_refused() {
    let mut world = World::new(1);
    let settings = softhca_engine::Settings { mtu: Mtu::B1024, ..Default::default() };
    let host = world.add_host("alice", settings);
    let mut verbs = world.on(host);
    let domain = verbs.allocate_domain().unwrap();
    let cq = verbs.create_completion_queue(8).unwrap();
    let qp = verbs.create_queue_pair(QpKind::Rc, domain, cq, QpOptions::default()).unwrap();
    let needed = |from, to| transition(QpKind::Rc, from, to).unwrap().required;
    verbs.modify(qp, set(needed(State::Reset, State::Init)).state(State::Init)).unwrap();
    let receive = set(needed(State::Init, State::ReadyToReceive)).state(State::ReadyToReceive);
    assert!(matches!(verbs.modify(qp, receive.mtu(Mtu::B2048)), Err(Error::TooLarge { .. })));
    verbs.modify(qp, receive).unwrap();
}

#[test]
fn the_first_request_establishes_communication_at_a_peer_that_only_receives() {
    use softhca_tests::pair::Setup;
    for kind in [QpKind::Rc, QpKind::Uc] {
        let setup = Setup::of(kind);
        let mut pair = setup.build();
        let (a, b) = (pair.a, pair.b);
        let modify = Modify::default();
        let view = pair.on(b).query(b.qp).unwrap().attributes;
        let mut receive = modify
            .state(State::ReadyToReceive)
            .path(view.path)
            .mtu(view.mtu)
            .destination(a.qp)
            .receive_psn(Psn::new(0));
        if kind == QpKind::Rc {
            receive = receive.max_reads_in(1).min_rnr_timer(RnrTimer::new(1));
        }
        let init = modify.state(State::Init).partition_index(0).port(1).access(view.access);
        for step in [modify.state(State::Reset), init, receive] {
            pair.on(b).modify(b.qp, step).unwrap();
        }
        pair.post_write(1, 0, 0, 8);
        pair.post_write(2, 0, 0, 8);
        pair.run();
        assert_eq!(pair.outcomes(a), [(1, "success"), (2, "success")]);
        assert_eq!(pair.raised(b), ["COMM_EST"], "{kind:?}");
    }
}

#[test]
fn reset_forgets_everything_and_a_new_connection_works() {
    use softhca_tests::pair::Setup;
    let setup = Setup::default().connection(|c| c.timeout = 0);
    let mut pair = setup.build();
    let (a, b) = (pair.a, pair.b);
    pair.lose(softhca_tests::pair::requests(softhca_fabric::Span::starting(0)), 3);
    pair.post_receive(100, 0, 8);
    for id in 0..3 {
        pair.post_write(id, 0, 0, 8);
    }
    pair.run();
    for end in [a, b] {
        pair.on(end).modify(end.qp, Modify::default().state(State::Reset)).unwrap();
    }
    pair.run();
    assert_eq!((pair.outcomes(a), pair.outcomes(b)), (vec![], vec![]), "nothing is reported");
    pair.world.connect((a.host, a.qp), (b.host, b.qp), &setup.connection).unwrap();
    pair.post_receive(101, 0, 8);
    pair.post_send(9, 0, 8);
    pair.run();
    assert_eq!((pair.outcomes(a), pair.outcomes(b)), (vec![(9, "success")], vec![(101, "success")]));
}
