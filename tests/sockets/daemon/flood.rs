//! Sixty-four processes write to one that is stopped, on the direct data path: between hosts through the sockets of its
//! slot, and on one host through rings or sockets. Nothing is lost: a loss would break a connection.

use super::data::ConnectedHost;
use super::direct::{DIRECT, DIRECT_SOCKETS};
use super::process::{self, Process, TEST_TIMEOUT, TestDaemon, receive_line, send_line};
use rustix::process::{Pid, Signal, kill_process};
use softhca::{Device, SendRequest};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const SENDERS: usize = 64;
/// Bytes of the receiver's memory per sender.
const BYTES: u64 = 65_536;
/// WRITEs that a sender has outstanding: together more than the receive buffer and the rings hold.
const OUTSTANDING: u64 = 32;
/// Completions before the receiver is stopped, and after it has continued.
const COMPLETIONS_PER_PHASE: u64 = 32;
/// The receiver continues when nothing was sent for this many intervals: longer than the ACK timeout.
const QUIET_INTERVALS: u32 = 60;
const INTERVAL: Duration = Duration::from_millis(20);

/// Full frames, smaller ones and tiny ones, which have the highest overhead.
fn size(index: usize) -> u32 {
    [BYTES as u32, 20_000, 64][index % 3]
}

/// Accepts connections and sleeps: the library's thread does the work.
pub fn run_flooded() {
    let device = Device::daemon_host(None, Some(&std::env::var("TEST_HOST").unwrap())).unwrap();
    let mut ends = Vec::new();
    while let Some(line) = receive_line().filter(|line| line != "check") {
        let end = ConnectedHost::new(&device, BYTES);
        end.connect(&line);
        send_line(&end.open_device());
        ends.push(end);
    }
    for (index, end) in ends.iter().enumerate() {
        let written = end.region.read_at(0, size(index).into());
        assert!(written.iter().all(|byte| *byte == index as u8), "sender {index}");
    }
    send_line("checked");
    while receive_line().is_some() {}
}

/// Writes until the test ends it.
pub fn run_flooder() {
    let index: usize = std::env::var("TEST_INDEX").unwrap().parse().unwrap();
    let host = std::env::var("TEST_HOST").unwrap();
    let end = ConnectedHost::new(&Device::daemon_host(None, Some(&host)).unwrap(), BYTES);
    end.region.write_at(0, &vec![index as u8; BYTES as usize]);
    send_line(&end.open_device());
    let remote = end.connect(&receive_line().unwrap());
    let messages = Arc::new(AtomicU64::new(0));
    std::thread::spawn({
        let messages = messages.clone();
        move || {
            while receive_line().is_some() {
                messages.fetch_add(1, Ordering::Release);
            }
            std::process::exit(0);
        }
    });
    let entries = [end.region.sge(0, size(index))];
    let post = |id| end.pair.post_send(&SendRequest::rdma_write(id, &entries, remote)).unwrap();
    (0..OUTSTANDING).for_each(post);
    let (mut completed, mut next, mut marked) = (0, OUTSTANDING, None);
    while completed < next {
        let completion = end.queue.wait_for(TEST_TIMEOUT).expect("a completion");
        assert!(completion.status.is_success(), "sender {index}: {completion:?}");
        assert_eq!(completion.wr_id, completed);
        completed += 1;
        let received = messages.load(Ordering::Acquire);
        if received < 2 {
            post(next);
            next += 1;
        }
        if completed == COMPLETIONS_PER_PHASE {
            send_line("running");
        }
        if received >= 1 && marked.is_none() {
            marked = Some(completed + COMPLETIONS_PER_PHASE);
        }
        if marked == Some(completed) {
            send_line("resumed");
        }
    }
    send_line(&completed.to_string());
    loop {
        std::thread::park();
    }
}

fn nothing_is_lost(variables: &[(&str, &str)], senders_on: &str) {
    let _crowd = crate::crowd();
    let clients = (2 * SENDERS).to_string();
    let daemon = TestDaemon::with(&[variables, &[("TEST_CLIENTS", &clients)]].concat());
    let mut receiver = process::spawn("flooded", &daemon.name, &[("TEST_HOST", "bob")]);
    let start = |index: usize| {
        let variables = [("TEST_HOST", senders_on), ("TEST_INDEX", &index.to_string())];
        process::spawn("flooder", &daemon.name, &variables)
    };
    let mut senders: Vec<Process> = (0..SENDERS).map(start).collect();
    for sender in &mut senders {
        receiver.send_line(&sender.receive_line());
        sender.send_line(&receiver.receive_line());
    }
    senders.iter_mut().for_each(|sender| assert_eq!(sender.receive_line(), "running"));
    let mut control = daemon.control();
    let stopped = Pid::from_raw(receiver.id() as i32).unwrap();
    kill_process(stopped, Signal::STOP).unwrap();
    let (mut sent, mut quiet) = (0, 0);
    while quiet < QUIET_INTERVALS {
        std::thread::sleep(INTERVAL);
        let now = control.counters(Some(senders_on)).unwrap().sent_pkts;
        quiet = if now == sent { quiet + 1 } else { 0 };
        sent = now;
    }
    kill_process(stopped, Signal::CONT).unwrap();
    senders.iter_mut().for_each(|sender| sender.send_line("mark"));
    senders.iter_mut().for_each(|sender| assert_eq!(sender.receive_line(), "resumed"));
    senders.iter_mut().for_each(|sender| sender.send_line("end"));
    let completed: u64 = senders.iter_mut().map(|sender| sender.receive_line().parse::<u64>().unwrap()).sum();
    receiver.send_line("check");
    assert_eq!(receiver.receive_line(), "checked");
    for host in ["alice", "bob"] {
        let counters = control.counters(Some(host)).unwrap();
        let lost = [counters.rx_dropped, counters.out_of_sequence, counters.retransmitted_pkts];
        assert_eq!(lost, [0; 3], "{host}: dropped, out of sequence, retransmitted");
    }
    println!("{senders_on} to bob: {completed} WRITEs of {SENDERS} processes");
}

#[test]
fn sixty_four_processes_lose_nothing_between_hosts() {
    nothing_is_lost(&DIRECT, "alice");
}

#[test]
fn sixty_four_processes_lose_nothing_in_rings() {
    nothing_is_lost(&DIRECT, "bob");
}

#[test]
fn sixty_four_processes_lose_nothing_through_the_sockets_of_one_host() {
    nothing_is_lost(&DIRECT_SOCKETS, "bob");
}
