//! Converts `[[expect]]` tables to checks, and describes them in words.

use super::builder::PlanBuilder;
use super::check::{
    Check, CompletionCheck, ConnectionCheck, Expectation, ExpectedMemory, OrderCheck, PacketCheck,
};
use super::{CountingRule, FaultPlan, Node, names};
use crate::quantity::CountRange;
use crate::source::{Result, join_path};
use crate::spec::{
    CompletionExpectation, ConnectionExpectation, CounterExpectation, EventExpectation, ExpectSpec,
    MemoryExpectation, OrderItem, PacketExpectation, PacketMatch, PauseExpectation, StateExpectation,
    SwitchExpectation,
};
use softhca_engine::{AsyncEvent, PayloadMode};
use softhca_fabric::{Action, Direction, InclusiveRange, Repeat, Rule, RuleId, Selector};
use softhca_types::cm::EventType;
use softhca_types::{CompletionOpcode, Counters};

/// First id of counting rules, above the ids of faults.
const FIRST_COUNTING_RULE: u32 = 1 << 20;

const EXPECTATION_KINDS: &str = "give one of completion, state, packet, counter, event, connection, order, memory, goodput, fairness, latency, \
                     finish, switch, pause, verb-error, exit-code";

impl PlanBuilder<'_> {
    /// The expectations of the file, and the counting rules that they need.
    pub(super) fn expectations(
        &mut self,
        expect: &[ExpectSpec],
        faults: &[FaultPlan],
        all: &mut Vec<Expectation>,
        counts: &mut Vec<CountingRule>,
    ) -> Result<()> {
        for (index, expect) in expect.iter().enumerate() {
            let path = format!("expect.{index}");
            let mut found = self.parse_expectation(expect, faults, &path, counts)?;
            match (found.pop(), found.is_empty()) {
                (Some(expectation), true) => {
                    let (sometimes, at) = (expect.sometimes, Some(self.source.line(&path)));
                    all.push(Expectation { sometimes, at, ..expectation });
                }
                (None, _) => {
                    return Err(self.error_at(&path, "the expectation is empty").help(EXPECTATION_KINDS));
                }
                (Some(_), false) => {
                    return Err(self
                        .error_at(&path, "an [[expect]] has exactly one key")
                        .help("split it into two"));
                }
            }
        }
        Ok(())
    }

    /// The expectations of one `[[expect]]`; exactly one in a valid file.
    fn parse_expectation(
        &mut self,
        expect: &ExpectSpec,
        faults: &[FaultPlan],
        path: &str,
        counts: &mut Vec<CountingRule>,
    ) -> Result<Vec<Expectation>> {
        let mut found = Vec::new();
        if let Some(spec) = &expect.completion {
            let (check, text) = self.completion(spec, &join_path(path, "completion"))?;
            let text = format!("{text}, {}", describe_times(check.times.unwrap_or(CountRange::AT_LEAST_ONE)));
            found.push(Expectation::new(text, check.before.is_some(), Check::Completion(check)));
        }
        if let Some(StateExpectation { qp, is }) = &expect.state {
            let at = self.qp(qp, &join_path(path, "state.qp"))?;
            let is = *is;
            found.push(untimed(format!("{qp} ends in {is}"), Check::State { qp: at, is }));
        }
        if let Some(spec) = &expect.packet {
            found.push(self.packet(spec, &join_path(path, "packet"), counts)?);
        }
        if let Some(spec) = &expect.counter {
            found.push(self.counter(spec, &join_path(path, "counter"))?);
        }
        if let Some(spec) = &expect.event {
            let (host, name) = self.event(spec, &join_path(path, "event"))?;
            let times = spec.times.unwrap_or(CountRange::AT_LEAST_ONE);
            let text = format!("{} raises {name}, {}", spec.host, describe_times(times));
            found.push(untimed(text, Check::Event { host, name, times }));
        }
        if let Some(spec) = &expect.connection {
            let (check, text) = self.connection(spec, &join_path(path, "connection"))?;
            let text = format!("{text}, {}", describe_times(check.times));
            let is_timed = spec.before.is_some() || spec.after.is_some();
            found.push(Expectation::new(text, is_timed, Check::Connection(check)));
        }
        if let Some(steps) = &expect.order {
            if steps.is_empty() {
                return Err(self.error_in(path, "order", "an order needs at least one item"));
            }
            let mut checks = Vec::new();
            for (index, step) in steps.iter().enumerate() {
                checks.push(self.order_item(step, faults, &format!("{path}.order.{index}"))?);
            }
            let text = checks.iter().map(OrderCheck::text).collect::<Vec<_>>().join("; then ");
            found.push(untimed(format!("in order: {text}"), Check::Order(checks)));
        }
        if let Some(spec) = &expect.memory {
            found.push(self.memory(spec, &join_path(path, "memory"))?);
        }
        if let Some(spec) = &expect.goodput {
            found.push(self.goodput(spec, &join_path(path, "goodput"))?);
        }
        if let Some(spec) = &expect.fairness {
            found.push(self.fairness(spec, &join_path(path, "fairness"))?);
        }
        if let Some(spec) = &expect.latency {
            found.push(self.latency(spec, &join_path(path, "latency"))?);
        }
        if let Some(spec) = &expect.finish {
            found.push(self.finish(spec, &join_path(path, "finish"))?);
        }
        if let Some(spec) = &expect.switch {
            found.push(self.switch(spec, &join_path(path, "switch"))?);
        }
        if let Some(spec) = &expect.pause {
            found.push(self.pause(spec, &join_path(path, "pause"))?);
        }
        if let Some(spec) = &expect.verb_error {
            let host = self.host(&spec.host, &join_path(path, "verb-error"))?;
            let times = spec.times.unwrap_or(CountRange::AT_LEAST_ONE);
            let errno = spec.errno.map_or("an error".to_owned(), |errno| errno.to_string());
            let text = format!("a verb call of {} fails with {errno}, {}", spec.host, describe_times(times));
            found.push(untimed(text, Check::VerbErrors { host, errno: spec.errno, times }));
        }
        if let Some(code) = expect.exit_code {
            if !self.has_external_programs || !self.commands.is_empty() {
                return Err(self
                    .error_at(
                        &join_path(path, "exit-code"),
                        "only the program of `softhca exec` has this exit code",
                    )
                    .help("a program of the file has its own key: command = { …, exit-code = 3 }"));
            }
            found.push(untimed(format!("the program ends with {code}"), Check::ExitCode(code)));
        }
        Ok(found)
    }

    fn packet(
        &mut self,
        spec: &PacketExpectation,
        path: &str,
        counts: &mut Vec<CountingRule>,
    ) -> Result<Expectation> {
        let link_and_direction = self.link_selector(spec.on.as_deref(), path)?;
        let matching = spec.or(&PacketMatch::default());
        let times = spec.times.unwrap_or(CountRange::AT_LEAST_ONE);
        let selector = match self.selector(&matching, link_and_direction, path) {
            // A packet that must not occur can be impossible.
            Err(problem) if times.min == 0 && problem.message.contains("can never fire") => {
                Selector { time_ns: Some(InclusiveRange { first: 1, last: 0 }), ..Selector::default() }
            }
            other => other?,
        };
        counts.push(counting_rule(link_and_direction, self.network.links.len(), selector, counts.len()));
        let text =
            format!("{}: {}, {}", link_name(spec), names::describe_packets(&matching), describe_times(times));
        let check = Check::Packet { count: counts.len() - 1, times };
        Ok(Expectation::new(text, matching.time.is_some(), check))
    }

    fn counter(&self, spec: &CounterExpectation, path: &str) -> Result<Expectation> {
        let host = self.host(&spec.host, path)?;
        let known: Vec<&str> = Counters::default().iter().map(|(name, _)| name).collect();
        if !known.contains(&spec.name.as_str()) {
            let problem = self.error_in(path, "name", format!("unknown counter {:?}", spec.name));
            return Err(problem.suggest(&spec.name, known));
        }
        let text = format!("counter {} of {} is {}", spec.name, spec.host, spec.is);
        Ok(untimed(text, Check::Counter { host, name: spec.name.clone(), is: spec.is }))
    }

    fn switch(&self, spec: &SwitchExpectation, path: &str) -> Result<Expectation> {
        let switch = self.network.switch_named(&spec.name, self.source, &join_path(path, "name"))?;
        let parts = [
            ("dropped", spec.dropped),
            ("ECN-marked", spec.ecn_marked),
            ("pause frames", spec.pause_frames),
            ("dropped by the watchdog", spec.watchdog_dropped),
            ("maximum queue bytes", spec.max_queue_bytes),
        ];
        let parts_in_words: Vec<String> = parts
            .iter()
            .filter_map(|(word, amount)| amount.map(|amount| format!("{word}: {amount}")))
            .collect();
        if parts_in_words.is_empty() {
            let problem = self.error_at(path, "the expectation about the switch is empty");
            return Err(
                problem.help("give dropped, ecn-marked, pause-frames, watchdog-dropped or max-queue-bytes")
            );
        }
        let text = format!("switch {} {}", spec.name, parts_in_words.join(", "));
        Ok(untimed(text, Check::Switch { switch, spec: spec.clone() }))
    }

    fn pause(&self, spec: &PauseExpectation, path: &str) -> Result<Expectation> {
        let (link, direction) = self.network.link_direction(&spec.on, self.source, &join_path(path, "on"))?;
        let Some(direction) = direction else {
            let problem = self.error_in(path, "on", "pause frames need a direction");
            return Err(problem.help("write \"switch -> alice\""));
        };
        let times = spec.times.unwrap_or(CountRange::AT_LEAST_ONE);
        let text = format!("{}: pause frames, {}", spec.on, describe_times(times));
        Ok(untimed(text, Check::PauseFrames { link, direction, times }))
    }

    fn completion(&mut self, spec: &CompletionExpectation, path: &str) -> Result<(CompletionCheck, String)> {
        let qp = self.optional_qp(spec.qp.as_ref(), path)?;
        let step =
            spec.step.as_ref().map(|name| self.step_named(name, &join_path(path, "step"))).transpose()?;
        let (operation, status) = (spec.op, spec.status);
        let mut text = match (&spec.qp, &spec.step) {
            (Some(qp), Some(step)) => format!("{qp}: step {step:?}"),
            (Some(qp), None) => qp.clone(),
            (None, Some(step)) => format!("step {step:?}"),
            (None, None) => "any queue pair".into(),
        };
        text += ": ";
        text += operation.map_or("a work request", CompletionOpcode::name);
        text += " completes";
        if let Some(status) = status {
            text += &format!(" with {}", status.name());
        }
        if let Some(bytes) = spec.bytes {
            text += &format!(", {} bytes", bytes.0);
        }
        if let Some(immediate) = spec.imm_data {
            text += &format!(", immediate {immediate:#x}");
        }
        if let Some(why) = &spec.reason {
            text += &format!(", reason {why:?}");
        }
        if let Some(before) = spec.before {
            text += &format!(", before {before}");
        }
        let check = CompletionCheck {
            qp,
            step,
            operation,
            status,
            bytes: spec.bytes.map(|size| size.0),
            imm_data: spec.imm_data,
            reason: spec.reason.clone(),
            times: spec.times,
            before: spec.before.map(|time| time.0),
        };
        Ok((check, text))
    }

    fn step_named(&self, name: &str, path: &str) -> Result<usize> {
        let found = self.steps.iter().position(|step| step.name.as_deref() == Some(name));
        found.ok_or_else(|| {
            let names: Vec<&str> = self.steps.iter().filter_map(|step| step.name.as_deref()).collect();
            self.error_at(path, format!("unknown step {name:?}")).suggest(name, names)
        })
    }

    fn event(&self, spec: &EventExpectation, path: &str) -> Result<(usize, String)> {
        let host = self.host(&spec.host, path)?;
        let name = spec.name.replace('-', "_").to_uppercase();
        match AsyncEvent::NAMES.contains(&name.as_str()) {
            true => Ok((host, name)),
            false => Err(self
                .error_in(path, "name", format!("unknown event {:?}", spec.name))
                .suggest(&name, AsyncEvent::NAMES)),
        }
    }

    fn connection(&mut self, spec: &ConnectionExpectation, path: &str) -> Result<(ConnectionCheck, String)> {
        let qp = self.optional_qp(spec.qp.as_ref(), path)?;
        let host = spec.host.as_ref().map(|name| self.host(name, path)).transpose()?;
        if self.has_external_programs {
            return Err(self.error_at(path, "the events of external programs are not visible"));
        }
        if let (Some(at), Some(name)) = (qp, &spec.qp)
            && !self.pairs[self.qps[at].pair].uses_cm
        {
            let message = format!("{name} is connected before the run starts and has no connection events");
            let help = "add a `listen` step for one side of the pair and a `connect` step for the other";
            return Err(self.error_in(path, "qp", message).help(help));
        }
        let kind = spec.event;
        let is_reported = matches!(
            kind,
            EventType::AddressResolved
                | EventType::RouteResolved
                | EventType::ConnectRequest
                | EventType::ConnectError
                | EventType::Unreachable
                | EventType::Rejected
                | EventType::Established
                | EventType::Disconnected
                | EventType::TimewaitExit
        );
        if !is_reported {
            let message = format!("programs of a scenario never receive {}", kind.name());
            return Err(self.error_in(path, "event", message));
        }
        let who = spec.qp.as_deref().or(spec.host.as_deref()).unwrap_or("any program");
        let mut text = format!("{who} receives {}", kind.name().trim_start_matches("RDMA_CM_EVENT_"));
        if let Some(status) = spec.status {
            text += &format!(" with status {status}");
        }
        if let Some(words) = &spec.private_data {
            text += &format!(" and private data {words:?}");
        }
        if let Some(after) = spec.after {
            text += &format!(", from {after}");
        }
        if let Some(before) = spec.before {
            text += &format!(", before {before}");
        }
        let first = spec.after.map_or(0, |time| time.0);
        let last = spec.before.map_or(u64::MAX, |time| time.0.saturating_sub(1));
        let check = ConnectionCheck {
            qp,
            host,
            kind,
            status: spec.status,
            private_data: spec.private_data.as_ref().map(|words| words.clone().into_bytes()),
            times: spec.times.unwrap_or(CountRange::AT_LEAST_ONE),
            during: InclusiveRange { first, last },
        };
        Ok((check, text))
    }

    fn order_item(&mut self, step: &OrderItem, faults: &[FaultPlan], path: &str) -> Result<OrderCheck> {
        let mut found = Vec::new();
        if let Some(spec) = &step.packet {
            let path = join_path(path, "packet");
            let link_and_direction = self.link_selector(spec.on.as_deref(), &path)?;
            let matching = spec.or(&PacketMatch::default());
            let selector = self.selector(&matching, link_and_direction, &path)?;
            let unfit = [
                (selector.message.is_some(), "message"),
                (selector.packet.is_some(), "packet"),
                (selector.priority.is_some(), "priority"),
            ];
            if let Some((_, key)) = unfit.iter().find(|(given, _)| *given) {
                let message =
                    format!("an order cannot use `{key}`: the events of a device do not contain it");
                return Err(self.error_in(&path, key, message));
            }
            let from = link_and_direction.and_then(|(link, direction)| {
                let [first, second] = self.network.links[link].ends;
                match if direction? == Direction::Forward { first } else { second } {
                    Node::Host(host) => Some(host),
                    Node::Switch(_) => None,
                }
            });
            let text = format!("{} ({})", names::describe_packets(&matching), link_name(spec));
            let selector = Selector { direction: None, ..selector };
            found.push(OrderCheck::Packet(PacketCheck { from, selector }, text));
        }
        if let Some(spec) = &step.completion {
            let (check, text) = self.completion(spec, &join_path(path, "completion"))?;
            found.push(OrderCheck::Completion(check, text));
        }
        if let Some(StateExpectation { qp, is }) = &step.state {
            let at = self.qp(qp, &join_path(path, "state.qp"))?;
            let is = *is;
            found.push(OrderCheck::State(at, is, format!("{qp} enters {is}")));
        }
        if let Some(spec) = &step.event {
            let (host, name) = self.event(spec, &join_path(path, "event"))?;
            found.push(OrderCheck::Event(host, name));
        }
        if let Some(spec) = &step.connection {
            let (check, text) = self.connection(spec, &join_path(path, "connection"))?;
            if check.private_data.is_some() {
                let path = join_path(path, "connection.private-data");
                return Err(self
                    .error_at(&path, "the events of a device do not contain private data: remove this key"));
            }
            found.push(OrderCheck::Connection(check, text));
        }
        if let Some(name) = &step.fault {
            let Some(fault) = faults.iter().find(|fault| fault.name == *name) else {
                let problem = self.error_in(path, "fault", format!("unknown fault {name:?}"));
                return Err(problem.suggest(name, faults.iter().map(|fault| fault.name.as_str())));
            };
            found.push(OrderCheck::Fault(fault.id, name.clone()));
        }
        match (found.pop(), found.is_empty()) {
            (Some(check), true) => Ok(check),
            _ => Err(self
                .error_at(path, "each item of an order has exactly one key")
                .help("give one of packet, completion, state, event, connection, fault")),
        }
    }

    fn memory(&mut self, spec: &MemoryExpectation, path: &str) -> Result<Expectation> {
        if self.file.device.payload == Some(PayloadMode::Elided) {
            let message = "packets without payload do not write memory";
            return Err(self.error_at(path, message).help("remove `payload`"));
        }
        let qp = self.qp(&spec.qp, &join_path(path, "qp"))?;
        if self.has_external_programs {
            return Err(self.error_at(path, "the memory of external programs is not visible"));
        }
        let area = spec.area;
        let mut claims = Vec::new();
        if let Some(holds) = &spec.holds {
            claims.push(match holds.as_str() {
                "zeroes" => (ExpectedMemory::Zeroes, "zeroes".to_owned(), None),
                name => {
                    let from = self.qp(name, &join_path(path, "holds"))?;
                    (ExpectedMemory::SourceOf(from), format!("the source of {name}"), None)
                }
            });
        }
        if let Some(hex) = &spec.hex {
            let digits: String = hex.chars().filter(|c| !c.is_whitespace()).collect();
            let pairs = digits
                .as_bytes()
                .chunks(2)
                .map(|pair| std::str::from_utf8(pair).ok().filter(|_| pair.len() == 2));
            let bytes: Option<Vec<u8>> = pairs.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect();
            let Some(bytes) = bytes else {
                return Err(self.error_in(
                    path,
                    "hex",
                    "not a sequence of bytes with two hexadecimal digits each",
                ));
            };
            let length = bytes.len() as u64;
            claims.push((ExpectedMemory::Bytes(bytes), digits, Some(length)));
        }
        if let Some(number) = spec.number {
            claims.push((
                ExpectedMemory::Bytes(number.to_ne_bytes().to_vec()),
                format!("the number {number}"),
                Some(8),
            ));
        }
        let (Some((claim, words, length)), true) = (claims.pop(), claims.is_empty()) else {
            return Err(self
                .error_at(path, "missing expected contents")
                .help("give one of holds, hex, number"));
        };
        let Some(bytes) = length.or(spec.bytes.map(|size| size.0)) else {
            return Err(self.error_at(path, "missing `bytes`").help("add bytes = 4000"));
        };
        let size = self.pairs[self.qps[qp].pair].area_bytes;
        if spec.offset.saturating_add(bytes) > size {
            let message = format!("the range exceeds the {size} bytes of the area");
            return Err(self.error_at(path, message));
        }
        let offset = spec.offset;
        let text = format!("{} bytes at offset {offset} of {}'s {area:?} memory are {words}", bytes, spec.qp)
            .to_lowercase();
        Ok(untimed(text, Check::Memory { qp, area, offset, bytes, claim }))
    }
}

fn untimed(text: String, check: Check) -> Expectation {
    Expectation::new(text, false, check)
}

fn counting_rule(
    link_and_direction: Option<(usize, Option<Direction>)>,
    links: usize,
    selector: Selector,
    index: usize,
) -> CountingRule {
    let id = RuleId(FIRST_COUNTING_RULE + index as u32);
    let links = link_and_direction.map_or_else(|| (0..links).collect(), |(link, _)| vec![link]);
    CountingRule { links, rule: Rule { id, selector, repeat: Repeat::default(), action: Action::Count } }
}

fn link_name(spec: &PacketExpectation) -> &str {
    spec.on.as_deref().unwrap_or("the link")
}

fn describe_times(times: CountRange) -> String {
    match times {
        CountRange { min: 1, max: 1 } => "once".into(),
        CountRange { min: 0, max: 0 } => "never".into(),
        CountRange { min: 1, max: u64::MAX } => "at least once".into(),
        other => format!("{other} times"),
    }
}
