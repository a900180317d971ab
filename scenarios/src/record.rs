//! What happened in a run, as far as expectations and invariants ask for it.

use crate::plan::{Check, Plan};
use crate::spec::Invariant;
use softhca_engine::{Event, PacketSummary, QpState, Reason, RequestError};
use softhca_fabric::{
    CmMessage, Endpoint, FabricEvent, Fault, FaultCause, FaultEffect, FrameDropReason, LinkId, Node,
    ObservedPacket, PacketClass, PacketType, RuleId, SwitchId,
};
use softhca_queue::Completion;
use softhca_queue::cm::EventType;
use softhca_wire::{Opcode, Operation, Psn, Qpn, Syndrome};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Something that an order or an invariant looks at.
#[derive(Clone, Debug)]
pub enum RecordedEvent {
    /// A packet left a queue pair.
    Sent {
        /// As a cable would see it, without message and priority.
        sighting: ObservedPacket,
    },
    /// A packet came to a queue pair.
    Received {
        /// As a cable would see it.
        sighting: ObservedPacket,
    },
    /// A packet that came was not acted on.
    Rejected {
        /// Its PSN.
        psn: Psn,
    },
    /// A work request ended.
    Completed {
        /// How.
        completion: Completion,
    },
    /// A queue pair changed its state.
    StateChanged {
        /// To which.
        to: QpState,
    },
    /// An event was raised.
    AsyncEvent {
        /// Which.
        name: &'static str,
    },
    /// The connection manager told a program something.
    CmEvent {
        /// The identifier.
        id: u32,
        /// What.
        kind: EventType,
        /// How.
        status: i32,
    },
    /// Memory was written for this PSN.
    MemoryWritten {
        /// The PSN.
        psn: Psn,
    },
    /// A rule, or something else, did something to a packet.
    Fault {
        /// The rule, if it was one.
        rule: Option<RuleId>,
        /// The packet was lost.
        lost: bool,
        /// The packet.
        sighting: ObservedPacket,
    },
    /// A rule did something to a packet of a real program.
    RuleFired {
        /// The rule.
        rule: RuleId,
    },
}

/// A moment, and where and when it was.
#[derive(Clone, Debug)]
pub struct TimelineEntry {
    /// When.
    pub time_ns: u64,
    /// On which host; none for what happened between switches.
    pub host: Option<usize>,
    /// On which queue pair, if on one of the plan.
    pub qp: Option<usize>,
    /// What.
    pub event: RecordedEvent,
}

/// A queue pair as it turned out in a run.
#[derive(Clone, Copy, Debug)]
struct KnownQueuePair {
    qp: usize,
    first_psn: Psn,
}

/// What a switch did, over all its ports.
#[derive(Clone, Copy, Debug, Default)]
pub struct SwitchTotals {
    /// Frames lost for want of room.
    pub dropped: u64,
    /// Packets marked.
    pub ecn_marked: u64,
    /// Pause frames sent, without those that end a pause.
    pub pause_frames: u64,
    /// Frames that its watchdog dropped.
    pub watchdog_dropped: u64,
    /// The most bytes that ever waited in one queue.
    pub max_queue_bytes: u64,
}

/// Everything that is judged at the end.
#[derive(Clone, Debug, Default)]
pub struct RunRecord {
    known: BTreeMap<Endpoint, KnownQueuePair>,
    addresses: Vec<IpAddr>,
    keeps_timeline: bool,
    messages: BTreeMap<(usize, CmMessage), u64>,
    transmissions: BTreeMap<(usize, PacketType, PacketClass, u32), u64>,
    /// What happened, if anybody asks.
    pub timeline: Vec<TimelineEntry>,
    /// Why work requests failed, by queue pair, id and whether it was a receive.
    pub reasons: BTreeMap<(usize, u64, bool), String>,
    /// The states that queue pairs got into, with time and reason.
    pub states: Vec<(u64, usize, QpState, String)>,
    /// Asynchronous events by time, host and name.
    pub async_events: Vec<(u64, usize, &'static str)>,
    /// How often each rule fired, first and last time.
    pub fired_at: BTreeMap<RuleId, (u64, u64)>,
    /// Packets that were lost without a rule.
    pub uninjected_losses: u64,
    /// What each switch did.
    pub switches: BTreeMap<SwitchId, SwitchTotals>,
    /// Pause frames by cable and who sent them, without those that end a pause.
    pub pauses: BTreeMap<(LinkId, Node), u64>,
    /// CNPs that left, by queue pair: times.
    pub cnps: BTreeMap<usize, Vec<u64>>,
}

impl RunRecord {
    /// Ready to record a plan.
    pub fn new(plan: &Plan) -> RunRecord {
        let asks = plan.expectations.iter().any(|expectation| matches!(expectation.check, Check::Order(_)));
        let invariants = plan.invariants.iter().any(|invariant| {
            !matches!(
                invariant,
                Invariant::CnpPacing
                    | Invariant::OnlyInjectedLoss
                    | Invariant::CompletionsInOrder
                    | Invariant::OneCompletionPerWorkRequest
            )
        });
        RunRecord { keeps_timeline: asks || invariants, ..RunRecord::default() }
    }

    /// Says which address a host of the plan got.
    pub fn add_host(&mut self, address: IpAddr) {
        self.addresses.push(address);
    }

    /// Says which number a queue pair of the plan got.
    pub fn add_queue_pair(&mut self, qp: usize, endpoint: Endpoint, first_psn: Psn) {
        self.known.insert(endpoint, KnownQueuePair { qp, first_psn });
    }

    fn find(&self, host: usize, qpn: Qpn) -> Option<KnownQueuePair> {
        let address = *self.addresses.get(host)?;
        self.known.get(&Endpoint { address, qpn }).copied()
    }

    /// A card told an event.
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
            Event::AsyncEventRaised { event, .. } => {
                let name = event.name();
                self.async_events.push((time_ns, host, name));
                self.append(time_ns, host, None, RecordedEvent::AsyncEvent { name });
            }
            Event::CmSent { message, .. } if self.keeps_timeline => {
                let known = CmMessage::ALL.into_iter().find(|known| known.name() == message.name());
                if let Some(sighting) = known.map(|message| self.cm_sighting(host, message)) {
                    self.append(time_ns, host, None, RecordedEvent::Sent { sighting });
                }
            }
            Event::CmEventRaised { id, kind, status, .. } => {
                // Who has a queue pair for the connection hears of a REP when that is ready.
                let kind = if kind == EventType::ConnectResponse { EventType::Established } else { kind };
                self.append(time_ns, host, None, RecordedEvent::CmEvent { id: id.0, kind, status });
            }
            // Told as messages of the connection manager.
            Event::PacketSent { qp: Qpn::GSI, .. } => {}
            Event::PacketSent { qp, packet, .. } => {
                if packet.opcode == Opcode::CNP
                    && let Some(known) = self.find(host, qp)
                {
                    self.cnps.entry(known.qp).or_default().push(time_ns);
                }
                if self.keeps_timeline {
                    let at = self.find(host, qp).map(|known| known.qp);
                    let sighting = self.packet_sighting(host, qp, &packet, true);
                    self.append(time_ns, host, at, RecordedEvent::Sent { sighting });
                }
            }
            Event::PacketReceived { qp, packet } if self.keeps_timeline => {
                let at = self.find(host, qp).map(|known| known.qp);
                let sighting = self.packet_sighting(host, qp, &packet, false);
                self.append(time_ns, host, at, RecordedEvent::Received { sighting });
            }
            Event::PacketDropped { qp, packet: Some(packet), .. } if self.keeps_timeline => {
                let at = self.find(host, qp).map(|known| known.qp);
                self.append(time_ns, host, at, RecordedEvent::Rejected { psn: packet.psn });
            }
            Event::RequestRejected { qp, psn, error: refusal } if self.keeps_timeline => {
                let at = self.find(host, qp).map(|known| known.qp);
                let psn = if let RequestError::PsnOutOfSequence { got, .. } = refusal { got } else { psn };
                self.append(time_ns, host, at, RecordedEvent::Rejected { psn });
            }
            Event::MemoryWritten { qp, psn, .. } if self.keeps_timeline => {
                let at = self.find(host, qp).map(|known| known.qp);
                self.append(time_ns, host, at, RecordedEvent::MemoryWritten { psn });
            }
            _ => {}
        }
    }

    /// A switch, or the port of a host, told an event.
    pub fn on_fabric_event(&mut self, event: &FabricEvent) {
        match *event {
            FabricEvent::EcnMarked { node: Node::Switch(switch), .. } => {
                self.switches.entry(switch).or_default().ecn_marked += 1
            }
            FabricEvent::FrameDropped { node: at, reason: cause, .. } => {
                self.uninjected_losses += 1;
                if let Node::Switch(switch) = at {
                    let deeds = self.switches.entry(switch).or_default();
                    match cause {
                        FrameDropReason::Watchdog => deeds.watchdog_dropped += 1,
                        FrameDropReason::BufferFull
                        | FrameDropReason::QueueFull
                        | FrameDropReason::HeadroomFull => {
                            deeds.dropped += 1;
                        }
                        FrameDropReason::NoRoute
                        | FrameDropReason::HopLimitExceeded
                        | FrameDropReason::MalformedPause => {}
                    }
                }
            }
            FabricEvent::PauseSent { node: at, link: cable, quanta: 1.., .. } => {
                *self.pauses.entry((cable, at)).or_default() += 1;
                if let Node::Switch(switch) = at {
                    self.switches.entry(switch).or_default().pause_frames += 1;
                }
            }
            _ => {}
        }
    }

    /// The most bytes that ever waited in one queue of a switch.
    pub fn set_max_queue_bytes(&mut self, switch: SwitchId, bytes: u64) {
        self.switches.entry(switch).or_default().max_queue_bytes = bytes;
    }

    /// Something happened to a packet on a cable; `host` is its sender where that is known.
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
        let sighting = fault.packet;
        let qp = sighting.flow_id.map(Plan::qp_of_role);
        self.append(time_ns, host, qp, RecordedEvent::Fault { rule, lost, sighting });
    }

    fn append(
        &mut self,
        time_ns: u64,
        host: impl Into<Option<usize>>,
        qp: Option<usize>,
        moment: RecordedEvent,
    ) {
        if self.keeps_timeline {
            self.timeline.push(TimelineEntry { time_ns, host: host.into(), qp, event: moment });
        }
    }

    /// What a cable would say of a message of the connection manager.
    fn cm_sighting(&mut self, host: usize, message: CmMessage) -> ObservedPacket {
        let count = self.messages.entry((host, message)).or_default();
        *count += 1;
        ObservedPacket {
            class: PacketClass::Cm(message),
            opcode: None,
            psn: None,
            flow_id: None,
            packet_type: None,
            relative_psn: None,
            transmission: *count,
            message_index: None,
            packet_index: None,
            priority: 0,
        }
    }

    /// What a cable would say of a packet that a card tells of.
    fn packet_sighting(
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
        // The requester is who asks: the sender of a request, the receiver of an answer.
        let requester = match (sense, is_sent) {
            (PacketType::Request, true) | (PacketType::Response, false) => here,
            (PacketType::Response, true) => there,
            // Anybody may send to a group.
            (PacketType::Request, false) if packet.dest_qp == Qpn::MULTICAST => None,
            (PacketType::Request, false) => here.and_then(|here| self.peer_of(here.qp)),
        };
        let class = class_of(packet);
        let mut sighting = ObservedPacket {
            class,
            opcode: Some(packet.opcode),
            psn: Some(packet.psn),
            flow_id: requester.map(|known| Plan::role_of(known.qp)),
            packet_type: requester.map(|_| sense),
            relative_psn: requester.map(|known| relative_psn(packet.psn, known.first_psn)),
            transmission: 0,
            message_index: None,
            packet_index: None,
            priority: 0,
        };
        if class == PacketClass::Cnp {
            sighting.relative_psn = None;
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
            sighting.transmission = *count;
        }
        sighting
    }

    fn peer_of(&self, qp: usize) -> Option<KnownQueuePair> {
        // The two of a pair have numbers next to each other, the even one first.
        let peer = qp ^ 1;
        self.known.values().find(|known| known.qp == peer).copied()
    }
}

fn relative_psn(psn: Psn, first: Psn) -> i64 {
    psn.since(first).into()
}

fn class_of(packet: &PacketSummary) -> PacketClass {
    match (packet.opcode.operation(), packet.syndrome) {
        (Operation::Acknowledge, Some(Syndrome::RnrNak(_))) => PacketClass::RnrNak,
        (Operation::Acknowledge, Some(Syndrome::Nak(code))) => PacketClass::Nak(code),
        (Operation::Acknowledge, _) => PacketClass::Ack,
        (Operation::Send, _) if packet.opcode.service() == softhca_wire::Service::Ud => PacketClass::Datagram,
        (Operation::Send, _) => PacketClass::Send,
        (Operation::Write, _) => PacketClass::Write,
        (Operation::ReadRequest, _) => PacketClass::ReadRequest,
        (Operation::ReadResponse, _) => PacketClass::ReadResponse,
        (Operation::AtomicAcknowledge, _) => PacketClass::AtomicResponse,
        (Operation::Cnp, _) => PacketClass::Cnp,
        (Operation::Flush, _) => PacketClass::Flush,
        (Operation::CompareSwap | Operation::FetchAdd | Operation::AtomicWrite, _) => PacketClass::Atomic,
    }
}
