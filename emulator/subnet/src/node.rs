//! The attributes and tables of a node.

use crate::packet::DEFAULT_P_KEY;
use crate::performance::PortCounters;
use crate::topology::{NodeKind, TopologyNode};
use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;
use softhca_wire::smp::{
    Block, Lid, NodeDescription, NodeInfo, NodeType, PhysicalState, PortCapabilities, PortInfo, PortState,
    SlToVl, SwitchInfo, VlArbitration,
};

/// Entries of the partition table of a port, in whole blocks of 32.
pub const P_KEYS: u16 = 128;
/// Entries of the linear forwarding table: all unicast LIDs.
pub const LINEAR_CAP: u16 = Lid::MAX_UNICAST.0;
/// Entries of the multicast forwarding table.
pub const MULTICAST_CAP: u16 = 1024;
/// The port that stands for none in a forwarding table.
pub const NO_PORT: u8 = 255;
/// The bit of a P_Key that says full membership.
const FULL_MEMBER: u16 = 0x8000;
/// An OUI of the locally administered ones: no device of a vendor has it.
const VENDOR_ID: u32 = 0x02_5f1c;
/// The prefix of GIDs that no manager has changed.
const DEFAULT_PREFIX: u64 = 0xfe80 << 48;
/// 4.096 µs · 2^18 is about a second.
const DEFAULT_SUBNET_TIMEOUT: u8 = 18;

/// A port with its tables.
pub struct Port {
    pub info: PortInfo,
    pub guids: [u64; 8],
    pub p_keys: Vec<u16>,
    pub arbitration: [VlArbitration; 4],
    /// The SLtoVL table of an HCA's port.
    pub sl_to_vl: SlToVl,
    /// Switched off by a Set of the physical state.
    pub is_disabled: bool,
    /// When the protection of the M_Key ends after a violation.
    pub lease_end: Option<u64>,
    pub counters: PortCounters,
    /// Counts the requests of the manager to register again.
    pub reregistrations: u32,
}

/// The tables that only a switch has.
pub struct Forwarding {
    pub info: SwitchInfo,
    /// Grows up to the last block that a manager has written.
    pub linear: Vec<u8>,
    /// Written blocks by block number and position of 16 ports.
    pub multicast: BTreeMap<(u16, u8), Block>,
    /// Written tables by input and output port.
    pub sl_to_vl: BTreeMap<(u8, u8), SlToVl>,
}

/// A node.
pub struct Node {
    pub info: NodeInfo,
    pub description: NodeDescription,
    /// Index 0 is the management port of a switch, and unused in an HCA.
    pub ports: Vec<Port>,
    pub forwarding: Option<Forwarding>,
}

impl Node {
    pub fn new(node: &TopologyNode) -> Node {
        let is_switch = node.kind == NodeKind::Switch;
        let info = NodeInfo {
            base_version: 1,
            class_version: 1,
            node_type: if is_switch { NodeType::SWITCH } else { NodeType::CHANNEL_ADAPTER },
            port_count: node.port_count(),
            system_image_guid: node.guid,
            node_guid: node.guid,
            port_guid: node.guid,
            partition_cap: P_KEYS,
            device_id: 0,
            revision: 0,
            local_port: 0,
            vendor_id: VENDOR_ID,
        };
        let ports =
            (0..=node.port_count()).map(|port| Port::new(is_switch, port, node.port_guid(port))).collect();
        let forwarding = is_switch.then(|| Forwarding {
            info: SwitchInfo {
                linear_cap: LINEAR_CAP,
                multicast_cap: MULTICAST_CAP,
                partition_enforcement_cap: P_KEYS,
                inbound_enforcement: true,
                outbound_enforcement: true,
                lifetime: 18,
                ..SwitchInfo::default()
            },
            linear: Vec::new(),
            multicast: BTreeMap::new(),
            sl_to_vl: BTreeMap::new(),
        });
        Node { info, description: NodeDescription::new(&node.description), ports, forwarding }
    }

    pub fn is_switch(&self) -> bool {
        self.forwarding.is_some()
    }

    /// The port with the LID and M_Key of a packet that arrived at this one.
    pub fn management_port(&self, arrived: u8) -> u8 {
        if self.is_switch() { 0 } else { arrived }
    }

    /// The output port of a unicast LID.
    pub fn output_port(&self, lid: Lid) -> Option<u8> {
        let forwarding = self.forwarding.as_ref()?;
        let is_routed = lid.0 <= forwarding.info.linear_top;
        let port = forwarding.linear.get(usize::from(lid.0)).copied().filter(|_| is_routed)?;
        (port <= self.info.port_count).then_some(port)
    }
}

impl Port {
    fn new(is_switch: bool, number: u8, guid: u64) -> Port {
        let is_management_port = is_switch && number == 0;
        let mut capabilities = PortCapabilities::TRAP
            | PortCapabilities::NOTICE
            | PortCapabilities::SL_MAPPING
            | PortCapabilities::SYSTEM_IMAGE_GUID
            | PortCapabilities::EXTENDED_SPEEDS
            | PortCapabilities::CAPABILITY_MASK_NOTICE
            | PortCapabilities::CLIENT_REREGISTRATION;
        if !is_switch {
            capabilities |= PortCapabilities::COMMUNICATION_MANAGEMENT | PortCapabilities::VENDOR_CLASS;
        }
        let has_link_layer = !is_management_port;
        let info = PortInfo {
            gid_prefix: DEFAULT_PREFIX,
            capabilities,
            width_enabled: 3,
            width_supported: 3,
            width_active: 2,
            speed_supported: 7,
            speed_active: 4,
            speed_enabled: 7,
            extended_speed_supported: 3,
            extended_speed_enabled: 3,
            extended_speed_active: 2,
            state: if has_link_layer { PortState::DOWN } else { PortState::ACTIVE },
            physical_state: if has_link_layer { PhysicalState::POLLING } else { PhysicalState::LINK_UP },
            down_default: PhysicalState::POLLING,
            neighbor_mtu: 5,
            mtu_cap: 5,
            vl_cap: 4,
            operational_vls: 4,
            vl_arbitration_high_cap: 8,
            vl_arbitration_low_cap: 8,
            guid_cap: 8,
            subnet_timeout: DEFAULT_SUBNET_TIMEOUT,
            response_time: 16,
            local_physical_errors: 8,
            overrun_errors: 8,
            ..PortInfo::default()
        };
        let mut p_keys = vec![0; P_KEYS.into()];
        p_keys[0] = DEFAULT_P_KEY;
        let mut guids = [0; 8];
        guids[0] = guid;
        Port {
            info,
            guids,
            p_keys,
            arbitration: [VlArbitration::default(); 4],
            sl_to_vl: default_sl_to_vl(),
            is_disabled: false,
            lease_end: None,
            counters: PortCounters::default(),
            reregistrations: 0,
        }
    }

    /// Whether the partition table has a key, where one side at least is a full member.
    pub fn accepts(&self, key: u16) -> bool {
        self.p_keys.iter().any(|own| {
            (own ^ key) & !FULL_MEMBER == 0 && own & !FULL_MEMBER != 0 && (own | key) & FULL_MEMBER != 0
        })
    }
}

/// Service levels spread over the eight data VLs.
pub fn default_sl_to_vl() -> SlToVl {
    SlToVl(core::array::from_fn(|sl| sl as u8 % 8))
}
