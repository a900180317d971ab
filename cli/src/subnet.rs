//! The InfiniBand subnet of a daemon: the options that choose it, its state and its links.

use crate::exit_code::{CommandResult, bad_input};
use clap::Args;
use serde_json::{Map, Value, json};
use softhca::{DaemonControl, Error};
use softhca_control::{SubnetRequest, SubnetResponse, SubnetSettings};
use softhca_daemon::{DEFAULT_TOPOLOGY, SubnetConfig, SubnetManager};
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

/// Breaks or repairs the link of a port such as `switch1/3`, or prints the state of the subnet.
pub fn link(control: &mut DaemonControl, change: Option<(&str, bool)>, json: bool) -> CommandResult {
    let Some((text, works)) = change else {
        print_status(control, json)?;
        return Ok(ExitCode::SUCCESS);
    };
    let port = text.rsplit_once('/').and_then(|(node, port)| Some((node.to_owned(), port.parse().ok()?)));
    let expected = || format!("{text:?} is not a node and a port, such as switch1/3");
    let (node, port) = port.ok_or_else(expected).map_err(bad_input)?;
    control.subnet(SubnetRequest::SetLink { node, port, works })?;
    Ok(ExitCode::SUCCESS)
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
