//! The attributes of nodes, and the trait of all attributes.

use super::Block;
use super::notice::Notice;
use super::port_info::PortInfo;
use crate::code::code;
use crate::layout::{BitSpan, Field, START, layout};

crate::named_enum! {
    /// Attributes of subnet management by their IDs (IBA 14.2.5).
    #[repr(u16)]
    pub enum AttributeId {
        /// A notice, in a trap.
        Notice = 0x02 => "Notice",
        /// The name of a node.
        NodeDescription = 0x10 => "NodeDescription",
        /// The kind, GUIDs and ports of a node.
        NodeInfo = 0x11 => "NodeInfo",
        /// The tables of a switch.
        SwitchInfo = 0x12 => "SwitchInfo",
        /// A block of the GUIDs of a port.
        GuidInfo = 0x14 => "GUIDInfo",
        /// The state of a port.
        PortInfo = 0x15 => "PortInfo",
        /// A block of the partition keys of a port.
        PKeyTable = 0x16 => "P_KeyTable",
        /// The virtual lanes of service levels.
        SlToVlMappingTable = 0x17 => "SLtoVLMappingTable",
        /// The weights of virtual lanes.
        VlArbitrationTable = 0x18 => "VLArbitrationTable",
        /// A block of the output ports of unicast LIDs.
        LinearForwardingTable = 0x19 => "LinearForwardingTable",
        /// A block of the output ports of multicast LIDs.
        MulticastForwardingTable = 0x1b => "MulticastForwardingTable",
        /// The subnet manager at a port.
        SmInfo = 0x20 => "SMInfo",
    }
}

impl AttributeId {
    /// The attribute with this number.
    pub fn from_number(number: u16) -> Option<AttributeId> {
        AttributeId::ALL.into_iter().find(|id| *id as u16 == number)
    }
}

/// A value in the data of an SMP.
pub trait Attribute: Sized {
    /// The attribute's ID.
    const ID: AttributeId;
    /// Reads the value; every block is one.
    fn from_block(block: &Block) -> Self;
    /// Writes the value.
    fn to_block(&self) -> Block;
}

macro_rules! attribute {
    ($($name:ident = $id:ident),*) => {$(
        impl Attribute for $name {
            const ID: AttributeId = AttributeId::$id;
            fn from_block(block: &Block) -> Self {
                Field::read(&block.0, START)
            }
            fn to_block(&self) -> Block {
                let mut block = Block::default();
                self.write(&mut block.0, START);
                block
            }
        }
    )*};
}

attribute! {
    NodeDescription = NodeDescription,
    NodeInfo = NodeInfo,
    SwitchInfo = SwitchInfo,
    GuidTable = GuidInfo,
    PortInfo = PortInfo,
    PartitionKeyTable = PKeyTable,
    SlToVl = SlToVlMappingTable,
    VlArbitration = VlArbitrationTable,
    SmInfo = SmInfo,
    Notice = Notice
}

/// The name of a node: UTF-8, padded with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct NodeDescription(pub Block);

impl NodeDescription {
    /// A description with as much of the text as fits.
    pub fn new(text: &str) -> NodeDescription {
        let mut block = Block::default();
        let mut end = text.len().min(Block::LEN);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        block.0[..end].copy_from_slice(&text.as_bytes()[..end]);
        NodeDescription(block)
    }

    /// The text up to the first zero; empty if it is not UTF-8.
    pub fn text(&self) -> &str {
        let end = self.0.0.iter().position(|byte| *byte == 0).unwrap_or(Block::LEN);
        core::str::from_utf8(&self.0.0[..end]).unwrap_or_default()
    }
}

/// Declares attributes that are an array in the block.
macro_rules! table {
    ($($(#[$doc:meta])* $name:ident([$entry:ty; $count:literal]);)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
        pub struct $name(pub [$entry; $count]);

        impl Field for $name {
            const WIDTH: usize = $count * <$entry>::WIDTH;
            fn read(bytes: &[u8], at: BitSpan) -> Self {
                $name(core::array::from_fn(|index| Field::read(bytes, entry::<$entry>(at, index))))
            }
            fn write(&self, bytes: &mut [u8], at: BitSpan) {
                for (index, value) in self.0.iter().enumerate() {
                    value.write(bytes, entry::<$entry>(at, index));
                }
            }
        }
    )*};
}

/// The place of an entry in a table.
fn entry<F: Field>(at: BitSpan, index: usize) -> BitSpan {
    let bits = at.bit + index * F::WIDTH;
    BitSpan { byte: at.byte + bits / 8, bit: bits % 8, width: F::WIDTH }
}

table! {
    /// A block of the GUIDs of a port.
    GuidTable([u64; 8]);
    /// A block of the partition keys of a port.
    PartitionKeyTable([u16; 32]);
}

/// The virtual lane of each service level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SlToVl(pub [u8; 16]);

impl Field for SlToVl {
    const WIDTH: usize = 64;
    fn read(bytes: &[u8], at: BitSpan) -> Self {
        SlToVl(core::array::from_fn(|sl| bytes[at.byte + sl / 2] >> (4 * (1 - sl % 2)) & 0xf))
    }
    fn write(&self, bytes: &mut [u8], at: BitSpan) {
        for (index, pair) in self.0.chunks_exact(2).enumerate() {
            bytes[at.byte + index] = pair[0] << 4 | pair[1] & 0xf;
        }
    }
}

/// A quarter of the arbitration tables of a port: virtual lanes with their weights in units of 64 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct VlArbitration(pub [(u8, u8); 32]);

impl Field for VlArbitration {
    const WIDTH: usize = 512;
    fn read(bytes: &[u8], at: BitSpan) -> Self {
        VlArbitration(core::array::from_fn(|index| {
            let at = at.byte + 2 * index;
            (bytes[at] & 0xf, bytes[at + 1])
        }))
    }
    fn write(&self, bytes: &mut [u8], at: BitSpan) {
        for (index, (lane, weight)) in self.0.iter().enumerate() {
            let at = at.byte + 2 * index;
            (bytes[at], bytes[at + 1]) = (lane & 0xf, *weight);
        }
    }
}

impl Field for NodeDescription {
    const WIDTH: usize = 512;
    fn read(bytes: &[u8], at: BitSpan) -> Self {
        NodeDescription(Field::read(bytes, at))
    }
    fn write(&self, bytes: &mut [u8], at: BitSpan) {
        self.0.write(bytes, at);
    }
}

code! {
    /// The kind of a node.
    NodeType(u8), 8 {
        CHANNEL_ADAPTER = 1 "CA",
        SWITCH = 2 "switch",
        ROUTER = 3 "router",
    }
}

layout! {
    /// The kind, GUIDs and ports of a node.
    pub struct NodeInfo: 40 bytes {
        /// The version of the MAD header that the node supports.
        base_version: u8 = 0,
        /// The version of the class that the node supports.
        class_version: u8 = 1,
        /// The kind of the node.
        node_type: NodeType = 2,
        /// The number of physical ports.
        port_count: u8 = 3,
        /// The GUID that nodes of one device share.
        system_image_guid: u64 = 4,
        /// The GUID of the node.
        node_guid: u64 = 12,
        /// The GUID of the port that received the request.
        port_guid: u64 = 20,
        /// The entries of a partition table.
        partition_cap: u16 = 28,
        /// The device ID.
        device_id: u16 = 30,
        /// The revision of the device.
        revision: u32 = 32,
        /// The port that received the request.
        local_port: u8 = 36,
        /// The vendor.
        vendor_id: u32 = 37 [0..24],
    }
}

layout! {
    /// The tables of a switch.
    pub struct SwitchInfo: 20 bytes {
        /// Entries of the linear forwarding table.
        linear_cap: u16 = 0,
        /// Entries of the random forwarding table.
        random_cap: u16 = 2,
        /// Entries of the multicast forwarding table.
        multicast_cap: u16 = 4,
        /// The highest LID that the linear forwarding table routes.
        linear_top: u16 = 6,
        /// The output port of LIDs that no table lists.
        default_port: u8 = 8,
        /// The output port of multicast packets from other ports that no table lists.
        default_multicast_primary: u8 = 9,
        /// The output port of multicast packets from the primary port.
        default_multicast_not_primary: u8 = 10,
        /// The time a packet may stay: 4.096 µs · 2^n.
        lifetime: u8 = 11 [0..5],
        /// The state of a port has changed since the manager cleared this.
        state_change: bool = 11 [5..6],
        /// Support of the optimized SLtoVL programming.
        optimized_sl_to_vl: u8 = 11 [6..8],
        /// LIDs per port of the random forwarding table.
        lids_per_port: u16 = 12,
        /// Entries of the partition tables of external ports.
        partition_enforcement_cap: u16 = 14,
        /// Whether the switch checks partitions of arriving packets.
        inbound_enforcement: bool = 16 [0..1],
        /// Whether the switch checks partitions of departing packets.
        outbound_enforcement: bool = 16 [1..2],
        /// Whether the switch can drop arriving raw packets.
        filter_raw_inbound: bool = 16 [2..3],
        /// Whether the switch can drop departing raw packets.
        filter_raw_outbound: bool = 16 [3..4],
        /// Whether port 0 has the functions of a CA.
        enhanced_port_0: bool = 16 [4..5],
        /// The highest multicast LID in use.
        multicast_top: u16 = 18,
    }
}

code! {
    /// The state of a subnet manager.
    SmState(u8), 4 {
        NOT_ACTIVE = 0 "not active",
        DISCOVERING = 1 "discovering",
        STANDBY = 2 "standby",
        MASTER = 3 "master",
    }
}

layout! {
    /// The subnet manager at a port.
    pub struct SmInfo: 21 bytes {
        /// The port GUID of the manager.
        guid: u64 = 0,
        /// The key that managers authenticate each other with.
        sm_key: u64 = 8,
        /// Counts the actions of the manager, which shows that it is alive.
        activity: u32 = 16,
        /// The manager with the highest priority becomes the master.
        priority: u8 = 20 [0..4],
        /// The state.
        state: SmState = 20 [4..8],
    }
}
