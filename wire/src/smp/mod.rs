//! Subnet management packets (SMPs, IBA volume 1, chapter 14) as plain values.
//!
//! An SMP carries one attribute of 64 bytes. [`Attribute`] converts between the bytes and the value. Reserved bits are
//! ignored when parsed and zero when written.

mod attributes;
mod block;
mod notice;
mod packet;
mod port_info;

pub use attributes::{
    Attribute, AttributeId, GuidTable, NodeDescription, NodeInfo, NodeType, PartitionKeyTable, SlToVl,
    SmInfo, SmState, SwitchInfo, VlArbitration,
};
pub use block::Block;
pub use notice::{
    CapabilityChange, KeyViolation, ManagementKeyViolation, Notice, NoticeHeader, NoticeType, TrapNumber,
};
pub use packet::{Lid, MAX_HOPS, Method, Smp, Status};
pub use port_info::{PhysicalState, PortCapabilities, PortInfo, PortState};

#[cfg(test)]
mod tests;
