//! Which thread drives an embedded device: callers while they poll, otherwise its own thread, never a future. Packets
//! stay in order whichever thread drives, and an idle device uses no CPU time.

use crate::connected_host::ConnectedHost;
use crate::{Role, StopOnDrop};
use softhca::{
    ConnectOptions, Device, EmbeddedOptions, Instant, Loopback, Mtu, SendRequest,
    trace::{EventSink, NetworkEvent},
};
use softhca_tests::process::{self, Process, TEST_TIMEOUT, receive_line, send_line};
use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::thread::{self, ThreadId};
use std::time::Duration;

pub const ROLES: &[Role] =
    &[("idle", run_idle), ("idle pair", run_idle_pair), ("idle daemon", run_idle_daemon)];

fn write(from: &ConnectedHost, id: u64, length: u32, to: &ConnectedHost) {
    from.write(id, length, to.region.remote_address(0));
}

fn connect(devices: &[Device; 2], path: &ConnectOptions) -> [ConnectedHost; 2] {
    let ends = [0, 1].map(|index| ConnectedHost::new(&devices[index], 1 << 20));
    ends[0].pair.connect_both(&ends[1].pair, path).unwrap();
    ends
}

fn connected() -> [ConnectedHost; 2] {
    connect(&[(); 2].map(|()| Device::embedded().unwrap()), &ConnectOptions::default())
}

/// A device with internal loopback.
fn loopback_device() -> Device {
    let options = EmbeddedOptions { loopback: Loopback::Internal, ..EmbeddedOptions::default() };
    Device::embedded_with(options).unwrap()
}

/// Both ends on one device, which must be driven for either of them.
fn connected_on_one_device() -> [ConnectedHost; 2] {
    let device = loopback_device();
    connect(&[device.clone(), device], &ConnectOptions::default())
}

/// Spins until `held` returns true, or fails after a timeout.
fn spin_until(what: &str, mut held: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + TEST_TIMEOUT;
    while !held() {
        assert!(std::time::Instant::now() < deadline, "{what}");
    }
}

#[test]
fn a_target_that_spins_on_its_memory_receives_data() {
    for [a, b] in [connected(), connected_on_one_device()] {
        thread::scope(|scope| {
            scope.spawn(|| spin_until("the last byte never came", || b.region.read_at(99, 1) == [7]));
            a.region.write_at(0, &[7; 100]);
            write(&a, 1, 100, &b);
            a.finish();
        });
        assert_eq!(b.region.read_at(0, 100), [7; 100]);
    }
}

#[test]
fn a_sleeping_target_receives_data() {
    let [a, b] = connected();
    for round in 1..50 {
        a.region.write_at(0, &[round; 5000]);
        write(&a, 1, 5000, &b);
        a.pair
            .post_send(&SendRequest::rdma_read(2, &[a.region.sge(8192, 5000)], b.region.remote_address(0)))
            .unwrap();
        a.finish();
        a.finish();
        assert_eq!(a.region.read_at(8192, 5000), vec![round; 5000]);
    }
}

/// How often this thread has given up its processor by itself.
fn voluntary_switches() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn polling_never_sleeps() {
    let ends = connected();
    let before = voluntary_switches();
    for _ in 0..200_000 {
        assert_eq!(ends[0].queue.poll(), None);
    }
    assert_eq!(voluntary_switches(), before);
}

#[test]
fn two_threads_post_to_and_poll_one_queue_pair() {
    const EACH: u64 = 2000;
    let [a, b] = connected();
    let done = AtomicU64::new(0);
    let ids = Mutex::new(BTreeSet::new());
    thread::scope(|scope| {
        for thread in 0..2 {
            let (a, b, done, ids) = (&a, &b, &done, &ids);
            scope.spawn(move || {
                let mut posted = 0;
                spin_until("not everything completed", || {
                    // Both threads stay within the send queue of 128.
                    if posted < EACH && posted < done.load(Ordering::Relaxed) / 2 + 50 {
                        write(a, thread * EACH + posted, 64, b);
                        posted += 1;
                    }
                    if let Some(completion) = a.queue.poll() {
                        assert!(completion.status.is_success(), "{completion:?}");
                        assert!(ids.lock().unwrap().insert(completion.wr_id));
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                    done.load(Ordering::Relaxed) == 2 * EACH
                });
            });
        }
    });
    assert_eq!(ids.lock().unwrap().len() as u64, 2 * EACH);
}

#[test]
fn a_caller_that_polls_once_and_sleeps_does_not_block_progress() {
    poll_once_and_sleep(&connected());
}

#[test]
fn a_caller_that_polls_a_device_with_both_ends_once_and_sleeps_does_not_block_progress() {
    poll_once_and_sleep(&connected_on_one_device());
}

fn poll_once_and_sleep([a, b]: &[ConnectedHost; 2]) {
    for round in 1..20 {
        a.region.write_at(0, &[round; 9000]);
        write(a, u64::from(round), 9000, b);
        let early = a.queue.poll();
        spin_until("the data never came", || {
            thread::sleep(Duration::from_millis(2));
            b.region.read_at(8999, 1) == [round]
        });
        // The ACK needs no caller either.
        let completion = early.unwrap_or_else(|| {
            let mut found = None;
            spin_until("the completion never came", || {
                thread::sleep(Duration::from_millis(2));
                found = a.queue.poll();
                found.is_some()
            });
            found.unwrap()
        });
        assert_eq!(completion.wr_id, u64::from(round));
    }
}

#[test]
fn eight_threads_use_one_device_concurrently() {
    use_concurrently(&[(); 2].map(|()| Device::embedded().unwrap()));
}

#[test]
fn eight_threads_use_one_device_with_both_ends_concurrently() {
    let device = loopback_device();
    use_concurrently(&[device.clone(), device]);
}

fn use_concurrently(devices: &[Device; 2]) {
    thread::scope(|scope| {
        for caller in 0..8u8 {
            scope.spawn(move || {
                let [a, b] = connect(devices, &ConnectOptions::default());
                for round in 0..200 {
                    a.region.write_at(0, &[caller ^ round; 3000]);
                    write(&a, u64::from(round), 3000, &b);
                    assert_eq!(a.finish().wr_id, u64::from(round));
                    assert_eq!(b.region.read_at(0, 3000), [caller ^ round; 3000]);
                }
            });
        }
    });
}

/// Records the threads that emitted events.
#[derive(Clone, Default)]
struct ThreadSink(Arc<Mutex<Vec<ThreadId>>>);

impl EventSink for ThreadSink {
    fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
        if let NetworkEvent::Hca { .. } = event {
            self.0.lock().unwrap().push(thread::current().id());
        }
    }
}

#[test]
fn futures_never_drive_the_device() {
    let threads = ThreadSink::default();
    let options = EmbeddedOptions { event_sink: Box::new(threads.clone()), ..EmbeddedOptions::default() };
    let devices = [Device::embedded_with(options).unwrap(), Device::embedded().unwrap()];
    let [a, b] = connect(&devices, &ConnectOptions::default());
    let mut has_seen_thread = false;
    for id in 0..100 {
        write(&a, id, 5000, &b);
        // Control verbs and posts may drive the device; polling a future must not.
        threads.0.lock().unwrap().clear();
        let mut next = pin!(a.queue.next());
        let mut context = std::task::Context::from_waker(Waker::noop());
        spin_until("the future never ended", || match next.as_mut().poll(&mut context) {
            Poll::Ready(completion) => {
                assert_eq!((completion.wr_id, completion.status.is_success()), (id, true));
                true
            }
            Poll::Pending => {
                thread::yield_now();
                false
            }
        });
        let seen = threads.0.lock().unwrap();
        assert!(!seen.contains(&thread::current().id()), "the polling thread drove the device");
        has_seen_thread |= !seen.is_empty();
    }
    assert!(has_seen_thread);
}

/// Eight threads take turns as driver of both cards. Their sends run on whichever processor they are on, and
/// still the engines never see a packet before its turn.
#[test]
fn packets_stay_in_order_whichever_thread_drives() {
    let devices = [(); 2].map(|()| Device::embedded().unwrap());
    let [a, b] = connect(&devices, &ConnectOptions::default());
    let [back_a, back_b] =
        connect(&devices, &ConnectOptions { path_mtu: Mtu::B256, ..ConnectOptions::default() });
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stopped = StopOnDrop(&stop);
        for driver in 0..8 {
            let (a, b, stop) = (&a, &b, &stop);
            scope.spawn(move || {
                // An empty poll is a turn; these queues stay empty.
                let end = if driver % 2 == 0 { a } else { b };
                let empty = end.context.create_completion_queue(1).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(empty.poll(), None);
                }
            });
        }
        for _ in 0..150 {
            for id in 0..16 {
                write(&a, id, 100_000, &b);
                write(&back_b, id, 3000, &back_a);
                let entries = [a.region.sge(1 << 18, 50_000)];
                a.pair
                    .post_send(&SendRequest::rdma_read(100 + id, &entries, b.region.remote_address(0)))
                    .unwrap();
            }
            for _ in 0..32 {
                a.finish();
            }
            for _ in 0..16 {
                back_b.finish();
            }
        }
        drop(stopped);
    });
    for end in [&a, &b] {
        let counters = end.context.counters();
        let seen = [counters.out_of_sequence, counters.packet_seq_err, counters.implied_nak_seq_err];
        assert_eq!(seen, [0; 3], "{counters:?}");
        println!("{} packets, {} put in order", counters.rcvd_pkts, counters.host_reordered);
    }
}

/// Whether every thread of a process sleeps.
fn is_asleep(process: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let state = |path: std::path::PathBuf| {
        let text = std::fs::read_to_string(path.join("stat")).unwrap_or_default();
        text.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
    };
    tasks.map(|task| state(task.unwrap().path())).all(|state| matches!(state, Some('S') | None))
}

/// An idle process sleeps: once its startup work is done, a hundred looks in a row find all its threads asleep. A thread
/// that polls, even for a tenth of the time, is seen.
fn assert_idle(role: &str) {
    const LOOKS: u32 = 100;
    let mut idle = Process::start(&mut process::command(&[], role));
    assert_eq!(idle.receive_line(), "ready");
    let mut in_a_row = 0;
    spin_until("the process does not sleep", || {
        thread::sleep(Duration::from_millis(5));
        in_a_row = if is_asleep(idle.id()) { in_a_row + 1 } else { 0 };
        in_a_row == LOOKS
    });
}

#[test]
fn an_idle_device_sleeps() {
    assert_idle("idle");
}

#[test]
fn two_idle_connected_devices_sleep() {
    assert_idle("idle pair");
}

#[test]
fn an_idle_daemon_sleeps() {
    assert_idle("idle daemon");
}

fn run_idle() {
    let device = Device::embedded().unwrap();
    let _context = device.open();
    send_line("ready");
    while receive_line().is_some() {}
}

fn run_idle_pair() {
    let [a, b] = connected();
    write(&a, 1, 5000, &b);
    a.finish();
    send_line("ready");
    while receive_line().is_some() {}
}

fn run_idle_daemon() {
    let config = softhca_daemon::Config {
        name: format!("idle-{}", std::process::id()),
        hosts: ["alice", "bob"]
            .map(|name| softhca_daemon::HostConfig { name: name.into(), address: None })
            .into(),
        ..softhca_daemon::Config::default()
    };
    let mut daemon = softhca_daemon::Daemon::start(config).unwrap();
    send_line("ready");
    thread::spawn(|| {
        while receive_line().is_some() {}
        std::process::exit(0);
    });
    daemon.run(None).unwrap();
}
