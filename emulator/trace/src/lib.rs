//! What people and programs see of RoCE traffic.
//!
//! [`Capture`] reads pcap and pcapng files into [`Record`]s; [`Packet`] is what one record says, as a line
//! of text or, through serde, as a JSON object; [`Tally`] counts them. Nothing here opens a socket.

mod capture;

pub use capture::{Capture, CaptureError, Cause, LinkType, Record};
