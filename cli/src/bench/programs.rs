//! Unmodified programs through `softhca exec`: perftest beside iperf3 and a TCP ping-pong, in turns.

use super::mode::BenchDaemon;
use super::peer;
use super::results::Measurement;
use super::{BenchError, Effort};
use softhca::Loopback;
use softhca_udp::raw;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

/// The bytes of a small message.
const SMALL_MESSAGE: usize = 64;
const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Where the two ends of a program run, and where goes what one host sends to itself.
struct Placement {
    suffix: &'static str,
    hosts: [&'static str; 2],
    loopback: Loopback,
}

/// As programs on one machine do that nobody places, the same without sockets, and as on two machines.
static PLACEMENTS: [Placement; 3] = [
    Placement { suffix: "", hosts: ["alice", "alice"], loopback: Loopback::Socket },
    Placement { suffix: "-internal-loopback", hosts: ["alice", "alice"], loopback: Loopback::Internal },
    Placement { suffix: "-two-hosts", hosts: ["alice", "bob"], loopback: Loopback::Socket },
];

/// One run of a program.
struct ProgramBenchmark {
    name: &'static str,
    command_line: &'static [&'static str],
    /// Iterations of a full round.
    count: usize,
    kind: ProgramMetric,
}

/// What is read from the program, and what stands beside it.
#[derive(Clone, Copy)]
enum ProgramMetric {
    /// Bandwidth, beside iperf3 with writes of the same length.
    Bandwidth(&'static str),
    /// Half a round trip, beside one over TCP that waits in the same way.
    Latency(WaitMethod),
    /// Messages a second, beside datagrams of the same length in runs.
    Rate,
}

/// How an application waits for a message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WaitMethod {
    BusyPoll,
    Blocking,
}

const fn benchmark(
    name: &'static str,
    words: &'static [&'static str],
    count: usize,
    kind: ProgramMetric,
) -> ProgramBenchmark {
    ProgramBenchmark { name, command_line: words, count, kind }
}

static BENCHMARKS: [ProgramBenchmark; 8] = [
    benchmark("ib_write_bw-1MiB", &["ib_write_bw", "-s", "1048576"], 1000, ProgramMetric::Bandwidth("1M")),
    benchmark("ib_write_bw-64KiB", &["ib_write_bw", "-s", "65536"], 10_000, ProgramMetric::Bandwidth("64K")),
    benchmark("ib_read_bw-1MiB", &["ib_read_bw", "-s", "1048576"], 1000, ProgramMetric::Bandwidth("1M")),
    benchmark("ib_read_bw-64KiB", &["ib_read_bw", "-s", "65536"], 10_000, ProgramMetric::Bandwidth("64K")),
    benchmark(
        "ib_send_lat-64B",
        &["ib_send_lat", "-s", "64"],
        10_000,
        ProgramMetric::Latency(WaitMethod::BusyPoll),
    ),
    benchmark(
        "ib_send_lat-64B-events",
        &["ib_send_lat", "-s", "64", "-e"],
        10_000,
        ProgramMetric::Latency(WaitMethod::Blocking),
    ),
    benchmark(
        "ib_write_lat-64B",
        &["ib_write_lat", "-s", "64"],
        5000,
        ProgramMetric::Latency(WaitMethod::BusyPoll),
    ),
    benchmark("ib_send_bw-64B", &["ib_send_bw", "-s", "64"], 100_000, ProgramMetric::Rate),
];

/// Every run: its name, the benchmark, its setting.
fn runs() -> impl Iterator<Item = (String, &'static ProgramBenchmark, &'static Placement)> {
    BENCHMARKS.iter().flat_map(|benchmark| {
        PLACEMENTS
            .iter()
            .map(move |setting| (format!("{}{}", benchmark.name, setting.suffix), benchmark, setting))
    })
}

/// The names of what is measured of programs.
pub fn names() -> impl Iterator<Item = String> {
    runs().map(|(name, ..)| name)
}

/// Measures the programs that are installed.
pub fn measure(
    wanted: &dyn Fn(&str) -> bool,
    effort: Effort,
    row: &mut dyn FnMut(&Measurement),
) -> Result<(), BenchError> {
    let needed = ["ib_write_bw", "iperf3"];
    if let Some(missing) = needed.iter().find(|program| !peer::is_installed(program)) {
        return Err(format!("{missing} is not installed (Debian: perftest, iperf3)").into());
    }
    let [sockets, card] = [BenchDaemon::start(Loopback::Socket)?, BenchDaemon::start(Loopback::Internal)?];
    for (name, benchmark, setting) in runs().filter(|(name, ..)| wanted(name)) {
        let daemon = if setting.loopback == Loopback::Internal { &card } else { &sockets };
        let ends = ProgramHosts { daemon: daemon.name(), hosts: setting.hosts };
        let figure = benchmark.measure(&name, ends, effort);
        row(&figure.map_err(|why| format!("{name}: {why}"))?);
    }
    Ok(())
}

/// The hosts of the server and of the client.
#[derive(Clone, Copy)]
struct ProgramHosts<'a> {
    daemon: &'a str,
    hosts: [&'a str; 2],
}

impl<'a> ProgramHosts<'a> {
    /// What runs a program on one of them.
    fn exec_arguments(&self, end: usize) -> Vec<&'a str> {
        vec!["exec", "--no-view", "--name", self.daemon, "--host", self.hosts[end], "--"]
    }
}

impl ProgramBenchmark {
    fn measure(&self, name: &str, ends: ProgramHosts, effort: Effort) -> Result<Measurement, BenchError> {
        let (mut values, mut raws, mut tails) = (vec![], vec![], vec![]);
        // A program starts and connects in half a second: fewer rounds than the card alone has.
        for _ in 0..effort.rounds.min(5) {
            raws.push(self.measure_raw(effort)?);
            let (value, tail) = self.run_program(ends, effort)?;
            values.push(value);
            tails.extend(tail);
        }
        let (value, raw) = (super::rdma::median(values), super::rdma::median(raws));
        let unit = match self.kind {
            ProgramMetric::Bandwidth(_) => "GB/s",
            ProgramMetric::Latency(_) => "us",
            ProgramMetric::Rate => "M/s",
        };
        let p99 = (!tails.is_empty()).then(|| super::rdma::median(tails));
        Ok(Measurement { name: name.into(), mode: "programs", unit, value, raw, ratio: value / raw, p99 })
    }

    fn iterations(&self, effort: Effort) -> usize {
        let share = effort.round_time.as_millis() as usize;
        (self.count * share / 500).max(100)
    }

    /// What stands beside it.
    fn measure_raw(&self, effort: Effort) -> Result<f64, BenchError> {
        match self.kind {
            ProgramMetric::Bandwidth(length) => peer::iperf3(effort, length),
            ProgramMetric::Latency(waiting) => tcp_ping_pong(waiting, self.iterations(effort)),
            ProgramMetric::Rate => Ok(raw::stream(LOOPBACK, LOOPBACK, SMALL_MESSAGE, effort.round_time)?
                .million_datagrams_per_second()),
        }
    }

    /// What the program says, and the 99th percentile of latencies.
    fn run_program(&self, ends: ProgramHosts, effort: Effort) -> Result<(f64, Option<f64>), BenchError> {
        let own = std::env::current_exe()?;
        let (port, count) = (peer::free_port()?, self.iterations(effort).to_string());
        let common = [self.command_line, &["-F", "-p", &port, "-n", &count]].concat();
        let server = [ends.exec_arguments(0), common.clone()].concat();
        let client = [ends.exec_arguments(1), common, vec!["localhost"]].concat();
        let text = peer::run_server_and_client((Command::new(&own), &server), (Command::new(&own), &client))?;
        parse_perftest(&text, self.kind).ok_or_else(|| format!("cannot read: {text}").into())
    }
}

/// The last line of a perftest program. Bandwidth: bytes, iterations, peak, average in MiB/s, millions of messages.
/// Latency: bytes, iterations, least, most, typical, average, deviation, 99th and 99.9th percentile.
fn parse_perftest(text: &str, kind: ProgramMetric) -> Option<(f64, Option<f64>)> {
    let numbers =
        |line: &str| line.split_whitespace().map(|word| word.parse().ok()).collect::<Option<Vec<f64>>>();
    let fields = text.lines().rev().filter_map(numbers).find(|fields| fields.len() >= 5)?;
    match kind {
        ProgramMetric::Bandwidth(_) => Some((fields[3] * 1_048_576.0 / 1e9, None)),
        ProgramMetric::Latency(_) => Some((fields[4], fields.get(7).copied())),
        ProgramMetric::Rate => Some((fields[4], None)),
    }
}

/// Half a round trip of small messages over TCP, in microseconds: the median.
fn tcp_ping_pong(waiting: WaitMethod, count: usize) -> Result<f64, BenchError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let echo = std::thread::spawn(move || -> std::io::Result<()> {
        let mut stream = configure_socket(listener.accept()?.0, waiting)?;
        let mut message = [0; SMALL_MESSAGE];
        for _ in 0..count {
            read_message(&mut stream, &mut message)?;
            stream.write_all(&message)?;
        }
        Ok(())
    });
    let mut stream = configure_socket(TcpStream::connect(address)?, waiting)?;
    let mut message = [0; SMALL_MESSAGE];
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let begun = Instant::now();
        stream.write_all(&message)?;
        read_message(&mut stream, &mut message)?;
        times.push(begun.elapsed());
    }
    echo.join().map_err(|_| "the echo of the TCP ping-pong panicked")??;
    times.sort();
    Ok(half_micros(times[times.len() / 2]))
}

fn half_micros(round_trip: Duration) -> f64 {
    round_trip.as_nanos() as f64 / 2e3
}

fn configure_socket(stream: TcpStream, waiting: WaitMethod) -> std::io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(waiting == WaitMethod::BusyPoll)?;
    Ok(stream)
}

/// Reads a whole message; a socket that does not block is asked again and again.
fn read_message(stream: &mut TcpStream, message: &mut [u8]) -> std::io::Result<()> {
    let mut got = 0;
    while got < message.len() {
        match stream.read(&mut message[got..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => got += bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_perftest_prints_is_read() {
        let stream = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
                      65536      1000             2100.00            2000.00            0.032000\n---\n";
        assert_eq!(
            parse_perftest(stream, ProgramMetric::Bandwidth("64K")),
            Some((2000.0 * 1_048_576.0 / 1e9, None))
        );
        assert_eq!(parse_perftest(stream, ProgramMetric::Rate), Some((0.032, None)));
        let latency = " 64      1000          9.10           99.00        10.50    \t    11.00        1.00 \t20.00   \t90.00\n";
        assert_eq!(
            parse_perftest(latency, ProgramMetric::Latency(WaitMethod::BusyPoll)),
            Some((10.5, Some(20.0)))
        );
        assert_eq!(parse_perftest("nothing", ProgramMetric::Rate), None);
    }

    #[test]
    fn tcp_messages_go_to_and_fro_with_both_ways_to_wait() {
        for waiting in [WaitMethod::BusyPoll, WaitMethod::Blocking] {
            assert!(tcp_ping_pong(waiting, 10).unwrap() > 0.0);
        }
    }
}
