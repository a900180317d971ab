//! A captured frame.

use super::link_type::LinkType;
use super::writer::PacketDirection;
use softhca_wire::{Malformed, RoceFrame};

/// One captured frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Offset of the record in the file.
    pub offset: u64,
    /// When it was captured, in nanoseconds since 1970.
    pub time_ns: u64,
    /// The first header in `data`.
    pub link_type: LinkType,
    /// The bytes that were kept.
    pub data: Vec<u8>,
    /// How many bytes the frame had.
    pub original_len: usize,
    /// Whether it left or entered the host where it was captured, if the file says so.
    pub direction: Option<PacketDirection>,
}

impl Record {
    /// The name of a record that the snap length truncated, in its error.
    pub(crate) const CUT: &str = "captured record";

    /// The direction in the file, or in the cooked header of Linux.
    pub fn direction(&self) -> Option<PacketDirection> {
        let kind = match self.link_type {
            LinkType::LinuxSll => u16::from_be_bytes([*self.data.first()?, *self.data.get(1)?]),
            LinkType::LinuxSll2 => u16::from(*self.data.get(10)?),
            _ => return self.direction,
        };
        Some(if kind == 4 { PacketDirection::Outbound } else { PacketDirection::Inbound })
    }

    /// The RoCE frame in this record.
    ///
    /// A record that the snap length truncated is malformed, unless its headers show another protocol.
    pub fn frame(&self) -> Result<RoceFrame<'_>, Malformed> {
        let frame = self
            .link_type
            .strip_link_header(&self.data)
            .and_then(|(link, bytes)| RoceFrame::parse(link, bytes));
        let available = self.data.len();
        match frame {
            Err(other @ Malformed::NotRoce { .. }) => Err(other),
            _ if available < self.original_len => {
                Err(Malformed::Truncated { what: Self::CUT, needed: self.original_len, available })
            }
            frame => frame,
        }
    }
}
