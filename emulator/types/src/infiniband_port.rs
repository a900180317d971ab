//! The port of a device on an InfiniBand subnet.

use alloc::vec::Vec;
use softhca_wire::smp::{Lid, PortInfo, PortState};
use softhca_wire::{Gid, Mtu, PartitionKey};

/// The attributes and tables of an InfiniBand port, as its subnet manager has set them. Numbers without a type of their own
/// have the codes of PortInfo.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the field of PortInfo of its name")]
pub struct InfiniBandPort {
    pub node_guid: u64,
    pub lid: u16,
    pub lmc: u8,
    pub sm_lid: u16,
    pub sm_sl: u8,
    pub state: u8,
    pub physical_state: u8,
    pub capabilities: u32,
    pub mtu_cap: u8,
    pub neighbor_mtu: u8,
    pub vl_cap: u8,
    pub width_active: u8,
    pub speed_active: u8,
    pub extended_speed_active: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub p_key_violations: u16,
    pub q_key_violations: u16,
    /// Gb/s.
    pub rate: u32,
    /// The GID table: the prefix of the subnet with each GUID of the port. Unused entries are zero.
    pub gids: Vec<Gid>,
    /// The P_Key table. Unused entries are zero.
    pub p_keys: Vec<u16>,
    /// How often the manager has asked programs to register again.
    pub reregistrations: u32,
}

impl InfiniBandPort {
    /// The port with these attributes and tables.
    pub fn new(node_guid: u64, info: &PortInfo, guids: &[u64], p_keys: &[u16], reregistrations: u32) -> Self {
        let gid = |guid: &u64| match guid {
            0 => Gid::default(),
            guid => Gid((u128::from(info.gid_prefix) << 64 | u128::from(*guid)).to_be_bytes()),
        };
        InfiniBandPort {
            node_guid,
            lid: info.lid.0,
            lmc: info.lmc,
            sm_lid: info.sm_lid.0,
            sm_sl: info.sm_sl,
            state: info.state.0,
            physical_state: info.physical_state.0,
            capabilities: info.capabilities.bits(),
            mtu_cap: info.mtu_cap,
            neighbor_mtu: info.neighbor_mtu,
            vl_cap: info.vl_cap,
            width_active: info.width_active,
            speed_active: info.speed_active,
            extended_speed_active: info.extended_speed_active,
            subnet_timeout: info.subnet_timeout,
            init_type_reply: info.init_type_reply,
            p_key_violations: info.p_key_violations,
            q_key_violations: info.q_key_violations,
            rate: info.rate(),
            gids: guids.iter().map(gid).collect(),
            p_keys: p_keys.to_vec(),
            reregistrations,
        }
    }

    /// Whether data may be sent.
    pub fn is_active(&self) -> bool {
        self.state == PortState::ACTIVE.0
    }

    /// The MTU that the manager has set for the link.
    pub fn active_mtu(&self) -> Mtu {
        Mtu::from_code(self.neighbor_mtu).unwrap_or(Mtu::B256)
    }

    /// One of the LIDs of the port.
    pub fn lid_with(&self, path_bits: u8) -> Lid {
        Lid(self.lid | u16::from(path_bits & self.path_bits_mask()))
    }

    /// The bits of a LID that choose the path.
    pub fn path_bits_mask(&self) -> u8 {
        ((1u16 << self.lmc.min(7)) - 1) as u8
    }

    /// The P_Key at an index, if the table has one there.
    pub fn p_key(&self, index: u16) -> Option<PartitionKey> {
        let key = self.p_keys.get(usize::from(index)).copied()?;
        (key & 0x7fff != 0).then_some(PartitionKey(key))
    }
}
