//! Commands about a running daemon: `status`, `devices`, `devinfo`, `stats`, `asyncwatch`, `stop`.

use crate::exit_code::CommandResult;
use crate::subnet;
use clap::Args;
use serde_json::{Map, Value, json};
use softhca::{
    Counters, DaemonControl, Error, FabricPort, Gid, HostAsyncEvent, HostDevice, Instant, PortState,
    trace::{Event, HostId, NetworkEvent},
};
use softhca_trace::log::EntryBuilder;
use std::process::ExitCode;
use std::time::Duration;

/// Which daemon, and the output format.
#[derive(Args, Clone)]
pub struct DaemonTarget {
    /// Name of the daemon [default: SOFTHCA_DAEMON, or the default daemon]
    #[arg(long)]
    name: Option<String>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `softhca devinfo`.
#[derive(Args)]
pub struct DevinfoArguments {
    #[command(flatten)]
    target: DaemonTarget,
    /// Only this device or host
    device: Option<String>,
    /// Show every limit
    #[arg(short, long)]
    verbose: bool,
}

/// Arguments of `softhca stats`.
#[derive(Args)]
pub struct StatsArguments {
    #[command(flatten)]
    target: DaemonTarget,
    /// Only this host
    #[arg(long)]
    host: Option<String>,
    /// Print changed counters every second
    #[arg(long)]
    watch: bool,
    /// Include counters that are zero
    #[arg(long)]
    all: bool,
}

impl DaemonTarget {
    pub fn connect(&self) -> Result<DaemonControl, Error> {
        DaemonControl::connect(self.name.as_deref())
    }
}

/// Runs `softhca status`.
pub fn status(target: &DaemonTarget) -> CommandResult {
    let mut control = target.connect()?;
    let status = control.status()?;
    if !target.json {
        outln!("daemon {} version {}, up {} s", status.pid, status.version, status.uptime_s);
    }
    if control.subnet_settings().is_some() {
        subnet::print_status(&mut control, target.json)?;
    }
    for host in status.hosts {
        let device = &host.host;
        if target.json {
            let clients = host.clients.iter().map(|client| {
                let resources: Map<String, Value> =
                    client.resources.iter().map(|(name, count)| (name.clone(), json!(count))).collect();
                let data_path = if client.is_direct { "direct" } else { "daemon" };
                json!({"process": client.pid, "name": client.name, "data_path": data_path, "resources": resources})
            });
            let clients: Vec<Value> = clients.collect();
            outln!(
                "{}",
                json!({"process": status.pid, "version": status.version, "uptime": status.uptime_s,
                    "host": device.name, "device": device.device_name, "address": device.address.to_string(),
                    "recovery": device.recovery, "loopback": device.loopback, "queue_pairs": host.queue_pairs,
                    "listening": host.listening_ports, "clients": clients})
            );
            continue;
        }
        outln!(
            "{} {} {} recovery {}, loopback {}, {} queue pairs, {} clients",
            device.name,
            device.device_name,
            device.address,
            device.recovery,
            device.loopback,
            host.queue_pairs,
            host.clients.len()
        );
        if !host.listening_ports.is_empty() {
            let ports: Vec<String> = host.listening_ports.iter().map(u16::to_string).collect();
            outln!("  listening at {}", ports.join(", "));
        }
        for client in host.clients {
            let used = client.resources.iter().filter(|(_, count)| *count > 0);
            let used: Vec<String> = used.map(|(name, count)| format!("{count} {name}")).collect();
            let data_path = if client.is_direct { ", direct" } else { "" };
            outln!("  process {} ({}{data_path}): {}", client.pid, client.name, used.join(", "));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `softhca devices`.
pub fn devices(target: &DaemonTarget) -> CommandResult {
    for device in target.connect()?.hosts() {
        if target.json {
            outln!(
                "{}",
                json!({"device": device.device_name, "host": device.name, "address": device.address.to_string(),
                    "guid": guid(device)})
            );
        } else {
            outln!("{:<12} {:<12} {:<16} {}", device.device_name, device.name, device.address, guid(device));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The node GUID, as `ibv_devices` prints it.
fn guid(device: &HostDevice) -> String {
    format!("{:016x}", Gid::from(device.address).guid())
}

/// Runs `softhca devinfo`.
pub fn devinfo(arguments: &DevinfoArguments) -> CommandResult {
    let is_selected = |device: &HostDevice| {
        arguments.device.as_ref().is_none_or(|name| device.name == *name || device.device_name == *name)
    };
    let status = arguments.target.connect()?.status()?;
    for host in status.hosts.iter().filter(|host| is_selected(&host.host)) {
        let (device, state) = (&host.host, host.port_state);
        if arguments.target.json {
            outln!("{}", device_attributes(device, state));
            continue;
        }
        let Value::Object(fields) = device_attributes(device, state) else { continue };
        outln!("{}", device.device_name);
        for (name, value) in fields {
            let text = value.as_str().map_or_else(|| value.to_string(), String::from);
            if arguments.verbose || !name.starts_with("max_") {
                outln!("  {name:<24} {text}");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn device_attributes(device: &HostDevice, state: PortState) -> Value {
    let limits = &device.limits;
    let state = if state == PortState::Active { "active" } else { "down" };
    json!({
        "device": device.device_name, "host": device.name, "address": device.address.to_string(), "guid": guid(device),
        "gid": Gid::from(device.address).to_string(), "transport": "RoCEv2", "port": 1, "state": state,
        "recovery": device.recovery, "loopback": device.loopback, "atomics": "HCA", "version": env!("CARGO_PKG_VERSION"),
        "max_clients": limits.max_clients, "max_qp": limits.max_qp, "max_cq": limits.max_cq,
        "max_srq": limits.max_srq, "max_pd": limits.max_pd, "max_mr": limits.max_mr,
        "max_ah": limits.max_ah, "max_xrcd": limits.max_xrcd,
        "max_mcast_grp": limits.max_mcast_grp, "max_mcast_qp_attach": limits.max_mcast_qp_attach,
        "max_qp_wr": limits.max_qp_wr, "max_sge": limits.max_sge, "max_inline_data": limits.max_inline_data,
        "max_cqe": limits.max_cqe, "max_qp_rd_atom": limits.max_qp_rd_atom, "max_msg_sz": limits.max_msg_sz,
    })
}

/// Runs `softhca stats`.
pub fn stats(arguments: &StatsArguments) -> CommandResult {
    let mut control = arguments.target.connect()?;
    let names: Vec<String> = match &arguments.host {
        Some(host) => vec![host.clone()],
        None => control.hosts().iter().map(|device| device.name.clone()).collect(),
    };
    let mut before: Vec<Counters> = vec![Counters::default(); names.len()];
    let mut ports_before = Vec::new();
    loop {
        for (name, before) in names.iter().zip(&mut before) {
            let counters = control.counters(Some(name))?;
            print_counters(arguments, name, before, &counters);
            *before = counters;
        }
        let mut ports = control.ports()?;
        ports.retain(|port| concerns_host(port, arguments.host.as_deref()));
        ports.iter().for_each(|port| print_port(arguments, &ports_before, port));
        ports_before = ports;
        if !arguments.watch {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn print_counters(arguments: &StatsArguments, host: &str, before: &Counters, now: &Counters) {
    let pairs = now.iter().zip(before.iter()).map(|((name, now), (_, before))| (name, now, now - before));
    if arguments.target.json {
        let mut line = Map::new();
        line.insert("host".into(), host.into());
        line.extend(pairs.map(|(name, now, _)| (name.to_string(), json!(now))));
        return outln!("{}", Value::Object(line));
    }
    for (name, now, change) in pairs {
        print_counter(arguments, host, name, now, change);
    }
}

fn print_counter(arguments: &StatsArguments, whose: &str, name: &str, now: u64, change: u64) {
    if arguments.all || (change > 0 && arguments.watch) || (now > 0 && !arguments.watch) {
        let change = if arguments.watch { format!("  +{change}") } else { String::new() };
        outln!("{whose:<12} {name:<32} {now}{change}");
    }
}

/// Whether a port belongs to the host or leads to it.
fn concerns_host(port: &FabricPort, host: Option<&str>) -> bool {
    host.is_none_or(|host| port.node == host || port.peer == host || port.host.as_deref() == Some(host))
}

fn print_port(arguments: &StatsArguments, before: &[FabricPort], port: &FabricPort) {
    let FabricPort { node: at, peer: to, host, counters: counts } = port;
    if arguments.target.json {
        let mut line = Map::new();
        line.insert("port".into(), at.as_str().into());
        line.insert("to".into(), to.as_str().into());
        line.extend(host.iter().map(|host| ("for".into(), host.as_str().into())));
        line.extend(counts.iter().map(|(name, values)| match values[..] {
            [value] => (name.clone(), json!(value)),
            _ => (name.clone(), json!(values)),
        }));
        return outln!("{}", Value::Object(line));
    }
    let is_same = |other: &&FabricPort| (&other.node, &other.peer, &other.host) == (at, to, host);
    let before = before.iter().find(is_same);
    for (index, (name, values)) in counts.iter().enumerate() {
        for (priority, now) in values.iter().enumerate() {
            let previous = before.map_or(0, |port| port.counters[index].1[priority]);
            let name = if values.len() > 1 { format!("{name}.{priority}") } else { name.clone() };
            print_counter(arguments, &format!("{at}:{to}"), &name, *now, now - previous);
        }
    }
}

/// Runs `softhca asyncwatch`.
pub fn asyncwatch(target: &DaemonTarget) -> CommandResult {
    let mut control = target.connect()?;
    control.subscribe_async_events()?;
    loop {
        let seen = control.next_async_event()?;
        if target.json {
            outln!("{}", async_event_json(&seen));
        } else {
            let process = seen.process.map_or_else(|| "all".into(), |process| process.to_string());
            outln!("{:<12} {process:<8} {:?}", seen.host, seen.event);
        }
    }
}

/// An asynchronous event, with the fields that it has in an event log.
fn async_event_json(HostAsyncEvent { host, process, event }: &HostAsyncEvent) -> Value {
    let event = Event::AsyncEventRaised { client: None, event: *event };
    let event = NetworkEvent::Hca { host: HostId(0), event: &event };
    let entry = EntryBuilder::default().entry(Instant::ZERO, &event);
    let mut line = json!({ "host": host, "process": process });
    if let (Value::Object(line), Some(Value::Object(entry))) =
        (&mut line, entry.map(|entry| json!(entry.event)))
        && let Some(Value::Object(data)) = entry.get("data")
    {
        line.extend(data.clone());
    }
    line
}

/// Runs `softhca stop`.
pub fn stop(target: &DaemonTarget) -> CommandResult {
    target.connect()?.stop()?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca::{AsyncEvent, Qpn};

    #[test]
    fn asynchronous_events_are_json_with_the_fields_of_the_event_log() {
        let seen =
            |process, event| async_event_json(&HostAsyncEvent { host: "alice".into(), process, event });
        assert_eq!(
            seen(Some(7), AsyncEvent::QueuePairFatal(Qpn::new(17))),
            json!({"host": "alice", "process": 7, "event": "QP_FATAL", "element": 17})
        );
        assert_eq!(
            seen(None, AsyncEvent::PortActive),
            json!({"host": "alice", "process": null, "event": "PORT_ACTIVE"})
        );
    }
}
