//! Converts faults to rules.

use super::builder::PlanBuilder;
use super::network::{ecn_marking, pfc_settings};
use super::{FabricChange, FaultKind, FaultPlan, Flap, SwitchChange, TimedFault, limits};
use crate::quantity::PsnRange;
use crate::source::{Result, join_path};
use crate::spec::{
    ClassName, CmEventSpec, FaultAction, FaultSpec, InjectedEvent, LinkDirections, LuminaEvent, LuminaKind,
    PacketMatch, TriggerSpec,
};
use softhca_engine::AsyncEvent;
use softhca_fabric::{
    Action, BitPosition, Choice, Direction, DownDirections, FieldValue, GilbertElliott, IcrcPolicy,
    InclusiveRange, LinkState, Pattern, Repeat, Rule, RuleId, Scope, Selector,
};
use softhca_queue::{FaultPoint, FaultTrigger, ProgramAction, ProgramFault};
use softhca_wire::Opcode;
use std::num::NonZeroU64;

const ACTION_TARGETS: &str = "drop, duplicate, reorder, delay, limit-rate, jitter, corrupt, mark-ce, rewrite, link-down and count need `on`; slow-device needs `host` or `on`; link-down, \
                              flap, set-rate and set-mtu need `link`; set-buffer, set-ecn and set-pfc need `switch`; stall, \
                              kill, restart, kill-daemon, restart-daemon, withhold-receives, delay-receives, raise-event and pause-storm need `host`; set-status, \
                              delay-completion, burst-completions, overflow-cq and drop-notification need `qp`; fail, unmap and \
                              cm-event need `host` and `verb`";

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
            plans.push(FaultPlan { id, name, optional: fault.optional, after, kind });
        }
        for (index, event) in file.data_pkt_events.iter().enumerate() {
            let path = format!("data-pkt-events.{index}");
            let id = RuleId((file.fault.len() + index) as u32 + 1);
            plans.push(self.lumina_fault(event, id, &path)?);
        }
        Ok(plans)
    }

    /// A fault in the notation of Lumina: relative queue pair, relative PSN, iteration, type.
    fn lumina_fault(&mut self, event: &LuminaEvent, id: RuleId, path: &str) -> Result<FaultPlan> {
        let Some(pair) = self.pairs.get(event.qpn as usize) else {
            let message = format!(
                "qpn {} is out of range: the file has {} pairs, counted from 0",
                event.qpn,
                self.pairs.len()
            );
            return Err(self.error_in(path, "qpn", message));
        };
        let qp = pair.qps[0];
        let host = self.qps[qp].host;
        let matching = PacketMatch {
            class: Some(ClassName::Request),
            qp: Some(self.qps[qp].name.clone()),
            psn: Some(PsnRange::Relative(InclusiveRange::exactly(event.psn))),
            transmission: Some(crate::quantity::IntegerRange(InclusiveRange::exactly(event.iter))),
            ..PacketMatch::default()
        };
        let Some((link, direction)) = self.first_hop(host) else {
            return Err(self.error_at(path, "the requester has no link"));
        };
        let selector = self.selector(&matching, Some((link, Some(direction))), path)?;
        let action = match event.kind {
            LuminaKind::Drop => Action::Drop,
            LuminaKind::Ecn => Action::MarkCe,
            LuminaKind::Corrupt => Action::Corrupt { bit: BitPosition::Random, icrc: IcrcPolicy::Stale },
        };
        let rule = Rule { id, selector, repeat: Repeat::times(1), action };
        let name = format!(
            "{{qpn: {}, psn: {}, type: {:?}, iter: {}}}",
            event.qpn, event.psn, event.kind, event.iter
        )
        .to_lowercase();
        let kind = FaultKind::Packets { links: vec![link], rule };
        Ok(FaultPlan { id, name, optional: false, after: None, kind })
    }

    /// The first link of a host, and its direction.
    fn first_hop(&self, host: usize) -> Option<(usize, Direction)> {
        self.network.links.iter().enumerate().find_map(|(index, link)| {
            let side = link.ends.iter().position(|end| *end == super::Node::Host(host))?;
            Some((index, if side == 0 { Direction::Forward } else { Direction::Backward }))
        })
    }

    fn fault_kind(&mut self, fault: &FaultSpec, id: RuleId, path: &str) -> Result<FaultKind> {
        let FaultSpec { on, link, switch, host, qp, verb: call, .. } = fault;
        let targets = [on.is_some(), link.is_some(), switch.is_some(), host.is_some(), qp.is_some()];
        if targets.iter().filter(|given| **given).count() > 1 {
            return Err(self
                .error_at(path, "a fault has exactly one target")
                .help("give one of on, link, switch, host, qp"));
        }
        let at = join_path(path, "action");
        let source = self.source;
        let misplaced = |fits: &str| {
            Err(source.error_at(&at, format!("this action applies to {fits}")).help(ACTION_TARGETS))
        };
        let counts_calls = matches!(fault.action, FaultAction::Count) && (host.is_some() || qp.is_some());
        let slows_device = matches!(fault.action, FaultAction::SlowDevice(_)) && host.is_some();
        if is_packet_action(&fault.action) && link.is_none() && !counts_calls && !slows_device {
            if switch.is_some() || host.is_some() || qp.is_some() {
                return misplaced("packets on a link");
            }
            self.reject_program_keys(fault, path, "use skip and times")?;
            if fault.at.0 != 0 {
                let message = "`at` is the time of faults that fire once";
                return Err(self.error_in(path, "at", message).help("use match = { time = … }"));
            }
            return self.packet_fault(fault, id, path);
        }
        if fault.packet_match != PacketMatch::default() {
            return Err(self.error_in(path, "match", "`match` requires a packet fault"));
        }
        if link.is_some() || switch.is_some() {
            self.reject_program_keys(fault, path, "use `at` or `after`")?;
        }
        if let Some(name) = link {
            let (link, direction) =
                self.network.link_direction(name, self.source, &join_path(path, "link"))?;
            return self.timed_fault(fault, path, self.link_fault(&fault.action, link, direction, &at)?);
        }
        if let Some(name) = switch {
            let switch = self.network.switch_named(name, self.source, &join_path(path, "switch"))?;
            let change = match &fault.action {
                FaultAction::SetBuffer(size) => SwitchChange::Buffer(size.0),
                FaultAction::SetEcn(ecn) => SwitchChange::Marking(ecn_marking(ecn, self.source, &at)?),
                FaultAction::SetPfc(pfc) => SwitchChange::FlowControl(pfc_settings(pfc, self.source, &at)?),
                _ => return misplaced("other targets than switches"),
            };
            let what = FabricChange::Switch { switch, change };
            return self.timed_fault(fault, path, permanent(what));
        }
        if let Some(name) = qp {
            let qp = self.qp(name, &join_path(path, "qp"))?;
            let action = match fault.action {
                FaultAction::SetStatus(status) => ProgramAction::SetStatus(status, fault.vendor_error),
                FaultAction::DelayCompletion(time) => ProgramAction::Hold(time.0),
                FaultAction::BurstCompletions(count) if count < 2 => {
                    return Err(self.error_at(&at, "a burst has at least 2 completions"));
                }
                FaultAction::BurstCompletions(count) => ProgramAction::Burst(count),
                FaultAction::OverflowCq => ProgramAction::OverflowCq,
                FaultAction::DropNotification => ProgramAction::DropNotification,
                FaultAction::Count => ProgramAction::Count,
                _ => return misplaced("other targets than completions"),
            };
            for (given, key) in [(fault.object.is_some(), "object"), (call.is_some(), "verb")] {
                if given {
                    return Err(self.error_in(path, key, "`qp` already names the completions"));
                }
            }
            let host = self.qps[qp].host;
            let ordinal = match name.rsplit_once('.').and_then(|(_, number)| number.parse().ok()) {
                Some(number) => number,
                None => self.qps[..=qp].iter().filter(|other| other.host == host).count() as u32,
            };
            let point = (FaultPoint::Completion, Some(ordinal));
            return self.program_fault(fault, id, path, host, point, action);
        }
        let Some(name) = host else {
            return Err(self.error_at(path, "the fault has no target").help(ACTION_TARGETS));
        };
        let host = self.host(name, path)?;
        if let Some(verb) = call {
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
                            .error_at(&at, message)
                            .help("use rdma_resolve_addr, rdma_connect, …"));
                    }
                    ProgramAction::CmEvent(event, status)
                }
                _ => return misplaced("other targets than verbs"),
            };
            let raises_on_object = matches!(action, ProgramAction::Raise(event) if event.object().is_some());
            if fault.object.is_some() && verb.object().is_none() && !raises_on_object {
                let message = format!("{verb} is a call on the device: it has no object");
                return Err(self.error_in(path, "object", message).help("use nth"));
            }
            let point = (FaultPoint::Call(*verb), fault.object);
            return self.program_fault(fault, id, path, host, point, action);
        }
        self.reject_program_keys(fault, path, "add `verb`, or use `at` or `after`")?;
        let what = match &fault.action {
            FaultAction::Stall(time) => TimedFault::Stall { host, for_ns: time.0 },
            FaultAction::WithholdReceives(time) => TimedFault::WithholdReceives { host, for_ns: time.0 },
            FaultAction::DelayReceives(time) => TimedFault::DelayReceives { host, delay_ns: time.0 },
            FaultAction::Kill => TimedFault::KillProgram { host },
            FaultAction::Restart | FaultAction::KillDaemon | FaultAction::RestartDaemon
                if !self.has_external_programs =>
            {
                return Err(self
                    .error_at(&at, "the programs of this file are its steps and workloads: they have no process")
                    .help("use kill; restart, kill-daemon and restart-daemon are for `softhca exec` and for `command`"));
            }
            FaultAction::Restart => TimedFault::RestartProgram { host },
            FaultAction::KillDaemon => TimedFault::KillDaemon { restart: false },
            FaultAction::RestartDaemon => TimedFault::KillDaemon { restart: true },
            FaultAction::SlowDevice(_) => return self.slow_device(fault, id, path, host),
            FaultAction::RaiseEvent(event) => {
                if *event == InjectedEvent::SrqLimitReached {
                    return Err(self
                        .error_at(&at, "the hosts of a scenario have no shared receive queue")
                        .help("add `verb`, for a program of your own"));
                }
                permanent(FabricChange::AsyncEvent { host, event: *event, object: fault.object })
            }
            FaultAction::PauseStorm(storm) => {
                if storm.priority > 7 {
                    return Err(self.error_at(&at, "priorities are 0 to 7"));
                }
                let what = FabricChange::PauseStorm { host, priority: storm.priority };
                TimedFault::Fabric { change: what, for_ns: storm.duration.map(|time| time.0) }
            }
            FaultAction::Fail(_) | FaultAction::Unmap(_) | FaultAction::Count => {
                return Err(self
                    .error_at(path, "missing `verb`")
                    .help("add the name of the verb: verb = \"post_send\""));
            }
            _ => return misplaced("other targets than hosts"),
        };
        self.timed_fault(fault, path, what)
    }

    /// A device that sends its packets slowly: a rule on its link.
    fn slow_device(&self, fault: &FaultSpec, id: RuleId, path: &str, host: usize) -> Result<FaultKind> {
        if fault.at.0 != 0 {
            let message = "a slow device is slow from the beginning, or from what it waits for";
            return Err(self.error_in(path, "at", message).help("use after = { … }"));
        }
        let of_host = |link: &&super::LinkPlan| link.ends.contains(&super::Node::Host(host));
        let (Some((link, direction)), 1) =
            (self.first_hop(host), self.network.links.iter().filter(of_host).count())
        else {
            return Err(self.error_in(path, "host", "a slow device has one link"));
        };
        let selector = Selector { direction: Some(direction), ..Selector::default() };
        let action = self.packet_action(&fault.action, &selector, &join_path(path, "action"))?;
        let rule = Rule { id, selector, repeat: self.repeat(fault, path)?, action };
        Ok(FaultKind::Packets { links: vec![link], rule })
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

    /// What a fault of packets, links, switches or hosts waits for.
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

    fn timed_fault(&self, fault: &FaultSpec, path: &str, what: TimedFault) -> Result<FaultKind> {
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
        Ok(FaultKind::Timed { at_ns: fault.at.0, fault: what })
    }

    fn link_fault(
        &self,
        action: &FaultAction,
        link: usize,
        direction: Option<Direction>,
        path: &str,
    ) -> Result<TimedFault> {
        Ok(match action {
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
                let for_ns = down.duration.map(|time| time.0);
                TimedFault::Fabric {
                    change: FabricChange::LinkState { link, directions: ways, state: LinkState::Down },
                    for_ns,
                }
            }
            FaultAction::Flap(flap) => {
                if flap.times == 0 {
                    return Err(self.error_at(path, "this fault can never fire: times is 0"));
                }
                if flap.times > limits::MAX_FLAPS {
                    let message = format!("times is {}, the maximum is {}", flap.times, limits::MAX_FLAPS);
                    return Err(self.error_at(path, message));
                }
                TimedFault::Flap(Flap { link, down_ns: flap.down.0, up_ns: flap.up.0, times: flap.times })
            }
            FaultAction::SetRate(rate) if rate.0 > 0 => {
                permanent(FabricChange::LinkRate { link, rate: rate.0 })
            }
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
            FaultAction::SetMtu(mtu) => permanent(FabricChange::LinkMtu { link, mtu: *mtu }),
            _ => return Err(self.error_at(path, "this action does not apply to links").help(ACTION_TARGETS)),
        })
    }

    fn packet_fault(&mut self, fault: &FaultSpec, id: RuleId, path: &str) -> Result<FaultKind> {
        let way = self.link_selector(fault.on.as_deref(), path)?;
        let selector = self.selector(&fault.packet_match, way, &join_path(path, "match"))?;
        let action = self.packet_action(&fault.action, &selector, &join_path(path, "action"))?;
        let repeat = self.repeat(fault, path)?;
        let links = match way {
            Some((link, _)) => vec![link],
            None => (0..self.network.links.len()).collect(),
        };
        Ok(FaultKind::Packets { links, rule: Rule { id, selector, repeat, action } })
    }

    fn packet_action(&self, requested: &FaultAction, selector: &Selector, path: &str) -> Result<Action> {
        Ok(match requested {
            FaultAction::Count => Action::Count,
            FaultAction::Drop => Action::Drop,
            FaultAction::Duplicate(0) => return Err(self.error_at(path, "duplicate = 0 has no effect")),
            FaultAction::Duplicate(copies) if *copies > limits::MAX_COPIES => {
                let message = format!("{copies} copies of a packet, the maximum is {}", limits::MAX_COPIES);
                return Err(self.error_at(path, message));
            }
            FaultAction::Duplicate(copies) => Action::Duplicate { copies: *copies },
            FaultAction::Reorder(reorder) => Action::Reorder { by: reorder.by, within_ns: reorder.within.0 },
            FaultAction::Delay(time) => Action::Delay { ns: time.0 },
            FaultAction::LimitRate(rate) => match NonZeroU64::new(rate.0) {
                Some(bits_per_second) => Action::LimitRate { bits_per_second },
                None => return Err(self.error_at(path, "no packet passes at rate 0").help("use drop")),
            },
            FaultAction::SlowDevice(time) if time.0 == 0 => {
                return Err(self.error_at(path, "a device that takes no time for a packet is not slow"));
            }
            FaultAction::SlowDevice(time) => Action::PacketTime { ns: time.0 },
            FaultAction::Jitter(time) => Action::Jitter { up_to_ns: time.0 },
            FaultAction::Corrupt(corruption) => {
                let place = match (corruption.bit, corruption.payload_bit) {
                    (None, None) => BitPosition::Random,
                    (Some(bit), None) => BitPosition::Bit(bit),
                    (None, Some(bit)) => BitPosition::PayloadBit(bit),
                    (Some(_), Some(_)) => {
                        return Err(self.error_at(path, "give `bit` or `payload-bit`, not both"));
                    }
                };
                Action::Corrupt {
                    bit: place,
                    icrc: if corruption.fix_icrc { IcrcPolicy::Recomputed } else { IcrcPolicy::Stale },
                }
            }
            FaultAction::MarkCe => Action::MarkCe,
            FaultAction::Rewrite(rewrite) => {
                let field = rewrite.field;
                let value = match (rewrite.value, rewrite.add) {
                    (Some(to), None) => FieldValue::Set(to),
                    (None, Some(plus)) => FieldValue::Add(plus),
                    _ => {
                        return Err(self.error_at(path, "give either `value` or `add`"));
                    }
                };
                if let FieldValue::Set(to) = value
                    && field.width() < 64
                    && to >> field.width() != 0
                {
                    return Err(self
                        .error_at(path, format!("{to:#x} exceeds the {} bits of the field", field.width())));
                }
                let possible = |opcode: &Opcode| {
                    field.is_in(*opcode)
                        && selector.classes.is_none_or(|classes| classes.may_contain(*opcode))
                        && (selector.opcodes.is_empty() || selector.opcodes.contains(opcode))
                };
                if !Opcode::all().any(|opcode| possible(&opcode)) {
                    return Err(
                        self.error_at(path, "this rule can never fire: no matching packet has this field")
                    );
                }
                Action::Rewrite { field, value }
            }
            FaultAction::LinkDown(down) => {
                let cut = if down.direction == LinkDirections::Both {
                    DownDirections::BothWays
                } else {
                    DownDirections::OneWay
                };
                Action::LinkDown {
                    directions: cut,
                    for_ns: down.duration.map_or(u64::MAX / 2, |time| time.0),
                }
            }
            _ => {
                return Err(self
                    .error_at(path, "this action does not apply to packets")
                    .help(ACTION_TARGETS));
            }
        })
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

    fn repeat(&self, fault: &FaultSpec, path: &str) -> Result<Repeat> {
        let never =
            |key: &str, why: &str| self.error_in(path, key, format!("this rule can never fire: {why}"));
        let given = [
            fault.every.is_some(),
            fault.pattern.is_some(),
            fault.probability.is_some(),
            fault.burst.is_some(),
        ];
        if given.iter().filter(|given| **given).count() > 1 {
            return Err(self.error_at(path, "give one of every, pattern, probability, burst"));
        }
        if fault.times == Some(0) {
            return Err(never("times", "times is 0"));
        }
        let mut choice = Choice::All;
        if let Some(every) = fault.every {
            choice = Choice::Every(NonZeroU64::new(every).ok_or_else(|| never("every", "every is 0"))?);
        }
        if let Some(text) = &fault.pattern {
            let pattern =
                Pattern::parse(text).map_err(|why| self.error_in(path, "pattern", why.to_string()))?;
            if pattern.never_hits() {
                return Err(never("pattern", "the pattern has no X"));
            }
            choice = Choice::Pattern(pattern);
        }
        if let Some(share) = fault.probability {
            if share.0 == 0 {
                return Err(never("probability", "the probability is 0"));
            }
            choice = Choice::Probability { per_billion: share.0 };
        }
        if let Some(burst) = fault.burst {
            if burst.good.0 == 0 && (burst.enter.0 == 0 || burst.bad.0 == 0) {
                return Err(never("burst", "neither state has hits"));
            }
            choice = Choice::Burst(GilbertElliott {
                good_to_bad: burst.enter.0,
                bad_to_good: burst.leave.0,
                hit_in_good: burst.good.0,
                hit_in_bad: burst.bad.0,
            });
        }
        let scope = if fault.per_flow { Scope::Flow } else { Scope::Rule };
        Ok(Repeat { skip: fault.skip, times: fault.times, choice, scope })
    }
}

fn is_packet_action(action: &FaultAction) -> bool {
    matches!(
        action,
        FaultAction::Count
            | FaultAction::Drop
            | FaultAction::Duplicate(_)
            | FaultAction::Reorder(_)
            | FaultAction::Delay(_)
            | FaultAction::LimitRate(_)
            | FaultAction::SlowDevice(_)
            | FaultAction::Jitter(_)
            | FaultAction::Corrupt(_)
            | FaultAction::MarkCe
            | FaultAction::Rewrite(_)
            | FaultAction::LinkDown(_)
    )
}

/// A change that is not reverted.
const fn permanent(what: FabricChange) -> TimedFault {
    TimedFault::Fabric { change: what, for_ns: None }
}
