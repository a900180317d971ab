//! Two processes with one daemon: every operation, between two hosts and on one.

use super::process::{self, Process, TEST_TIMEOUT, TestDaemon, receive_line, send_line};
pub use crate::connected_host::{ALL_ACCESS, ConnectedHost};
use softhca::{
    AccessFlags, CompletionStatus, ConnectOptions, Device, MemoryWindowBind, MemoryWindowType, Operation,
    ReceiveRequest, RemoteAddress, RemoteKey, SendRequest,
};
use std::ptr::NonNull;

/// Echoes every message until standard input ends.
pub fn run_echo() {
    let host = std::env::var("TEST_HOST").unwrap();
    let end = ConnectedHost::new(&Device::daemon_host(None, Some(&host)).unwrap(), 1 << 20);
    send_line(&end.open_device());
    end.connect(&receive_line().unwrap());
    let post = |id| {
        end.pair.post_recv(&ReceiveRequest { wr_id: id, sg_list: &[end.region.sge(0, 4096)] }).unwrap();
    };
    post(0);
    send_line("connected");
    let rounds: u64 = receive_line().unwrap().parse().unwrap();
    // The next message may arrive before the ACK of the last echo.
    let mut answered = 0;
    while answered < rounds {
        let completion = end.queue.wait_for(TEST_TIMEOUT).expect("a message or an acknowledgement");
        assert!(completion.status.is_success(), "{completion:?}");
        if !completion.opcode.is_receive() {
            answered += 1;
            continue;
        }
        post(completion.wr_id + 1);
        let entries = [end.region.sge(0, completion.byte_len)];
        end.pair.post_send(&SendRequest::send(completion.wr_id, &entries)).unwrap();
    }
    send_line("done");
    while receive_line().is_some() {}
}

/// An end connected to an echo process.
pub fn connected(daemon: &TestDaemon, ours: &str, theirs: &str) -> (ConnectedHost, Process, RemoteAddress) {
    let end = ConnectedHost::new(&daemon.open(ours), 1 << 20);
    let mut echo = process::spawn("echo", &daemon.name, &[("TEST_HOST", theirs)]);
    let remote = end.connect(&echo.receive_line());
    echo.send_line(&end.open_device());
    assert_eq!(echo.receive_line(), "connected");
    (end, echo, remote)
}

/// The configuration of a daemon with internal loopback.
pub const DEVICE_LOOPBACK: [(&str, &str); 1] = [("TEST_CONFIG", "loopback = 'internal'")];

pub fn every_operation(daemon: &TestDaemon, ours: &str, theirs: &str) {
    let (end, mut echo, remote) = connected(daemon, ours, theirs);
    echo.send_line("50");
    for round in 0..50u64 {
        let text = format!("message {round}");
        end.region.write_at(0, text.as_bytes());
        let receive = ReceiveRequest { wr_id: round, sg_list: &[end.region.sge(4096, 4096)] };
        end.pair.post_recv(&receive).unwrap();
        end.pair.post_send(&SendRequest::send(round, &[end.region.sge(0, text.len() as u32)])).unwrap();
        end.finish();
        end.finish();
        assert_eq!(end.region.read_at(4096, text.len() as u64), text.as_bytes());
    }
    assert_eq!(echo.receive_line(), "done");
    let at = |offset| RemoteAddress { address: remote.address + offset, ..remote };
    let data: Vec<u8> = (0..100_000u32).map(|index| index as u8).collect();
    end.region.write_at(8192, &data);
    end.pair.post_send(&SendRequest::rdma_write(1, &[end.region.sge(8192, 100_000)], at(200_000))).unwrap();
    end.finish();
    end.pair.post_send(&SendRequest::rdma_read(2, &[end.region.sge(500_000, 100_000)], at(200_000))).unwrap();
    end.finish();
    assert_eq!(end.region.read_at(500_000, data.len() as u64), data);
    let old = [end.region.sge(0, 8)];
    end.region.write_at(8, &40u64.to_ne_bytes());
    end.pair.post_send(&SendRequest::rdma_write(3, &[end.region.sge(8, 8)], at(64))).unwrap();
    end.finish();
    end.pair.post_send(&SendRequest::fetch_and_add(4, &old, at(64), 2)).unwrap();
    end.finish();
    assert_eq!(end.region.load(0), 40);
    end.pair.post_send(&SendRequest::compare_and_swap(5, &old, at(64), 42, 7)).unwrap();
    end.finish();
    assert_eq!(end.region.load(0), 42);
    end.pair.post_send(&SendRequest::rdma_read(6, &[end.region.sge(16, 8)], at(64))).unwrap();
    end.finish();
    assert_eq!(end.region.load(16), 7);
}

#[test]
pub fn two_processes_on_two_hosts_do_every_operation() {
    every_operation(&TestDaemon::start(), "alice", "bob");
}

#[test]
fn two_processes_on_one_host_do_every_operation() {
    every_operation(&TestDaemon::start(), "alice", "alice");
}

#[test]
fn two_processes_on_one_host_do_every_operation_with_internal_loopback() {
    let daemon = TestDaemon::with(&DEVICE_LOOPBACK);
    every_operation(&daemon, "alice", "alice");
    let status = daemon.control().status().unwrap();
    assert!(status.hosts.iter().all(|host| host.host.loopback == "internal"), "{status:?}");
    // Other hosts are reached as before.
    every_operation(&daemon, "alice", "bob");
}

#[test]
pub fn application_memory_is_read_and_written() {
    check_application_memory(&TestDaemon::start(), "alice", "bob");
}

#[test]
fn application_memory_is_read_and_written_with_internal_loopback() {
    check_application_memory(&TestDaemon::with(&DEVICE_LOOPBACK), "alice", "alice");
}

#[allow(unsafe_code)]
pub fn check_application_memory(daemon: &TestDaemon, ours: &str, theirs: &str) {
    let (end, _echo, remote) = connected(daemon, ours, theirs);
    let memory: &'static mut [u8] = vec![7u8; 50_000].leak();
    let base = NonNull::new(memory.as_mut_ptr()).unwrap();
    // SAFETY: the memory is leaked, and no reference to it exists from here on.
    let own = unsafe { end.domain.register_memory(base, 50_000, ALL_ACCESS) }.unwrap();
    assert_eq!(own.address(), base.as_ptr() as u64);
    end.pair.post_send(&SendRequest::rdma_write(1, &[own.sge(100, 20_000)], remote)).unwrap();
    end.finish();
    end.pair.post_send(&SendRequest::rdma_read(2, &[end.region.sge(0, 20_000)], remote)).unwrap();
    end.finish();
    assert_eq!(end.region.read_at(0, 20_000), [7; 20_000]);
    end.region.write_at(0, &[9; 20_000]);
    end.pair.post_send(&SendRequest::rdma_write(3, &[end.region.sge(0, 20_000)], remote)).unwrap();
    end.finish();
    end.pair.post_send(&SendRequest::rdma_read(4, &[own.sge(25_000, 20_000)], remote)).unwrap();
    end.finish();
    assert_eq!(own.read_at(25_000, 20_000), [9; 20_000]);
    assert_eq!(own.read_at(24_999, 1), [7]);
    assert_eq!(own.read_at(45_000, 1), [7]);
}

#[test]
pub fn completion_events_wake_a_sleeping_process() {
    let daemon = TestDaemon::start();
    let (end, mut echo, _) = connected(&daemon, "alice", "bob");
    let receive = ReceiveRequest { wr_id: 9, sg_list: &[end.region.sge(0, 100)] };
    end.pair.post_recv(&receive).unwrap();
    echo.send_line("1");
    let sender = {
        let (pair, region) = (end.pair.clone(), end.region.clone());
        std::thread::spawn(move || pair.post_send(&SendRequest::send(1, &[region.sge(200, 10)])).unwrap())
    };
    let mut ids: Vec<u64> = (0..2).map(|_| softhca::block_on(end.queue.next()).wr_id).collect();
    ids.sort();
    assert_eq!(ids, [1, 9]);
    sender.join().unwrap();
}

/// Not a test: prints the figures behind the busy-poll time of an engine thread. Run it with
/// `cargo test --release -p softhca-tests --test sockets measure -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn measure() {
    const ROUNDS: usize = 5000;
    for linger in ["0", "20", "50", "200"] {
        let daemon = TestDaemon::with(&[("TEST_LINGER", linger)]);
        for theirs in ["alice", "bob"] {
            let (end, mut echo, remote) = connected(&daemon, "alice", theirs);
            echo.send_line(&ROUNDS.to_string());
            let mut times: Vec<_> = (0..ROUNDS).map(|_| one_round(&end)).collect();
            assert_eq!(echo.receive_line(), "done");
            times.sort();
            let started = std::time::Instant::now();
            for id in 0..1000 {
                if id >= 16 {
                    end.finish();
                }
                let entries = [end.region.sge(0, 1 << 20)];
                end.pair.post_send(&SendRequest::rdma_write(id, &entries, remote)).unwrap();
            }
            for _ in 0..16 {
                end.finish();
            }
            let rate = 1000.0 * 1.048_576e-3 / started.elapsed().as_secs_f64();
            println!(
                "linger {linger:>3} us, alice to {theirs:<5}: 64 B one way p50 {:?} p99 {:?}, 1 MiB writes {rate:.2} GB/s",
                times[ROUNDS / 2] / 2,
                times[ROUNDS * 99 / 100] / 2,
            );
        }
    }
}

fn one_round(end: &ConnectedHost) -> std::time::Duration {
    let started = std::time::Instant::now();
    end.pair.post_recv(&ReceiveRequest { wr_id: 0, sg_list: &[end.region.sge(4096, 64)] }).unwrap();
    end.pair.post_send(&SendRequest::send(1, &[end.region.sge(0, 64)])).unwrap();
    for _ in 0..2 {
        while end.queue.poll().is_none() {}
    }
    started.elapsed()
}

#[test]
#[allow(unsafe_code)]
fn a_dropped_region_is_out_of_reach_of_a_bound_window() {
    let daemon = TestDaemon::start();
    let ends = ["alice", "bob"].map(|host| ConnectedHost::new(&daemon.open(host), 4096));
    let [a, b] = &ends;
    a.pair.connect_both(&b.pair, &ConnectOptions::default()).unwrap();
    let mut memory = vec![0u8; 8192];
    let base = NonNull::new(memory.as_mut_ptr()).unwrap();
    // SAFETY: nothing else accesses the memory until the region is gone.
    let region = unsafe { b.domain.register_memory(base, 8192, ALL_ACCESS | AccessFlags::MW_BIND) }.unwrap();
    let window = b.domain.allocate_memory_window(MemoryWindowType::Type2).unwrap();
    let rkey = RemoteKey(window.rkey().0 & !0xff | 0x5a);
    let bind = MemoryWindowBind {
        mw_rkey: window.rkey(),
        new_rkey: rkey,
        mr_lkey: region.lkey(),
        address: region.address(),
        length: 8192,
        access: AccessFlags::REMOTE_WRITE,
    };
    b.pair.post_send(&SendRequest::new(1, Operation::BindMemoryWindow(bind), &[])).unwrap();
    b.finish();
    let remote = RemoteAddress { address: region.address(), rkey };
    a.region.write_at(0, &[7; 64]);
    a.pair.post_send(&SendRequest::rdma_write(2, &[a.region.sge(0, 64)], remote)).unwrap();
    a.finish();
    assert_eq!(region.read_at(0, 64), [7; 64]);
    assert!(region.deregister().is_err(), "a window is bound");
    drop(region);
    memory.fill(1);
    a.pair.post_send(&SendRequest::rdma_write(3, &[a.region.sge(0, 64)], remote)).unwrap();
    let completion = a.queue.wait_for(TEST_TIMEOUT).expect("a completion");
    assert_eq!(completion.status, CompletionStatus::RemoteAccessError);
    assert_eq!(memory, [1; 8192], "the daemon wrote to memory that the program has back");
}
