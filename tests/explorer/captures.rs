//! Captures in the page: the filter language of the search box, findings with their certainty, and the summary.

use super::browser::Browser;
use super::runs;
use softhca_tests::captures_folder;
use softhca_trace::filter::{Filter, PacketFilter};
use softhca_trace::log::CaptureConverter;
use softhca_trace::why::LogAnalyzer;
use softhca_trace::{CaptureReader, Packet, Record};
use std::path::Path;

/// The number of events that the filters leave.
const SHOWN: &str = "filteredEvents(currentRun(), 'events', null, currentRun().length).length";

fn records(path: &Path) -> Vec<Record> {
    CaptureReader::open(path).expect("a capture").map(|record| record.expect("a record")).collect()
}

/// The search box understands the same expressions as the command.
pub fn filter_language() {
    let table = include_str!("../../emulator/trace/src/filter_cases.json");
    let mut browser = Browser::start(1000, 700);
    browser.open(&runs::page(&runs::fatal_loss()), "");
    let failures = browser.text(&format!(
        "(() => {{ const cases = {table}; const failures = []; \
         for (const [expression, expected] of cases.matches) {{ const test = parseFilter(expression); \
           const passed = Object.keys(cases.packets).filter((name) => test(cases.packets[name])); \
           if (passed.join() !== expected.join()) failures.push(`${{expression}}: ${{passed}}`); }} \
         for (const [expression, column, message] of cases.errors) {{ \
           try {{ parseFilter(expression); failures.push(`${{expression}}: no error`); }} \
           catch (error) {{ if (error.column !== column || error.message !== message) failures.push(`${{expression}}: ${{error.column}} ${{error.message}}`); }} }} \
         return failures.join('\\n'); }})()"
    ));
    assert_eq!(failures, "");
    browser.value("look({ view: 'events', q: 'request && psn == +5' }); draw()");
    assert_eq!(browser.number(SHOWN), 1.0);
    browser.value("look({ q: 'psm == 7' }); draw()");
    assert!(browser.text("document.querySelector('.status').textContent").contains("did you mean psn?"));
    assert_eq!(browser.text("document.querySelector('.search').getAttribute('aria-invalid')"), "true");
    // A log without a capture has no bytes of packets.
    browser.value("currentRun().frames = null; look({ q: 'nak && rkey == 7' }); draw()");
    let status = browser.text("document.querySelector('.status').textContent");
    assert!(
        status.contains("column 8: rkey is in the bytes of packets, which this page does not have"),
        "{status}"
    );
    browser.assert_no_errors();
}

/// The search box completes the word at its end.
pub fn filter_completion() {
    let mut browser = Browser::start(1000, 700);
    browser.open(&runs::page(&runs::fatal_loss()), "");
    for (typed, expected) in [
        ("retr", "retransmission"),
        ("nak && infiniband.bth.ps", "nak && infiniband.bth.psn"),
        ("!(psn > +100) || ac", "!(psn > +100) || ack !(psn > +100) || ack_req"),
        ("psn == 7 && zz", ""),
    ] {
        browser.value(&format!(
            "(() => {{ const box = document.querySelector('.search'); box.value = {typed:?}; box.dispatchEvent(new Event('input')); }})()"
        ));
        let offered = browser.text(
            "[...document.querySelector('.search').list.options].map((option) => option.value).sort().join(' ')",
        );
        assert_eq!(offered, expected, "{typed}");
    }
    browser.assert_no_errors();
}

/// The page selects the packets of a capture that `softhca trace --filter` selects.
pub fn filters_select_alike() {
    let mut browser = Browser::start(1000, 700);
    for name in ["vt_loss_write", "vt_ops", "vt_badrkey", "rping", "udaddy"] {
        let path = captures_folder().join(name).with_extension("pcap");
        let records = records(&path);
        browser.open(&runs::page(&path), "#view=events");
        for expression in [
            "nak",
            "ack && psn > +3",
            "retransmission",
            "gap",
            "read || atomic",
            "write && payload == 1024",
            "ack_req == 1 && request",
            "rkey",
            "len > 4000",
            "infiniband.aeth.syndrome >= 0x60",
            "msn == 1",
            "qkey == 0x80010000 && cm",
            "src_qp == 1",
            "frame.number <= 10",
            "ip.src == 10.0.0.1 && !cnp",
            "udp.srcport > 50000",
            "ecn == 0",
            "infiniband.bth.p_key == 0xffff && pad == 0",
        ] {
            let mut filter = PacketFilter::new(expression.parse::<Filter>().expect(expression));
            let expected = records.iter().filter(|record| filter.matches(&Packet::new(record, 0))).count();
            let shown = browser.number(&format!("(look({{ q: {expression:?} }}), {SHOWN})"));
            assert_eq!(shown, expected as f64, "{name}: {expression}");
        }
        browser.assert_no_errors();
    }
}

/// A capture has its explanations with their certainty, and losses that are drawn as inferred.
pub fn findings() {
    let mut browser = Browser::start(1200, 800);
    let path = captures_folder().join("vt_loss_write.pcap");
    browser.open(&runs::page(&path), "#view=summary");
    let text = browser.text("document.querySelector('.view').textContent");
    for part in ["request-lost", "Slowest work requests", "Throughput", "Operations", "Connections", "Hosts"]
    {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    browser.click("#tab-why");
    let text = browser.text("document.querySelector('.view').textContent");
    assert!(text.contains("Inferred: ") && text.contains("packet "), "{text}");
    // The timeline has a lane for each, and what is inferred is not drawn as known.
    let marked = |lane: &str| {
        format!(
            "(() => {{ const [, , , is] = TICK_MARKS.find(([name]) => name === {lane:?}); \
             return [...Array(currentRun().length).keys()].filter((event) => is(currentRun(), event)).length; }})()"
        )
    };
    assert!(browser.number(&marked("lost?")) > 0.0);
    assert_eq!(browser.number(&marked("lost")), 0.0);
    assert_ne!(
        browser.text("TICK_MARKS.find(([name]) => name === 'lost').slice(1, 3).join()"),
        browser.text("TICK_MARKS.find(([name]) => name === 'lost?').slice(1, 3).join()")
    );
    browser.click("#tab-timeline");
    browser.screenshot("capture-timeline");
    browser.assert_no_errors();
}

/// The page exports the numbers that `softhca trace --summary` prints.
pub fn exports() {
    let path = captures_folder().join("vt_loss_write.pcap");
    let mut converter = CaptureConverter::default();
    let mut start_ns = None;
    for record in records(&path) {
        converter.push(&Packet::new(&record, *start_ns.get_or_insert(record.time_ns)));
    }
    let (header, entries) = converter.finish("vt_loss_write.pcap");
    let mut analyzer = LogAnalyzer::new(&header);
    entries.for_each(|entry| analyzer.push_converted(entry));
    let mut browser = Browser::start(1200, 800);
    browser.open(&runs::page(&path), "#view=summary");
    assert_eq!(browser.text("csvText(currentRun().why.numbers)"), analyzer.summary().csv());
    let json = browser.value("currentRun().why.numbers");
    assert_eq!(json, serde_json::to_value(analyzer.summary()).expect("JSON"));
}
