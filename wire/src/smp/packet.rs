//! The SMP itself: LID-routed (class 0x01) or with a directed route (class 0x81).

use super::{Attribute, AttributeId, Block};
use crate::code::code;
use crate::layout::{Field, START, layout, number_field};
use crate::{MadHeader, Malformed};
use core::fmt;

/// The most hops of a directed route.
pub const MAX_HOPS: u8 = 63;

/// A local identifier: the address of a port inside a subnet.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Lid(pub u16);

impl Lid {
    /// The highest unicast LID.
    pub const MAX_UNICAST: Lid = Lid(0xbfff);
    /// The address of the port at the other end of the link, whatever its LID is.
    pub const PERMISSIVE: Lid = Lid(0xffff);

    /// Whether the LID belongs to at most one port.
    pub const fn is_unicast(self) -> bool {
        self.0 != 0 && self.0 <= Lid::MAX_UNICAST.0
    }
}

impl fmt::Display for Lid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

crate::display::debug_as_display!(Lid);
number_field! { Lid, 16, |n| Lid(n as u16), |n: Lid| n.0.into(); }

code! {
    /// The method of a MAD (IBA 13.4.5).
    Method(u8), 8 {
        GET = 0x01 "Get",
        SET = 0x02 "Set",
        TRAP = 0x05 "Trap",
        TRAP_REPRESS = 0x07 "TrapRepress",
        GET_TABLE = 0x12 "GetTable",
        GET_RESP = 0x81 "GetResp",
        GET_TABLE_RESP = 0x92 "GetTableResp",
    }
}

impl Method {
    /// Whether it answers a request. TrapRepress does so without the bit of a response.
    pub const fn is_response(self) -> bool {
        self.0 & 0x80 != 0 || self.0 == Method::TRAP_REPRESS.0
    }
}

code! {
    /// The status of a response, without the direction bit of an SMP (IBA 13.4.7).
    Status(u16), 15 {
        OK = 0x00 "ok",
        BUSY = 0x01 "busy",
        UNSUPPORTED_VERSION = 0x04 "class or version not supported",
        UNSUPPORTED_METHOD = 0x08 "method not supported",
        UNSUPPORTED_ATTRIBUTE = 0x0c "attribute not supported",
        INVALID_FIELD = 0x1c "invalid value in a field or in the attribute modifier",
        NO_RESOURCES = 0x100 "subnet administration: no resources",
        INVALID_REQUEST = 0x200 "subnet administration: invalid request",
        NO_RECORDS = 0x300 "subnet administration: no records",
        TOO_MANY_RECORDS = 0x400 "subnet administration: too many records",
    }
}

layout! {
    /// A subnet management packet. The last four fields are zero unless the route is directed.
    pub struct Smp: 256 bytes,
        "smp method={method} attr={attribute_id:#x} mod={attribute_modifier:#x} tid={transaction_id:#x}"
    {
        /// The version of the MAD header; always 1.
        base_version: u8 = 0,
        /// 0x01 for LID routes, 0x81 for directed ones.
        mgmt_class: u8 = 1,
        /// The version of the class; always 1.
        class_version: u8 = 2,
        /// The method.
        method: Method = 3,
        /// Directed routes: the packet is on its way back.
        is_returning: bool = 4 [0..1],
        /// The status of a response.
        status: Status = 4 [1..16],
        /// Directed routes: the position on the path.
        hop_pointer: u8 = 6,
        /// Directed routes: the length of the path.
        hop_count: u8 = 7,
        /// Matches responses to requests.
        transaction_id: u64 = 8,
        /// The attribute ID.
        attribute_id: u16 = 16,
        /// The attribute modifier: usually a port or a block of a table.
        attribute_modifier: u32 = 20,
        /// The management key.
        m_key: u64 = 24,
        /// The LID of the requester if a LID route precedes the directed one, otherwise permissive.
        dr_slid: Lid = 32,
        /// The LID of the target if a LID route follows the directed one, otherwise permissive.
        dr_dlid: Lid = 34,
        /// The attribute.
        data: Block = 64,
        /// The output ports of the way out. The first hop is at index 1.
        initial_path: Block = 128,
        /// The output ports of the way back, collected on the way out.
        return_path: Block = 192,
    }
}

impl Smp {
    /// The management class with LID routes.
    pub const CLASS_LID_ROUTED: u8 = 0x01;
    /// The management class with directed routes.
    pub const CLASS_DIRECTED: u8 = 0x81;

    /// A LID-routed packet.
    pub fn new(method: Method, attribute: AttributeId, modifier: u32, transaction_id: u64) -> Smp {
        Smp {
            base_version: 1,
            mgmt_class: Self::CLASS_LID_ROUTED,
            class_version: 1,
            method,
            transaction_id,
            attribute_id: attribute as u16,
            attribute_modifier: modifier,
            ..Smp::default()
        }
    }

    /// The packet with a directed route: output ports, the first of which is the one of the requester. Longer paths than
    /// [`MAX_HOPS`] are cut.
    pub fn directed(mut self, path: &[u8]) -> Smp {
        let path = &path[..path.len().min(MAX_HOPS.into())];
        self.mgmt_class = Self::CLASS_DIRECTED;
        (self.dr_slid, self.dr_dlid) = (Lid::PERMISSIVE, Lid::PERMISSIVE);
        self.hop_count = path.len() as u8;
        self.initial_path.0[1..=path.len()].copy_from_slice(path);
        self
    }

    /// The packet with this attribute.
    pub fn with<A: Attribute>(mut self, attribute: &A) -> Smp {
        self.data = attribute.to_block();
        self
    }

    /// Whether the packet follows a path of ports.
    pub const fn is_directed(&self) -> bool {
        self.mgmt_class == Self::CLASS_DIRECTED
    }

    /// Parses a MAD of one of the two classes.
    pub fn parse(bytes: &[u8]) -> Result<Smp, Malformed> {
        if bytes.len() != MadHeader::DATAGRAM_LEN {
            let (stated, actual) = (MadHeader::DATAGRAM_LEN, bytes.len());
            return Err(Malformed::Length { what: "management datagram", stated, actual });
        }
        let smp = Smp::read(bytes, START);
        if smp.base_version != 1 || smp.class_version != 1 {
            let version = if smp.base_version != 1 { smp.base_version } else { smp.class_version };
            return Err(Malformed::Version { what: "SMP", version });
        }
        if smp.mgmt_class != Self::CLASS_LID_ROUTED && !smp.is_directed() {
            return Err(Malformed::Field { what: "SMP class", value: smp.mgmt_class.into() });
        }
        if smp.is_directed() && (smp.hop_count > MAX_HOPS || smp.hop_pointer > MAX_HOPS + 1) {
            let value = smp.hop_count.max(smp.hop_pointer).into();
            return Err(Malformed::Field { what: "SMP hop count or pointer", value });
        }
        Ok(smp)
    }

    /// The packet's bytes.
    pub fn emit(&self) -> [u8; MadHeader::DATAGRAM_LEN] {
        let mut bytes = [0; MadHeader::DATAGRAM_LEN];
        self.write(&mut bytes, START);
        bytes
    }
}
