//! The two ends of a test in which processes write to one that is stopped and resumed: a loss would break a connection.

use crate::connected_host::ConnectedHost;
use softhca::{ConnectOptions, Device, Mtu};
use softhca_tests::process::{receive_line, send_line};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the receiver's memory per sender.
const BYTES: u64 = 65_536;
/// Completions before the receiver is stopped, and after it is resumed.
const COMPLETIONS_PER_PHASE: u64 = 32;

/// Full frames, smaller ones and tiny ones, which have the highest overhead.
fn size(index: usize) -> u32 {
    [BYTES as u32, 20_000, 64][index % 3]
}

fn path(index: usize) -> ConnectOptions {
    ConnectOptions { path_mtu: [Mtu::B4096, Mtu::B1024, Mtu::B256][index % 3], ..ConnectOptions::default() }
}

/// Accepts connections and sleeps: the library's thread does the work. Checks the data when the parent says `check`.
pub fn receive(device: &Device) -> Vec<ConnectedHost> {
    let mut ends = Vec::new();
    while let Some(line) = receive_line().filter(|line| line != "check") {
        let end = ConnectedHost::new(device, BYTES);
        end.connect_over(&line, &path(ends.len()));
        send_line(&end.open_device());
        ends.push(end);
    }
    for (index, end) in ends.iter().enumerate() {
        let written = end.region.read_at(0, size(index).into());
        assert!(written.iter().all(|byte| *byte == index as u8), "sender {index}");
    }
    ends
}

/// Writes with `outstanding` requests, and reports that it runs. After a first message of the parent it reports that it
/// made progress again, after a second one it ends. `answer` answers other messages.
pub fn send(device: &Device, index: usize, outstanding: u64, answer: impl Fn(&str) -> bool + Send + 'static) {
    let end = ConnectedHost::new(device, BYTES);
    end.region.write_at(0, &vec![index as u8; BYTES as usize]);
    send_line(&end.open_device());
    let remote = end.connect_over(&receive_line().unwrap(), &path(index));
    let messages = Arc::new(AtomicU64::new(0));
    std::thread::spawn({
        let messages = messages.clone();
        move || {
            while let Some(line) = receive_line() {
                if !answer(&line) {
                    messages.fetch_add(1, Ordering::Release);
                }
            }
            std::process::exit(0);
        }
    });
    let post = |id| end.write(id, size(index), remote);
    (0..outstanding).for_each(post);
    let (mut completed, mut next, mut marked) = (0, outstanding, None);
    while completed < next {
        assert_eq!(end.finish().wr_id, completed, "sender {index}");
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
