//! The packet in a record of a capture, and its line of text.

use crate::{PacketDirection, Record};
use softhca_wire::cm::Datagram;
use softhca_wire::{Ecn, MadHeader, Malformed, NetworkHeaders, Pfc, Qpn, RoceFrame, TransportPacket};
use std::fmt;

/// One record of a capture, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Nanoseconds since the first record; negative where a capture is not in order.
    pub time_ns: i64,
    /// Whether it was captured where it was sent; unknown for most captures.
    pub at_sender: Option<bool>,
    /// Its contents.
    pub contents: PacketContents<'a>,
}

/// The contents of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "one is made per packet and none is kept")]
pub enum PacketContents<'a> {
    /// A RoCE packet.
    Roce(RocePacket<'a>),
    /// RoCE, but not well formed; with the network headers if those could be read.
    Malformed(Option<NetworkHeaders>, Malformed),
    /// A priority pause frame.
    Pause(Pfc),
    /// Another protocol.
    Other(Malformed),
}

/// A RoCE packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RocePacket<'a> {
    /// The frame around it.
    pub frame: RoceFrame<'a>,
    /// Its headers and payload.
    pub transport: TransportPacket<'a>,
    /// The MAD, if the destination is QP1.
    pub mad: Option<Mad>,
    /// Whether its ICRC is right.
    pub icrc_ok: bool,
}

/// The payload of a packet to QP1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "one is made per packet and none is kept")]
pub enum Mad {
    /// A message of the connection manager.
    Cm(Datagram),
    /// A datagram of another class.
    Other(MadHeader),
    /// Neither.
    Malformed(Malformed),
}

impl Mad {
    fn parse(payload: &[u8]) -> Mad {
        match MadHeader::parse(payload) {
            Ok(header) if header.mgmt_class != MadHeader::CLASS_CM => Mad::Other(header),
            _ => Datagram::parse(payload).map_or_else(Mad::Malformed, Mad::Cm),
        }
    }
}

impl<'a> Packet<'a> {
    /// Reads a record; `start_ns` is the time of the first one.
    pub fn new(record: &'a Record, start_ns: u64) -> Packet<'a> {
        let time_ns = record.time_ns.wrapping_sub(start_ns) as i64;
        let at_sender = record.direction().map(|direction| direction == PacketDirection::Outbound);
        Packet { time_ns, at_sender, contents: PacketContents::new(record) }
    }
}

impl<'a> PacketContents<'a> {
    /// Whether the snap length of the capture cut the record.
    pub fn is_cut(&self) -> bool {
        matches!(self, PacketContents::Malformed(_, Malformed::Truncated { what: Record::CUT, .. }))
    }

    fn new(record: &'a Record) -> PacketContents<'a> {
        let frame = match record.frame() {
            Ok(frame) => frame,
            Err(reason @ Malformed::NotRoce { .. }) => {
                return Pfc::parse(&record.data).map_or(PacketContents::Other(reason), PacketContents::Pause);
            }
            Err(reason) => return PacketContents::Malformed(None, reason),
        };
        match frame.transport() {
            Ok(transport) => {
                let to_management = transport.header.bth.destination_qp == Qpn::GSI;
                let management = to_management.then(|| Mad::parse(transport.payload));
                PacketContents::Roce(RocePacket {
                    frame,
                    transport,
                    mad: management,
                    icrc_ok: frame.icrc_is_valid(),
                })
            }
            Err(reason) => PacketContents::Malformed(Some(frame.network), reason),
        }
    }
}

impl RocePacket<'_> {
    /// The ECN codepoint that the packet arrived with.
    pub fn ecn(&self) -> Ecn {
        Ecn::of(self.frame.network.traffic_class())
    }
}

impl fmt::Display for Mad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mad::Cm(datagram) => write!(f, "cm {datagram}"),
            Mad::Other(header) => header.fmt(f),
            Mad::Malformed(reason) => write!(f, "cm malformed: {reason}"),
        }
    }
}

impl fmt::Display for RocePacket<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.frame.network, self.transport)?;
        if let Some(management) = &self.mad {
            write!(f, " {management}")?;
        }
        write!(f, " ecn={} icrc {}", self.ecn(), if self.icrc_ok { "ok" } else { "BAD" })
    }
}

impl fmt::Display for Packet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.time_ns < 0 { "-" } else { "" };
        let time = self.time_ns.unsigned_abs();
        write!(f, "{sign}{}.{:09} ", time / 1_000_000_000, time % 1_000_000_000)?;
        match &self.contents {
            PacketContents::Roce(roce) => roce.fmt(f),
            PacketContents::Malformed(Some(network), reason) => write!(f, "{network} malformed: {reason}"),
            PacketContents::Malformed(None, reason) => write!(f, "malformed: {reason}"),
            PacketContents::Pause(pause) => pause.fmt(f),
            PacketContents::Other(reason) => reason.fmt(f),
        }
    }
}
