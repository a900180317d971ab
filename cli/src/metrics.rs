//! `softhca metrics`: the counters of a daemon's devices in the Prometheus text format.
//!
//! Port counters have the names that Prometheus' node_exporter gives them when it reads `/sys/class/infiniband`, so that
//! its dashboards work. Every counter also has its own name after `softhca_`.

use crate::exit_code::{CommandResult, failure_in};
use crate::status::DaemonTarget;
use clap::Args;
use softhca::{Counters, DaemonControl, Error, FabricPort, PortState};
use softhca_explorer::http::{self, Answer, Content, Incoming, Request, Site, StatusCode};
use std::fmt::Write;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::ExitCode;
use std::sync::Arc;

/// Arguments of `softhca metrics`.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    target: DaemonTarget,
    /// Serve the metrics over HTTP at this address, as http://ADDRESS:PORT/metrics, until interrupted
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
}

/// Runs `softhca metrics`.
pub fn run(arguments: &Arguments) -> CommandResult {
    match arguments.listen {
        None => collect(&arguments.target)?.lines().for_each(|line| outln!("{line}")),
        Some(address) => serve(address, arguments.target.clone())
            .map_err(failure_in(format!("cannot listen at {address}")))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn serve(address: SocketAddr, target: DaemonTarget) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    outln!("serving http://{}/metrics", listener.local_addr()?);
    http::serve(&listener, Arc::new(Metrics(target)))
}

struct Metrics(DaemonTarget);

impl Site for Metrics {
    const NOT_FOUND: &'static str =
        "The metrics are at /metrics. From this machine, use localhost or a loopback address.\n";

    /// A page of another site can have a browser on this machine ask a name that it resolves to loopback.
    fn is_authorized(&self, request: &Request<Incoming>, client: SocketAddr) -> bool {
        let host = request.headers().get("host").map(|host| host.to_str().unwrap_or_default());
        request.uri().path() == "/metrics" && (!client.ip().is_loopback() || host.is_none_or(names_loopback))
    }

    fn respond(&self, _: &Request<Incoming>) -> Answer {
        match collect(&self.0) {
            Ok(text) => Answer {
                status: StatusCode::OK,
                content_type: "text/plain; version=0.0.4; charset=utf-8",
                content: Content::Whole(text.into()),
            },
            Err(error) => Answer::text(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")),
        }
    }
}

/// Whether this `Host`, with or without a port, is `localhost` or a loopback address.
fn names_loopback(host: &str) -> bool {
    let name =
        host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok()).map_or(host, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

struct DeviceValues {
    labels: String,
    device_name: String,
    counters: Counters,
    state: PortState,
}

/// The metrics of all devices and network ports of a daemon.
fn collect(target: &DaemonTarget) -> Result<String, Error> {
    let mut control = target.connect()?;
    let devices = device_values(&mut control)?;
    let mut text = String::new();
    let mut family = |name: &str, kind: &str, help: &str, value: &dyn Fn(&DeviceValues) -> u64| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for device in &devices {
            let _ = writeln!(text, "{name}{{{}}} {}", device.labels, value(device));
        }
    };
    for (name, help, value) in PORT_METRICS {
        family(&format!("node_infiniband_{name}_total"), "counter", help, &|device| value(&device.counters));
    }
    let state = |device: &DeviceValues| if device.state == PortState::Active { 4 } else { 1 };
    family("node_infiniband_state_id", "gauge", "State of the port: 1 down, 4 active.", &state);
    let physical = |device: &DeviceValues| if device.state == PortState::Active { 5 } else { 3 };
    family("node_infiniband_physical_state_id", "gauge", "3 disabled, 5 link up.", &physical);
    for (index, (name, help)) in Counters::DESCRIPTIONS.iter().enumerate() {
        let value = |device: &DeviceValues| device.counters.iter().nth(index).map_or(0, |(_, value)| value);
        family(&format!("softhca_{name}_total"), "counter", help, &value);
    }
    let info = "node_infiniband_info";
    let _ = writeln!(text, "# HELP {info} The device.\n# TYPE {info} gauge");
    for device in &devices {
        let (name, version) = (&device.device_name, env!("CARGO_PKG_VERSION"));
        let _ = writeln!(
            text,
            "{info}{{board_id=\"SoftHCA\",device=\"{name}\",firmware_version=\"{version}\",hca_type=\"SoftHCA\"}} 1"
        );
    }
    write_ports(&mut text, &control.ports()?);
    Ok(text)
}

fn device_values(control: &mut DaemonControl) -> Result<Vec<DeviceValues>, Error> {
    let hosts = control.status()?.hosts;
    let values = hosts.into_iter().map(|status| {
        let device = status.host;
        Ok(DeviceValues {
            labels: format!("device=\"{}\",host=\"{}\",port=\"1\"", device.device_name, device.host),
            counters: control.counters(Some(&device.name))?,
            device_name: device.device_name,
            state: status.port_state,
        })
    });
    values.collect()
}

type PortMetric = (&'static str, &'static str, fn(&Counters) -> u64);

/// The metrics that node_exporter makes of the files in `counters/`.
const PORT_METRICS: [PortMetric; 7] = [
    ("port_data_transmitted_bytes", "Payload bytes sent.", |counters| counters.sent_bytes),
    ("port_data_received_bytes", "Payload bytes received.", |counters| counters.rcvd_bytes),
    ("port_packets_transmitted", "Packets sent.", |counters| counters.sent_pkts),
    ("port_packets_received", "Packets received.", |counters| counters.rcvd_pkts),
    ("port_errors_received", "Packets received with a wrong ICRC, or malformed.", |counters| {
        counters.rx_icrc_encapsulated.wrapping_add(counters.rx_malformed)
    }),
    ("port_discards_received", "Packets received and dropped.", |counters| counters.rx_dropped),
    ("link_downed", "How often the port went down.", |counters| counters.link_downed),
];

/// The counters of the network between the hosts. Ports of hosts have fewer of them than those of switches.
fn write_ports(text: &mut String, ports: &[FabricPort]) {
    let mut families: Vec<(&str, String)> = Vec::new();
    for port in ports {
        for (name, values) in &port.counters {
            let index = families.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
                families.push((name, String::new()));
                families.len() - 1
            });
            let lines = &mut families[index].1;
            for (priority, value) in values.iter().enumerate() {
                let _ = write!(lines, "softhca_fabric_{name}{{node=\"{}\",peer=\"{}\"", port.node, port.peer);
                if let Some(host) = &port.host {
                    let _ = write!(lines, ",host=\"{host}\"");
                }
                if values.len() > 1 {
                    let _ = write!(lines, ",priority=\"{priority}\"");
                }
                let _ = writeln!(lines, "}} {value}");
            }
        }
    }
    for (name, lines) in families {
        let kind = if name == "max_queue_bytes" { "gauge" } else { "counter" };
        let _ = write!(text, "# TYPE softhca_fabric_{name} {kind}\n{lines}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_loopback() {
        for host in ["localhost", "localhost:9091", "127.0.0.1", "127.0.0.1:9091", "[::1]:9091", "[::1]"] {
            assert!(names_loopback(host), "{host}");
        }
        for host in
            ["", "attacker.example", "attacker.example:9091", "10.0.0.1:9091", "localhost.attacker.example"]
        {
            assert!(!names_loopback(host), "{host}");
        }
    }
}
