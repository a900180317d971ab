//! Faults and selectors: from words to rules, and the refusal of rules that can never fire.

use super::build::Builder;
use super::network::{flow_control, marking};
use super::{Change, Disturbance, FaultKind, FaultPlan, Flap, Incident, Plan, SwitchChange, limits, words};
use crate::language::{Action as Spoken, ClassName, Fault, LuminaEvent, LuminaKind, Match, Ways};
use crate::quantity::Psns;
use crate::source::{Problem, join};
use softhca_fabric::{
    Action, Burst, Choice, Classes, Cut, Direction, LinkState, Pattern, Place, Repeat, Rule, RuleId, Scope,
    Seal, Selector, Span, Value,
};
use softhca_wire::Opcode;
use std::num::NonZeroU64;

/// What goes wrong, in the order of the file. Numbers start at 1 and belong to a fault for good.
pub(super) fn faults(builder: &mut Builder<'_>) -> Result<Vec<FaultPlan>, Problem> {
    let file = builder.file;
    let mut plans: Vec<FaultPlan> = Vec::new();
    for (index, fault) in file.fault.iter().enumerate() {
        let path = format!("fault.{index}");
        let id = RuleId(index as u32 + 1);
        let name = fault.name.clone().unwrap_or_else(|| format!("fault {}", index + 1));
        if plans.iter().any(|other| other.name == name) {
            return Err(builder.problem(&join(&path, "name"), format!("two faults are called {name:?}")));
        }
        let kind = kind(builder, fault, id, &path)?;
        plans.push(FaultPlan { id, name, optional: fault.optional, kind });
    }
    for (index, event) in file.data_pkt_events.iter().enumerate() {
        let path = format!("data-pkt-events.{index}");
        let id = RuleId((file.fault.len() + index) as u32 + 1);
        plans.push(lumina(builder, event, id, &path)?);
    }
    Ok(plans)
}

/// Lumina's notation, word for word: relative queue pair, relative PSN, n-th iteration, kind.
fn lumina(
    builder: &mut Builder<'_>,
    event: &LuminaEvent,
    id: RuleId,
    path: &str,
) -> Result<FaultPlan, Problem> {
    let Some(pair) = builder.pairs.get(event.qpn as usize) else {
        let message =
            format!("qpn {}: the file has {} pairs, counted from 0", event.qpn, builder.pairs.len());
        return Err(builder.problem(&join(path, "qpn"), message));
    };
    let qp = pair.qps[0];
    let host = builder.qps[qp].host;
    let matching = Match {
        class: Some(ClassName::Data),
        qp: Some(builder.qps[qp].name.clone()),
        psn: Some(Psns::Relative(Span::exactly(event.psn))),
        transmission: Some(crate::quantity::Numbers(Span::exactly(event.iter))),
        ..Match::default()
    };
    let Some((cable, direction)) = first_hop(builder, host) else {
        return Err(builder.problem(path, "the requester has no cable"));
    };
    let selector = selector(builder, &matching, Some((cable, Some(direction))), path)?;
    let action = match event.kind {
        LuminaKind::Drop => Action::Drop,
        LuminaKind::Ecn => Action::MarkCe,
        LuminaKind::Corrupt => Action::Corrupt { place: Place::Anywhere, seal: Seal::Stale },
    };
    let rule = Rule { id, selector, repeat: Repeat::times(1), action };
    let name =
        format!("{{qpn: {}, psn: {}, type: {:?}, iter: {}}}", event.qpn, event.psn, event.kind, event.iter)
            .to_lowercase();
    Ok(FaultPlan { id, name, optional: false, kind: FaultKind::Packets { cables: vec![cable], rule } })
}

/// The cable that leaves a host, and which way.
fn first_hop(builder: &Builder<'_>, host: usize) -> Option<(usize, Direction)> {
    builder.network.cables.iter().enumerate().find_map(|(index, cable)| {
        let side = cable.ends.iter().position(|end| *end == super::Node::Host(host))?;
        Some((index, if side == 0 { Direction::Forward } else { Direction::Backward }))
    })
}

fn kind(builder: &mut Builder<'_>, fault: &Fault, id: RuleId, path: &str) -> Result<FaultKind, Problem> {
    let Fault { on, link, switch, host, qp, call, .. } = fault;
    let targets = [on.is_some(), link.is_some(), switch.is_some(), host.is_some(), qp.is_some()];
    if targets.iter().filter(|given| **given).count() > 1 {
        return Err(builder
            .problem(path, "a fault has one target")
            .help("give one of on, link, switch, host, qp"));
    }
    let at = join(path, "action");
    let misplaced = |builder: &Builder<'_>, fits: &str| {
        Err(builder.problem(&at, format!("this action is about {fits}")).help(TARGETS))
    };
    if is_about_packets(&fault.action) && link.is_none() {
        if switch.is_some() || host.is_some() || qp.is_some() {
            return misplaced(builder, "packets on a cable");
        }
        return packets(builder, fault, id, path);
    }
    if !is_unconditional(&fault.matching) {
        return Err(builder.problem(&join(path, "match"), "only faults about packets have a `match`"));
    }
    if let Some(name) = link {
        let (cable, direction) = builder.network.way(name, builder.source, &join(path, "link"))?;
        return timed(builder, fault, path, link_disturbance(builder, &fault.action, cable, direction, &at)?);
    }
    if let Some(name) = switch {
        let switch = builder.network.switch_named(name, builder.source, &join(path, "switch"))?;
        let change = match &fault.action {
            Spoken::Buffer(size) => SwitchChange::Buffer(size.0),
            Spoken::Ecn(ecn) => SwitchChange::Marking(marking(ecn, builder.source, &at)?),
            Spoken::Pfc(pfc) => SwitchChange::FlowControl(flow_control(pfc, builder.source, &at)?),
            _ => return misplaced(builder, "something else than switches"),
        };
        let what = Incident::Switch { switch, change };
        return timed(builder, fault, path, lasting(what));
    }
    if let Some(name) = qp {
        let qp = builder.qp(name, &join(path, "qp"))?;
        let change = match fault.action {
            Spoken::Status(status) => Change::Status(status),
            Spoken::Hold(time) => Change::Hold(time.0),
            _ => return misplaced(builder, "something else than completions"),
        };
        return Ok(FaultKind::Completions { qp, repeat: occasions(builder, fault, path)?, change });
    }
    let Some(name) = host else {
        return Err(builder.problem(path, "the fault has no target").help(TARGETS));
    };
    let host = builder.network.host(name, builder.source, &join(path, "host"))?;
    if let Some(call) = call {
        let Spoken::Errno(errno) = fault.action else {
            return misplaced(builder, "something else than calls");
        };
        return Ok(FaultKind::Calls { host, call: *call, repeat: occasions(builder, fault, path)?, errno });
    }
    let what = match &fault.action {
        Spoken::Stall(time) => Disturbance::Stall { host, for_ns: time.0 },
        Spoken::NoReceives(time) => Disturbance::NoReceives { host, for_ns: time.0 },
        Spoken::SlowReceiver(time) => Disturbance::SlowReceiver { host, delay_ns: time.0 },
        Spoken::Kill => Disturbance::Kill { host },
        Spoken::Event(event) => lasting(Incident::Raise { host, event: *event }),
        Spoken::PauseStorm(storm) => {
            if storm.priority > 7 {
                return Err(builder.problem(&at, "priorities are 0 to 7"));
            }
            let what = Incident::PauseStorm { host, priority: storm.priority };
            Disturbance::Incident { what, for_ns: storm.duration.map(|time| time.0) }
        }
        Spoken::Errno(_) => {
            return Err(builder
                .problem(path, "which call fails?")
                .help("say call = \"post-send\" or \"post-receive\""));
        }
        _ => return misplaced(builder, "something else than hosts"),
    };
    timed(builder, fault, path, what)
}

const TARGETS: &str = "drop, duplicate, reorder, delay, corrupt, mark-ce, rewrite, down and count go with `on`; down, flap, \
                       rate and mtu with `link`; buffer, ecn and pfc with `switch`; stall, kill, no-receives, slow-receiver, \
                       event and pause-storm with `host`; status and hold with `qp`; errno with `host` and `call`";

fn is_about_packets(action: &Spoken) -> bool {
    matches!(
        action,
        Spoken::Count
            | Spoken::Drop
            | Spoken::Duplicate(_)
            | Spoken::Reorder(_)
            | Spoken::Delay(_)
            | Spoken::Corrupt(_)
            | Spoken::MarkCe
            | Spoken::Rewrite(_)
            | Spoken::Down(_)
    )
}

fn is_unconditional(matching: &Match) -> bool {
    let Match { class, code, cm, opcode, qp, psn, message, packet, transmission, priority, time } = matching;
    class.is_none()
        && code.is_none()
        && cm.is_none()
        && opcode.is_none()
        && qp.is_none()
        && psn.is_none()
        && message.is_none()
        && packet.is_none()
        && transmission.is_none()
        && priority.is_none()
        && time.is_none()
}

fn timed(builder: &Builder<'_>, fault: &Fault, path: &str, what: Disturbance) -> Result<FaultKind, Problem> {
    if builder.file.ends.is_some_and(|ends| fault.at >= ends) {
        return Err(
            builder.problem(&join(path, "at"), "this can never happen: it comes after the end of the run")
        );
    }
    let repeats = fault.times.is_some()
        || fault.every.is_some()
        || fault.pattern.is_some()
        || fault.probability.is_some()
        || fault.burst.is_some()
        || fault.skip > 0;
    if repeats {
        return Err(builder
            .problem(path, "this happens once, at its time")
            .help("leave out times, every, pattern, probability, burst and skip"));
    }
    Ok(FaultKind::Timed { at_ns: fault.at.0, what })
}

/// What stays as it is from its time on.
const fn lasting(what: Incident) -> Disturbance {
    Disturbance::Incident { what, for_ns: None }
}

fn link_disturbance(
    builder: &Builder<'_>,
    action: &Spoken,
    cable: usize,
    direction: Option<Direction>,
    path: &str,
) -> Result<Disturbance, Problem> {
    Ok(match action {
        Spoken::Down(down) => {
            // A cable that is named the other way round has its directions the other way round, too.
            let ways = match (down.ways, direction) {
                (Ways::Both, None) => [true, true],
                (Ways::Both, Some(direction)) => {
                    [direction == Direction::Forward, direction == Direction::Backward]
                }
                (Ways::Forward, _) => [true, false],
                (Ways::Backward, _) => [false, true],
            };
            let for_ns = down.duration.map(|time| time.0);
            Disturbance::Incident { what: Incident::Link { cable, ways, state: LinkState::Down }, for_ns }
        }
        Spoken::Flap(flap) => {
            if flap.times == 0 {
                return Err(builder.problem(path, "this can never happen: times is 0"));
            }
            if flap.times > limits::FLAPS {
                let message = format!("times is {}, at most {} is possible", flap.times, limits::FLAPS);
                return Err(builder.problem(path, message));
            }
            Disturbance::Flap(Flap { cable, down_ns: flap.down.0, up_ns: flap.up.0, times: flap.times })
        }
        Spoken::Rate(rate) if rate.0 > 0 => lasting(Incident::Rate { cable, rate: rate.0 }),
        Spoken::Rate(_) => {
            return Err(builder.problem(path, "a cable with rate 0 carries nothing").help("use down"));
        }
        Spoken::Mtu(0) => {
            return Err(builder.problem(path, "a cable with MTU 0 carries nothing").help("use down"));
        }
        Spoken::Mtu(mtu) => lasting(Incident::Mtu { cable, mtu: *mtu }),
        _ => return Err(builder.problem(path, "this action is not about links").help(TARGETS)),
    })
}

fn packets(builder: &mut Builder<'_>, fault: &Fault, id: RuleId, path: &str) -> Result<FaultKind, Problem> {
    let way = way(builder, fault.on.as_deref(), path)?;
    let selector = selector(builder, &fault.matching, way, &join(path, "match"))?;
    let action = action(builder, &fault.action, &selector, &join(path, "action"))?;
    let repeat = repeat(builder, fault, path)?;
    let cables = match way {
        Some((cable, _)) => vec![cable],
        None => (0..builder.network.cables.len()).collect(),
    };
    Ok(FaultKind::Packets { cables, rule: Rule { id, selector, repeat, action } })
}

/// What `on` says; nothing if it is left out and there is one cable, or real programs decide.
pub(super) fn way(
    builder: &Builder<'_>,
    on: Option<&str>,
    path: &str,
) -> Result<Option<(usize, Option<Direction>)>, Problem> {
    match on {
        Some(text) => builder.network.way(text, builder.source, &join(path, "on")).map(Some),
        None if builder.network.cables.len() == 1 => Ok(Some((0, None))),
        None if builder.is_open => Ok(None),
        None => Err(builder.problem(path, "on which cable?").help("say on = \"alice -> bob\"")),
    }
}

fn action(
    builder: &Builder<'_>,
    spoken: &Spoken,
    selector: &Selector,
    path: &str,
) -> Result<Action, Problem> {
    Ok(match spoken {
        Spoken::Count => Action::Count,
        Spoken::Drop => Action::Drop,
        Spoken::Duplicate(0) => return Err(builder.problem(path, "duplicate = 0 does nothing")),
        Spoken::Duplicate(copies) if *copies > limits::COPIES => {
            let message = format!("{copies} copies of a packet, at most {} are possible", limits::COPIES);
            return Err(builder.problem(path, message));
        }
        Spoken::Duplicate(copies) => Action::Duplicate { copies: *copies },
        Spoken::Reorder(reorder) => Action::Reorder { by: reorder.by, within_ns: reorder.within.0 },
        Spoken::Delay(time) => Action::Delay { ns: time.0 },
        Spoken::Corrupt(corruption) => {
            let place = match (corruption.bit, corruption.payload_bit) {
                (None, None) => Place::Anywhere,
                (Some(bit), None) => Place::Bit(bit),
                (None, Some(bit)) => Place::PayloadBit(bit),
                (Some(_), Some(_)) => {
                    return Err(builder.problem(path, "give `bit` or `payload-bit`, not both"));
                }
            };
            Action::Corrupt { place, seal: if corruption.repair { Seal::Repaired } else { Seal::Stale } }
        }
        Spoken::MarkCe => Action::MarkCe,
        Spoken::Rewrite(rewrite) => {
            let field = words::field(rewrite.field);
            let value = match (rewrite.to, rewrite.plus) {
                (Some(to), None) => Value::To(to),
                (None, Some(plus)) => Value::Plus(plus),
                _ => {
                    return Err(
                        builder.problem(path, "give the new value with `to`, or the difference with `plus`")
                    );
                }
            };
            if let Value::To(to) = value
                && field.width() < 64
                && to >> field.width() != 0
            {
                return Err(builder.problem(
                    path,
                    format!("{to:#x} has more than the {} bits of the field", field.width()),
                ));
            }
            let possible = |opcode: &Opcode| {
                field.is_in(*opcode)
                    && selector.classes.is_none_or(|classes| classes.allow(*opcode))
                    && (selector.opcodes.is_empty() || selector.opcodes.contains(opcode))
            };
            if !Opcode::all().any(|opcode| possible(&opcode)) {
                return Err(builder
                    .problem(path, "this rule can never fire: no packet that it is about has the field"));
            }
            Action::Rewrite { field, value }
        }
        Spoken::Down(down) => {
            let cut = if down.ways == Ways::Both { Cut::BothWays } else { Cut::OneWay };
            Action::LinkDown { cut, for_ns: down.duration.map_or(u64::MAX / 2, |time| time.0) }
        }
        _ => return Err(builder.problem(path, "this action is not about packets").help(TARGETS)),
    })
}

/// Which completions or calls are hit. They are of no flow, so there is no state that bursts could be in.
fn occasions(builder: &Builder<'_>, fault: &Fault, path: &str) -> Result<Repeat, Problem> {
    for (given, key) in [(fault.burst.is_some(), "burst"), (fault.per_flow, "per-flow")] {
        if given {
            let message = format!("only faults about packets have `{key}`");
            return Err(builder.problem(&join(path, key), message).help("use every, pattern or probability"));
        }
    }
    repeat(builder, fault, path)
}

fn repeat(builder: &Builder<'_>, fault: &Fault, path: &str) -> Result<Repeat, Problem> {
    let never =
        |key: &str, why: &str| builder.problem(&join(path, key), format!("this rule can never fire: {why}"));
    let given =
        [fault.every.is_some(), fault.pattern.is_some(), fault.probability.is_some(), fault.burst.is_some()];
    if given.iter().filter(|given| **given).count() > 1 {
        return Err(builder.problem(path, "give one of every, pattern, probability, burst"));
    }
    if fault.times == Some(0) {
        return Err(never("times", "times is 0"));
    }
    let mut choice = Choice::Each;
    if let Some(every) = fault.every {
        choice = Choice::Every(NonZeroU64::new(every).ok_or_else(|| never("every", "every is 0"))?);
    }
    if let Some(text) = &fault.pattern {
        let pattern =
            Pattern::parse(text).map_err(|why| builder.problem(&join(path, "pattern"), why.to_string()))?;
        if pattern.is_idle() {
            return Err(never("pattern", "the pattern has no X"));
        }
        choice = Choice::Pattern(pattern);
    }
    if let Some(share) = fault.probability {
        if share.0 == 0 {
            return Err(never("probability", "the probability is 0"));
        }
        choice = Choice::Chance { per_billion: share.0 };
    }
    if let Some(burst) = fault.burst {
        if burst.good.0 == 0 && (burst.enter.0 == 0 || burst.bad.0 == 0) {
            return Err(never("burst", "nothing is hit in either state"));
        }
        let (enter, leave) = (burst.enter.0, burst.leave.0);
        choice = Choice::Burst(Burst { enter, leave, hit_in_good: burst.good.0, hit_in_bad: burst.bad.0 });
    }
    let scope = if fault.per_flow { Scope::Flow } else { Scope::Rule };
    Ok(Repeat { skip: fault.skip, times: fault.times, choice, scope })
}

/// The packets that a rule or an expectation is about, on a cable in a direction.
pub(super) fn selector(
    builder: &mut Builder<'_>,
    matching: &Match,
    way: Option<(usize, Option<Direction>)>,
    path: &str,
) -> Result<Selector, Problem> {
    let classes = words::classes(matching).map_err(|why| builder.problem(&join(path, "class"), why))?;
    let opcodes = opcodes(builder, matching, path)?;
    if let Some(classes) = classes
        && !opcodes.is_empty()
        && !opcodes.iter().any(|opcode| classes.allow(*opcode))
    {
        let message = "this rule can never fire: no packet of that class has that opcode";
        return Err(builder.problem(&join(path, "opcode"), message));
    }
    let qp = match &matching.qp {
        Some(name) => Some(builder.qp(name, &join(path, "qp"))?),
        None => None,
    };
    if matching.priority.is_some_and(|priority| priority > 7) {
        return Err(
            builder.problem(&join(path, "priority"), "this rule can never fire: priorities are 0 to 7")
        );
    }
    if let (Some(window), Some(ends)) = (matching.time, builder.file.ends)
        && window.0.first >= ends.0
    {
        let message = "this rule can never fire: its time comes after the end of the run";
        return Err(builder.problem(&join(path, "time"), message));
    }
    if matching.transmission.is_some_and(|transmission| transmission.0.last == 0) {
        let message = "this rule can never fire: the first transmission is number 1";
        return Err(builder.problem(&join(path, "transmission"), message));
    }
    builder.check_messages(matching, classes, way, path)?;
    reachable(builder, matching, classes, qp, way, path)?;
    let span = |numbers: Option<crate::quantity::Numbers>| numbers.map(|numbers| numbers.0);
    let (mut psn, mut absolute_psn) = (None, None);
    match matching.psn {
        Some(Psns::Relative(span)) => psn = Some(span),
        Some(Psns::Absolute(span)) => absolute_psn = Some(span),
        None => {}
    }
    Ok(Selector {
        direction: way.and_then(|(_, direction)| direction),
        classes,
        opcodes,
        role: qp.map(Plan::role),
        sense: None,
        psn,
        absolute_psn,
        message: span(matching.message),
        packet: span(matching.packet),
        transmission: span(matching.transmission),
        priority: matching.priority,
        time_ns: matching.time.map(|window| window.0),
    })
}

fn opcodes(builder: &Builder<'_>, matching: &Match, path: &str) -> Result<Vec<Opcode>, Problem> {
    let mut found = Vec::new();
    for name in matching.opcode.iter().flat_map(|names| names.all()) {
        let wanted = name.replace(['-', ' '], "_").to_uppercase();
        let is_it = |opcode: &Opcode| {
            wanted == opcode.name() || wanted == opcode.to_string().replace(' ', "_").to_uppercase()
        };
        let before = found.len();
        found.extend(Opcode::all().filter(is_it));
        if found.len() == before {
            let mut names: Vec<&str> = Opcode::all().map(Opcode::name).collect();
            names.sort_unstable();
            names.dedup();
            let problem = builder.problem(&join(path, "opcode"), format!("there is no opcode {name:?}"));
            return Err(problem.suggest(&wanted, names));
        }
    }
    Ok(found)
}

impl Builder<'_> {
    /// Whether what one host sends another passes this way; a switch at an end of the cable may stand for any host.
    pub(super) fn passes(&self, way: Option<(usize, Option<Direction>)>, [from, to]: [usize; 2]) -> bool {
        let Some((cable, Some(direction))) = way else { return true };
        let [mut first, mut second] = self.network.cables[cable].ends;
        if direction == Direction::Backward {
            (first, second) = (second, first);
        }
        let may_be = |node, host| match node {
            super::Node::Host(end) => end == host,
            super::Node::Switch(_) => true,
        };
        may_be(first, from) && may_be(second, to)
    }
}

/// Refuses a selector that no packet of the file's traffic can match.
fn reachable(
    builder: &Builder<'_>,
    matching: &Match,
    classes: Option<Classes>,
    qp: Option<usize>,
    way: Option<(usize, Option<Direction>)>,
    path: &str,
) -> Result<(), Problem> {
    if builder.is_open {
        return Ok(());
    }
    let never = |key: &str, why: String| {
        builder.problem(&join(path, key), format!("this rule can never fire: {why}"))
    };
    let (requests, answers) = words::senses(classes);
    if !requests && !answers {
        // CNPs and management datagrams depend on more than the work requests.
        return Ok(());
    }
    let everything = classes.unwrap_or(Classes::Data);
    let all_answers = classes.unwrap_or(Classes::Answers);
    let passes = |from: usize, to: usize| builder.passes(way, [from, to]);
    let mut found = false;
    let (mut packets, mut messages, mut longest) = (Some(0), Some(0), 0);
    for (index, plan) in builder.qps.iter().enumerate() {
        if qp.is_some_and(|qp| qp != index) {
            continue;
        }
        let Some(traffic) = builder.reach.of(index) else { continue };
        let peer = builder.qps[plan.peer].host;
        let to_anybody =
            traffic.to_groups && (0..builder.network.hosts.len()).any(|host| passes(plan.host, host));
        let asks = requests && (passes(plan.host, peer) || to_anybody) && traffic.asks(everything);
        let answered = answers && passes(peer, plan.host) && traffic.is_answered(all_answers);
        if asks || answered {
            found = true;
            packets = packets.zip(traffic.packets).map(|(a, b): (u64, u64)| a.max(b));
            messages = messages.zip(traffic.messages).map(|(a, b): (u64, u64)| a.max(b));
            longest = longest.max(traffic.longest);
        }
    }
    // Without a class, messages of the connection manager are as good as any packet.
    if classes.is_none() && qp.is_none() && builder.sends_messages(&|_| true, way) {
        return Ok(());
    }
    if !found {
        let who = qp.map_or("no queue pair".to_owned(), |qp| format!("{} never", builder.qps[qp].name));
        let why = match qp {
            Some(_) => format!("{who} sends or gets such a packet this way"),
            None => format!("{who} sends or gets such a packet this way"),
        };
        let key = if matching.class.is_some() { "class" } else { "qp" };
        return Err(never(key, why)
            .help("look at the direction of `on`, the class, and which steps and workloads there are"));
    }
    if let (Some(Psns::Relative(span)), Some(packets)) = (matching.psn, packets)
        && span.first >= packets
    {
        return Err(never(
            "psn",
            format!("the requests take {packets} PSNs, +0 to +{}", packets.saturating_sub(1)),
        ));
    }
    if let (Some(numbers), Some(messages)) = (matching.message, messages)
        && numbers.0.first >= messages
    {
        return Err(never(
            "message",
            format!("there are {messages} messages, 0 to {}", messages.saturating_sub(1)),
        ));
    }
    if let Some(numbers) = matching.packet
        && numbers.0.first >= longest
    {
        return Err(never(
            "packet",
            format!("the longest message has {longest} packets, 0 to {}", longest.saturating_sub(1)),
        ));
    }
    Ok(())
}
