//! Holds what happened against what was expected, and says in plain words where they differ.

mod invariants;

use crate::language::SwitchExpectation;
use crate::plan::{
    Bound, Check, CompletionCheck, ConnectionCheck, Expectation, FlowKind, MemoryClaim, Node, OrderCheck,
    Plan, Subject,
};
use crate::play::{Heard, Origin, Play, Seen};
use crate::quantity::{Amount, Rate, Time};
use crate::record::{Moment, Record, SwitchDeeds, Told};
use crate::report::{Around, ExpectationOutcome, Outcome, RuleOutcome, Skipped, Verdict};
use crate::verbs::pattern;
use softhca_engine::State;
use softhca_fabric::{self as fabric, CableId, Direction, HostId, RuleId, Span, SwitchId};
use softhca_queue::{Completion, Counters};
use std::collections::BTreeMap;

/// Everything that a driver found out.
pub(crate) struct Evidence<'a> {
    pub record: &'a Record,
    pub play: &'a Play<'a>,
    /// Packets that each counting rule saw.
    pub counted: Vec<u64>,
    /// How often each fault happened.
    pub fired: BTreeMap<RuleId, u64>,
    /// The counters of every host.
    pub counters: Vec<Counters>,
    /// The states of all queue pairs; none for those that are gone.
    pub states: Vec<Option<State>>,
    /// When the run ended.
    pub ended_ns: u64,
    /// The run did not end by itself.
    pub is_stuck: bool,
    /// Time means nothing.
    pub in_real_time: bool,
    /// Real programs did the work: what their cards told is all that is known.
    pub of_programs: bool,
}

impl Evidence<'_> {
    /// Why an expectation cannot be judged, if it cannot.
    fn cannot_tell(&self, expectation: &Expectation) -> Option<&'static str> {
        if self.in_real_time && expectation.is_timed {
            return Some("real sockets keep no time");
        }
        let is_packet = |check: &OrderCheck| matches!(check, OrderCheck::Packet(..));
        match &expectation.check {
            _ if !self.of_programs => None,
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
            Check::Verbs { .. } => Some("the calls of a program are its own"),
            Check::Connection(_) => Some("the connection events of a program are its own"),
            Check::Switch { .. } | Check::Pause { .. } => Some("switches exist in virtual time only"),
            Check::Completion(_)
            | Check::State { .. }
            | Check::Packet { .. }
            | Check::Counter { .. }
            | Check::Event { .. }
            | Check::Order(_) => None,
        }
    }
}

/// What a check found: whether it held, what there was, and where to look.
struct Finding {
    held: bool,
    detail: String,
    around: Option<Around>,
}

impl Finding {
    fn new(held: bool, detail: impl Into<String>) -> Finding {
        Finding { held, detail: detail.into(), around: None }
    }

    fn at(mut self, around: Option<Around>) -> Finding {
        self.around = around;
        self
    }
}

/// The beginning of the sentence about a rule that did not fire.
const RULE: &str = "the fault ";

impl ExpectationOutcome {
    /// Whether this says that a rule fires, rather than what comes of it.
    pub fn is_about_a_rule(&self) -> bool {
        self.text.starts_with(RULE)
    }
}

/// Judges a run. `memory` reads so many bytes of a queue pair's memory from an offset.
pub(crate) fn judge(
    plan: &Plan,
    evidence: &Evidence<'_>,
    memory: &mut dyn FnMut(usize, u64, u64) -> Vec<u8>,
) -> Outcome {
    let judge = Judge { plan, evidence };
    let mut expectations = Vec::new();
    let mut skipped = Vec::new();
    for expectation in &plan.expectations {
        if let Some(why) = evidence.cannot_tell(expectation) {
            skipped.push(Skipped { text: expectation.text.clone(), why: why.to_owned() });
            continue;
        }
        let Finding { held, detail, around } = judge.check(expectation, memory);
        expectations.push(ExpectationOutcome { text: expectation.text.clone(), held, detail, around });
    }
    for invariant in &plan.invariants {
        let (text, Finding { held, detail, around }) = judge.invariant(*invariant);
        if evidence.of_programs {
            let why = "the packets of real programs are counted, not kept in order".to_owned();
            skipped.push(Skipped { text: text.to_owned(), why });
            continue;
        }
        expectations.push(ExpectationOutcome { text: text.to_owned(), held, detail, around });
    }
    let mut rules = Vec::new();
    for fault in &plan.faults {
        let fired = evidence.fired.get(&fault.id).copied().unwrap_or(0);
        rules.push(RuleOutcome { name: fault.name.clone(), fired, optional: fault.optional });
        if fired == 0 && !fault.optional {
            expectations.push(ExpectationOutcome {
                text: format!("{RULE}{:?} happens", fault.name),
                held: false,
                detail: "it never did; if it need not, say optional = true".into(),
                around: judge.somewhere(),
            });
        }
    }
    if evidence.is_stuck {
        expectations.push(ExpectationOutcome {
            text: "the run ends by itself".into(),
            held: false,
            detail: format!(
                "after {} it still went on; say `ends` if that is meant",
                Time(evidence.ended_ns)
            ),
            around: judge.somewhere(),
        });
    }
    let error = evidence.play.broken.clone();
    let verdict = match (&error, expectations.iter().all(|expectation| expectation.held)) {
        (Some(_), _) => Verdict::Error,
        (None, true) => Verdict::Pass,
        (None, false) => Verdict::Fail,
    };
    Outcome {
        verdict,
        error,
        rules,
        expectations,
        skipped,
        trace_sha256: None,
        order_sha256: None,
        story: None,
        ended_ns: evidence.ended_ns,
        goodput: judge.goodputs(),
        artefacts: None,
    }
}

struct Judge<'a> {
    plan: &'a Plan,
    evidence: &'a Evidence<'a>,
}

impl Judge<'_> {
    fn name(&self, qp: usize) -> &str {
        &self.plan.qps[qp].name
    }

    fn around(&self, time_ns: u64, qp: usize) -> Option<Around> {
        Some(Around { time_ns, qp: self.plan.qps.get(qp)?.name.clone() })
    }

    /// The end of the first connection, when nothing better is known.
    fn somewhere(&self) -> Option<Around> {
        let last = self.evidence.play.seen.last().map_or(0, |seen| seen.time_ns);
        (!self.plan.qps.is_empty()).then(|| Around { time_ns: last, qp: self.name(0).to_owned() })
    }

    fn check(
        &self,
        expectation: &Expectation,
        memory: &mut dyn FnMut(usize, u64, u64) -> Vec<u8>,
    ) -> Finding {
        let evidence = self.evidence;
        match &expectation.check {
            Check::Completion(check) => self.completion(check),
            Check::State { qp, is } => self.state(*qp, *is),
            Check::Packet { count, times } => self.packets(*count, *times),
            Check::Counter { host, name, is } => {
                let found = evidence.counters[*host].iter().find(|(known, _)| known == name);
                let value = found.map_or(0, |(_, value)| value);
                Finding::new(is.holds(value), format!("it is {value}")).at(self.somewhere())
            }
            Check::Event { host, name, times } => {
                let raised = evidence.record.raised.iter().filter(|(_, at, _)| at == host);
                let found = raised.clone().filter(|(_, _, raised)| raised == name).count() as u64;
                let all: Vec<&str> = raised.map(|(_, _, name)| *name).collect();
                let others = if all.is_empty() { "none".to_owned() } else { all.join(", ") };
                Finding::new(times.holds(found), format!("{found} of them; all events: {others}"))
                    .at(self.somewhere())
            }
            Check::Connection(check) => self.connection(check),
            Check::Order(checks) => self.order(checks),
            Check::Memory { qp, area, offset, bytes, claim } => {
                let from = area.start(self.plan.pair_of(*qp).area) + offset;
                let found = memory(*qp, from, *bytes);
                self.memory(*qp, *offset, &found, claim)
            }
            Check::Goodput { of, bound, during } => {
                let rate = self.goodput(of, *during);
                Finding::new(holds(bound, rate), format!("it is {}", Rate(rate))).at(self.somewhere())
            }
            Check::Fairness { of, bound, during } => {
                let rates: Vec<u64> = of.iter().map(|subject| self.goodput(subject, *during)).collect();
                let index = jain(&rates);
                let shares: Vec<String> = of
                    .iter()
                    .zip(&rates)
                    .map(|(subject, rate)| format!("{} {}", subject.name, Rate(*rate)))
                    .collect();
                let fine = bound.at_least.is_none_or(|least| index >= least)
                    && bound.at_most.is_none_or(|most| index <= most);
                Finding::new(fine, format!("it is {index:.3}: {}", shares.join(", "))).at(self.somewhere())
            }
            Check::Latency { of, percentile, bound } => self.latency(of, *percentile, bound),
            Check::Finish { of, bound } => self.finish(of.as_ref(), bound),
            Check::Switch { switch, spec } => self.switch(*switch, spec),
            Check::Pause { cable, direction, times } => {
                let at = match self.plan.cables[*cable].ends[*direction as usize] {
                    Node::Host(host) => fabric::Node::Host(HostId(host as u32)),
                    Node::Switch(switch) => fabric::Node::Switch(SwitchId(switch as u32)),
                };
                let found = evidence.record.pauses.get(&(CableId(*cable as u32), at)).copied().unwrap_or(0);
                Finding::new(times.holds(found), format!("{found} of them")).at(self.somewhere())
            }
            Check::Verbs { host, errno, times } => {
                let failed = evidence.play.failed.iter().filter(|failed| failed.host == *host);
                let found =
                    failed.filter(|failed| errno.is_none_or(|errno| errno == failed.errno)).count() as u64;
                let last = evidence.play.failed.last().map_or(0, |failed| failed.time_ns);
                let detail = match found {
                    0 => "no call failed so".to_owned(),
                    _ => format!("{found} calls failed so, the last at {}", Time(last)),
                };
                Finding::new(times.holds(found), detail).at(self.somewhere())
            }
        }
    }

    fn switch(&self, switch: usize, spec: &SwitchExpectation) -> Finding {
        let deeds = self.evidence.record.switches.get(&SwitchId(switch as u32)).copied().unwrap_or_default();
        let SwitchDeeds { dropped, marked, paused, watchdog, held } = deeds;
        let held_up = [
            (spec.dropped, dropped),
            (spec.marked, marked),
            (spec.paused, paused),
            (spec.watchdog, watchdog),
            (spec.held, held),
        ];
        let fine = held_up.iter().all(|(wanted, found)| wanted.is_none_or(|wanted| wanted.holds(*found)));
        let detail = format!(
            "dropped {dropped}, marked {marked}, {paused} pauses, {watchdog} dropped by its watchdog, \
             {held} bytes in its fullest queue"
        );
        Finding::new(fine, detail).at(self.somewhere())
    }

    fn is_it(
        &self,
        check: &CompletionCheck,
        qp: usize,
        completion: &Completion,
        origin: Option<Origin>,
        time_ns: u64,
    ) -> bool {
        let why = || {
            let key = (qp, completion.id, completion.operation.is_receive());
            self.evidence.record.reasons.get(&key).cloned().unwrap_or_default()
        };
        check.qp.is_none_or(|wanted| wanted == qp)
            && check.step.is_none_or(|step| origin == Some(Origin::Step(step)))
            && check.operation.is_none_or(|operation| operation == completion.operation)
            && check.status.is_none_or(|status| status == completion.status)
            && check.bytes.is_none_or(|bytes| bytes == u64::from(completion.bytes))
            && check.immediate.is_none_or(|immediate| {
                completion.flags.contains(softhca_queue::CompletionFlags::IMMEDIATE)
                    && completion.immediate == immediate
            })
            && check.before.is_none_or(|before| time_ns < before)
            && check.why.as_ref().is_none_or(|words| why().contains(words.as_str()))
    }

    fn completion(&self, check: &CompletionCheck) -> Finding {
        let seen = &self.evidence.play.seen;
        let matches = |seen: &&Seen| self.is_it(check, seen.qp, &seen.completion, seen.origin, seen.time_ns);
        let found = seen.iter().filter(matches).count() as u64;
        let times = check.times.unwrap_or(Amount::SOME);
        // What came instead: everything on that queue pair, or of that step.
        let near = |seen: &&Seen| {
            check.qp.is_none_or(|qp| qp == seen.qp)
                && check.step.is_none_or(|step| seen.origin == Some(Origin::Step(step)))
        };
        let others: Vec<&Seen> = seen.iter().filter(near).collect();
        let mut detail = format!("{found} of them");
        match others[..] {
            [] => detail += "; nothing completed there",
            _ if found as usize == others.len() => {}
            _ => {
                let shown: Vec<String> = others.iter().take(6).map(|seen| self.told(seen)).collect();
                detail += &format!("; there were: {}", shown.join("; "));
                if others.len() > 6 {
                    detail += &format!("; and {} more", others.len() - 6);
                }
            }
        }
        let place = others.first().map(|seen| (seen.time_ns, seen.qp));
        let (time_ns, qp) = place.unwrap_or((self.evidence.ended_ns, check.qp.unwrap_or(0)));
        Finding::new(times.holds(found), detail).at(self.around(time_ns, qp))
    }

    fn connection(&self, check: &ConnectionCheck) -> Finding {
        let heard = &self.evidence.play.connections.heard;
        let near = |heard: &&Heard| {
            check.qp.is_none_or(|qp| heard.qp == Some(qp)) && check.host.is_none_or(|host| heard.host == host)
        };
        let matches = |heard: &&Heard| {
            near(heard)
                && heard.kind == check.kind
                && check.status.is_none_or(|status| status == heard.status)
                && check.private_data.as_ref().is_none_or(|words| heard.private_data.starts_with(words))
                && (check.during.first..=check.during.last).contains(&heard.time_ns)
        };
        let found = heard.iter().filter(matches).count() as u64;
        let told = heard.iter().filter(near).map(|heard| {
            let name = heard.kind.name().trim_start_matches("RDMA_CM_EVENT_");
            let when = match self.evidence.in_real_time {
                true => String::new(),
                false => format!(" at {}", Time(heard.time_ns)),
            };
            format!("{name} {}{when}", heard.status)
        });
        let told: Vec<String> = told.collect();
        let mut detail = format!("{found} of them; there were: {}", told.join("; "));
        if told.is_empty() {
            detail = "nothing was heard there".into();
        }
        let failed = &self.evidence.play.failed;
        if let (false, Some(last)) = (check.times.holds(found), failed.last()) {
            detail += &format!("; {} calls failed, the last with {:?}", failed.len(), last.errno);
        }
        let place = heard.iter().filter(near).find_map(|heard| Some((heard.time_ns, heard.qp?)));
        let (time_ns, qp) = place.unwrap_or((self.evidence.ended_ns, check.qp.unwrap_or(0)));
        Finding::new(check.times.holds(found), detail).at(self.around(time_ns, qp))
    }

    /// A completion in words.
    fn told(&self, seen: &Seen) -> String {
        let completion = &seen.completion;
        let key = (seen.qp, completion.id, completion.operation.is_receive());
        let mut text =
            format!("{} #{} {}", completion.operation.name(), completion.id, completion.status.name());
        if let Some(reason) = self.evidence.record.reasons.get(&key) {
            text += &format!(" ({reason})");
        }
        if !self.evidence.in_real_time {
            text += &format!(" at {}", Time(seen.time_ns));
        }
        text
    }

    fn state(&self, qp: usize, is: State) -> Finding {
        let state = self.evidence.states[qp];
        let last = self.evidence.record.states.iter().rev().find(|(_, at, ..)| *at == qp);
        let mut detail = state.map_or("it is gone".to_owned(), |state| format!("it is in {state}"));
        if let Some((time_ns, _, _, reason)) = last {
            detail += &format!(", since {}: {reason}", Time(*time_ns));
        }
        let time_ns = last.map_or(self.evidence.ended_ns, |(time_ns, ..)| *time_ns);
        Finding::new(state == Some(is), detail).at(self.around(time_ns, qp))
    }

    fn packets(&self, count: usize, times: Amount) -> Finding {
        let found = self.evidence.counted[count];
        let words = match found {
            0 => "none passed".to_owned(),
            1 => "one passed".to_owned(),
            n => format!("{n} passed"),
        };
        let role = self.plan.counts[count].rule.selector.role;
        let fault = self.evidence.record.fired_at.values().next().map(|(first, _)| *first);
        let time_ns = fault.or(self.evidence.play.seen.first().map(|seen| seen.time_ns)).unwrap_or(0);
        Finding::new(times.holds(found), words).at(self.around(time_ns, role.map_or(0, Plan::of_role)))
    }

    fn order(&self, checks: &[OrderCheck]) -> Finding {
        let mut left = checks;
        let mut last: Option<&Told> = None;
        for told in &self.evidence.record.story {
            let Some(first) = left.first() else { break };
            if self.happens(first, told) {
                left = &left[1..];
                last = Some(told);
            }
        }
        let (time_ns, qp) = last.map_or((0, 0), |told| (told.time_ns, told.qp.unwrap_or(0)));
        match left.first() {
            None => Finding::new(true, format!("all {} did", checks.len())),
            Some(missing) => {
                let behind = match checks.len() - left.len() {
                    0 => "it never came".to_owned(),
                    n => format!("it did not come after {}", checks[n - 1].text()),
                };
                Finding::new(false, format!("missing: {}; {behind}", missing.text()))
                    .at(self.around(time_ns, qp))
            }
        }
    }

    fn happens(&self, check: &OrderCheck, told: &Told) -> bool {
        match (check, &told.moment) {
            (OrderCheck::Packet(look, _), Moment::Sent { sighting }) => {
                look.from.is_none_or(|host| told.host == Some(host))
                    && look.selector.matches(told.time_ns, Direction::Forward, sighting)
            }
            (OrderCheck::Completion(check, _), Moment::Completed { completion }) => {
                let Some(qp) = told.qp else { return false };
                let seen = &self.evidence.play.seen;
                let same = |seen: &&Seen| {
                    seen.qp == qp
                        && seen.completion.id == completion.id
                        && seen.completion.operation.is_receive() == completion.operation.is_receive()
                };
                let origin = seen.iter().find(same).and_then(|seen| seen.origin);
                self.is_it(check, qp, completion, origin, told.time_ns)
            }
            (OrderCheck::State(qp, is, _), Moment::State { to }) => told.qp == Some(*qp) && to == is,
            (OrderCheck::Event(host, name), Moment::Raised { name: raised }) => {
                told.host == Some(*host) && name == raised
            }
            (OrderCheck::Connection(check, _), Moment::Connection { id, kind, status }) => {
                let qp = told.host.and_then(|host| self.evidence.play.connections.qp_of(host, *id));
                check.kind == *kind
                    && check.status.is_none_or(|wanted| wanted == *status)
                    && check.host.is_none_or(|host| told.host == Some(host))
                    && check.qp.is_none_or(|wanted| qp == Some(wanted))
                    && (check.during.first..=check.during.last).contains(&told.time_ns)
            }
            (OrderCheck::Fault(id, _), Moment::Fault { rule: Some(rule), .. } | Moment::Fired { rule }) => {
                rule == id
            }
            _ => false,
        }
    }

    fn memory(&self, qp: usize, offset: u64, found: &[u8], claim: &MemoryClaim) -> Finding {
        let expected = match claim {
            MemoryClaim::Nothing => vec![0; found.len()],
            MemoryClaim::Bytes(bytes) => bytes.clone(),
            MemoryClaim::SourceOf(from) => {
                let area = self.plan.pair_of(*from).area as usize;
                let source = pattern(*from, area);
                let start = (offset as usize).min(source.len());
                source[start..].iter().copied().take(found.len()).collect()
            }
        };
        let around = || {
            let last = self
                .evidence
                .play
                .seen
                .iter()
                .rev()
                .find(|seen| seen.qp == qp || seen.qp == self.plan.qps[qp].peer);
            self.around(last.map_or(0, |seen| seen.time_ns), qp)
        };
        let wrong = expected.iter().zip(found).position(|(expected, found)| expected != found);
        match wrong {
            None if expected.len() == found.len() => Finding::new(true, "every byte is right"),
            None => Finding::new(false, "it is shorter than that").at(around()),
            Some(at) => {
                let count = expected.iter().zip(found).filter(|(expected, found)| expected != found).count();
                let detail = format!(
                    "{count} of {} bytes differ, the first at offset {}: {:#04x} instead of {:#04x}",
                    found.len(),
                    offset + at as u64,
                    found[at],
                    expected[at]
                );
                Finding::new(false, detail).at(around())
            }
        }
    }

    /// Completions of a subject that count as work done, in order.
    fn done<'b>(&'b self, of: &'b Subject) -> impl Iterator<Item = &'b Seen> {
        self.evidence.play.seen.iter().filter(move |seen| {
            let mine = match seen.origin {
                Some(Origin::Flow(flow)) => of.step.is_none() && of.workload.is_none_or(|w| self.plan.flows[flow].workload == w),
                Some(Origin::Step(step)) => of.workload.is_none() && of.step.is_none_or(|wanted| wanted == step),
                _ => false,
            };
            // A round of a ping-pong is done when the answer is there, anything else when it completes.
            let is_round = matches!(seen.origin, Some(Origin::Flow(flow)) if self.plan.flows[flow].kind == FlowKind::PingPong);
            let counts = seen.completion.operation.is_receive() == is_round;
            mine && counts && of.qps.contains(&seen.qp) && seen.completion.status.is_success()
        })
    }

    fn goodput(&self, of: &Subject, during: Option<Span>) -> u64 {
        let window = during.map(|span| (span.first, span.last.min(self.evidence.ended_ns)));
        let inside = |seen: &&Seen| window.is_none_or(|(first, last)| (first..=last).contains(&seen.time_ns));
        let bytes: u128 = self.done(of).filter(inside).map(|seen| u128::from(seen.bytes)).sum();
        let (first, last) = window.unwrap_or_else(|| {
            let first = self.done(of).map(|seen| seen.posted_ns).min().unwrap_or(0);
            (first, self.done(of).map(|seen| seen.time_ns).max().unwrap_or(0))
        });
        match u128::from(last.saturating_sub(first)) {
            0 => 0,
            ns => (bytes * 8 * 1_000_000_000 / ns) as u64,
        }
    }

    fn goodputs(&self) -> BTreeMap<String, u64> {
        if self.evidence.in_real_time {
            return BTreeMap::new();
        }
        let one = |(workload, name): (usize, &String)| {
            let flows = self.plan.flows.iter().filter(|flow| flow.workload == workload);
            let of = Subject {
                name: name.clone(),
                qps: flows.map(|flow| flow.qp).collect(),
                workload: Some(workload),
                step: None,
            };
            (name.clone(), self.goodput(&of, None))
        };
        self.plan.workloads.iter().enumerate().map(one).collect()
    }

    fn latency(&self, of: &Subject, percentile: f64, bound: &Bound<u64>) -> Finding {
        let mut times: Vec<u64> = self.done(of).map(|seen| seen.time_ns - seen.posted_ns).collect();
        times.sort_unstable();
        // The smallest time that so many per cent do not exceed.
        let rank =
            ((percentile / 100.0 * times.len() as f64).ceil() as usize).clamp(1, times.len().max(1)) - 1;
        match times.get(rank) {
            None => Finding::new(false, "nothing completed").at(self.somewhere()),
            Some(time) => {
                let detail = format!("it is {} of {} work requests", Time(*time), times.len());
                Finding::new(holds(bound, *time), detail).at(self.somewhere())
            }
        }
    }

    fn finish(&self, of: Option<&Subject>, bound: &Bound<u64>) -> Finding {
        let play = self.evidence.play;
        let mut open = Vec::new();
        for (index, flow) in self.plan.flows.iter().enumerate() {
            let mine = of.is_none_or(|of| {
                of.workload.map_or(of.step.is_none() && of.qps.contains(&flow.qp), |w| w == flow.workload)
            });
            let done = play.progress[index].done;
            if mine && flow.count.is_some_and(|count| done < count) {
                open.push(format!(
                    "{} did {done} of {} messages",
                    self.name(flow.qp),
                    flow.count.unwrap_or(0)
                ));
            }
        }
        for (index, step) in self.plan.steps.iter().enumerate() {
            let mine = of.is_none_or(|of| {
                of.step.map_or(of.workload.is_none() && of.qps.contains(&step.qp), |wanted| wanted == index)
            });
            if mine && play.step_left[index] > 0 {
                let name = step.name.clone().unwrap_or_else(|| format!("step {}", index + 1));
                open.push(format!("{name} waits for {} completions", play.step_left[index]));
            }
        }
        let last = play
            .seen
            .iter()
            .filter(|seen| of.is_none_or(|of| of.qps.contains(&seen.qp)))
            .map(|seen| seen.time_ns)
            .max();
        let time_ns = last.unwrap_or(0);
        let detail = match open.is_empty() {
            true => format!("done at {}", Time(time_ns)),
            false => open.join("; "),
        };
        let held = open.is_empty() && holds(bound, time_ns);
        let qp = of.and_then(|of| of.qps.first().copied()).unwrap_or(0);
        Finding::new(held, detail).at(self.around(time_ns, qp))
    }
}

fn holds(bound: &Bound<u64>, value: u64) -> bool {
    bound.at_least.is_none_or(|least| value >= least) && bound.at_most.is_none_or(|most| value <= most)
}

/// Jain's index: 1 for equal shares, 1/n if one has everything, 1 if nobody has anything.
fn jain(rates: &[u64]) -> f64 {
    let sum: f64 = rates.iter().map(|rate| *rate as f64).sum();
    let squares: f64 = rates.iter().map(|rate| (*rate as f64).powi(2)).sum();
    if squares == 0.0 { 1.0 } else { sum * sum / (rates.len() as f64 * squares) }
}

#[cfg(test)]
mod tests {
    use super::jain;

    #[test]
    fn fairness_is_one_for_equal_shares_and_one_nth_for_a_monopoly() {
        assert!((jain(&[5, 5, 5, 5]) - 1.0).abs() < 1e-12);
        assert!((jain(&[20, 0, 0, 0]) - 0.25).abs() < 1e-12);
        assert!((jain(&[0, 0]) - 1.0).abs() < 1e-12);
    }
}
