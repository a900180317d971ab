//! The words on an arrow.

use crate::Roce;
use crate::words::duration;
use softhca_wire::{Ecn, Header, Opcode, Operation, Psn, Syndrome};

/// What a ladder knows of one packet.
#[derive(Clone, Debug)]
pub(super) struct Sent {
    pub flow: usize,
    pub opcode: Opcode,
    pub psn: Psn,
    pub payload: u32,
    pub syndrome: Option<Syndrome>,
    /// That PSN had left before.
    pub again: bool,
    /// What only the packet's bytes tell.
    pub extra: Option<Extra>,
    /// What happened to it on the way.
    pub remarks: Vec<String>,
    pub lost: bool,
    /// How many work requests begin and end with it, as far as its bytes tell.
    pub bars: [i32; 2],
}

/// What a packet's bytes tell and an event does not.
#[derive(Clone, Debug, Default)]
pub(super) struct Extra {
    words: String,
    /// The length of the message that the packet starts.
    of: Option<u32>,
    /// The name of the message in it, for QP1.
    message: Option<String>,
    pub damaged: bool,
}

impl Extra {
    pub fn of(header: &Header, ecn: Ecn) -> Extra {
        let mut words = Vec::new();
        if let Some(reth) = header.reth {
            if header.bth.opcode.operation() == Operation::ReadRequest {
                words.push(format!("asks for {} B", reth.length));
            }
        }
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
        let of = header.reth.filter(|_| !header.bth.opcode.position().ends()).map(|reth| reth.length);
        Extra { words: words.join(", "), of, ..Extra::default() }
    }

    pub fn of_capture(roce: &Roce<'_>) -> Extra {
        let message = roce.management.as_ref().map(|management| match management {
            crate::Management::Connection(datagram) => format!("CM {}", datagram.message.name()),
            other => other.to_string(),
        });
        Extra { message, damaged: !roce.intact, ..Extra::of(&roce.transport.header, roce.ecn()) }
    }
}

/// A PSN relative to `zero`, or as it is.
pub(super) fn relative(psn: Psn, zero: Option<Psn>) -> String {
    match zero {
        Some(zero) => format!("{:+}", psn.distance(zero)),
        None => psn.to_string(),
    }
}

impl Sent {
    /// Whether `next` only continues what this one started.
    pub fn continues_with(&self, next: &Sent) -> bool {
        let middle = !self.opcode.position().starts() && !self.opcode.position().ends();
        let plain = |sent: &Sent| sent.remarks.is_empty() && !sent.lost && sent.bars == [0; 2];
        middle
            && (self.flow, self.opcode, self.payload, self.again)
                == (next.flow, next.opcode, next.payload, next.again)
            && self.psn.plus(1) == next.psn
            && plain(self)
            && plain(next)
    }

    pub fn is_refusal(&self) -> bool {
        matches!(self.syndrome, Some(Syndrome::Nak(_) | Syndrome::RnrNak(_)))
    }

    /// What it is: `WRITE_FIRST +0`. Several alike have the last one's PSN too.
    pub fn label(&self, zero: Option<Psn>, last: Option<Psn>) -> String {
        let psn = relative(self.psn, zero);
        let label = match (self.opcode.operation(), self.syndrome) {
            (Operation::CongestionNotification, _) => return "CNP".into(),
            (Operation::Acknowledge, Some(Syndrome::Ack(_))) => format!("ACK {psn}"),
            (Operation::Acknowledge, Some(Syndrome::Nak(code))) => format!("NAK {} {psn}", code.name()),
            (Operation::Acknowledge, Some(Syndrome::RnrNak(_))) => format!("RNR NAK {psn}"),
            _ => {
                let message = self.extra.as_ref().and_then(|extra| extra.message.as_deref());
                format!("{} {psn}", message.unwrap_or(self.opcode.name()))
            }
        };
        let to = last.map(|last| format!(" … {}", relative(last, zero))).unwrap_or_default();
        format!("{label}{to}{}", if self.again { " again" } else { "" })
    }

    /// What is in it: `1024 B`.
    pub fn detail(&self, count: usize) -> String {
        let mut words = Vec::new();
        if self.opcode.has_payload() {
            words.push(match count {
                1 => match self.extra.as_ref().and_then(|extra| extra.of) {
                    Some(of) => format!("{} of {of} B", self.payload),
                    None => format!("{} B", self.payload),
                },
                _ => format!("{count} × {} B", self.payload),
            });
        }
        if let Some(Syndrome::RnrNak(timer)) = self.syndrome {
            words.push(format!("try again in {}", duration(timer.nanoseconds())));
        }
        if let Some(extra) = &self.extra {
            if !extra.words.is_empty() {
                words.push(extra.words.clone());
            }
            if extra.damaged {
                words.push("ICRC wrong".into());
            }
        }
        words.join(", ")
    }
}
