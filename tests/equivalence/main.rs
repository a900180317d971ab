//! The same scripts in virtual time and over real sockets tell the same story: per queue pair, and without time. So do they
//! where both ends are on one host, whichever way it reaches itself.

mod harness;
mod scripts;

use harness::Backend;
use scripts::scripts;
use softhca::Loopback;

#[test]
fn virtual_and_real_time_tell_the_same_story() {
    compare_with_virtual_time(Backend::Sockets);
}

#[test]
fn a_host_that_reaches_itself_through_its_socket_tells_the_same_story() {
    compare_with_virtual_time(Backend::OneHost(Loopback::Socket));
}

#[test]
fn a_host_that_reaches_itself_within_its_card_tells_the_same_story() {
    compare_with_virtual_time(Backend::OneHost(Loopback::Internal));
}

fn compare_with_virtual_time(on: Backend) {
    let mut told_apart = Vec::new();
    for script in scripts() {
        let label = format!("{} ({})", script.name, script.recovery.name());
        let [virtual_time, real] = [Backend::Simulation, on].map(|on| script.run(on));
        let differences = virtual_time.differences(&real);
        if differences.is_empty() {
            assert_eq!(virtual_time.order_sha256(), real.order_sha256());
            println!("{} {label}", real.order_sha256());
        } else {
            told_apart.push(format!("{label}:\n  {}\n{virtual_time}", differences.join("\n  ")));
        }
    }
    assert!(told_apart.is_empty(), "virtual time and {on:?} differ in\n{}", told_apart.join("\n"));
}

/// A script whose story is not empty tells nothing by being equal: each must have something of its own.
#[test]
fn every_script_tells_something_of_its_own() {
    let mut seen = std::collections::BTreeMap::new();
    for script in scripts() {
        let label = format!("{} ({})", script.name, script.recovery.name());
        let story = script.run(Backend::Simulation);
        assert_eq!(story.queue_pairs().filter(|(name, _)| *name == "alice.1").count(), 1, "{label}");
        let posted = story.to_string().contains("send-completed");
        assert!(posted, "{label} completes nothing:\n{story}");
        seen.entry(story.order_sha256()).or_insert_with(Vec::new).push(label);
    }
    // Recovery that sends again leaves the same story in both of its modes, unless the message begins anew.
    assert!(seen.values().all(|labels| labels.len() <= 3), "{seen:?}");
}
