//! A plan on real programs: the rules that stand on their cards, who is who among their queue pairs, and the
//! verdict from what the cards told.
//!
//! `alice.1` is the first queue pair of the file's transport that gets ready to receive on that host from now on.
//! Nothing here talks to a card: whoever does takes rules and roles from here, and brings what an event log says.

use crate::judge::{self, Evidence};
use crate::plan::{Disturbance, FaultKind, FaultPlan, HostPlan, Incident, Node, Plan, usual_settings};
use crate::play::{Account, Seen};
use crate::quantity::Time;
use crate::record::{Moment, Record, Told};
use crate::report::{ExpectationOutcome, Outcome, Verdict};
use softhca_engine::{AsyncEvent, QpKind, Settings, State};
use softhca_fabric::{LinkState, Role, Rule, RuleId, Tally};
use softhca_queue::{Completion, CompletionFlags, CompletionOperation, Counters, Status};
use softhca_trace::log::{Entry, What};
use softhca_wire::Qpn;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The port of a host, as a cable that goes down or comes up takes it with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// It sends and receives.
    Up,
    /// It does neither.
    Down,
}

/// The cards that something happens to. Hosts are named by their place in the plan.
pub trait Cards {
    /// Takes the port of a host down, or brings it up.
    fn set_port(&mut self, host: usize, port: Port) -> Result<(), String>;
}

/// A plan under which real programs run.
pub struct Live<'p> {
    plan: &'p Plan,
    account: Account,
    /// What is still to happen to cables, in the order of time.
    turns: VecDeque<Turn>,
    record: Record,
    states: Vec<Option<State>>,
    /// Queue pairs of the plan that wait for one of a program, by host, in order; none for those without a name.
    waiting: Vec<Vec<Option<usize>>>,
    /// How many of them met theirs, by host.
    met: Vec<usize>,
    /// Queue pairs of programs, and which of the plan they are.
    known: BTreeMap<(usize, u32), usize>,
    /// Queue pairs that got ready to receive, and that nothing else is known of yet.
    arrived: BTreeSet<(usize, u32)>,
    exits: BTreeMap<usize, (i32, String)>,
    ended_ns: u64,
}

impl<'p> Live<'p> {
    /// Nothing has happened yet. The error is a sentence about what no real program can be subjected to.
    pub fn new(plan: &'p Plan) -> Result<Live<'p>, String> {
        if !plan.steps.is_empty() || !plan.flows.is_empty() {
            return Err("the file has steps or workloads of its own: it is for `softhca run`".into());
        }
        if let Some(why) = plan.needs_virtual_cards() {
            return Err(format!("not possible on real cards: {why}"));
        }
        let usual = |host: &HostPlan| Settings { recovery: host.settings.recovery, ..usual_settings() };
        if let Some(host) = plan.hosts.iter().find(|host| host.settings != usual(host)) {
            return Err(format!(
                "{}: of the settings of a card, only `recovery` can be given to a daemon's; `softhca daemon \
                 --config` has those of congestion",
                host.name
            ));
        }
        let mut turns = Vec::new();
        for fault in &plan.faults {
            let found = turns_of(fault)
                .map_err(|about| format!("fault {:?}: {about} cannot be had on real programs", fault.name))?;
            turns.extend(found);
        }
        turns.sort_by_key(|turn| turn.at_ns);
        let mut waiting = vec![Vec::new(); plan.hosts.len()];
        for (index, qp) in plan.qps.iter().enumerate() {
            let number = qp.name.rsplit_once('.').and_then(|(_, number)| number.parse::<usize>().ok());
            let place = number.unwrap_or(1).max(1) - 1;
            let row: &mut Vec<Option<usize>> = &mut waiting[qp.host];
            row.resize(row.len().max(place + 1), None);
            row[place] = Some(index);
        }
        Ok(Live {
            plan,
            account: Account::new(plan),
            turns: turns.into(),
            record: Record::new(plan),
            states: vec![None; plan.qps.len()],
            waiting,
            met: vec![0; plan.hosts.len()],
            known: BTreeMap::new(),
            arrived: BTreeSet::new(),
            exits: BTreeMap::new(),
            ended_ns: 0,
        })
    }

    /// The rules for the card of a host, with their names.
    pub fn rules(&self, host: usize) -> Vec<(Rule, &'p str)> {
        self.plan.rules_of(host).into_iter().map(|(name, rule)| (rule, name)).collect()
    }

    /// The roles of the queue pairs of a host, in the order in which they get ready to receive. Those that the file
    /// does not speak of have roles that no rule speaks of.
    pub fn roles(&self, host: usize) -> Vec<(QpKind, Role)> {
        let unnamed = |place: usize| Role((self.plan.qps.len() + 1 + place) as u32);
        let role = |(place, qp): (usize, &Option<usize>)| qp.map_or_else(|| unnamed(place), Plan::role);
        self.waiting[host].iter().enumerate().map(|slot| (self.plan.transport, role(slot))).collect()
    }

    /// When something of the plan happens next, in nanoseconds since the start.
    pub fn next_at(&self) -> Option<u64> {
        self.turns.front().map(|turn| turn.at_ns)
    }

    /// Has everything happen that is due.
    pub fn act(&mut self, now_ns: u64, cards: &mut dyn Cards) {
        while self.next_at().is_some_and(|at| at <= now_ns)
            && let Some(turn) = self.turns.pop_front()
        {
            if let Some(fault) = turn.begins {
                *self.account.fired.entry(fault).or_default() += 1;
            }
            for end in self.plan.cables[turn.cable].ends {
                if let Node::Host(host) = end
                    && let Err(why) = cards.set_port(host, turn.port)
                {
                    self.account.broken.get_or_insert(why);
                }
            }
        }
    }

    /// What could not be done.
    pub fn broken(&self) -> Option<&str> {
        self.account.broken.as_deref()
    }

    /// Whether an entry of this name is of use: others need not be read.
    pub fn wants(name: &str) -> bool {
        matches!(
            name,
            "qp:state_changed" | "qp:configured" | "work:completed" | "device:async_event" | "fabric:fault"
        )
    }

    /// Takes the next entry of the log.
    pub fn hear(&mut self, entry: &Entry) {
        let Some(host) = self.plan.hosts.iter().position(|host| host.name == entry.host) else { return };
        let time_ns = entry.time;
        self.ended_ns = self.ended_ns.max(time_ns);
        match &entry.what {
            What::StateChanged { qp, to, .. } => {
                let Some(to) = State::ALL.into_iter().find(|state| state.name() == to) else { return };
                if to == State::ReadyToReceive {
                    self.arrived.insert((host, *qp));
                }
                if let Some(qp) = self.known.get(&(host, *qp)).copied() {
                    self.state(time_ns, host, qp, to, entry.trigger.as_deref());
                }
            }
            What::Configured { qp, kind, .. } => {
                let is_new = self.arrived.remove(&(host, *qp));
                if is_new && kind == kind_name(self.plan.transport) {
                    self.meet(time_ns, host, *qp);
                }
            }
            What::WorkCompleted { qp, id, operation, status, bytes, immediate, vendor_error, .. } => {
                let Some(at) = self.known.get(&(host, *qp)).copied() else { return };
                let (Some(operation), Some(status)) =
                    (CompletionOperation::from_name(operation), Status::from_name(status))
                else {
                    return;
                };
                let flags = match immediate {
                    Some(_) => CompletionFlags::IMMEDIATE,
                    None => CompletionFlags::empty(),
                };
                let completion = Completion {
                    id: *id,
                    status,
                    operation,
                    flags,
                    bytes: *bytes,
                    immediate: immediate.unwrap_or(0),
                    queue_pair: Qpn::new(*qp),
                    source: Qpn::default(),
                    service_level: 0,
                    vendor_error: *vendor_error,
                    timestamp: time_ns,
                };
                if let Some(why) = &entry.trigger {
                    self.record.reasons.insert((at, *id, operation.is_receive()), why.clone());
                }
                let (posted_ns, bytes) = (time_ns, *bytes);
                self.account.seen.push(Seen { time_ns, qp: at, completion, origin: None, posted_ns, bytes });
                self.tell(time_ns, host, Some(at), Moment::Completed { completion });
            }
            What::AsyncEvent { event, .. } => {
                if let Some(name) = AsyncEvent::NAMES.into_iter().find(|name| name == event) {
                    self.record.raised.push((time_ns, host, name));
                    self.tell(time_ns, host, None, Moment::Raised { name });
                }
            }
            What::Fault { rule: Some(rule), .. } => {
                self.tell(time_ns, host, None, Moment::Fired { rule: RuleId(*rule) });
            }
            _ => {}
        }
    }

    /// A queue pair of a program takes the place of the next one of the plan.
    fn meet(&mut self, time_ns: u64, host: usize, number: u32) {
        let place = self.met[host];
        self.met[host] += 1;
        self.known.remove(&(host, number));
        // One without a name has taken its place all the same.
        if let Some(Some(qp)) = self.waiting[host].get(place).copied() {
            self.known.insert((host, number), qp);
            self.state(time_ns, host, qp, State::ReadyToReceive, None);
        }
    }

    fn state(&mut self, time_ns: u64, host: usize, qp: usize, to: State, why: Option<&str>) {
        self.states[qp] = Some(to);
        self.record.states.push((time_ns, qp, to, why.unwrap_or("the program asked for it").to_owned()));
        self.tell(time_ns, host, Some(qp), Moment::State { to });
    }

    fn tell(&mut self, time_ns: u64, host: usize, qp: Option<usize>, moment: Moment) {
        self.record.story.push(Told { time_ns, host: Some(host), qp, moment });
    }

    /// A program of the plan ended with this exit code; `said` are its last words.
    pub fn exited(&mut self, command: usize, code: i32, said: String) {
        self.exits.insert(command, (code, said));
    }

    /// Judges what happened: with the tallies of all rules of all cards, and what each card counted meanwhile.
    pub fn judge(&self, tallies: &[(RuleId, Tally)], counters: Vec<Counters>) -> Outcome {
        let of = |id: RuleId| tallies.iter().filter(move |(rule, _)| *rule == id).map(|(_, tally)| tally);
        let counted = self.plan.counts.iter();
        let counted = counted.map(|count| of(count.rule.id).map(|tally| tally.matched).sum()).collect();
        let mut fired = self.account.fired.clone();
        for fault in &self.plan.faults {
            if matches!(fault.kind, FaultKind::Packets { .. }) {
                fired.insert(fault.id, of(fault.id).map(|tally| tally.fired).sum());
            }
        }
        let evidence = Evidence {
            record: &self.record,
            account: &self.account,
            counted,
            fired,
            counters,
            states: self.states.clone(),
            ended_ns: self.ended_ns,
            is_stuck: false,
            in_real_time: true,
            of_programs: true,
        };
        let mut outcome = judge::judge(self.plan, &evidence, &mut |_, _, _| Vec::new());
        for (index, command) in self.plan.commands.iter().enumerate() {
            let host = &self.plan.hosts[command.host].name;
            let name = &self.plan.workloads[command.workload];
            let text = format!("program {name:?} on {host} ends with {}", command.exit);
            let (held, detail) = match self.exits.get(&index) {
                Some((code, _)) if *code == command.exit => (true, "it did".to_owned()),
                Some((code, said)) if said.is_empty() => (false, format!("it ended with {code}")),
                Some((code, said)) => (false, format!("it ended with {code} and said: {said}")),
                None => (false, format!("it did not end within {}", Time(self.ended_ns))),
            };
            outcome.expectations.push(ExpectationOutcome { text, held, detail, around: None });
            if !held && outcome.verdict == Verdict::Pass {
                outcome.verdict = Verdict::Fail;
            }
        }
        outcome
    }
}

/// A cable that goes down or comes up at a time.
struct Turn {
    at_ns: u64,
    cable: usize,
    port: Port,
    /// The fault that begins with it.
    begins: Option<RuleId>,
}

/// What a fault does to cables. The error is what else it is about, and no real program can be subjected to.
fn turns_of(fault: &FaultPlan) -> Result<Vec<Turn>, &'static str> {
    let (at_ns, what) = match &fault.kind {
        FaultKind::Packets { .. } => return Ok(Vec::new()),
        FaultKind::Timed { at_ns, what } => (*at_ns, what),
        FaultKind::Completions { .. } => return Err("the completions of a program"),
        FaultKind::Calls { .. } => return Err("the calls of a program"),
    };
    let (cable, states): (usize, Vec<(u64, LinkState)>) = match *what {
        Disturbance::Incident { what: Incident::Link { cable, ways: [true, true], state }, for_ns } => {
            let up = for_ns.map(|ns| (at_ns + ns, LinkState::Up));
            (cable, [(at_ns, state)].into_iter().chain(up).collect())
        }
        Disturbance::Flap(flap) => (flap.cable, flap.turns(at_ns).collect()),
        Disturbance::Incident { what: Incident::Link { .. }, .. } => {
            return Err("a cable that goes down one way only");
        }
        Disturbance::Kill { .. } => return Err("a program that is killed"),
        _ => return Err("what happens to a host or a cable other than that it goes down"),
    };
    let turn = |(place, (at_ns, state)): (usize, (u64, LinkState))| {
        let port = match state {
            LinkState::Up => Port::Up,
            LinkState::Down => Port::Down,
        };
        Turn { at_ns, cable, port, begins: (place == 0).then_some(fault.id) }
    };
    Ok(states.into_iter().enumerate().map(turn).collect())
}

const fn kind_name(kind: QpKind) -> &'static str {
    match kind {
        QpKind::Uc => "uc",
        QpKind::Ud => "ud",
        QpKind::XrcInitiator => "xrc-initiator",
        _ => "rc",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Scenario, Values};

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
        completion = { qp = "alice.2", status = "retry-exceeded", times = 1 }
        [[expect]]
        state = { qp = "alice.2", is = "error" }
        [[expect]]
        finish = {}
    "#;

    struct Recorded(Vec<(usize, Port)>);

    impl Cards for Recorded {
        fn set_port(&mut self, host: usize, port: Port) -> Result<(), String> {
            self.0.push((host, port));
            Ok(())
        }
    }

    /// A queue pair of alice becomes ready to receive.
    fn arrive(live: &mut Live<'_>, qp: u32, kind: &str) {
        let state = format!(
            r#"{{"time":1,"host":"alice","name":"qp:state_changed","data":{{"qp":{qp},"from":"INIT","to":"RTR","reason":"asked"}}}}"#
        );
        let configured = format!(
            r#"{{"time":1,"host":"alice","name":"qp:configured","data":{{"qp":{qp},"kind":"{kind}","recovery":"fatal","mtu":1024,
            "first_psn":0,"expected_psn":0,"timeout":14,"retry_cnt":7,"rnr_retry":7,"access":"","max_rd_atomic":1,
            "max_dest_rd_atomic":1,"send_slots":1,"receive_slots":1}}}}"#
        );
        for line in [state, configured] {
            live.hear(&serde_json::from_str(&line).unwrap());
        }
    }

    #[test]
    fn queue_pairs_of_programs_get_their_names_in_the_order_in_which_they_get_ready() {
        let plan = Scenario::read("f", FILE).unwrap().plan(&Values::new(), 1).unwrap();
        let mut live = Live::new(&plan).unwrap();
        assert_eq!(live.roles(0).len(), 2, "the first has no name, and takes a place");
        assert_eq!(live.roles(0)[1].1, Plan::role(0));
        assert_eq!((live.rules(0).len(), live.rules(1).len()), (1, 0));
        arrive(&mut live, 17, "rc");
        arrive(&mut live, 18, "ud");
        arrive(&mut live, 19, "rc");
        for qp in [17, 19] {
            let failed = format!(
                r#"{{"time":5,"host":"alice","name":"work:completed","data":{{"qp":{qp},"id":3,"operation":"write","status":"retry-exceeded","bytes":0,"cq":1,"reason":"x","vendor_error":20}}}}"#
            );
            live.hear(&serde_json::from_str(&failed).unwrap());
        }
        let ended = r#"{"time":6,"host":"alice","name":"qp:state_changed","data":{"qp":19,"from":"RTS","to":"ERR","reason":"x"}}"#;
        live.hear(&serde_json::from_str(ended).unwrap());
        let mut cards = Recorded(Vec::new());
        live.act(0, &mut cards);
        live.act(1_000_000, &mut cards);
        assert_eq!(cards.0, [(0, Port::Down), (1, Port::Down), (0, Port::Up), (1, Port::Up)]);
        let tally = Tally { matched: 1, fired: 1 };
        let outcome = live.judge(&[(RuleId(1), tally)], vec![Counters::default(); 2]);
        assert_eq!(outcome.verdict, Verdict::Pass, "{:?}", outcome.expectations);
        assert_eq!(outcome.skipped.len(), 1);
        let silent = live.judge(&[], vec![Counters::default(); 2]);
        assert_eq!(silent.verdict, Verdict::Fail, "a rule that never fired");
    }

    #[test]
    fn what_no_program_can_be_subjected_to_is_refused() {
        let fault = |text: &str| {
            format!("title = \"t\"\n[hosts]\nalice = {{}}\nbob = {{}}\n[[fault]]\nname = \"f\"\n{text}\n")
        };
        for (text, sentence) in [
            ("host = \"alice\"\naction = \"kill\"", "a program that is killed"),
            ("qp = \"alice.1\"\naction = { hold = \"1ms\" }", "the completions of a program"),
            ("link = \"alice -> bob\"\naction = { down = {} }", "one way only"),
        ] {
            let plan = Scenario::read("f", &fault(text)).unwrap().plan(&Values::new(), 1).unwrap();
            let why = Live::new(&plan).err().unwrap();
            assert!(why.contains(sentence), "{why}");
        }
    }

    #[test]
    fn the_files_for_programs_can_be_read() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/programs");
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            let scenario = Scenario::read(&path.display().to_string(), &text).unwrap();
            let plan = scenario.plan(&Values::new(), 1).unwrap();
            assert!(Live::new(&plan).is_ok(), "{}", path.display());
        }
    }
}
