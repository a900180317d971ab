//! A capture of a card in real time: what leaves its port, with a comment where a rule did something to it.

use crate::capture::{CaptureWriter, InterfaceId, PacketDirection};
use crate::{NameTable, describe};
use softhca_fabric::Fault;
use softhca_wire::AddressHeaders;
use std::io::{self, Write};

/// A packet that may still get a comment: the event of a fault follows that of its packet.
#[derive(Debug)]
struct PendingRecord {
    time_ns: u64,
    addressing: AddressHeaders,
    packet: Vec<u8>,
    comment: String,
}

/// The port of one card in a capture that several cards share.
///
/// Call [`PortTap::flush_pending`] before any other event of the card, and at the end.
#[derive(Debug)]
pub struct PortTap {
    interface: InterfaceId,
    pending: Option<PendingRecord>,
}

impl PortTap {
    /// The port behind an interface of the capture.
    pub fn new(interface: InterfaceId) -> PortTap {
        PortTap { interface, pending: None }
    }

    /// A packet, from the BTH to the ICRC, left the port.
    pub fn packet_sent<W: Write>(
        &mut self,
        writer: &mut CaptureWriter<W>,
        time_ns: u64,
        addressing: &AddressHeaders,
        packet: &[u8],
    ) -> io::Result<()> {
        self.flush_pending(writer)?;
        let (addressing, packet, comment) = (*addressing, packet.to_vec(), String::new());
        self.pending = Some(PendingRecord { time_ns, addressing, packet, comment });
        Ok(())
    }

    /// Adds a fault to the comment of the last packet.
    pub fn add_fault(&mut self, fault: &Fault, names: &NameTable) {
        if let Some(held) = &mut self.pending {
            if !held.comment.is_empty() {
                held.comment.push_str("; ");
            }
            held.comment += &describe::fault(fault, names);
        }
    }

    /// Writes the packet that waited for a comment.
    pub fn flush_pending<W: Write>(&mut self, writer: &mut CaptureWriter<W>) -> io::Result<()> {
        let Some(PendingRecord { time_ns, addressing, packet, comment }) = self.pending.take() else {
            return Ok(());
        };
        let comment = (!comment.is_empty()).then_some(comment.as_str());
        writer.write_packet(time_ns, self.interface, PacketDirection::Outbound, &addressing, &packet, comment)
    }
}
