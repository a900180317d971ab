//! A capture of a card in real time: what leaves its port, with a comment where a rule did something to it.

use crate::capture::{CaptureWriter, Heading, InterfaceId};
use crate::{Cast, words};
use softhca_fabric::Fault;
use softhca_wire::Envelope;
use std::io::{self, Write};

/// A packet that may still get a comment: faults are told right after the packet they happen to.
#[derive(Debug)]
struct Held {
    time_ns: u64,
    envelope: Envelope,
    packet: Vec<u8>,
    comment: String,
}

/// The port of one card in a capture that several may write to.
///
/// Call [`PortTap::release`] whenever the card tells anything else, and at the end.
#[derive(Debug)]
pub struct PortTap {
    interface: InterfaceId,
    held: Option<Held>,
}

impl PortTap {
    /// The port behind an interface of the capture.
    pub fn new(interface: InterfaceId) -> PortTap {
        PortTap { interface, held: None }
    }

    /// A packet, from the BTH to the ICRC, left the port.
    pub fn sent<W: Write>(
        &mut self,
        writer: &mut CaptureWriter<W>,
        time_ns: u64,
        envelope: &Envelope,
        packet: &[u8],
    ) -> io::Result<()> {
        self.release(writer)?;
        let (envelope, packet, comment) = (*envelope, packet.to_vec(), String::new());
        self.held = Some(Held { time_ns, envelope, packet, comment });
        Ok(())
    }

    /// A rule did something to the packet that left last.
    pub fn fault(&mut self, fault: &Fault, cast: &Cast) {
        if let Some(held) = &mut self.held {
            if !held.comment.is_empty() {
                held.comment.push_str("; ");
            }
            held.comment += &words::fault(fault, cast);
        }
    }

    /// Writes the packet that waited for a comment.
    pub fn release<W: Write>(&mut self, writer: &mut CaptureWriter<W>) -> io::Result<()> {
        let Some(Held { time_ns, envelope, packet, comment }) = self.held.take() else { return Ok(()) };
        let comment = (!comment.is_empty()).then_some(comment.as_str());
        writer.packet(time_ns, self.interface, Heading::Out, &envelope, &packet, comment)
    }
}
