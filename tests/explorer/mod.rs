//! The explorer's page in a real browser: every view, link and key works, without errors.

mod accessibility;
mod browser;
mod captures;
#[cfg(target_os = "linux")]
mod daemon;
mod million;
mod phone;
mod playground;
mod runs;

pub use browser::end_idle;

use crate::rig::softhca;
use browser::{Browser, PROGRAM, scratch};
use libtest_mimic::Trial;
use serde_json::{Value, json};
use softhca_engine::Recovery;
use softhca_explorer::{EventFeed, LiveServer};
use softhca_tests::pair::Setup;
use softhca_tests::{captures_folder, tools};
use softhca_trace::{CaptureReader, Packet};
use std::path::Path;
use std::process::Command;

pub fn trials() -> Vec<Trial> {
    let needs = |name, test| tools::needs(PROGRAM, name, test);
    let slow = |name, test| tools::needs(PROGRAM, name, test).with_ignored_flag(true);
    vec![
        needs("every_view_draws_without_a_complaint", every_view),
        needs("a_ladder_has_arrows_brackets_losses_and_reasons", ladder),
        needs("everything_fits_on_a_small_laptop", laptop),
        needs("a_selection_is_shared_by_all_views", selection),
        needs("a_link_brings_the_same_view_back", links),
        needs("keys_step_through_a_run", keys),
        needs("search_and_filters_leave_what_was_asked_for", filters),
        needs("two_runs_stand_side_by_side", compare),
        needs("the_page_reads_every_field_as_trace_does", fields),
        needs("what_is_broken_is_said_in_the_page", broken),
        needs("text_never_becomes_markup", markup),
        needs("a_group_has_its_ladder", multicast),
        needs("a_file_can_be_opened_in_the_page", open_file),
        needs("a_live_run_is_followed", live),
        needs("a_live_page_reconnects_and_loses_no_event", reconnect),
        needs("live_times_have_enough_digits", live_times),
        needs("a_failure_is_explained_and_links_to_its_packets", why),
        needs("a_failed_run_leaves_a_page", failed_run),
        needs("congestion_is_seen_on_one_clock", congestion),
        needs("the_search_box_speaks_the_filter_language", captures::filter_language),
        needs("the_search_box_completes_fields_and_words", captures::filter_completion),
        needs("the_search_box_selects_what_trace_selects", captures::filters_select_alike),
        needs("a_capture_shows_its_findings", captures::findings),
        needs("the_page_exports_what_trace_prints", captures::exports),
        #[cfg(target_os = "linux")]
        needs("the_cards_of_a_daemon_are_followed", daemon::followed),
        phone::trial(),
        accessibility::trial(),
        playground::trial(),
        slow("a_million_events_open_and_scroll", million::million_events),
    ]
}

const VIEWS: [&str; 10] =
    ["summary", "ladder", "sequence", "timeline", "states", "memory", "why", "packet", "compare", "events"];

/// The number of non-empty pixels of a canvas.
fn painted(browser: &mut Browser, selector: &str) -> f64 {
    browser.number(&format!(
        "(() => {{ const canvas = document.querySelector({selector:?}); const copy = document.createElement('canvas'); \
         [copy.width, copy.height] = [canvas.width, canvas.height]; const context = copy.getContext('2d', {{ willReadFrequently: true }}); \
         context.drawImage(canvas, 0, 0); const data = context.getImageData(0, 0, copy.width, copy.height).data; let count = 0; \
         for (let at = 3; at < data.length; at += 4) if (data[at]) count++; return count; }})()"
    ))
}

fn every_view() {
    let mut browser = Browser::start(1440, 900);
    let pages = [
        runs::page(&runs::fatal_loss()),
        runs::page(&runs::recovered_loss(Recovery::GoBackN)),
        runs::page(&captures_folder().join("vt_loss_write.pcap")),
        runs::page(&captures_folder().join("rping.pcap")),
        runs::page(&captures_folder().join("udaddy.pcap")),
    ];
    for (number, page) in pages.iter().enumerate() {
        browser.open(page, "");
        browser.press("n");
        for theme in ["light", "dark"] {
            browser.value(&format!("document.documentElement.dataset.theme = {theme:?}; redraw()"));
            for view in VIEWS {
                browser.click(&format!("#tab-{view}"));
                assert_eq!(browser.text("app.state.view"), view);
                assert!(
                    browser.number("document.querySelector('.view').textContent.length") > 0.0,
                    "{view} is blank"
                );
                if matches!(view, "sequence" | "timeline") {
                    assert!(painted(&mut browser, ".chart") > 500.0, "{view} is blank");
                }
                browser.screenshot(&format!("{number}-{view}-{theme}"));
                browser.assert_no_errors();
            }
        }
        assert!(painted(&mut browser, ".overview") > 20.0);
    }
}

/// At 1280 px the tabs and the tools have one row each, no table is cut, and a pair has states although the capture shows
/// no state change.
fn laptop() {
    let mut browser = Browser::start(1280, 800);
    for capture in ["rping.pcap", "vt_loss_write.pcap"] {
        browser.open(&runs::page(&captures_folder().join(capture)), "");
        for view in VIEWS {
            browser.click(&format!("#tab-{view}"));
            for bar in [".tabs", ".filters"] {
                let rows = format!(
                    "(() => {{ const shown = [...document.querySelectorAll('{bar} > *')].filter((part) => part.offsetHeight > 0); \
                     return shown.some((part) => part.offsetTop >= shown[0].offsetTop + shown[0].offsetHeight) ? 2 : 1; }})()"
                );
                assert_eq!(browser.number(&rows), 1.0, "{capture}: {view}: rows of {bar}");
            }
            let cut = "[...document.querySelectorAll('.table-scroll')].filter((table) => table.scrollWidth > table.clientWidth).map((table) => table.textContent).join()";
            assert_eq!(browser.text(cut), "", "{capture}: {view} has a table that is cut");
        }
        browser.click("#tab-states");
        let states = browser
            .text("[...document.querySelectorAll('.machine .now')].map((state) => state.textContent).join()");
        assert!(states.contains("● RTS"), "{capture}: {states:?}");
    }
    browser.assert_no_errors();
}

fn ladder() {
    let mut browser = Browser::start(1440, 900);
    browser.open(&runs::page(&runs::fatal_loss()), "");
    let sheet = "document.querySelector('.ladder-sheet').textContent";
    let mut text = browser.text(sheet);
    assert_eq!(browser.number("document.querySelectorAll('.cross').length"), 1.0);
    assert!(browser.number("document.querySelectorAll('.bracket').length") > 8.0);
    browser.press("End");
    text += &browser.text(sheet);
    for part in [
        "WRITE #3, 4000 B in 4 packets",
        "SEND_ONLY +0",
        "dropped by \"lose one\"",
        "NAK PSN sequence error +5",
        "rejects +6: expected PSN +5, received PSN +6",
        "RETRY_EXC_ERR",
        "async event QP_FATAL",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    browser.open(&runs::page(&runs::recovered_loss(Recovery::GoBackN)), "#q=%2B20");
    let text = browser.text(sheet);
    assert!(text.contains("✕ WRITE_MIDDLE +20") && text.contains("↻ WRITE_MIDDLE +20"), "{text}");
    browser.assert_no_errors();
}

fn selection() {
    let mut browser = Browser::start(1440, 900);
    browser.open(&runs::page(&runs::fatal_loss()), "");
    browser.press("f");
    let selected = browser.number("app.state.sel");
    assert!(
        browser.text("document.querySelector('.inspector').textContent").contains("dropped by \"lose one\"")
    );
    assert_eq!(browser.number("document.querySelectorAll('.step.selected').length"), 1.0);
    browser.press("7");
    let packet = browser.text("document.querySelector('.packet').textContent");
    for field in ["destination QP", "PSN", "P_Key", "ICRC", "time to live", "ack request"] {
        assert!(packet.contains(field), "{field}");
    }
    browser.press("9");
    assert_eq!(browser.number("document.querySelectorAll('.line.selected').length"), 1.0);
    assert_eq!(browser.number("app.state.sel"), selected);
    browser.press("4");
    assert!(browser.text("document.querySelector('.machines').textContent").contains("RTS → ERR"));
    browser.press("5");
    browser.value("document.querySelector('.memory .line').click()");
    browser.wait("run_is_memory = currentRun().kind.values[app.state.sel] === KIND.WRITTEN");
    browser.assert_no_errors();
}

fn links() {
    let mut browser = Browser::start(1440, 900);
    let page = runs::page(&runs::recovered_loss(Recovery::GoBackN));
    browser.open(&page, "");
    browser.press("f");
    browser.press("2");
    browser.value("look({ from: 1000, to: 900000, cls: 'nak' })");
    let (state, link) = (browser.text("JSON.stringify(app.state)"), browser.link());
    browser.open(&page, &link);
    assert_eq!(browser.text("JSON.stringify(app.state)"), state);
    browser.open(&page, "#view=nonsense&sel=99999999&conn=77&q=%E0%A4%A&from=x");
    browser.wait("document.querySelector('.view').textContent.length > 0");
    browser.assert_no_errors();
}

fn keys() {
    let mut browser = Browser::start(1440, 900);
    browser.open(&runs::page(&runs::fatal_loss()), "");
    browser.press("s");
    let shown = "document.querySelectorAll('.step').length";
    let first = browser.number(shown);
    browser.press("n");
    browser.press("n");
    let later = browser.number(shown);
    assert!(first >= 1.0 && later > first, "step mode shows {first}, then {later} rows");
    assert!(browser.text("document.querySelector('.caption').textContent").contains("WRITE_FIRST"));
    browser.press("Escape");
    assert!(browser.number(shown) > later);
    let before = browser.number("app.state.sel");
    browser.press("ArrowDown");
    browser.press("k");
    assert_eq!(browser.number("app.state.sel"), before);
    browser.press("t");
    browser.press("+");
    browser.press("?");
    assert_eq!(browser.value("document.querySelector('dialog').open"), json!(true));
    browser.value("document.querySelector('dialog').close()");
    browser.press("/");
    assert_eq!(browser.value("document.activeElement.type"), json!("search"));
    browser.assert_no_errors();
}

fn filters() {
    let mut browser = Browser::start(1440, 900);
    browser.open(&runs::page(&runs::recovered_loss(Recovery::GoBackN)), "#view=events");
    let shown = "filteredEvents(currentRun(), 'events', null, currentRun().length).length";
    let all = browser.number(shown);
    for (filter, least, most) in [
        ("{ q: 'sequence-error' }", 2.0, 4.0),
        ("{ q: '', cls: 'retransmission' }", 2.0, 60.0),
        ("{ cls: 'fault' }", 1.0, 3.0),
        ("{ cls: '', host: 'bob' }", 10.0, all - 1.0),
        ("{ host: '', opcode: 'RC FETCH_ADD' }", 1.0, 4.0),
        ("{ opcode: '', qp: 'alice.1', q: '+20' }", 2.0, 8.0),
        ("{ qp: '', q: 'nothing has this' }", 0.0, 0.0),
        ("{ q: '' }", all, all),
    ] {
        browser.value(&format!("look({filter})"));
        let count = browser.number(shown);
        assert!((least..=most).contains(&count), "{filter} leaves {count} of {all}");
    }
    browser.assert_no_errors();
}

fn compare() {
    let mut browser = Browser::start(1440, 900);
    let [n, zero] = [Recovery::GoBackN, Recovery::GoBack0].map(runs::recovered_loss);
    browser.open(&runs::comparison_page(&[&n, &zero]), "#view=compare");
    browser.wait("document.querySelectorAll('.compare .ladder-sheet').length === 2");
    let table = browser.text("document.querySelector('.compare-table').textContent");
    assert!(
        table.contains("go-back-n")
            && table.contains("go-back-0")
            && table.contains("≠\u{a0}of these retransmitted"),
        "{table}"
    );
    let again: Value = browser.value("app.runs.map((run) => figures(run)[1][1])");
    assert!(again[0].as_f64() < again[1].as_f64(), "go-back-0 repeats more: {again}");
    browser.screenshot("compare");
    browser.assert_no_errors();
}

/// The headers that the page decodes from every frame, with the keys of `softhca trace --json`.
const READ_FIELDS: &str = "(() => { const run = currentRun(); const all = []; \
    for (let event = 0; event < run.length; event++) { \
        if (!run.frames?.at.has(event)) continue; \
        const frame = run.frame(event); const found = {}; \
        for (const header of dissect(frame)) for (const field of header.fields) found[header.name + '.' + field.name] = field.value; \
        all.push([found, frame.intact]); } \
    return all; })()";

fn fields() {
    let mut browser = Browser::start(1440, 900);
    let mut compared = 0;
    let mut files: Vec<_> = std::fs::read_dir(captures_folder())
        .expect("captures")
        .map(|file| file.expect("a file").path())
        .collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "pcap"));
    files.sort();
    for file in files {
        browser.open(&runs::page(&file), "");
        let read = browser.value(READ_FIELDS);
        let read = read.as_array().expect("a list");
        let mut wanted = Vec::new();
        for record in CaptureReader::open(&file).expect("a capture") {
            let record = record.expect("a record");
            let packet = serde_json::to_value(Packet::new(&record, 0)).expect("JSON");
            if packet.get("other").is_none() {
                wanted.push(packet);
            }
        }
        assert_eq!(read.len(), wanted.len(), "{}", file.display());
        for (read, packet) in read.iter().zip(&wanted) {
            if packet.get("malformed").is_none() {
                assert_fields_match(&read[0], packet, &file);
                assert_eq!(read[1], json!(packet["icrc"] == "ok"));
                compared += 1;
            }
        }
        browser.assert_no_errors();
    }
    assert!(compared > 2500, "{compared} packets compared");
}

/// Asserts that a packet has the same fields in the page and in JSON.
fn assert_fields_match(read: &Value, packet: &Value, file: &Path) {
    let text = |key: &str| {
        read[key].as_str().unwrap_or_else(|| panic!("{}: no {key} in {read}", file.display())).to_owned()
    };
    let hex = |value: &Value| format!("{:#x}", value.as_u64().expect("a number"));
    let wide = |value: &Value, digits: usize| {
        format!("{:#0width$x}", value.as_u64().expect("a number"), width = digits + 2)
    };
    assert!(text("BTH.opcode").starts_with(packet["opcode"].as_str().expect("text")), "{read} {packet}");
    assert_eq!(text("BTH.PSN"), wide(&packet["psn"], 6));
    assert_eq!(text("BTH.pad count"), packet["pad"].to_string());
    assert_eq!(text("BTH.ack request"), if packet["ack_req"] == true { "yes" } else { "no" });
    assert!(text("BTH.destination QP").starts_with(&packet["dest_qp"].to_string()));
    let network = if packet["src"].as_str().expect("text").contains(':') { "IPv6" } else { "IPv4" };
    assert_eq!(text(&format!("{network}.source")), packet["src"].as_str().expect("text"));
    assert_eq!(text(&format!("{network}.destination")), packet["dst"].as_str().expect("text"));
    let pairs = [
        ("reth", "va", "RETH.virtual address", 16),
        ("reth", "rkey", "RETH.R_Key", 8),
        ("deth", "qkey", "DETH.Q_Key", 8),
        ("deth", "src_qp", "DETH.source QP", 6),
        ("aeth", "msn", "AETH.MSN", 6),
    ];
    for (header, field, name, digits) in pairs {
        if let Some(object) = packet.get(header) {
            assert_eq!(text(name), wide(&object[field], digits), "{name}");
        }
        assert_eq!(packet.get(header).is_some(), read.get(name).is_some(), "{name}: {packet}");
    }
    if let Some(aeth) = packet.get("aeth") {
        let kind = if aeth["kind"] == "rnr" {
            "RNR NAK".into()
        } else {
            aeth["kind"].as_str().expect("text").to_uppercase()
        };
        assert!(text("AETH.syndrome").starts_with(&kind), "{read}");
    }
    if let Some(atomic) = packet.get("atomic") {
        let (name, value) = match atomic.get("original") {
            Some(original) => ("AtomicAckETH.original", original),
            None => ("AtomicETH.swap or add", &atomic["swap_or_add"]),
        };
        assert_eq!(text(name), wide(value, 16));
    }
    if let Some(immediate) = packet.get("imm") {
        assert_eq!(text("ImmDt.immediate"), wide(immediate, 8));
    }
    if let Some(key) = packet.get("ieth") {
        assert_eq!(
            u32::from_str_radix(&text("IETH.R_Key")[2..], 16).ok(),
            key.as_u64().map(|key| key as u32),
            "{}",
            hex(key)
        );
    }
}

fn broken() {
    let mut browser = Browser::start(1440, 900);
    let whole = std::fs::read(runs::fatal_loss().join("events.jsonl")).expect("a log");
    let capture = std::fs::read(captures_folder().join("rc_pp.pcap")).expect("a capture");
    let header = whole.split(|byte| *byte == b'\n').next().expect("a line").to_vec();
    let mut foreign = capture[..24].to_vec();
    foreign.extend([1, 0, 0, 0, 0, 0, 0, 0, 42, 0, 0, 0, 42, 0, 0, 0]);
    foreign.extend([[0xff; 12].as_slice(), &[8, 6], &[0; 28]].concat());
    let cases = [
        ("cut.jsonl", whole[..whole.len() / 2].to_vec(), "The log cannot be read beyond line", true),
        ("nothing.jsonl", header, "The run has no event", false),
        ("cut.pcap", capture[..capture.len() / 2].to_vec(), "The capture cannot be read beyond offset", true),
        ("mixed.pcap", [&foreign[..], &capture[24..]].concat(), "packets belong to other protocols", true),
        ("foreign.pcap", foreign, "The capture has no RoCE packet (1 packets read)", false),
    ];
    for (name, bytes, message, has_events) in cases {
        let file = scratch(name);
        std::fs::write(&file, bytes).expect("a file");
        browser.open(&runs::page(&file), "");
        let text = browser.text("document.body.innerText");
        assert!(text.contains(message), "{name}: {message:?} is not in {text}");
        assert_eq!(browser.number("currentRun().length") > 0.0, has_events, "{name}");
        browser.assert_no_errors();
    }
}

fn markup() {
    let hostile =
        "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">";
    let folder = runs::record_run("markup", hostile, Setup::default(), |pair| pair.post_write(1, 0, 0, 100));
    let log = std::fs::read_to_string(folder.join("events.jsonl")).expect("a log");
    let name = serde_json::to_string(hostile).expect("JSON");
    let file = scratch("markup.jsonl");
    std::fs::write(&file, log.replace("\"alice\"", &name).replace("RC WRITE_ONLY", &name[1..name.len() - 1]))
        .expect("a file");
    let mut browser = Browser::start(1440, 900);
    browser.open(&runs::page(&file), "#sel=1");
    for view in VIEWS {
        browser.click(&format!("#tab-{view}"));
        assert_eq!(browser.number("document.querySelectorAll('img').length"), 0.0, "{view}");
        assert!(browser.text("document.title").starts_with("</script>"), "{view}");
    }
    browser.assert_no_errors();
}

/// Multicast has a ladder: the sender on one side, the group with its members on the other.
fn multicast() {
    let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/captures/ud-multicast.jsonl");
    let mut browser = Browser::start(1440, 900);
    browser.open(&runs::page(&log), "");
    assert_eq!(browser.text("document.querySelectorAll('.ladder-head b')[1].textContent"), "239.1.2.3");
    let ladder = browser.text("document.querySelector('.ladder-sheet').textContent");
    for words in
        ["SEND_ONLY +0", "bob.1: RECEIVE: SUCCESS, 140 B", "bob.2: drops UD SEND_ONLY +0: the Q_Key is wrong"]
    {
        assert!(ladder.contains(words), "{words:?} is not in {ladder}");
    }
    browser.screenshot("multicast");
    browser.assert_no_errors();
}

fn open_file() {
    let mut browser = Browser::start(1440, 900);
    browser.open(&runs::page(&runs::fatal_loss()), "");
    let other =
        std::fs::read_to_string(runs::recovered_loss(Recovery::GoBackN).join("events.jsonl")).expect("a log");
    let text = serde_json::to_string(&other).expect("JSON");
    browser.value(&format!("openFile(new File([{text}], 'other.jsonl'))"));
    browser.wait("app.runs.length === 2 && app.runs[1].isComplete && app.runs[1].length > 100");
    browser.value("openFile(new File(['\\u0000\\u0001binary'], 'capture.pcap'))");
    browser.wait("document.querySelector('.notes').textContent.includes('softhca report capture.pcap')");
    browser.value("openFile(new File(['{\"format\":\"other\"}'], 'other.json'))");
    browser.wait("document.querySelector('.notes').textContent.includes('this is not an event log')");
    browser.assert_no_errors();
}

fn live() {
    let log = std::fs::read_to_string(runs::fatal_loss().join("events.jsonl")).expect("a log");
    let lines: Vec<&str> = log.lines().collect();
    let feed = EventFeed::default();
    let mut browser = Browser::start(1440, 900);
    browser.visit(&serve(&feed));
    browser
        .wait("typeof app === 'object' && document.querySelector('.status')?.textContent.startsWith('live')");
    for (number, line) in lines.iter().enumerate() {
        feed.push(line);
        if number == 20 {
            browser.wait("currentRun().length === 20 && document.querySelectorAll('.step').length > 5");
        }
    }
    feed.end();
    browser.wait(&format!("currentRun().length === {} && currentRun().isComplete", lines.len() - 1));
    assert!(browser.text("document.querySelector('.ladder-sheet').textContent").contains("dropped by"));
    browser.assert_no_errors();
}

/// Starts a server for this feed and returns its URL.
fn serve(feed: &EventFeed) -> String {
    let server = LiveServer::bind(0, "0123456789abcdef", "a live run", feed.clone()).expect("a port");
    let url = server.url();
    std::thread::spawn(move || server.serve());
    url
}

/// A page that lost its connection continues at the line after its last one.
fn reconnect() {
    let log = std::fs::read_to_string(runs::fatal_loss().join("events.jsonl")).expect("a log");
    let lines: Vec<&str> = log.lines().collect();
    let feed = EventFeed::default();
    for line in &lines[..10] {
        feed.push(line);
    }
    let mut browser = Browser::start(1440, 900);
    browser.run_before_pages(
        "window.sources = []; window.EventSource = class extends EventSource { \
         constructor(url) { super(url); window.sources.push(this); } };",
    );
    browser.visit(&serve(&feed));
    browser.wait("typeof currentRun === 'function' && currentRun()?.length === 9");
    // As a connection that ends: the page closes the source and opens another one.
    browser.value("sources[0].dispatchEvent(new Event('error'))");
    browser.wait("sources[0].readyState === EventSource.CLOSED");
    for line in &lines[10..] {
        feed.push(line);
    }
    feed.end();
    browser.wait(&format!("currentRun().isComplete && currentRun().length === {}", lines.len() - 1));
    assert_eq!(browser.number("sources.length"), 2.0);
    assert_eq!(browser.text("sources[1].url.split('?')[1]"), "from=10");
    assert_eq!(browser.value("currentRun().notes"), json!([]));
    browser.assert_no_errors();
}

/// Rows that differ in time show different times, also late in a long run.
fn live_times() {
    let log = std::fs::read_to_string(runs::fatal_loss().join("events.jsonl")).expect("a log");
    let feed = EventFeed::default();
    for (number, line) in log.lines().enumerate() {
        let mut line: Value = serde_json::from_str(line).expect("JSON");
        if number > 0 {
            let time = line["time"].as_u64().expect("a time");
            line["time"] = json!(5_073_000_000 + time);
        }
        feed.push(&line.to_string());
    }
    feed.end();
    let mut browser = Browser::start(1440, 900);
    browser.visit(&serve(&feed));
    browser.wait("typeof currentRun === 'function' && currentRun()?.isComplete && document.querySelectorAll('.step').length > 5");
    for (view, times, rows) in [
        ("ladder", ".ladder-sheet .time", "[...ladderRows().events.slice(0, ladderRows().length)]"),
        ("events", ".line .time", "[...Array(currentRun().length).keys()]"),
    ] {
        browser.click(&format!("#tab-{view}"));
        let shown = browser.value(&format!(
            "[...document.querySelectorAll('{times}')].map((time) => parseFloat(time.textContent))"
        ));
        let shown: Vec<f64> = shown.as_array().expect("a list").iter().filter_map(Value::as_f64).collect();
        let different = browser.number(&format!(
            "new Set({rows}.slice(views.{view}.rows.top, views.{view}.rows.top + Math.floor(views.{view}.rows.visible())) \
             .map((event) => currentRun().time.values[event])).size"
        ));
        let mut distinct = shown.clone();
        distinct.dedup();
        assert!(
            different >= 2.0 && distinct.len() as f64 >= different,
            "{view}: {shown:?}, {different} times"
        );
        assert!(distinct.is_sorted() && distinct[0] >= 5.073 && distinct[1] < 5.0731, "{view}: {shown:?}");
        let fits = browser.value(&format!(
            "[...document.querySelectorAll('{times}')].every((time) => time.getBoundingClientRect().left >= 0)"
        ));
        assert_eq!(fits, json!(true), "{view}");
        browser.screenshot(&format!("live-times-{view}"));
    }
    browser.assert_no_errors();
}

/// `softhca run --out` writes a report for failed runs only.
fn failed_run() {
    let folder = scratch("failed");
    std::fs::create_dir_all(&folder).expect("a folder");
    let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios/library");
    let right = library.join("fatal-lost-write-middle.toml");
    let wrong = folder.join("wrong.toml");
    let text = std::fs::read_to_string(&right).expect("a scenario");
    std::fs::write(&wrong, text.replace("RETRY_EXC_ERR", "SUCCESS")).expect("a file");
    let ran = Command::new(softhca()).arg("run").args([&right, &wrong]).arg("--out").arg(&folder).output();
    let ran = ran.expect("the command starts");
    assert_eq!(ran.status.code(), Some(1), "{}", String::from_utf8_lossy(&ran.stdout));
    assert!(!folder.join("fatal-lost-write-middle/seed-1/report.html").exists());
    let mut browser = Browser::start(1440, 900);
    let report = folder.join("wrong/seed-1/report.html");
    browser.open(&report, "");
    let verdict = browser.text("document.querySelector('.result').textContent");
    assert!(verdict.starts_with("✕ fail✕ ") && verdict.contains("SUCCESS"), "{verdict}");
    assert!(verdict.contains("seed 1 · run it again: softhca run"), "{verdict}");
    browser.screenshot("failed-run");
    let index = folder.join("index.html");
    let made = Command::new(softhca()).arg("report").arg(&folder).arg("-o").arg(&index).output();
    assert!(made.expect("the command starts").status.success());
    browser.visit(&format!("file://{}", index.display()));
    browser.wait("document.readyState === 'complete' && document.querySelectorAll('.mark').length === 2");
    let colours =
        "[...document.querySelectorAll('.mark')].map((mark) => getComputedStyle(mark).backgroundColor)";
    let styled = format!("new Set([...{colours}, getComputedStyle(document.body).backgroundColor]).size");
    assert_eq!(browser.number(&styled), 3.0, "a failed run, one that passed, and the page");
    assert_eq!(browser.number("document.body.scrollWidth - document.body.clientWidth"), 0.0);
    browser.screenshot("index");
    browser.open(&report, "#view=nothing");
    assert!(browser.text("document.querySelector('.notes').textContent").contains("no view nothing"));
    browser.click("#tab-ladder");
    assert_eq!(browser.text("document.querySelector('.notes').textContent"), "");
    assert!(browser.text("document.querySelector('.ladder-sheet').textContent").contains("dropped by"));
    browser.click("#tab-why");
    let why = browser.text("document.querySelector('.why').textContent");
    assert!(why.contains("RETRY_EXC_ERR") && why.contains("lose"), "{why}");
    browser.click("#tab-packet");
    browser.press("n");
    assert!(browser.text("document.querySelector('.packet').textContent").contains("destination QP"));
    browser.assert_no_errors();
}

/// Library scenarios run by the command: rates, alpha, queues, pauses and CNPs have charts.
fn congestion() {
    let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios/library");
    let folder = scratch("congestion");
    let mut browser = Browser::start(1440, 900);
    for (name, lanes, pauses, notifications) in [
        ("incast-pfc", "queue depth", true, false),
        ("ecn-marks-and-cnps", "alpha,queue depth,rate", false, true),
        ("dcqcn-convergence", "alpha,queue depth,rate", false, true),
    ] {
        let file = library.join(name).with_extension("toml");
        let ran = Command::new(softhca()).arg("run").arg(file).arg("--out").arg(&folder).output();
        assert!(ran.expect("the command starts").status.success(), "{name}");
        let page = folder.join(name).with_extension("html");
        let mut command = Command::new(softhca());
        command.arg("report").arg(folder.join(name).join("seed-1")).arg("-o").arg(&page);
        assert!(command.output().expect("the command starts").status.success(), "{name}");
        browser.open(&page, "#view=timeline");
        let found =
            "[...new Set([...currentRun().series.values()].map((series) => series.name))].sort().join()";
        assert_eq!(browser.text(found), lanes, "{name}");
        assert_eq!(browser.value("currentRun().spans.size > 0"), json!(pauses), "{name}");
        assert_eq!(
            browser.value("currentRun().opcodes.words.includes('CNP')"),
            json!(notifications),
            "{name}"
        );
        assert!(painted(&mut browser, ".chart") > 5000.0, "{name} is blank");
        browser.screenshot(&format!("timeline-{name}"));
        let names =
            browser.text("[...currentRun().lanes.keys()].map((key) => currentRun().laneText(key)).join()");
        assert!(names.contains("→"), "{name}: {names}");
        for view in VIEWS {
            browser.click(&format!("#tab-{view}"));
            assert!(browser.number("document.querySelector('.view').textContent.length") > 0.0, "{view}");
            browser.screenshot(&format!("{name}-{view}"));
        }
        browser.assert_no_errors();
    }
}

/// The chain of causes: a failed request can be selected, is explained, and links to its packets.
fn why() {
    let mut browser = Browser::start(1440, 900);
    browser.open(&runs::page(&runs::fatal_loss()), "#view=why");
    assert!(browser.number("document.querySelectorAll('.why-item').length") >= 1.0);
    let chain = browser.text("document.querySelector('.chain').textContent");
    assert!(chain.contains("lose one"), "{chain}");
    let causes = browser.number("document.querySelectorAll('.cause').length");
    assert!(causes >= 3.0, "{causes} causes");
    browser.screenshot("why");
    browser.click(".cause");
    assert!(browser.number("app.state.sel") >= 0.0);
    assert_eq!(browser.number("Math.min(1, document.querySelectorAll('.cause.selected').length)"), 1.0);
    browser.press("1");
    assert_eq!(browser.number("document.querySelectorAll('.step.selected').length"), 1.0);
    browser.open(&runs::page(&captures_folder().join("rping.pcap")), "#view=why");
    assert!(
        browser.text("document.querySelector('.why').textContent").contains("10.0.0.1 connected to 10.0.0.2")
    );
    browser.assert_no_errors();
}
