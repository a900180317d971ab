//! The subnet management agent of a node: what Get and Set of each attribute do (IBA 14.2.5).

use crate::node::{Forwarding, LINEAR_CAP, MULTICAST_CAP, NO_PORT, Node, P_KEYS, Port, default_sl_to_vl};
use softhca_wire::smp::{
    Attribute, AttributeId, Block, GuidTable, Lid, NodeInfo, PartitionKeyTable, PhysicalState, PortInfo,
    PortState, SlToVl, Status, SwitchInfo, VlArbitration,
};

/// LIDs in a block of the linear forwarding table.
const LINEAR_BLOCK: usize = Block::LEN;
/// LIDs in a block of the multicast forwarding table.
const MULTICAST_BLOCK: u16 = 32;

/// The effect of a Set of PortInfo on the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkCommand {
    /// The link goes down and trains again.
    Reset(u8),
    /// The link stays down.
    Disable(u8),
    /// The link may train.
    Enable(u8),
}

impl Node {
    /// Answers a Get that arrived at a port.
    pub fn get(&self, id: AttributeId, modifier: u32, arrived: u8) -> Result<Block, Status> {
        Ok(match id {
            AttributeId::NodeDescription => self.description.to_block(),
            AttributeId::NodeInfo => {
                let port_guid = self.ports[usize::from(self.management_port(arrived))].guids[0];
                NodeInfo { port_guid, local_port: arrived, ..self.info }.to_block()
            }
            AttributeId::SwitchInfo => self.forwarding()?.info.to_block(),
            AttributeId::PortInfo => {
                let (_, port) = self.port(modifier, arrived)?;
                PortInfo { local_port: arrived, ..port.info }.to_block()
            }
            AttributeId::GuidInfo if modifier == 0 => {
                let port = &self.ports[usize::from(self.management_port(arrived))];
                GuidTable(port.guids).to_block()
            }
            AttributeId::PKeyTable => {
                let (port, first) = self.partition_block(modifier, arrived)?;
                let keys = &self.ports[port].p_keys[first..first + 32];
                PartitionKeyTable(keys.try_into().expect("a whole block")).to_block()
            }
            AttributeId::SlToVlMappingTable => match &self.forwarding {
                Some(forwarding) => {
                    let written = forwarding.sl_to_vl.get(&self.port_pair(modifier)?);
                    written.copied().unwrap_or_else(default_sl_to_vl).to_block()
                }
                None => self.ports[usize::from(arrived)].sl_to_vl.to_block(),
            },
            AttributeId::VlArbitrationTable => {
                let (port, part) = self.arbitration_part(modifier, arrived)?;
                self.ports[port].arbitration[part].to_block()
            }
            AttributeId::LinearForwardingTable => {
                let first = linear_block(modifier)?;
                let table = &self.forwarding()?.linear;
                Block(core::array::from_fn(|index| table.get(first + index).copied().unwrap_or(NO_PORT)))
            }
            AttributeId::MulticastForwardingTable => {
                let written = self.forwarding()?.multicast.get(&self.multicast_block(modifier)?);
                written.copied().unwrap_or_default()
            }
            AttributeId::GuidInfo => return Err(Status::INVALID_FIELD),
            AttributeId::Notice | AttributeId::SmInfo => return Err(Status::UNSUPPORTED_ATTRIBUTE),
        })
    }

    /// Executes a Set. If it fails, nothing has changed.
    pub fn set(
        &mut self,
        id: AttributeId,
        modifier: u32,
        arrived: u8,
        data: &Block,
    ) -> Result<Option<LinkCommand>, Status> {
        match id {
            AttributeId::PortInfo => {
                let number = self.port(modifier, arrived)?.0;
                let is_management_port = self.is_switch() && number == 0;
                return set_port_info(
                    &mut self.ports[usize::from(number)].info,
                    &PortInfo::from_block(data),
                    number,
                    is_management_port,
                );
            }
            AttributeId::SwitchInfo => {
                let forwarding = self.forwarding.as_mut().ok_or(Status::UNSUPPORTED_ATTRIBUTE)?;
                set_switch_info(&mut forwarding.info, &SwitchInfo::from_block(data))?;
            }
            AttributeId::GuidInfo if modifier == 0 => {
                let number = self.management_port(arrived);
                let port = &mut self.ports[usize::from(number)];
                // The first one is the hardware's.
                port.guids[1..].copy_from_slice(&GuidTable::from_block(data).0[1..]);
            }
            AttributeId::PKeyTable => {
                let (port, first) = self.partition_block(modifier, arrived)?;
                let keys = PartitionKeyTable::from_block(data).0;
                self.ports[port].p_keys[first..first + 32].copy_from_slice(&keys);
            }
            AttributeId::SlToVlMappingTable => {
                let table = SlToVl::from_block(data);
                if self.is_switch() {
                    let pair = self.port_pair(modifier)?;
                    self.forwarding.iter_mut().for_each(|forwarding| {
                        forwarding.sl_to_vl.insert(pair, table);
                    });
                } else {
                    self.ports[usize::from(arrived)].sl_to_vl = table;
                }
            }
            AttributeId::VlArbitrationTable => {
                let (port, part) = self.arbitration_part(modifier, arrived)?;
                self.ports[port].arbitration[part] = VlArbitration::from_block(data);
            }
            AttributeId::LinearForwardingTable => {
                let first = linear_block(modifier)?;
                let table = &mut self.forwarding.as_mut().ok_or(Status::UNSUPPORTED_ATTRIBUTE)?.linear;
                if table.len() < first + LINEAR_BLOCK {
                    table.resize(first + LINEAR_BLOCK, NO_PORT);
                }
                table[first..first + LINEAR_BLOCK].copy_from_slice(&data.0);
            }
            AttributeId::MulticastForwardingTable => {
                let key = self.multicast_block(modifier)?;
                self.forwarding.as_mut().ok_or(Status::UNSUPPORTED_ATTRIBUTE)?.multicast.insert(key, *data);
            }
            AttributeId::GuidInfo => return Err(Status::INVALID_FIELD),
            AttributeId::NodeDescription | AttributeId::NodeInfo => return Err(Status::UNSUPPORTED_METHOD),
            AttributeId::Notice | AttributeId::SmInfo => return Err(Status::UNSUPPORTED_ATTRIBUTE),
        }
        Ok(None)
    }

    fn forwarding(&self) -> Result<&Forwarding, Status> {
        self.forwarding.as_ref().ok_or(Status::UNSUPPORTED_ATTRIBUTE)
    }

    /// The port that a modifier names. The highest bit only says that the manager knows extended speeds.
    fn port(&self, modifier: u32, arrived: u8) -> Result<(u8, &Port), Status> {
        let number = match modifier & 0x7fff_ffff {
            0 if !self.is_switch() => arrived.into(),
            number => number,
        };
        let first = u32::from(!self.is_switch());
        let port = self.ports.get(number as usize).filter(|_| number >= first);
        port.map(|port| (number as u8, port)).ok_or(Status::INVALID_FIELD)
    }

    /// The port and the first entry of a block of partition keys.
    fn partition_block(&self, modifier: u32, arrived: u8) -> Result<(usize, usize), Status> {
        let port = if self.is_switch() { modifier >> 16 } else { arrived.into() } as usize;
        let first = (modifier & 0xffff) as usize * 32;
        let is_valid = port < self.ports.len() && first < P_KEYS.into();
        is_valid.then_some((port, first)).ok_or(Status::INVALID_FIELD)
    }

    /// The input and output port of an SLtoVL table.
    fn port_pair(&self, modifier: u32) -> Result<(u8, u8), Status> {
        let (input, output) = ((modifier >> 8) as u8, modifier as u8);
        let is_valid = input.max(output) <= self.info.port_count;
        is_valid.then_some((input, output)).ok_or(Status::INVALID_FIELD)
    }

    /// The port and the quarter of its arbitration tables.
    fn arbitration_part(&self, modifier: u32, arrived: u8) -> Result<(usize, usize), Status> {
        let port = if self.is_switch() { modifier & 0xffff } else { arrived.into() } as usize;
        let part = (modifier >> 16) as usize;
        let is_valid = port < self.ports.len() && (1..=4).contains(&part);
        if is_valid { Ok((port, part - 1)) } else { Err(Status::INVALID_FIELD) }
    }

    /// The block number and position in the multicast forwarding table.
    fn multicast_block(&self, modifier: u32) -> Result<(u16, u8), Status> {
        let (block, position) = ((modifier & 0x1ff) as u16, (modifier >> 28) as u8);
        let is_valid = block < MULTICAST_CAP / MULTICAST_BLOCK && position <= self.info.port_count / 16;
        is_valid.then_some((block, position)).ok_or(Status::INVALID_FIELD)
    }
}

/// The first LID of a block.
fn linear_block(modifier: u32) -> Result<usize, Status> {
    let is_valid = modifier as usize <= usize::from(LINEAR_CAP) / LINEAR_BLOCK;
    is_valid.then_some(modifier as usize * LINEAR_BLOCK).ok_or(Status::INVALID_FIELD)
}

fn set_switch_info(info: &mut SwitchInfo, new: &SwitchInfo) -> Result<(), Status> {
    if new.linear_top > LINEAR_CAP {
        return Err(Status::INVALID_FIELD);
    }
    *info = SwitchInfo {
        linear_top: new.linear_top,
        default_port: new.default_port,
        default_multicast_primary: new.default_multicast_primary,
        default_multicast_not_primary: new.default_multicast_not_primary,
        lifetime: new.lifetime,
        // Writing 1 clears it.
        state_change: info.state_change && !new.state_change,
        multicast_top: new.multicast_top,
        ..*info
    };
    Ok(())
}

/// An enabled width or speed: 0 keeps the value, all ones stand for all supported ones.
fn enabled(current: u8, new: u8, supported: u8, all: u8) -> Result<u8, Status> {
    match new {
        0 => Ok(current),
        new if new == all => Ok(supported),
        new if new & !supported == 0 => Ok(new),
        _ => Err(Status::INVALID_FIELD),
    }
}

fn set_port_info(
    info: &mut PortInfo,
    new: &PortInfo,
    port: u8,
    is_management_port: bool,
) -> Result<Option<LinkCommand>, Status> {
    let is_lid = |lid: Lid| lid == Lid(0) || lid.is_unicast();
    let is_within = |value: u8, highest: u8| value <= highest;
    if !is_lid(new.lid)
        || !is_lid(new.sm_lid)
        || !is_within(new.neighbor_mtu, info.mtu_cap)
        || !is_within(new.operational_vls, info.vl_cap)
        || usize::from(new.lid.0) + (1 << new.lmc) > usize::from(LINEAR_CAP) + 1
    {
        return Err(Status::INVALID_FIELD);
    }
    let state = match (info.state, new.state) {
        (current, PortState::NO_CHANGE) => current,
        (current, PortState::DOWN) if !is_management_port => current,
        (PortState::INITIALIZE | PortState::ARMED, PortState::ARMED) => PortState::ARMED,
        (PortState::ARMED | PortState::ACTIVE, PortState::ACTIVE) => PortState::ACTIVE,
        _ if is_management_port => info.state,
        _ => return Err(Status::INVALID_FIELD),
    };
    let command = match (new.state, new.physical_state) {
        _ if is_management_port => None,
        (_, PhysicalState::DISABLED) => Some(LinkCommand::Disable(port)),
        (_, PhysicalState::POLLING) => Some(LinkCommand::Enable(port)),
        (_, PhysicalState::NO_CHANGE | PhysicalState::SLEEP) if new.state == PortState::DOWN => {
            Some(LinkCommand::Reset(port))
        }
        (_, PhysicalState::NO_CHANGE | PhysicalState::SLEEP) => None,
        _ => return Err(Status::INVALID_FIELD),
    };
    let keep_zero = |current: u8, new: u8| if new == 0 { current } else { new };
    let counter = |current: u16, new: u16| if new == 0 { 0 } else { current };
    *info = PortInfo {
        m_key: new.m_key,
        gid_prefix: new.gid_prefix,
        lid: new.lid,
        sm_lid: new.sm_lid,
        m_key_lease: new.m_key_lease,
        width_enabled: enabled(info.width_enabled, new.width_enabled, info.width_supported, 0xff)?,
        state,
        down_default: match new.down_default {
            PhysicalState::NO_CHANGE => info.down_default,
            new => new,
        },
        m_key_protect: new.m_key_protect,
        lmc: new.lmc,
        speed_enabled: enabled(info.speed_enabled, new.speed_enabled, info.speed_supported, 0xf)?,
        neighbor_mtu: keep_zero(info.neighbor_mtu, new.neighbor_mtu),
        sm_sl: new.sm_sl,
        vl_high_limit: new.vl_high_limit,
        init_type_reply: new.init_type_reply,
        vl_stall_count: new.vl_stall_count,
        hoq_life: new.hoq_life,
        operational_vls: keep_zero(info.operational_vls, new.operational_vls),
        inbound_enforcement: new.inbound_enforcement,
        outbound_enforcement: new.outbound_enforcement,
        filter_raw_inbound: new.filter_raw_inbound,
        filter_raw_outbound: new.filter_raw_outbound,
        m_key_violations: counter(info.m_key_violations, new.m_key_violations),
        p_key_violations: counter(info.p_key_violations, new.p_key_violations),
        q_key_violations: counter(info.q_key_violations, new.q_key_violations),
        multicast_p_key_trap_suppression: new.multicast_p_key_trap_suppression,
        subnet_timeout: new.subnet_timeout,
        local_physical_errors: new.local_physical_errors,
        overrun_errors: new.overrun_errors,
        extended_speed_enabled: enabled(
            info.extended_speed_enabled,
            // All ones in five bits: none beyond the older speeds.
            if new.extended_speed_enabled > 0xf { 0 } else { new.extended_speed_enabled },
            info.extended_speed_supported,
            0xf,
        )?,
        ..*info
    };
    Ok(command)
}
