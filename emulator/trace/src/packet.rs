//! What one record says, and the line that tells it.

use crate::Record;
use softhca_wire::cm::Datagram;
use softhca_wire::{Ecn, Frame, MadHeader, Malformed, Network, Pfc, Qpn, Transport};
use std::fmt;

/// One record of a capture, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Nanoseconds since the first record; negative where a capture is not in order.
    pub time_ns: i64,
    /// What it is.
    pub contents: Contents<'a>,
}

/// What a record holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "one is made per packet and none is kept")]
pub enum Contents<'a> {
    /// A RoCE packet.
    Roce(Roce<'a>),
    /// RoCE, but not well formed; with the network headers if those could be read.
    Malformed(Option<Network>, Malformed),
    /// A priority pause frame.
    Pause(Pfc),
    /// Another protocol.
    Other(Malformed),
}

/// A RoCE packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roce<'a> {
    /// The frame around it.
    pub frame: Frame<'a>,
    /// Its headers and payload.
    pub transport: Transport<'a>,
    /// What is in it, if it is for QP1.
    pub management: Option<Management>,
    /// Whether its ICRC is right.
    pub intact: bool,
}

/// The payload of a packet to QP1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "one is made per packet and none is kept")]
pub enum Management {
    /// A message of the connection manager.
    Connection(Datagram),
    /// A datagram of another class.
    Other(MadHeader),
    /// Neither.
    Malformed(Malformed),
}

impl Management {
    fn parse(payload: &[u8]) -> Management {
        match MadHeader::parse(payload) {
            Ok(header) if header.class != MadHeader::CONNECTION_MANAGER => Management::Other(header),
            _ => Datagram::parse(payload).map_or_else(Management::Malformed, Management::Connection),
        }
    }
}

impl<'a> Packet<'a> {
    /// Reads a record; `start_ns` is the time of the first one.
    pub fn new(record: &'a Record, start_ns: u64) -> Packet<'a> {
        let time_ns = record.time_ns.wrapping_sub(start_ns) as i64;
        Packet { time_ns, contents: Contents::new(record) }
    }
}

impl<'a> Contents<'a> {
    fn new(record: &'a Record) -> Contents<'a> {
        let frame = match record.frame() {
            Ok(frame) => frame,
            Err(reason @ Malformed::NotRoce { .. }) => {
                return Pfc::parse(&record.data).map_or(Contents::Other(reason), Contents::Pause);
            }
            Err(reason) => return Contents::Malformed(None, reason),
        };
        match frame.transport() {
            Ok(transport) => {
                let to_management = transport.header.bth.destination == Qpn::GSI;
                let management = to_management.then(|| Management::parse(transport.payload));
                Contents::Roce(Roce { frame, transport, management, intact: frame.is_intact() })
            }
            Err(reason) => Contents::Malformed(Some(frame.network), reason),
        }
    }
}

impl Roce<'_> {
    /// The ECN codepoint that the packet arrived with.
    pub fn ecn(&self) -> Ecn {
        Ecn::of(self.frame.network.traffic_class())
    }
}

impl fmt::Display for Management {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Management::Connection(datagram) => write!(f, "cm {datagram}"),
            Management::Other(header) => header.fmt(f),
            Management::Malformed(reason) => write!(f, "cm malformed: {reason}"),
        }
    }
}

impl fmt::Display for Roce<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.frame.network, self.transport)?;
        if let Some(management) = &self.management {
            write!(f, " {management}")?;
        }
        write!(f, " ecn={} icrc {}", self.ecn(), if self.intact { "ok" } else { "BAD" })
    }
}

impl fmt::Display for Packet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.time_ns < 0 { "-" } else { "" };
        let time = self.time_ns.unsigned_abs();
        write!(f, "{sign}{}.{:09} ", time / 1_000_000_000, time % 1_000_000_000)?;
        match &self.contents {
            Contents::Roce(roce) => roce.fmt(f),
            Contents::Malformed(Some(network), reason) => write!(f, "{network} malformed: {reason}"),
            Contents::Malformed(None, reason) => write!(f, "malformed: {reason}"),
            Contents::Pause(pause) => pause.fmt(f),
            Contents::Other(reason) => reason.fmt(f),
        }
    }
}
