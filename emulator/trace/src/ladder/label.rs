//! The words on an arrow.

use super::flow::Flows;
use crate::describe::duration;
use crate::{NameTable, RocePacket};
use softhca_wire::{Ecn, Opcode, Operation, Psn, Syndrome, TransportHeader};

/// A ladder's knowledge of one packet.
#[derive(Clone, Debug)]
pub(super) struct LadderPacket {
    pub flow: usize,
    pub opcode: Opcode,
    pub psn: Psn,
    pub payload: u32,
    pub syndrome: Option<Syndrome>,
    /// That PSN had left before.
    pub retransmission: bool,
    /// Details that only the packet's bytes show.
    pub header_details: Option<HeaderDetails>,
    /// Remarks about its way.
    pub remarks: Vec<String>,
    pub lost: bool,
    /// It was not seen before, but later ones were.
    pub is_late: bool,
    /// Requests that were not seen although this packet shows that they exist: the first PSN and their number.
    pub unseen: Option<(Psn, u32)>,
    /// How many work requests begin and end with it, as far as its bytes show.
    pub outstanding_delta: [i32; 2],
}

impl LadderPacket {
    pub fn new(
        flow: usize,
        opcode: Opcode,
        psn: Psn,
        payload: u32,
        syndrome: Option<Syndrome>,
    ) -> LadderPacket {
        LadderPacket {
            flow,
            opcode,
            psn,
            payload,
            syndrome,
            retransmission: false,
            header_details: None,
            remarks: Vec::new(),
            lost: false,
            is_late: false,
            unseen: None,
            outstanding_delta: [0; 2],
        }
    }
}

/// Details that a packet's bytes show and an event does not.
#[derive(Clone, Debug, Default)]
pub(super) struct HeaderDetails {
    text: String,
    /// The length of the message that the packet starts.
    message_length: Option<u32>,
    /// The name of the message in it, for QP1.
    message: Option<String>,
    pub icrc_bad: bool,
}

impl HeaderDetails {
    pub fn from_header(header: &TransportHeader, ecn: Ecn) -> HeaderDetails {
        let mut words = Vec::new();
        let is_read = header.bth.opcode.operation() == Operation::ReadRequest;
        words.extend(header.reth.filter(|_| is_read).map(|reth| format!("asks for {} B", reth.dma_length)));
        if let Some(atomic) = header.atomic {
            words.push(match header.bth.opcode.operation() {
                Operation::FetchAdd => format!("adds {:#x}", atomic.swap_or_add),
                _ => format!("{:#x} if it is {:#x}", atomic.swap_or_add, atomic.compare),
            });
        }
        words.extend(header.atomic_ack.map(|original| format!("it was {:#x}", original.0)));
        words.extend(header.immediate.map(|immediate| format!("immediate {:#x}", immediate.0)));
        words.extend(header.ieth.map(|key| format!("invalidates {:#x}", key.0)));
        words.extend((ecn == Ecn::CongestionExperienced).then(|| "marked CE".into()));
        let of =
            header.reth.filter(|_| !header.bth.opcode.position().ends_message()).map(|reth| reth.dma_length);
        HeaderDetails { text: words.join(", "), message_length: of, ..HeaderDetails::default() }
    }

    pub fn from_capture(roce: &RocePacket<'_>) -> HeaderDetails {
        let message = roce.mad.as_ref().map(|management| match management {
            crate::Mad::Cm(datagram) => format!("CM {}", datagram.message.name()),
            other => other.to_string(),
        });
        HeaderDetails {
            message,
            icrc_bad: !roce.icrc_ok,
            ..HeaderDetails::from_header(&roce.transport.header, roce.ecn())
        }
    }
}

/// A PSN relative to `zero`, or as it is.
pub(super) fn relative_psn(psn: Psn, zero: Option<Psn>) -> String {
    match zero {
        Some(zero) => format!("{:+}", psn.distance(zero)),
        None => psn.to_string(),
    }
}

impl LadderPacket {
    /// Whether `next` only continues what this one started.
    pub fn continues_with(&self, next: &LadderPacket) -> bool {
        let middle = !self.opcode.position().starts_message() && !self.opcode.position().ends_message();
        let plain = |sent: &LadderPacket| {
            sent.remarks.is_empty() && !sent.lost && !sent.is_late && sent.outstanding_delta == [0; 2]
        };
        middle
            && (self.flow, self.opcode, self.payload, self.retransmission)
                == (next.flow, next.opcode, next.payload, next.retransmission)
            && self.psn.plus(1) == next.psn
            && plain(self)
            && plain(next)
            && next.unseen.is_none()
    }

    pub fn is_nak(&self) -> bool {
        matches!(self.syndrome, Some(Syndrome::Nak(_) | Syndrome::RnrNak(_)))
    }

    /// Its label: `WRITE_FIRST +0`. Several alike have the last one's PSN too.
    pub fn label(&self, zero: Option<Psn>, last: Option<Psn>) -> String {
        let psn = relative_psn(self.psn, zero);
        let label = match (self.opcode.operation(), self.syndrome) {
            (Operation::Cnp, _) => return "CNP".into(),
            (Operation::Acknowledge, Some(Syndrome::Ack(_))) => format!("ACK {psn}"),
            (Operation::Acknowledge, Some(Syndrome::Nak(code))) => format!("NAK {} {psn}", code.name()),
            (Operation::Acknowledge, Some(Syndrome::RnrNak(_))) => format!("RNR NAK {psn}"),
            _ => {
                let message = self.header_details.as_ref().and_then(|extra| extra.message.as_deref());
                format!("{} {psn}", message.unwrap_or(self.opcode.name()))
            }
        };
        let to = last.map(|last| format!(" … {}", relative_psn(last, zero))).unwrap_or_default();
        let order = if self.is_late { " late" } else { "" };
        format!("{label}{to}{}", if self.retransmission { " again" } else { order })
    }

    /// A note about requests that are not in the capture.
    pub fn unseen_text(&self, flows: &Flows, names: &NameTable) -> Option<String> {
        let (first, count) = self.unseen?;
        let is_request = self.opcode.operation().is_request();
        let flow = if is_request { self.flow } else { flows.reverse(self.flow)? };
        let zero = flows.base_psn(flow, true, names);
        let range = match count {
            1 => format!("1 packet was not seen: {}", relative_psn(first, zero)),
            _ => format!(
                "{count} packets were not seen: {} … {}",
                relative_psn(first, zero),
                relative_psn(first.plus(count - 1), zero)
            ),
        };
        Some(if is_request { range } else { range + ", but acknowledged" })
    }

    /// Its contents: `1024 B`.
    pub fn detail(&self, count: usize) -> String {
        let mut words = Vec::new();
        if self.opcode.has_payload() {
            words.push(match count {
                1 => match self.header_details.as_ref().and_then(|extra| extra.message_length) {
                    Some(of) => format!("{} of {of} B", self.payload),
                    None => format!("{} B", self.payload),
                },
                _ => format!("{count} × {} B", self.payload),
            });
        }
        if let Some(Syndrome::RnrNak(timer)) = self.syndrome {
            words.push(format!("try again in {}", duration(timer.nanoseconds())));
        }
        if let Some(extra) = &self.header_details {
            if !extra.text.is_empty() {
                words.push(extra.text.clone());
            }
            if extra.icrc_bad {
                words.push("ICRC wrong".into());
            }
        }
        words.join(", ")
    }
}
