//! Compares the results of a run with its expectations, and describes the differences.

mod convergence;
mod invariants;
mod measurements;
mod order;

use crate::executor::{ObservedCmEvent, ObservedCompletion, Origin, ProgramLog};
use crate::hosts::FinalState;
use crate::plan::{
    Check, CompletionCheck, ConnectionCheck, Expectation, ExpectedMemory, FaultKind, FaultPlan, OrderCheck,
    Plan,
};
use crate::quantity::{CountRange, Time};
use crate::record::{RunRecord, SwitchTotals};
use crate::report::{ExpectationOutcome, Outcome, RuleOutcome, SkippedExpectation, TraceLocation, Verdict};
use crate::source::SourceLine;
use crate::spec::SwitchExpectation;
use crate::verbs::fill_pattern;
use softhca_engine::QpState;
use softhca_fabric::{LinkId, RuleCounters, RuleId, SwitchId};
use softhca_types::Completion;

pub(crate) struct RunResults<'a> {
    pub record: &'a RunRecord,
    pub log: &'a ProgramLog,
    pub end: &'a FinalState,
}

/// Why expectations about time are not judged.
const NO_TIME: &str = "real sockets keep no time";

impl Expectation {
    /// Why the run of an external program cannot be judged by it, if it cannot: only the events of its device are known.
    pub(crate) fn unknown_of_programs(&self) -> Option<&'static str> {
        if self.is_timed {
            return Some(NO_TIME);
        }
        let is_packet = |check: &OrderCheck| matches!(check, OrderCheck::Packet(..));
        match &self.check {
            Check::Order(checks) if checks.iter().any(is_packet) => {
                Some("the packets of real programs are counted, not kept in order")
            }
            Check::Order(checks)
                if checks.iter().any(|check| matches!(check, OrderCheck::Connection(..))) =>
            {
                Some("the connection events of a program are its own")
            }
            Check::Memory { .. } => Some("the memory of a program is its own"),
            Check::Goodput { .. } | Check::Fairness { .. } | Check::Latency { .. } | Check::Finish { .. } => {
                Some("what a program meant to do is not known")
            }
            Check::VerbErrors { .. } => Some("the calls of a program are its own"),
            Check::Connection(_) => Some("the connection events of a program are its own"),
            Check::Switch { .. } | Check::PauseFrames { .. } => Some("switches exist in virtual time only"),
            Check::Completion(_)
            | Check::State { .. }
            | Check::Packet { .. }
            | Check::Counter { .. }
            | Check::Event { .. }
            | Check::ExitCode(_)
            | Check::Order(_) => None,
        }
    }
}

impl RunResults<'_> {
    /// The counters of a rule, summed over the places where it is installed.
    fn rule_counters(&self, id: RuleId) -> RuleCounters {
        let counters = self.end.rule_counters.iter().filter(|(rule, _)| *rule == id);
        counters.fold(RuleCounters::default(), |sum, (_, counters)| RuleCounters {
            matched: sum.matched + counters.matched,
            fired: sum.fired + counters.fired,
        })
    }

    /// How often a fault happened.
    fn fired(&self, fault: &FaultPlan) -> u64 {
        match fault.kind {
            FaultKind::Packets { .. } => self.rule_counters(fault.id).fired,
            FaultKind::Program { .. } => self.record.program_hits.get(&fault.id).copied().unwrap_or(0),
            _ => self.log.fired.get(&fault.id).copied().unwrap_or(0),
        }
    }

    /// Why an expectation cannot be judged, if it cannot. Expectations about external programs are checked when a plan
    /// is loaded.
    fn skip_reason(&self, expectation: &Expectation) -> Option<&'static str> {
        (self.end.in_real_time && expectation.is_timed).then_some(NO_TIME)
    }
}

/// The result of a check: whether it held, what there was, and where to look.
struct CheckResult {
    held: bool,
    detail: String,
    location: Option<TraceLocation>,
}

impl CheckResult {
    fn new(held: bool, detail: impl Into<String>) -> CheckResult {
        CheckResult { held, detail: detail.into(), location: None }
    }

    fn at(mut self, around: Option<TraceLocation>) -> CheckResult {
        self.location = around;
        self
    }

    fn outcome(self, text: &str, at: Option<SourceLine>) -> ExpectationOutcome {
        let CheckResult { held, detail, location } = self;
        ExpectationOutcome { text: text.to_owned(), held, detail, sometimes: false, at, location }
    }
}

/// The beginning of the sentence about a rule that did not fire.
const RULE_PREFIX: &str = "the fault ";

impl ExpectationOutcome {
    /// Whether this says that a rule fires, rather than its effect.
    pub fn is_unfired_rule(&self) -> bool {
        self.text.starts_with(RULE_PREFIX)
    }
}

/// Judges a run. `memory` reads so many bytes of a queue pair's memory from an offset.
pub(crate) fn evaluate(
    plan: &Plan,
    results: &RunResults<'_>,
    memory: &dyn Fn(usize, u64, u64) -> Vec<u8>,
) -> Outcome {
    let evaluator = Evaluator { plan, results };
    let mut expectations = Vec::new();
    let mut skipped = Vec::new();
    for expectation in &plan.expectations {
        if let Some(why) = results.skip_reason(expectation) {
            skipped.push(SkippedExpectation { text: expectation.text.clone(), why: why.to_owned() });
            continue;
        }
        let outcome = evaluator.check(expectation, memory).outcome(&expectation.text, expectation.at.clone());
        expectations.push(ExpectationOutcome { sometimes: expectation.sometimes, ..outcome });
    }
    for invariant in &plan.invariants {
        let (text, result) = evaluator.invariant(*invariant);
        expectations.push(result.outcome(text, None));
    }
    let mut rules = Vec::new();
    for fault in &plan.faults {
        let fired = results.fired(fault);
        rules.push(RuleOutcome { name: fault.name.clone(), fired, optional: fault.optional });
        if fired == 0 && !fault.optional {
            let detail = match results.log.without_effect.contains(&fault.id) {
                true => "it had no effect: the program had ended, or had not begun",
                false => "it never did; set optional = true if it does not have to",
            };
            let result = CheckResult::new(false, detail).at(evaluator.default_location());
            expectations.push(
                result.outcome(&format!("{RULE_PREFIX}{:?} happens", fault.name), Some(fault.at.clone())),
            );
        }
    }
    if let Some(heal) = &plan.heal {
        expectations.push(evaluator.convergence(heal));
    }
    if results.end.timed_out {
        let ended = Time(results.end.ended_ns);
        let detail = format!("events are left after {ended}; set `duration` to stop the run earlier");
        let result = CheckResult::new(false, detail).at(evaluator.default_location());
        expectations.push(result.outcome("the run ends by itself", None));
    }
    let error = results.log.error.clone();
    let is_fulfilled = |expectation: &ExpectationOutcome| expectation.held || expectation.sometimes;
    let verdict = match (&error, expectations.iter().all(is_fulfilled)) {
        (Some(_), _) => Verdict::Error,
        (None, true) => Verdict::Pass,
        (None, false) => Verdict::Fail,
    };
    let (ended_ns, goodput) = (results.end.ended_ns, evaluator.goodputs());
    Outcome { verdict, error, rules, expectations, skipped, ended_ns, goodput, ..Outcome::default() }
}

struct Evaluator<'a> {
    plan: &'a Plan,
    results: &'a RunResults<'a>,
}

impl Evaluator<'_> {
    fn name(&self, qp: usize) -> &str {
        &self.plan.qps[qp].name
    }

    fn location(&self, time_ns: u64, qp: usize) -> Option<TraceLocation> {
        Some(TraceLocation { time_ns, qp: self.plan.qps.get(qp)?.name.clone() })
    }

    /// The end of the first connection, when nothing better is known.
    fn default_location(&self) -> Option<TraceLocation> {
        let last = self.results.log.completions.last().map_or(0, |seen| seen.time_ns);
        (!self.plan.qps.is_empty()).then(|| TraceLocation { time_ns: last, qp: self.name(0).to_owned() })
    }

    fn check(&self, expectation: &Expectation, memory: &dyn Fn(usize, u64, u64) -> Vec<u8>) -> CheckResult {
        let results = self.results;
        match &expectation.check {
            Check::Completion(check) => self.completion(check),
            Check::State { qp, is } => self.state(*qp, *is),
            Check::Packet { count, times } => self.packets(*count, *times),
            Check::Counter { host, name, is } => {
                let found = results.end.counters[*host].iter().find(|(known, _)| known == name);
                let value = found.map_or(0, |(_, value)| value);
                CheckResult::new(is.contains(value), format!("it is {value}")).at(self.default_location())
            }
            Check::Event { host, name, times } => {
                let raised = results.record.async_events.iter().filter(|(_, at, _)| at == host);
                let found = raised.clone().filter(|(_, _, raised)| raised == name).count() as u64;
                let all: Vec<&str> = raised.map(|(_, _, name)| *name).collect();
                let others = if all.is_empty() { "none".to_owned() } else { all.join(", ") };
                CheckResult::new(times.contains(found), format!("{found} of them; all events: {others}"))
                    .at(self.default_location())
            }
            Check::Connection(check) => self.connection(check),
            Check::Order(checks) => self.order(checks),
            Check::Memory { qp, area, offset, bytes, claim } => {
                let from = area.start(self.plan.pair_of(*qp).area_bytes) + offset;
                let found = memory(*qp, from, *bytes);
                self.memory(*qp, *offset, &found, claim)
            }
            Check::Goodput { of, bound, during } => self.check_goodput(of, bound, *during),
            Check::Fairness { of, bound, during } => self.fairness(of, bound, *during),
            Check::Latency { of, percentile, bound } => self.latency(of, *percentile, bound),
            Check::Finish { of, bound } => self.finish(of.as_ref(), bound),
            Check::Switch { switch, spec } => self.switch(*switch, spec),
            Check::PauseFrames { link, direction, times } => {
                let at = self.plan.links[*link].ends[*direction as usize].into();
                let found = results.record.pauses.get(&(LinkId(*link as u32), at)).copied().unwrap_or(0);
                CheckResult::new(times.contains(found), format!("{found} of them"))
                    .at(self.default_location())
            }
            Check::VerbErrors { host, errno, times } => {
                let failed = results.log.failed_calls.iter().filter(|failed| failed.host == *host);
                let found =
                    failed.filter(|failed| errno.is_none_or(|errno| errno == failed.errno)).count() as u64;
                let last = results.log.failed_calls.last().map_or(0, |failed| failed.time_ns);
                let detail = match found {
                    0 => "no call failed so".to_owned(),
                    _ => format!("{found} calls failed so, the last at {}", Time(last)),
                };
                CheckResult::new(times.contains(found), detail).at(self.default_location())
            }
            Check::ExitCode(expected) => match results.log.exit_code {
                Some(code) => CheckResult::new(code == *expected, format!("it ended with {code}")),
                None => CheckResult::new(false, "no program ran"),
            },
        }
    }

    fn switch(&self, switch: usize, spec: &SwitchExpectation) -> CheckResult {
        let totals = self.results.record.switches.get(&SwitchId(switch as u32)).copied().unwrap_or_default();
        let SwitchTotals { dropped, ecn_marked, pause_frames, watchdog_dropped, max_queue_bytes } = totals;
        let found = [
            (spec.dropped, dropped),
            (spec.ecn_marked, ecn_marked),
            (spec.pause_frames, pause_frames),
            (spec.watchdog_dropped, watchdog_dropped),
            (spec.max_queue_bytes, max_queue_bytes),
        ];
        let held = found.iter().all(|(wanted, found)| wanted.is_none_or(|wanted| wanted.contains(*found)));
        let detail = format!(
            "dropped {dropped}, marked {ecn_marked}, {pause_frames} pauses, {watchdog_dropped} dropped by its \
             watchdog, {max_queue_bytes} bytes in its fullest queue"
        );
        CheckResult::new(held, detail).at(self.default_location())
    }

    fn completion_matches(
        &self,
        check: &CompletionCheck,
        qp: usize,
        completion: &Completion,
        origin: Option<Origin>,
        time_ns: u64,
    ) -> bool {
        let why = || {
            let key = (qp, completion.wr_id, completion.opcode.is_receive());
            self.results.record.reasons.get(&key).cloned().unwrap_or_default()
        };
        check.qp.is_none_or(|wanted| wanted == qp)
            && check.step.is_none_or(|step| origin == Some(Origin::Step(step)))
            && check.operation.is_none_or(|operation| operation == completion.opcode)
            && check.status.is_none_or(|status| status == completion.status)
            && check.bytes.is_none_or(|bytes| bytes == u64::from(completion.byte_len))
            && check.imm_data.is_none_or(|immediate| {
                completion.flags.contains(softhca_types::CompletionFlags::IMMEDIATE)
                    && completion.imm_data == immediate
            })
            && check.before.is_none_or(|before| time_ns < before)
            && check.reason.as_ref().is_none_or(|words| why().contains(words.as_str()))
    }

    fn completion(&self, check: &CompletionCheck) -> CheckResult {
        let seen = &self.results.log.completions;
        let matches = |seen: &&ObservedCompletion| {
            self.completion_matches(check, seen.qp, &seen.completion, seen.origin, seen.time_ns)
        };
        let found = seen.iter().filter(matches).count() as u64;
        let times = check.times.unwrap_or(CountRange::AT_LEAST_ONE);
        // The completions that came instead: everything on that queue pair, or of that step.
        let near = |seen: &&ObservedCompletion| {
            check.qp.is_none_or(|qp| qp == seen.qp)
                && check.step.is_none_or(|step| seen.origin == Some(Origin::Step(step)))
        };
        let others: Vec<&ObservedCompletion> = seen.iter().filter(near).collect();
        let mut detail = format!("{found} of them");
        match others[..] {
            [] => detail += "; nothing completed there",
            _ if found as usize == others.len() => {}
            _ => {
                let shown: Vec<String> =
                    others.iter().take(6).map(|seen| self.describe_completion(seen)).collect();
                detail += &format!("; there were: {}", shown.join("; "));
                if others.len() > 6 {
                    detail += &format!("; and {} more", others.len() - 6);
                }
            }
        }
        let place = others.first().map(|seen| (seen.time_ns, seen.qp));
        let (time_ns, qp) = place.unwrap_or((self.results.end.ended_ns, check.qp.unwrap_or(0)));
        CheckResult::new(times.contains(found), detail).at(self.location(time_ns, qp))
    }

    fn connection(&self, check: &ConnectionCheck) -> CheckResult {
        let events = &self.results.log.connections.events;
        let near = |event: &&ObservedCmEvent| {
            check.qp.is_none_or(|qp| event.qp == Some(qp)) && check.host.is_none_or(|host| event.host == host)
        };
        let matches = |event: &&ObservedCmEvent| {
            near(event)
                && event.kind == check.kind
                && check.status.is_none_or(|status| status == event.status)
                && check.private_data.as_ref().is_none_or(|data| event.private_data.starts_with(data))
                && (check.during.first..=check.during.last).contains(&event.time_ns)
        };
        let found = events.iter().filter(matches).count() as u64;
        let all = events.iter().filter(near).map(|event| {
            let name = event.kind.name().trim_start_matches("RDMA_CM_EVENT_");
            let when = match self.results.end.in_real_time {
                true => String::new(),
                false => format!(" at {}", Time(event.time_ns)),
            };
            format!("{name} {}{when}", event.status)
        });
        let all: Vec<String> = all.collect();
        let mut detail = format!("{found} of them; all events: {}", all.join("; "));
        if all.is_empty() {
            detail = "there was no event".into();
        }
        let failed = &self.results.log.failed_calls;
        if let (false, Some(last)) = (check.times.contains(found), failed.last()) {
            detail += &format!("; {} calls failed, the last with {}", failed.len(), last.errno);
        }
        let location = events.iter().filter(near).find_map(|event| Some((event.time_ns, event.qp?)));
        let (time_ns, qp) = location.unwrap_or((self.results.end.ended_ns, check.qp.unwrap_or(0)));
        CheckResult::new(check.times.contains(found), detail).at(self.location(time_ns, qp))
    }

    /// A completion in words.
    fn describe_completion(&self, seen: &ObservedCompletion) -> String {
        let completion = &seen.completion;
        let key = (seen.qp, completion.wr_id, completion.opcode.is_receive());
        let mut text =
            format!("{} #{} {}", completion.opcode.name(), completion.wr_id, completion.status.name());
        if let Some(reason) = self.results.record.reasons.get(&key) {
            text += &format!(" ({reason})");
        }
        if !self.results.end.in_real_time {
            text += &format!(" at {}", Time(seen.time_ns));
        }
        text
    }

    fn state(&self, qp: usize, is: QpState) -> CheckResult {
        let state = self.results.end.states[qp];
        let last = self.results.record.states.iter().rev().find(|(_, at, ..)| *at == qp);
        let mut detail = state.map_or("it is destroyed".to_owned(), |state| format!("it is in {state}"));
        if let Some((time_ns, _, _, reason)) = last {
            detail += &format!(", since {}: {reason}", Time(*time_ns));
        }
        let time_ns = last.map_or(self.results.end.ended_ns, |(time_ns, ..)| *time_ns);
        CheckResult::new(state == Some(is), detail).at(self.location(time_ns, qp))
    }

    fn packets(&self, count: usize, times: CountRange) -> CheckResult {
        let found = self.results.rule_counters(self.plan.counting_rules[count].rule.id).matched;
        let words = match found {
            0 => "none passed".to_owned(),
            1 => "one passed".to_owned(),
            n => format!("{n} passed"),
        };
        let role = self.plan.counting_rules[count].rule.selector.flow_id;
        let fault = self.results.record.fired_at.values().next().map(|(first, _)| *first);
        let time_ns = fault.or(self.results.log.completions.first().map(|seen| seen.time_ns)).unwrap_or(0);
        CheckResult::new(times.contains(found), words)
            .at(self.location(time_ns, role.map_or(0, Plan::qp_of_role)))
    }

    fn memory(&self, qp: usize, offset: u64, found: &[u8], claim: &ExpectedMemory) -> CheckResult {
        let expected = match claim {
            ExpectedMemory::Zeroes => vec![0; found.len()],
            ExpectedMemory::Bytes(bytes) => bytes.clone(),
            ExpectedMemory::SourceOf(from) => {
                let area = self.plan.pair_of(*from).area_bytes as usize;
                let source = fill_pattern(*from, area);
                let start = (offset as usize).min(source.len());
                source[start..].iter().copied().take(found.len()).collect()
            }
        };
        let around = || {
            let last = self
                .results
                .log
                .completions
                .iter()
                .rev()
                .find(|seen| seen.qp == qp || seen.qp == self.plan.qps[qp].peer);
            self.location(last.map_or(0, |seen| seen.time_ns), qp)
        };
        let wrong = expected.iter().zip(found).position(|(expected, found)| expected != found);
        match wrong {
            None if expected.len() == found.len() => CheckResult::new(true, "every byte is right"),
            None => CheckResult::new(false, "it is shorter than that").at(around()),
            Some(at) => {
                let count = expected.iter().zip(found).filter(|(expected, found)| expected != found).count();
                let detail = format!(
                    "{count} of {} bytes differ, the first at offset {}: {:#04x} instead of {:#04x}",
                    found.len(),
                    offset + at as u64,
                    found[at],
                    expected[at]
                );
                CheckResult::new(false, detail).at(around())
            }
        }
    }
}
