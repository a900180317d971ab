//! What people and programs see of RoCE traffic.
//!
//! [`Capture`] reads pcap and pcapng files into [`Record`]s; [`Packet`] is what one record says, as a line
//! of text or, through serde, as a JSON object; [`Tally`] counts them. [`CaptureWriter`] writes pcapng, and
//! [`Tap`] lets a world do so. [`Ladders`] draws who told whom what, and
//! [`log`] keeps it for programs; a [`Story`] is what two runs are compared by. [`why`] explains from a log
//! why a work request failed, [`lint`] warns of what goes wrong in verbs programs. Nothing here opens a socket.

mod capture;
mod comparable_trace;
mod describe;
mod json;
mod ladder;
pub mod lint;
pub mod log;
mod name_table;
mod packet;
mod packet_counts;
mod parsed_log;
mod port_tap;
mod tap;
mod text;
pub mod why;

pub use capture::{
    CaptureError, CaptureErrorKind, CaptureReader, CaptureWriter, InterfaceId, LinkType, PacketDirection,
    Record, RoceVersion,
};
pub use comparable_trace::{ComparableTrace, FactKind, QueuePairFacts};
pub use ladder::{
    ColorMode, Delivery, Emphasis, Ladder, LadderBuilder, LadderStyle, LiveLadder, Side, Step, StepContent,
};
pub use log::{EventLog, EventLogReader};
pub use name_table::NameTable;
pub use packet::{Mad, Packet, PacketContents, RocePacket};
pub use packet_counts::PacketCounts;
pub use port_tap::PortTap;
pub use tap::{CapturePoints, Tap};
