//! Maps events and faults to the names of the log. Every variant is here, or it does not compile.

use super::data::{BufferData, Change, CulpritData, PacketData, QueueData};
use super::provenance::Provenance;
use super::vocabulary::What;
use crate::Cast;
use crate::words::{self, slug};
use softhca_engine::{AsyncEvent, Event, Packet, Profile, QpKind, Reason, Refusal};
use softhca_fabric::{CableId, Cause, Culprit, Effect, FabricEvent, Fault, Node};
use softhca_queue::{Completion, CompletionFlags};
use softhca_wire::{Qpn, Syndrome};

/// A packet as an entry has it.
pub(super) fn packet(packet: &Packet) -> PacketData {
    let rnr_wait = match packet.syndrome {
        Some(Syndrome::RnrNak(timer)) => Some(timer.nanoseconds()),
        _ => None,
    };
    PacketData {
        opcode: packet.opcode.to_string().into(),
        psn: packet.psn.value(),
        dest_qp: packet.destination.value(),
        payload: packet.payload,
        syndrome: packet.syndrome.map(|syndrome| match syndrome {
            Syndrome::Ack(_) => "ack".into(),
            Syndrome::RnrNak(_) => "rnr-nak".into(),
            Syndrome::Nak(_) => slug(&syndrome).into(),
        }),
        rnr_wait,
        peer: packet.peer,
    }
}

fn completed(cq: u32, completion: &Completion, reason: Reason) -> What {
    let has = |flag| completion.flags.contains(flag);
    let source = completion.source.value();
    What::WorkCompleted {
        qp: completion.queue_pair.value(),
        id: completion.id,
        operation: completion.operation.name().into(),
        status: completion.status.name().into(),
        bytes: completion.bytes,
        immediate: has(CompletionFlags::IMMEDIATE).then_some(completion.immediate),
        invalidated: has(CompletionFlags::INVALIDATED).then_some(completion.immediate),
        source_qp: (source != 0).then_some(source),
        cq,
        reason: slug(&reason).into(),
        vendor_error: completion.vendor_error,
    }
}

fn number(event: &AsyncEvent) -> Option<u32> {
    match *event {
        AsyncEvent::CompletionQueueError(cq) => Some(cq.0),
        AsyncEvent::QueuePairFatal(qp)
        | AsyncEvent::QueuePairRequestError(qp)
        | AsyncEvent::QueuePairAccessError(qp)
        | AsyncEvent::CommunicationEstablished(qp)
        | AsyncEvent::SendQueueDrained(qp)
        | AsyncEvent::LastWorkRequestReached(qp) => Some(qp.value()),
        AsyncEvent::SharedReceiveQueueError(srq) | AsyncEvent::SharedReceiveQueueLimit(srq) => Some(srq.0),
        AsyncEvent::PortActive | AsyncEvent::PortDown | AsyncEvent::GidChange | AsyncEvent::DeviceFatal => {
            None
        }
    }
}

fn kind(kind: QpKind) -> &'static str {
    match kind {
        QpKind::Rc => "rc",
        QpKind::Uc => "uc",
        QpKind::Ud => "ud",
        QpKind::XrcInitiator => "xrc-initiator",
        QpKind::XrcTarget => "xrc-target",
        QpKind::Gsi => "gsi",
    }
}

fn configured(qp: Qpn, profile: &Profile) -> What {
    let queue =
        |queue: Option<(softhca_engine::CqId, u32)>| queue.map(|(cq, slots)| QueueData { cq: cq.0, slots });
    let rights: Vec<&str> = profile.access.iter_names().map(|(name, _)| name).collect();
    What::Configured {
        qp: qp.value(),
        kind: kind(profile.kind).into(),
        recovery: profile.recovery.name().into(),
        peer: profile.peer.map(|(address, _)| address),
        dest_qp: profile.peer.map(|(_, number)| number.value()),
        mtu: profile.mtu.bytes(),
        first_psn: profile.psns[0].value(),
        expected_psn: profile.psns[1].value(),
        timeout: profile.timeout,
        patience: profile.patience.map(|patience| patience.as_nanos() as u64),
        retry_cnt: profile.retry_count,
        rnr_retry: profile.rnr_retry,
        access: rights.join("|"),
        max_rd_atomic: profile.reads[0],
        max_dest_rd_atomic: profile.reads[1],
        send_slots: profile.slots[0],
        receive_slots: profile.slots[1],
        send_cq: queue(profile.completion_queues[0]),
        receive_cq: queue(profile.completion_queues[1]),
    }
}

/// The sentence of a reason, where there is something to say.
fn why(reason: &Reason) -> Option<String> {
    (*reason != Reason::None).then(|| reason.to_string())
}

/// What an event is in the log, and why it happened.
pub(super) fn of_event(event: &Event, provenance: &Provenance) -> (What, Option<String>) {
    let mut trigger = None;
    let what = match *event {
        Event::Configured { qp, profile } => configured(qp, &profile),
        Event::WorkStarted { qp, id, operation, bytes, first, packets, buffer } => What::WorkStarted {
            qp: qp.value(),
            id,
            operation: operation.name().into(),
            bytes,
            first_psn: first.value(),
            packets,
            buffer: buffer.map(|sge| BufferData { key: sge.key.0, address: sge.address, length: sge.length }),
        },
        Event::PacketSent { qp, packet: sent, work, again } => {
            let work = work.or_else(|| provenance.of_sent(&sent));
            let cause = provenance.cause(qp, &sent, again);
            What::PacketSent { qp: qp.value(), packet: packet(&sent), work, again, cause }
        }
        Event::PacketReceived { qp, packet: received } => {
            let work = provenance.of_received(qp, &received);
            What::PacketReceived { qp: qp.value(), packet: packet(&received), work }
        }
        Event::PacketDropped { qp, packet: dropped, reason } => {
            trigger = Some(reason.to_string());
            let work = dropped.as_ref().and_then(|dropped| provenance.of_received(qp, dropped));
            let packet = dropped.as_ref().map(packet);
            What::PacketDropped { qp: qp.value(), packet, work, reason: slug(&reason).into() }
        }
        Event::DuplicateAnswered { qp, psn, opcode } => {
            let opcode = opcode.to_string().into();
            What::DuplicateAnswered { qp: qp.value(), psn: psn.value(), opcode }
        }
        Event::Refused { qp, psn, refusal } => {
            trigger = Some(refusal.to_string());
            let missing_psn = match refusal {
                Refusal::Gap { missing, .. } => Some(missing.value()),
                _ => None,
            };
            What::RequestRefused {
                qp: qp.value(),
                psn: psn.value(),
                missing_psn,
                reason: slug(&refusal).into(),
            }
        }
        Event::WentBack { qp, to, cause, retries_left } => {
            let cause = slug(&cause).into();
            What::WentBack { qp: qp.value(), to_psn: to.value(), cause, retries_left }
        }
        Event::RnrWaitStarted { qp, psn, until, retries_left } => {
            What::RnrWaitStarted { qp: qp.value(), psn: psn.value(), until: until.nanos(), retries_left }
        }
        Event::AckTimedOut { qp, oldest } => What::AckTimedOut { qp: qp.value(), oldest_psn: oldest.value() },
        Event::CongestionSeen { qp, psn, notified } => {
            What::MarkSeen { qp: qp.value(), psn: psn.value(), notified }
        }
        Event::RateChanged { qp, bits_per_second, target, alpha_millionths, cause } => What::RateChanged {
            qp: qp.value(),
            rate: bits_per_second,
            target,
            alpha: alpha_millionths,
            cause: slug(&cause).into(),
        },
        Event::MemoryWritten { qp, key, address, length, psn } => {
            What::MemoryWritten { qp: qp.value(), key, address, length, psn: psn.value() }
        }
        Event::StateChanged { qp, from, to, reason } => {
            trigger = why(&reason);
            let (from, to) = (from.name().into(), to.name().into());
            What::StateChanged { qp: qp.value(), from, to, reason: slug(&reason).into() }
        }
        Event::Completed { cq, completion, reason } => {
            trigger = why(&reason);
            completed(cq.0, &completion, reason)
        }
        Event::Retired { qp, id } => What::WorkRetired { qp: qp.value(), id },
        Event::Notified { cq } => What::Notified { cq: cq.0 },
        Event::Raised { client, event } => What::AsyncEvent {
            client: client.map(|client| client.0),
            event: event.name().into(),
            number: number(&event),
        },
        Event::ClientFaulted { client, qp, why } => {
            trigger = Some(why.to_string());
            let softhca_queue::Impossible { index, from, to } = why;
            What::ClientFaulted { client: client.0, qp: qp.value(), index, from, to }
        }
        Event::CmSent { id, message, peer, again } => {
            What::CmSent { id: id.map(|id| id.0), message: message.name().into(), peer, again }
        }
        Event::CmReceived { message, peer } => What::CmReceived { message: message.name().into(), peer },
        Event::CmIgnored { id, message, peer, reason } => {
            trigger = Some(reason.to_string());
            let (id, message) = (id.map(|id| id.0), message.name().into());
            What::CmIgnored { id, message, peer, reason: slug(&reason).into() }
        }
        Event::CmStateChanged { id, from, to } => {
            What::CmStateChanged { id: id.0, from: slug(&from).into(), to: slug(&to).into() }
        }
        Event::CmGaveUp { id, failure } => What::CmGaveUp { id: id.0, reason: slug(&failure).into() },
        Event::CmRaised { client, channel, id, kind, status } => What::CmEvent {
            client: client.0,
            channel: channel.0,
            id: id.0,
            event: kind.name().into(),
            status,
        },
    };
    (what, trigger)
}

fn culprit(culprit: &Culprit) -> CulpritData {
    CulpritData {
        source: culprit.source,
        destination: culprit.destination,
        dest_qp: culprit.packet.map(|(qpn, _)| qpn.value()),
        psn: culprit.packet.map(|(_, psn)| psn.value()),
    }
}

/// Where something happened in the fabric, what it is in the log, and why it happened.
pub(super) fn of_fabric(event: &FabricEvent) -> (Node, What, Option<String>) {
    let mut trigger = None;
    let (node, what) = match *event {
        FabricEvent::Marked { switch, cable: CableId(cable), priority, depth, culprit: of } => {
            (Node::Switch(switch), What::EcnMarked { cable, priority, depth, packet: culprit(&of) })
        }
        FabricEvent::Lost { at, cable: CableId(cable), priority, cause, culprit: of } => {
            trigger = Some(cause.to_string());
            let (cause, packet) = (slug(&cause).into(), culprit(&of));
            (at, What::FrameLost { cable, priority, cause, packet })
        }
        FabricEvent::PauseSent { at, cable: CableId(cable), priority, quanta, held } => {
            (at, What::PauseSent { cable, priority, quanta, held })
        }
        FabricEvent::PauseReceived { at, cable: CableId(cable), priority, quanta, until_ns: until } => {
            (at, What::PauseReceived { cable, priority, quanta, until })
        }
        FabricEvent::PauseEnded { at, cable: CableId(cable), priority, how } => {
            (at, What::PauseEnded { cable, priority, how: slug(&how).into() })
        }
        FabricEvent::QueueSampled { switch, cable: CableId(cable), priority, depth } => {
            (Node::Switch(switch), What::QueueSampled { cable, priority, depth })
        }
        FabricEvent::WatchdogFired { at, cable: CableId(cable), priority, lost } => {
            (at, What::WatchdogFired { cable, priority, lost })
        }
        FabricEvent::WatchdogRestored { at, cable: CableId(cable), priority } => {
            (at, What::WatchdogRestored { cable, priority })
        }
    };
    (node, what, trigger)
}

fn change(effect: &Effect) -> Change {
    match *effect {
        Effect::Dropped { copies } => Change::Dropped { copies },
        Effect::Duplicated { copies } => Change::Duplicated { copies },
        Effect::HeldBack { by } => Change::HeldBack { by: by.get() },
        Effect::Delayed { ns } => Change::Delayed { ns },
        Effect::Corrupted { bit, seal } => Change::Corrupted { bit, seal: slug(&seal).into() },
        Effect::MarkedCe => Change::MarkedCe,
        Effect::Rewritten { field, from, to } => Change::Rewritten { field: slug(&field).into(), from, to },
        Effect::LinkCut { cut, until_ns } => Change::LinkCut { cut: slug(&cut).into(), until: until_ns },
    }
}

/// What a fault is in the log, and who did it.
pub(super) fn of_fault(cable: CableId, fault: &Fault, cast: &Cast) -> (What, Option<String>) {
    let sighting = &fault.sighting;
    let (cause, rule) = match fault.cause {
        Cause::Rule(id) => ("rule", Some(id.0)),
        Cause::LinkDown => ("link-down", None),
        Cause::TooBig => ("too-big", None),
    };
    let what = What::Fault {
        cable: cable.0,
        direction: slug(&fault.direction).into(),
        cause: cause.into(),
        rule,
        effect: change(&fault.effect),
        class: slug(&sighting.class).into(),
        opcode: sighting.opcode.map(|opcode| opcode.to_string().into()),
        psn: sighting.psn.map(|psn| psn.value()),
        relative_psn: sighting.relative_psn,
        role: sighting.role.map(|role| role.0),
        transmission: sighting.transmission,
    };
    (what, Some(words::fault(fault, cast)))
}
