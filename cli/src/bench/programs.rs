//! Unmodified programs under `softhca exec`: perftest compared with iperf3 and a TCP ping-pong, alternately.

use super::mode::BenchDaemon;
use super::peer;
use super::results::{BenchResult, Effort, LOOPBACK, Measurement, Rounds, half_micros};
use softhca::Loopback;
use softhca_daemon::DataPath;
use softhca_udp::raw;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Instant;

/// The size of a small message.
const SMALL_MESSAGE: usize = 64;

/// The hosts of server and client, and how a host's traffic to itself is carried.
struct Placement {
    suffix: &'static str,
    hosts: [&'static str; 2],
    loopback: Loopback,
}

/// Both programs on one host, the same through its sockets, and on two hosts.
static PLACEMENTS: [Placement; 3] = [
    Placement { suffix: "", hosts: ["alice", "alice"], loopback: Loopback::Internal },
    Placement { suffix: "-socket-loopback", hosts: ["alice", "alice"], loopback: Loopback::Socket },
    Placement { suffix: "-two-hosts", hosts: ["alice", "bob"], loopback: Loopback::Socket },
];

/// One program with its arguments.
struct ProgramBenchmark {
    name: &'static str,
    command_line: &'static [&'static str],
    /// Iterations of a full-length round.
    count: usize,
    kind: ProgramMetric,
}

/// The measured quantity, and its comparison.
#[derive(Clone, Copy)]
enum ProgramMetric {
    /// Bandwidth, compared with iperf3 with writes of the same length.
    Bandwidth(&'static str),
    /// Half the round trip, compared with TCP that waits in the same way.
    Latency(WaitMethod),
    /// Messages per second, compared with UDP datagrams of the same length sent with GSO.
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
    command_line: &'static [&'static str],
    count: usize,
    kind: ProgramMetric,
) -> ProgramBenchmark {
    ProgramBenchmark { name, command_line, count, kind }
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

/// Every run: its name, benchmark and placement.
fn runs() -> impl Iterator<Item = (String, &'static ProgramBenchmark, &'static Placement)> {
    BENCHMARKS.iter().flat_map(|benchmark| {
        PLACEMENTS
            .iter()
            .map(move |placement| (format!("{}{}", benchmark.name, placement.suffix), benchmark, placement))
    })
}

/// The names of the program benchmarks.
pub fn names() -> impl Iterator<Item = String> {
    runs().map(|(name, ..)| name)
}

/// Measures the installed programs on one of the data paths.
pub fn measure(
    data_path: DataPath,
    wanted: &dyn Fn(&str) -> bool,
    effort: Effort,
    row: &mut dyn FnMut(&Measurement),
) -> BenchResult {
    let needed = ["ib_write_bw", "iperf3"];
    if let Some(missing) = needed.iter().find(|program| !peer::is_installed(program)) {
        return Err(format!("{missing} is not installed (Debian: perftest, iperf3)").into());
    }
    let start = |loopback| BenchDaemon::start(data_path, loopback);
    let [socket_loopback, device_loopback] = [start(Loopback::Socket)?, start(Loopback::Internal)?];
    let mode = match data_path {
        DataPath::Direct => "programs",
        DataPath::Daemon => "programs-daemon",
    };
    for (name, benchmark, placement) in runs().filter(|(name, ..)| wanted(name)) {
        let daemon =
            if placement.loopback == Loopback::Internal { &device_loopback } else { &socket_loopback };
        let hosts = ProgramHosts { daemon: daemon.name(), hosts: placement.hosts };
        let measurement = benchmark.measure(&name, mode, hosts, effort);
        row(&measurement.map_err(|why| format!("{name}: {why}"))?);
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
    /// The arguments of `softhca` that run a program on one of the hosts.
    fn exec_arguments(&self, end: usize) -> Vec<&'a str> {
        vec!["exec", "--no-view", "--name", self.daemon, "--host", self.hosts[end], "--"]
    }
}

impl ProgramBenchmark {
    fn measure(
        &self,
        name: &str,
        mode: &'static str,
        hosts: ProgramHosts,
        effort: Effort,
    ) -> BenchResult<Measurement> {
        let mut rounds = Rounds::default();
        for _ in 0..effort.rounds {
            rounds.raws.push(self.measure_raw(effort)?);
            let (value, p99) = self.run_program(hosts, effort)?;
            rounds.values.push(value);
            rounds.p99s.extend(p99);
        }
        let unit = match self.kind {
            ProgramMetric::Bandwidth(_) => "GB/s",
            ProgramMetric::Latency(_) => "us",
            ProgramMetric::Rate => "M/s",
        };
        Ok(rounds.measurement(name, mode, unit))
    }

    fn iterations(&self, effort: Effort) -> usize {
        let share = effort.round_time.as_millis() as usize;
        (self.count * share / 500).max(100)
    }

    /// Measures what the program is compared with.
    fn measure_raw(&self, effort: Effort) -> BenchResult<f64> {
        match self.kind {
            ProgramMetric::Bandwidth(length) => peer::iperf3(effort, length),
            ProgramMetric::Latency(wait_method) => tcp_ping_pong(wait_method, self.iterations(effort)),
            ProgramMetric::Rate => Ok(raw::stream(LOOPBACK, LOOPBACK, SMALL_MESSAGE, effort.round_time)?
                .million_datagrams_per_second()),
        }
    }

    /// The result of the program, and the 99th percentile of latencies.
    fn run_program(&self, hosts: ProgramHosts, effort: Effort) -> BenchResult<(f64, Option<f64>)> {
        let own = std::env::current_exe()?;
        let (port, count) = (peer::free_port()?, self.iterations(effort).to_string());
        let common = [self.command_line, &["-F", "-p", &port, "-n", &count]].concat();
        let server = [hosts.exec_arguments(0), common.clone()].concat();
        let client = [hosts.exec_arguments(1), common, vec!["localhost"]].concat();
        let text = peer::run_server_and_client((Command::new(&own), &server), (Command::new(&own), &client))?;
        parse_perftest(&text, self.kind).ok_or_else(|| format!("cannot read: {text}").into())
    }
}

/// Parses the last line of a perftest program. Bandwidth: bytes, iterations, peak, average in MiB/s, Mpps.
/// Latency: bytes, iterations, minimum, maximum, typical, average, deviation, 99th and 99.9th percentile.
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

/// The median of half the round trip of small messages over TCP, in microseconds.
fn tcp_ping_pong(wait_method: WaitMethod, count: usize) -> BenchResult<f64> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let echo = std::thread::spawn(move || -> std::io::Result<()> {
        let mut stream = configure_socket(listener.accept()?.0, wait_method)?;
        let mut message = [0; SMALL_MESSAGE];
        for _ in 0..count {
            read_message(&mut stream, &mut message)?;
            stream.write_all(&message)?;
        }
        Ok(())
    });
    let mut stream = configure_socket(TcpStream::connect(address)?, wait_method)?;
    let mut message = [0; SMALL_MESSAGE];
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        stream.write_all(&message)?;
        read_message(&mut stream, &mut message)?;
        times.push(start.elapsed());
    }
    echo.join().map_err(|_| "the echo of the TCP ping-pong panicked")??;
    times.sort();
    Ok(half_micros(times[times.len() / 2]))
}

fn configure_socket(stream: TcpStream, wait_method: WaitMethod) -> std::io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(wait_method == WaitMethod::BusyPoll)?;
    Ok(stream)
}

/// Reads a whole message; busy-polls a non-blocking socket.
fn read_message(stream: &mut TcpStream, message: &mut [u8]) -> std::io::Result<()> {
    let mut received = 0;
    while received < message.len() {
        match stream.read(&mut message[received..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => received += bytes,
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
    fn perftest_output_is_parsed() {
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
    fn tcp_ping_pong_works_with_both_wait_methods() {
        for wait_method in [WaitMethod::BusyPoll, WaitMethod::Blocking] {
            assert!(tcp_ping_pong(wait_method, 10).unwrap() > 0.0);
        }
    }
}
