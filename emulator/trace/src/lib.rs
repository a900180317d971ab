//! What people and programs see of RoCE traffic.
//!
//! [`Capture`] reads pcap and pcapng files into [`Record`]s; [`Packet`] is what one record says, as a line
//! of text or, through serde, as a JSON object; [`Tally`] counts them. [`CaptureWriter`] writes pcapng, and
//! [`Tap`] lets a world do so. [`Ladders`] draws who told whom what, and
//! [`log`] keeps it for programs; a [`Story`] is what two runs are compared by. [`why`] explains from a log
//! why a work request failed, [`lint`] warns of what goes wrong in verbs programs. Nothing here opens a socket.

mod account;
mod capture;
mod cast;
mod json;
mod ladder;
pub mod lint;
pub mod log;
mod packet;
mod story;
mod tally;
mod tap;
mod text;
pub mod why;
mod words;

pub use capture::{
    Capture, CaptureError, CaptureWriter, Cause, Framing, Heading, InterfaceId, LinkType, Record,
};
pub use cast::Cast;
pub use ladder::{Fate, Ladder, Ladders, LiveLadders, Paint, Side, Sight, Step, Style, Tone};
pub use log::{EventLog, EventLogReader};
pub use packet::{Contents, Management, Packet, Roce};
pub use story::{Chapter, Story, Topic};
pub use tally::Tally;
pub use tap::{Points, Tap};
