//! The attributes that each state transition of a queue pair requires and allows.

use crate::{ModifyQp, QpAttributeMask, QpState, QpType, VerbsError, VerbsResult};
use softhca_wire::Qpn;

/// The required and optional attributes of a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// The required attributes.
    pub required: QpAttributeMask,
    /// The optional attributes.
    pub optional: QpAttributeMask,
}

/// The transition that an application may request (IBA table 91), if it exists.
pub fn transition(kind: QpType, from: QpState, to: QpState) -> Option<Transition> {
    use QpAttributeMask as M;
    use QpState::*;
    use QpType as K;
    let datagram = kind.is_datagram();
    let connected = M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
    let migration = M::ALT_PATH | M::PATH_MIG_STATE;
    let responder_rnr = if matches!(kind, K::Rc | K::XrcTarget) { M::MIN_RNR_TIMER } else { M::empty() };
    let (required, optional) = match (from, to) {
        (_, Reset | Error) => (M::empty(), M::empty()),
        (Reset, Init) if kind == K::Gsi => (M::PKEY_INDEX | M::QKEY, M::PORT),
        (Reset, Init) if datagram => (M::PKEY_INDEX | M::PORT | M::QKEY, M::empty()),
        (Reset, Init) => (connected, M::empty()),
        (Init, Init) if datagram => (M::empty(), M::PKEY_INDEX | M::PORT | M::QKEY),
        (Init, Init) => (M::empty(), connected),
        (Init, ReadyToReceive) if datagram => (M::empty(), M::PKEY_INDEX | M::QKEY),
        (Init, ReadyToReceive) => {
            let required = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
            let responder = match kind {
                K::Rc | K::XrcTarget => M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
                _ => M::empty(),
            };
            (required | responder, M::ALT_PATH | M::ACCESS_FLAGS | M::PKEY_INDEX)
        }
        (ReadyToReceive, ReadyToSend) => {
            let required = match kind {
                K::Rc | K::XrcInitiator => {
                    M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC
                }
                K::XrcTarget => M::TIMEOUT | M::SQ_PSN,
                _ => M::SQ_PSN,
            };
            let optional = match datagram {
                true => M::CUR_STATE | M::QKEY,
                false => M::CUR_STATE | M::ACCESS_FLAGS | migration | responder_rnr,
            };
            (required, optional | M::RATE_LIMIT)
        }
        (ReadyToSend, ReadyToSend) | (SendQueueDrained, ReadyToSend) => match datagram {
            true => (M::empty(), M::CUR_STATE | M::QKEY | M::RATE_LIMIT),
            false => (M::empty(), M::CUR_STATE | M::ACCESS_FLAGS | migration | responder_rnr | M::RATE_LIMIT),
        },
        (SendQueueError, ReadyToSend) => match kind {
            K::Ud | K::Gsi => (M::empty(), M::CUR_STATE | M::QKEY),
            K::Uc => (M::empty(), M::CUR_STATE | M::ACCESS_FLAGS),
            _ => return None,
        },
        (ReadyToSend, SendQueueDrained) => (M::empty(), M::EN_SQD_ASYNC_NOTIFY),
        (SendQueueDrained, SendQueueDrained) => {
            let common = M::AV | M::ACCESS_FLAGS | M::PKEY_INDEX | migration;
            let optional = match kind {
                K::Ud | K::Gsi => M::PKEY_INDEX | M::QKEY,
                K::Uc => common,
                K::Rc => {
                    common
                        | M::PORT
                        | M::TIMEOUT
                        | M::RETRY_CNT
                        | M::RNR_RETRY
                        | M::MAX_QP_RD_ATOMIC
                        | M::MAX_DEST_RD_ATOMIC
                        | M::MIN_RNR_TIMER
                }
                K::XrcInitiator => {
                    common | M::PORT | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC
                }
                K::XrcTarget => common | M::PORT | M::TIMEOUT | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
            };
            (M::empty(), optional)
        }
        _ => return None,
    };
    Some(Transition { required, optional: optional | M::STATE })
}

/// Checks a change against the table and the ranges of its values.
pub(crate) fn check_modify(
    qpn: Qpn,
    kind: QpType,
    from: QpState,
    modify: &ModifyQp,
    max_rd_atomic: u8,
) -> VerbsResult<QpState> {
    if let Some(believed) = modify.current_state
        && believed != from
        // The application may not know about a send queue error yet.
        && !(believed == QpState::ReadyToSend && from == QpState::SendQueueError)
    {
        return Err(VerbsError::Invalid {
            what: "current state",
            why: "it differs from the state of the queue pair",
        });
    }
    let to = modify.state.unwrap_or(from);
    let Some(Transition { required, optional }) = transition(kind, from, to) else {
        return Err(VerbsError::InvalidTransition { qpn, from, to });
    };
    let given = modify.mask();
    let (missing, forbidden) = (required - given, given - required - optional);
    // Transitions to RESET and ERR ignore all attributes.
    let ignored = matches!(to, QpState::Reset | QpState::Error);
    if !missing.is_empty() || !forbidden.is_empty() && !ignored {
        return Err(VerbsError::InvalidAttributes { qpn, from, to, missing, forbidden });
    }
    if modify.port.is_some_and(|port| port != 1) {
        return Err(VerbsError::Invalid { what: "port", why: "the HCA has one port, number 1" });
    }
    for (what, value, limit) in [
        ("timeout", modify.timeout, 31),
        ("retry count", modify.retry_count, 7),
        ("RNR retry count", modify.rnr_retry, 7),
        ("max_rd_atomic", modify.max_rd_atomic, max_rd_atomic),
        ("max_dest_rd_atomic", modify.max_dest_rd_atomic, max_rd_atomic),
    ] {
        if let Some(value) = value.filter(|value| *value > limit) {
            return Err(VerbsError::LimitExceeded { what, value: value.into(), limit: limit.into() });
        }
    }
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use QpAttributeMask as Mask;

    const TYPES: [QpType; 6] =
        [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcInitiator, QpType::XrcTarget, QpType::Gsi];
    const STATES: [QpState; 7] = [
        QpState::Reset,
        QpState::Init,
        QpState::ReadyToReceive,
        QpState::ReadyToSend,
        QpState::SendQueueDrained,
        QpState::SendQueueError,
        QpState::Error,
    ];

    #[test]
    fn every_state_has_a_transition_to_reset_and_to_error() {
        for (kind, from) in TYPES.into_iter().flat_map(|kind| STATES.map(|from| (kind, from))) {
            for to in [QpState::Reset, QpState::Error] {
                let found = transition(kind, from, to).map(|found| found.required);
                assert_eq!(found, Some(Mask::empty()), "{kind:?}: {from} to {to}");
            }
        }
    }

    #[test]
    fn a_queue_pair_becomes_ready_only_through_init_and_rtr() {
        for kind in TYPES {
            let froms = |to| STATES.into_iter().filter(move |from| transition(kind, *from, to).is_some());
            assert!(froms(QpState::Init).eq([QpState::Reset, QpState::Init]), "{kind:?}");
            assert!(froms(QpState::ReadyToReceive).eq([QpState::Init]), "{kind:?}");
            assert_eq!(transition(kind, QpState::Init, QpState::ReadyToSend), None, "{kind:?}");
        }
    }

    #[test]
    fn only_unreliable_services_leave_the_send_queue_error_state() {
        for kind in TYPES {
            let found = transition(kind, QpState::SendQueueError, QpState::ReadyToSend);
            assert_eq!(found.is_some(), !kind.is_reliable(), "{kind:?}");
        }
    }

    #[test]
    fn required_and_optional_attributes_are_disjoint() {
        for (kind, from) in TYPES.into_iter().flat_map(|kind| STATES.map(|from| (kind, from))) {
            for found in STATES.into_iter().filter_map(|to| transition(kind, from, to)) {
                assert!(!found.required.intersects(found.optional), "{kind:?} from {from}");
            }
        }
    }

    #[test]
    fn a_change_without_a_required_attribute_is_refused_with_its_name() {
        let modify = ModifyQp::default().state(QpState::Init).port(1).pkey_index(0);
        let error = check_modify(Qpn::new(2), QpType::Rc, QpState::Reset, &modify, 128).unwrap_err();
        assert!(
            matches!(error, VerbsError::InvalidAttributes { missing: Mask::ACCESS_FLAGS, .. }),
            "{error}"
        );
        let modify = modify.access_flags(softhca_types::AccessFlags::empty());
        assert_eq!(check_modify(Qpn::new(2), QpType::Rc, QpState::Reset, &modify, 128), Ok(QpState::Init));
    }
}
