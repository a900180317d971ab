//! Holds what happened against what was expected, and says in plain words where they differ.

mod invariants;
mod measures;
mod order;

use crate::language::SwitchExpectation;
use crate::plan::{
    Check, CompletionCheck, ConnectionCheck, Expectation, MemoryClaim, Node, OrderCheck, Plan,
};
use crate::play::{Account, Heard, Origin, Seen};
use crate::quantity::{Amount, Time};
use crate::record::{Record, SwitchDeeds};
use crate::report::{Around, ExpectationOutcome, Outcome, RuleOutcome, Skipped, Verdict};
use crate::verbs::pattern;
use softhca_engine::State;
use softhca_fabric::{self as fabric, CableId, HostId, RuleId, SwitchId};
use softhca_queue::{Completion, Counters};
use std::collections::BTreeMap;

/// Everything that a driver found out.
pub(crate) struct Evidence<'a> {
    pub record: &'a Record,
    pub account: &'a Account,
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
    let error = evidence.account.broken.clone();
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
        let last = self.evidence.account.seen.last().map_or(0, |seen| seen.time_ns);
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
            Check::Goodput { of, bound, during } => self.goodput_is(of, bound, *during),
            Check::Fairness { of, bound, during } => self.fairness(of, bound, *during),
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
                let failed = evidence.account.failed.iter().filter(|failed| failed.host == *host);
                let found =
                    failed.filter(|failed| errno.is_none_or(|errno| errno == failed.errno)).count() as u64;
                let last = evidence.account.failed.last().map_or(0, |failed| failed.time_ns);
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
        let seen = &self.evidence.account.seen;
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
        let heard = &self.evidence.account.connections.heard;
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
        let failed = &self.evidence.account.failed;
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
        let time_ns = fault.or(self.evidence.account.seen.first().map(|seen| seen.time_ns)).unwrap_or(0);
        Finding::new(times.holds(found), words).at(self.around(time_ns, role.map_or(0, Plan::of_role)))
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
                .account
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
}
