//! A card: two devices, and a thread of this process for each.

use super::table::Figure;
use super::{Effort, Failure, Mode, connections};
use softhca::{
    Access, CompletionQueue, Context, Device, MemoryRegion, Mtu, Path, ProtectionDomain, QpKind, QueuePair,
    ReceiveRequest, SendRequest,
};
use softhca_udp::raw;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Where bare sockets are measured.
const RAW: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1)), IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1))];

/// What travels as one packet of path MTU 4096 without an extended header, with so much of a message.
fn packet(bytes: usize) -> usize {
    bytes.min(4096) + 12 + 4
}

/// One benchmark.
pub struct Benchmark {
    pub name: String,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    Bandwidth(Stream),
    Latency {
        blocking: bool,
    },
    Rate,
    /// Connections made and ended, so many at a time.
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

/// Where the data is.
#[derive(Clone, Copy, PartialEq)]
enum Home {
    /// In memory that the card allocates: a daemon maps it.
    Card,
    /// In memory of the process's own, as `malloc` gives it.
    Process,
}

/// Messages one after the other, so many on the way.
#[derive(Clone, Copy)]
struct Stream {
    verb: Verb,
    bytes: usize,
    pairs: usize,
    home: Home,
}

impl Stream {
    fn of(verb: Verb) -> Stream {
        Stream { verb, bytes: MESSAGE, pairs: 1, home: Home::Card }
    }
}

/// The benchmarks that everything is compared by, in the order in which they run.
pub fn main() -> Vec<Benchmark> {
    let stream =
        |(verb, name)| Benchmark { name: format!("rc-{name}-1MiB"), kind: Kind::Bandwidth(Stream::of(verb)) };
    let mut all: Vec<Benchmark> = Verb::ALL.into_iter().map(stream).collect();
    for (name, kind) in [
        ("rc-send-64B-latency", Kind::Latency { blocking: false }),
        ("rc-send-64B-blocking", Kind::Latency { blocking: true }),
        ("rc-send-64B-rate", Kind::Rate),
        ("cm-connect-1", Kind::Connections(1)),
        ("cm-connect-64", Kind::Connections(64)),
    ] {
        all.push(Benchmark { name: name.into(), kind });
    }
    all
}

/// Other sizes, more queue pairs, memory of the process's own.
pub fn more() -> Vec<Benchmark> {
    let sizes = [(64, "64B"), (512, "512B"), (4096, "4KiB"), (32_768, "32KiB"), (262_144, "256KiB")];
    let mut all = Vec::new();
    let mut add = |name: String, stream| all.push(Benchmark { name, kind: Kind::Bandwidth(stream) });
    for (verb, name) in Verb::ALL {
        for (bytes, size) in sizes {
            add(format!("rc-{name}-{size}"), Stream { bytes, ..Stream::of(verb) });
        }
        add(format!("rc-{name}-1MiB-16qp"), Stream { pairs: 16, ..Stream::of(verb) });
        add(format!("rc-{name}-1MiB-malloc"), Stream { home: Home::Process, ..Stream::of(verb) });
    }
    all
}

const MESSAGE: usize = 1 << 20;
const SMALL: usize = 64;

/// One side of the measured connection.
struct Side {
    _context: Context,
    _domain: ProtectionDomain,
    queue: CompletionQueue,
    region: MemoryRegion,
    /// At least one.
    pairs: Vec<QueuePair>,
}

impl Side {
    fn new(device: &Device, depth: u32, pairs: usize, home: Home) -> Result<Side, Failure> {
        let context = device.open();
        let domain = context.allocate_domain()?;
        let queue = context.create_completion_queue(4 * depth * pairs as u32)?;
        let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let region = match home {
            Home::Card => domain.register(2 * MESSAGE, rights)?,
            Home::Process => domain.register_own(2 * MESSAGE, rights)?,
        };
        let make = || domain.queue_pair(QpKind::Rc, &queue).sends(depth).receives(2 * depth).create();
        let pairs = (0..pairs).map(|_| make()).collect::<Result<_, _>>()?;
        Ok(Side { _context: context, _domain: domain, queue, region, pairs })
    }

    /// A receive on one of the queue pairs, which its completion will name.
    fn post_receive(&self, pair: u64, length: usize) -> Result<(), Failure> {
        let scatter = [self.region.entry(0, length as u32)];
        Ok(self.pairs[pair as usize].post_receive(&ReceiveRequest { id: pair, scatter: &scatter })?)
    }
}

fn connected(mode: &Mode, depth: u32, pairs: usize, home: Home) -> Result<[Side; 2], Failure> {
    let [near, far] = mode.devices()?;
    let sides = [Side::new(&near, depth, pairs, home)?, Side::new(&far, depth, pairs, home)?];
    let path = Path { mtu: Mtu::B4096, ..Path::default() };
    for (near, far) in sides[0].pairs.iter().zip(&sides[1].pairs) {
        near.connect_both(far, &path)?;
    }
    Ok(sides)
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

impl Benchmark {
    /// Measures the card and bare sockets in turns.
    pub fn measure(&self, mode: &Mode, effort: Effort) -> Result<Figure, Failure> {
        let (mut values, mut raws, mut tails) = (vec![], vec![], vec![]);
        for _ in 0..effort.rounds {
            match self.kind {
                Kind::Bandwidth(stream) => {
                    let bare = raw::stream(RAW[0], RAW[1], packet(stream.bytes), effort.round)?;
                    raws.push(bare.gigabytes_per_second());
                    values.push(bandwidth(mode, stream, effort.round)?);
                }
                Kind::Latency { blocking } => {
                    let count = (effort.round.as_micros() / 20) as usize;
                    let bounce = if blocking { raw::ping_pong_blocking } else { raw::ping_pong };
                    raws.push(micros(bounce(RAW[0], RAW[1], SMALL, count)?.median) / 2.0);
                    let times = latency(mode, blocking, count)?;
                    values.push(micros(times[times.len() / 2]) / 2.0);
                    tails.push(micros(times[times.len() * 99 / 100]) / 2.0);
                }
                Kind::Rate => {
                    let stream = raw::stream(RAW[0], RAW[1], SMALL, effort.round)?;
                    raws.push(stream.million_datagrams_per_second());
                    values.push(rate(mode, effort.round)?);
                }
                Kind::Connections(at_once) => {
                    raws.push(connections::over_tcp(at_once, effort.round)?);
                    values.push(connections::over_card(mode, at_once, effort.round)?);
                }
            }
        }
        let (value, raw) = (median(values), median(raws));
        let unit = match self.kind {
            Kind::Bandwidth(_) => "GB/s",
            Kind::Latency { .. } => "us",
            Kind::Rate => "M/s",
            Kind::Connections(_) => "connections/s",
        };
        let p99 = (!tails.is_empty()).then(|| median(tails));
        Ok(Figure { name: self.name.clone(), mode: mode.name(), unit, value, raw, ratio: value / raw, p99 })
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_nanos() as f64 / 1e3
}

/// Checks a completion.
fn expect(completion: softhca::Completion) -> Result<(), Failure> {
    match completion.status.is_success() {
        true => Ok(()),
        false => Err(format!("a work request ended with {}", completion.status.name()).into()),
    }
}

/// Gigabytes a second of messages: sixteen outstanding of the largest, more of smaller ones.
fn bandwidth(mode: &Mode, stream: Stream, round: Duration) -> Result<f64, Failure> {
    let Stream { verb, bytes, pairs, home } = stream;
    let depth = (16 * MESSAGE / bytes).clamp(16, 512) as u32;
    let on_each = (depth / pairs as u32).max(1);
    let [near, far] = connected(mode, depth, pairs, home)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let target = scope.spawn(|| -> Result<(), Failure> {
            if verb == Verb::Send {
                for pair in 0..pairs as u64 {
                    for _ in 0..2 * depth {
                        far.post_receive(pair, bytes)?;
                    }
                }
            }
            while !stop.load(Ordering::Relaxed) {
                if let Some(completion) = far.queue.poll() {
                    expect(completion)?;
                    far.post_receive(completion.id, bytes)?;
                }
            }
            Ok(())
        });
        let measured = (|| -> Result<f64, Failure> {
            let entry = [near.region.entry(0, bytes as u32)];
            let remote = far.region.remote(0);
            let post = |pair: u64| {
                let request = match verb {
                    Verb::Write => SendRequest::write(pair, &entry, remote),
                    Verb::Read => SendRequest::read(pair, &entry, remote),
                    Verb::Send => SendRequest::send(pair, &entry),
                };
                near.pairs[pair as usize].post(&request)
            };
            for pair in 0..pairs as u64 {
                for _ in 0..on_each {
                    post(pair)?;
                }
            }
            // The first half of the window warms up.
            let mut done = 0u64;
            let mut start = Instant::now();
            loop {
                let Some(completion) = near.queue.poll() else { continue };
                expect(completion)?;
                post(completion.id)?;
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

/// Sorted round trip times of 64 byte messages.
fn latency(mode: &Mode, blocking: bool, count: usize) -> Result<Vec<Duration>, Failure> {
    const DEPTH: u32 = 64;
    let [near, far] = connected(mode, DEPTH, 1, Home::Card)?;
    let next = |side: &Side| -> Result<(), Failure> {
        loop {
            let completion = match blocking {
                true => side.queue.wait()?,
                false => match side.queue.poll() {
                    Some(completion) => completion,
                    None => continue,
                },
            };
            expect(completion)?;
            if completion.operation.is_receive() {
                return side.post_receive(0, SMALL);
            }
        }
    };
    let ball = |side: &Side| -> Result<(), Failure> {
        let entry = [side.region.entry(0, SMALL as u32)];
        Ok(side.pairs[0].post(&SendRequest::send(1, &entry))?)
    };
    for side in [&near, &far] {
        for _ in 0..DEPTH {
            side.post_receive(0, SMALL)?;
        }
    }
    let warm_up = count / 10 + 1;
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| -> Result<(), Failure> {
            for _ in 0..warm_up + count {
                next(&far)?;
                ball(&far)?;
            }
            Ok(())
        });
        let mut times = Vec::with_capacity(count);
        for turn in 0..warm_up + count {
            let start = Instant::now();
            ball(&near)?;
            next(&near)?;
            if turn >= warm_up {
                times.push(start.elapsed());
            }
        }
        echo.join().expect("the echo does not panic")?;
        times.sort_unstable();
        Ok(times)
    })
}

/// Million 64 byte messages a second.
fn rate(mode: &Mode, round: Duration) -> Result<f64, Failure> {
    const DEPTH: u32 = 1024;
    let [near, far] = connected(mode, DEPTH, 1, Home::Card)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let target = scope.spawn(|| -> Result<(), Failure> {
            for _ in 0..2 * DEPTH {
                far.post_receive(0, SMALL)?;
            }
            let scatter = [far.region.entry(0, SMALL as u32)];
            let receives = [ReceiveRequest { id: 0, scatter: &scatter }; 2 * DEPTH as usize];
            let mut batch = Vec::with_capacity(256);
            while !stop.load(Ordering::Relaxed) {
                let count = far.queue.poll_many(&mut batch);
                batch.drain(..).try_for_each(expect)?;
                far.pairs[0].post_receives(&receives[..count])?;
            }
            Ok(())
        });
        let measured = (|| -> Result<f64, Failure> {
            let entry = [near.region.entry(0, SMALL as u32)];
            let requests = [SendRequest::send(0, &entry); 64];
            let mut outstanding = 0u32;
            let mut done = 0u64;
            let mut start = Instant::now();
            let mut batch = Vec::with_capacity(256);
            loop {
                while outstanding + 64 <= DEPTH {
                    near.pairs[0].post_all(&requests)?;
                    outstanding += 64;
                }
                batch.clear();
                near.queue.poll_many(&mut batch);
                for completion in &batch {
                    expect(*completion)?;
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
