//! The InfiniBand subnet of a daemon: the options that choose it, its state and its links.

use crate::exit_code::CommandResult;
use clap::Args;
use serde_json::{Map, Value, json};
use softhca::{DaemonControl, Error};
use softhca_control::{SubnetFault, SubnetPortCounter, SubnetRequest, SubnetResponse, SubnetSettings};
use softhca_daemon::{DEFAULT_TOPOLOGY, SubnetConfig, SubnetManager};
use softhca_scenarios::quantity::Time;
use std::process::ExitCode;

/// The network between hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fabric {
    Roce,
    Infiniband,
}

/// The network of a daemon's hosts.
#[derive(Args, Clone, Default)]
pub struct FabricOptions {
    /// Network of the hosts: roce, or infiniband for a subnet that carries management datagrams [default: roce]
    #[arg(long, value_name = "NETWORK", value_parser = parse_fabric)]
    fabric: Option<Fabric>,
    /// Nodes and links of the subnet: a file as ibnetdiscover prints it and ibsim reads it, or one of one-switch:HOSTS,
    /// fat-tree:PORTS, dragonfly:ROUTERSxLINKSxHOSTS, torus:XxY[xZ][:HOSTS], ring:SWITCHES[:HOSTS] [default: one-switch]
    #[arg(long, value_name = "TOPOLOGY", requires = "fabric")]
    topology: Option<String>,
    /// Subnet manager of the subnet: builtin, or none for OpenSM [default: builtin]
    #[arg(long, value_name = "MANAGER", requires = "fabric", value_parser = parse_manager)]
    sm: Option<SubnetManager>,
}

fn parse_fabric(text: &str) -> Result<Fabric, String> {
    match text {
        "roce" => Ok(Fabric::Roce),
        "infiniband" => Ok(Fabric::Infiniband),
        _ => Err("expected roce or infiniband".into()),
    }
}

fn parse_manager(text: &str) -> Result<SubnetManager, String> {
    SubnetManager::from_name(text).ok_or_else(|| "expected builtin or none".into())
}

impl FabricOptions {
    pub fn is_infiniband(&self) -> bool {
        self.fabric == Some(Fabric::Infiniband)
    }

    /// The subnet, if the network is one.
    pub fn subnet(&self) -> Result<Option<SubnetConfig>, String> {
        if !self.is_infiniband() {
            if let Some(option) = self.topology.as_ref().map(|_| "--topology").or(self.sm.map(|_| "--sm")) {
                return Err(format!("{option} needs --fabric infiniband"));
            }
            return Ok(None);
        }
        let topology = self.topology.as_deref().unwrap_or(DEFAULT_TOPOLOGY);
        SubnetConfig::read(topology, self.sm.unwrap_or_default()).map(Some)
    }

    /// The arguments of a daemon with this subnet. It runs in another folder.
    pub fn daemon_arguments(&self) -> Result<Vec<String>, String> {
        let Some(subnet) = self.subnet()? else { return Ok(Vec::new()) };
        let topology = self.topology.as_deref().unwrap_or(DEFAULT_TOPOLOGY);
        let topology = if subnet.name == topology {
            topology.to_owned()
        } else {
            let path = std::fs::canonicalize(topology).map_err(|error| format!("{topology}: {error}"))?;
            path.to_str().ok_or_else(|| format!("{topology}: the path is not UTF-8"))?.to_owned()
        };
        let manager = subnet.manager.name().to_owned();
        Ok(["--fabric", "infiniband", "--topology"]
            .map(String::from)
            .into_iter()
            .chain([topology, "--sm".into(), manager])
            .collect())
    }

    /// Rejects a running daemon with another network.
    pub fn check(&self, running: Option<&SubnetSettings>, name: &str) -> Result<(), String> {
        let differs = |what: &str, current: &str, wanted: &str| {
            let advice = "stop it with `softhca stop`, or start another one with `--name`";
            Err(format!("the running daemon {name:?} has {what} {current}, not {wanted}: {advice}"))
        };
        match (running, self.subnet()?) {
            (None, None) => Ok(()),
            (Some(_), None) => differs("fabric", "infiniband", "roce"),
            (None, Some(_)) => differs("fabric", "roce", "infiniband"),
            (Some(running), Some(_)) if self.sm.is_some_and(|sm| sm.name() != running.sm) => {
                differs("the subnet manager", &running.sm, self.sm.unwrap_or_default().name())
            }
            (Some(running), Some(subnet)) if self.topology.is_some() && subnet.name != running.topology => {
                differs("topology", &running.topology, &subnet.name)
            }
            (Some(_), Some(_)) => Ok(()),
        }
    }
}

/// Begins a fault of a port such as `switch1/3`, or prints the state of the subnet.
pub fn link(control: &mut DaemonControl, change: Option<(&str, SubnetFault)>, json: bool) -> CommandResult {
    let Some((text, fault)) = change else {
        print_status(control, json)?;
        return Ok(ExitCode::SUCCESS);
    };
    let with_port = text.rsplit_once('/').and_then(|(node, port)| Some((node, Some(port.parse().ok()?))));
    let (node, port) = with_port.unwrap_or((text, None));
    control.subnet(SubnetRequest::Inject { node: node.to_owned(), port, fault })?;
    Ok(ExitCode::SUCCESS)
}

/// A fault in the notation of the command line: `down`, `flap=1s,2s,3`, `symbol_error=5`.
pub fn fault(text: &str) -> Result<SubnetFault, String> {
    let (name, value) = match text.split_once('=') {
        None if text == "up" => return Ok(SubnetFault::LinkUp),
        None if text == "down" => return Ok(SubnetFault::LinkDown),
        None => return Err("expected up, down, or a fault of a subnet such as bit-errors=100".into()),
        Some(parts) => parts,
    };
    let time = |text: &str| match text {
        "0" => Ok(0),
        text => text.parse::<Time>().map(|time| time.0),
    };
    let number = |text: &str| {
        let number = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        };
        number.ok_or_else(|| format!("{text:?} is not a number"))
    };
    let every = |text: &str| text.parse().map_err(|_| format!("{text:?} is not a number of packets"));
    Ok(match name {
        "flap" => {
            let [down, up, times] = value.split(',').collect::<Vec<_>>()[..] else {
                return Err("expected flap=DOWN,UP,TIMES, such as flap=1s,2s,3".into());
            };
            let times = times.parse().map_err(|_| format!("{times:?} is not a number of times"))?;
            SubnetFault::Flap { down: time(down)?, up: time(up)?, times }
        }
        "bit-errors" => SubnetFault::BitErrors { every: every(value)? },
        "lose-smps" => SubnetFault::LoseSmps { every: every(value)? },
        "slow-agent" => SubnetFault::SlowAgent { delay: time(value)? },
        "m-key" => SubnetFault::ManagementKey { key: number(value)? },
        "reboot" => SubnetFault::Reboot { down: time(value)? },
        name => {
            let names = || SubnetPortCounter::ALL.map(SubnetPortCounter::name).join(", ");
            let counter = SubnetPortCounter::from_name(name);
            let counter = counter.ok_or_else(|| {
                format!(
                    "unknown fault {name:?}; faults are flap, bit-errors, lose-smps, slow-agent, m-key, reboot, and \
                     the counters {}",
                    names()
                )
            })?;
            SubnetFault::Count { counter, count: number(value)? }
        }
    })
}

/// Prints the size and the state of the subnet.
pub fn print_status(control: &mut DaemonControl, json: bool) -> Result<(), Error> {
    let (SubnetResponse::Status(status), _) = control.subnet(SubnetRequest::Status)? else { return Ok(()) };
    let SubnetSettings { topology, sm } = &status.settings;
    if json {
        let dropped: Map<String, Value> =
            status.dropped.into_iter().map(|(reason, count)| (reason, json!(count))).collect();
        outln!(
            "{}",
            json!({"fabric": "infiniband", "topology": topology, "sm": sm, "hosts": status.hosts, "hcas": status.hcas,
                "switches": status.switches, "active_ports": status.active_ports, "open_ports": status.open_ports,
                "dropped": dropped})
        );
        return Ok(());
    }
    outln!(
        "infiniband {topology} sm {sm}: {} hosts, {} HCAs with {} active ports, {} switches, {} ports open",
        status.hosts,
        status.hcas,
        status.active_ports,
        status.switches,
        status.open_ports
    );
    for (reason, count) in status.dropped {
        outln!("  MADs dropped, {reason}: {count}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_as_they_are_documented() {
        for (text, expected) in [
            ("up", SubnetFault::LinkUp),
            ("flap=1s,20ms,3", SubnetFault::Flap { down: 1_000_000_000, up: 20_000_000, times: 3 }),
            ("bit-errors=100", SubnetFault::BitErrors { every: 100 }),
            ("m-key=0x12", SubnetFault::ManagementKey { key: 0x12 }),
            ("slow-agent=0", SubnetFault::SlowAgent { delay: 0 }),
            ("reboot=5s", SubnetFault::Reboot { down: 5_000_000_000 }),
            ("symbol_error=7", SubnetFault::Count { counter: SubnetPortCounter::SymbolErrors, count: 7 }),
        ] {
            assert_eq!(fault(text), Ok(expected), "{text}");
        }
        for (text, why) in [
            ("sideways", "expected up, down"),
            ("flap=1s,2s", "flap=DOWN,UP,TIMES"),
            ("flap=1s,2s,often", "not a number of times"),
            ("reboot=5", "unit"),
            ("m-key=0xz", "not a number"),
            ("symbol_errors=1", "symbol_error,"),
        ] {
            assert!(fault(text).is_err_and(|error| error.contains(why)), "{text}: {:?}", fault(text));
        }
    }
}
