//! Findings of `softhca why` and the linter in event logs, mostly those of docs/captures with one change.

use softhca_trace::EventLogReader;
use softhca_trace::lint::Linter;
use softhca_trace::why::{Explanation, LogAnalyzer, Query};
use std::fs;
use std::path::Path;

/// An event log of docs/captures.
fn log(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/captures");
    fs::read_to_string(folder.join(name).with_extension("jsonl")).expect("an event log")
}

fn analyze(log: &str) -> LogAnalyzer {
    let reader = EventLogReader::new(log.as_bytes()).expect("a header");
    let mut analyzer = LogAnalyzer::new(reader.header());
    reader.for_each(|entry| analyzer.push(entry.expect("an entry")));
    analyzer
}

/// The only explanation of a log. `exec --why` gives it too.
fn explanation(log: &str) -> Explanation {
    let analyzer = analyze(log);
    let explanations = analyzer.diagnose(&Query::default()).expect("an answer").explanations;
    assert_eq!(analyzer.problems().expect("a problem").explanations, explanations);
    let [explanation] = <[Explanation; 1]>::try_from(explanations).expect("one explanation");
    explanation
}

fn lints(log: &str) -> Vec<&'static str> {
    let reader = EventLogReader::new(log.as_bytes()).expect("a header");
    let mut linter = Linter::new(reader.header());
    reader.for_each(|entry| linter.push(&entry.expect("an entry")));
    linter.findings().map(|finding| finding.pitfall.code).collect()
}

#[test]
fn a_refused_connection_is_explained() {
    let refused = explanation(&log("cm-no-listener"));
    assert_eq!((refused.code.as_str(), refused.connection.as_str()), ("cm-rejected", "alice - bob"));
    assert_eq!(refused.cause, "bob rejected the connection: reason 8 (invalid service ID).");
    assert!(refused.advice.starts_with("Nothing listens on that port"), "{}", refused.advice);
    let rejected = explanation(&log("cm-reject"));
    assert!(rejected.advice.starts_with("The program at the other end refused"), "{}", rejected.advice);
}

/// A program takes its queue pair to ERR when the connection fails, and gets its receives back.
#[test]
fn a_refused_connection_is_the_problem_and_not_what_its_end_flushes() {
    let log = log("cm-no-listener");
    let to_error = log.lines().find(|line| line.contains("\"to\":\"ERR\"")).expect("the queue pair ends");
    let qp = to_error.split("\"qp\":").nth(1).and_then(|rest| rest.split(',').next()).expect("its number");
    let flushed = format!(
        "{to_error}\n{{\"time\":2000,\"host\":\"alice\",\"name\":\"work:completed\",\"data\":{{\"cq\":1,\"qp\":{qp},\
         \"wr_id\":7,\"operation\":\"receive\",\"status\":\"WR_FLUSH_ERR\",\"bytes\":0,\"vendor_err\":0,\"reason\":\"flushed\"}}}}"
    );
    assert_eq!(explanation(&log.replace(to_error, &flushed)).code, "cm-rejected");
}

#[test]
fn a_run_without_a_problem_has_none() {
    for name in ["rc-ping-pong", "cm-connect", "loss-go-back-n", "rnr"] {
        assert!(analyze(&log(name)).problems().is_none(), "{name}");
    }
}

/// A requester with timeout 0 and two requests gets no answer.
#[test]
fn the_first_request_that_waits_for_ever_is_a_problem() {
    let log = log("rc-write").replace("\"timeout\":14,\"ack_timeout\":536870912", "\"timeout\":0");
    let lines: Vec<&str> = log.lines().take_while(|line| !line.contains("packet_received")).collect();
    let waiting = lines.join("\n") + "\n";
    let analyzer = analyze(&waiting);
    assert_eq!(analyzer.diagnose(&Query::default()).expect("an answer").explanations.len(), 2);
    let problems = analyzer.problems().expect("a problem").explanations;
    let titles: Vec<&str> = problems.iter().map(|one| one.title.as_str()).collect();
    assert_eq!(titles, ["WRITE 1 of alice.1 has not ended"]);
    assert_eq!(problems[0].code, "no-response");
}

/// The peer refuses the request, and its port goes away while the requester waits.
#[test]
fn a_peer_that_answered_is_not_one_that_was_never_started() {
    let gone = log("rnr-exhausted")
        .replace("RNR_RETRY_EXC_ERR", "RETRY_EXC_ERR")
        .replace("rnr-retry-exceeded", "peer-unreachable");
    let explanation = explanation(&gone);
    assert_eq!(explanation.code, "rnr");
    assert!(explanation.cause.starts_with("bob.1 had no receive posted"), "{}", explanation.cause);
    assert!(explanation.advice.starts_with("Post receives"), "{}", explanation.advice);
}

/// The responder expects the PSN after the first one: it refuses what comes.
#[test]
fn a_psn_mismatch_is_explained_as_the_linter_does() {
    let mismatch = log("nak-remote-access").replace("\"rq_psn\":1000", "\"rq_psn\":1001");
    let explanation = explanation(&mismatch);
    assert_eq!(explanation.code, "psn-mismatch");
    assert_eq!(
        explanation.cause,
        "The two ends do not agree about the first PSN: alice.1 starts at PSN 1000 (sq_psn), and bob.1 expects 1001 (rq_psn)."
    );
    assert!(lints(&mismatch).contains(&"psn-mismatch"));
}

/// The first packet waits until the card knows that its peer is not SoftHCA.
#[test]
fn the_wait_for_link_detection_is_explained() {
    let mut waited = String::new();
    for line in log("rc-write").lines() {
        let late = line.replacen("{\"time\":", "{\"time\":3000", 1);
        let is_before = line.contains("qp:") || line.contains("work:fetched") || line.contains("format");
        waited += if is_before { line } else { &late };
        waited.push('\n');
        if line.contains("work:fetched") && !waited.contains("link:foreign_peer") {
            waited += "{\"time\":30000,\"host\":\"alice\",\"name\":\"link:foreign_peer\",\"data\":{\"peer\":\"10.0.0.2\",\"recovery\":\"go-back-n\",\"window\":64}}\n";
        }
    }
    let answer = analyze(&waited).diagnose(&Query::default()).expect("an answer");
    assert_eq!(answer.explanations[0].code, "foreign-peer", "{answer}\n{waited}");
    assert!(answer.explanations[0].cause.contains("waited 30 µs"), "{answer}");
}

/// The requester's own card drops the answers.
#[test]
fn answers_with_a_wrong_icrc_are_not_silence() {
    let log = log("rnr-exhausted")
        .replace("RNR_RETRY_EXC_ERR", "RETRY_EXC_ERR")
        .replace("rnr-retry-exceeded", "ack-timeout");
    let is_answer =
        |line: &str| ["recovery:", "request_rejected", "received"].iter().any(|word| line.contains(word));
    let mut lines: Vec<&str> = log.lines().filter(|line| !is_answer(line)).collect();
    let start = lines.iter().position(|line| line.contains("work:fetched")).expect("a start");
    lines.insert(
        start + 1,
        "{\"time\":5000,\"host\":\"alice\",\"name\":\"transport:packet_dropped\",\"data\":{\"qp\":0,\"reason\":\"bad-icrc\"},\"trigger\":\"the ICRC is wrong\"}",
    );
    let explanation = explanation(&(lines.join("\n") + "\n"));
    assert_eq!(explanation.code, "damaged", "{}", explanation.cause);
    assert!(explanation.cause.contains("dropped once a packet with a wrong ICRC"), "{}", explanation.cause);
}
