//! Captures, ladders, event logs and explanations of RoCE traffic.
//!
//! [`CaptureReader`] reads pcap and pcapng files into [`Record`]s; [`Packet`] is a decoded record, printed as a line
//! of text or serialised as a JSON object; [`PacketCounts`] counts them. [`CaptureWriter`] writes pcapng. A
//! [`Recording`] writes the events and packets of a run. [`LadderBuilder`] draws connections, [`log`] is the event log, and a
//! [`ComparableTrace`] compares two runs. [`why`] explains from a log or a capture why a work request failed, [`lint`]
//! warns of pitfalls of verbs programs, [`summary`] counts, [`filter`] selects packets, and [`join`] compares two captures
//! of the same traffic. This crate opens no socket.

#![allow(missing_docs, reason = "a comment that repeats the name of its item says nothing")]

mod capture;
mod comparable_trace;
mod describe;
pub mod filter;
pub mod join;
mod json;
mod ladder;
pub mod lint;
pub mod log;
mod name_table;
mod packet;
mod packet_counts;
mod parsed_log;
mod perfetto;
mod recording;
mod sequence;
pub mod summary;
mod text;
pub mod why;

pub use capture::{
    CaptureError, CaptureErrorKind, CaptureReader, CaptureWriter, InterfaceId, LinkType, PacketDirection,
    Record, RoceVersion,
};
pub use comparable_trace::{ComparableTrace, FactKind, QueuePairFacts};
pub use describe::{duration, effect as fault_effect};
pub use ladder::{
    ColorMode, Delivery, Emphasis, Ladder, LadderBuilder, LadderStyle, LiveLadder, Side, Step, StepContent,
};
pub use log::{EventLog, EventLogReader};
pub use name_table::NameTable;
pub use packet::{Mad, Packet, PacketContents, RocePacket};
pub use packet_counts::PacketCounts;
pub use recording::{CapturePoints, CardRecorder, Recording, Tap};
#[cfg(feature = "stream")]
pub use recording::{EventStreamReader, StreamItem};
