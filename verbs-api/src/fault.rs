//! Fault rules: which packets they select, how often they fire, and what they do.
//!
//! A rule reads from left to right: the packets, the repetition, the action.
//!
//! ```
//! use softhca::fault;
//! use std::time::Duration;
//!
//! let second_ack_is_lost = fault::acks().nth(2).drop();
//! let packet_is_late = fault::data().psn(7).nth(1).delay(Duration::from_micros(50));
//! let one_percent_is_lost = fault::packets().with_probability(0.01).drop();
//! let cable_is_pulled = fault::data().message(3).nth(1).cut(Duration::from_millis(10));
//! ```
//!
//! [`World::fault`](crate::sim::World::fault) puts a rule on the link between two hosts, and
//! [`Device::add_rule`](crate::Device::add_rule) on the link that leaves a device.

pub use softhca_fabric::{
    Action, BitPosition, Choice, CmMessage, DownDirections, Endpoint as FlowEndpoint, Fault, FieldValue,
    Flow, FlowId, GilbertElliott, HeaderField, IcrcPolicy, InclusiveRange, PacketClass, PacketClasses,
    PacketType, Pattern, Repeat, Rule, RuleCounters, RuleId, Scope, Selector, Stage,
};

pub use softhca_types::{
    CallSite, FaultPoint, FaultTrigger, InjectedEvent, MAX_CALL_SITES, ProgramAction, ProgramFault,
    ProgramFaults,
};
pub use softhca_wire::Opcode;

use crate::{CompletionStatus, Errno, Verb};
use softhca_fabric::PER_BILLION;
use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

/// The environment variable with the faults of a process, which `softhca exec` and `softhca sweep` set.
#[cfg(feature = "sockets")]
pub const FAULTS_VARIABLE: &str = "SOFTHCA_FAULTS";

/// Identifies this process in the rules of a device.
pub(crate) fn process_id() -> u32 {
    if cfg!(feature = "sockets") { std::process::id() } else { 0 }
}

/// The faults that `softhca exec` or `softhca sweep` gave this process, without those of other processes.
pub(crate) fn environment_faults() -> Option<ProgramFaults> {
    #[cfg(all(feature = "sockets", target_os = "linux"))]
    {
        let text = std::env::var(FAULTS_VARIABLE).ok()?;
        let Some(mut faults) = softhca_control::faults_from_text(&text) else {
            let name = FAULTS_VARIABLE;
            eprintln!(
                "softhca: {name} is not of this version: no faults are injected; unset it or run the same version"
            );
            return None;
        };
        faults.process = process_id();
        let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
        faults.retain_process(name.trim_end());
        Some(faults)
    }
    #[cfg(not(all(feature = "sockets", target_os = "linux")))]
    None
}

/// Finds the place in the program where this thread called the verb that it executes.
#[cfg(feature = "sockets")]
static CALL_SITE_SOURCE: std::sync::OnceLock<fn() -> Option<CallSite>> = std::sync::OnceLock::new();

/// Sets how the call sites of this process are found. It has no effect unless a sweep records the calls of the process.
#[cfg(feature = "sockets")]
pub fn set_call_site_source(source: fn() -> Option<CallSite>) {
    if environment_faults().is_some_and(|faults| faults.record) {
        let _ = CALL_SITE_SOURCE.set(source);
    }
}

/// The call site of the verb that this thread executes, while calls are recorded.
pub(crate) fn call_site() -> Option<CallSite> {
    #[cfg(feature = "sockets")]
    return CALL_SITE_SOURCE.get().and_then(|source| source());
    #[cfg(not(feature = "sockets"))]
    None
}

/// Calls or completions of a program, and how often a fault acts on them. An action makes a [`ProgramFault`] of it.
#[derive(Clone, Debug)]
#[must_use = "an action makes a fault of it"]
pub struct Calls {
    fault: ProgramFault,
}

/// The calls of a verb, for [`World::inject`](crate::sim::World::inject) and [`Device::inject`](crate::Device::inject).
///
/// ```
/// use softhca::{Errno, Verb, fault};
///
/// let third_registration_fails = fault::calls(Verb::RegMr).nth(3).fail(Errno::ENOMEM);
/// ```
pub fn calls(verb: Verb) -> Calls {
    Calls::at(FaultPoint::Call(verb))
}

/// The completions of the program.
///
/// ```
/// use softhca::{CompletionStatus, fault};
///
/// let second_completion_fails = fault::completions().nth(2).set_status(CompletionStatus::RetryExceededError);
/// ```
pub fn completions() -> Calls {
    Calls::at(FaultPoint::Completion)
}

impl Calls {
    fn at(point: FaultPoint) -> Calls {
        let (object, repeat) = (None, Repeat::default());
        let action = ProgramAction::Fail(Errno::EINVAL);
        let (process, after, until) = (None, None, None);
        Calls { fault: ProgramFault { id: 0, process, point, object, repeat, after, until, action } }
    }

    /// Only those on this object: the n-th queue pair, completion queue or region that the program created, from 1. For
    /// completions, those of the n-th queue pair.
    pub fn object(mut self, ordinal: u32) -> Calls {
        self.fault.object = Some(ordinal);
        self
    }

    /// Only after this trigger: a time or another call.
    pub fn after(mut self, trigger: FaultTrigger) -> Calls {
        self.fault.after = Some(trigger);
        self
    }

    /// Only until this trigger: a time or another call.
    pub fn until(mut self, trigger: FaultTrigger) -> Calls {
        self.fault.until = Some(trigger);
        self
    }

    /// With any action; the other methods are short for the usual ones.
    pub fn act(self, action: ProgramAction) -> ProgramFault {
        ProgramFault { action, ..self.fault }
    }

    /// The call fails with this errno and has no other effect. In Rust the error is
    /// [`VerbsError::Injected`](crate::VerbsError::Injected).
    pub fn fail(self, errno: Errno) -> ProgramFault {
        self.act(ProgramAction::Fail(errno))
    }

    /// The completion has this status. With a failure, its queue pair enters ERR.
    pub fn set_status(self, status: CompletionStatus) -> ProgramFault {
        self.act(ProgramAction::SetStatus(status, None))
    }

    /// Delays the completion and all later ones of its completion queue.
    pub fn hold(self, time: Duration) -> ProgramFault {
        self.act(ProgramAction::Hold(time.as_nanos() as u64))
    }

    /// The completion comes without a notification: a program that waits for one sleeps on.
    pub fn drop_notification(self) -> ProgramFault {
        self.act(ProgramAction::DropNotification)
    }

    /// The device raises an asynchronous event, with its consequences.
    pub fn raise(self, event: InjectedEvent) -> ProgramFault {
        self.act(ProgramAction::Raise(event))
    }
}

/// How often a fault acts on what it selects: the same for calls and packets.
macro_rules! repetition {
    ($type:ident, $noun:literal, $($repeat:ident).+) => {
        impl $type {
            /// Only the n-th of them: 1 is the first.
            ///
            /// # Panics
            /// If `number` is zero.
            pub fn nth(mut self, number: u64) -> $type {
                self.$($repeat).+.skip =
                    number.checked_sub(1).expect(concat!("the first ", $noun, " is number 1"));
                self.times(1)
            }

            /// At most this many times.
            pub fn times(mut self, times: u64) -> $type {
                self.$($repeat).+.times = Some(times);
                self
            }

            /// Every n-th of them.
            ///
            /// # Panics
            /// If `number` is zero.
            pub fn every(mut self, number: u64) -> $type {
                let number = NonZeroU64::new(number).expect(concat!("every n-th ", $noun, ", from 1"));
                self.$($repeat).+.choice = Choice::Every(number);
                self
            }

            /// Each of them with this probability, which the seed decides.
            ///
            /// # Panics
            /// If it is not between 0 and 1.
            pub fn with_probability(mut self, probability: f64) -> $type {
                self.$($repeat).+.choice = probability_choice(probability);
                self
            }
        }
    };
}

repetition!(Calls, "call", fault.repeat);
repetition!(Packets, "packet", repeat);

fn probability_choice(probability: f64) -> Choice {
    assert!((0.0..=1.0).contains(&probability), "{probability} is not a probability between 0 and 1");
    Choice::Probability { per_billion: (probability * f64::from(PER_BILLION)) as u32 }
}

/// Packets, and how often a rule acts on them. An action makes a [`Rule`] of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "an action makes a rule of it"]
pub struct Packets {
    selector: Selector,
    repeat: Repeat,
}

/// Every packet.
pub fn packets() -> Packets {
    Packets::default()
}

/// The requests of messages: no responses to READs and atomics, no ACKs and no NAKs.
pub fn data() -> Packets {
    Packets::in_classes(PacketClasses::Data)
}

/// The responses to READs, with the data.
///
/// ```
/// use softhca::fault;
///
/// let third_response_is_lost = fault::read_responses().nth(3).drop();
/// ```
pub fn read_responses() -> Packets {
    Packets::in_classes(PacketClasses::Only(PacketClass::ReadResponse))
}

/// ACKs without NAKs.
pub fn acks() -> Packets {
    Packets::in_classes(PacketClasses::Only(PacketClass::Ack))
}

/// The RNR NAKs of a responder without a posted receive.
pub fn rnr_naks() -> Packets {
    Packets::in_classes(PacketClasses::Only(PacketClass::RnrNak))
}

/// Messages of connection management.
pub fn cm(message: CmMessage) -> Packets {
    Packets::in_classes(PacketClasses::Only(PacketClass::Cm(message)))
}

/// The packets that a selector matches.
pub fn select(selector: Selector) -> Packets {
    Packets { selector, repeat: Repeat::default() }
}

impl Packets {
    fn in_classes(classes: PacketClasses) -> Packets {
        select(Selector { classes: Some(classes), ..Selector::default() })
    }

    /// Only packets with this opcode; several calls select several opcodes.
    ///
    /// # Panics
    /// If none of the selected packets can have the opcode: the rule could never fire.
    pub fn opcode(mut self, opcode: Opcode) -> Packets {
        if let Some(classes) = self.selector.classes {
            assert!(
                classes.may_contain(opcode),
                "this rule can never fire: no packet of class {classes:?} is {opcode}"
            );
        }
        self.selector.opcodes.push(opcode);
        self
    }

    /// Only packets with this PSN, relative to the first PSN of their queue pair.
    pub fn psn(mut self, relative: u64) -> Packets {
        self.selector.psn = Some(InclusiveRange::exactly(relative));
        self
    }

    /// Only packets of this message of their queue pair, counted from zero.
    pub fn message(mut self, index: u64) -> Packets {
        self.selector.message = Some(InclusiveRange::exactly(index));
        self
    }

    /// Only the n-th transmission of a PSN: 1 is the first.
    pub fn transmission(mut self, number: u64) -> Packets {
        self.selector.transmission = Some(InclusiveRange::exactly(number));
        self
    }

    /// Only packets of this flow: a queue pair by its number among those that became ready to send, from zero.
    pub fn flow(mut self, flow: u32) -> Packets {
        self.selector.flow_id = Some(FlowId(flow));
        self
    }

    /// With any action; the other methods are short for the usual ones.
    pub fn act(self, action: Action) -> Rule {
        Rule { id: RuleId(0), selector: self.selector, repeat: self.repeat, action }
    }

    /// Loses the packet.
    pub fn drop(self) -> Rule {
        self.act(Action::Drop)
    }

    /// Delivers the packet later; others may overtake it.
    pub fn delay(self, by: Duration) -> Rule {
        self.act(Action::Delay { ns: by.as_nanos() as u64 })
    }

    /// Delivers the packet twice.
    pub fn duplicate(self) -> Rule {
        self.act(Action::Duplicate { copies: 1 })
    }

    /// Holds the packet back until so many others have passed it, but not longer than a millisecond.
    ///
    /// # Panics
    /// If `others` is zero.
    pub fn reorder(self, others: u32) -> Rule {
        let by = NonZeroU32::new(others).expect("at least one packet passes it");
        self.act(Action::Reorder { by, within_ns: 1_000_000 })
    }

    /// Flips a bit, so that the ICRC is wrong.
    pub fn corrupt(self) -> Rule {
        self.act(Action::Corrupt { bit: BitPosition::Random, icrc: IcrcPolicy::Stale })
    }

    /// Marks the packet as a congested switch does (ECN CE).
    pub fn mark(self) -> Rule {
        self.act(Action::MarkCe)
    }

    /// Takes the link down in both directions: this packet and all others are lost for so long.
    pub fn cut(self, duration: Duration) -> Rule {
        let for_ns = duration.as_nanos() as u64;
        self.act(Action::LinkDown { directions: DownDirections::BothWays, for_ns })
    }

    /// Lets the packet pass and counts it: see [`Report::rule_counters`](crate::sim::Report::rule_counters).
    pub fn count(self) -> Rule {
        self.act(Action::Count)
    }
}
