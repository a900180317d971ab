//! Fault rules on the links of a daemon, and their record in log and capture.

use super::data::{ALL_ACCESS, ConnectedHost};
use super::process::{TEST_TIMEOUT, TestDaemon};
use softhca::{
    AsyncEvent, CompletionStatus, ConnectOptions, PortState, QpType, SendRequest,
    fault::{Action, FlowId, InclusiveRange, Repeat, Rule, RuleId, Selector},
};
use softhca_fabric::Flow;
use softhca_trace::{CaptureReader, EventLogReader};
use std::fs::File;
use std::os::fd::AsFd;

fn drop_rule(psn: u64) -> Rule {
    Rule {
        id: RuleId(7),
        selector: Selector {
            flow_id: Some(FlowId(1)),
            psn: Some(InclusiveRange::exactly(psn)),
            ..Selector::default()
        },
        repeat: Repeat::times(1),
        action: Action::Drop,
    }
}

fn connected(daemon: &TestDaemon) -> [ConnectedHost; 2] {
    let ends =
        [ConnectedHost::new(&daemon.open("alice"), 8192), ConnectedHost::new(&daemon.open("bob"), 8192)];
    ends[0].pair.connect(&ends[1].pair.endpoint(), &ConnectOptions::default()).unwrap();
    ends[1].pair.connect(&ends[0].pair.endpoint(), &ConnectOptions::default()).unwrap();
    ends
}

fn write(ends: &[ConnectedHost; 2]) -> CompletionStatus {
    let gather = [ends[0].region.sge(0, 4000)];
    ends[0].pair.post_send(&SendRequest::rdma_write(1, &gather, ends[1].region.remote_address(0))).unwrap();
    ends[0].queue.wait_for(TEST_TIMEOUT).expect("a completion").status
}

#[test]
fn a_rule_applies_to_the_selected_packet_of_the_first_queue_pair() {
    let daemon = TestDaemon::start();
    let mut control = daemon.control();
    let folder = std::env::temp_dir().join(format!("softhca-{}", daemon.name));
    let paths = ["pcapng", "jsonl"].map(|kind| folder.with_extension(kind));
    let [capture, log] = paths.each_ref().map(|path| File::create(path).unwrap());
    control.start_recording(Some(capture.as_fd()), Some(log.as_fd())).unwrap();
    // A queue pair of another type is not selected.
    control.assign_roles("alice", 1, &[(QpType::Rc, FlowId(1))]).unwrap();
    control.add_rules("alice", 1, &[(drop_rule(1), "lose the second")]).unwrap();
    let uc = ConnectedHost::new(&daemon.open("alice"), 64);
    let other = uc.domain.create_queue_pair(QpType::Uc, &uc.queue).build().unwrap();
    other.connect(&other.endpoint(), &ConnectOptions::default()).unwrap();
    let ends = connected(&daemon);
    assert_eq!(write(&ends), CompletionStatus::RetryExceededError);
    let fatal = ends[1].context.wait_async_event(TEST_TIMEOUT).expect("the responder saw the gap");
    assert_eq!(fatal, AsyncEvent::QueuePairFatal(ends[1].pair.qpn()));
    let rules = control.rules("alice").unwrap();
    assert_eq!(rules.len(), 1);
    assert_eq!((rules[0].0.clone(), rules[0].1.fired), (drop_rule(1), 1));
    assert!(control.rules("bob").unwrap().is_empty());
    // Without rules every packet passes, and the files are complete when recording stops.
    control.clear_rules("alice").unwrap();
    assert!(control.rules("alice").unwrap().is_empty());
    assert_eq!(write(&connected(&daemon)), CompletionStatus::Success);
    control.stop_recording().unwrap();
    let bytes = std::fs::read(&paths[0]).unwrap();
    let packets = CaptureReader::new(&bytes[..]).unwrap().filter(Result::is_ok).count();
    assert!(packets >= 10, "two WRITEs of four packets and their ACKs: {packets}");
    let comment = b"dropped by \"lose the second\"";
    assert_eq!(bytes.windows(comment.len()).filter(|window| window == comment).count(), 1);
    let log = std::fs::read(&paths[1]).unwrap();
    let entries: Vec<_> = EventLogReader::new(&log[..]).unwrap().map(|entry| entry.unwrap()).collect();
    assert!(entries.iter().any(|entry| entry.host == "bob"));
    assert!(String::from_utf8(log).unwrap().contains("lose the second"));
    for path in paths {
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_client_may_add_rules_to_the_link_of_its_host() {
    let daemon = TestDaemon::start();
    let device = daemon.open("alice");
    let ends = [ConnectedHost::new(&device, 8192), ConnectedHost::new(&daemon.open("bob"), 8192)];
    let [from, to] = [&ends[0], &ends[1]]
        .map(|end| softhca_fabric::Endpoint { address: end.context.address(), qpn: end.pair.qpn() });
    let first_psn = ends[0].pair.endpoint().psn;
    device.add_flow(1, Flow { id: FlowId(1), requester: from, responder: Some(to), first_psn });
    device.add_rule(1, drop_rule(2));
    ends[0].pair.connect(&ends[1].pair.endpoint(), &ConnectOptions::default()).unwrap();
    ends[1].pair.connect(&ends[0].pair.endpoint(), &ConnectOptions::default()).unwrap();
    assert_eq!(write(&ends), CompletionStatus::RetryExceededError);
    assert_eq!(device.rules()[0].1.fired, 1);
    assert!(ends[0].domain.allocate_region(64, ALL_ACCESS).is_ok());
}

#[test]
fn invalid_rules_and_unknown_hosts_are_rejected() {
    let daemon = TestDaemon::start();
    let mut control = daemon.control();
    let error = control.add_rules("carol", 1, &[(drop_rule(1), "")]).unwrap_err();
    assert!(error.to_string().contains("carol") && error.to_string().contains("alice"), "{error}");
    let rules: Vec<_> = (0..1025).map(|_| (drop_rule(1), "")).collect();
    assert_eq!(control.add_rules("alice", 1, &rules).unwrap_err().errno(), libc::ENOMEM);
    assert!(control.rules("alice").unwrap().is_empty());
    control.stop_recording().unwrap();
}

#[test]
fn a_port_that_was_set_down_is_up_again_when_the_control_connection_closes() {
    let daemon = TestDaemon::start();
    let mut control = daemon.control();
    let ends = connected(&daemon);
    control.set_port_state("bob", PortState::Down).unwrap();
    assert_eq!(ends[1].context.wait_async_event(TEST_TIMEOUT), Some(AsyncEvent::PortDown));
    let states = ends.each_ref().map(|end| end.context.port_state());
    assert_eq!(states, [PortState::Active, PortState::Down]);
    assert_eq!(write(&ends), CompletionStatus::RetryExceededError);
    drop(control);
    assert_eq!(ends[1].context.wait_async_event(TEST_TIMEOUT), Some(AsyncEvent::PortActive));
    assert_eq!(ends[1].context.port_state(), PortState::Active);
    assert_eq!(write(&connected(&daemon)), CompletionStatus::Success);
}
