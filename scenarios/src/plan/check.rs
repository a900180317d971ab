//! Expectations with their names resolved, and the sentences that they are reported with.

use super::build::{Builder, state_of};
use super::{Area, CountPlan, FaultPlan, rules, words};
use crate::language::{
    AreaName, CompletionExpectation, ConnectionExpectation, Errno, EventExpectation, Expect,
    MemoryExpectation, OrderStep, PacketExpectation, PayloadName, StateExpectation, SwitchExpectation,
};
use crate::quantity::{Amount, Rate, Time};
use crate::source::{Problem, join};
use softhca_engine::State;
use softhca_fabric::{Action, Direction, Repeat, Rule, RuleId, Selector, Span};
use softhca_queue::cm::EventKind;
use softhca_queue::{CompletionOperation, Counters, Status};

/// The numbers of counting rules, out of the way of faults.
const FIRST_COUNT: u32 = 1 << 20;

/// Something that must hold at the end.
#[derive(Clone, Debug)]
pub struct Expectation {
    /// It in words.
    pub text: String,
    /// It is about time, which real sockets do not keep.
    pub is_timed: bool,
    /// What it is.
    pub check: Check,
}

/// Limits of a number, each if given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound<T> {
    /// The smallest that will do.
    pub at_least: Option<T>,
    /// The largest that will do.
    pub at_most: Option<T>,
}

/// What measurements are about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// What it is called.
    pub name: String,
    /// The queue pairs that post.
    pub qps: Vec<usize>,
    /// Only work of this workload.
    pub workload: Option<usize>,
    /// Only work of this step.
    pub step: Option<usize>,
}

/// What is expected.
#[derive(Clone, Debug)]
pub enum Check {
    /// Completions.
    Completion(CompletionCheck),
    /// A state at the end.
    State {
        /// Whose.
        qp: usize,
        /// Which.
        is: State,
    },
    /// Packets that a counting rule saw.
    Packet {
        /// The counting rule's place in the plan.
        count: usize,
        /// How many.
        times: Amount,
    },
    /// A counter.
    Counter {
        /// Whose.
        host: usize,
        /// Which.
        name: String,
        /// How much.
        is: Amount,
    },
    /// Asynchronous events.
    Event {
        /// Where.
        host: usize,
        /// Which.
        name: String,
        /// How many.
        times: Amount,
    },
    /// What programs hear of connections.
    Connection(ConnectionCheck),
    /// Things in order.
    Order(Vec<OrderCheck>),
    /// Bytes.
    Memory {
        /// Whose.
        qp: usize,
        /// Which part.
        area: Area,
        /// From where.
        offset: u64,
        /// How many.
        bytes: u64,
        /// What they are.
        claim: MemoryClaim,
    },
    /// Useful data in a time.
    Goodput {
        /// Of what.
        of: Subject,
        /// How much, in bits per second.
        bound: Bound<u64>,
        /// When.
        during: Option<Span>,
    },
    /// Jain's index.
    Fairness {
        /// Of what.
        of: Vec<Subject>,
        /// How even.
        bound: Bound<f64>,
        /// When.
        during: Option<Span>,
    },
    /// Time from post to completion.
    Latency {
        /// Of what.
        of: Subject,
        /// Which percentile.
        percentile: f64,
        /// How long, in nanoseconds.
        bound: Bound<u64>,
    },
    /// Everything is done.
    Finish {
        /// Of what.
        of: Option<Subject>,
        /// When, in nanoseconds.
        bound: Bound<u64>,
    },
    /// What a switch did.
    Switch {
        /// Which.
        switch: usize,
        /// How much of what.
        spec: SwitchExpectation,
    },
    /// Pauses.
    Pause {
        /// On which cable.
        cable: usize,
        /// Which way.
        direction: Direction,
        /// How many.
        times: Amount,
    },
    /// Calls that failed.
    Verbs {
        /// Whose.
        host: usize,
        /// With which error.
        errno: Option<Errno>,
        /// How many.
        times: Amount,
    },
}

/// Which completions, and how many.
#[derive(Clone, Debug, Default)]
pub struct CompletionCheck {
    /// Whose.
    pub qp: Option<usize>,
    /// Of which step.
    pub step: Option<usize>,
    /// Of what.
    pub operation: Option<CompletionOperation>,
    /// With which status.
    pub status: Option<Status>,
    /// With so many bytes.
    pub bytes: Option<u64>,
    /// With this immediate data.
    pub immediate: Option<u32>,
    /// With these words in the reason.
    pub why: Option<String>,
    /// How many.
    pub times: Option<Amount>,
    /// Before this time.
    pub before: Option<u64>,
}

/// Which events of connections, and how many.
#[derive(Clone, Debug)]
pub struct ConnectionCheck {
    /// Whose connection.
    pub qp: Option<usize>,
    /// Whose program.
    pub host: Option<usize>,
    /// What happened.
    pub kind: EventKind,
    /// With which status.
    pub status: Option<i32>,
    /// With which words of the other side.
    pub private_data: Option<Vec<u8>>,
    /// How many.
    pub times: Amount,
    /// When.
    pub during: Span,
}

/// What memory holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryClaim {
    /// What this queue pair sends from the same offset.
    SourceOf(usize),
    /// Zeroes.
    Nothing,
    /// These bytes.
    Bytes(Vec<u8>),
}

/// One of several things in order.
#[derive(Clone, Debug)]
pub enum OrderCheck {
    /// A packet is sent.
    Packet(PacketLook, String),
    /// A work request ends.
    Completion(CompletionCheck, String),
    /// A queue pair gets into a state.
    State(usize, State, String),
    /// An event is raised.
    Event(usize, String),
    /// A program hears of a connection.
    Connection(ConnectionCheck, String),
    /// A fault happens.
    Fault(RuleId, String),
}

impl OrderCheck {
    /// It in words.
    pub fn text(&self) -> String {
        match self {
            OrderCheck::Packet(_, text)
            | OrderCheck::Completion(_, text)
            | OrderCheck::Connection(_, text)
            | OrderCheck::State(_, _, text) => text.clone(),
            OrderCheck::Event(_, name) => format!("event {name}"),
            OrderCheck::Fault(_, name) => format!("fault {name:?}"),
        }
    }
}

/// A packet as its sender's card tells of it.
#[derive(Clone, Debug)]
pub struct PacketLook {
    /// The host that sends it, if that matters.
    pub from: Option<usize>,
    /// What it is like; the direction is left out.
    pub selector: Selector,
}

/// Every expectation of the file, and the rules that count for them.
pub(super) fn expectations(
    builder: &mut Builder<'_>,
    faults: &[FaultPlan],
) -> Result<(Vec<Expectation>, Vec<CountPlan>), Problem> {
    let (mut all, mut counts) = (Vec::new(), Vec::new());
    let file = builder.file;
    for (index, expect) in file.expect.iter().enumerate() {
        let path = format!("expect.{index}");
        let before = all.len();
        one(builder, expect, faults, &path, &mut all, &mut counts)?;
        match all.len() - before {
            1 => {}
            0 => return Err(builder.problem(&path, "this expects nothing").help(KINDS)),
            _ => {
                return Err(builder.problem(&path, "an [[expect]] expects one thing").help("make two of it"));
            }
        }
    }
    Ok((all, counts))
}

const KINDS: &str = "give one of completion, state, packet, counter, event, connection, order, memory, goodput, fairness, latency, \
                     finish, switch, pause, verbs";

fn one(
    builder: &mut Builder<'_>,
    expect: &Expect,
    faults: &[FaultPlan],
    path: &str,
    all: &mut Vec<Expectation>,
    counts: &mut Vec<CountPlan>,
) -> Result<(), Problem> {
    let mut put =
        |text: String, is_timed: bool, check: Check| all.push(Expectation { text, is_timed, check });
    if let Some(spec) = &expect.completion {
        let (check, text) = completion(builder, spec, &join(path, "completion"))?;
        let times = check.times.unwrap_or(Amount::SOME);
        put(format!("{text}, {}", times_in_words(times)), check.before.is_some(), Check::Completion(check));
    }
    if let Some(StateExpectation { qp, is }) = &expect.state {
        let at = builder.qp(qp, &join(path, "state.qp"))?;
        let is = state_of(*is);
        put(format!("{qp} is in {is} at the end"), false, Check::State { qp: at, is });
    }
    if let Some(spec) = &expect.packet {
        let path = join(path, "packet");
        let way = rules::way(builder, spec.on.as_deref(), &path)?;
        let matching = spec.matching();
        let times = spec.times.unwrap_or(Amount::SOME);
        // Packets that are expected not to come need not be possible.
        let selector = match rules::selector(builder, &matching, way, &path) {
            Err(problem) if times.least == 0 && problem.message.contains("can never fire") => {
                let text =
                    format!("{}: {}, {}", place(spec), words::packets(&matching), times_in_words(times));
                let nothing = Selector { time_ns: Some(Span { first: 1, last: 0 }), ..Selector::default() };
                counts.push(count(way, builder.network.cables.len(), nothing, counts.len()));
                put(text, matching.time.is_some(), Check::Packet { count: counts.len() - 1, times });
                return Ok(());
            }
            other => other?,
        };
        counts.push(count(way, builder.network.cables.len(), selector, counts.len()));
        let text = format!("{}: {}, {}", place(spec), words::packets(&matching), times_in_words(times));
        put(text, matching.time.is_some(), Check::Packet { count: counts.len() - 1, times });
    }
    if let Some(spec) = &expect.counter {
        let host = builder.network.host(&spec.host, builder.source, &join(path, "counter.host"))?;
        let known: Vec<&str> = Counters::default().iter().map(|(name, _)| name).collect();
        if !known.contains(&spec.name.as_str()) {
            let problem =
                builder.problem(&join(path, "counter.name"), format!("there is no counter {:?}", spec.name));
            return Err(problem.suggest(&spec.name, known));
        }
        let text = format!("counter {} of {} is {}", spec.name, spec.host, spec.is);
        put(text, false, Check::Counter { host, name: spec.name.clone(), is: spec.is });
    }
    if let Some(spec) = &expect.event {
        let (host, name) = event(builder, spec, &join(path, "event"))?;
        let times = spec.times.unwrap_or(Amount::SOME);
        let text = format!("{} hears of {name}, {}", spec.host, times_in_words(times));
        put(text, false, Check::Event { host, name, times });
    }
    if let Some(spec) = &expect.connection {
        let (check, text) = connection(builder, spec, &join(path, "connection"))?;
        let is_timed = spec.before.is_some() || spec.after.is_some();
        put(format!("{text}, {}", times_in_words(check.times)), is_timed, Check::Connection(check));
    }
    if let Some(steps) = &expect.order {
        let mut checks = Vec::new();
        for (index, step) in steps.iter().enumerate() {
            checks.push(order(builder, step, faults, &format!("{path}.order.{index}"))?);
        }
        let text = checks.iter().map(OrderCheck::text).collect::<Vec<_>>().join("; then ");
        put(format!("in order: {text}"), false, Check::Order(checks));
    }
    if let Some(spec) = &expect.memory {
        if builder.file.device.payload == Some(PayloadName::Elided) {
            let message = "packets without payload write nothing that could be looked at";
            return Err(builder.problem(&join(path, "memory"), message).help("leave out `payload`"));
        }
        let (text, check) = memory(builder, spec, &join(path, "memory"))?;
        put(text, false, check);
    }
    if let Some(spec) = &expect.goodput {
        let of = subject(builder, &spec.of, &join(path, "goodput.of"))?;
        let bound =
            Bound { at_least: spec.at_least.map(|rate| rate.0), at_most: spec.at_most.map(|rate| rate.0) };
        let text =
            format!("goodput of {} {}", spec.of, bound_in_words(&bound, |rate| Rate(rate).to_string()));
        let during = spec.during.map(|window| window.0);
        put(text, true, Check::Goodput { of, bound, during });
    }
    if let Some(spec) = &expect.fairness {
        let mut of = Vec::new();
        for name in spec.of.all() {
            let whole = subject(builder, name, &join(path, "fairness.of"))?;
            for qp in &whole.qps {
                of.push(Subject { name: builder.qps[*qp].name.clone(), qps: vec![*qp], ..whole.clone() });
            }
        }
        let bound = Bound { at_least: spec.at_least, at_most: spec.at_most };
        let names = spec.of.all().join(", ");
        let text = format!("fairness among {names} {}", bound_in_words(&bound, |index| index.to_string()));
        put(text, true, Check::Fairness { of, bound, during: spec.during.map(|window| window.0) });
    }
    if let Some(spec) = &expect.latency {
        let of = subject(builder, &spec.of, &join(path, "latency.of"))?;
        if !(0.0..=100.0).contains(&spec.percentile) {
            return Err(
                builder.problem(&join(path, "latency.percentile"), "a percentile is between 0 and 100")
            );
        }
        let bound =
            Bound { at_least: spec.at_least.map(|time| time.0), at_most: spec.at_most.map(|time| time.0) };
        let words = bound_in_words(&bound, |time| Time(time).to_string());
        let text = format!("latency of {} at percentile {} {words}", spec.of, spec.percentile);
        put(text, true, Check::Latency { of, percentile: spec.percentile, bound });
    }
    if let Some(spec) = &expect.finish {
        let of = match &spec.of {
            Some(name) => Some(subject(builder, name, &join(path, "finish.of"))?),
            None => None,
        };
        let bound =
            Bound { at_least: spec.after.map(|time| time.0), at_most: spec.before.map(|time| time.0) };
        let what = spec.of.as_deref().unwrap_or("everything");
        let is_timed = bound.at_least.is_some() || bound.at_most.is_some();
        let text = match is_timed {
            true => {
                format!("{what} is done, at a time {}", bound_in_words(&bound, |time| Time(time).to_string()))
            }
            false => format!("{what} is done"),
        };
        put(text, is_timed, Check::Finish { of, bound });
    }
    if let Some(spec) = &expect.switch {
        let switch = builder.network.switch_named(&spec.name, builder.source, &join(path, "switch.name"))?;
        let parts = [
            ("dropped", spec.dropped),
            ("marked", spec.marked),
            ("paused its neighbours", spec.paused),
            ("dropped by its watchdog", spec.watchdog),
            ("held bytes", spec.held),
        ];
        let said: Vec<String> = parts
            .iter()
            .filter_map(|(word, amount)| amount.map(|amount| format!("{word}: {amount}")))
            .collect();
        if said.is_empty() {
            let problem = builder.problem(&join(path, "switch"), "this expects nothing of the switch");
            return Err(problem.help("give dropped, marked, paused, watchdog or held"));
        }
        put(
            format!("switch {} {}", spec.name, said.join(", ")),
            false,
            Check::Switch { switch, spec: spec.clone() },
        );
    }
    if let Some(spec) = &expect.pause {
        let (cable, direction) = builder.network.way(&spec.on, builder.source, &join(path, "pause.on"))?;
        let Some(direction) = direction else {
            return Err(builder
                .problem(&join(path, "pause.on"), "pauses go one way")
                .help("say \"switch -> alice\""));
        };
        let times = spec.times.unwrap_or(Amount::SOME);
        let text = format!("{}: pauses, {}", spec.on, times_in_words(times));
        put(text, false, Check::Pause { cable, direction, times });
    }
    if let Some(spec) = &expect.verbs {
        let host = builder.network.host(&spec.host, builder.source, &join(path, "verbs.host"))?;
        let times = spec.times.unwrap_or(Amount::SOME);
        let errno = spec.errno.map_or("an error".to_owned(), |errno| format!("{errno:?}"));
        let text = format!("a call of {} fails with {errno}, {}", spec.host, times_in_words(times));
        put(text, false, Check::Verbs { host, errno: spec.errno, times });
    }
    Ok(())
}

fn count(
    way: Option<(usize, Option<Direction>)>,
    cables: usize,
    selector: Selector,
    index: usize,
) -> CountPlan {
    let id = RuleId(FIRST_COUNT + index as u32);
    let cables = way.map_or_else(|| (0..cables).collect(), |(cable, _)| vec![cable]);
    CountPlan { cables, rule: Rule { id, selector, repeat: Repeat::default(), action: Action::Count } }
}

fn place(spec: &PacketExpectation) -> &str {
    spec.on.as_deref().unwrap_or("the cable")
}

fn times_in_words(times: Amount) -> String {
    match times {
        Amount { least: 1, most: 1 } => "once".into(),
        Amount { least: 0, most: 0 } => "never".into(),
        Amount { least: 1, most: u64::MAX } => "at least once".into(),
        other => format!("{other} times"),
    }
}

fn bound_in_words<T: Copy>(bound: &Bound<T>, show: impl Fn(T) -> String) -> String {
    match (bound.at_least, bound.at_most) {
        (Some(least), Some(most)) => format!("between {} and {}", show(least), show(most)),
        (Some(least), None) => format!("at least {}", show(least)),
        (None, Some(most)) => format!("at most {}", show(most)),
        (None, None) => "of any size".into(),
    }
}

fn completion(
    builder: &mut Builder<'_>,
    spec: &CompletionExpectation,
    path: &str,
) -> Result<(CompletionCheck, String), Problem> {
    let qp = match &spec.qp {
        Some(name) => Some(builder.qp(name, &join(path, "qp"))?),
        None => None,
    };
    let step = match &spec.step {
        Some(name) => Some(step_named(builder, name, &join(path, "step"))?),
        None => None,
    };
    let operation = spec.op.map(|op| op.operation());
    let status = spec.status.map(|status| status.status());
    let mut text = match (&spec.qp, &spec.step) {
        (Some(qp), Some(step)) => format!("{qp}: step {step:?}"),
        (Some(qp), None) => qp.clone(),
        (None, Some(step)) => format!("step {step:?}"),
        (None, None) => "anybody".into(),
    };
    text += ": ";
    text += operation.map_or("a work request", CompletionOperation::name);
    text += " completes";
    if let Some(status) = status {
        text += &format!(" with {}", status.name());
    }
    if let Some(bytes) = spec.bytes {
        text += &format!(", {} bytes", bytes.0);
    }
    if let Some(immediate) = spec.immediate {
        text += &format!(", immediate {immediate:#x}");
    }
    if let Some(why) = &spec.why {
        text += &format!(", because {why:?}");
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
        immediate: spec.immediate,
        why: spec.why.clone(),
        times: spec.times,
        before: spec.before.map(|time| time.0),
    };
    Ok((check, text))
}

fn step_named(builder: &Builder<'_>, name: &str, path: &str) -> Result<usize, Problem> {
    let found = builder.steps.iter().position(|step| step.name.as_deref() == Some(name));
    found.ok_or_else(|| {
        let names: Vec<&str> = builder.steps.iter().filter_map(|step| step.name.as_deref()).collect();
        builder.problem(path, format!("there is no step {name:?}")).suggest(name, names)
    })
}

/// What `of` stands for: a queue pair, a workload or a step.
fn subject(builder: &mut Builder<'_>, name: &str, path: &str) -> Result<Subject, Problem> {
    if let Some(workload) = builder.workloads.iter().position(|workload| workload == name) {
        let flows = builder.flows.iter().filter(|flow| flow.workload == workload);
        let qps = flows.map(|flow| flow.qp).collect();
        return Ok(Subject { name: name.into(), qps, workload: Some(workload), step: None });
    }
    if let Some(step) = builder.steps.iter().position(|step| step.name.as_deref() == Some(name)) {
        let qps = vec![builder.steps[step].qp];
        return Ok(Subject { name: name.into(), qps, workload: None, step: Some(step) });
    }
    match builder.qp(name, path) {
        Ok(qp) => Ok(Subject { name: name.into(), qps: vec![qp], workload: None, step: None }),
        Err(_) => {
            let mut names: Vec<String> = builder.qps.iter().map(|qp| qp.name.clone()).collect();
            names.extend(builder.workloads.iter().cloned());
            names.extend(builder.steps.iter().filter_map(|step| step.name.clone()));
            names.truncate(24);
            let problem = builder.problem(path, format!("there is no queue pair, workload or step {name:?}"));
            Err(problem.suggest(name, names.iter().map(String::as_str)))
        }
    }
}

/// The names of asynchronous events.
pub(crate) const EVENTS: [&str; 13] = [
    "CQ_ERR",
    "QP_FATAL",
    "QP_REQ_ERR",
    "QP_ACCESS_ERR",
    "COMM_EST",
    "SQ_DRAINED",
    "QP_LAST_WQE_REACHED",
    "SRQ_ERR",
    "SRQ_LIMIT_REACHED",
    "PORT_ACTIVE",
    "PORT_ERR",
    "GID_CHANGE",
    "DEVICE_FATAL",
];

fn event(builder: &Builder<'_>, spec: &EventExpectation, path: &str) -> Result<(usize, String), Problem> {
    let host = builder.network.host(&spec.host, builder.source, &join(path, "host"))?;
    let name = spec.name.replace('-', "_").to_uppercase();
    match EVENTS.contains(&name.as_str()) {
        true => Ok((host, name)),
        false => Err(builder
            .problem(&join(path, "name"), format!("there is no event {:?}", spec.name))
            .suggest(&name, EVENTS)),
    }
}

fn connection(
    builder: &mut Builder<'_>,
    spec: &ConnectionExpectation,
    path: &str,
) -> Result<(ConnectionCheck, String), Problem> {
    let qp = match &spec.qp {
        Some(name) => Some(builder.qp(name, &join(path, "qp"))?),
        None => None,
    };
    let host = match &spec.host {
        Some(name) => Some(builder.network.host(name, builder.source, &join(path, "host"))?),
        None => None,
    };
    if builder.is_open {
        return Err(builder.problem(path, "what real programs hear is their own: it cannot be looked at"));
    }
    if let (Some(at), Some(name)) = (qp, &spec.qp)
        && !builder.pairs[builder.qps[at].pair].by_cm
    {
        let message =
            format!("{name} is connected before the run begins: nothing is heard of its connection");
        let help = "let a step of the pair `listen` and one of the other side `connect`";
        return Err(builder.problem(&join(path, "qp"), message).help(help));
    }
    let kind = spec.event.kind();
    let who = spec.qp.as_deref().or(spec.host.as_deref()).unwrap_or("somebody");
    let mut text = format!("{who} hears {}", kind.name().trim_start_matches("RDMA_CM_EVENT_"));
    if let Some(status) = spec.status {
        text += &format!(" with status {status}");
    }
    if let Some(words) = &spec.private_data {
        text += &format!(" and {words:?}");
    }
    if let Some(after) = spec.after {
        text += &format!(", from {after} on");
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
        times: spec.times.unwrap_or(Amount::SOME),
        during: Span { first, last },
    };
    Ok((check, text))
}

fn order(
    builder: &mut Builder<'_>,
    step: &OrderStep,
    faults: &[FaultPlan],
    path: &str,
) -> Result<OrderCheck, Problem> {
    let mut found = Vec::new();
    if let Some(spec) = &step.packet {
        let path = join(path, "packet");
        let way = rules::way(builder, spec.on.as_deref(), &path)?;
        let matching = spec.matching();
        let selector = rules::selector(builder, &matching, way, &path)?;
        let unfit = [
            (selector.message.is_some(), "message"),
            (selector.packet.is_some(), "packet"),
            (selector.priority.is_some(), "priority"),
        ];
        if let Some((_, key)) = unfit.iter().find(|(given, _)| *given) {
            let message = format!("`{key}` cannot be used in an order: cards do not tell it");
            return Err(builder.problem(&join(&path, key), message));
        }
        let from = way.and_then(|(cable, direction)| {
            let [first, second] = builder.network.cables[cable].ends;
            match if direction? == Direction::Forward { first } else { second } {
                super::Node::Host(host) => Some(host),
                super::Node::Switch(_) => None,
            }
        });
        let text = format!("{} ({})", words::packets(&matching), place(spec));
        let selector = Selector { direction: None, ..selector };
        found.push(OrderCheck::Packet(PacketLook { from, selector }, text));
    }
    if let Some(spec) = &step.completion {
        let (check, text) = completion(builder, spec, &join(path, "completion"))?;
        found.push(OrderCheck::Completion(check, text));
    }
    if let Some(StateExpectation { qp, is }) = &step.state {
        let at = builder.qp(qp, &join(path, "state.qp"))?;
        let is = state_of(*is);
        found.push(OrderCheck::State(at, is, format!("{qp} goes to {is}")));
    }
    if let Some(spec) = &step.event {
        let (host, name) = event(builder, spec, &join(path, "event"))?;
        found.push(OrderCheck::Event(host, name));
    }
    if let Some(spec) = &step.connection {
        let (check, text) = connection(builder, spec, &join(path, "connection"))?;
        if check.private_data.is_some() {
            let path = join(path, "connection.private-data");
            return Err(builder.problem(&path, "cards do not tell the words of programs: leave this out"));
        }
        found.push(OrderCheck::Connection(check, text));
    }
    if let Some(name) = &step.fault {
        let Some(fault) = faults.iter().find(|fault| fault.name == *name) else {
            let problem = builder.problem(&join(path, "fault"), format!("there is no fault {name:?}"));
            return Err(problem.suggest(name, faults.iter().map(|fault| fault.name.as_str())));
        };
        found.push(OrderCheck::Fault(fault.id, name.clone()));
    }
    match (found.pop(), found.is_empty()) {
        (Some(check), true) => Ok(check),
        _ => Err(builder
            .problem(path, "each item of an order is one thing")
            .help("give one of packet, completion, state, event, connection, fault")),
    }
}

fn memory(
    builder: &mut Builder<'_>,
    spec: &MemoryExpectation,
    path: &str,
) -> Result<(String, Check), Problem> {
    let qp = builder.qp(&spec.qp, &join(path, "qp"))?;
    if builder.is_open {
        return Err(builder.problem(path, "the memory of real programs is their own: it cannot be looked at"));
    }
    let area = match spec.area {
        AreaName::Source => Area::Source,
        AreaName::Target => Area::Target,
        AreaName::Received => Area::Received,
        AreaName::Fetched => Area::Fetched,
    };
    let mut claims = Vec::new();
    if let Some(holds) = &spec.holds {
        claims.push(match holds.as_str() {
            "nothing" => (MemoryClaim::Nothing, "zeroes".to_owned(), None),
            name => {
                let from = builder.qp(name, &join(path, "holds"))?;
                (MemoryClaim::SourceOf(from), format!("what {name} sends"), None)
            }
        });
    }
    if let Some(hex) = &spec.hex {
        let digits: String = hex.chars().filter(|c| !c.is_whitespace()).collect();
        let bytes: Option<Vec<u8>> =
            (digits.len().is_multiple_of(2) && digits.is_ascii()).then_some(()).and_then(|()| {
                (0..digits.len())
                    .step_by(2)
                    .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).ok())
                    .collect()
            });
        let Some(bytes) = bytes else {
            return Err(
                builder.problem(&join(path, "hex"), "these are no bytes: two hexadecimal digits each")
            );
        };
        let length = bytes.len() as u64;
        claims.push((MemoryClaim::Bytes(bytes), digits, Some(length)));
    }
    if let Some(number) = spec.number {
        claims.push((
            MemoryClaim::Bytes(number.to_ne_bytes().to_vec()),
            format!("the number {number}"),
            Some(8),
        ));
    }
    let (Some((claim, words, length)), true) = (claims.pop(), claims.is_empty()) else {
        return Err(builder.problem(path, "what should be there?").help("give one of holds, hex, number"));
    };
    let Some(bytes) = length.or(spec.bytes.map(|size| size.0)) else {
        return Err(builder.problem(path, "how many bytes?").help("say bytes = 4000"));
    };
    let size = builder.pairs[builder.qps[qp].pair].area;
    if spec.offset.saturating_add(bytes) > size {
        let message = format!("the area has {size} bytes: what is beyond them holds nothing");
        return Err(builder.problem(path, message));
    }
    let offset = spec.offset;
    let text = format!("{} bytes at offset {offset} of {}'s {area:?} memory are {words}", bytes, spec.qp)
        .to_lowercase();
    Ok((text, Check::Memory { qp, area, offset, bytes, claim }))
}
