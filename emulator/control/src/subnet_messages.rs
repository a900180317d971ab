//! Messages about the InfiniBand subnet of a daemon.

use crate::HostDevice;
use alloc::string::String;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};
pub use softhca_subnet::{Fault as SubnetFault, PortCounter as SubnetPortCounter};

/// The subnet of a daemon, as its settings name it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubnetSettings {
    /// The generator, or the path and the checksum of the topology file.
    pub topology: String,
    /// The subnet manager of the daemon: `builtin` or `none`.
    pub sm: String,
}

/// A request about the subnet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SubnetRequest {
    /// The HCAs of a host; without a name, of the first host.
    Hcas {
        /// The name of the host.
        host: Option<String>,
    },
    /// The verbs devices of a host; without a name, of the first host.
    Devices {
        /// The name of the host.
        host: Option<String>,
    },
    /// Opens a port of an HCA for MADs. The stream that carries them accompanies the response. A connection opens one
    /// port.
    OpenPort {
        /// The name of the host.
        host: Option<String>,
        /// The index of the HCA among those of the host.
        hca: u32,
        /// The number of the port.
        port: u8,
    },
    /// Registers an agent at the open port.
    RegisterAgent(AgentRegistration),
    /// Removes an agent.
    UnregisterAgent(u32),
    /// Creates what the programs of a host see of its HCAs in `/sys` and `/dev`.
    CreateView {
        /// The name of the host.
        host: Option<String>,
    },
    /// Begins a fault.
    Inject {
        /// The description of the node.
        node: String,
        /// The number of the port; `None` for the switch itself, or the first port of an HCA.
        port: Option<u8>,
        /// The fault.
        fault: SubnetFault,
    },
    /// The size and the state of the subnet.
    Status,
}

/// Which MADs an agent takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRegistration {
    /// The management class.
    pub mgmt_class: u8,
    /// The version of the class.
    pub class_version: u8,
    /// The methods of requests, one bit each.
    pub methods: [u64; 2],
    /// The OUI of a vendor class.
    pub oui: [u8; 3],
    /// The version of RMPP that the card executes for the agent; zero for none.
    pub rmpp_version: u8,
}

/// A response about the subnet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SubnetResponse {
    /// The request was executed.
    Done,
    /// The HCAs of a host.
    Hcas {
        /// The name of the host.
        host: String,
        /// Its HCAs.
        hcas: Vec<SubnetHca>,
    },
    /// The verbs devices of a host, in the order of its HCAs.
    Devices(Vec<HostDevice>),
    /// The number of the new agent.
    Agent(u32),
    /// The folder of a host's view.
    View(String),
    /// The size and the state of the subnet.
    Status(SubnetStatus),
}

/// An HCA of the subnet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubnetHca {
    /// The node GUID.
    pub node_guid: u64,
    /// Its ports: number 1 is the first.
    pub ports: Vec<SubnetPort>,
}

impl SubnetHca {
    /// The name of a host's HCA on that host.
    pub fn device_name(index: usize) -> String {
        alloc::format!("softhca{index}")
    }
}

/// A port of an HCA. Numbers have the codes of PortInfo.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is the field of PortInfo of its name")]
pub struct SubnetPort {
    pub lid: u16,
    pub lmc: u8,
    pub sm_lid: u16,
    pub sm_sl: u8,
    pub state: u8,
    pub physical_state: u8,
    /// Gb/s.
    pub rate: u32,
    pub capabilities: u32,
    pub gid_prefix: u64,
    pub guid: u64,
    pub p_keys: Vec<u16>,
}

/// The size and the state of a subnet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubnetStatus {
    /// The settings.
    pub settings: SubnetSettings,
    /// The number of hosts.
    pub hosts: u32,
    /// The number of HCAs.
    pub hcas: u32,
    /// The number of switches.
    pub switches: u32,
    /// Ports of HCAs in state Active.
    pub active_ports: u32,
    /// Ports that programs have open.
    pub open_ports: u32,
    /// MADs that were dropped, by reason; those without any are left out.
    pub dropped: Vec<(String, u64)>,
}
