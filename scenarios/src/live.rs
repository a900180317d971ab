//! Plans for external programs: the rules of their devices, the names of their queue pairs, and the evaluation of their
//! event log.
//!
//! `alice.1` is the first queue pair of the file's transport that becomes ready to receive on that host. This module
//! performs no I/O: the caller installs rules and roles, and passes the entries of the event log.

use crate::evaluate::{self, RunResults};
use crate::executor::{ObservedCompletion, ProgramLog};
use crate::hosts::FinalState;
use crate::plan::{
    Expectation, FabricChange, FaultKind, FaultPlan, HostPlan, Node, Plan, TimedFault, default_settings,
};
use crate::quantity::Time;
use crate::record::{RecordedEvent, RunRecord, TimelineEntry};
use crate::report::{ExpectationOutcome, Outcome, Verdict};
use softhca_engine::{AsyncEvent, QpState, QpType, Settings};
use softhca_fabric::{FlowId, LinkState, Rule, RuleCounters, RuleId};
use softhca_queue::{
    Completion, CompletionFlags, CompletionOpcode, CompletionStatus, Counters, FaultTrigger, InjectedEvent,
    ProgramFaults,
};
use softhca_trace::log::{CompletionData, Entry, LogEvent};
use softhca_wire::Qpn;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

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

/// A plan for external programs.
pub struct LiveScenario<'p> {
    plan: &'p Plan,
    log: ProgramLog,
    /// The actions that are still due, in the order of time.
    actions: VecDeque<TimedAction>,
    record: RunRecord,
    states: Vec<Option<QpState>>,
    /// The queue pairs of the plan by host, in the order in which programs create them; none for those without a name.
    expected_qps: Vec<Vec<Option<usize>>>,
    /// The number of queue pairs that programs have created, by host.
    matched_qps: Vec<usize>,
    /// The queue pairs of the plan by host and QPN.
    qp_by_number: BTreeMap<(usize, u32), usize>,
    /// Queue pairs in RTR whose configuration is not known yet.
    pending_rtr: BTreeSet<(usize, u32)>,
    exits: BTreeMap<usize, (i32, String)>,
    /// The faults that waited for something that happened.
    begun: Vec<(usize, FaultTrigger)>,
    /// The time of the last actions, in the clock of the caller.
    now_ns: u64,
    ended_ns: u64,
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
        let unknown = |expectation: &Expectation| {
            expectation.unknown_of_programs().map(|why| (expectation.text.clone(), why))
        };
        if let Some((text, why)) = plan.expectations.iter().find_map(unknown) {
            return Err(format!("the expectation \"{text}\" cannot be checked for real programs: {why}"));
        }
        if !plan.invariants.is_empty() {
            return Err("invariants cannot be checked for real programs: their packets are counted, not kept in order".into());
        }
        let usual = |host: &HostPlan| Settings { recovery: host.settings.recovery, ..default_settings() };
        if let Some(host) = plan.hosts.iter().find(|host| host.settings != usual(host)) {
            return Err(format!(
                "{}: `recovery` is the only device setting that a scenario can give to a daemon; `softhca daemon \
                 --config` has the settings of congestion control",
                host.name
            ));
        }
        let mut actions = Vec::new();
        for fault in &plan.faults {
            let found = timed_actions(fault)
                .map_err(|what| format!("fault {:?}: {what} not supported for real programs", fault.name))?;
            if fault.after.is_none() {
                actions.extend(found);
            }
        }
        actions.sort_by_key(|action| action.at_ns);
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
            actions: actions.into(),
            record: RunRecord::new(plan),
            states: vec![None; plan.qps.len()],
            expected_qps,
            matched_qps: vec![0; plan.hosts.len()],
            qp_by_number: BTreeMap::new(),
            pending_rtr: BTreeSet::new(),
            exits: BTreeMap::new(),
            begun: Vec::new(),
            now_ns: 0,
            ended_ns: 0,
        })
    }

    /// The rules for the device of a host, with their names.
    pub fn rules(&self, host: usize) -> Vec<(Rule, &'p str)> {
        self.plan.rules_for_host(host).into_iter().map(|(name, rule)| (rule, name)).collect()
    }

    /// Whether a fault waits for an event or another fault: the caller then reads the log and the counters often.
    pub fn has_waiting_faults(&self) -> bool {
        self.plan.has_waiting_faults()
    }

    /// Begins the faults that wait for these rules of packets, which only have counters.
    pub fn on_rule_counters(&mut self, now_ns: u64, counters: &[(RuleId, RuleCounters)]) {
        for (id, _) in counters.iter().filter(|(_, counters)| counters.fired > 0) {
            self.on_trigger(now_ns, &FaultTrigger::Fault(id.0));
        }
    }

    fn on_trigger(&mut self, now_ns: u64, trigger: &FaultTrigger) {
        let plan = self.plan;
        for (index, fault) in plan.faults.iter().enumerate() {
            if !fault.waits_for(trigger) || self.begun.contains(&(index, trigger.clone())) {
                continue;
            }
            self.begun.push((index, trigger.clone()));
            match &fault.kind {
                FaultKind::Timed { .. } => {
                    // Checked when the scenario was loaded.
                    let actions = timed_actions(fault).unwrap_or_default();
                    self.actions.extend(
                        actions
                            .into_iter()
                            .map(|action| TimedAction { at_ns: now_ns + action.at_ns, ..action }),
                    );
                }
                FaultKind::Packets { .. } => self.act_at(now_ns, LiveAction::AddRule(index)),
                FaultKind::Program { host, .. } => {
                    self.act_at(now_ns, LiveAction::Note(*host, trigger.clone()));
                }
            }
        }
        self.actions.make_contiguous().sort_by_key(|action| action.at_ns);
    }

    fn act_at(&mut self, at_ns: u64, what: LiveAction) {
        self.actions.push_back(TimedAction { at_ns, what, begins: None });
    }

    pub fn program_faults(&self, host: usize) -> Option<ProgramFaults> {
        self.plan.program_faults(host)
    }

    /// The roles of the queue pairs of a host, in the order in which they become ready to receive. Those that the file
    /// does not name have roles that no rule selects.
    pub fn roles(&self, host: usize) -> Vec<(QpType, FlowId)> {
        let unnamed = |place: usize| FlowId((self.plan.qps.len() + 1 + place) as u32);
        let role = |(place, qp): (usize, &Option<usize>)| qp.map_or_else(|| unnamed(place), Plan::role_of);
        self.expected_qps[host].iter().enumerate().map(|slot| (self.plan.transport, role(slot))).collect()
    }

    /// The time of the next action, in nanoseconds since the start.
    pub fn next_due(&self) -> Option<u64> {
        self.actions.front().map(|action| action.at_ns)
    }

    /// Performs all actions that are due.
    pub fn run_due(&mut self, now_ns: u64, hosts: &mut dyn HostControl) {
        self.now_ns = now_ns;
        while self.next_due().is_some_and(|at| at <= now_ns)
            && let Some(action) = self.actions.pop_front()
        {
            if let Some(fault) = action.begins {
                *self.log.fired.entry(fault).or_default() += 1;
                self.on_trigger(now_ns, &FaultTrigger::Fault(fault.0));
            }
            let done = match action.what {
                LiveAction::Raise(host, event) => hosts.raise_event(host, event),
                LiveAction::Signal(host, signal) => hosts.signal(host, signal),
                LiveAction::KillDaemon { restart } => {
                    // The queue pairs of the new daemon get the names again.
                    self.matched_qps.fill(0);
                    self.qp_by_number.clear();
                    hosts.kill_daemon(restart)
                }
                LiveAction::Note(host, trigger) => hosts.note_trigger(host, &trigger),
                LiveAction::AddRule(index) => self.add_rule(index, hosts),
                LiveAction::Link(link, state) => {
                    let ends = self.plan.links[link].ends;
                    ends.into_iter().try_for_each(|end| match end {
                        Node::Host(host) => hosts.set_port(host, state),
                        Node::Switch(_) => Ok(()),
                    })
                }
            };
            if let Err(why) = done {
                self.log.error.get_or_insert(why);
            }
        }
    }

    fn add_rule(&self, index: usize, hosts: &mut dyn HostControl) -> Result<(), String> {
        let fault = &self.plan.faults[index];
        let FaultKind::Packets { links, rule } = &fault.kind else { return Ok(()) };
        (0..self.plan.hosts.len()).try_for_each(|host| {
            let rules = self.plan.rule_at_host(host, links, rule);
            rules.into_iter().try_for_each(|rule| hosts.add_rule(host, rule, &fault.name))
        })
    }

    /// The action that failed.
    pub fn error(&self) -> Option<&str> {
        self.log.error.as_deref()
    }

    /// Whether entries with this name are used. The caller can skip others.
    pub fn uses_event(name: &str) -> bool {
        matches!(
            name,
            "qp:state_changed"
                | "qp:configured"
                | "work:completed"
                | "device:async_event"
                | "fabric:fault"
                | "fault:injected"
        )
    }

    /// Processes the next entry of the log.
    pub fn on_log_entry(&mut self, entry: &Entry) {
        // A further device of a host is `HOST:DEVICE` in the log; a file may name the device alone.
        let device = entry.host.rsplit(':').next().unwrap_or_default();
        let is_named = |name: &str| name == entry.host || name == device;
        let Some(host) = self.plan.hosts.iter().position(|host| is_named(&host.name)) else { return };
        let time_ns = entry.time;
        self.ended_ns = self.ended_ns.max(time_ns);
        match &entry.event {
            LogEvent::QpStateChanged { qp, to, .. } => {
                let Some(to) = QpState::ALL.into_iter().find(|state| state.name() == to) else { return };
                if to == QpState::ReadyToReceive {
                    self.pending_rtr.insert((host, *qp));
                }
                if let Some(qp) = self.qp_by_number.get(&(host, *qp)).copied() {
                    self.state(time_ns, host, qp, to, entry.trigger.as_deref());
                }
            }
            LogEvent::QpConfigured { qp, configuration } => {
                let is_new = self.pending_rtr.remove(&(host, *qp));
                if is_new && configuration.qp_type == kind_name(self.plan.transport) {
                    self.assign_role(time_ns, host, *qp);
                }
            }
            LogEvent::Completed { completion, .. } => {
                let CompletionData { qp, wr_id: id, operation, status, bytes, imm_data, vendor_err, .. } =
                    completion;
                let Some(at) = self.qp_by_number.get(&(host, *qp)).copied() else { return };
                let (Some(operation), Some(status)) =
                    (CompletionOpcode::from_name(operation), CompletionStatus::from_name(status))
                else {
                    return;
                };
                let flags = match imm_data {
                    Some(_) => CompletionFlags::IMMEDIATE,
                    None => CompletionFlags::empty(),
                };
                let completion = Completion {
                    wr_id: *id,
                    status,
                    opcode: operation,
                    flags,
                    byte_len: *bytes,
                    imm_data: imm_data.unwrap_or(0),
                    qpn: Qpn::new(*qp),
                    src_qp: Qpn::default(),
                    service_level: 0,
                    vendor_error: *vendor_err,
                    timestamp: time_ns,
                };
                if let Some(why) = &entry.trigger {
                    self.record.reasons.insert((at, *id, operation.is_receive()), why.clone());
                }
                let (posted_ns, bytes) = (time_ns, *bytes);
                self.log.completions.push(ObservedCompletion {
                    time_ns,
                    qp: at,
                    completion,
                    origin: None,
                    posted_ns,
                    bytes,
                });
                self.append(time_ns, host, Some(at), RecordedEvent::Completed { completion });
            }
            LogEvent::AsyncEventRaised { event, .. } => {
                self.on_trigger(self.now_ns, &FaultTrigger::Event(event.to_string()));
                if let Some(name) = AsyncEvent::NAMES.into_iter().find(|name| name == event) {
                    self.record.async_events.push((time_ns, host, name));
                    self.append(time_ns, host, None, RecordedEvent::AsyncEvent { name });
                }
            }
            LogEvent::FaultInjected { rule, qp, .. } => {
                self.on_trigger(self.now_ns, &FaultTrigger::Fault(*rule));
                let qp = self.qp_by_number.get(&(host, *qp)).copied();
                self.record.on_program_fault(time_ns, host, qp, RuleId(*rule));
            }
            LogEvent::Fault { rule: Some(rule), .. } => {
                self.append(time_ns, host, None, RecordedEvent::RuleFired { rule: RuleId(*rule) });
            }
            _ => {}
        }
    }

    /// Assigns the next queue pair of the plan to a queue pair of a program.
    fn assign_role(&mut self, time_ns: u64, host: usize, number: u32) {
        let index = self.matched_qps[host];
        self.matched_qps[host] += 1;
        self.qp_by_number.remove(&(host, number));
        // One without a name has a position too.
        if let Some(Some(qp)) = self.expected_qps[host].get(index).copied() {
            self.qp_by_number.insert((host, number), qp);
            self.state(time_ns, host, qp, QpState::ReadyToReceive, None);
        }
    }

    fn state(&mut self, time_ns: u64, host: usize, qp: usize, to: QpState, why: Option<&str>) {
        self.states[qp] = Some(to);
        self.record.states.push((time_ns, qp, to, why.unwrap_or("the program requested it").to_owned()));
        self.append(time_ns, host, Some(qp), RecordedEvent::StateChanged { to });
    }

    fn append(&mut self, time_ns: u64, host: usize, qp: Option<usize>, event: RecordedEvent) {
        self.record.timeline.push(TimelineEntry { time_ns, host: Some(host), qp, event });
    }

    /// Records the exit code of the program of `softhca exec`.
    pub fn on_program_exit(&mut self, code: u8) {
        self.log.exit_code = Some(code);
    }

    /// Records the exit code of a program of the plan, and the end of its output.
    pub fn on_exit(&mut self, command: usize, code: i32, output: String) {
        self.exits.insert(command, (code, output));
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
            let (held, detail) = match self.exits.get(&index) {
                Some((code, _)) if *code == command.exit_code => (true, "it did".to_owned()),
                Some((code, output)) if output.is_empty() => (false, format!("it ended with {code}")),
                Some((code, output)) => (false, format!("it ended with {code} and printed: {output}")),
                None => (false, format!("it did not end within {}", Time(self.ended_ns))),
            };
            outcome.expectations.push(ExpectationOutcome { text, held, detail, location: None });
            if !held && outcome.verdict == Verdict::Pass {
                outcome.verdict = Verdict::Fail;
            }
        }
        outcome
    }
}

/// An action at a time.
struct TimedAction {
    at_ns: u64,
    what: LiveAction,
    /// The fault that begins with it.
    begins: Option<RuleId>,
}

#[derive(Clone)]
enum LiveAction {
    Link(usize, LinkState),
    Raise(usize, InjectedEvent),
    Signal(usize, ProgramSignal),
    KillDaemon { restart: bool },
    AddRule(usize),
    Note(usize, FaultTrigger),
}

/// The actions that a fault causes. The error names a fault that external programs do not support.
fn timed_actions(fault: &FaultPlan) -> Result<Vec<TimedAction>, &'static str> {
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

const fn kind_name(kind: QpType) -> &'static str {
    match kind {
        QpType::Uc => "uc",
        QpType::Ud => "ud",
        QpType::XrcInitiator => "xrc-initiator",
        _ => "rc",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ParameterValues, Scenario};
    use softhca_fabric::Action;

    const FILE: &str = r#"
        title = "t"
        [hosts]
        alice = {}
        bob = {}
        [[fault]]
        name = "lose"
        on = "alice -> bob"
        match = { qp = "alice.2", psn = "+1" }
        action = "drop"
        [[fault]]
        name = "flap"
        link = "alice - bob"
        action = { flap = { down = "1ms", up = "1ms", times = 1 } }
        [[expect]]
        completion = { qp = "alice.2", status = "RETRY_EXC_ERR", times = 1 }
        [[fault]]
        name = "later"
        on = "bob -> alice"
        after = { event = "PORT_ERR" }
        action = "drop"
        optional = true
        [[fault]]
        name = "restart"
        host = "bob"
        at = "2ms"
        after = { fault = "lose" }
        action = "restart"
        [[expect]]
        state = { qp = "alice.2", is = "error" }
        [[expect]]
        exit-code = 3
    "#;

    #[derive(Default)]
    struct Recorded(Vec<(usize, LinkState)>, Vec<(usize, ProgramSignal)>, Vec<String>);

    impl HostControl for Recorded {
        fn set_port(&mut self, host: usize, port: LinkState) -> Result<(), String> {
            self.0.push((host, port));
            Ok(())
        }

        fn raise_event(&mut self, _: usize, _: InjectedEvent) -> Result<(), String> {
            Ok(())
        }

        fn signal(&mut self, host: usize, signal: ProgramSignal) -> Result<(), String> {
            self.1.push((host, signal));
            Ok(())
        }

        fn kill_daemon(&mut self, _: bool) -> Result<(), String> {
            Ok(())
        }

        fn add_rule(&mut self, host: usize, rule: Rule, name: &str) -> Result<(), String> {
            self.2.push(format!("{host}: {name} {:?}", rule.action));
            Ok(())
        }

        fn note_trigger(&mut self, _: usize, _: &FaultTrigger) -> Result<(), String> {
            Ok(())
        }
    }

    /// A queue pair of alice becomes ready to receive.
    fn arrive(live: &mut LiveScenario<'_>, qp: u32, kind: &str) {
        let state = format!(
            r#"{{"time":1,"host":"alice","name":"qp:state_changed","data":{{"qp":{qp},"from":"INIT","to":"RTR","reason":"asked"}}}}"#
        );
        let configured = format!(
            r#"{{"time":1,"host":"alice","name":"qp:configured","data":{{"qp":{qp},"qp_type":"{kind}","recovery":"fatal","path_mtu":1024,
            "sq_psn":0,"rq_psn":0,"timeout":14,"retry_cnt":7,"rnr_retry":7,"qp_access_flags":"","max_rd_atomic":1,
            "max_dest_rd_atomic":1,"max_send_wr":1,"max_recv_wr":1}}}}"#
        );
        for line in [state, configured] {
            live.on_log_entry(&serde_json::from_str(&line).unwrap());
        }
    }

    #[test]
    fn queue_pairs_of_programs_get_their_names_in_the_order_in_which_they_get_ready() {
        let plan = Scenario::parse("f", FILE).unwrap().plan(&ParameterValues::new(), 1).unwrap();
        let mut live = LiveScenario::new(&plan).unwrap();
        assert_eq!(live.roles(0).len(), 2, "the first has no name, and takes a place");
        assert_eq!(live.roles(0)[1].1, Plan::role_of(0));
        assert_eq!((live.rules(0).len(), live.rules(1).len()), (1, 0));
        arrive(&mut live, 17, "rc");
        arrive(&mut live, 18, "ud");
        arrive(&mut live, 19, "rc");
        for qp in [17, 19] {
            let failed = format!(
                r#"{{"time":5,"host":"alice","name":"work:completed","data":{{"qp":{qp},"wr_id":3,"operation":"write","status":"RETRY_EXC_ERR","bytes":0,"cq":1,"reason":"x","vendor_err":20}}}}"#
            );
            live.on_log_entry(&serde_json::from_str(&failed).unwrap());
        }
        let ended = r#"{"time":6,"host":"alice","name":"qp:state_changed","data":{"qp":19,"from":"RTS","to":"ERR","reason":"x"}}"#;
        live.on_log_entry(&serde_json::from_str(ended).unwrap());
        let mut cards = Recorded::default();
        live.run_due(0, &mut cards);
        live.run_due(1_000_000, &mut cards);
        assert_eq!(
            cards.0,
            [(0, LinkState::Down), (1, LinkState::Down), (0, LinkState::Up), (1, LinkState::Up)]
        );
        let tally = RuleCounters { matched: 1, fired: 1 };
        // Faults that wait for an event or another fault.
        assert!(live.has_waiting_faults() && cards.1.is_empty() && cards.2.is_empty());
        let event = r#"{"time":7,"host":"alice","name":"device:async_event","data":{"event":"PORT_ERR"}}"#;
        live.on_log_entry(&serde_json::from_str(event).unwrap());
        live.on_rule_counters(2_000_000, &[(RuleId(1), tally)]);
        live.run_due(3_000_000, &mut cards);
        assert_eq!((cards.1.len(), &cards.2[..]), (0, &["1: later Drop".to_owned()][..]));
        for now_ns in [4_000_000, 5_000_000] {
            live.on_rule_counters(now_ns, &[(RuleId(1), tally)]);
            live.run_due(now_ns, &mut cards);
        }
        assert_eq!(cards.1, [(1, ProgramSignal::Restart)]);
        live.on_program_exit(3);
        let outcome = live.evaluate(vec![(RuleId(1), tally)], vec![Counters::default(); 2]);
        assert_eq!(outcome.verdict, Verdict::Pass, "{:?}", outcome.expectations);
        assert_eq!(outcome.skipped.len(), 0);
        live.on_program_exit(4);
        let other_code = live.evaluate(vec![(RuleId(1), tally)], vec![Counters::default(); 2]);
        assert_eq!(other_code.verdict, Verdict::Fail, "{:?}", other_code.expectations);
        let silent = live.evaluate(Vec::new(), vec![Counters::default(); 2]);
        assert_eq!(silent.verdict, Verdict::Fail, "a rule that never fired");
    }

    #[test]
    fn faults_that_external_programs_do_not_support_are_rejected() {
        let fault = |text: &str| {
            format!("title = \"t\"\n[hosts]\nalice = {{}}\nbob = {{}}\n[[fault]]\nname = \"f\"\n{text}\n")
        };
        for (text, sentence) in [
            ("host = \"alice\"\naction = { withhold-receives = \"1ms\" }", "a fault of a host or a link"),
            ("host = \"alice\"\naction = { raise-event = \"qp-fatal\" }", "without `verb` is not supported"),
            ("link = \"alice -> bob\"\naction = { link-down = {} }", "one direction only"),
        ] {
            let plan = Scenario::parse("f", &fault(text)).unwrap().plan(&ParameterValues::new(), 1).unwrap();
            let why = LiveScenario::new(&plan).err().unwrap();
            assert!(why.contains(sentence), "{why}");
        }
    }

    #[test]
    fn what_cannot_be_checked_for_programs_is_rejected() {
        for (text, sentence) in [
            ("[[expect]]\nfinish = {}", "what a program meant to do is not known"),
            ("[[expect]]\nverb-error = { host = \"alice\" }", "the calls of a program are its own"),
            ("[[expect]]\ncompletion = { before = \"1ms\" }", "real sockets keep no time"),
            ("invariants = [\"completions-in-order\"]", "invariants cannot be checked"),
        ] {
            let text = format!("title = \"t\"\n{text}\n[hosts]\nalice = {{}}\nbob = {{}}\n");
            let plan = Scenario::parse("f", &text).unwrap().plan(&ParameterValues::new(), 1).unwrap();
            let why = LiveScenario::new(&plan).err().unwrap();
            assert!(why.contains(sentence), "{why}");
        }
    }

    #[test]
    fn rate_delay_jitter_and_loss_of_a_link_are_rules_of_its_hosts() {
        let text = "title = \"t\"\n[hosts]\nalice = {}\nbob = {}\n[[link]]\nbetween = [\"alice\", \"bob\"]\n\
                    rate = \"40mbit\"\ndelay = \"2ms\"\njitter = \"1ms\"\nloss = \"1%\"\n";
        let plan = Scenario::parse("f", text).unwrap().plan(&ParameterValues::new(), 1).unwrap();
        let live = LiveScenario::new(&plan).unwrap();
        for host in [0, 1] {
            let actions: Vec<Action> = live.rules(host).iter().map(|(rule, _)| rule.action).collect();
            let bits_per_second = std::num::NonZeroU64::new(40_000_000).unwrap();
            let jitter = Action::Jitter { up_to_ns: 1_000_000 };
            let delay = Action::Delay { ns: 2_000_000 };
            assert_eq!(actions, [Action::Drop, jitter, Action::LimitRate { bits_per_second }, delay]);
        }
    }

    #[test]
    fn the_files_for_programs_can_be_read() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/programs");
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            let scenario = Scenario::parse(&path.display().to_string(), &text).unwrap();
            let plan = scenario.plan(&ParameterValues::new(), 1).unwrap();
            assert!(LiveScenario::new(&plan).is_ok(), "{}", path.display());
        }
    }
}
