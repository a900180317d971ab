//! Five typical mistakes: the message of each names its cause and its remedy, on every back end.

#[path = "../../../verbs-api/examples/five_mistakes.rs"]
mod five_mistakes;

use super::process::TestDaemon;
use softhca::Device;
use softhca::sim::World;

/// For each mistake, parts of its message: the cause and the remedy.
const EXPECTED: [&[&str]; 5] = [
    &["REM_ACCESS_ERR", "rejected the rkey", "use the rkey of a region that is still registered"],
    &["RNR_RETRY_EXC_ERR", "no receive posted", "post receives before the peer sends"],
    &["post_send", "is in INIT", "connect the queue pair first"],
    &["REM_ACCESS_ERR", "the access", "the REMOTE_ access flag"],
    &["CQ_ERR", "overflowed", "with an entry for every work request that can be outstanding"],
];

fn check(back_end: &str, devices: [Device; 2]) {
    let messages = five_mistakes::messages(&devices).unwrap();
    for (message, parts) in messages.iter().zip(EXPECTED) {
        for part in parts {
            assert!(message.contains(part), "{back_end}: {part:?} is not in {message:?}");
        }
    }
}

#[test]
fn the_messages_of_mistakes_name_cause_and_remedy_on_an_embedded_device() {
    check("embedded", [(); 2].map(|()| Device::embedded().unwrap()));
}

#[test]
fn the_messages_of_mistakes_name_cause_and_remedy_in_a_daemon() {
    let daemon = TestDaemon::start();
    check("daemon", ["alice", "bob"].map(|host| daemon.open(host)));
}

#[test]
fn the_messages_of_mistakes_name_cause_and_remedy_in_a_world() {
    let mut world = World::new(3);
    check("world", ["alice", "bob"].map(|name| world.device(name)));
}
