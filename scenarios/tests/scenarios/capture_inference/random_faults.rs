//! Random losses, damage, reordering, delays and duplicates of every class of packet, and the scenarios of the library:
//! no statement that is inferred from a capture of the run, wherever it was taken, contradicts the event log.

use super::captures::Captures;
use super::library;
use super::truth::{Connection, Truth};
use softhca_scenarios::{ParameterValues, Plan, Recording, Scenario, simulate};
use softhca_trace::EventLogReader;
use softhca_trace::log::Entry;
use std::fmt::Write;

/// Runs with a longer log, in bytes, are left out: each place has a capture.
const MAX_LOG_OF_ALL_PLACES: usize = 20_000_000;

/// Another number of runs is in `SOFTHCA_RUNS`.
const RUNS: u64 = 200;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn choose<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// A scenario in which alice posts a few requests to bob over a switch, and packets are hit by a few rules.
fn scenario(seed: u64) -> String {
    let mut random = Random(seed);
    let recovery = random.choose(&["go-back-n", "go-back-n", "go-back-n", "fatal"]);
    let acks = random.choose(&["per-request", "coalesce"]);
    let late_receives = random.below(4) == 0;
    let receives = if late_receives { 0 } else { 64 };
    let mut text = format!(
        "title = \"seed {seed}\"\n[device]\nrecovery = \"{recovery}\"\nacks = \"{acks}\"\n\
         [hosts]\nalice = {{}}\nbob = {{}}\n\
         [topology]\nstar = {{ switch = \"sw\", delay = \"1us\", rate = \"100gbit\" }}\n\
         [[pair]]\nqps = [\"alice.1\", \"bob.1\"]\ntimeout = 10\nmin-rnr-timer = 14\nposted-receives = {receives}\n\
         [[step]]\nqp = \"alice.1\"\nwrite = {{ bytes = 1 }}\n"
    );
    // The first message and its ACK are whole: they show that the hosts compute the ICRC.
    let mut at = 20_000;
    // Each operation once, from a random one on, then others.
    let first = random.below(4);
    for turn in 0..4 + random.below(5) {
        at += random.below(3) * random.below(4_000);
        let bytes = 1 + random.below(8) * 700;
        let operation = if turn < 4 { 1 + (first + turn) % 4 } else { random.below(6) };
        let work = match operation {
            0 | 1 => format!("read = {{ bytes = {bytes} }}"),
            2 => format!("write = {{ bytes = {bytes} }}"),
            3 => "fetch-add = { add = 1 }".into(),
            4 => format!("send = {{ bytes = {bytes} }}"),
            _ => format!("write = {{ bytes = {bytes}, imm-data = 7 }}"),
        };
        let _ = writeln!(text, "[[step]]\nat = \"{at}ns\"\nqp = \"alice.1\"\n{work}");
        if late_receives {
            let _ = writeln!(
                text,
                "[[step]]\nat = \"{}us\"\nqp = \"bob.1\"\nreceive = {{ bytes = 8192 }}",
                random.below(3_000)
            );
        }
    }
    for rule in 0..1 + random.below(4) {
        let requests = random.below(2) == 0;
        let (links, classes): (&[&str], &[&str]) = match requests {
            true => (&["alice -> sw", "sw -> bob"], &["request", "read-request", "atomic", "write", "send"]),
            false => (
                &["bob -> sw", "sw -> alice"],
                &["response", "read-response", "read-response", "atomic-response", "ack", "nak", "rnr-nak"],
            ),
        };
        let action = random.choose(&[
            "\"drop\"",
            "\"drop\"",
            "\"drop\"",
            "{ duplicate = 1 }",
            "{ reorder = { by = 1, within = \"20us\" } }",
            "{ reorder = { by = 3, within = \"20us\" } }",
            "{ delay = \"3us\" }",
            "{ delay = \"15us\" }",
            // A request that arrives after its ACK timer expired looks like a retransmission.
            if requests { "\"drop\"" } else { "{ delay = \"7ms\" }" },
            "{ corrupt = { bit = 100 } }",
        ]);
        let (on, class) = (random.choose(links), random.choose(classes));
        let how =
            random.choose(&["times = 1", "probability = 0.1", "probability = 0.3", "skip = 1\ntimes = 2"]);
        let _ = writeln!(
            text,
            "[[fault]]\nname = \"rule {rule}\"\non = \"{on}\"\nmatch = {{ class = \"{class}\", time = \"20us..\" }}\naction = {action}\n{how}\noptional = true"
        );
    }
    text
}

/// The false statements about captures of one run.
fn mistakes(seed: u64) -> Option<String> {
    let text = scenario(seed);
    let scenario = Scenario::parse("random", &text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let plan = scenario.plan(&ParameterValues::new(), seed).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let wrong = false_statements_about(&plan)?;
    Some(format!("{wrong}\n{text}\nSOFTHCA_SEED={seed} runs it alone\n"))
}

/// The false statements about captures of a run, and what happened; none if its log is too long.
fn false_statements_about(plan: &Plan) -> Option<String> {
    let artifacts = simulate(plan, Recording::EveryLink).artifacts?;
    if artifacts.events.len() > MAX_LOG_OF_ALL_PLACES {
        return None;
    }
    let reader = EventLogReader::new(&artifacts.events[..]).expect("a log");
    let header = reader.header().clone();
    let log: Vec<Entry> = reader.map(|entry| entry.expect("an entry")).collect();
    let wrong = Captures::new(&artifacts.capture).false_statements(&header, &log);
    (!wrong.is_empty()).then(|| {
        let truths =
            Connection::all(&header, &log).into_iter().map(|connection| Truth::new(connection, &log));
        let story: String = truths.map(|truth| truth.text()).collect();
        format!("{}\n{story}", wrong.join("\n"))
    })
}

/// The captures of each scenario of the library, taken at each host and switch. After a gap, go-back-0 sends packets again
/// that had arrived: no capture tells them from duplicates.
#[test]
#[ignore = "it takes minutes: .ci/full runs it"]
fn no_statement_about_a_capture_of_the_library_is_false() {
    let mut wrong = Vec::new();
    for (name, text) in library() {
        if text.contains("\"go-back-0\"") {
            continue;
        }
        let scenario = Scenario::parse(&name, &text).expect("a scenario");
        let plan = scenario.plan(&ParameterValues::new(), 1).expect("a plan");
        wrong.extend(false_statements_about(&plan).map(|story| format!("{name}: {story}")));
    }
    if std::env::var_os("SOFTHCA_SHOW").is_some() {
        wrong.iter().for_each(|run| println!("{run}"));
    }
    let shown = wrong.first().cloned().unwrap_or_default();
    assert!(wrong.is_empty(), "{} scenarios:\n{shown}", wrong.len());
}

#[test]
fn no_statement_about_a_capture_is_false() {
    let seeds = match std::env::var("SOFTHCA_SEED") {
        Ok(seed) => vec![seed.parse().expect("a number")],
        Err(_) => {
            let runs = std::env::var("SOFTHCA_RUNS").map_or(RUNS, |runs| runs.parse().expect("a number"));
            (1..=runs).collect()
        }
    };
    let wrong: Vec<String> = seeds.iter().filter_map(|seed| mistakes(*seed)).collect();
    if std::env::var_os("SOFTHCA_SHOW").is_some() {
        wrong.iter().for_each(|run| println!("{run}"));
    }
    let shown = wrong.first().cloned().unwrap_or_default();
    assert!(wrong.is_empty(), "{} of {} runs:\n{shown}", wrong.len(), seeds.len());
}
