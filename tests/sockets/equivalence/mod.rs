//! The same scripts have the same trace in virtual time and over real sockets: per queue pair and without times. The same
//! holds with both ends on one host, for every loopback method.

mod harness;
mod scripts;

use harness::Backend;
use scripts::scripts;
use softhca::Loopback;

#[test]
fn virtual_and_real_time_have_the_same_trace() {
    compare_with_virtual_time(Backend::Sockets);
}

#[test]
fn socket_loopback_has_the_same_trace() {
    compare_with_virtual_time(Backend::OneHost(Loopback::Socket));
}

#[test]
fn internal_loopback_has_the_same_trace() {
    compare_with_virtual_time(Backend::OneHost(Loopback::Internal));
}

fn compare_with_virtual_time(on: Backend) {
    let mut differing = Vec::new();
    for script in scripts() {
        let label = format!("{} ({})", script.name, script.recovery.name());
        let [virtual_time, real] = [Backend::Simulation, on].map(|on| script.run(on));
        let differences = virtual_time.differences(&real);
        if differences.is_empty() {
            assert_eq!(virtual_time.order_sha256(), real.order_sha256());
            println!("{} {label}", real.order_sha256());
        } else {
            differing.push(format!("{label}:\n  {}\n{virtual_time}", differences.join("\n  ")));
        }
    }
    assert!(differing.is_empty(), "virtual time and {on:?} differ in\n{}", differing.join("\n"));
}

/// Equal traces prove nothing if all scripts have the same one: each script must have its own.
#[test]
fn every_script_has_its_own_trace() {
    let mut seen = std::collections::BTreeMap::new();
    for script in scripts() {
        let label = format!("{} ({})", script.name, script.recovery.name());
        let trace = script.run(Backend::Simulation);
        assert_eq!(trace.queue_pairs().filter(|(name, _)| *name == "alice.1").count(), 1, "{label}");
        let posted = trace.to_string().contains("send-completed");
        assert!(posted, "{label} completes nothing:\n{trace}");
        seen.entry(trace.order_sha256()).or_insert_with(Vec::new).push(label);
    }
    // go-back-n and go-back-0 have the same trace unless the message restarts.
    assert!(seen.values().all(|labels| labels.len() <= 3), "{seen:?}");
}
