//! Analysis of event logs: why work requests failed or were slow, and mistakes of programs.

mod lint;
mod why;

use softhca_fabric::RuleId;
use softhca_tests::pair::{Pair, Setup};
use softhca_tests::verbs::World;
use softhca_trace::{EventLog, EventLogReader, NameTable};
use std::cell::RefCell;
use std::rc::Rc;

/// The log of a pair, including the creation of its queue pairs.
fn run_and_log(setup: Setup, act: impl FnOnce(&mut Pair)) -> Vec<u8> {
    let mut kept = None;
    let mut pair = setup.build_with_sink(|world: &World| {
        let mut names = NameTable::from_world(world);
        names.add_rule(RuleId(1), "the fault of the test");
        let log = Rc::new(RefCell::new(EventLog::new(Vec::new(), "a test", names)));
        kept = Some(log.clone());
        Box::new(log)
    });
    act(&mut pair);
    let log = kept.expect("the pair was built");
    log.borrow_mut().finish().expect("a vector takes everything");
    drop(pair);
    Rc::into_inner(log).expect("the world let go of it").into_inner().into_inner()
}

fn reader(log: &[u8]) -> EventLogReader<&[u8]> {
    EventLogReader::new(log).expect("a log")
}
