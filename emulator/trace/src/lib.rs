//! What people and programs see of RoCE traffic.
//!
//! [`Capture`] reads pcap and pcapng files into [`Record`]s; [`Packet`] is what one record says, as a line
//! of text or, through serde, as a JSON object; [`Tally`] counts them. Nothing here opens a socket.

mod capture;
mod json;
mod packet;
mod tally;

pub use capture::{Capture, CaptureError, Cause, LinkType, Record};
pub use packet::{Contents, Management, Packet, Roce};
pub use tally::Tally;
