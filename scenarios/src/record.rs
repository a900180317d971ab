//! The events of a run that expectations and invariants need.

use crate::plan::{Check, Plan};
use crate::spec::Invariant;
use softhca_engine::{Event, PacketSummary, QpState, Reason, RequestError};
use softhca_fabric::{
    CmMessage, Endpoint, FabricEvent, Fault, FaultCause, FaultEffect, FrameDropReason, LinkId, Node,
    ObservedPacket, PacketClass, PacketType, RuleId, SwitchId,
};
use softhca_types::Completion;
use softhca_types::cm::EventType;
use softhca_wire::{Opcode, Psn, Qpn};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// An event that orders and invariants check.
#[derive(Clone, Debug)]
pub enum RecordedEvent {
    /// A packet as a link sees it, without message and priority.
    Sent { packet: ObservedPacket },
    /// A packet at its receiver.
    Received { packet: ObservedPacket },
    /// A queue pair did not execute a received packet.
    Rejected { psn: Psn },
    /// A work request completed.
    Completed { completion: Completion },
    /// A queue pair changed its state.
    StateChanged { to: QpState },
    /// A device raised an asynchronous event.
    AsyncEvent { name: &'static str },
    /// The connection manager delivered an event.
    CmEvent { id: u32, kind: EventType, status: i32 },
    /// A packet modified memory.
    MemoryWritten { psn: Psn },
    /// A fault changed or dropped a packet.
    Fault { rule: Option<RuleId>, lost: bool, packet: ObservedPacket },
    /// A rule fired on a packet of an external program.
    RuleFired { rule: RuleId },
}

/// An event with its time and place.
#[derive(Clone, Debug)]
pub struct TimelineEntry {
    pub time_ns: u64,
    /// Host; none between switches.
    pub host: Option<usize>,
    /// Queue pair of the plan, if any.
    pub qp: Option<usize>,
    pub event: RecordedEvent,
}

/// A queue pair of the plan in a run.
#[derive(Clone, Copy, Debug)]
struct KnownQueuePair {
    qp: usize,
    first_psn: Psn,
}

/// Counters of a switch, summed over its ports.
#[derive(Clone, Copy, Debug, Default)]
pub struct SwitchTotals {
    /// Frames dropped because a buffer was full.
    pub dropped: u64,
    /// Packets marked with CE.
    pub ecn_marked: u64,
    /// Pause frames sent, excluding those that resume.
    pub pause_frames: u64,
    /// Frames dropped by the PFC watchdog.
    pub watchdog_dropped: u64,
    /// Maximum depth of a queue in bytes.
    pub max_queue_bytes: u64,
}

/// The input of the evaluation.
#[derive(Clone, Debug, Default)]
pub struct RunRecord {
    known: BTreeMap<Endpoint, KnownQueuePair>,
    addresses: Vec<IpAddr>,
    keeps_timeline: bool,
    messages: BTreeMap<(usize, CmMessage), u64>,
    transmissions: BTreeMap<(usize, PacketType, PacketClass, u32), u64>,
    /// Events in order, if an order or invariant needs them.
    pub timeline: Vec<TimelineEntry>,
    /// Failure reasons by queue pair, work request id and whether it was a receive.
    pub reasons: BTreeMap<(usize, u64, bool), String>,
    /// State changes with time, queue pair and reason.
    pub states: Vec<(u64, usize, QpState, String)>,
    /// Asynchronous events with time, host and name.
    pub async_events: Vec<(u64, usize, &'static str)>,
    /// Times of the first and last firing of each rule.
    pub fired_at: BTreeMap<RuleId, (u64, u64)>,
    /// How often each fault of a program fired.
    pub program_hits: BTreeMap<RuleId, u64>,
    /// Number of packets lost without a rule.
    pub uninjected_losses: u64,
    pub switches: BTreeMap<SwitchId, SwitchTotals>,
    /// Pause frames by link and sender, excluding those that resume.
    pub pauses: BTreeMap<(LinkId, Node), u64>,
    /// Times of sent CNPs by queue pair.
    pub cnps: BTreeMap<usize, Vec<u64>>,
}

impl RunRecord {
    pub fn new(plan: &Plan) -> RunRecord {
        let has_order =
            plan.expectations.iter().any(|expectation| matches!(expectation.check, Check::Order(_)));
        let invariants = plan.invariants.iter().any(|invariant| {
            !matches!(
                invariant,
                Invariant::CnpPacing
                    | Invariant::OnlyInjectedLoss
                    | Invariant::CompletionsInOrder
                    | Invariant::OneCompletionPerWorkRequest
            )
        });
        RunRecord { keeps_timeline: has_order || invariants, ..RunRecord::default() }
    }

    /// Adds the address of the next host.
    pub fn add_host(&mut self, address: IpAddr) {
        self.addresses.push(address);
    }

    pub fn add_queue_pair(&mut self, qp: usize, endpoint: Endpoint, first_psn: Psn) {
        self.known.insert(endpoint, KnownQueuePair { qp, first_psn });
    }

    /// The queue pair of the plan with this number on a host.
    pub fn qp_at(&self, host: usize, qpn: Qpn) -> Option<usize> {
        self.find(host, qpn).map(|known| known.qp)
    }

    fn find(&self, host: usize, qpn: Qpn) -> Option<KnownQueuePair> {
        let address = *self.addresses.get(host)?;
        self.known.get(&Endpoint { address, qpn }).copied()
    }

    pub fn on_engine_event(&mut self, time_ns: u64, host: usize, event: &Event) {
        match *event {
            Event::QpStateChanged { qp, to, reason, .. } => {
                if let Some(known) = self.find(host, qp) {
                    self.states.push((time_ns, known.qp, to, reason.to_string()));
                    self.append(time_ns, host, Some(known.qp), RecordedEvent::StateChanged { to });
                }
            }
            Event::Completed { completion, reason, .. } => {
                let Some(known) = self.find(host, completion.qpn) else { return };
                if reason != Reason::None {
                    let key = (known.qp, completion.wr_id, completion.opcode.is_receive());
                    self.reasons.insert(key, reason.to_string());
                }
                self.append(time_ns, host, Some(known.qp), RecordedEvent::Completed { completion });
            }
            Event::FaultInjected { rule, qp, .. } => {
                self.on_program_fault(time_ns, host, self.qp_at(host, qp), RuleId(rule));
            }
            Event::AsyncEventRaised { event, .. } => {
                let name = event.name();
                self.async_events.push((time_ns, host, name));
                self.append(time_ns, host, None, RecordedEvent::AsyncEvent { name });
            }
            Event::CmSent { message, .. } if self.keeps_timeline => {
                let packet = self.observe_cm_message(host, message);
                self.append(time_ns, host, None, RecordedEvent::Sent { packet });
            }
            Event::CmEventRaised { id, event: kind, status, .. } => {
                // Programs with a queue pair receive ESTABLISHED when it is ready.
                let kind = if kind == EventType::ConnectResponse { EventType::Established } else { kind };
                self.append(time_ns, host, None, RecordedEvent::CmEvent { id: id.0, kind, status });
            }
            // Recorded as CM messages.
            Event::PacketSent { qp: Qpn::GSI, .. } => {}
            Event::PacketSent { qp, packet, .. } => {
                if packet.opcode == Opcode::CNP
                    && let Some(known) = self.find(host, qp)
                {
                    self.cnps.entry(known.qp).or_default().push(time_ns);
                }
                if self.keeps_timeline {
                    let at = self.qp_at(host, qp);
                    let packet = self.observe_packet(host, qp, &packet, true);
                    self.append(time_ns, host, at, RecordedEvent::Sent { packet });
                }
            }
            Event::PacketReceived { qp, packet } if self.keeps_timeline => {
                let at = self.qp_at(host, qp);
                let packet = self.observe_packet(host, qp, &packet, false);
                self.append(time_ns, host, at, RecordedEvent::Received { packet });
            }
            Event::PacketDropped { qp, packet: Some(packet), .. } if self.keeps_timeline => {
                let at = self.qp_at(host, qp);
                self.append(time_ns, host, at, RecordedEvent::Rejected { psn: packet.psn });
            }
            Event::RequestRejected { qp, psn, error } if self.keeps_timeline => {
                let at = self.qp_at(host, qp);
                let psn = if let RequestError::PsnOutOfSequence { got, .. } = error { got } else { psn };
                self.append(time_ns, host, at, RecordedEvent::Rejected { psn });
            }
            Event::MemoryWritten { qp, psn, .. } if self.keeps_timeline => {
                let at = self.qp_at(host, qp);
                self.append(time_ns, host, at, RecordedEvent::MemoryWritten { psn });
            }
            _ => {}
        }
    }

    /// Records that a fault of a program fired.
    pub fn on_program_fault(&mut self, time_ns: u64, host: usize, qp: Option<usize>, rule: RuleId) {
        *self.program_hits.entry(rule).or_default() += 1;
        let times = self.fired_at.entry(rule).or_insert((time_ns, time_ns));
        times.1 = time_ns;
        self.append(time_ns, host, qp, RecordedEvent::RuleFired { rule });
    }

    /// Records an event of a switch or a port.
    pub fn on_fabric_event(&mut self, event: &FabricEvent) {
        match *event {
            FabricEvent::EcnMarked { node: Node::Switch(switch), .. } => {
                self.switches.entry(switch).or_default().ecn_marked += 1
            }
            FabricEvent::FrameDropped { node: at, reason: cause, .. } => {
                self.uninjected_losses += 1;
                if let Node::Switch(switch) = at {
                    let totals = self.switches.entry(switch).or_default();
                    match cause {
                        FrameDropReason::Watchdog => totals.watchdog_dropped += 1,
                        FrameDropReason::BufferFull
                        | FrameDropReason::QueueFull
                        | FrameDropReason::HeadroomFull => {
                            totals.dropped += 1;
                        }
                        FrameDropReason::NoRoute
                        | FrameDropReason::HopLimitExceeded
                        | FrameDropReason::MalformedPause => {}
                    }
                }
            }
            FabricEvent::PauseSent { node: at, link, quanta: 1.., .. } => {
                *self.pauses.entry((link, at)).or_default() += 1;
                if let Node::Switch(switch) = at {
                    self.switches.entry(switch).or_default().pause_frames += 1;
                }
            }
            _ => {}
        }
    }

    /// Sets the maximum depth of a queue of a switch.
    pub fn set_max_queue_bytes(&mut self, switch: SwitchId, bytes: u64) {
        self.switches.entry(switch).or_default().max_queue_bytes = bytes;
    }

    /// Records a fault on a link; `host` is the sender, if known.
    pub fn on_packet_fault(&mut self, time_ns: u64, host: Option<usize>, fault: &Fault) {
        let lost = matches!(fault.effect, FaultEffect::Dropped { .. });
        let rule = match fault.cause {
            FaultCause::Rule(id) => {
                let times = self.fired_at.entry(id).or_insert((time_ns, time_ns));
                times.1 = time_ns;
                Some(id)
            }
            _ => None,
        };
        if lost && rule.is_none() {
            self.uninjected_losses += 1;
        }
        let packet = fault.packet;
        let qp = packet.flow_id.map(Plan::qp_of_role);
        self.append(time_ns, host, qp, RecordedEvent::Fault { rule, lost, packet });
    }

    fn append(
        &mut self,
        time_ns: u64,
        host: impl Into<Option<usize>>,
        qp: Option<usize>,
        event: RecordedEvent,
    ) {
        if self.keeps_timeline {
            self.timeline.push(TimelineEntry { time_ns, host: host.into(), qp, event });
        }
    }

    /// A CM message as a link sees it.
    fn observe_cm_message(&mut self, host: usize, message: CmMessage) -> ObservedPacket {
        let count = self.messages.entry((host, message)).or_default();
        *count += 1;
        ObservedPacket { transmission: *count, ..ObservedPacket::new(PacketClass::Cm(message)) }
    }

    /// A packet of a device event as a link sees it.
    fn observe_packet(
        &mut self,
        host: usize,
        qpn: Qpn,
        packet: &PacketSummary,
        is_sent: bool,
    ) -> ObservedPacket {
        let operation = packet.opcode.operation();
        let sense = if operation.is_request() { PacketType::Request } else { PacketType::Response };
        let here = self.find(host, qpn);
        let there = self.known.get(&Endpoint { address: packet.peer, qpn: packet.dest_qp }).copied();
        // The requester sends requests and receives responses.
        let requester = match (sense, is_sent) {
            (PacketType::Request, true) | (PacketType::Response, false) => here,
            (PacketType::Response, true) => there,
            // Any queue pair can send to a group.
            (PacketType::Request, false) if packet.dest_qp == Qpn::MULTICAST => None,
            (PacketType::Request, false) => here.and_then(|here| self.peer_of(here.qp)),
        };
        let class = PacketClass::of_summary(packet.opcode, packet.syndrome);
        let mut observed = ObservedPacket {
            opcode: Some(packet.opcode),
            psn: Some(packet.psn),
            flow_id: requester.map(|known| Plan::role_of(known.qp)),
            packet_type: requester.map(|_| sense),
            relative_psn: requester.map(|known| packet.psn.since(known.first_psn).into()),
            ..ObservedPacket::new(class)
        };
        if class == PacketClass::Cnp {
            observed.relative_psn = None;
        }
        if let Some(requester) = requester.filter(|_| is_sent) {
            let kind = match class {
                PacketClass::Nak(_) | PacketClass::RnrNak => PacketClass::RnrNak,
                PacketClass::Ack => PacketClass::Ack,
                _ => PacketClass::Write,
            };
            let count =
                self.transmissions.entry((requester.qp, sense, kind, packet.psn.value())).or_default();
            *count += 1;
            observed.transmission = *count;
        }
        observed
    }

    fn peer_of(&self, qp: usize) -> Option<KnownQueuePair> {
        // The queue pairs of a pair have consecutive indices, the even one first.
        let peer = qp ^ 1;
        self.known.values().find(|known| known.qp == peer).copied()
    }
}
