use super::*;
use crate::plan::Change;
use crate::{ParameterValues, Scenario};
use softhca_engine::{AsyncEvent, CqId, QpConfiguration, Recovery};
use softhca_fabric::{Action, HostId, LinkState};
use softhca_types::{AccessFlags, Completion, CompletionFlags, CompletionOpcode, CompletionStatus};
use softhca_wire::{Mtu, Psn};
use std::net::IpAddr;

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
    completion = { qp = "alice.2", status = "RETRY_EXC_ERR", times = 1 }
    [[fault]]
    name = "later"
    on = "bob -> alice"
    after = { event = "PORT_ERR" }
    action = "drop"
    optional = true
    [[fault]]
    name = "restart"
    host = "bob"
    at = "2ms"
    after = { fault = "lose" }
    action = "restart"
    [[expect]]
    state = { qp = "alice.2", is = "error" }
    [[expect]]
    exit-code = 3
"#;

/// Its programs have ended if a test says so.
#[derive(Default)]
struct Recorded(Vec<Change>, Vec<String>, bool);

impl HostControl for Recorded {
    fn apply(&mut self, _: u64, change: &Change) -> Result<Effect, String> {
        self.0.push(*change);
        Ok(if self.2 { Effect::Nothing } else { Effect::Applied })
    }

    fn add_rule(&mut self, links: &[usize], rule: &Rule, name: &str) -> Result<(), String> {
        self.1.push(format!("{links:?}: {name} {:?}", rule.action));
        Ok(())
    }

    fn note_trigger(&mut self, _: usize, _: &FaultTrigger) -> Result<(), String> {
        Ok(())
    }
}

/// An event of alice.
fn happens(live: &mut LiveScenario<'_>, event: &Event) {
    let mut names = NameTable::new();
    names.add_card(HostId(4), "alice", IpAddr::from([127, 0, 0, 5]));
    live.on_event(Instant::from_nanos(1), &names, &NetworkEvent::Hca { host: HostId(4), event });
}

/// A queue pair of alice changes its state.
fn changes(live: &mut LiveScenario<'_>, qp: u32, from: QpState, to: QpState) {
    let qp = Qpn::new(qp);
    happens(live, &Event::QpStateChanged { qp, from, to, reason: Reason::Requested });
}

/// A queue pair of alice becomes ready to receive.
fn arrive(live: &mut LiveScenario<'_>, qp: u32, qp_type: QpType) {
    changes(live, qp, QpState::Init, QpState::ReadyToReceive);
    let configuration = QpConfiguration {
        qp_type,
        recovery: Recovery::Fatal,
        peer: None,
        dest_qp: None,
        path_mtu: Mtu::B1024,
        sq_psn: Psn::default(),
        rq_psn: Psn::default(),
        timeout: 14,
        ack_timeout: None,
        retry_cnt: 7,
        rnr_retry: 7,
        qp_access_flags: AccessFlags::empty(),
        max_rd_atomic: 1,
        max_dest_rd_atomic: 1,
        max_send_wr: 1,
        max_recv_wr: 1,
        send_cq: None,
        recv_cq: None,
    };
    happens(live, &Event::QpConfigured { qp: Qpn::new(qp), configuration });
}

#[test]
fn queue_pairs_of_programs_get_their_names_in_the_order_in_which_they_get_ready() {
    let plan = Scenario::parse("f", FILE).unwrap().plan(&ParameterValues::new(), 1).unwrap();
    let mut live = LiveScenario::new(&plan).unwrap();
    assert_eq!(live.roles(0).len(), 2, "the first has no name, and takes a place");
    assert_eq!(live.roles(0)[1].1, Plan::role_of(0));
    assert_eq!((live.rules(0).len(), live.rules(1).len()), (1, 0));
    arrive(&mut live, 17, QpType::Rc);
    arrive(&mut live, 18, QpType::Ud);
    arrive(&mut live, 19, QpType::Rc);
    for qp in [17, 19] {
        let completion = Completion {
            wr_id: 3,
            status: CompletionStatus::RetryExceededError,
            opcode: CompletionOpcode::Write,
            flags: CompletionFlags::empty(),
            byte_len: 0,
            imm_data: 0,
            qpn: Qpn::new(qp),
            src_qp: Qpn::default(),
            service_level: 0,
            route: Default::default(),
            vendor_error: 20,
            timestamp: 5,
        };
        happens(&mut live, &Event::Completed { cq: CqId(1), completion, reason: Reason::Flushed });
    }
    changes(&mut live, 19, QpState::ReadyToSend, QpState::Error);
    let mut cards = Recorded::default();
    live.run_due(0, &mut cards);
    live.run_due(1_000_000, &mut cards);
    let flap = |state| Change::LinkState { link: 0, directions: [true, true], state };
    assert_eq!(cards.0, [flap(LinkState::Down), flap(LinkState::Up)]);
    let counters = RuleCounters { matched: 1, fired: 1 };
    // Faults that wait for an event or another fault.
    assert!(live.has_waiting_faults() && cards.1.is_empty());
    happens(&mut live, &Event::AsyncEventRaised { client: None, event: AsyncEvent::PortDown });
    live.on_rule_counters(2_000_000, &[(RuleId(1), counters)]);
    live.run_due(2_000_000, &mut cards);
    assert_eq!((cards.0.len(), &cards.1[..]), (2, &["[0]: later Drop".to_owned()][..]));
    for now_ns in [4_000_000, 5_000_000] {
        live.on_rule_counters(now_ns, &[(RuleId(1), counters)]);
        live.run_due(now_ns, &mut cards);
    }
    assert_eq!(cards.0[2..], [Change::RestartProgram { host: 1 }]);
    live.on_program_exit(3);
    let outcome = live.evaluate(vec![(RuleId(1), counters)], vec![Counters::default(); 2]);
    assert_eq!(outcome.verdict, Verdict::Pass, "{:?}", outcome.expectations);
    assert_eq!(outcome.skipped.len(), 0);
    live.on_program_exit(4);
    let other_code = live.evaluate(vec![(RuleId(1), counters)], vec![Counters::default(); 2]);
    assert_eq!(other_code.verdict, Verdict::Fail, "{:?}", other_code.expectations);
    let silent = live.evaluate(Vec::new(), vec![Counters::default(); 2]);
    assert_eq!(silent.verdict, Verdict::Fail, "a rule that never fired");
}

#[test]
fn faults_that_external_programs_do_not_support_are_rejected() {
    let fault = |text: &str| {
        format!("title = \"t\"\n[hosts]\nalice = {{}}\nbob = {{}}\n[[fault]]\nname = \"f\"\n{text}\n")
    };
    for (text, sentence) in [
        ("host = \"alice\"\naction = { withhold-receives = \"1ms\" }", "a fault of a host or a link"),
        ("host = \"alice\"\naction = { raise-event = \"qp-fatal\" }", "without `verb` is not supported"),
        ("link = \"alice -> bob\"\naction = { link-down = {} }", "one direction only"),
    ] {
        let plan = Scenario::parse("f", &fault(text)).unwrap().plan(&ParameterValues::new(), 1).unwrap();
        let why = LiveScenario::new(&plan).err().unwrap();
        assert!(why.contains(sentence), "{why}");
    }
}

#[test]
fn what_cannot_be_checked_for_programs_is_rejected() {
    for (text, sentence) in [
        ("[[expect]]\nfinish = {}", "what a program meant to do is not known"),
        ("[[expect]]\nverb-error = { host = \"alice\" }", "the calls of a program are its own"),
        ("[[expect]]\ncompletion = { before = \"1ms\" }", "real sockets keep no time"),
        ("invariants = [\"completions-in-order\"]", "invariants cannot be checked"),
    ] {
        let text = format!("title = \"t\"\n{text}\n[hosts]\nalice = {{}}\nbob = {{}}\n");
        let plan = Scenario::parse("f", &text).unwrap().plan(&ParameterValues::new(), 1).unwrap();
        let why = LiveScenario::new(&plan).err().unwrap();
        assert!(why.contains(sentence), "{why}");
    }
}

#[test]
fn rate_delay_jitter_and_loss_of_a_link_are_rules_of_its_hosts() {
    let text = "title = \"t\"\n[hosts]\nalice = {}\nbob = {}\n[[link]]\nbetween = [\"alice\", \"bob\"]\n\
                rate = \"40mbit\"\ndelay = \"2ms\"\njitter = \"1ms\"\nloss = \"1%\"\n";
    let plan = Scenario::parse("f", text).unwrap().plan(&ParameterValues::new(), 1).unwrap();
    let live = LiveScenario::new(&plan).unwrap();
    for host in [0, 1] {
        let actions: Vec<Action> = live.rules(host).iter().map(|(rule, _)| rule.action).collect();
        let bits_per_second = std::num::NonZeroU64::new(40_000_000).unwrap();
        let jitter = Action::Jitter { up_to_ns: 1_000_000 };
        let delay = Action::Delay { ns: 2_000_000 };
        assert_eq!(actions, [Action::Drop, jitter, Action::LimitRate { bits_per_second }, delay]);
    }
}

#[test]
fn the_files_for_programs_can_be_read() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/programs");
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let scenario = Scenario::parse(&path.display().to_string(), &text).unwrap();
        let plan = scenario.plan(&ParameterValues::new(), 1).unwrap();
        assert!(LiveScenario::new(&plan).is_ok(), "{}", path.display());
    }
}

#[test]
fn a_kill_of_a_program_that_had_ended_fails_the_run() {
    let text = "title = \"t\"\n[hosts]\nalice = {}\nbob = {}\n[[fault]]\nname = \"kill\"\nhost = \"bob\"\nat = \"1ms\"\n\
                action = \"kill\"\n[[fault]]\nhost = \"bob\"\nafter = { fault = \"kill\" }\naction = \"kill\"\noptional = true\n";
    let plan = Scenario::parse("f", text).unwrap().plan(&ParameterValues::new(), 1).unwrap();
    for (has_ended, verdict) in [(false, Verdict::Pass), (true, Verdict::Fail)] {
        let mut live = LiveScenario::new(&plan).unwrap();
        let mut hosts = Recorded(Vec::new(), Vec::new(), has_ended);
        live.run_due(1_000_000, &mut hosts);
        let outcome = live.evaluate(Vec::new(), vec![Counters::default(); 2]);
        assert_eq!(outcome.verdict, verdict, "{outcome:?}");
        assert_eq!(outcome.rules[0].fired, u64::from(!has_ended));
        assert_eq!(hosts.0.len(), if has_ended { 1 } else { 2 }, "no fault follows one without effect");
        for failed in outcome.failures() {
            assert!(failed.detail.contains("the program had ended"), "{failed:?}");
        }
    }
}

#[test]
fn a_program_that_does_not_end_is_reported_with_its_time_limit() {
    for (duration, limit) in [("", "120 s"), ("duration = \"6s\"\n", "6 s")] {
        let text = format!(
            "title = \"t\"\n{duration}[hosts]\nalice = {{}}\nbob = {{}}\n[[workload]]\nname = \"w\"\n\
             command = {{ host = \"bob\", argv = [\"sleep\", \"1000\"] }}\n"
        );
        let plan = Scenario::parse("f", &text).unwrap().plan(&ParameterValues::new(), 1).unwrap();
        let mut live = LiveScenario::new(&plan).unwrap();
        arrive(&mut live, 17, QpType::Rc);
        let outcome = live.evaluate(Vec::new(), vec![Counters::default(); 2]);
        let details: Vec<&str> = outcome.failures().map(|failed| failed.detail.as_str()).collect();
        assert_eq!(details, [format!("it did not end within {limit}")]);
    }
}

const KILL_AT_A_PACKET: &str = "title = \"t\"\n[hosts]\nalice = {}\nbob = {}\n[[fault]]\nname = \"third\"\n\
    on = \"alice -> bob\"\nskip = 2\ntimes = 1\naction = \"count\"\n[[fault]]\nname = \"kill\"\nhost = \"bob\"\n\
    after = { fault = \"third\" }\naction = \"kill\"\n";

#[test]
fn a_packet_waits_until_the_program_is_killed() {
    let plan = Scenario::parse("f", KILL_AT_A_PACKET).unwrap().plan(&ParameterValues::new(), 1).unwrap();
    let counters = |fired| [(RuleId(1), RuleCounters { matched: 3, fired })];
    for (done_ns, is_late) in [(105_000_000, false), (112_000_000, true)] {
        let mut live = LiveScenario::new(&plan).unwrap();
        assert!(matches!(live.rules(0)[..], [(Rule { action: Action::Hold { .. }, .. }, "third")]));
        let mut hosts = Recorded::default();
        live.on_rule_counters(10_000_000, &counters(0));
        live.on_rule_counters(14_000_000, &counters(1));
        live.run_due(14_000_000, &mut hosts);
        assert_eq!(hosts.0, [Change::KillProgram { host: 1 }]);
        live.check_held_packets(done_ns);
        assert_eq!(live.error().is_some(), is_late, "{:?}", live.error());
        live.check_held_packets(u64::MAX);
        assert_eq!(live.error().is_some(), is_late, "the packet was held once");
    }
}

#[test]
fn a_packet_that_cannot_wait_for_a_kill_is_refused() {
    let text = KILL_AT_A_PACKET.replace("\"count\"", "\"drop\"");
    let plan = Scenario::parse("f", &text).unwrap().plan(&ParameterValues::new(), 1).unwrap();
    let why = LiveScenario::new(&plan).err().unwrap();
    assert!(why.contains("\"third\" does not hold its packet"), "{why}");
}

#[test]
fn a_foreign_host_is_only_a_peer() {
    let file = |rest: &str| format!("title = \"t\"\n[hosts]\nrx = {{}}\nrxe = {{ foreign = true }}\n{rest}");
    let plan =
        |rest: &str| Scenario::parse("f", &file(rest)).unwrap().plan(&ParameterValues::new(), 1).unwrap();
    let good = plan(
        "[[fault]]\nname = \"lose\"\non = \"rx -> rxe\"\ntimes = 1\naction = \"drop\"\n\
         [[expect]]\ncounter = { host = \"rx\", name = \"packet_seq_err\", is = 1 }\n\
         [[expect]]\npacket = { on = \"rx -> rxe\", class = \"request\" }\n",
    );
    let live = LiveScenario::new(&good).unwrap();
    assert_eq!((live.rules(0).len(), live.rules(1).len()), (2, 0));
    assert_eq!(good.own_hosts().count(), 1);
    assert!(good.check_has_queue_pairs().is_err());
    for (rest, sentence) in [
        ("[[expect]]\npacket = { on = \"rxe -> rx\", class = \"nak\" }", "counts what rxe sends"),
        (
            "[[fault]]\nname = \"f\"\non = \"rxe -> rx\"\naction = \"drop\"",
            "\"f\" concerns what rxe does or sends",
        ),
        (
            "[[fault]]\nname = \"f\"\nhost = \"rxe\"\naction = \"kill\"",
            "\"f\" concerns what rxe does or sends",
        ),
        ("[[expect]]\nstate = { qp = \"rxe.1\", is = \"rts\" }", "of rxe, which is foreign"),
        (
            "[[expect]]\ncounter = { host = \"rxe\", name = \"sent_pkts\", is = 1 }",
            "of rxe, which is foreign",
        ),
    ] {
        let plan = plan(rest);
        let why = LiveScenario::new(&plan).err().unwrap_or_default();
        assert!(why.contains(sentence), "{rest}: {why}");
    }
}
