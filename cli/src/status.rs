//! What a daemon tells of itself: `status`, `devices`, `devinfo`, `stats`, `asyncwatch`, `stop`.

use clap::Args;
use serde_json::{Map, Value, json};
use softhca::{Counters, DaemonControl, Error, FabricPort, Gid, HostDevice};
use std::process::ExitCode;
use std::time::Duration;

/// Which daemon, and how to tell.
#[derive(Args)]
pub struct DaemonTarget {
    /// The daemon's name; without one, SOFTHCA_DAEMON or the default one
    #[arg(long)]
    name: Option<String>,
    /// One JSON object per line
    #[arg(long)]
    json: bool,
}

/// What `softhca devinfo` takes.
#[derive(Args)]
pub struct DevinfoArguments {
    #[command(flatten)]
    target: DaemonTarget,
    /// Only this device or host
    device: Option<String>,
    /// Every limit
    #[arg(short, long)]
    verbose: bool,
}

/// What `softhca stats` takes.
#[derive(Args)]
pub struct StatsArguments {
    #[command(flatten)]
    target: DaemonTarget,
    /// Only this host
    #[arg(long)]
    host: Option<String>,
    /// Again every second, and only what changed
    #[arg(long)]
    watch: bool,
    /// Zeros too
    #[arg(long)]
    all: bool,
}

type DaemonResult = Result<(), Error>;

fn exit_code(outcome: DaemonResult) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("softhca: {error}");
            ExitCode::FAILURE
        }
    }
}

impl DaemonTarget {
    fn connect(&self) -> Result<DaemonControl, Error> {
        DaemonControl::connect(self.name.as_deref())
    }
}

/// Runs `softhca status`.
pub fn status(target: &DaemonTarget) -> ExitCode {
    exit_code(print_status(target))
}

fn print_status(target: &DaemonTarget) -> DaemonResult {
    let status = target.connect()?.status()?;
    if !target.json {
        say!("daemon {} version {}, up {} s", status.pid, status.version, status.uptime_s);
    }
    for host in status.hosts {
        let card = &host.host;
        if target.json {
            let clients = host.clients.iter().map(|client| {
                let resources: Map<String, Value> =
                    client.resources.iter().map(|(name, count)| (name.clone(), json!(count))).collect();
                json!({"process": client.pid, "name": client.name, "resources": resources})
            });
            let clients: Vec<Value> = clients.collect();
            say!(
                "{}",
                json!({"process": status.pid, "version": status.version, "uptime": status.uptime_s,
                    "host": card.name, "device": card.device_name, "address": card.address.to_string(),
                    "recovery": card.recovery, "loopback": card.loopback, "queue_pairs": host.queue_pairs,
                    "listening": host.listening_ports, "clients": clients})
            );
            continue;
        }
        say!(
            "{} {} {} recovery {}, loopback {}, {} queue pairs, {} clients",
            card.name,
            card.device_name,
            card.address,
            card.recovery,
            card.loopback,
            host.queue_pairs,
            host.clients.len()
        );
        if !host.listening_ports.is_empty() {
            let ports: Vec<String> = host.listening_ports.iter().map(u16::to_string).collect();
            say!("  listening at {}", ports.join(", "));
        }
        for client in host.clients {
            let used = client.resources.iter().filter(|(_, count)| *count > 0);
            let used: Vec<String> = used.map(|(name, count)| format!("{count} {name}")).collect();
            say!("  process {} ({}): {}", client.pid, client.name, used.join(", "));
        }
    }
    Ok(())
}

/// Runs `softhca devices`.
pub fn devices(target: &DaemonTarget) -> ExitCode {
    exit_code(target.connect().map(|control| {
        for card in control.hosts() {
            if target.json {
                say!(
                    "{}",
                    json!({"device": card.device_name, "host": card.name, "address": card.address.to_string(),
                        "guid": guid(card)})
                );
            } else {
                say!("{:<12} {:<12} {:<16} {}", card.device_name, card.name, card.address, guid(card));
            }
        }
    }))
}

/// The identifier that verbs show, as `ibv_devices` writes it.
fn guid(card: &HostDevice) -> String {
    let low = u64::from_be_bytes(Gid::from(card.address).0[8..].try_into().expect("eight bytes"));
    format!("{:016x}", 0x0200_0000_0000_0000 | low & 0x00ff_ffff_ffff_ffff)
}

/// Runs `softhca devinfo`.
pub fn devinfo(arguments: &DevinfoArguments) -> ExitCode {
    exit_code(arguments.target.connect().map(|control| {
        let wanted = |card: &&HostDevice| {
            arguments.device.as_ref().is_none_or(|name| card.name == *name || card.device_name == *name)
        };
        for card in control.hosts().iter().filter(wanted) {
            if arguments.target.json {
                say!("{}", device_attributes(card));
                continue;
            }
            let Value::Object(fields) = device_attributes(card) else { continue };
            say!("{}", card.device_name);
            for (name, value) in fields {
                let shown = value.as_str().map_or_else(|| value.to_string(), String::from);
                if arguments.verbose || !name.starts_with("max_") {
                    say!("  {name:<24} {shown}");
                }
            }
        }
    }))
}

fn device_attributes(card: &HostDevice) -> Value {
    let limits = &card.limits;
    json!({
        "device": card.device_name, "host": card.name, "address": card.address.to_string(), "guid": guid(card),
        "gid": Gid::from(card.address).to_string(), "transport": "RoCEv2", "port": 1, "state": "active",
        "recovery": card.recovery, "loopback": card.loopback, "atomics": "HCA", "version": env!("CARGO_PKG_VERSION"),
        "max_clients": limits.max_clients, "max_qp": limits.max_qp, "max_cq": limits.max_cq,
        "max_srq": limits.max_srq, "max_pd": limits.max_pd, "max_mr": limits.max_mr,
        "max_ah": limits.max_ah, "max_xrcd": limits.max_xrcd,
        "max_mcast_grp": limits.max_mcast_grp, "max_mcast_qp_attach": limits.max_mcast_qp_attach,
        "max_qp_wr": limits.max_qp_wr, "max_sge": limits.max_sge, "max_inline_data": limits.max_inline_data,
        "max_cqe": limits.max_cqe, "max_qp_rd_atom": limits.max_qp_rd_atom, "max_msg_sz": limits.max_msg_sz,
    })
}

/// Runs `softhca stats`.
pub fn stats(arguments: &StatsArguments) -> ExitCode {
    exit_code(print_stats(arguments))
}

fn print_stats(arguments: &StatsArguments) -> DaemonResult {
    let mut control = arguments.target.connect()?;
    let names: Vec<String> = match &arguments.host {
        Some(host) => vec![host.clone()],
        None => control.hosts().iter().map(|card| card.name.clone()).collect(),
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
            return Ok(());
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
        return say!("{}", Value::Object(line));
    }
    for (name, now, change) in pairs {
        print_counter(arguments, host, name, now, change);
    }
}

fn print_counter(arguments: &StatsArguments, whose: &str, name: &str, now: u64, change: u64) {
    if arguments.all || (change > 0 && arguments.watch) || (now > 0 && !arguments.watch) {
        let change = if arguments.watch { format!("  +{change}") } else { String::new() };
        say!("{whose:<12} {name:<32} {now}{change}");
    }
}

/// Whether a port is the host's own, leads to it, or sends to it.
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
        return say!("{}", Value::Object(line));
    }
    let is_same = |other: &&FabricPort| (&other.node, &other.peer, &other.host) == (at, to, host);
    let before = before.iter().find(is_same);
    for (index, (name, values)) in counts.iter().enumerate() {
        for (priority, now) in values.iter().enumerate() {
            let earlier = before.map_or(0, |port| port.counters[index].1[priority]);
            let name = if values.len() > 1 { format!("{name}.{priority}") } else { name.clone() };
            print_counter(arguments, &format!("{at}:{to}"), &name, *now, now - earlier);
        }
    }
}

/// Runs `softhca asyncwatch`.
pub fn asyncwatch(target: &DaemonTarget) -> ExitCode {
    exit_code(print_async_events(target))
}

fn print_async_events(target: &DaemonTarget) -> DaemonResult {
    let mut control = target.connect()?;
    control.subscribe_async_events()?;
    loop {
        let seen = control.next_async_event()?;
        if target.json {
            let event = format!("{:?}", seen.event);
            say!("{}", json!({"host": seen.host, "process": seen.process, "event": event}));
        } else {
            let process = seen.process.map_or_else(|| "all".into(), |process| process.to_string());
            say!("{:<12} {process:<8} {:?}", seen.host, seen.event);
        }
    }
}

/// Runs `softhca stop`.
pub fn stop(target: &DaemonTarget) -> ExitCode {
    exit_code(target.connect().and_then(DaemonControl::stop))
}
