//! A capture of a card in real time: what leaves its port, with a comment where a rule did something to it.

use crate::capture::{CaptureWriter, InterfaceId, PacketDirection};
use crate::{NameTable, describe};
use softhca_fabric::Fault;
use softhca_wire::AddressHeaders;
use std::io::{self, Write};

/// A packet that may still get a comment: the event of a fault follows that of its packet.
#[derive(Debug)]
pub(crate) struct PendingRecord {
    time_ns: u64,
    pub addressing: AddressHeaders,
    packet: Vec<u8>,
    comment: String,
}

impl PendingRecord {
    pub fn new(time_ns: u64, addressing: &AddressHeaders, packet: &[u8]) -> PendingRecord {
        PendingRecord { time_ns, addressing: *addressing, packet: packet.to_vec(), comment: String::new() }
    }

    /// Adds a fault to the comment.
    pub fn add_fault(&mut self, fault: &Fault, names: &NameTable) {
        if !self.comment.is_empty() {
            self.comment.push_str("; ");
        }
        self.comment += &describe::fault(fault, names);
    }

    pub fn write<W: Write>(&self, writer: &mut CaptureWriter<W>, interface: InterfaceId) -> io::Result<()> {
        let PendingRecord { time_ns, addressing, packet, comment } = self;
        let comment = (!comment.is_empty()).then_some(comment.as_str());
        writer.write_packet(*time_ns, interface, PacketDirection::Outbound, addressing, packet, comment)
    }
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
        self.pending = Some(PendingRecord::new(time_ns, addressing, packet));
        Ok(())
    }

    /// Adds a fault to the comment of the last packet.
    pub fn add_fault(&mut self, fault: &Fault, names: &NameTable) {
        if let Some(pending) = &mut self.pending {
            pending.add_fault(fault, names);
        }
    }

    /// Writes the packet that waited for a comment.
    pub fn flush_pending<W: Write>(&mut self, writer: &mut CaptureWriter<W>) -> io::Result<()> {
        match self.pending.take() {
            Some(pending) => pending.write(writer, self.interface),
            None => Ok(()),
        }
    }
}
