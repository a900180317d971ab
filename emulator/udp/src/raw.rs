//! The throughput and latency of plain UDP sockets on this machine: the reference for benchmarks.
//!
//! Two threads over loopback, with the same system calls as the driver but without ICRC, copies or protocol. Each
//! function is one short measurement, so that it can be interleaved with others.

use crate::{BindError, ReceiveBatch, RoceSocket, SendError, SocketOptions, charge, wait_readable};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Why a measurement failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RawError {
    /// A socket could not be bound.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A send failed.
    #[error(transparent)]
    Send(#[from] SendError),
    /// Another system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The result of a stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamResult {
    /// Payload bytes received.
    pub bytes: u64,
    /// Datagrams received.
    pub datagrams: u64,
    /// Chunks received.
    pub chunks: u64,
    /// From the first to the last arrival.
    pub elapsed: Duration,
    /// Datagrams or chunks that the receive buffer dropped: none, because the sender respects its budget.
    pub dropped: u32,
}

impl StreamResult {
    /// Throughput in 10^9 bytes per second.
    pub fn gigabytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_nanos().max(1) as f64
    }

    /// Rate in 10^6 datagrams per second.
    pub fn million_datagrams_per_second(&self) -> f64 {
        self.datagrams as f64 * 1e3 / self.elapsed.as_nanos().max(1) as f64
    }
}

/// Streams full batches of `datagram_len` bytes from `source` to `destination` for `duration`. The receiver spins.
/// The sender stays within the receiver's budget by reading its counter, which costs almost nothing.
pub fn stream(
    source: IpAddr,
    destination: IpAddr,
    datagram_len: usize,
    duration: Duration,
) -> Result<StreamResult, RawError> {
    let mut sender = RoceSocket::bind(SocketAddr::new(source, 0), SocketOptions::default())?;
    let receiver = RoceSocket::bind(SocketAddr::new(destination, 0), SocketOptions::default())?;
    let segments = RoceSocket::max_batch_segments(datagram_len);
    let batch = vec![0x5a; segments * datagram_len];
    let batch_charge = charge(datagram_len, segments);
    // More than a megabyte in flight only leaves the cache.
    let window = crate::grant_budget(receiver.receive_buffer()).min(1 << 20);
    let (drained, finished) = (AtomicU64::new(0), AtomicBool::new(false));
    let to = receiver.local_address();
    let deadline = Instant::now() + duration;
    thread::scope(|scope| {
        let receiving = scope.spawn(|| receive_stream(&receiver, &drained, &finished));
        let mut sent = 0;
        let mut outcome = Ok(());
        let mut backoff = Backoff(0);
        while Instant::now() < deadline && outcome.is_ok() {
            if sent + batch_charge > drained.load(Ordering::Acquire) + window {
                backoff.spin(STREAM_SPINS);
                continue;
            }
            backoff = Backoff(0);
            match sender.send_batch_to(to, 0, datagram_len, &batch) {
                // Only per-datagram segmentation sends a part of a batch.
                Ok(accepted) if accepted == segments => sent += batch_charge,
                Ok(accepted) => sent += charge(datagram_len, 1) * accepted as u64,
                Err(SendError::WouldBlock) => thread::yield_now(),
                Err(error) => outcome = Err(error),
            }
        }
        finished.store(true, Ordering::Release);
        let result = receiving.join().expect("the receiving thread does not panic")?;
        outcome?;
        Ok(StreamResult { dropped: receiver.receive_memory()?.dropped, ..result })
    })
}

/// How often a stream, and a ping-pong, spins before it yields the processor.
const STREAM_SPINS: u32 = 64;
const PING_PONG_SPINS: u32 = 4096;

/// Spins for a while, then yields: the machine may have fewer processors than threads.
struct Backoff(u32);

impl Backoff {
    fn spin(&mut self, limit: u32) {
        self.0 += 1;
        if self.0 < limit { std::hint::spin_loop() } else { thread::yield_now() }
    }
}

/// Receives until the sender has finished and the socket is empty.
fn receive_stream(
    socket: &RoceSocket,
    drained: &AtomicU64,
    finished: &AtomicBool,
) -> io::Result<StreamResult> {
    let mut batch = ReceiveBatch::new();
    let mut result = StreamResult { bytes: 0, datagrams: 0, chunks: 0, elapsed: Duration::ZERO, dropped: 0 };
    let mut first = None;
    let mut last = Instant::now();
    let mut backoff = Backoff(0);
    loop {
        let is_finished = finished.load(Ordering::Acquire);
        socket.receive(&mut batch)?;
        if batch.is_empty() {
            if is_finished {
                result.elapsed = first.map_or(Duration::ZERO, |first| last - first);
                return Ok(result);
            }
            backoff.spin(STREAM_SPINS);
            continue;
        }
        backoff = Backoff(0);
        let mut charge = 0;
        for chunk in batch.chunks() {
            result.bytes += chunk.bytes.len() as u64;
            result.datagrams += chunk.segments() as u64;
            result.chunks += 1;
            charge += chunk.charge();
        }
        drained.fetch_add(charge, Ordering::AcqRel);
        last = Instant::now();
        first.get_or_insert(last);
    }
}

/// The result of a ping-pong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatencyResult {
    /// The number of round trips measured.
    pub round_trips: usize,
    /// The shortest round trip.
    pub min: Duration,
    /// The median.
    pub median: Duration,
    /// The 99th percentile.
    pub percentile_99: Duration,
}

/// How a thread waits for the next datagram.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WaitMode {
    Spin,
    Sleep,
}

/// Sends a datagram back and forth `round_trips` times between two spinning threads.
pub fn ping_pong(
    here: IpAddr,
    there: IpAddr,
    datagram_len: usize,
    round_trips: usize,
) -> Result<LatencyResult, RawError> {
    run_ping_pong(here, there, datagram_len, round_trips, WaitMode::Spin)
}

/// Sends a datagram back and forth `round_trips` times between two threads that sleep until it arrives.
pub fn ping_pong_blocking(
    here: IpAddr,
    there: IpAddr,
    datagram_len: usize,
    round_trips: usize,
) -> Result<LatencyResult, RawError> {
    run_ping_pong(here, there, datagram_len, round_trips, WaitMode::Sleep)
}

fn run_ping_pong(
    here: IpAddr,
    there: IpAddr,
    datagram_len: usize,
    round_trips: usize,
    waiting: WaitMode,
) -> Result<LatencyResult, RawError> {
    let mut near = RoceSocket::bind(SocketAddr::new(here, 0), SocketOptions::default())?;
    let mut far = RoceSocket::bind(SocketAddr::new(there, 0), SocketOptions::default())?;
    let to = far.local_address();
    let warm_up = round_trips / 10 + 1;
    let finished = AtomicBool::new(false);
    thread::scope(|scope| {
        let echoing = scope.spawn(|| echo(&mut far, &finished, waiting));
        let result = measure_round_trips(&mut near, to, datagram_len, warm_up, round_trips.max(1), waiting);
        finished.store(true, Ordering::Release);
        echoing.join().expect("the echoing thread does not panic")?;
        result
    })
}

/// Sends every datagram back.
fn echo(socket: &mut RoceSocket, finished: &AtomicBool, waiting: WaitMode) -> Result<(), RawError> {
    let mut batch = ReceiveBatch::new();
    let mut backoff = Backoff(0);
    while !finished.load(Ordering::Acquire) {
        socket.receive(&mut batch)?;
        backoff = if batch.is_empty() { backoff } else { Backoff(0) };
        match waiting {
            WaitMode::Spin => backoff.spin(PING_PONG_SPINS),
            WaitMode::Sleep if batch.is_empty() => {
                wait_readable(&[socket.as_fd()], Some(Duration::from_millis(10)))?;
            }
            WaitMode::Sleep => {}
        }
        for datagram in batch.datagrams() {
            socket.send_batch_to(datagram.source, 0, datagram.bytes.len(), datagram.bytes)?;
        }
    }
    Ok(())
}

fn measure_round_trips(
    socket: &mut RoceSocket,
    to: SocketAddr,
    datagram_len: usize,
    warm_up: usize,
    round_trips: usize,
    waiting: WaitMode,
) -> Result<LatencyResult, RawError> {
    let mut batch = ReceiveBatch::new();
    let payload = vec![0xa5; datagram_len.max(1)];
    let mut times = Vec::with_capacity(round_trips);
    for round in 0..warm_up + round_trips {
        let begin = Instant::now();
        socket.send_batch_to(to, 0, payload.len(), &payload)?;
        let mut backoff = Backoff(0);
        loop {
            socket.receive(&mut batch)?;
            if !batch.is_empty() {
                break;
            }
            match waiting {
                WaitMode::Spin => backoff.spin(PING_PONG_SPINS),
                WaitMode::Sleep => {
                    wait_readable(&[socket.as_fd()], None)?;
                }
            }
        }
        if round >= warm_up {
            times.push(begin.elapsed());
        }
    }
    times.sort_unstable();
    Ok(LatencyResult {
        round_trips,
        min: times[0],
        median: times[round_trips / 2],
        percentile_99: times[round_trips * 99 / 100],
    })
}

/// The charge of one batch as the kernel reports it, to compare with [`charge`].
pub fn measure_charge(host: IpAddr, datagram_len: usize, segments: usize) -> Result<u64, RawError> {
    let mut sender = RoceSocket::bind(SocketAddr::new(host, 0), SocketOptions::default())?;
    let receiver = RoceSocket::bind(SocketAddr::new(host, 0), SocketOptions::default())?;
    sender.send_batch_to(receiver.local_address(), 0, datagram_len, &vec![0; datagram_len * segments])?;
    wait_readable(&[receiver.as_fd()], Some(Duration::from_secs(10)))?;
    Ok(receiver.receive_memory()?.charged.into())
}
