//! Maps events and faults to the names of the log. Every variant is here, or it does not compile.

use super::attribution::PacketAttribution;
use super::data::{CompletionQueueData, EffectData, FabricPacketData, PacketData, SgeData};
use super::event::LogEvent;
use crate::NameTable;
use crate::describe::{self, kebab_case};
use softhca_engine::{AsyncEvent, Event, PacketSummary, QpConfiguration, QpType, Reason, RequestError};
use softhca_fabric::{FabricEvent, Fault, FaultCause, FaultEffect, LinkId, Node, PacketId};
use softhca_queue::{Completion, CompletionFlags};
use softhca_wire::{Qpn, Syndrome};

/// A packet as an entry has it.
pub(super) fn packet(packet: &PacketSummary) -> PacketData {
    let rnr_wait = match packet.syndrome {
        Some(Syndrome::RnrNak(timer)) => Some(timer.nanoseconds()),
        _ => None,
    };
    PacketData {
        opcode: packet.opcode.to_string().into(),
        psn: packet.psn.value(),
        dest_qp: packet.dest_qp.value(),
        payload: packet.payload_length,
        syndrome: packet.syndrome.map(|syndrome| match syndrome {
            Syndrome::Ack(_) => "ack".into(),
            Syndrome::RnrNak(_) => "rnr-nak".into(),
            Syndrome::Nak(_) => kebab_case(&syndrome).into(),
        }),
        rnr_wait,
        peer: packet.peer,
    }
}

fn work_completed(cq: u32, completion: &Completion, reason: Reason) -> LogEvent {
    let has = |flag| completion.flags.contains(flag);
    let source = completion.src_qp.value();
    LogEvent::WorkCompleted {
        qp: completion.qpn.value(),
        wr_id: completion.wr_id,
        operation: completion.opcode.name().into(),
        status: completion.status.name().into(),
        bytes: completion.byte_len,
        imm_data: has(CompletionFlags::IMMEDIATE).then_some(completion.imm_data),
        invalidated_rkey: has(CompletionFlags::INVALIDATED).then_some(completion.imm_data),
        src_qp: (source != 0).then_some(source),
        cq,
        reason: kebab_case(&reason).into(),
        vendor_err: completion.vendor_error,
    }
}

fn element_number(event: &AsyncEvent) -> Option<u32> {
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

fn qp_type_name(qp_type_name: QpType) -> &'static str {
    match qp_type_name {
        QpType::Rc => "rc",
        QpType::Uc => "uc",
        QpType::Ud => "ud",
        QpType::XrcInitiator => "xrc-initiator",
        QpType::XrcTarget => "xrc-target",
        QpType::Gsi => "gsi",
    }
}

fn qp_configured(qp: Qpn, profile: &QpConfiguration) -> LogEvent {
    let queue = |queue: Option<(softhca_engine::CqId, u32)>| {
        queue.map(|(cq, slots)| CompletionQueueData { cq: cq.0, cqe: slots })
    };
    let rights: Vec<&str> = profile.access_flags.iter_names().map(|(name, _)| name).collect();
    LogEvent::QpConfigured {
        qp: qp.value(),
        qp_type: qp_type_name(profile.kind).into(),
        recovery: profile.recovery.name().into(),
        peer: profile.peer.map(|(address, _)| address),
        dest_qp: profile.peer.map(|(_, number)| number.value()),
        path_mtu: profile.pmtu.bytes(),
        sq_psn: profile.psns[0].value(),
        rq_psn: profile.psns[1].value(),
        timeout: profile.timeout,
        ack_timeout: profile.ack_timeout.map(|patience| patience.as_nanos() as u64),
        retry_cnt: profile.retry_count,
        rnr_retry: profile.rnr_retry,
        qp_access_flags: rights.join("|"),
        max_rd_atomic: profile.max_rd_atomic[0],
        max_dest_rd_atomic: profile.max_rd_atomic[1],
        max_send_wr: profile.max_wr[0],
        max_recv_wr: profile.max_wr[1],
        send_cq: queue(profile.cqs[0]),
        recv_cq: queue(profile.cqs[1]),
    }
}

/// The sentence of a reason, where there is something to say.
fn error_trigger(reason: &Reason) -> Option<String> {
    (*reason != Reason::None).then(|| reason.to_string())
}

/// What an event is in the log, and why it happened.
pub(super) fn from_event(event: &Event, provenance: &PacketAttribution) -> (LogEvent, Option<String>) {
    let mut trigger = None;
    let what = match *event {
        Event::QpConfigured { qp, configuration: profile } => qp_configured(qp, &profile),
        Event::WqeFetched {
            qp,
            wr_id: id,
            operation,
            bytes,
            first_psn: first,
            packets,
            first_sge: buffer,
        } => LogEvent::WqeFetched {
            qp: qp.value(),
            wr_id: id,
            operation: operation.name().into(),
            bytes,
            first_psn: first.value(),
            packets,
            first_sge: buffer.map(|sge| SgeData {
                lkey: sge.lkey.0,
                address: sge.address,
                length: sge.length,
            }),
        },
        Event::PacketSent { qp, packet: sent, wr_id: work, retransmission: again } => {
            let work = work.or_else(|| provenance.request_of_response(&sent));
            let cause = provenance.cause(qp, &sent, again);
            LogEvent::PacketSent {
                qp: qp.value(),
                packet: packet(&sent),
                wr_id: work,
                retransmission: again,
                cause,
            }
        }
        Event::PacketReceived { qp, packet: received } => {
            let work = provenance.request_of_received(qp, &received);
            LogEvent::PacketReceived { qp: qp.value(), packet: packet(&received), wr_id: work }
        }
        Event::PacketDropped { qp, packet: dropped, reason } => {
            trigger = Some(reason.to_string());
            let work = dropped.as_ref().and_then(|dropped| provenance.request_of_received(qp, dropped));
            let packet = dropped.as_ref().map(packet);
            LogEvent::PacketDropped {
                qp: qp.value(),
                packet,
                wr_id: work,
                reason: kebab_case(&reason).into(),
            }
        }
        Event::DuplicateRequestHandled { qp, psn, opcode } => {
            let opcode = opcode.to_string().into();
            LogEvent::DuplicateRequestHandled { qp: qp.value(), psn: psn.value(), opcode }
        }
        Event::RequestRejected { qp, psn, error: refusal } => {
            trigger = Some(refusal.to_string());
            let missing_psn = match refusal {
                RequestError::PsnOutOfSequence { expected: missing, .. } => Some(missing.value()),
                _ => None,
            };
            LogEvent::RequestRejected {
                qp: qp.value(),
                psn: psn.value(),
                expected_psn: missing_psn,
                reason: kebab_case(&refusal).into(),
            }
        }
        Event::Retransmitted { qp, from_psn: to, cause, retries_left } => {
            let cause = kebab_case(&cause).into();
            LogEvent::Retransmitted { qp: qp.value(), from_psn: to.value(), cause, retries_left }
        }
        Event::RnrWaitStarted { qp, psn, until, retries_left } => {
            LogEvent::RnrWaitStarted { qp: qp.value(), psn: psn.value(), until: until.nanos(), retries_left }
        }
        Event::AckTimedOut { qp, oldest_psn: oldest } => {
            LogEvent::AckTimedOut { qp: qp.value(), oldest_psn: oldest.value() }
        }
        Event::EcnMarkReceived { qp, psn, cnp_queued: notified } => {
            LogEvent::EcnMarkReceived { qp: qp.value(), psn: psn.value(), cnp_queued: notified }
        }
        Event::RateChanged { qp, bits_per_second, target, alpha_millionths, cause } => {
            LogEvent::RateChanged {
                qp: qp.value(),
                rate: bits_per_second,
                target,
                alpha: alpha_millionths,
                cause: kebab_case(&cause).into(),
            }
        }
        Event::MemoryWritten { qp, key, address, length, psn } => {
            LogEvent::MemoryWritten { qp: qp.value(), key, address, length, psn: psn.value() }
        }
        Event::QpStateChanged { qp, from, to, reason } => {
            trigger = error_trigger(&reason);
            let (from, to) = (from.name().into(), to.name().into());
            LogEvent::QpStateChanged { qp: qp.value(), from, to, reason: kebab_case(&reason).into() }
        }
        Event::Completed { cq, completion, reason } => {
            trigger = error_trigger(&reason);
            work_completed(cq.0, &completion, reason)
        }
        Event::UnsignaledCompleted { qp, wr_id: id } => {
            LogEvent::UnsignaledCompleted { qp: qp.value(), wr_id: id }
        }
        Event::CompletionNotified { cq } => LogEvent::CompletionNotified { cq: cq.0 },
        Event::AsyncEventRaised { client, event } => LogEvent::AsyncEventRaised {
            client: client.map(|client| client.0),
            event: event.name().into(),
            element: element_number(&event),
        },
        Event::ClientFaulted { client, qp, why } => {
            trigger = Some(why.to_string());
            let softhca_queue::CorruptRing { index, min: from, max: to } = why;
            LogEvent::ClientFaulted { client: client.0, qp: qp.value(), index, from, to }
        }
        Event::CmSent { id, message, peer, retransmission: again } => LogEvent::CmSent {
            id: id.map(|id| id.0),
            message: message.name().into(),
            peer,
            retransmission: again,
        },
        Event::CmReceived { message, peer } => LogEvent::CmReceived { message: message.name().into(), peer },
        Event::CmDropped { id, message, peer, reason } => {
            trigger = Some(reason.to_string());
            let (id, message) = (id.map(|id| id.0), message.name().into());
            LogEvent::CmDropped { id, message, peer, reason: kebab_case(&reason).into() }
        }
        Event::CmStateChanged { id, from, to } => {
            LogEvent::CmStateChanged { id: id.0, from: kebab_case(&from).into(), to: kebab_case(&to).into() }
        }
        Event::CmFailed { id, failure } => {
            LogEvent::CmFailed { id: id.0, reason: kebab_case(&failure).into() }
        }
        Event::CmEventRaised { client, channel, id, kind, status } => LogEvent::CmEventRaised {
            client: client.0,
            channel: channel.0,
            id: id.0,
            event: kind.name().into(),
            status,
        },
    };
    (what, trigger)
}

fn fabric_packet(fabric_packet: &PacketId) -> FabricPacketData {
    FabricPacketData {
        source: fabric_packet.source,
        destination: fabric_packet.destination,
        dest_qp: fabric_packet.bth.map(|(qpn, _)| qpn.value()),
        psn: fabric_packet.bth.map(|(_, psn)| psn.value()),
    }
}

/// Where something happened in the fabric, what it is in the log, and why it happened.
pub(super) fn from_fabric_event(event: &FabricEvent) -> (Node, LogEvent, Option<String>) {
    let mut trigger = None;
    let (node, what) = match *event {
        FabricEvent::EcnMarked { node, link: LinkId(cable), priority, depth, packet: of } => (
            node,
            LogEvent::EcnMarked { link: cable, priority, queue_depth: depth, packet: fabric_packet(&of) },
        ),
        FabricEvent::FrameDropped { node: at, link: LinkId(cable), priority, reason: cause, packet: of } => {
            trigger = Some(cause.to_string());
            let (cause, packet) = (kebab_case(&cause).into(), fabric_packet(&of));
            (at, LogEvent::FrameDropped { link: cable, priority, cause, packet })
        }
        FabricEvent::PauseSent { node: at, link: LinkId(cable), priority, quanta, ingress_bytes: held } => {
            (at, LogEvent::PauseSent { link: cable, priority, quanta, buffered: held })
        }
        FabricEvent::PauseReceived { node: at, link: LinkId(cable), priority, quanta, until_ns: until } => {
            (at, LogEvent::PauseReceived { link: cable, priority, quanta, until })
        }
        FabricEvent::PauseEnded { node: at, link: LinkId(cable), priority, reason: how } => {
            (at, LogEvent::PauseEnded { link: cable, priority, cause: kebab_case(&how).into() })
        }
        FabricEvent::QueueSampled { node, link: LinkId(cable), priority, depth } => {
            (node, LogEvent::QueueSampled { link: cable, priority, queue_depth: depth })
        }
        FabricEvent::WatchdogFired { node: at, link: LinkId(cable), priority, dropped: lost } => {
            (at, LogEvent::WatchdogFired { link: cable, priority, dropped: lost })
        }
        FabricEvent::WatchdogRestored { node: at, link: LinkId(cable), priority } => {
            (at, LogEvent::WatchdogRestored { link: cable, priority })
        }
    };
    (node, what, trigger)
}

fn effect_data(effect: &FaultEffect) -> EffectData {
    match *effect {
        FaultEffect::Dropped { copies } => EffectData::Dropped { copies },
        FaultEffect::Duplicated { copies } => EffectData::Duplicated { copies },
        FaultEffect::Reordered { by } => EffectData::Reordered { behind: by.get() },
        FaultEffect::Delayed { ns } => EffectData::Delayed { ns },
        FaultEffect::Corrupted { bit, icrc: seal } => {
            EffectData::Corrupted { bit, icrc: kebab_case(&seal).into() }
        }
        FaultEffect::MarkedCe => EffectData::MarkedCe,
        FaultEffect::Rewritten { field, from, to } => {
            EffectData::Rewritten { field: kebab_case(&field).into(), from, to }
        }
        FaultEffect::LinkTakenDown { directions: cut, until_ns } => {
            EffectData::LinkCut { scope: kebab_case(&cut).into(), until: until_ns }
        }
    }
}

/// What a fault is in the log, and who did it.
pub(super) fn from_fault(cable: LinkId, fault: &Fault, cast: &NameTable) -> (LogEvent, Option<String>) {
    let sighting = &fault.packet;
    let (cause, rule) = match fault.cause {
        FaultCause::Rule(id) => ("rule", Some(id.0)),
        FaultCause::LinkDown => ("link-down", None),
        FaultCause::ExceedsMtu => ("too-big", None),
    };
    let what = LogEvent::Fault {
        link: cable.0,
        direction: kebab_case(&fault.direction).into(),
        cause: cause.into(),
        rule,
        effect: effect_data(&fault.effect),
        class: kebab_case(&sighting.class).into(),
        opcode: sighting.opcode.map(|opcode| opcode.to_string().into()),
        psn: sighting.psn.map(|psn| psn.value()),
        relative_psn: sighting.relative_psn,
        flow: sighting.flow_id.map(|role| role.0),
        transmission: sighting.transmission,
    };
    (what, Some(describe::fault(fault, cast)))
}
