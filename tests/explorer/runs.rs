//! Folders with an event log and a capture, as `softhca run --out` writes them.

use super::browser::fresh_scratch;
use softhca_engine::Recovery;
use softhca_explorer::{Page, Run};
use softhca_fabric::{Action, EventSink, InclusiveRange, Repeat, RuleId};
use softhca_tests::pair::{Pair, Setup, requests};
use softhca_trace::{CapturePoints, CaptureWriter, EventLog, NameTable, Tap};
use softhca_types::Operation;
use std::cell::RefCell;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Runs `act` on a pair and writes its event log and capture to a folder.
pub fn record_run(name: &str, title: &str, setup: Setup, act: impl FnOnce(&mut Pair)) -> PathBuf {
    let folder = fresh_scratch(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    let file = |name| BufWriter::new(File::create(folder.join(name)).expect("a file"));
    let mut pair = setup.build();
    let mut names = NameTable::from_world(&pair.world);
    names.add_rule(RuleId(1), "lose one");
    let log = Rc::new(RefCell::new(EventLog::new(file("events.jsonl"), title, names.clone())));
    let writer = CaptureWriter::new(file("capture.pcapng")).expect("a capture");
    let tap = Rc::new(RefCell::new(Tap::new(writer, names, CapturePoints::Senders).expect("a capture")));
    let observers: Vec<Box<dyn EventSink>> = vec![Box::new(log.clone()), Box::new(tap.clone())];
    pair.world.set_sink(observers);
    act(&mut pair);
    pair.run();
    pair.world.set_sink(());
    log.borrow_mut().finish().expect("a whole log");
    tap.borrow_mut().finish().expect("a whole capture");
    folder
}

fn drop_packet(pair: &mut Pair, psn: u64, times: u64) {
    pair.add_rule(requests(InclusiveRange::exactly(psn)), Repeat::times(times), Action::Drop);
}

/// Several operations, and one lost packet that breaks the connection.
pub fn fatal_loss() -> PathBuf {
    record_run("fatal", "A lost middle packet is fatal to the connection", Setup::default(), |pair| {
        drop_packet(pair, 5, 1);
        pair.post_receive(1, 0, 4096);
        pair.post_send(1, 0, 700);
        pair.post_write(2, 0, 4096, 3000);
        pair.post_write(3, 0, 8192, 4000);
        pair.post_read(4, 0, 0, 2000);
    })
}

/// A long WRITE that loses a packet, with this recovery mode.
pub fn recovered_loss(recovery: Recovery) -> PathBuf {
    let title = format!("A lost packet with {}", recovery.name());
    record_run(recovery.name(), &title, Setup::default().recovery(recovery).one_gigabit(), |pair| {
        drop_packet(pair, 20, 1);
        pair.post_write(1, 0, 0, 40_000);
        let (a, b) = (pair.a, pair.b);
        pair.post(2, Operation::FetchAdd { remote: b.remote(0), add: 1 }, &[a.sge(0, 8)]);
    })
}

/// Writes the page of a run.
pub fn page(run: &Path) -> PathBuf {
    comparison_page(&[run])
}

/// Writes the page of one run or of two.
pub fn comparison_page(runs: &[&Path]) -> PathBuf {
    let mut runs_read = runs.iter().map(|path| Run::open(path).expect("something to see"));
    let mut page = Page::new(runs_read.next().expect("a run"));
    for run in runs_read {
        page = page.with_run(run);
    }
    let name = runs[0].file_name().expect("a name").to_string_lossy();
    let path = fresh_scratch(&format!("{name}.html"));
    page.write(BufWriter::new(File::create(&path).expect("a file"))).expect("a page");
    path
}
