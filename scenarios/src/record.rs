//! What happened in a run, as far as expectations and invariants ask for it.

use crate::language::Invariant;
use crate::plan::{Check, Plan};
use softhca_engine::{Event, Packet, Reason, Refusal, State};
use softhca_fabric::{
    CableId, Cause, Class, CmMessage, Effect, Endpoint, FabricEvent, Fault, LossCause, Node, RuleId, Sense,
    Sighting, SwitchId,
};
use softhca_queue::Completion;
use softhca_queue::cm::EventKind;
use softhca_wire::{Opcode, Operation, Psn, Qpn, Syndrome};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Something that an order or an invariant looks at.
#[derive(Clone, Debug)]
pub enum Moment {
    /// A packet left a queue pair.
    Sent {
        /// As a cable would see it, without message and priority.
        sighting: Sighting,
    },
    /// A packet came to a queue pair.
    Received {
        /// As a cable would see it.
        sighting: Sighting,
    },
    /// A packet that came was not acted on.
    Declined {
        /// Its PSN.
        psn: Psn,
    },
    /// A work request ended.
    Completed {
        /// How.
        completion: Completion,
    },
    /// A queue pair changed its state.
    State {
        /// To which.
        to: State,
    },
    /// An event was raised.
    Raised {
        /// Which.
        name: &'static str,
    },
    /// The connection manager told a program something.
    Connection {
        /// The identifier.
        id: u32,
        /// What.
        kind: EventKind,
        /// How.
        status: i32,
    },
    /// Memory was written for this PSN.
    Written {
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
        sighting: Sighting,
    },
    /// A rule did something to a packet of a real program.
    Fired {
        /// The rule.
        rule: RuleId,
    },
}

/// A moment, and where and when it was.
#[derive(Clone, Debug)]
pub struct Told {
    /// When.
    pub time_ns: u64,
    /// On which host; none for what happened between switches.
    pub host: Option<usize>,
    /// On which queue pair, if on one of the plan.
    pub qp: Option<usize>,
    /// What.
    pub moment: Moment,
}

/// A queue pair as it turned out in a run.
#[derive(Clone, Copy, Debug)]
struct Known {
    qp: usize,
    first_psn: Psn,
}

/// What a switch did, over all its ports.
#[derive(Clone, Copy, Debug, Default)]
pub struct SwitchDeeds {
    /// Frames lost for want of room.
    pub dropped: u64,
    /// Packets marked.
    pub marked: u64,
    /// Pause frames sent, without those that end a pause.
    pub paused: u64,
    /// Frames that its watchdog dropped.
    pub watchdog: u64,
    /// The most bytes that ever waited in one queue.
    pub held: u64,
}

/// Everything that is judged at the end.
#[derive(Clone, Debug, Default)]
pub struct Record {
    known: BTreeMap<Endpoint, Known>,
    addresses: Vec<IpAddr>,
    tells: bool,
    messages: BTreeMap<(usize, CmMessage), u64>,
    transmissions: BTreeMap<(usize, Sense, Class, u32), u64>,
    /// What happened, if anybody asks.
    pub story: Vec<Told>,
    /// Why work requests failed, by queue pair, id and whether it was a receive.
    pub reasons: BTreeMap<(usize, u64, bool), String>,
    /// The states that queue pairs got into, with time and reason.
    pub states: Vec<(u64, usize, State, String)>,
    /// Asynchronous events by time, host and name.
    pub raised: Vec<(u64, usize, &'static str)>,
    /// How often each rule fired, first and last time.
    pub fired_at: BTreeMap<RuleId, (u64, u64)>,
    /// Packets that were lost without a rule.
    pub other_losses: u64,
    /// What each switch did.
    pub switches: BTreeMap<SwitchId, SwitchDeeds>,
    /// Pause frames by cable and who sent them, without those that end a pause.
    pub pauses: BTreeMap<(CableId, Node), u64>,
    /// CNPs that left, by queue pair: times.
    pub cnps: BTreeMap<usize, Vec<u64>>,
}

impl Record {
    /// Ready to record a plan.
    pub fn new(plan: &Plan) -> Record {
        let asks = plan.expectations.iter().any(|expectation| matches!(expectation.check, Check::Order(_)));
        let invariants = plan.invariants.iter().any(|invariant| {
            !matches!(
                invariant,
                Invariant::CnpPacing
                    | Invariant::NoOtherLoss
                    | Invariant::CompletionsInOrder
                    | Invariant::OneCompletionEach
            )
        });
        Record { tells: asks || invariants, ..Record::default() }
    }

    /// Says which address a host of the plan got.
    pub fn know_host(&mut self, address: IpAddr) {
        self.addresses.push(address);
    }

    /// Says which number a queue pair of the plan got.
    pub fn know(&mut self, qp: usize, endpoint: Endpoint, first_psn: Psn) {
        self.known.insert(endpoint, Known { qp, first_psn });
    }

    fn find(&self, host: usize, qpn: Qpn) -> Option<Known> {
        let address = *self.addresses.get(host)?;
        self.known.get(&Endpoint { address, qpn }).copied()
    }

    /// A card told an event.
    pub fn card(&mut self, time_ns: u64, host: usize, event: &Event) {
        match *event {
            Event::StateChanged { qp, to, reason, .. } => {
                if let Some(known) = self.find(host, qp) {
                    self.states.push((time_ns, known.qp, to, reason.to_string()));
                    self.tell(time_ns, host, Some(known.qp), Moment::State { to });
                }
            }
            Event::Completed { completion, reason, .. } => {
                let Some(known) = self.find(host, completion.queue_pair) else { return };
                if reason != Reason::None {
                    let key = (known.qp, completion.id, completion.operation.is_receive());
                    self.reasons.insert(key, reason.to_string());
                }
                self.tell(time_ns, host, Some(known.qp), Moment::Completed { completion });
            }
            Event::Raised { event, .. } => {
                let name = event.name();
                self.raised.push((time_ns, host, name));
                self.tell(time_ns, host, None, Moment::Raised { name });
            }
            Event::CmSent { message, .. } if self.tells => {
                let known = CmMessage::ALL.into_iter().find(|known| known.name() == message.name());
                if let Some(sighting) = known.map(|message| self.message(host, message)) {
                    self.tell(time_ns, host, None, Moment::Sent { sighting });
                }
            }
            Event::CmRaised { id, kind, status, .. } => {
                // Who has a queue pair for the connection hears of a REP when that is ready.
                let kind = if kind == EventKind::ConnectResponse { EventKind::Established } else { kind };
                self.tell(time_ns, host, None, Moment::Connection { id: id.0, kind, status });
            }
            // Told as messages of the connection manager.
            Event::PacketSent { qp: Qpn::GSI, .. } => {}
            Event::PacketSent { qp, packet, .. } => {
                if packet.opcode == Opcode::CNP
                    && let Some(known) = self.find(host, qp)
                {
                    self.cnps.entry(known.qp).or_default().push(time_ns);
                }
                if self.tells {
                    let at = self.find(host, qp).map(|known| known.qp);
                    let sighting = self.sighting(host, qp, &packet, true);
                    self.tell(time_ns, host, at, Moment::Sent { sighting });
                }
            }
            Event::PacketReceived { qp, packet } if self.tells => {
                let at = self.find(host, qp).map(|known| known.qp);
                let sighting = self.sighting(host, qp, &packet, false);
                self.tell(time_ns, host, at, Moment::Received { sighting });
            }
            Event::PacketDropped { qp, packet: Some(packet), .. } if self.tells => {
                let at = self.find(host, qp).map(|known| known.qp);
                self.tell(time_ns, host, at, Moment::Declined { psn: packet.psn });
            }
            Event::Refused { qp, psn, refusal } if self.tells => {
                let at = self.find(host, qp).map(|known| known.qp);
                let psn = if let Refusal::Gap { got, .. } = refusal { got } else { psn };
                self.tell(time_ns, host, at, Moment::Declined { psn });
            }
            Event::MemoryWritten { qp, psn, .. } if self.tells => {
                let at = self.find(host, qp).map(|known| known.qp);
                self.tell(time_ns, host, at, Moment::Written { psn });
            }
            _ => {}
        }
    }

    /// A switch, or the port of a host, told an event.
    pub fn fabric(&mut self, event: &FabricEvent) {
        match *event {
            FabricEvent::Marked { switch, .. } => self.switches.entry(switch).or_default().marked += 1,
            FabricEvent::Lost { at, cause, .. } => {
                self.other_losses += 1;
                if let Node::Switch(switch) = at {
                    let deeds = self.switches.entry(switch).or_default();
                    match cause {
                        LossCause::Watchdog => deeds.watchdog += 1,
                        LossCause::BufferFull | LossCause::QueueFull | LossCause::HeadroomFull => {
                            deeds.dropped += 1;
                        }
                        LossCause::NoRoute | LossCause::HopLimit | LossCause::Unreadable => {}
                    }
                }
            }
            FabricEvent::PauseSent { at, cable, quanta: 1.., .. } => {
                *self.pauses.entry((cable, at)).or_default() += 1;
                if let Node::Switch(switch) = at {
                    self.switches.entry(switch).or_default().paused += 1;
                }
            }
            _ => {}
        }
    }

    /// The most bytes that ever waited in one queue of a switch.
    pub fn hold(&mut self, switch: SwitchId, bytes: u64) {
        self.switches.entry(switch).or_default().held = bytes;
    }

    /// Something happened to a packet on a cable; `host` is its sender where that is known.
    pub fn fault(&mut self, time_ns: u64, host: Option<usize>, fault: &Fault) {
        let lost = matches!(fault.effect, Effect::Dropped { .. });
        let rule = match fault.cause {
            Cause::Rule(id) => {
                let times = self.fired_at.entry(id).or_insert((time_ns, time_ns));
                times.1 = time_ns;
                Some(id)
            }
            _ => None,
        };
        if lost && rule.is_none() {
            self.other_losses += 1;
        }
        let sighting = fault.sighting;
        let qp = sighting.role.map(Plan::of_role);
        self.tell(time_ns, host, qp, Moment::Fault { rule, lost, sighting });
    }

    fn tell(&mut self, time_ns: u64, host: impl Into<Option<usize>>, qp: Option<usize>, moment: Moment) {
        if self.tells {
            self.story.push(Told { time_ns, host: host.into(), qp, moment });
        }
    }

    /// What a cable would say of a message of the connection manager.
    fn message(&mut self, host: usize, message: CmMessage) -> Sighting {
        let count = self.messages.entry((host, message)).or_default();
        *count += 1;
        Sighting {
            class: Class::Cm(message),
            opcode: None,
            psn: None,
            role: None,
            sense: None,
            relative_psn: None,
            transmission: *count,
            message: None,
            packet: None,
            priority: 0,
        }
    }

    /// What a cable would say of a packet that a card tells of.
    fn sighting(&mut self, host: usize, qpn: Qpn, packet: &Packet, is_sent: bool) -> Sighting {
        let operation = packet.opcode.operation();
        let sense = if operation.is_request() { Sense::Request } else { Sense::Response };
        let here = self.find(host, qpn);
        let there = self.known.get(&Endpoint { address: packet.peer, qpn: packet.destination }).copied();
        // The requester is who asks: the sender of a request, the receiver of an answer.
        let requester = match (sense, is_sent) {
            (Sense::Request, true) | (Sense::Response, false) => here,
            (Sense::Response, true) => there,
            // Anybody may send to a group.
            (Sense::Request, false) if packet.destination == Qpn::MULTICAST => None,
            (Sense::Request, false) => here.and_then(|here| self.peer_of(here.qp)),
        };
        let class = class_of(packet);
        let mut sighting = Sighting {
            class,
            opcode: Some(packet.opcode),
            psn: Some(packet.psn),
            role: requester.map(|known| Plan::role(known.qp)),
            sense: requester.map(|_| sense),
            relative_psn: requester.map(|known| relative(packet.psn, known.first_psn)),
            transmission: 0,
            message: None,
            packet: None,
            priority: 0,
        };
        if class == Class::CongestionNotification {
            sighting.relative_psn = None;
        }
        if let Some(requester) = requester.filter(|_| is_sent) {
            let kind = match class {
                Class::Nak(_) | Class::ReceiverNotReady => Class::ReceiverNotReady,
                Class::Ack => Class::Ack,
                _ => Class::Write,
            };
            let count =
                self.transmissions.entry((requester.qp, sense, kind, packet.psn.value())).or_default();
            *count += 1;
            sighting.transmission = *count;
        }
        sighting
    }

    fn peer_of(&self, qp: usize) -> Option<Known> {
        // The two of a pair have numbers next to each other, the even one first.
        let peer = qp ^ 1;
        self.known.values().find(|known| known.qp == peer).copied()
    }
}

fn relative(psn: Psn, first: Psn) -> i64 {
    psn.since(first).into()
}

fn class_of(packet: &Packet) -> Class {
    match (packet.opcode.operation(), packet.syndrome) {
        (Operation::Acknowledge, Some(Syndrome::RnrNak(_))) => Class::ReceiverNotReady,
        (Operation::Acknowledge, Some(Syndrome::Nak(code))) => Class::Nak(code),
        (Operation::Acknowledge, _) => Class::Ack,
        (Operation::Send, _) if packet.opcode.service() == softhca_wire::Service::Ud => Class::Datagram,
        (Operation::Send, _) => Class::Send,
        (Operation::Write, _) => Class::Write,
        (Operation::ReadRequest, _) => Class::ReadRequest,
        (Operation::ReadResponse, _) => Class::ReadResponse,
        (Operation::AtomicAcknowledge, _) => Class::AtomicResponse,
        (Operation::CongestionNotification, _) => Class::CongestionNotification,
        (Operation::Flush, _) => Class::Flush,
        (Operation::CompareSwap | Operation::FetchAdd | Operation::AtomicWrite, _) => Class::Atomic,
    }
}
