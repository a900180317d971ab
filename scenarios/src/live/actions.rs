//! The actions of faults on the devices and programs of the hosts.

use crate::plan::{FabricChange, FaultKind, FaultPlan, TimedFault};
use softhca_fabric::{LinkState, Rule, RuleId};
use softhca_types::{FaultTrigger, InjectedEvent};

/// The devices and programs of the hosts. Hosts are indices in the plan.
pub trait HostControl {
    /// Takes the port of a host down or up.
    fn set_port(&mut self, host: usize, state: LinkState) -> Result<(), String>;
    /// Raises an asynchronous event of the device of a host, with its consequences.
    fn raise_event(&mut self, host: usize, event: InjectedEvent) -> Result<(), String>;
    /// Kills, stops or continues the programs of a host.
    fn signal(&mut self, host: usize, signal: ProgramSignal) -> Result<(), String>;
    /// Kills the daemon, and starts another one in its place if `restart`.
    fn kill_daemon(&mut self, restart: bool) -> Result<(), String>;
    /// Adds a rule to the device of a host.
    fn add_rule(&mut self, host: usize, rule: Rule, name: &str) -> Result<(), String>;
    /// Reports to the faults of the program of a host what they wait for.
    fn note_trigger(&mut self, host: usize, trigger: &FaultTrigger) -> Result<(), String>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramSignal {
    /// SIGKILL.
    Kill,
    /// SIGSTOP.
    Stop,
    /// SIGCONT.
    Continue,
    /// SIGKILL, and the program starts again.
    Restart,
}

/// An action at a time.
pub(super) struct TimedAction {
    pub at_ns: u64,
    pub what: LiveAction,
    /// The fault that begins with it.
    pub begins: Option<RuleId>,
}

#[derive(Clone)]
pub(super) enum LiveAction {
    Link(usize, LinkState),
    Raise(usize, InjectedEvent),
    Signal(usize, ProgramSignal),
    KillDaemon { restart: bool },
    AddRule(usize),
    Note(usize, FaultTrigger),
}

/// The actions that a fault causes. The error names a fault that external programs do not support.
pub(super) fn timed_actions(fault: &FaultPlan) -> Result<Vec<TimedAction>, &'static str> {
    let (at_ns, what) = match &fault.kind {
        FaultKind::Packets { .. } | FaultKind::Program { .. } => return Ok(Vec::new()),
        FaultKind::Timed { at_ns, fault: what } => (*at_ns, what),
    };
    let actions: Vec<(u64, LiveAction)> = match *what {
        TimedFault::Fabric {
            change: FabricChange::LinkState { link, directions: [true, true], state },
            for_ns,
        } => {
            let up = for_ns.map(|ns| (at_ns + ns, LiveAction::Link(link, LinkState::Up)));
            [(at_ns, LiveAction::Link(link, state))].into_iter().chain(up).collect()
        }
        TimedFault::Flap(flap) => {
            flap.transitions(at_ns).map(|(at, state)| (at, LiveAction::Link(flap.link, state))).collect()
        }
        TimedFault::Fabric { change: FabricChange::AsyncEvent { host, event, .. }, .. } => {
            if event.object().is_some() {
                return Err("an event of a queue pair or completion queue without `verb` is");
            }
            vec![(at_ns, LiveAction::Raise(host, event))]
        }
        TimedFault::KillProgram { host } => vec![(at_ns, LiveAction::Signal(host, ProgramSignal::Kill))],
        TimedFault::RestartProgram { host } => {
            vec![(at_ns, LiveAction::Signal(host, ProgramSignal::Restart))]
        }
        TimedFault::KillDaemon { restart } => vec![(at_ns, LiveAction::KillDaemon { restart })],
        TimedFault::Stall { host, for_ns } => vec![
            (at_ns, LiveAction::Signal(host, ProgramSignal::Stop)),
            (at_ns + for_ns, LiveAction::Signal(host, ProgramSignal::Continue)),
        ],
        TimedFault::Fabric { change: FabricChange::LinkState { .. }, .. } => {
            return Err("a link that is down in one direction only is");
        }
        _ => return Err("a fault of a host or a link, other than a link that goes down, is"),
    };
    let timed = |(index, (at_ns, what)): (usize, (u64, LiveAction))| TimedAction {
        at_ns,
        what,
        begins: (index == 0).then_some(fault.id),
    };
    Ok(actions.into_iter().enumerate().map(timed).collect())
}
