//! Processes that are killed: clients, and the daemon itself.

use crate::data::{ALL, End, connected};
use crate::process::{self, PATIENCE, TestDaemon, hear, say};
use softhca::{AsyncEvent, Device, Error, ReceiveRequest, SendRequest, State, Status};

/// A client that holds resources and does nothing.
pub fn be_sleeper() {
    let _end = End::new(&Device::daemon_host(None, Some("bob")).unwrap(), 4096);
    if std::env::var_os("TEST_FORK").is_some() {
        fork_a_copy();
    }
    say("sleeping");
    while hear().is_some() {}
}

/// A child with copies of all descriptors, until the test closes its input.
#[allow(unsafe_code)]
fn fork_a_copy() {
    // SAFETY: the child calls nothing but `read` and `_exit`, which are allowed there.
    unsafe {
        if libc::fork() == 0 {
            let mut byte = 0u8;
            while libc::read(0, (&raw mut byte).cast(), 1) > 0 {}
            libc::_exit(0);
        }
    }
}

#[test]
fn a_killed_client_leaves_nothing_and_its_peer_sees_a_dead_host() {
    let daemon = TestDaemon::start();
    let (end, mut echo, remote) = connected(&daemon, "alice", "bob");
    let other = End::new(&daemon.open("bob"), 4096);
    // Mid-transfer: more is outstanding than can be done.
    for id in 0..64 {
        end.pair.post(&SendRequest::write(id, &[end.region.entry(0, 1 << 20)], remote)).unwrap();
    }
    end.finish();
    echo.kill();
    let mut statuses = Vec::new();
    for _ in 1..64 {
        statuses.push(end.queue.wait_for(PATIENCE).expect("every request completes").status);
    }
    let first = statuses.iter().position(|status| !status.is_success()).expect("not all could be done");
    assert_eq!(statuses[first], Status::RetryExceeded, "{statuses:?}");
    assert!(statuses[first + 1..].iter().all(|status| *status == Status::Flushed), "{statuses:?}");
    assert_eq!(end.pair.state().unwrap(), State::Error);
    daemon.wait_until("the end of the killed client", |status| status.hosts[1].clients.len() == 1);
    daemon.wait_until("the end of its queue pair", |status| status.hosts[1].queue_pairs == 1);
    // Nobody else noticed.
    assert_eq!(other.pair.state().unwrap(), State::Reset);
    assert_eq!(other.context.poll_event(), None);
}

#[test]
fn a_forked_copy_of_the_socket_does_not_keep_a_dead_client_alive() {
    let daemon = TestDaemon::start();
    let mut sleeper = process::spawn("sleeper", &daemon.name, &[("TEST_FORK", "yes")]);
    assert_eq!(sleeper.hear(), "sleeping");
    daemon.wait_until("the client", |status| status.hosts[1].queue_pairs == 1);
    sleeper.kill();
    daemon.wait_until("its end", |status| status.hosts[1].queue_pairs == 0);
}

#[test]
fn a_killed_daemon_is_a_fatal_device_and_comes_back() {
    let mut daemon = TestDaemon::start();
    let (end, echo, remote) = connected(&daemon, "alice", "bob");
    drop(echo);
    for id in 100..110 {
        let receive = ReceiveRequest { id, scatter: &[end.region.entry(0, 100)] };
        end.pair.post_receive(&receive).unwrap();
    }
    for id in 0..20 {
        end.pair.post(&SendRequest::write(id, &[end.region.entry(0, 1 << 20)], remote)).unwrap();
    }
    let sleeper = {
        let queue = end.queue.clone();
        std::thread::spawn(move || (0..30).map(|_| queue.wait().unwrap()).collect::<Vec<_>>())
    };
    daemon.process.kill();
    let completions = sleeper.join().unwrap();
    let mut ids: Vec<u64> = completions.iter().map(|completion| completion.id).collect();
    ids.sort();
    let expected: Vec<u64> = (0..20).chain(100..110).collect();
    assert_eq!(ids, expected, "each request completes once");
    assert!(completions.iter().any(|completion| completion.status == Status::Flushed));
    let event = std::iter::from_fn(|| end.context.wait_event(PATIENCE))
        .find(|event| *event == AsyncEvent::DeviceFatal);
    assert_eq!(event, Some(AsyncEvent::DeviceFatal));

    // Every call returns, with a sentence; what is posted is flushed.
    let refused = end.context.allocate_domain().err().expect("no card, no domain");
    assert!(matches!(refused, Error::DeviceGone { .. }), "{refused}");
    assert!(end.domain.register(4096, ALL).is_err());
    assert!(end.pair.query().is_err());
    end.pair.post(&SendRequest::send(50, &[])).unwrap();
    assert_eq!(end.queue.wait_for(PATIENCE).unwrap().status, Status::Flushed);
    end.pair.post_receive(&ReceiveRequest { id: 51, scatter: &[] }).unwrap();
    assert_eq!(end.queue.wait_for(PATIENCE).unwrap().id, 51);
    let missing = Device::daemon_host(Some(&daemon.name), None).err().expect("nobody is there");
    assert!(matches!(missing, Error::NoDaemon { .. }), "{missing}");

    let daemon = TestDaemon::named(daemon.name.clone(), &[]);
    let (again, mut echo, _) = connected(&daemon, "alice", "bob");
    echo.say("1");
    let receive = ReceiveRequest { id: 0, scatter: &[again.region.entry(0, 100)] };
    again.pair.post_receive(&receive).unwrap();
    again.pair.post(&SendRequest::send(1, &[again.region.entry(0, 10)])).unwrap();
    again.finish();
    again.finish();
}

#[test]
fn a_daemon_that_is_asked_to_stop_lets_its_clients_go() {
    let daemon = TestDaemon::start();
    let end = End::new(&daemon.open("alice"), 4096);
    daemon.control().stop().unwrap();
    assert_eq!(end.context.wait_event(PATIENCE), Some(AsyncEvent::DeviceFatal));
    assert!(end.context.allocate_domain().is_err());
}

#[test]
fn a_stopped_client_holds_nobody_up_and_goes_on_later() {
    let daemon = TestDaemon::start();
    let (end, mut echo, _) = connected(&daemon, "alice", "bob");
    let (other, mut other_echo, _) = connected(&daemon, "alice", "bob");
    let process = rustix::process::Pid::from_raw(echo.number() as i32).unwrap();
    let round = |end: &End, id| {
        let receive = ReceiveRequest { id, scatter: &[end.region.entry(0, 100)] };
        end.pair.post_receive(&receive).unwrap();
        end.pair.post(&SendRequest::send(id, &[end.region.entry(200, 10)])).unwrap();
    };
    echo.say("2");
    other_echo.say("20");
    round(&end, 1);
    end.finish();
    end.finish();
    rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
    round(&end, 2);
    for id in 0..20 {
        round(&other, id);
        other.finish();
        other.finish();
    }
    rustix::process::kill_process(process, rustix::process::Signal::CONT).unwrap();
    end.finish();
    end.finish();
}
