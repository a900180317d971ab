//! Sixty-four processes write to one that is stopped, on the direct data path: between hosts through the sockets of its
//! slot, and on one host through rings or sockets. Nothing is lost: a loss would break a connection.

use super::direct::{DIRECT, DIRECT_SOCKETS};
use super::process::{self, Process, TestDaemon, receive_line, send_line};
use crate::stopped_receiver;
use rustix::process::{Pid, Signal, kill_process};
use softhca::Device;
use std::time::Duration;

const SENDERS: usize = 64;
/// WRITEs that a sender has outstanding: together more than the receive buffer and the rings hold.
const OUTSTANDING: u64 = 32;
/// The receiver continues when nothing was sent for this many intervals: longer than the ACK timeout.
const QUIET_INTERVALS: u32 = 60;
const INTERVAL: Duration = Duration::from_millis(20);

fn device() -> Device {
    Device::daemon_host(None, Some(&std::env::var("TEST_HOST").unwrap())).unwrap()
}

pub fn run_flooded() {
    let _ends = stopped_receiver::receive(&device());
    send_line("checked");
    while receive_line().is_some() {}
}

/// Writes until the test ends it.
pub fn run_flooder() {
    let index = std::env::var("TEST_INDEX").unwrap().parse().unwrap();
    stopped_receiver::send(&device(), index, OUTSTANDING, |_| false);
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
