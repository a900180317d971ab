//! Faults by their target: packets, a link, a switch, a host, or the verbs and completions of a program.

use super::builder::PlanBuilder;
use super::network::{ecn_marking, pfc_settings};
use super::{Change, FaultKind, FaultPlan, limits};
use crate::source::{Result, join_path};
use crate::spec::{
    CmEventSpec, FaultAction, FaultSpec, FaultTarget, InjectedEvent, LinkDirections, PacketMatch, TriggerSpec,
};
use softhca_engine::AsyncEvent;
use softhca_fabric::{Choice, Direction, LinkState, Repeat, RuleId};
use softhca_types::{FaultPoint, FaultTrigger, ProgramAction, ProgramFault, Verb};

impl PlanBuilder<'_> {
    /// The faults in the order of the file. Ids start at 1 and stay with their fault.
    pub(super) fn faults(&mut self) -> Result<Vec<FaultPlan>> {
        let file = self.file;
        let mut plans: Vec<FaultPlan> = Vec::new();
        for (index, fault) in file.fault.iter().enumerate() {
            let path = format!("fault.{index}");
            let id = RuleId(index as u32 + 1);
            let name = fault.name.clone().unwrap_or_else(|| format!("fault {}", index + 1));
            if plans.iter().any(|other| other.name == name) {
                return Err(self.error_in(&path, "name", format!("another fault has the name {name:?}")));
            }
            let kind = self.fault_kind(fault, id, &path)?;
            let after = match kind {
                FaultKind::Program { .. } => None,
                _ => self.outside_trigger(fault, &join_path(&path, "after"))?,
            };
            let at = self.source.line(&path);
            plans.push(FaultPlan { id, name, optional: fault.optional, after, kind, at });
        }
        for (index, event) in file.data_pkt_events.iter().enumerate() {
            let path = format!("data-pkt-events.{index}");
            let id = RuleId((file.fault.len() + index) as u32 + 1);
            plans.push(self.lumina_fault(event, id, &path)?);
        }
        Ok(plans)
    }

    fn fault_kind(&mut self, fault: &FaultSpec, id: RuleId, path: &str) -> Result<FaultKind> {
        let FaultSpec { on, link, switch, host, qp, verb, .. } = fault;
        let targets = [on.is_some(), link.is_some(), switch.is_some(), host.is_some(), qp.is_some()];
        if targets.iter().filter(|given| **given).count() > 1 {
            return Err(self
                .error_at(path, "a fault has exactly one target")
                .help("give one of on, link, switch, host, qp"));
        }
        let target = match (link, switch, qp, host, verb) {
            (Some(_), ..) => FaultTarget::Link,
            (_, Some(_), ..) => FaultTarget::Switch,
            (_, _, Some(_), ..) => FaultTarget::Completions,
            (_, _, _, Some(_), Some(_)) => FaultTarget::Calls,
            (_, _, _, Some(_), None) => FaultTarget::Host,
            _ if on.is_some() || fault.action.applies_to(FaultTarget::Packets) => FaultTarget::Packets,
            _ => {
                let needed = fault.action.declaration().list_targets(FaultTarget::key);
                return Err(self
                    .error_at(path, "the fault has no target")
                    .help(format!("this action needs {needed}")));
            }
        };
        self.check_target(fault, target, path)?;
        if target != FaultTarget::Packets && fault.packet_match != PacketMatch::default() {
            return Err(self.error_in(path, "match", "`match` requires a packet fault"));
        }
        match target {
            FaultTarget::Packets => {
                self.reject_program_keys(fault, path, "use skip and times")?;
                if fault.at.0 != 0 {
                    let message = "`at` is the time of faults that fire once";
                    return Err(self.error_in(path, "at", message).help("use match = { time = … }"));
                }
                self.packet_fault(fault, id, path)
            }
            FaultTarget::Link => {
                self.reject_program_keys(fault, path, "use `at` or `after`")?;
                let name = link.as_deref().unwrap_or_default();
                let (link, direction) =
                    self.network.link_direction(name, self.source, &join_path(path, "link"))?;
                let changes = self.link_fault(&fault.action, link, direction, &join_path(path, "action"))?;
                self.timed_fault(fault, path, changes)
            }
            FaultTarget::Switch => {
                self.reject_program_keys(fault, path, "use `at` or `after`")?;
                self.switch_fault(fault, path, switch.as_deref().unwrap_or_default())
            }
            FaultTarget::Completions => {
                self.completion_fault(fault, id, path, qp.as_deref().unwrap_or_default())
            }
            FaultTarget::Host | FaultTarget::Calls => {
                let host = self.host(host.as_deref().unwrap_or_default(), path)?;
                match verb {
                    Some(verb) => self.verb_fault(fault, id, path, host, *verb),
                    None => self.host_fault(fault, id, path, host),
                }
            }
        }
    }

    /// Rejects an action that does not apply to the target.
    fn check_target(&self, fault: &FaultSpec, target: FaultTarget, path: &str) -> Result<()> {
        let action = fault.action.declaration();
        if action.targets.contains(&target) {
            return Ok(());
        }
        if target == FaultTarget::Host && action.targets.contains(&FaultTarget::Calls) {
            return Err(self
                .error_at(path, "missing `verb`")
                .help("add the name of the verb: verb = \"post_send\""));
        }
        let (name, fits) = (action.name, action.list_targets(FaultTarget::name));
        let message = format!("`{name}` does not apply to {}: it applies to {fits}", target.name());
        let needed = action.list_targets(FaultTarget::key);
        Err(self.error_in(path, "action", message).help(format!("`{name}` needs {needed}")))
    }

    fn switch_fault(&self, fault: &FaultSpec, path: &str, name: &str) -> Result<FaultKind> {
        let at = join_path(path, "action");
        let switch = self.network.switch_named(name, self.source, &join_path(path, "switch"))?;
        let change = match &fault.action {
            FaultAction::SetBuffer(size) => Change::SwitchBuffer { switch, bytes: size.0 },
            FaultAction::SetEcn(ecn) => {
                Change::SwitchMarking { switch, marking: ecn_marking(ecn, self.source, &at)? }
            }
            FaultAction::SetPfc(pfc) => {
                Change::SwitchPfc { switch, settings: pfc_settings(pfc, self.source, &at)? }
            }
            _ => unreachable!("the action applies to switches"),
        };
        self.timed_fault(fault, path, vec![(0, change)])
    }

    /// A fault of the completions of a queue pair.
    fn completion_fault(
        &mut self,
        fault: &FaultSpec,
        id: RuleId,
        path: &str,
        name: &str,
    ) -> Result<FaultKind> {
        let qp = self.qp(name, &join_path(path, "qp"))?;
        let action = match fault.action {
            FaultAction::SetStatus(status) => ProgramAction::SetStatus(status, fault.vendor_error),
            FaultAction::DelayCompletion(time) => ProgramAction::Hold(time.0),
            FaultAction::BurstCompletions(count) if count < 2 => {
                return Err(self.error_in(path, "action", "a burst has at least 2 completions"));
            }
            FaultAction::BurstCompletions(count) => ProgramAction::Burst(count),
            FaultAction::OverflowCq => ProgramAction::OverflowCq,
            FaultAction::DropNotification => ProgramAction::DropNotification,
            FaultAction::Count => ProgramAction::Count,
            _ => unreachable!("the action applies to completions"),
        };
        for (given, key) in [(fault.object.is_some(), "object"), (fault.verb.is_some(), "verb")] {
            if given {
                return Err(self.error_in(path, key, "`qp` already names the completions"));
            }
        }
        let host = self.qps[qp].host;
        let ordinal = match name.rsplit_once('.').and_then(|(_, number)| number.parse().ok()) {
            Some(number) => number,
            None => self.qps[..=qp].iter().filter(|other| other.host == host).count() as u32,
        };
        self.program_fault(fault, id, path, host, (FaultPoint::Completion, Some(ordinal)), action)
    }

    /// A fault of the calls of a verb.
    fn verb_fault(
        &self,
        fault: &FaultSpec,
        id: RuleId,
        path: &str,
        host: usize,
        verb: Verb,
    ) -> Result<FaultKind> {
        let action = match fault.action {
            FaultAction::Fail(errno) => ProgramAction::Fail(errno),
            FaultAction::RaiseEvent(event) => ProgramAction::Raise(event),
            FaultAction::Kill => ProgramAction::Kill,
            FaultAction::Count => ProgramAction::Count,
            FaultAction::Unmap(region) => ProgramAction::Unmap(region.get()),
            FaultAction::CmEvent(CmEventSpec { event, status }) => {
                if !verb.name().starts_with("rdma_") || verb.object().is_none() {
                    let message = format!("{verb} is not a call on a connection identifier");
                    return Err(self
                        .error_in(path, "action", message)
                        .help("use rdma_resolve_addr, rdma_connect, …"));
                }
                ProgramAction::CmEvent(event, status)
            }
            _ => unreachable!("the action applies to verbs"),
        };
        let raises_on_object = matches!(action, ProgramAction::Raise(event) if event.object().is_some());
        if fault.object.is_some() && verb.object().is_none() && !raises_on_object {
            let message = format!("{verb} is a call on the device: it has no object");
            return Err(self.error_in(path, "object", message).help("use nth"));
        }
        self.program_fault(fault, id, path, host, (FaultPoint::Call(verb), fault.object), action)
    }

    /// A fault of a host, its programs or its device.
    fn host_fault(&self, fault: &FaultSpec, id: RuleId, path: &str, host: usize) -> Result<FaultKind> {
        let at = join_path(path, "action");
        self.reject_program_keys(fault, path, "add `verb`, or use `at` or `after`")?;
        let mut end = None;
        let change = match &fault.action {
            FaultAction::Stall(time) => {
                end = Some((time.0, Change::StallEnd { host }));
                Change::Stall { host, for_ns: time.0 }
            }
            FaultAction::WithholdReceives(time) => Change::WithholdReceives { host, for_ns: time.0 },
            FaultAction::DelayReceives(time) => Change::DelayReceives { host, delay_ns: time.0 },
            FaultAction::Kill => Change::KillProgram { host },
            FaultAction::Restart | FaultAction::KillDaemon | FaultAction::RestartDaemon
                if !self.has_external_programs =>
            {
                return Err(self
                    .error_at(&at, "the programs of this file are its steps and workloads: they have no process")
                    .help("use kill; restart, kill-daemon and restart-daemon are for `softhca exec` and for `command`"));
            }
            FaultAction::Restart => Change::RestartProgram { host },
            FaultAction::KillDaemon => Change::KillDaemon { restart: false },
            FaultAction::RestartDaemon => Change::KillDaemon { restart: true },
            FaultAction::SlowDevice(_) => return self.slow_device(fault, id, path, host),
            FaultAction::RaiseEvent(event) => {
                if *event == InjectedEvent::SrqLimitReached {
                    return Err(self
                        .error_at(&at, "the hosts of a scenario have no shared receive queue")
                        .help("add `verb`, for a program of your own"));
                }
                Change::AsyncEvent { host, event: *event, object: fault.object }
            }
            FaultAction::PauseStorm(storm) => {
                if storm.priority > 7 {
                    return Err(self.error_at(&at, "priorities are 0 to 7"));
                }
                let priority = storm.priority;
                end = storm.duration.map(|time| (time.0, Change::PauseStormEnd { host, priority }));
                Change::PauseStorm { host, priority }
            }
            _ => unreachable!("the action applies to hosts"),
        };
        self.timed_fault(fault, path, [(0, change)].into_iter().chain(end).collect())
    }

    /// Rejects the keys of faults of calls and completions in another fault.
    fn reject_program_keys(&self, fault: &FaultSpec, path: &str, help: &str) -> Result<()> {
        let names_object = fault.host.is_some() && matches!(fault.action, FaultAction::RaiseEvent(_));
        let keys = [
            (fault.verb.is_some(), "verb"),
            (fault.object.is_some() && !names_object, "object"),
            (fault.nth.is_some(), "nth"),
            (fault.process.is_some(), "process"),
            (fault.until.is_some(), "until"),
            (fault.vendor_error.is_some(), "vendor-error"),
        ];
        match keys.into_iter().find(|(given, _)| *given) {
            None => Ok(()),
            Some((_, key)) => {
                let message = format!("`{key}` requires a fault of calls or completions");
                Err(self.error_in(path, key, message).help(help))
            }
        }
    }

    /// The occurrence that a fault of packets, links, switches or hosts waits for.
    fn outside_trigger(&self, fault: &FaultSpec, path: &str) -> Result<Option<FaultTrigger>> {
        let found = self.trigger(fault.after.as_ref(), path)?;
        let help = match &found {
            Some(FaultTrigger::Time(_)) if fault.on.is_some() => "use match = { time = … }",
            Some(FaultTrigger::Time(_)) => "use `at`",
            Some(FaultTrigger::Call(..)) => {
                "add a fault of this verb with a name and action = \"count\", and use after = { fault = … }"
            }
            _ => return Ok(found),
        };
        Err(self.error_at(path, "this fault waits for a step, an event or another fault").help(help))
    }

    /// A fault of the calls or completions of a program.
    fn program_fault(
        &self,
        fault: &FaultSpec,
        id: RuleId,
        path: &str,
        host: usize,
        (point, object): (FaultPoint, Option<u32>),
        action: ProgramAction,
    ) -> Result<FaultKind> {
        if fault.at.0 != 0 {
            let message = "`at` is the time of faults that fire once";
            return Err(self.error_in(path, "at", message).help("use after = { time = … }"));
        }
        if object == Some(0) {
            return Err(self.error_in(path, "object", "objects are counted from 1"));
        }
        if fault.vendor_error.is_some() && !matches!(action, ProgramAction::SetStatus(..)) {
            return Err(self.error_in(path, "vendor-error", "`vendor-error` requires set-status"));
        }
        let mut repeat = self.call_repeat(fault, path)?;
        if let Some(nth) = fault.nth {
            let key = join_path(path, "nth");
            if fault.skip > 0 || fault.times.is_some() || repeat.choice != Choice::All {
                return Err(self.error_at(&key, "give nth, or skip, times, every, pattern and probability"));
            }
            repeat.skip =
                nth.checked_sub(1).ok_or_else(|| self.error_at(&key, "calls are counted from 1"))?;
            repeat.times = Some(1);
        }
        let after = self.trigger(fault.after.as_ref(), &join_path(path, "after"))?;
        let until = self.trigger(fault.until.as_ref(), &join_path(path, "until"))?;
        let process = fault.process.clone();
        let fault = ProgramFault { id: id.0, process, point, object, repeat, after, until, action };
        Ok(FaultKind::Program { host, fault })
    }

    fn trigger(&self, spec: Option<&TriggerSpec>, path: &str) -> Result<Option<FaultTrigger>> {
        let Some(TriggerSpec { verb, nth, event, fault, time, step }) = spec else { return Ok(None) };
        let given = [verb.is_some(), event.is_some(), fault.is_some(), time.is_some(), step.is_some()];
        if given.iter().filter(|given| **given).count() != 1 {
            return Err(self.error_at(path, "give exactly one of verb, event, fault, time, step"));
        }
        if let Some(name) = step {
            let key = join_path(path, "step");
            let index = self.step_with_completion(name, &key)?;
            return Ok(Some(FaultTrigger::Step(index as u32)));
        }
        if nth.is_some() && verb.is_none() {
            return Err(self.error_in(path, "nth", "`nth` requires `verb`"));
        }
        if let Some(verb) = verb {
            return Ok(Some(FaultTrigger::Call(*verb, nth.unwrap_or(1))));
        }
        if let Some(time) = time {
            return Ok(Some(FaultTrigger::Time(time.0)));
        }
        if let Some(event) = event {
            if !AsyncEvent::NAMES.contains(&event.as_str()) {
                let message = format!("{event:?} is not an asynchronous event");
                let names = AsyncEvent::NAMES.join(", ");
                return Err(self.error_in(path, "event", message).help(format!("use one of {names}")));
            }
            return Ok(Some(FaultTrigger::Event(event.clone())));
        }
        let wanted = fault.as_deref().unwrap_or_default();
        let name_of = |(index, fault): (usize, &FaultSpec)| {
            fault.name.clone().unwrap_or_else(|| format!("fault {}", index + 1))
        };
        let names: Vec<String> = self.file.fault.iter().enumerate().map(name_of).collect();
        match names.iter().position(|name| name == wanted) {
            Some(index) => Ok(Some(FaultTrigger::Fault(index as u32 + 1))),
            None => {
                let message = format!("no fault has the name {wanted:?}");
                let names = names.join(", ");
                Err(self.error_in(path, "fault", message).help(format!("the faults are: {names}")))
            }
        }
    }

    fn timed_fault(&self, fault: &FaultSpec, path: &str, changes: Vec<(u64, Change)>) -> Result<FaultKind> {
        if self.file.duration.is_some_and(|ends| fault.at >= ends) {
            return Err(self.error_in(
                path,
                "at",
                "this fault can never fire: it comes after the end of the run",
            ));
        }
        let repeats = fault.times.is_some()
            || fault.every.is_some()
            || fault.pattern.is_some()
            || fault.probability.is_some()
            || fault.burst.is_some()
            || fault.skip > 0;
        if repeats {
            return Err(self
                .error_at(path, "this fault fires once, at its time")
                .help("remove times, every, pattern, probability, burst and skip"));
        }
        Ok(FaultKind::Timed { at_ns: fault.at.0, changes })
    }

    fn link_fault(
        &self,
        action: &FaultAction,
        link: usize,
        direction: Option<Direction>,
        path: &str,
    ) -> Result<Vec<(u64, Change)>> {
        let change = match action {
            FaultAction::LinkDown(down) => {
                // Reversing the ends of the link reverses its directions.
                let ways = match (down.direction, direction) {
                    (LinkDirections::Both, None) => [true, true],
                    (LinkDirections::Both, Some(direction)) => {
                        [direction == Direction::Forward, direction == Direction::Backward]
                    }
                    (LinkDirections::Forward, _) => [true, false],
                    (LinkDirections::Backward, _) => [false, true],
                };
                let change = |state| Change::LinkState { link, directions: ways, state };
                let up = down.duration.map(|time| (time.0, change(LinkState::Up)));
                return Ok([(0, change(LinkState::Down))].into_iter().chain(up).collect());
            }
            FaultAction::Flap(flap) => {
                if flap.times == 0 {
                    return Err(self.error_at(path, "this fault can never fire: times is 0"));
                }
                if flap.times > limits::MAX_FLAPS {
                    let message = format!("times is {}, the maximum is {}", flap.times, limits::MAX_FLAPS);
                    return Err(self.error_at(path, message));
                }
                let change = |state| Change::LinkState { link, directions: [true, true], state };
                let transitions = (0..u64::from(flap.times)).flat_map(|n| {
                    let at = n * (flap.down.0 + flap.up.0);
                    [(at, change(LinkState::Down)), (at + flap.down.0, change(LinkState::Up))]
                });
                return Ok(transitions.collect());
            }
            FaultAction::SetRate(rate) if rate.0 > 0 => Change::LinkRate { link, rate: rate.0 },
            FaultAction::SetRate(_) => {
                return Err(self
                    .error_at(path, "a link with rate 0 carries no packets")
                    .help("use link-down"));
            }
            FaultAction::SetMtu(0) => {
                return Err(self
                    .error_at(path, "a link with MTU 0 carries no packets")
                    .help("use link-down"));
            }
            FaultAction::SetMtu(mtu) => Change::LinkMtu { link, mtu: *mtu },
            _ => unreachable!("the action applies to links"),
        };
        Ok(vec![(0, change)])
    }

    /// Which completions or calls a fault hits. They have no flow, and so no burst state.
    fn call_repeat(&self, fault: &FaultSpec, path: &str) -> Result<Repeat> {
        for (given, key) in [(fault.burst.is_some(), "burst"), (fault.per_flow, "per-flow")] {
            if given {
                let message = format!("`{key}` requires a packet fault");
                return Err(self.error_in(path, key, message).help("use every, pattern or probability"));
            }
        }
        self.repeat(fault, path)
    }
}
