//! Alternatives to SoftHCA, where they are installed: iperf3, libfabric's fi_pingpong, UCX's ucx_perftest, each as
//! two processes over loopback.

use super::results::{BenchResult, Effort, LOOPBACK, Measurement, half_micros};
use rustix::process::{Pid, Signal, kill_process};
use softhca_udp::raw;
use std::net::Ipv4Addr;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The time limit of a peer.
const PEER_TIMEOUT: Duration = Duration::from_secs(60);

/// A peer program.
struct Peer {
    program: &'static str,
    mode: &'static str,
    metrics: &'static [Metric],
}

/// The measured quantity.
#[derive(Clone, Copy)]
enum Metric {
    Stream,
    Latency,
}

impl Metric {
    /// The name of the benchmark.
    const fn name(self) -> &'static str {
        match self {
            Metric::Stream => "stream-1MiB",
            Metric::Latency => "message-64B-latency",
        }
    }

    /// The unit of the results.
    const fn unit(self) -> &'static str {
        match self {
            Metric::Stream => "GB/s",
            Metric::Latency => "us",
        }
    }
}

/// The names of the peer benchmarks.
pub const NAMES: [&str; 2] = [Metric::Stream.name(), Metric::Latency.name()];

const PEERS: [Peer; 4] = [
    Peer { program: "iperf3", mode: "peer:iperf3", metrics: &[Metric::Stream] },
    Peer { program: "ucx_perftest", mode: "peer:ucx-tcp-tag", metrics: &[Metric::Stream, Metric::Latency] },
    Peer { program: "fi_pingpong", mode: "peer:fi-tcp", metrics: &[Metric::Stream, Metric::Latency] },
    Peer { program: "fi_pingpong", mode: "peer:fi-rxd", metrics: &[Metric::Stream, Metric::Latency] },
];

/// Measures every installed peer, each next to raw sockets.
pub fn measure(
    wanted: &dyn Fn(&str) -> bool,
    effort: Effort,
    row: &mut dyn FnMut(&Measurement),
) -> BenchResult {
    for peer in &PEERS {
        if !is_installed(peer.program) {
            warnln!("{}: {} is not installed", peer.mode, peer.program);
            continue;
        }
        for measure in peer.metrics {
            let (name, unit) = (measure.name(), measure.unit());
            if !wanted(name) {
                continue;
            }
            let raw = match measure {
                Metric::Stream => {
                    raw::stream(LOOPBACK, LOOPBACK, 4112, effort.round_time)?.gigabytes_per_second()
                }
                Metric::Latency => half_micros(raw::ping_pong(LOOPBACK, LOOPBACK, 64, 5000)?.median),
            };
            match peer.run(*measure, effort) {
                Ok(value) => row(&Measurement::new(name, peer.mode, unit, value, raw)),
                Err(why) => warnln!("{} {name}: {why}", peer.mode),
            }
        }
    }
    Ok(())
}

pub fn is_installed(program: &str) -> bool {
    let quiet = Command::new(program).arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok()
}

/// A free TCP port.
pub fn free_port() -> BenchResult<String> {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port().to_string())
}

impl Peer {
    fn run(&self, measure: Metric, effort: Effort) -> BenchResult<f64> {
        let port = free_port()?;
        match self.mode {
            "peer:iperf3" => iperf3(effort, "1M"),
            "peer:ucx-tcp-tag" => {
                let (test, size, count) = match measure {
                    Metric::Stream => ("tag_bw", "1048576", "2000"),
                    Metric::Latency => ("tag_lat", "64", "20000"),
                };
                let ucx = || {
                    let mut command = Command::new("ucx_perftest");
                    command.env("UCX_TLS", "tcp").env("UCX_NET_DEVICES", "lo");
                    command
                };
                let client = ["127.0.0.1", "-p", &port, "-t", test, "-s", size, "-n", count, "-f", "-v"];
                let text = run_server_and_client((ucx(), &["-p", &port]), (ucx(), &client))?;
                parse_ucx_perftest(&text, measure).ok_or_else(|| format!("cannot read: {text}").into())
            }
            _ => {
                let (provider, kind) = match self.mode {
                    "peer:fi-tcp" => ("tcp", "msg"),
                    _ => ("udp;ofi_rxd", "rdm"),
                };
                let (size, count) = match measure {
                    Metric::Stream => ("1048576", "200"),
                    Metric::Latency => ("64", "5000"),
                };
                let common = ["-p", provider, "-e", kind, "-S", size, "-I", count];
                let server = [&common[..], &["-B", &port]].concat();
                let client = [&common[..], &["-P", &port, "127.0.0.1"]].concat();
                let fabric = || Command::new("fi_pingpong");
                let text = run_server_and_client((fabric(), &server), (fabric(), &client))?;
                parse_fi_pingpong(&text, measure).ok_or_else(|| format!("cannot read: {text}").into())
            }
        }
    }
}

/// The rate of iperf3 over one TCP connection with writes of `length`, in gigabytes per second.
pub fn iperf3(effort: Effort, length: &str) -> BenchResult<f64> {
    let port = free_port()?;
    let seconds = effort.round_time.as_secs().max(1).to_string();
    let text = run_server_and_client(
        (Command::new("iperf3"), &["-s", "-1", "-B", "127.0.0.1", "-p", &port]),
        (Command::new("iperf3"), &["-c", "127.0.0.1", "-p", &port, "-t", &seconds, "-l", length, "-J"]),
    )?;
    let report: serde_json::Value = serde_json::from_str(&text)?;
    let bits = report["end"]["sum_received"]["bits_per_second"].as_f64();
    Ok(bits.ok_or("iperf3 reports no rate")? / 8e9)
}

/// Runs a server and a client, and returns the output of the client.
pub fn run_server_and_client(server: (Command, &[&str]), client: (Command, &[&str])) -> BenchResult<String> {
    let (mut command, arguments) = server;
    let server = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _server = ChildGuard(server.spawn()?);
    let (mut command, arguments) = client;
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let deadline = Instant::now() + PEER_TIMEOUT;
    let mut failure = None;
    loop {
        // The client retries until the server listens.
        std::thread::sleep(Duration::from_millis(200));
        let Output { status, stdout, stderr } =
            wait_until(command.spawn()?, deadline).map_err(|why| failure.take().unwrap_or(why))?;
        if status.success() {
            return Ok(String::from_utf8_lossy(&stdout).into_owned());
        }
        let why = String::from_utf8_lossy(&stderr).trim().to_owned();
        if Instant::now() > deadline {
            return Err(why.into());
        }
        failure = Some(why.into());
    }
}

/// Runs two processes that wait for each other, and returns the output of the second.
pub fn run_together(mut first: Command, mut second: Command) -> BenchResult<String> {
    let _first = ChildGuard(first.stdout(Stdio::null()).spawn()?);
    let second = second.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let Output { status, stdout, stderr } = wait_until(second, Instant::now() + PEER_TIMEOUT)?;
    match status.success() {
        true => Ok(String::from_utf8_lossy(&stdout).into_owned()),
        false => Err(String::from_utf8_lossy(&stderr).trim().to_owned().into()),
    }
}

/// Waits for a process until a deadline.
fn wait_until(child: Child, deadline: Instant) -> BenchResult<Output> {
    let mut child = ChildGuard(child);
    while child.0.try_wait()?.is_none() {
        if Instant::now() > deadline {
            return Err("timed out".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    if let (Some(mut out), Some(mut err)) = (child.0.stdout.take(), child.0.stderr.take()) {
        std::io::Read::read_to_end(&mut out, &mut stdout)?;
        std::io::Read::read_to_end(&mut err, &mut stderr)?;
    }
    Ok(Output { status: child.0.wait()?, stdout, stderr })
}

/// A process that is terminated when the measurement ends.
struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        // `softhca exec` forwards the signal to its program.
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        }
        let until = Instant::now() + Duration::from_secs(1);
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The last line of `ucx_perftest -v`: iterations, then percentile, average and overall time in microseconds,
/// average and overall bandwidth in MB/s, and message rates, with commas.
fn parse_ucx_perftest(text: &str, measure: Metric) -> Option<f64> {
    let fields: Vec<f64> = text
        .lines()
        .rev()
        .map(|line| line.split(',').map(|field| field.trim().parse().ok()).collect::<Option<Vec<f64>>>())
        .find_map(|fields| fields.filter(|fields| fields.len() >= 6))?;
    match measure {
        Metric::Latency => fields.get(3).copied(),
        // Megabytes of 2^20.
        Metric::Stream => fields.get(5).map(|megabytes| megabytes * 1_048_576.0 / 1e9),
    }
}

/// The last line of `fi_pingpong`: bytes, count, acknowledged, total, time, MB/s, microseconds per transfer, …
fn parse_fi_pingpong(text: &str, measure: Metric) -> Option<f64> {
    let line = text.lines().rev().find(|line| line.starts_with(|first: char| first.is_ascii_digit()))?;
    let fields: Vec<&str> = line.split_whitespace().collect();
    let at = match measure {
        Metric::Stream => fields.len().checked_sub(3)?,
        Metric::Latency => fields.len().checked_sub(2)?,
    };
    let value: f64 = fields.get(at)?.parse().ok()?;
    Some(match measure {
        Metric::Stream => value / 1e3,
        Metric::Latency => value,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_output_is_parsed() {
        let fi = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n\
                  64      2k      =2k      250k        0.02s     12.31       5.20       0.19\n";
        assert_eq!(parse_fi_pingpong(fi, Metric::Latency), Some(5.2));
        assert_eq!(parse_fi_pingpong(fi, Metric::Stream), Some(0.01231));
        let ucx = "iterations,50.0_percentile_lat,average_lat,overall_lat,average_bw,overall_bw,average_mr,overall_mr\n\
                   20000,4.612,4.700,4.705,12.98,12.97,212766,212540\n";
        assert_eq!(parse_ucx_perftest(ucx, Metric::Latency), Some(4.705));
        assert!(parse_ucx_perftest(ucx, Metric::Stream).is_some_and(|rate| (rate - 0.0136).abs() < 1e-4));
        assert_eq!(parse_fi_pingpong("nothing", Metric::Stream), None);
    }
}
