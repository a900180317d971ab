//! What somebody would use instead, where it is installed: iperf3, libfabric's fi_pingpong, UCX's ucx_perftest,
//! each as two processes over loopback.

use super::table::Figure;
use super::{Effort, Failure};
use rustix::process::{Pid, Signal, kill_process};
use softhca_udp::raw;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// The longest that a peer may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// One program that can be measured.
struct Peer {
    program: &'static str,
    mode: &'static str,
    figures: &'static [Measure],
}

/// What is asked of it.
#[derive(Clone, Copy)]
enum Measure {
    Stream,
    Latency,
}

impl Measure {
    /// The name of the benchmark.
    const fn name(self) -> &'static str {
        match self {
            Measure::Stream => "stream-1MiB",
            Measure::Latency => "message-64B-latency",
        }
    }

    /// What its figures are in.
    const fn unit(self) -> &'static str {
        match self {
            Measure::Stream => "GB/s",
            Measure::Latency => "us",
        }
    }
}

/// The names of what is measured of peers.
pub const NAMES: [&str; 2] = [Measure::Stream.name(), Measure::Latency.name()];

const PEERS: [Peer; 4] = [
    Peer { program: "iperf3", mode: "peer:iperf3", figures: &[Measure::Stream] },
    Peer { program: "ucx_perftest", mode: "peer:ucx-tcp-tag", figures: &[Measure::Stream, Measure::Latency] },
    Peer { program: "fi_pingpong", mode: "peer:fi-tcp", figures: &[Measure::Stream, Measure::Latency] },
    Peer { program: "fi_pingpong", mode: "peer:fi-rxd", figures: &[Measure::Stream, Measure::Latency] },
];

/// Measures every peer that is installed, each beside bare sockets.
pub fn measure(
    wanted: &dyn Fn(&str) -> bool,
    effort: Effort,
    row: &mut dyn FnMut(&Figure),
) -> Result<(), Failure> {
    for peer in &PEERS {
        if !is_installed(peer.program) {
            eprintln!("softhca: {}: {} is not installed", peer.mode, peer.program);
            continue;
        }
        for measure in peer.figures {
            let (name, unit) = (measure.name(), measure.unit());
            if !wanted(name) {
                continue;
            }
            let raw = match measure {
                Measure::Stream => {
                    raw::stream(LOOPBACK, LOOPBACK, 4112, effort.round)?.gigabytes_per_second()
                }
                Measure::Latency => {
                    let median = raw::ping_pong(LOOPBACK, LOOPBACK, 64, 5000)?.median;
                    median.as_nanos() as f64 / 2e3
                }
            };
            match peer.run(*measure, effort) {
                Ok(value) => {
                    let ratio = value / raw;
                    row(&Figure { name: name.into(), mode: peer.mode, unit, value, raw, ratio, p99: None });
                }
                Err(why) => eprintln!("softhca: {} {name}: {why}", peer.mode),
            }
        }
    }
    Ok(())
}

pub fn is_installed(program: &str) -> bool {
    let quiet = Command::new(program).arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok()
}

/// A port that nobody has now.
pub fn free_port() -> Result<String, Failure> {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port().to_string())
}

impl Peer {
    fn run(&self, measure: Measure, effort: Effort) -> Result<f64, Failure> {
        let port = free_port()?;
        match self.mode {
            "peer:iperf3" => iperf3(effort, "1M"),
            "peer:ucx-tcp-tag" => {
                let (test, size, count) = match measure {
                    Measure::Stream => ("tag_bw", "1048576", "2000"),
                    Measure::Latency => ("tag_lat", "64", "20000"),
                };
                let ucx = || {
                    let mut command = Command::new("ucx_perftest");
                    command.env("UCX_TLS", "tcp").env("UCX_NET_DEVICES", "lo");
                    command
                };
                let client = ["127.0.0.1", "-p", &port, "-t", test, "-s", size, "-n", count, "-f", "-v"];
                let text = pair((ucx(), &["-p", &port]), (ucx(), &client))?;
                ucx_figure(&text, measure).ok_or_else(|| format!("cannot read: {text}").into())
            }
            _ => {
                let (provider, kind) = match self.mode {
                    "peer:fi-tcp" => ("tcp", "msg"),
                    _ => ("udp;ofi_rxd", "rdm"),
                };
                let (size, count) = match measure {
                    Measure::Stream => ("1048576", "200"),
                    Measure::Latency => ("64", "5000"),
                };
                let common = ["-p", provider, "-e", kind, "-S", size, "-I", count];
                let server = [&common[..], &["-B", &port]].concat();
                let client = [&common[..], &["-P", &port, "127.0.0.1"]].concat();
                let fabric = || Command::new("fi_pingpong");
                let text = pair((fabric(), &server), (fabric(), &client))?;
                fi_figure(&text, measure).ok_or_else(|| format!("cannot read: {text}").into())
            }
        }
    }
}

/// What iperf3 carries over one TCP connection, in gigabytes a second, with writes of `length`.
pub fn iperf3(effort: Effort, length: &str) -> Result<f64, Failure> {
    let port = free_port()?;
    let seconds = effort.round.as_secs().max(1).to_string();
    let text = pair(
        (Command::new("iperf3"), &["-s", "-1", "-B", "127.0.0.1", "-p", &port]),
        (Command::new("iperf3"), &["-c", "127.0.0.1", "-p", &port, "-t", &seconds, "-l", length, "-J"]),
    )?;
    let report: serde_json::Value = serde_json::from_str(&text)?;
    let bits = report["end"]["sum_received"]["bits_per_second"].as_f64();
    Ok(bits.ok_or("iperf3 reports no rate")? / 8e9)
}

/// Runs a server and a client, and returns what the client says.
pub fn pair(server: (Command, &[&str]), client: (Command, &[&str])) -> Result<String, Failure> {
    let (mut command, arguments) = server;
    let server = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _server = Running(server.spawn()?);
    let (mut command, arguments) = client;
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let deadline = Instant::now() + PATIENCE;
    loop {
        // The server takes its time until it listens: whoever comes too early tries again.
        std::thread::sleep(Duration::from_millis(200));
        let Output { status, stdout, stderr } = limited(command.spawn()?, deadline)?;
        if status.success() {
            return Ok(String::from_utf8_lossy(&stdout).into_owned());
        }
        if Instant::now() > deadline {
            return Err(String::from_utf8_lossy(&stderr).trim().to_owned().into());
        }
    }
}

/// Waits for a process, but not for ever.
fn limited(child: Child, deadline: Instant) -> Result<Output, Failure> {
    let mut child = Running(child);
    while child.0.try_wait()?.is_none() {
        if Instant::now() > deadline {
            return Err("it did not end in time".into());
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

/// A process that ends with the measurement.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // One that runs another program passes this on.
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
fn ucx_figure(text: &str, measure: Measure) -> Option<f64> {
    let fields: Vec<f64> = text
        .lines()
        .rev()
        .map(|line| line.split(',').map(|field| field.trim().parse().ok()).collect::<Option<Vec<f64>>>())
        .find_map(|fields| fields.filter(|fields| fields.len() >= 6))?;
    match measure {
        Measure::Latency => fields.get(3).copied(),
        // Megabytes of 2^20.
        Measure::Stream => fields.get(5).map(|megabytes| megabytes * 1_048_576.0 / 1e9),
    }
}

/// The last line of `fi_pingpong`: bytes, count, acknowledged, total, time, MB/s, microseconds per transfer, …
fn fi_figure(text: &str, measure: Measure) -> Option<f64> {
    let line = text.lines().rev().find(|line| line.starts_with(|first: char| first.is_ascii_digit()))?;
    let fields: Vec<&str> = line.split_whitespace().collect();
    let at = match measure {
        Measure::Stream => fields.len().checked_sub(3)?,
        Measure::Latency => fields.len().checked_sub(2)?,
    };
    let value: f64 = fields.get(at)?.parse().ok()?;
    Some(match measure {
        Measure::Stream => value / 1e3,
        Measure::Latency => value,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_peers_print_is_read() {
        let fi = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n\
                  64      2k      =2k      250k        0.02s     12.31       5.20       0.19\n";
        assert_eq!(fi_figure(fi, Measure::Latency), Some(5.2));
        assert_eq!(fi_figure(fi, Measure::Stream), Some(0.01231));
        let ucx = "iterations,50.0_percentile_lat,average_lat,overall_lat,average_bw,overall_bw,average_mr,overall_mr\n\
                   20000,4.612,4.700,4.705,12.98,12.97,212766,212540\n";
        assert_eq!(ucx_figure(ucx, Measure::Latency), Some(4.705));
        assert!(ucx_figure(ucx, Measure::Stream).is_some_and(|rate| (rate - 0.0136).abs() < 1e-4));
        assert_eq!(fi_figure("nothing", Measure::Stream), None);
    }
}
