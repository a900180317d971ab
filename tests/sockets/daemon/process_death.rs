//! Processes that are killed: clients, and the daemon itself.

use super::data::{ALL_ACCESS, ConnectedHost, connected};
use super::direct::DIRECT;
use super::process::{self, TEST_TIMEOUT, TestDaemon, receive_line, send_line};
use softhca::{
    AsyncEvent, CompletionStatus, ConnectOptions, Device, Error, QpState, ReceiveRequest, SendRequest,
};
use std::time::Duration;

/// A client that holds resources and sleeps.
pub fn run_sleeper() {
    let _end = ConnectedHost::new(&Device::daemon_host(None, Some("bob")).unwrap(), 4096);
    if std::env::var_os("TEST_FORK").is_some() {
        fork_copy();
    }
    send_line("sleeping");
    while receive_line().is_some() {}
}

/// Forks a child that holds copies of all descriptors until its input is closed.
#[allow(unsafe_code)]
fn fork_copy() {
    // SAFETY: the child calls only `read` and `_exit`, which are async-signal-safe.
    unsafe {
        if libc::fork() == 0 {
            let mut byte = 0u8;
            while libc::read(0, (&raw mut byte).cast(), 1) > 0 {}
            libc::_exit(0);
        }
    }
}

#[test]
pub fn a_killed_client_leaks_nothing_and_its_peer_times_out() {
    let daemon = TestDaemon::start();
    let (end, mut echo, remote) = connected(&daemon, "alice", "bob");
    let other = ConnectedHost::new(&daemon.open("bob"), 4096);
    // Mid-transfer: more requests are outstanding than can complete.
    for id in 0..64 {
        end.pair.post_send(&SendRequest::rdma_write(id, &[end.region.sge(0, 1 << 20)], remote)).unwrap();
    }
    end.finish();
    echo.kill();
    let mut statuses = Vec::new();
    for _ in 1..64 {
        statuses.push(end.queue.wait_for(TEST_TIMEOUT).expect("every request completes").status);
    }
    let first = statuses.iter().position(|status| !status.is_success()).expect("not all could be done");
    assert_eq!(statuses[first], CompletionStatus::RetryExceededError, "{statuses:?}");
    assert!(
        statuses[first + 1..].iter().all(|status| *status == CompletionStatus::WrFlushError),
        "{statuses:?}"
    );
    assert_eq!(end.pair.state().unwrap(), QpState::Error);
    daemon.wait_until("the end of the killed client", |status| status.hosts[1].clients.len() == 1);
    daemon.wait_until("the end of its queue pair", |status| status.hosts[1].queue_pairs == 1);
    // Other clients are not affected.
    assert_eq!(other.pair.state().unwrap(), QpState::Reset);
    assert_eq!(other.context.poll_async_event(), None);
}

#[test]
fn a_forked_copy_of_the_socket_does_not_keep_a_dead_client_alive() {
    let daemon = TestDaemon::start();
    let mut sleeper = process::spawn("sleeper", &daemon.name, &[("TEST_FORK", "yes")]);
    assert_eq!(sleeper.receive_line(), "sleeping");
    daemon.wait_until("the client", |status| status.hosts[1].queue_pairs == 1);
    sleeper.kill();
    daemon.wait_until("its end", |status| status.hosts[1].queue_pairs == 0);
}

#[test]
fn a_killed_daemon_raises_device_fatal_and_can_be_restarted() {
    let mut daemon = TestDaemon::start();
    let (end, echo, remote) = connected(&daemon, "alice", "bob");
    drop(echo);
    for id in 100..110 {
        let receive = ReceiveRequest { wr_id: id, sg_list: &[end.region.sge(0, 100)] };
        end.pair.post_recv(&receive).unwrap();
    }
    for id in 0..20 {
        end.pair.post_send(&SendRequest::rdma_write(id, &[end.region.sge(0, 1 << 20)], remote)).unwrap();
    }
    let sleeper = {
        let queue = end.queue.clone();
        std::thread::spawn(move || (0..30).map(|_| queue.wait().unwrap()).collect::<Vec<_>>())
    };
    daemon.process.kill();
    let completions = sleeper.join().unwrap();
    let mut ids: Vec<u64> = completions.iter().map(|completion| completion.wr_id).collect();
    ids.sort();
    let expected: Vec<u64> = (0..20).chain(100..110).collect();
    assert_eq!(ids, expected, "each request completes once");
    assert!(completions.iter().any(|completion| completion.status == CompletionStatus::WrFlushError));
    let event = std::iter::from_fn(|| end.context.wait_async_event(TEST_TIMEOUT))
        .find(|event| *event == AsyncEvent::DeviceFatal);
    assert_eq!(event, Some(AsyncEvent::DeviceFatal));

    // Every call returns an error; posted requests are flushed.
    let error = end.context.allocate_protection_domain().err().expect("no device, no protection domain");
    assert!(matches!(error, Error::DeviceGone { .. }), "{error}");
    assert!(end.domain.allocate_region(4096, ALL_ACCESS).is_err());
    assert!(end.pair.query().is_err());
    end.pair.post_send(&SendRequest::send(50, &[])).unwrap();
    assert_eq!(end.queue.wait_for(TEST_TIMEOUT).unwrap().status, CompletionStatus::WrFlushError);
    end.pair.post_recv(&ReceiveRequest { wr_id: 51, sg_list: &[] }).unwrap();
    assert_eq!(end.queue.wait_for(TEST_TIMEOUT).unwrap().wr_id, 51);
    let missing = Device::daemon_host(Some(&daemon.name), None).err().expect("no daemon is running");
    assert!(matches!(missing, Error::NoDaemon { .. }), "{missing}");

    let daemon = TestDaemon::named(daemon.name.clone(), &[]);
    let (again, mut echo, _) = connected(&daemon, "alice", "bob");
    echo.send_line("1");
    let receive = ReceiveRequest { wr_id: 0, sg_list: &[again.region.sge(0, 100)] };
    again.pair.post_recv(&receive).unwrap();
    again.pair.post_send(&SendRequest::send(1, &[again.region.sge(0, 10)])).unwrap();
    again.finish();
    again.finish();
}

#[test]
fn a_stopped_daemon_disconnects_its_clients() {
    let daemon = TestDaemon::start();
    let end = ConnectedHost::new(&daemon.open("alice"), 4096);
    daemon.control().stop().unwrap();
    assert_eq!(end.context.wait_async_event(TEST_TIMEOUT), Some(AsyncEvent::DeviceFatal));
    assert!(end.context.allocate_protection_domain().is_err());
}

#[test]
pub fn a_sigstopped_client_does_not_block_others_and_can_resume() {
    let daemon = TestDaemon::start();
    let (end, mut echo, _) = connected(&daemon, "alice", "bob");
    let (other, mut other_echo, _) = connected(&daemon, "alice", "bob");
    let process = rustix::process::Pid::from_raw(echo.id() as i32).unwrap();
    let round = |end: &ConnectedHost, id| {
        let receive = ReceiveRequest { wr_id: id, sg_list: &[end.region.sge(0, 100)] };
        end.pair.post_recv(&receive).unwrap();
        end.pair.post_send(&SendRequest::send(id, &[end.region.sge(200, 10)])).unwrap();
    };
    echo.send_line("2");
    other_echo.send_line("20");
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

/// Stops a process, and waits until each of its threads has stopped.
fn stop(process: rustix::process::Pid) {
    rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
    let tasks = format!("/proc/{}/task", process.as_raw_nonzero());
    let is_stopped = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|fields| fields.starts_with('T'))
    };
    while !std::fs::read_dir(&tasks).unwrap().all(|task| is_stopped(task.unwrap())) {
        std::thread::yield_now();
    }
}

/// A peer in a debugger, for instance. A card would acknowledge for its program.
#[test]
fn a_stopped_process_keeps_its_connections_until_it_is_gone() {
    use rustix::process::Signal;
    for theirs in ["alice", "bob"] {
        let daemon = TestDaemon::with(&DIRECT);
        let end = ConnectedHost::new(&daemon.open("alice"), 1 << 20);
        let mut echo = process::spawn("echo", &daemon.name, &[("TEST_HOST", theirs)]);
        // The requests fail after one ACK timeout.
        let path = ConnectOptions { retry_cnt: 0, ..ConnectOptions::default() };
        end.connect_over(&echo.receive_line(), &path);
        echo.send_line(&end.open_device());
        assert_eq!(echo.receive_line(), "connected");
        let process = rustix::process::Pid::from_raw(echo.id() as i32).unwrap();
        let round = |id| {
            let receive = ReceiveRequest { wr_id: id, sg_list: &[end.region.sge(0, 100)] };
            end.pair.post_recv(&receive).unwrap();
            end.pair.post_send(&SendRequest::send(id, &[end.region.sge(200, 10)])).unwrap();
        };
        echo.send_line("9");
        round(1);
        end.finish();
        end.finish();
        stop(process);
        round(2);
        // Several times the ACK timeout of real sockets.
        let early = end.queue.wait_for(Duration::from_secs(3));
        assert!(early.is_none(), "{theirs}: {early:?}");
        rustix::process::kill_process(process, Signal::CONT).unwrap();
        end.finish();
        end.finish();
        stop(process);
        round(3);
        assert!(end.queue.wait_for(Duration::from_secs(1)).is_none());
        echo.kill();
        let completion = end.queue.wait_for(TEST_TIMEOUT).expect("the process is gone");
        assert_eq!(completion.status, CompletionStatus::RetryExceededError, "{theirs}");
    }
}
