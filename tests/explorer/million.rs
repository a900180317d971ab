//! The load time and memory of a log with a million events.

use super::browser::Browser;
use super::runs;
use softhca_engine::Recovery;
use softhca_tests::pair::Setup;
use std::path::Path;
use std::time::Instant;

/// Prints the load time and memory of a log with a million events.
pub fn million_events() {
    let folder = runs::record_run(
        "million",
        "A million events",
        Setup::default().one_gigabit().recovery(Recovery::GoBackN),
        |pair| {
            for round in 0..346 {
                for id in 0..16 {
                    pair.post_write(round * 16 + id, 0, id * 60_000, 60_000);
                }
                pair.world.run();
                let end = pair.a;
                pair.completions(end);
            }
        },
    );
    let log = folder.join("events.jsonl");
    let events = std::fs::read_to_string(&log).expect("a log").lines().count() - 1;
    assert!(events >= 1_000_000, "{events}");
    let start = Instant::now();
    let page = runs::page(&log);
    eprintln!(
        "{events} events, log {} MiB: the page takes {:?} and {} MiB",
        mib(&log),
        start.elapsed(),
        mib(&page)
    );
    let mut browser = Browser::start(1440, 900);
    let start = Instant::now();
    browser.open(&page, "");
    eprintln!("opened and read after {:?}", start.elapsed());
    assert_eq!(browser.number("currentRun().length"), events as f64);
    let painted = browser.number("performance.getEntriesByName('first-contentful-paint')[0].startTime");
    eprintln!("first text after {painted:.0} ms");
    assert!(painted < browser.number("app.readAt"), "text appears before the events are read");
    let [now, most] = browser.memory();
    eprintln!(
        "read {:.0} ms after the start of the page; its process has {now} MiB, and had {most} at most",
        browser.number("app.readAt")
    );
    for view in ["ladder", "events", "sequence", "timeline", "memory"] {
        // Charts share their time range; each starts with the full range.
        browser.value("look({ from: -1, to: -1 })");
        browser.click(&format!("#tab-{view}"));
        let first = browser.number(
            "(() => { const start = performance.now(); draw(); return performance.now() - start; })()",
        );
        let frames = browser.value(
            "new Promise((done) => { const target = document.querySelector('.rows, .chart'); const gaps = []; let count = 0; let last = performance.now(); \
             const step = () => { const now = performance.now(); gaps.push(now - last); last = now; \
             target.dispatchEvent(new WheelEvent('wheel', { deltaY: target.className === 'chart' ? -20 : 900, cancelable: true })); \
             if (++count < 120) requestAnimationFrame(step); else { gaps.sort((a, b) => a - b); done([gaps[60], gaps[114]]); } }; \
             requestAnimationFrame(step); })",
        );
        eprintln!("{view}: drawn in {first:.1} ms; scrolling, a frame takes {frames} ms (median, 95 %)");
    }
    browser.value("look({ view: 'events', q: 'psn\":77,' })");
    browser.wait("document.querySelectorAll('.line').length > 0");
    browser.screenshot("million");
    browser.assert_no_errors();
}

fn mib(path: &Path) -> u64 {
    std::fs::metadata(path).expect("a file").len() >> 20
}
