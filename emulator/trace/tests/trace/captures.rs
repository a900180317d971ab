//! What `softhca why` finds in captures of Linux rxe, where nothing but packets is known.

use softhca_trace::log::{CaptureConverter, Certainty};
use softhca_trace::why::{Explanation, LogAnalyzer, Query};
use softhca_trace::{CaptureReader, LadderBuilder, LadderStyle, Packet, PacketCounts, Record};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/captures")
}

fn records(name: &str) -> Vec<Record> {
    let reader = CaptureReader::open(&folder().join(name).with_extension("pcap")).expect("a capture");
    reader.map(|record| record.expect("a whole record")).collect()
}

fn analyze(records: &[Record]) -> LogAnalyzer {
    let mut converter = CaptureConverter::default();
    for record in records {
        converter.push(&Packet::new(record, records[0].time_ns));
    }
    let (header, entries) = converter.finish("a test");
    let mut analyzer = LogAnalyzer::new(&header);
    entries.for_each(|entry| analyzer.push_converted(entry));
    analyzer
}

fn findings(records: &[Record]) -> Vec<Explanation> {
    analyze(records).diagnose(&Query::default()).expect("an answer").explanations
}

/// Every cause with its certainty, each once.
fn causes(records: &[Record]) -> BTreeSet<(String, &'static str)> {
    findings(records).into_iter().map(|finding| (finding.code, finding.certainty.name())).collect()
}

fn set(causes: &[(&str, &'static str)]) -> BTreeSet<(String, &'static str)> {
    causes.iter().map(|(code, certainty)| ((*code).to_owned(), *certainty)).collect()
}

/// Where nothing went wrong, nothing is found.
#[test]
fn captures_without_trouble_have_no_findings() {
    let clean = [
        "rc_pp_128k",
        "rc_pp_events",
        "rc_pp_ipv6_ll",
        "uc_pp",
        "ud_pp",
        "rping",
        "rdma_client",
        "ucmatose",
        "udaddy",
        "mckey",
        "pf_write_bw",
        "pf_read_bw",
        "pf_send_bw",
        "pf_send_bw_srq",
        "pf_send_bw_ud",
        "pf_write_bw_uc",
        "vt_ops",
        "vt_odd",
        "vt_ops_tc",
        "vt_uc_ops",
        "vt_wrap",
        // Later ACKs cover the lost one.
        "vt_loss_ack",
        "j_pf_write_bw",
        "j_rping",
        "j_ud_pp",
        "j_vt_odd",
    ];
    let found: Vec<String> = clean
        .iter()
        .filter_map(|name| {
            let diagnosis = analyze(&records(name)).diagnose(&Query::default()).expect("an answer");
            (!diagnosis.explanations.is_empty()).then(|| format!("{name}:\n{}", diagnosis.text(120)))
        })
        .collect();
    assert!(found.is_empty(), "{}", found.join("\n\n"));
}

/// rxe on a busy machine retransmits because its ACK timer expires before the answer comes. Nothing is lost if the
/// answer is about packets that were not sent again; otherwise a capture does not show it.
#[test]
fn retransmissions_without_a_nak_are_not_known_losses() {
    let cases: &[(&str, &[(&str, &'static str)])] = &[
        ("rc_pp", &[("timeout", "inferred")]),
        ("srq_pp", &[("response-lost", "ambiguous")]),
        ("pf_write_lat_inl", &[("response-lost", "inferred")]),
        ("rc_pp_64k", &[("timeout", "inferred")]),
        ("rc_pp_ipv6", &[("timeout", "inferred")]),
        ("pf_atomic_fa", &[("request-lost", "ambiguous")]),
        ("j_pf_read_bw", &[("response-lost", "inferred")]),
        ("j_rc_pp_64k", &[("response-lost", "inferred"), ("timeout", "inferred")]),
    ];
    let wrong: Vec<_> = cases
        .iter()
        .map(|(name, expected)| (name, causes(&records(name)), set(expected)))
        .filter(|(_, found, expected)| found != expected)
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn error_paths_are_explained() {
    let cases: &[(&str, &[(&str, &'static str)])] = &[
        ("vt_badrkey", &[("nak/remote-access-error", "known")]),
        ("vt_badrkey_big", &[("nak/remote-access-error", "known")]),
        ("vt_badrkey_read", &[("nak/remote-access-error", "known")]),
        ("vt_oob", &[("nak/remote-access-error", "known")]),
        ("vt_noperm", &[("nak/remote-access-error", "known")]),
        ("vt_send_inv", &[("nak/remote-access-error", "known")]),
        ("vt_toobig", &[("nak/remote-operational-error", "known")]),
        ("vt_mtu_mismatch", &[("nak/invalid-request", "known")]),
        ("vt_rnr_fail", &[("rnr", "known")]),
        ("vt_dead", &[("no-response", "ambiguous")]),
        ("ucmatose_cmreject", &[("cm-rejected", "known")]),
    ];
    for (name, expected) in cases {
        assert_eq!(causes(&records(name)), set(expected), "{name}");
    }
}

/// A few PSNs may be those of requests that were lost.
#[test]
fn disagreement_about_the_first_psn_is_inferred_if_it_is_large() {
    for (name, certainty) in [("vt_bad_psn", "ambiguous"), ("vt_bad_psn2", "inferred")] {
        let causes = causes(&records(name));
        assert!(causes.contains(&("psn-mismatch".to_owned(), certainty)), "{name}: {causes:?}");
    }
}

#[test]
fn losses_are_inferred_and_never_known() {
    for name in ["vt_loss_send", "vt_loss_write", "vt_loss_atomic"] {
        let findings = findings(&records(name));
        let lost = |finding: &&Explanation| finding.code == "request-lost" || finding.code == "response-lost";
        assert!(findings.iter().any(|finding| lost(&finding)), "{name}: {findings:#?}");
        for finding in findings.iter().filter(lost) {
            assert_ne!(finding.certainty, Certainty::Known, "{name}: {finding:#?}");
        }
    }
}

/// A message of 64 packets and its ACK.
fn first_message() -> Vec<Record> {
    let mut records = records("rc_pp_64k");
    let ack = records.iter().position(|record| Packet::new(record, 0).to_string().contains("ACKNOWLEDGE"));
    records.truncate(ack.expect("an ACK") + 1);
    records
}

/// Packets that the capture lost are distinguished from packets that the network lost: an acknowledgement covers them.
#[test]
fn packets_missing_from_the_capture_are_not_lost_ones() {
    let mut records = first_message();
    let middle = records
        .iter()
        .position(|record| Packet::new(record, 0).to_string().contains("SEND_MIDDLE"))
        .expect("a packet in the middle of a message");
    records.drain(middle..middle + 2);
    let findings = findings(&records);
    let codes: Vec<(&str, Certainty)> =
        findings.iter().map(|finding| (finding.code.as_str(), finding.certainty)).collect();
    assert_eq!(codes, [("not-captured", Certainty::Known)]);
    assert!(findings[0].title.ends_with("2 packets are missing from the capture"), "{}", findings[0].title);
    assert!(!findings[0].advice.contains("loses packets"), "{}", findings[0].advice);
    let mut ladders = LadderBuilder::default();
    records.iter().for_each(|record| ladders.record_packet(&Packet::new(record, 0)));
    let drawn = ladders.ladders()[0].draw(LadderStyle::default());
    assert!(drawn.contains("2 packets were not seen: +1 … +2"), "{drawn}");
    let summary = analyze(&records).summary();
    assert_eq!((summary.connections[0].not_captured, summary.connections[0].lost), (2, 0));
}

/// Two neighbours that change places are reordered, not lost.
#[test]
fn reordering_is_not_taken_for_loss() {
    let mut records = first_message();
    let middle = records
        .iter()
        .position(|record| Packet::new(record, 0).to_string().contains("SEND_MIDDLE"))
        .expect("a packet in the middle of a message");
    let time = records[middle].time_ns;
    records.swap(middle, middle + 1);
    records[middle].time_ns = time;
    records[middle + 1].time_ns = time + 100;
    let findings = findings(&records);
    let codes: Vec<(&str, Certainty)> =
        findings.iter().map(|finding| (finding.code.as_str(), finding.certainty)).collect();
    assert!(
        codes.contains(&("delayed", Certainty::Inferred))
            || codes.contains(&("reordered", Certainty::Inferred)),
        "{codes:?}"
    );
    assert!(!codes.iter().any(|(code, _)| code.contains("lost")), "{codes:?}");
    assert!(
        findings.iter().all(|finding| !finding.advice.contains("Find out where packets are lost")),
        "{findings:#?}"
    );
}

/// The first message of a capture, as the log has it.
fn first_fetched(name: &str) -> serde_json::Value {
    let whole = records(name);
    let mut converter = CaptureConverter::default();
    whole.iter().for_each(|record| converter.push(&Packet::new(record, whole[0].time_ns)));
    let (_, entries) = converter.finish("a test");
    let first = entries
        .map(|(_, entry)| entry)
        .find(|entry| entry.event.name() == "work:fetched")
        .expect("a message");
    serde_json::to_value(&first).expect("JSON")["data"].clone()
}

/// The number of packets of a message counts those that the capture lacks, and says so.
#[test]
fn a_message_with_missing_packets_says_so() {
    let data = first_fetched("vt_loss_write");
    assert_eq!((&data["bytes"], &data["packets"]), (&16384.into(), &16.into()));
}

#[test]
fn an_atomic_has_eight_bytes() {
    let data = first_fetched("pf_atomic_fa");
    assert_eq!((&data["operation"], &data["bytes"]), (&"fetch-add".into(), &8.into()));
}

#[test]
fn connections_and_who_closed_them_are_listed() {
    let summary = analyze(&records("rping")).diagnose(&Query::default()).expect("an answer").summary;
    assert!(
        summary.contains("10.0.0.1 connected to 10.0.0.2") && summary.contains("closed its connection"),
        "{summary}"
    );
}

/// Every finding is an object of the schema, and names packets that exist.
#[test]
fn findings_follow_the_schema() {
    let schema = softhca_trace::why::generate_schema();
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/why/schema.json");
    if std::env::var_os("SOFTHCA_UPDATE").is_some() {
        std::fs::write(&path, &schema).expect("schema.json can be written");
    }
    assert!(
        softhca_trace::why::SCHEMA == schema,
        "run with SOFTHCA_UPDATE=1 to write {} anew",
        path.display()
    );
    let schema: serde_json::Value = serde_json::from_str(&schema).expect("JSON");
    let required: BTreeSet<&str> =
        schema["required"].as_array().expect("a list").iter().filter_map(|name| name.as_str()).collect();
    let properties: BTreeSet<&String> = schema["properties"].as_object().expect("an object").keys().collect();
    let mut count = 0;
    for entry in std::fs::read_dir(folder()).expect("captures") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "pcap") {
            continue;
        }
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let records = records(&name);
        for finding in findings(&records) {
            count += 1;
            for step in &finding.evidence {
                assert!(
                    step.packet.is_some_and(|packet| packet as usize <= records.len()),
                    "{name}: {step:?}"
                );
            }
            let object = serde_json::to_value(&finding).expect("JSON");
            let keys: BTreeSet<&String> = object.as_object().expect("an object").keys().collect();
            assert_eq!(keys, properties, "{name}");
            assert!(required.iter().all(|name| !object[*name].is_null()), "{object}");
            assert!(
                ["known", "inferred", "ambiguous"].contains(&object["certainty"].as_str().expect("a word"))
            );
        }
    }
    assert!(count > 20, "{count}");
}

/// `tcpdump -s 90`: what was not captured is no fault of the network, and nothing is said about it.
#[test]
fn packets_cut_by_the_snap_length_are_named() {
    let cut: Vec<Record> = records("rc_pp_128k")
        .into_iter()
        .map(|mut record| {
            record.data.truncate(90);
            record
        })
        .collect();
    let mut counts = PacketCounts::default();
    cut.iter().for_each(|record| counts.add(&Packet::new(record, 0)));
    assert!(counts.cut > 0 && counts.cut == counts.malformed, "{counts}");
    let sentence = format!("{} malformed packets were cut by the snap length", counts.cut);
    assert!(counts.to_string().starts_with(&sentence), "{counts}");
    let answer = analyze(&cut).diagnose(&Query::default()).expect("an answer").to_string();
    assert!(answer.contains(&sentence) && !answer.contains("othing wrong"), "{answer}");
}
