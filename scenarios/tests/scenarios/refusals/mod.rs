//! What makes no sense is rejected when the file is read, at its place and with advice.

mod connections;
mod limits;

use softhca_scenarios::{Diagnostic, ParameterValues, Recording, Scenario, Verdict, simulate};

const HEAD: &str = r#"title = "t"
duration = "1ms"
[hosts]
alice = {}
bob = {}
[[link]]
between = ["alice", "bob"]
[[pair]]
qps = ["alice.1", "bob.1"]
[[step]]
name = "w"
qp = "alice.1"
write = { bytes = 4000 }
"#;

fn read(rest: &str) -> Result<Scenario, Diagnostic> {
    Scenario::parse("s.toml", &format!("{HEAD}{rest}"))
}

/// The problem of a file that has `rest` behind the usual beginning, as people see it.
fn rejection(rest: &str) -> String {
    match read(rest) {
        Err(problem) => problem.to_string(),
        Ok(_) => panic!("this was accepted:\n{rest}"),
    }
}

#[track_caller]
fn rejected(rest: &str, words: &[&str]) {
    let message = rejection(rest);
    for word in words {
        assert!(message.contains(word), "{word:?} is not in:\n{message}");
    }
}

fn fault(matching: &str, more: &str) -> String {
    format!("[[fault]]\non = \"alice -> bob\"\nmatch = {{ {matching} }}\naction = \"drop\"\n{more}")
}

#[test]
fn a_problem_has_file_line_column_and_advice() {
    let message = rejection("[[fault]]\non = \"alice -> bobb\"\naction = \"drop\"\n");
    let expected = "s.toml:15:6: unknown host or switch \"bobb\"\n 15 | on = \"alice -> bobb\"\n    |      ^\n   \
                    help: did you mean `bob`?";
    assert_eq!(message, expected);
}

#[test]
fn xrc_is_rejected_by_name_with_the_reason() {
    rejected(
        "[connection]\ntransport = \"xrc-initiator\"\n",
        &["s.toml:15:13", "XRC", "initiator", "use \"rc\""],
    );
    let pair = "[[pair]]\nqps = [\"alice.2\", \"bob.2\"]\ntransport = \"xrc-initiator\"\n";
    rejected(pair, &["s.toml:16:13", "shared receive queue"]);
}

#[test]
fn groups_are_of_datagram_queue_pairs_and_multicast_addresses() {
    let ud = "[[pair]]\nqps = [\"alice.2\", \"bob.2\"]\ntransport = \"ud\"\n[[step]]\nqp = \"alice.2\"\n";
    let step = |what: &str| format!("{ud}{what}\n");
    read(&step("attach-mcast = \"239.1.2.3\"")).expect("this is right");
    rejected(
        "[[step]]\nqp = \"alice.1\"\nattach-mcast = \"239.1.2.3\"\n",
        &["s.toml:16:16", "only UD", "transport = \"ud\""],
    );
    rejected(
        &step("attach-mcast = \"10.0.0.1\""),
        &["10.0.0.1 is not a multicast address", "239.255.255.255"],
    );
    rejected(
        &step("attach-mcast = \"ff02::1\""),
        &["alice has the address 10.0.0.1", "other address family"],
    );
    rejected(
        &step("detach-mcast = \"239.1.2.3\""),
        &["alice.2 is not attached to 239.1.2.3", "attach-mcast = "],
    );
    rejected(&step("send = { bytes = 10, group = \"10.0.0.1\" }"), &["not a multicast address"]);
    rejected(
        &step("send = { bytes = 10, group = \"239.1.2.3\", to = \"bob.2\" }"),
        &["either `to` or `group`"],
    );
    let other = "[[step]]\nqp = \"alice.1\"\nsend = { bytes = 10, group = \"239.1.2.3\" }\n";
    rejected(other, &["only UD"]);
}

#[test]
fn names_that_do_not_exist_are_rejected() {
    rejected(
        "[[step]]\nqp = \"alice.2\"\nwrite = { bytes = 1 }\n",
        &["s.toml:15:6", "unknown queue pair \"alice.2\"", "alice.1"],
    );
    rejected(
        "[[fault]]\nlink = \"alice - carol\"\naction = { link-down = {} }\n",
        &["unknown host or switch \"carol\""],
    );
    rejected(
        "[[expect]]\ncounter = { host = \"bob\", name = \"sent_pkt\", is = 1 }\n",
        &["did you mean `sent_pkts`"],
    );
    rejected("[[expect]]\nevent = { host = \"bob\", name = \"QP_FATALL\" }\n", &["did you mean `QP_FATAL`"]);
    rejected("[[expect]]\ncompletion = { step = \"x\" }\n", &["unknown step \"x\""]);
    rejected("[[expect]]\ngoodput = { of = \"nothing\" }\n", &["unknown queue pair, workload or step"]);
}

#[test]
fn unknown_fields_and_words_are_rejected_with_the_nearest() {
    rejected(
        "[[fault]]\non = \"alice -> bob\"\nacton = \"drop\"\n",
        &["unknown field `acton`", "did you mean `action`"],
    );
    rejected(
        "[[fault]]\non = \"alice -> bob\"\naction = \"dropp\"\n",
        &["unknown variant `dropp`", "did you mean `drop`"],
    );
    rejected(&fault("clas = \"data\"", ""), &["did you mean `class`"]);
    rejected(&fault("opcode = \"WRITE_FRIST\"", ""), &["unknown opcode", "did you mean `WRITE_FIRST`"]);
    rejected("[[step]]\nqp = \"alice.1\"\nat = \"5\"\nwrite = { bytes = 1 }\n", &["missing unit"]);
}

#[test]
fn rules_that_can_never_fire_are_rejected() {
    let never = "can never fire";
    rejected(
        &fault("class = \"ack\", opcode = \"WRITE_FIRST\"", ""),
        &[never, "no packet of this class has this opcode"],
    );
    rejected(&fault("class = \"request\", psn = \"+4\"", ""), &[never, "use 4 PSNs, +0 to +3"]);
    rejected(&fault("message = 1", ""), &[never, "1 messages"]);
    rejected(&fault("packet = 4", ""), &[never, "longest message has 4 packets"]);
    rejected(&fault("time = \"2ms..3ms\"", ""), &[never, "after the end of the run"]);
    rejected(&fault("class = \"read-request\"", ""), &[never]);
    rejected(&fault("class = \"ack\"", ""), &[never, "direction"]);
    rejected(&fault("qp = \"bob.1\", class = \"request\"", ""), &[never]);
    rejected(&fault("priority = 8", ""), &[never]);
    rejected(&fault("", "times = 0\n"), &[never]);
    rejected(&fault("", "every = 0\n"), &[never]);
    rejected(&fault("", "pattern = \"OO\"\n"), &[never, "no X"]);
    rejected(&fault("", "probability = 0\n"), &[never]);
    rejected(
        "[[fault]]\nlink = \"alice - bob\"\nat = \"1ms\"\naction = { link-down = {} }\n",
        &["never fire"],
    );
    let rewrite = "[[fault]]\non = \"alice -> bob\"\nmatch = { opcode = \"WRITE_MIDDLE\" }\naction = { rewrite = { field = \"rkey\", value = 1 } }\n";
    rejected(rewrite, &[never, "no matching packet has this field"]);
}

#[test]
fn what_is_possible_is_accepted() {
    for matching in [
        "psn = \"+3\"",
        "message = 0",
        "packet = 3",
        "class = \"write\", opcode = [\"WRITE_FIRST\", \"SEND_ONLY\"]",
        "time = \"0..1ms\"",
        "transmission = 2",
    ] {
        read(&fault(matching, "optional = true\n")).unwrap_or_else(|problem| panic!("{problem}"));
    }
}

#[test]
fn an_action_goes_with_its_target() {
    rejected(
        "[[fault]]\nhost = \"bob\"\naction = \"drop\"\n",
        &["s.toml:16:10", "`drop` does not apply to hosts: it applies to packets", "`drop` needs `on`"],
    );
    rejected(
        "[[fault]]\nlink = \"alice - bob\"\naction = { stall = \"1us\" }\n",
        &["`stall` does not apply to links: it applies to hosts"],
    );
    rejected("[[fault]]\nhost = \"bob\"\naction = { fail = \"EIO\" }\n", &["missing `verb`"]);
    rejected("[[fault]]\naction = \"kill\"\n", &["no target", "needs `host`, or `host` and `verb`"]);
}

#[test]
fn bursts_are_of_packets() {
    let burst = "burst = { enter = 0.1, leave = 0.5 }\n";
    rejected(
        &format!("[[fault]]\nqp = \"alice.1\"\naction = {{ delay-completion = \"1us\" }}\n{burst}"),
        &["s.toml:17:1", "`burst` requires a packet fault"],
    );
    rejected(
        &format!("[[fault]]\nhost = \"bob\"\nverb = \"post_send\"\naction = {{ fail = \"EIO\" }}\n{burst}"),
        &["`burst` requires a packet fault"],
    );
    read(&fault("", &format!("optional = true\n{burst}"))).unwrap_or_else(|problem| panic!("{problem}"));
}

#[test]
fn what_cannot_be_carried_out_is_rejected_and_not_ignored() {
    rejected(
        "[[workload]]\ncommand = { host = \"bob\", argv = [\"true\"] }\n",
        &["cannot connect queue pairs", "the programs create the queue pairs"],
    );
    rejected("[connection]\nrate-limit = \"1gbit\"\n", &["unknown field `rate-limit`"]);
    rejected(
        "[device]\nreceive-buffer = \"1MB\"\n",
        &["s.toml:15:1", "never fills its buffer", "receive-rate"],
    );
    rejected(
        "[device]\npayload = \"elided\"\n[[expect]]\nmemory = { qp = \"bob.1\", bytes = 4, holds = \"zeroes\" }\n",
        &["packets without payload"],
    );
}

#[test]
fn switches_and_congestion_control_are_checked() {
    let switch = |spec: &str| format!("[switches]\ntor = {{ {spec} }}\n");
    rejected(&switch("pfc = { xoff = \"10KB\", xon = \"20KB\" }"), &["xon (20000 bytes) exceeds xoff"]);
    rejected(&switch("pfc = { priorities = [8] }"), &["priorities are 0 to 7"]);
    rejected(&switch("ecn = { kmin = \"2KB\", kmax = \"1KB\", pmax = 1 }"), &["kmin exceeds kmax"]);
    rejected(&switch("pfc = { xof = \"10KB\" }"), &["did you mean `xoff`"]);
    rejected("[device]\ncongestion-control = { algorithm = \"dcqcn\", gain = 0 }\n", &["`gain` cannot be 0"]);
    let change =
        "[[fault]]\nswitch = \"tor\"\naction = { set-ecn = { kmin = \"2KB\", kmax = \"1KB\", pmax = 1 } }\n";
    rejected(&format!("{}{change}", switch("")), &["kmin exceeds kmax"]);
}

#[test]
fn connections_are_checked() {
    rejected("[[pair]]\nqps = [\"alice.1\", \"bob.2\"]\n", &["alice.1 is already in a pair"]);
    rejected("[[pair]]\nqps = [\"alice.2\", \"bob\"]\n", &["not the name of a queue pair", "alice.1"]);
    rejected("[[pair]]\nqps = [\"alice.2\", \"bob.2\"]\nmtu = 1500\n", &["1500 is not a path MTU"]);
    rejected(
        "[[pair]]\nqps = [\"alice.2\", \"bob.2\"]\ntransport = \"ud\"\n[[step]]\nqp = \"alice.2\"\nwrite = { bytes = 1 }\n",
        &["UD does not support this operation"],
    );
    rejected(
        "[[workload]]\nstream = { qp = \"alice.1\", op = \"write\", bytes = 1, depth = 999 }\n",
        &["depth is 999"],
    );
    rejected(
        "[[step]]\nqp = \"alice.1\"\nat = \"2ms\"\nwrite = { bytes = 1 }\n",
        &["after the end of the run"],
    );
    rejected("[[step]]\nqp = \"alice.1\"\n", &["has no action"]);
}

#[test]
fn parameters_are_checked_and_swept() {
    let text = format!(
        "{HEAD}{}[parameters]\nwhich = {{ default = 1, range = \"0..3\" }}\nsize = {{ default = \"4KB\" }}\n",
        fault("psn = \"+${which}\"", "times = 1\n")
    );
    let scenario = Scenario::parse("s.toml", &text).unwrap_or_else(|problem| panic!("{problem}"));
    let set = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
    assert_eq!(scenario.sweep(&set("which", "all")).expect("a sweep").len(), 4);
    assert!(scenario.sweep(&set("wich", "1")).unwrap_err().to_string().contains("did you mean `which`"));
    assert!(
        scenario
            .sweep(&set("which", "7"))
            .unwrap_err()
            .to_string()
            .contains("not an allowed value of the parameter")
    );
    assert!(scenario.sweep(&set("size", "all")).is_err());
    let unknown = format!("{HEAD}{}", fault("psn = \"$x\"", ""));
    assert!(Scenario::parse("s.toml", &unknown).unwrap_err().to_string().contains("no such parameter"));
}

#[test]
fn a_rule_that_did_not_fire_fails_the_run_unless_it_is_optional() {
    let verdict = |more: &str| {
        let scenario = read(&fault("transmission = 2", more)).unwrap_or_else(|problem| panic!("{problem}"));
        simulate(&scenario.plan(&ParameterValues::new(), 1).expect("a plan"), Recording::Digest)
    };
    let outcome = verdict("name = \"again\"\n");
    assert_eq!(outcome.verdict, Verdict::Fail);
    assert_eq!(
        outcome.failures().map(|failure| failure.text.as_str()).collect::<Vec<_>>(),
        ["the fault \"again\" happens"]
    );
    assert_eq!(verdict("optional = true\n").verdict, Verdict::Pass);
}

#[test]
fn a_failed_expectation_says_what_there_was() {
    let rest = "[[expect]]\ncompletion = { qp = \"alice.1\", op = \"write\", status = \"WR_FLUSH_ERR\" }\n[[expect]]\nmemory = { qp = \"bob.1\", bytes = 4000, holds = \"zeroes\" }\n";
    let scenario = read(rest).unwrap_or_else(|problem| panic!("{problem}"));
    let outcome =
        simulate(&scenario.plan(&ParameterValues::new(), 1).expect("a plan"), Recording::Everything);
    let details: Vec<&str> = outcome.failures().map(|failure| failure.detail.as_str()).collect();
    assert!(details[0].starts_with("0 of them; there were: write #1 SUCCESS"), "{details:?}");
    assert!(details[1].contains("bytes differ, the first at offset 0"), "{details:?}");
    let around = outcome.failures().next().and_then(|failure| failure.location.clone()).expect("a place");
    let ladder = outcome
        .artifacts
        .as_ref()
        .and_then(|kept| kept.ladder_at(&around, softhca_trace::LadderStyle::default()));
    assert!(ladder.expect("a ladder").contains("WRITE_FIRST"));
}

#[test]
fn shrinking_leaves_the_faults_that_matter() {
    // Only the loss of +2 is fatal; the marks and the delay are not.
    let rest = format!(
        "{}{}{}[[expect]]\ncompletion = {{ qp = \"alice.1\", status = \"SUCCESS\" }}\n",
        "[[fault]]\nname = \"marks\"\non = \"alice -> bob\"\naction = \"mark-ce\"\n",
        "[[fault]]\nname = \"late\"\non = \"bob -> alice\"\naction = { delay = \"1us\" }\noptional = true\n",
        fault("psn = \"+2\"", "name = \"loss\"\ntimes = 1\n"),
    );
    let scenario = read(&rest).unwrap_or_else(|problem| panic!("{problem}"));
    let plan = scenario.plan(&ParameterValues::new(), 1).expect("a plan");
    let shrunk = softhca_scenarios::shrink(&plan, scenario.text(), |_| {}).expect("it fails");
    let loss = "[[fault]]\naction = \"drop\"\nmatch = { psn = \"+2\" }\nname = \"loss\"\non = \"alice -> bob\"\ntimes = 1";
    assert_eq!(shrunk.faults, [loss]);
    assert!(shrunk.before >= 5, "every mark counts: {}", shrunk.before);
    // Of a rule that hits by chance, the one packet is found.
    let rest = "[[fault]]\nname = \"chance\"\non = \"alice -> bob\"\naction = \"drop\"\nprobability = 0.9\noptional = true\n\
                [[expect]]\ncompletion = { qp = \"alice.1\", status = \"SUCCESS\" }\n";
    let scenario = read(rest).expect("a scenario");
    let plan = scenario.plan(&ParameterValues::new(), 3).expect("a plan");
    let shrunk = softhca_scenarios::shrink(&plan, scenario.text(), |_| {}).expect("it fails");
    assert_eq!(shrunk.faults.len(), 1, "{:?}", shrunk.faults);
    assert!(shrunk.faults[0].contains("psn = \"+"), "{:?}", shrunk.faults);
    // The minimal file fails too.
    let minimal = softhca_scenarios::with_faults(scenario.text(), &shrunk.faults);
    let minimal = Scenario::parse("minimal.toml", &minimal).unwrap_or_else(|problem| panic!("{problem}"));
    let plan = minimal.plan(&ParameterValues::new(), 3).expect("a plan");
    assert_eq!(simulate(&plan, Recording::Digest).verdict, Verdict::Fail);
}

#[test]
fn a_fault_that_waits_names_something_that_can_happen() {
    let link = "[[fault]]\nlink = \"alice - bob\"\naction = { link-down = {} }\n";
    rejected(&format!("{link}after = {{ step = \"x\" }}\n"), &["unknown earlier step \"x\""]);
    rejected(&format!("{link}after = {{ time = \"1us\" }}\n"), &["waits for a step, an event", "use `at`"]);
    rejected(&format!("{link}after = {{ verb = \"post_send\" }}\n"), &["action = \"count\""]);
    rejected(&format!("{link}after = {{ event = \"RAIN\" }}\n"), &["not an asynchronous event"]);
    rejected(&format!("{link}after = {{ step = \"w\", fault = \"y\" }}\n"), &["exactly one"]);
    rejected(&format!("{link}verb = \"post_send\"\n"), &["`verb` requires a fault of calls"]);
    rejected(&format!("{link}nth = 2\n"), &["`nth` requires a fault of calls", "use `at` or `after`"]);
    rejected(&fault("class = \"write\"", "vendor-error = 3"), &["`vendor-error` requires"]);
    for action in ["restart", "kill-daemon", "restart-daemon"] {
        let fault = format!("[[fault]]\nhost = \"alice\"\naction = \"{action}\"\n");
        rejected(&fault, &["have no process", "`softhca exec`"]);
    }
    rejected("[[expect]]\nexit-code = 1\n", &["only the program of `softhca exec`"]);
    rejected(
        "[[fault]]\non = \"alice -> bob\"\naction = { limit-rate = 0 }\n",
        &["no packet passes at rate 0", "use drop"],
    );
    let slow = |rest: &str| format!("[[fault]]\nhost = \"alice\"\n{rest}\n");
    rejected(&slow("action = { slow-device = \"0s\" }"), &["takes no time for a packet is not slow"]);
    rejected(
        &slow("at = \"1ms\"\naction = { slow-device = \"1ms\" }"),
        &["from what it waits for", "use after"],
    );
    rejected(&slow("action = { slow-devise = \"1ms\" }"), &["slow-device"]);
    rejected(&slow("action = { raise-event = \"device-remove\" }"), &["device-removed"]);
}
