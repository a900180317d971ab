//! From `[[expect]]` to checks: names resolved, and the sentences that expectations are reported with.

use super::build::{Builder, state_of};
use super::check::{
    Check, CompletionCheck, ConnectionCheck, Expectation, MemoryClaim, OrderCheck, PacketLook,
};
use super::{Area, CountPlan, FaultPlan, Node, measures, rules, words};
use crate::language::{
    AreaName, CompletionExpectation, ConnectionExpectation, CounterExpectation, EventExpectation, Expect,
    MemoryExpectation, OrderStep, PacketExpectation, PauseExpectation, PayloadName, StateExpectation,
    SwitchExpectation,
};
use crate::quantity::Amount;
use crate::source::{Problem, join};
use softhca_engine::AsyncEvent;
use softhca_fabric::{Action, Direction, Repeat, Rule, RuleId, Selector, Span};
use softhca_queue::{CompletionOperation, Counters};

/// The numbers of counting rules, out of the way of faults.
const FIRST_COUNT: u32 = 1 << 20;

/// Every expectation of the file, and the rules that count for them.
pub(super) fn expectations(
    builder: &mut Builder<'_>,
    faults: &[FaultPlan],
) -> Result<(Vec<Expectation>, Vec<CountPlan>), Problem> {
    let (mut all, mut counts) = (Vec::new(), Vec::new());
    let file = builder.file;
    for (index, expect) in file.expect.iter().enumerate() {
        let path = format!("expect.{index}");
        let mut found = said(builder, expect, faults, &path, &mut counts)?;
        match (found.pop(), found.is_empty()) {
            (Some(expectation), true) => all.push(expectation),
            (None, _) => return Err(builder.problem(&path, "this expects nothing").help(KINDS)),
            (Some(_), false) => {
                return Err(builder.problem(&path, "an [[expect]] expects one thing").help("make two of it"));
            }
        }
    }
    Ok((all, counts))
}

const KINDS: &str = "give one of completion, state, packet, counter, event, connection, order, memory, goodput, fairness, latency, \
                     finish, switch, pause, verbs";

/// Everything that one `[[expect]]` says; it should be one thing.
fn said(
    builder: &mut Builder<'_>,
    expect: &Expect,
    faults: &[FaultPlan],
    path: &str,
    counts: &mut Vec<CountPlan>,
) -> Result<Vec<Expectation>, Problem> {
    let mut found = Vec::new();
    if let Some(spec) = &expect.completion {
        let (check, text) = completion(builder, spec, &join(path, "completion"))?;
        let text = format!("{text}, {}", times_in_words(check.times.unwrap_or(Amount::SOME)));
        found.push(Expectation { text, is_timed: check.before.is_some(), check: Check::Completion(check) });
    }
    if let Some(StateExpectation { qp, is }) = &expect.state {
        let at = builder.qp(qp, &join(path, "state.qp"))?;
        let is = state_of(*is);
        found.push(untimed(format!("{qp} is in {is} at the end"), Check::State { qp: at, is }));
    }
    if let Some(spec) = &expect.packet {
        found.push(packet(builder, spec, &join(path, "packet"), counts)?);
    }
    if let Some(spec) = &expect.counter {
        found.push(counter(builder, spec, &join(path, "counter"))?);
    }
    if let Some(spec) = &expect.event {
        let (host, name) = event(builder, spec, &join(path, "event"))?;
        let times = spec.times.unwrap_or(Amount::SOME);
        let text = format!("{} hears of {name}, {}", spec.host, times_in_words(times));
        found.push(untimed(text, Check::Event { host, name, times }));
    }
    if let Some(spec) = &expect.connection {
        let (check, text) = connection(builder, spec, &join(path, "connection"))?;
        let text = format!("{text}, {}", times_in_words(check.times));
        let is_timed = spec.before.is_some() || spec.after.is_some();
        found.push(Expectation { text, is_timed, check: Check::Connection(check) });
    }
    if let Some(steps) = &expect.order {
        let mut checks = Vec::new();
        for (index, step) in steps.iter().enumerate() {
            checks.push(order(builder, step, faults, &format!("{path}.order.{index}"))?);
        }
        let text = checks.iter().map(OrderCheck::text).collect::<Vec<_>>().join("; then ");
        found.push(untimed(format!("in order: {text}"), Check::Order(checks)));
    }
    if let Some(spec) = &expect.memory {
        found.push(memory(builder, spec, &join(path, "memory"))?);
    }
    if let Some(spec) = &expect.goodput {
        found.push(measures::goodput(builder, spec, &join(path, "goodput"))?);
    }
    if let Some(spec) = &expect.fairness {
        found.push(measures::fairness(builder, spec, &join(path, "fairness"))?);
    }
    if let Some(spec) = &expect.latency {
        found.push(measures::latency(builder, spec, &join(path, "latency"))?);
    }
    if let Some(spec) = &expect.finish {
        found.push(measures::finish(builder, spec, &join(path, "finish"))?);
    }
    if let Some(spec) = &expect.switch {
        found.push(switch(builder, spec, &join(path, "switch"))?);
    }
    if let Some(spec) = &expect.pause {
        found.push(pause(builder, spec, &join(path, "pause"))?);
    }
    if let Some(spec) = &expect.verbs {
        let host = builder.network.host(&spec.host, builder.source, &join(path, "verbs.host"))?;
        let times = spec.times.unwrap_or(Amount::SOME);
        let errno = spec.errno.map_or("an error".to_owned(), |errno| format!("{errno:?}"));
        let text = format!("a call of {} fails with {errno}, {}", spec.host, times_in_words(times));
        found.push(untimed(text, Check::Verbs { host, errno: spec.errno, times }));
    }
    Ok(found)
}

fn untimed(text: String, check: Check) -> Expectation {
    Expectation { text, is_timed: false, check }
}

fn packet(
    builder: &mut Builder<'_>,
    spec: &PacketExpectation,
    path: &str,
    counts: &mut Vec<CountPlan>,
) -> Result<Expectation, Problem> {
    let way = rules::way(builder, spec.on.as_deref(), path)?;
    let matching = spec.matching();
    let times = spec.times.unwrap_or(Amount::SOME);
    let selector = match rules::selector(builder, &matching, way, path) {
        // Packets that are expected not to come need not be possible.
        Err(problem) if times.least == 0 && problem.message.contains("can never fire") => {
            Selector { time_ns: Some(Span { first: 1, last: 0 }), ..Selector::default() }
        }
        other => other?,
    };
    counts.push(count(way, builder.network.cables.len(), selector, counts.len()));
    let text = format!("{}: {}, {}", place(spec), words::packets(&matching), times_in_words(times));
    let check = Check::Packet { count: counts.len() - 1, times };
    Ok(Expectation { text, is_timed: matching.time.is_some(), check })
}

fn counter(builder: &Builder<'_>, spec: &CounterExpectation, path: &str) -> Result<Expectation, Problem> {
    let host = builder.network.host(&spec.host, builder.source, &join(path, "host"))?;
    let known: Vec<&str> = Counters::default().iter().map(|(name, _)| name).collect();
    if !known.contains(&spec.name.as_str()) {
        let problem = builder.problem(&join(path, "name"), format!("there is no counter {:?}", spec.name));
        return Err(problem.suggest(&spec.name, known));
    }
    let text = format!("counter {} of {} is {}", spec.name, spec.host, spec.is);
    Ok(untimed(text, Check::Counter { host, name: spec.name.clone(), is: spec.is }))
}

fn switch(builder: &Builder<'_>, spec: &SwitchExpectation, path: &str) -> Result<Expectation, Problem> {
    let switch = builder.network.switch_named(&spec.name, builder.source, &join(path, "name"))?;
    let parts = [
        ("dropped", spec.dropped),
        ("marked", spec.marked),
        ("paused its neighbours", spec.paused),
        ("dropped by its watchdog", spec.watchdog),
        ("held bytes", spec.held),
    ];
    let said: Vec<String> =
        parts.iter().filter_map(|(word, amount)| amount.map(|amount| format!("{word}: {amount}"))).collect();
    if said.is_empty() {
        let problem = builder.problem(path, "this expects nothing of the switch");
        return Err(problem.help("give dropped, marked, paused, watchdog or held"));
    }
    let text = format!("switch {} {}", spec.name, said.join(", "));
    Ok(untimed(text, Check::Switch { switch, spec: spec.clone() }))
}

fn pause(builder: &Builder<'_>, spec: &PauseExpectation, path: &str) -> Result<Expectation, Problem> {
    let (cable, direction) = builder.network.way(&spec.on, builder.source, &join(path, "on"))?;
    let Some(direction) = direction else {
        let problem = builder.problem(&join(path, "on"), "pauses go one way");
        return Err(problem.help("say \"switch -> alice\""));
    };
    let times = spec.times.unwrap_or(Amount::SOME);
    let text = format!("{}: pauses, {}", spec.on, times_in_words(times));
    Ok(untimed(text, Check::Pause { cable, direction, times }))
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

fn event(builder: &Builder<'_>, spec: &EventExpectation, path: &str) -> Result<(usize, String), Problem> {
    let host = builder.network.host(&spec.host, builder.source, &join(path, "host"))?;
    let name = spec.name.replace('-', "_").to_uppercase();
    match AsyncEvent::NAMES.contains(&name.as_str()) {
        true => Ok((host, name)),
        false => Err(builder
            .problem(&join(path, "name"), format!("there is no event {:?}", spec.name))
            .suggest(&name, AsyncEvent::NAMES)),
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
                Node::Host(host) => Some(host),
                Node::Switch(_) => None,
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

fn memory(builder: &mut Builder<'_>, spec: &MemoryExpectation, path: &str) -> Result<Expectation, Problem> {
    if builder.file.device.payload == Some(PayloadName::Elided) {
        let message = "packets without payload write nothing that could be looked at";
        return Err(builder.problem(path, message).help("leave out `payload`"));
    }
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
    Ok(untimed(text, Check::Memory { qp, area, offset, bytes, claim }))
}
