//! Plans for external programs: the rules of their devices, the names of their queue pairs, and the evaluation of their
//! events.
//!
//! `alice.1` is the first queue pair of the file's transport that becomes ready to receive on that host. This module
//! performs no I/O: the caller installs rules and roles, and passes the events of the hosts.

pub use crate::schedule::{Effect, HostControl};

use crate::evaluate::{self, RunResults};
use crate::executor::{ObservedCompletion, ProgramLog};
use crate::hosts::FinalState;
use crate::plan::{Change, Expectation, FaultKind, HostPlan, Plan, default_settings};
use crate::quantity::Time;
use crate::record::{RecordedEvent, RunRecord, TimelineEntry};
use crate::recorder::trigger_of;
use crate::report::{ExpectationOutcome, Outcome, Verdict};
use crate::schedule::Schedule;
use softhca_engine::{Event, Instant, QpState, QpType, Reason, Settings};
use softhca_fabric::{Action, Fault, FaultCause, FlowId, NetworkEvent, Node, Rule, RuleCounters, RuleId};
use softhca_trace::NameTable;
use softhca_types::{Counters, FaultTrigger, ProgramFaults};
use softhca_wire::Qpn;
use std::collections::{BTreeMap, BTreeSet};

/// How a program of a plan ended.
#[derive(Clone, Debug)]
pub enum ProgramEnd {
    /// With this exit code, and this end of its output.
    Exited(i32, String),
    /// The command killed it, for this reason.
    Stopped(String),
}

/// How long a packet waits for the kill that it causes. The caller looks for both every few milliseconds.
const HOLD_NS: u64 = 100_000_000;

/// A plan for external programs.
pub struct LiveScenario<'p> {
    plan: &'p Plan,
    log: ProgramLog,
    schedule: Schedule<'p>,
    record: RunRecord,
    states: Vec<Option<QpState>>,
    /// The queue pairs of the plan by host, in the order in which programs create them; none for those without a name.
    expected_qps: Vec<Vec<Option<usize>>>,
    /// The number of queue pairs that programs have created, by host.
    matched_qps: Vec<usize>,
    /// The queue pairs of the plan by host and QPN.
    qp_by_number: BTreeMap<(usize, Qpn), usize>,
    /// Queue pairs in RTR whose configuration is not known yet.
    pending_rtr: BTreeSet<(usize, Qpn)>,
    ends: BTreeMap<usize, ProgramEnd>,
    /// The events since the last actions that faults may wait for.
    triggers: Vec<FaultTrigger>,
    /// The rules whose packets wait for a change of a program.
    holding: Vec<RuleId>,
    /// When the counters were read last.
    counters_read_ns: u64,
    /// A time before a packet that waits now was sent.
    held_since_ns: Option<u64>,
    ended_ns: u64,
}

/// The rules of packets after which a program is killed or stopped: the packets wait for that.
fn holding_rules(plan: &Plan) -> Result<Vec<RuleId>, String> {
    let mut found = Vec::new();
    for fault in &plan.faults {
        let (FaultKind::Timed { at_ns: 0, changes }, Some(FaultTrigger::Fault(id))) =
            (&fault.kind, &fault.after)
        else {
            continue;
        };
        let cause = plan.faults.iter().find(|cause| cause.id.0 == *id);
        let Some((cause, FaultKind::Packets { rule, .. })) = cause.map(|cause| (cause, &cause.kind)) else {
            continue;
        };
        let stops_program = |change: &Change| {
            matches!(
                change,
                Change::KillProgram { .. } | Change::RestartProgram { .. } | Change::Stall { .. }
            )
        };
        if !changes.iter().any(|(_, change)| stops_program(change)) {
            continue;
        }
        if rule.action != Action::Count || cause.after.is_some() {
            return Err(format!(
                "fault {:?}: {:?} does not hold its packet until the program is stopped: only a fault of packets with \
                 the action \"count\", and without `after`, does",
                fault.name, cause.name
            ));
        }
        found.push(rule.id);
    }
    Ok(found)
}

impl<'p> LiveScenario<'p> {
    /// A run that has not begun. The error names what external programs do not support.
    pub fn new(plan: &'p Plan) -> Result<LiveScenario<'p>, String> {
        if !plan.steps.is_empty() || !plan.flows.is_empty() {
            return Err("the file has steps or workloads of its own: it is for `softhca run`".into());
        }
        if let Some(why) = plan.unsupported_on_real_devices() {
            return Err(format!("not possible on real devices: {why}"));
        }
        if let Some(why) = plan.unknown_of_foreign_hosts() {
            return Err(why);
        }
        let unknown = |expectation: &Expectation| {
            expectation.unknown_of_programs().map(|why| (expectation.text.clone(), why))
        };
        if let Some((text, why)) = plan.expectations.iter().find_map(unknown) {
            return Err(format!("the expectation \"{text}\" cannot be checked for real programs: {why}"));
        }
        if !plan.invariants.is_empty() {
            return Err("invariants cannot be checked for real programs: their packets are counted, not kept in order".into());
        }
        let usual = |host: &HostPlan| {
            let Settings { profile, recovery, .. } = host.settings;
            Settings { profile, recovery, ..default_settings() }
        };
        if let Some(host) = plan.hosts.iter().find(|host| host.settings != usual(host)) {
            return Err(format!(
                "{}: a scenario can give a daemon only the device settings `profile` and `recovery`; `softhca daemon \
                 --config` has the settings of congestion control",
                host.name
            ));
        }
        for fault in &plan.faults {
            let FaultKind::Timed { changes, .. } = &fault.kind else { continue };
            if let Some(what) = changes.iter().find_map(|(_, change)| change.unsupported_for_programs()) {
                return Err(format!("fault {:?}: {what} not supported for real programs", fault.name));
            }
        }
        let mut expected_qps = vec![Vec::new(); plan.hosts.len()];
        for (index, qp) in plan.qps.iter().enumerate() {
            let number = qp.name.rsplit_once('.').and_then(|(_, number)| number.parse::<usize>().ok());
            let place = number.unwrap_or(1).max(1) - 1;
            let row: &mut Vec<Option<usize>> = &mut expected_qps[qp.host];
            row.resize(row.len().max(place + 1), None);
            row[place] = Some(index);
        }
        Ok(LiveScenario {
            plan,
            log: ProgramLog::new(plan),
            schedule: Schedule::new(plan),
            record: RunRecord::new(plan),
            states: vec![None; plan.qps.len()],
            expected_qps,
            matched_qps: vec![0; plan.hosts.len()],
            qp_by_number: BTreeMap::new(),
            pending_rtr: BTreeSet::new(),
            ends: BTreeMap::new(),
            triggers: Vec::new(),
            holding: holding_rules(plan)?,
            counters_read_ns: 0,
            held_since_ns: None,
            ended_ns: 0,
        })
    }

    /// The rules for the device of a host, with their names.
    pub fn rules(&self, host: usize) -> Vec<(Rule, &'p str)> {
        let mut rules: Vec<_> =
            self.plan.rules_for_host(host).into_iter().map(|(name, rule)| (rule, name)).collect();
        for (rule, _) in rules.iter_mut().filter(|(rule, _)| self.holding.contains(&rule.id)) {
            rule.action = Action::Hold { ns: HOLD_NS };
        }
        rules
    }

    /// Whether a fault waits for an event or another fault: the caller then reads the counters often.
    pub fn has_waiting_faults(&self) -> bool {
        self.plan.has_waiting_faults()
    }

    /// Reports the counters of packet rules, read after `now_ns`: they report their faults by no event of their own.
    pub fn on_rule_counters(&mut self, now_ns: u64, counters: &[(RuleId, RuleCounters)]) {
        let fired = counters.iter().filter(|(_, counters)| counters.fired > 0);
        if let Some(index) = self.holding.iter().position(|id| fired.clone().any(|(fired, _)| fired == id)) {
            self.holding.swap_remove(index);
            self.held_since_ns.get_or_insert(self.counters_read_ns);
        }
        self.counters_read_ns = now_ns;
        self.triggers.extend(fired.map(|(id, _)| FaultTrigger::Fault(id.0)));
    }

    pub fn program_faults(&self, host: usize) -> Option<ProgramFaults> {
        self.plan.program_faults(host)
    }

    /// The roles of the queue pairs of a host, in the order in which they become ready to receive. Queue pairs that the
    /// file does not name have roles that no rule selects.
    pub fn roles(&self, host: usize) -> Vec<(QpType, FlowId)> {
        let unnamed = |place: usize| FlowId((self.plan.qps.len() + 1 + place) as u32);
        let role = |(place, qp): (usize, &Option<usize>)| qp.map_or_else(|| unnamed(place), Plan::role_of);
        self.expected_qps[host].iter().enumerate().map(|slot| (self.plan.transport, role(slot))).collect()
    }

    /// The time of the next action, in nanoseconds since the start.
    pub fn next_due(&self) -> Option<u64> {
        self.schedule.next_due()
    }

    /// Begins the faults that waited for what has happened, and performs all actions that are due.
    pub fn run_due(&mut self, now_ns: u64, hosts: &mut dyn HostControl) {
        for trigger in std::mem::take(&mut self.triggers) {
            self.schedule.on_trigger(now_ns, &trigger, &mut self.log, hosts);
        }
        let work = self.schedule.next_work(now_ns, &mut self.log, hosts);
        debug_assert!(work.is_none(), "the plan has no steps and no workloads");
    }

    /// Fails the run if a packet that waited for a change of a program has arrived before the change was done.
    pub fn check_held_packets(&mut self, now_ns: u64) {
        let Some(since_ns) = self.held_since_ns.take() else { return };
        if now_ns.saturating_sub(since_ns) > HOLD_NS {
            self.fail(format!(
                "the machine is too busy: the packet that a fault of a program waited for was held for {}, and the \
                 fault came up to {} after it; run it again, with less beside it",
                Time(HOLD_NS),
                Time(now_ns - since_ns)
            ));
        }
    }

    /// Forgets the queue pairs of a daemon that ended: those of the next one get their names.
    pub fn forget_queue_pairs(&mut self) {
        self.matched_qps.fill(0);
        self.qp_by_number.clear();
    }

    /// The action that failed.
    pub fn error(&self) -> Option<&str> {
        self.log.error.as_deref()
    }

    /// Processes the next event of the hosts, whose names are in `names`.
    pub fn on_event(&mut self, now: Instant, names: &NameTable, event: &NetworkEvent<'_>) {
        match *event {
            NetworkEvent::Hca { host, event } => {
                if let Some(host) = self.host_of(names, host.into()) {
                    self.on_host_event(now.nanos(), host, event);
                }
            }
            NetworkEvent::Fault { link, fault: Fault { cause: FaultCause::Rule(rule), direction, .. } } => {
                let ends = names.link_ends(link, *direction);
                if let Some(host) = ends.and_then(|[sender, _]| self.host_of(names, sender)) {
                    self.ended_ns = self.ended_ns.max(now.nanos());
                    self.append(now.nanos(), host, None, RecordedEvent::RuleFired { rule: *rule });
                }
            }
            _ => {}
        }
    }

    /// The host of the plan with the name of a node. A further device of a host is `HOST:DEVICE` in `names`; a file may
    /// name the device alone.
    fn host_of(&self, names: &NameTable, node: Node) -> Option<usize> {
        let name = names.node_name(node);
        let device = name.rsplit(':').next().unwrap_or_default();
        self.plan.hosts.iter().position(|host| host.name == name || host.name == device)
    }

    fn on_host_event(&mut self, time_ns: u64, host: usize, event: &Event) {
        match *event {
            Event::QpStateChanged { qp, to, reason, .. } => {
                if to == QpState::ReadyToReceive {
                    self.pending_rtr.insert((host, qp));
                }
                if let Some(qp) = self.qp_by_number.get(&(host, qp)).copied() {
                    self.state(time_ns, host, qp, to, reason);
                }
            }
            Event::QpConfigured { qp, configuration } => {
                let is_new = self.pending_rtr.remove(&(host, qp));
                if is_new && configuration.qp_type == self.plan.transport {
                    self.assign_role(time_ns, host, qp);
                }
            }
            Event::Completed { completion, reason, .. } => {
                let Some(qp) = self.qp_by_number.get(&(host, completion.qpn)).copied() else { return };
                if reason != Reason::None {
                    let key = (qp, completion.wr_id, completion.opcode.is_receive());
                    self.record.reasons.insert(key, reason.to_string());
                }
                let (posted_ns, bytes) = (time_ns, completion.byte_len);
                let observed = ObservedCompletion { time_ns, qp, completion, origin: None, posted_ns, bytes };
                self.log.completions.push(observed);
                self.append(time_ns, host, Some(qp), RecordedEvent::Completed { completion });
            }
            Event::AsyncEventRaised { event, .. } => {
                let name = event.name();
                self.record.async_events.push((time_ns, host, name));
                self.append(time_ns, host, None, RecordedEvent::AsyncEvent { name });
            }
            Event::FaultInjected { rule, qp, .. } => {
                let qp = self.qp_by_number.get(&(host, qp)).copied();
                self.record.on_program_fault(time_ns, host, qp, RuleId(rule));
            }
            _ => return,
        }
        self.ended_ns = self.ended_ns.max(time_ns);
        self.triggers.extend(trigger_of(event));
    }

    /// Assigns the next queue pair of the plan to a queue pair of a program.
    fn assign_role(&mut self, time_ns: u64, host: usize, number: Qpn) {
        let index = self.matched_qps[host];
        self.matched_qps[host] += 1;
        self.qp_by_number.remove(&(host, number));
        // One without a name has a position too.
        if let Some(Some(qp)) = self.expected_qps[host].get(index).copied() {
            self.qp_by_number.insert((host, number), qp);
            self.state(time_ns, host, qp, QpState::ReadyToReceive, Reason::Requested);
        }
    }

    fn state(&mut self, time_ns: u64, host: usize, qp: usize, to: QpState, reason: Reason) {
        self.states[qp] = Some(to);
        self.record.states.push((time_ns, qp, to, reason.to_string()));
        self.append(time_ns, host, Some(qp), RecordedEvent::StateChanged { to });
    }

    fn append(&mut self, time_ns: u64, host: usize, qp: Option<usize>, event: RecordedEvent) {
        self.record.timeline.push(TimelineEntry { time_ns, host: Some(host), qp, event });
    }

    /// Records the exit code of the program of `softhca exec`.
    pub fn on_program_exit(&mut self, code: u8) {
        self.log.exit_code = Some(code);
    }

    /// Records the end of a program of the plan. Returns whether it is the expected one.
    pub fn on_end(&mut self, command: usize, end: ProgramEnd) -> bool {
        let expected = self.plan.commands[command].exit_code;
        let is_expected = matches!(end, ProgramEnd::Exited(code, _) if code == expected);
        self.ends.insert(command, end);
        is_expected
    }

    /// Records why the run cannot go on.
    pub fn fail(&mut self, why: String) {
        self.log.error.get_or_insert(why);
    }

    /// Evaluates the run, with the counters of all rules of all devices and the counters of each device.
    pub fn evaluate(&self, rule_counters: Vec<(RuleId, RuleCounters)>, counters: Vec<Counters>) -> Outcome {
        let end = FinalState {
            rule_counters,
            counters,
            states: self.states.clone(),
            waits: vec![None; self.plan.qps.len()],
            ended_ns: self.ended_ns,
            timed_out: false,
            in_real_time: true,
        };
        let results = RunResults { record: &self.record, log: &self.log, end: &end };
        let mut outcome = evaluate::evaluate(self.plan, &results, &|_, _, _| Vec::new());
        for (index, command) in self.plan.commands.iter().enumerate() {
            let host = &self.plan.hosts[command.host].name;
            let name = &self.plan.workloads[command.workload];
            let text = format!("program {name:?} on {host} ends with {}", command.exit_code);
            let (held, detail) = match self.ends.get(&index) {
                Some(ProgramEnd::Exited(code, _)) if *code == command.exit_code => {
                    (true, "it did".to_owned())
                }
                Some(ProgramEnd::Exited(code, output)) if output.is_empty() => {
                    (false, format!("it ended with {code}"))
                }
                Some(ProgramEnd::Exited(code, output)) => {
                    (false, format!("it ended with {code} and printed: {output}"))
                }
                Some(ProgramEnd::Stopped(why)) => (false, why.clone()),
                None => (false, format!("it did not end within {}", Time(self.plan.program_timeout_ns()))),
            };
            outcome.expectations.push(ExpectationOutcome {
                text,
                held,
                detail,
                sometimes: false,
                at: None,
                location: None,
            });
            if !held && outcome.verdict == Verdict::Pass {
                outcome.verdict = Verdict::Fail;
            }
        }
        outcome
    }
}

#[cfg(test)]
mod tests;
