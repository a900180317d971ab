//! `softhca link` and `softhca resource`: what `rdma link` and `rdma resource` show and change for devices of the kernel.

use crate::exit_code::{CommandResult, bad_input};
use crate::status::DaemonTarget;
use crate::subnet;
use clap::Args;
use serde_json::{Map, Value, json};
use softhca::{HostStatus, PortState};
use softhca_control::SubnetFault;
use std::process::ExitCode;
use std::str::FromStr;

/// Arguments of `softhca link`.
#[derive(Args)]
pub struct LinkArguments {
    #[command(flatten)]
    target: DaemonTarget,
    /// Only this device or host; in an InfiniBand subnet a node and its port, such as switch1/3
    device: Option<String>,
    /// Take the port of the device down, or bring it up; it stays so while the daemon runs. A port of an InfiniBand subnet
    /// takes faults, too: flap=DOWN,UP,TIMES, bit-errors=EVERY, lose-smps=EVERY, slow-agent=TIME, m-key=KEY, reboot=TIME, or
    /// COUNTER=COUNT
    #[arg(requires = "device", value_name = "up|down|FAULT")]
    change: Option<LinkChange>,
}

#[derive(Clone)]
struct LinkChange(SubnetFault);

impl FromStr for LinkChange {
    type Err = String;

    fn from_str(text: &str) -> Result<LinkChange, String> {
        subnet::fault(text).map(LinkChange)
    }
}

/// Arguments of `softhca resource`.
#[derive(Args)]
pub struct ResourceArguments {
    #[command(flatten)]
    target: DaemonTarget,
    /// Only this device or host
    device: Option<String>,
    /// List the queue pairs instead of counting objects
    #[arg(long)]
    qp: bool,
}

/// The objects of a device, with the names of `rdma resource` and of `softhca status`.
const OBJECTS: [(&str, &str); 6] = [
    ("pd", "protection domain"),
    ("cq", "completion queue"),
    ("qp", "queue pair"),
    ("cm_id", "connection identifier"),
    ("mr", "memory region"),
    ("srq", "shared receive queue"),
];

fn is_selected(status: &HostStatus, wanted: Option<&String>) -> bool {
    let device = &status.host;
    wanted.is_none_or(|name| [&device.name, &device.host, &device.device_name].contains(&name))
}

/// Runs `softhca link`.
pub fn link(arguments: &LinkArguments) -> CommandResult {
    let mut control = arguments.target.connect()?;
    if control.subnet_settings().is_some() {
        let fault = arguments.change.as_ref().map(|LinkChange(fault)| *fault);
        return subnet::link(&mut control, arguments.device.as_deref().zip(fault), arguments.target.json);
    }
    if let (Some(device), Some(LinkChange(change))) = (&arguments.device, &arguments.change) {
        let state = match change {
            SubnetFault::LinkUp => PortState::Active,
            SubnetFault::LinkDown => PortState::Down,
            _ => {
                return Err(bad_input(
                    "a RoCE device is up or down; other faults need --fabric infiniband, or a scenario",
                ));
            }
        };
        control.set_link(device, state)?;
        return Ok(ExitCode::SUCCESS);
    }
    for status in control.status()?.hosts.iter().filter(|host| is_selected(host, arguments.device.as_ref())) {
        let device = &status.host;
        let (state, physical) = match status.port_state {
            PortState::Active => ("ACTIVE", "LINK_UP"),
            PortState::Down => ("DOWN", "DISABLED"),
        };
        let interface = softhca_udp::interface_of(device.address).map(|found| found.name);
        let interface = interface.unwrap_or_default();
        if arguments.target.json {
            outln!(
                "{}",
                json!({"device": device.device_name, "host": device.host, "port": 1, "state": state,
                    "physical_state": physical, "netdev": interface, "address": device.address.to_string()})
            );
        } else {
            outln!(
                "link {}/1 state {state} physical_state {physical} netdev {interface} address {} host {}",
                device.device_name,
                device.address,
                device.host
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `softhca resource`.
pub fn resource(arguments: &ResourceArguments) -> CommandResult {
    let mut control = arguments.target.connect()?;
    let hosts = control.status()?.hosts;
    for status in hosts.iter().filter(|host| is_selected(host, arguments.device.as_ref())) {
        if arguments.qp {
            for qp in control.queue_pairs(&status.host.name)? {
                let name = status.clients.iter().find(|client| Some(client.pid) == qp.pid);
                let name = name.map_or("", |client| client.name.as_str());
                let fields = [
                    ("lqpn", json!(qp.qpn.value())),
                    ("rqpn", json!(qp.dest_qpn.value())),
                    ("type", json!(qp.qp_type)),
                    ("state", json!(qp.state.name())),
                    ("rq_psn", json!(qp.expected_psn.value())),
                    ("sq_psn", json!(qp.next_psn.value())),
                    ("outstanding", json!(qp.outstanding)),
                    ("pid", json!(qp.pid)),
                    ("comm", json!(name)),
                ];
                print_object(arguments, &status.host.device_name, "/1", &fields);
            }
            continue;
        }
        let count = |name: &str| {
            let counts = status.clients.iter().flat_map(|client| &client.resources);
            counts.filter(|(other, _)| other == name).map(|(_, count)| count).sum::<u32>()
        };
        let mut fields = OBJECTS.map(|(short, name)| (short, json!(count(name)))).to_vec();
        fields.push(("ctx", json!(status.clients.len())));
        print_object(arguments, &status.host.device_name, "", &fields);
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints an object as JSON, or as the device and pairs of name and value.
fn print_object(arguments: &ResourceArguments, device: &str, port: &str, fields: &[(&str, Value)]) {
    if arguments.target.json {
        let fields = fields.iter().map(|(name, value)| (name.to_string(), value.clone()));
        let object: Map<String, Value> =
            [("device".into(), json!(device))].into_iter().chain(fields).collect();
        return outln!("{}", Value::Object(object));
    }
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), String::from);
    let pairs: Vec<String> = fields.iter().map(|(name, value)| format!("{name} {}", text(value))).collect();
    outln!("{device}{port}: {}", pairs.join(" "));
}
