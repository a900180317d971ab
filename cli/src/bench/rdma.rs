//! RDMA benchmarks: two devices, with one thread of this process for each.

use super::connections;
use super::mode::Mode;
use super::results::{BenchResult, Effort, LOOPBACK, Measurement, Rounds, half_micros};
use softhca::{
    AccessFlags, CompletionQueue, ConnectOptions, Context, Device, MemoryRegion, Mtu, ProtectionDomain,
    QpType, QueuePair, ReceiveRequest, SendRequest,
};
use softhca_udp::raw;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The bytes of one packet of a message at path MTU 4096: payload, BTH and ICRC.
fn packet_bytes(bytes: usize) -> usize {
    bytes.min(4096) + 12 + 4
}

pub struct Benchmark {
    pub name: String,
    kind: BenchmarkKind,
}

#[derive(Clone, Copy)]
enum BenchmarkKind {
    Bandwidth(Stream),
    Latency {
        blocking: bool,
    },
    Rate,
    /// Connection setup and teardown with this many in progress.
    Connections(usize),
}

#[derive(Clone, Copy, PartialEq)]
enum Verb {
    Write,
    Read,
    Send,
}

impl Verb {
    const ALL: [(Verb, &'static str); 3] =
        [(Verb::Write, "write"), (Verb::Read, "read"), (Verb::Send, "send")];
}

/// The kind of memory of the buffers.
#[derive(Clone, Copy, PartialEq)]
enum BufferMemory {
    /// In memory that the device allocates and a daemon maps.
    Device,
    /// In memory of the process, as from `malloc`.
    Process,
}

/// A stream of messages.
#[derive(Clone, Copy)]
struct Stream {
    verb: Verb,
    bytes: usize,
    queue_pairs: usize,
    memory: BufferMemory,
}

impl Stream {
    fn new(verb: Verb) -> Stream {
        Stream { verb, bytes: LARGE_MESSAGE, queue_pairs: 1, memory: BufferMemory::Device }
    }
}

/// The standard benchmarks, in the order in which they run.
pub fn standard_benchmarks() -> Vec<Benchmark> {
    let stream = |(verb, name)| Benchmark {
        name: format!("rc-{name}-1MiB"),
        kind: BenchmarkKind::Bandwidth(Stream::new(verb)),
    };
    let mut all: Vec<Benchmark> = Verb::ALL.into_iter().map(stream).collect();
    for (name, kind) in [
        ("rc-send-64B-latency", BenchmarkKind::Latency { blocking: false }),
        ("rc-send-64B-blocking", BenchmarkKind::Latency { blocking: true }),
        ("rc-send-64B-rate", BenchmarkKind::Rate),
        ("cm-connect-1", BenchmarkKind::Connections(1)),
        ("cm-connect-64", BenchmarkKind::Connections(64)),
    ] {
        all.push(Benchmark { name: name.into(), kind });
    }
    all
}

/// Other sizes, several queue pairs, process memory.
pub fn extended_benchmarks() -> Vec<Benchmark> {
    let sizes = [(64, "64B"), (512, "512B"), (4096, "4KiB"), (32_768, "32KiB"), (262_144, "256KiB")];
    let mut all = Vec::new();
    let mut add = |name: String, stream| all.push(Benchmark { name, kind: BenchmarkKind::Bandwidth(stream) });
    for (verb, name) in Verb::ALL {
        for (bytes, size) in sizes {
            add(format!("rc-{name}-{size}"), Stream { bytes, ..Stream::new(verb) });
        }
        add(format!("rc-{name}-1MiB-16qp"), Stream { queue_pairs: 16, ..Stream::new(verb) });
        add(format!("rc-{name}-1MiB-malloc"), Stream { memory: BufferMemory::Process, ..Stream::new(verb) });
    }
    all
}

const LARGE_MESSAGE: usize = 1 << 20;
const SMALL_MESSAGE: usize = 64;

/// One end of the measured connection.
struct Endpoint {
    _context: Context,
    _domain: ProtectionDomain,
    cq: CompletionQueue,
    region: MemoryRegion,
    /// At least one.
    queue_pairs: Vec<QueuePair>,
}

impl Endpoint {
    fn new(device: &Device, depth: u32, queue_pairs: usize, memory: BufferMemory) -> BenchResult<Endpoint> {
        let context = device.open();
        let domain = context.allocate_protection_domain()?;
        let cq = context.create_completion_queue(4 * depth * queue_pairs as u32)?;
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
        let region = match memory {
            BufferMemory::Device => domain.allocate_region(2 * LARGE_MESSAGE as u64, access)?,
            BufferMemory::Process => domain.allocate_private_region(2 * LARGE_MESSAGE as u64, access)?,
        };
        let make =
            || domain.create_queue_pair(QpType::Rc, &cq).max_send_wr(depth).max_recv_wr(2 * depth).build();
        let queue_pairs = (0..queue_pairs).map(|_| make()).collect::<Result<_, _>>()?;
        Ok(Endpoint { _context: context, _domain: domain, cq, region, queue_pairs })
    }

    /// Posts a receive to one queue pair; its wr_id is the index of the queue pair.
    fn post_receive(&self, pair: u64, length: usize) -> BenchResult {
        let sg_list = [self.region.sge(0, length as u32)];
        Ok(self.queue_pairs[pair as usize].post_recv(&ReceiveRequest { wr_id: pair, sg_list: &sg_list })?)
    }
}

fn connect(mode: &Mode, depth: u32, queue_pairs: usize, memory: BufferMemory) -> BenchResult<[Endpoint; 2]> {
    let [near, far] = mode.devices()?;
    let sides =
        [Endpoint::new(&near, depth, queue_pairs, memory)?, Endpoint::new(&far, depth, queue_pairs, memory)?];
    let path = ConnectOptions { path_mtu: Mtu::B4096, ..ConnectOptions::default() };
    for (near, far) in sides[0].queue_pairs.iter().zip(&sides[1].queue_pairs) {
        near.connect_both(far, &path)?;
    }
    Ok(sides)
}

impl Benchmark {
    /// Measures the device and raw sockets alternately.
    pub fn measure(&self, mode: &Mode, effort: Effort) -> BenchResult<Measurement> {
        let Rounds { mut values, mut raws, mut p99s } = Rounds::default();
        let raw_stream = |bytes| raw::stream(LOOPBACK, LOOPBACK, bytes, effort.round_time);
        for _ in 0..effort.rounds {
            match self.kind {
                BenchmarkKind::Bandwidth(stream) => {
                    raws.push(raw_stream(packet_bytes(stream.bytes))?.gigabytes_per_second());
                    values.push(bandwidth(mode, stream, effort.round_time)?);
                }
                BenchmarkKind::Latency { blocking } => {
                    let count = (effort.round_time.as_micros() / 20) as usize;
                    let ping_pong = if blocking { raw::ping_pong_blocking } else { raw::ping_pong };
                    raws.push(half_micros(ping_pong(LOOPBACK, LOOPBACK, SMALL_MESSAGE, count)?.median));
                    let times = latency(mode, blocking, count)?;
                    values.push(half_micros(times[times.len() / 2]));
                    p99s.push(half_micros(times[times.len() * 99 / 100]));
                }
                BenchmarkKind::Rate => {
                    raws.push(raw_stream(SMALL_MESSAGE)?.million_datagrams_per_second());
                    values.push(rate(mode, effort.round_time)?);
                }
                BenchmarkKind::Connections(at_once) => {
                    raws.push(connections::tcp_rate(at_once, effort.round_time)?);
                    values.push(connections::rdma_cm_rate(mode, at_once, effort.round_time)?);
                }
            }
        }
        let unit = match self.kind {
            BenchmarkKind::Bandwidth(_) => "GB/s",
            BenchmarkKind::Latency { .. } => "us",
            BenchmarkKind::Rate => "M/s",
            BenchmarkKind::Connections(_) => "connections/s",
        };
        Ok(Rounds { values, raws, p99s }.measurement(&self.name, mode.name(), unit))
    }
}

/// Fails unless the completion is successful.
pub(super) fn check_completion(completion: softhca::Completion) -> BenchResult {
    match completion.status.is_success() {
        true => Ok(()),
        false => Err(format!("a work request ended with {}", completion.status.name()).into()),
    }
}

/// Gigabytes per second, with 16 large messages outstanding, or more small ones.
fn bandwidth(mode: &Mode, stream: Stream, round: Duration) -> BenchResult<f64> {
    let Stream { verb, bytes, queue_pairs, memory } = stream;
    let depth = (16 * LARGE_MESSAGE / bytes).clamp(16, 512) as u32;
    let on_each = (depth / queue_pairs as u32).max(1);
    let [near, far] = connect(mode, depth, queue_pairs, memory)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let target = scope.spawn(|| -> BenchResult {
            if verb == Verb::Send {
                for pair in 0..queue_pairs as u64 {
                    for _ in 0..2 * depth {
                        far.post_receive(pair, bytes)?;
                    }
                }
            }
            while !stop.load(Ordering::Relaxed) {
                if let Some(completion) = far.cq.poll() {
                    check_completion(completion)?;
                    far.post_receive(completion.wr_id, bytes)?;
                }
            }
            Ok(())
        });
        let measured = (|| -> BenchResult<f64> {
            let entry = [near.region.sge(0, bytes as u32)];
            let remote = far.region.remote_address(0);
            let post = |pair: u64| {
                let request = match verb {
                    Verb::Write => SendRequest::rdma_write(pair, &entry, remote),
                    Verb::Read => SendRequest::rdma_read(pair, &entry, remote),
                    Verb::Send => SendRequest::send(pair, &entry),
                };
                near.queue_pairs[pair as usize].post_send(&request)
            };
            for pair in 0..queue_pairs as u64 {
                for _ in 0..on_each {
                    post(pair)?;
                }
            }
            // The first `depth` messages warm up.
            let mut done = 0u64;
            let mut start = Instant::now();
            loop {
                let Some(completion) = near.cq.poll() else { continue };
                check_completion(completion)?;
                post(completion.wr_id)?;
                done += 1;
                let warm_up = u64::from(depth);
                if done == warm_up {
                    start = Instant::now();
                } else if done > warm_up && start.elapsed() >= round {
                    let moved = (done - warm_up) * bytes as u64;
                    return Ok(moved as f64 / start.elapsed().as_nanos() as f64);
                }
            }
        })();
        stop.store(true, Ordering::Relaxed);
        target.join().expect("the target does not panic")?;
        measured
    })
}

/// Sorted round-trip times of 64-byte messages.
fn latency(mode: &Mode, blocking: bool, count: usize) -> BenchResult<Vec<Duration>> {
    const DEPTH: u32 = 64;
    let [near, far] = connect(mode, DEPTH, 1, BufferMemory::Device)?;
    let wait_receive = |side: &Endpoint| -> BenchResult {
        loop {
            let completion = match blocking {
                true => side.cq.wait()?,
                false => match side.cq.poll() {
                    Some(completion) => completion,
                    None => continue,
                },
            };
            check_completion(completion)?;
            if completion.opcode.is_receive() {
                return side.post_receive(0, SMALL_MESSAGE);
            }
        }
    };
    let send = |side: &Endpoint| -> BenchResult {
        let entry = [side.region.sge(0, SMALL_MESSAGE as u32)];
        Ok(side.queue_pairs[0].post_send(&SendRequest::send(1, &entry))?)
    };
    for side in [&near, &far] {
        for _ in 0..DEPTH {
            side.post_receive(0, SMALL_MESSAGE)?;
        }
    }
    let warm_up = count / 10 + 1;
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| -> BenchResult {
            for _ in 0..warm_up + count {
                wait_receive(&far)?;
                send(&far)?;
            }
            Ok(())
        });
        let mut times = Vec::with_capacity(count);
        for turn in 0..warm_up + count {
            let start = Instant::now();
            send(&near)?;
            wait_receive(&near)?;
            if turn >= warm_up {
                times.push(start.elapsed());
            }
        }
        echo.join().expect("the echo does not panic")?;
        times.sort_unstable();
        Ok(times)
    })
}

/// Million 64-byte messages per second.
fn rate(mode: &Mode, round: Duration) -> BenchResult<f64> {
    const DEPTH: u32 = 1024;
    let [near, far] = connect(mode, DEPTH, 1, BufferMemory::Device)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let target = scope.spawn(|| -> BenchResult {
            for _ in 0..2 * DEPTH {
                far.post_receive(0, SMALL_MESSAGE)?;
            }
            let sg_list = [far.region.sge(0, SMALL_MESSAGE as u32)];
            let receives = [ReceiveRequest { wr_id: 0, sg_list: &sg_list }; 2 * DEPTH as usize];
            let mut batch = Vec::with_capacity(256);
            while !stop.load(Ordering::Relaxed) {
                let count = far.cq.poll_many(&mut batch);
                batch.drain(..).try_for_each(check_completion)?;
                far.queue_pairs[0].post_recv_list(&receives[..count as usize])?;
            }
            Ok(())
        });
        let measured = (|| -> BenchResult<f64> {
            let entry = [near.region.sge(0, SMALL_MESSAGE as u32)];
            let requests = [SendRequest::send(0, &entry); 64];
            let mut outstanding = 0u32;
            let mut done = 0u64;
            let mut start = Instant::now();
            let mut batch = Vec::with_capacity(256);
            loop {
                while outstanding + 64 <= DEPTH {
                    near.queue_pairs[0].post_send_list(&requests)?;
                    outstanding += 64;
                }
                batch.clear();
                near.cq.poll_many(&mut batch);
                for completion in &batch {
                    check_completion(*completion)?;
                }
                let before = done;
                done += batch.len() as u64;
                outstanding -= batch.len() as u32;
                let warm_up = u64::from(DEPTH);
                if before < warm_up && done >= warm_up {
                    (start, done) = (Instant::now(), warm_up);
                } else if done > warm_up && start.elapsed() >= round {
                    return Ok((done - warm_up) as f64 * 1e3 / start.elapsed().as_nanos() as f64);
                }
            }
        })();
        stop.store(true, Ordering::Relaxed);
        target.join().expect("the target does not panic")?;
        measured
    })
}
