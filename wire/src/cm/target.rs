//! Which process of a host a packet is for, where several share its address.

use super::codes::CommunicationId;
use super::message::{Datagram, Message, MessageKind};
use crate::{Bth, Deth, MadHeader, Qpn, QpnSlot};

/// The receiver of a packet within its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketTarget {
    /// The process with this queue pair number. For a CM message: a number whose high bits are those of the communication
    /// ID that its receiver chose.
    Process(Qpn),
    /// The process that listens to the service ID of a REQ or SIDR_REQ. The number leads to it if its sender knows the
    /// process ([`Datagram::set_listener_slot`]), else to slot 0, which knows all listeners.
    Listener(Qpn),
}

impl PacketTarget {
    /// Offset of a MAD's management class from the BTH on: one byte.
    pub const CLASS_OFFSET: usize = Bth::LEN + Deth::LEN + 1;
    /// Offset of a MAD's attribute ID: two bytes.
    pub const ATTRIBUTE_OFFSET: usize = Bth::LEN + Deth::LEN + 16;
    /// Offset of the attribute modifier, which holds the listener's slot in a REQ or SIDR_REQ: four bytes.
    pub const LISTENER_SLOT_OFFSET: usize = Bth::LEN + Deth::LEN + 20;
    /// Offset of the receiver's communication ID in a SIDR_REP: four bytes.
    pub const REQUEST_ID_OFFSET: usize = Bth::LEN + Deth::LEN + MadHeader::LEN;
    /// Offset of the receiver's communication ID in other messages.
    pub const REMOTE_ID_OFFSET: usize = Self::REQUEST_ID_OFFSET + 4;

    /// The target of a packet, from the BTH on.
    #[inline]
    pub fn of(packet: &[u8]) -> PacketTarget {
        let qpn = packet.get(5..8).map_or(0, |qpn| u32::from_be_bytes([0, qpn[0], qpn[1], qpn[2]]));
        match Qpn::new(qpn) {
            Qpn::GSI => Self::of_mad(packet),
            qpn => PacketTarget::Process(qpn),
        }
    }

    fn of_mad(packet: &[u8]) -> PacketTarget {
        let word = |at: usize| {
            let bytes = packet.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
            bytes.map_or(0, u32::from_be_bytes)
        };
        if packet.get(Self::CLASS_OFFSET) != Some(&MadHeader::CLASS_CM) {
            return PacketTarget::Process(Qpn::GSI);
        }
        let attribute = (word(Self::ATTRIBUTE_OFFSET) >> 16) as u16;
        if attribute == MessageKind::Req as u16 || attribute == MessageKind::SidrReq as u16 {
            return PacketTarget::Listener(listener_qpn(word(Self::LISTENER_SLOT_OFFSET)));
        }
        let is_sidr = attribute == MessageKind::SidrRep as u16;
        let at = if is_sidr { Self::REQUEST_ID_OFFSET } else { Self::REMOTE_ID_OFFSET };
        PacketTarget::Process(CommunicationId(word(at)).qpn())
    }

    /// The queue pair number that leads to the target.
    #[inline]
    pub const fn qpn(self) -> Qpn {
        match self {
            PacketTarget::Process(qpn) | PacketTarget::Listener(qpn) => qpn,
        }
    }
}

/// The first number of a slot, if there is such a slot.
const fn listener_qpn(slot: u32) -> Qpn {
    match slot < 1 << QpnSlot::BITS {
        true => Qpn::new(slot << (24 - QpnSlot::BITS)),
        false => Qpn::GSI,
    }
}

impl Datagram {
    /// Has a host with slots give a REQ or SIDR_REQ to this one, whose process listens to the service. The attribute modifier
    /// has it, which other hosts ignore.
    pub fn set_listener_slot(&mut self, slot: u16) {
        self.header.attribute_modifier = slot.into();
    }

    /// The process that the datagram is for.
    pub const fn target(&self) -> PacketTarget {
        let id = match &self.message {
            Message::Req(_) | Message::SidrReq(_) => {
                return PacketTarget::Listener(listener_qpn(self.header.attribute_modifier));
            }
            Message::Mra(mra) => mra.remote_id,
            Message::Rej(rej) => rej.remote_id,
            Message::Rep(rep) => rep.remote_id,
            Message::Rtu(rtu) => rtu.remote_id,
            Message::Dreq(dreq) => dreq.remote_id,
            Message::Drep(drep) => drep.remote_id,
            Message::SidrRep(rep) => CommunicationId(rep.request_id),
            Message::Lap(lap) => lap.remote_id,
            Message::Apr(apr) => apr.remote_id,
        };
        PacketTarget::Process(id.qpn())
    }
}

impl CommunicationId {
    /// A queue pair number with the same high bits.
    pub const fn qpn(self) -> Qpn {
        Qpn::new(self.0 >> 8)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Apr, Drep, Dreq, Lap, Mra, Rej, Rep, Req, Rtu, SidrRep, SidrReq};
    use super::*;
    use crate::{
        ImmOrInvalidate, Opcode, Operation, Position, Psn, QpnSlot, QueueKey, Service, TransportHeader,
    };
    use alloc::vec::Vec;

    fn packet(datagram: &Datagram) -> Vec<u8> {
        let opcode = Opcode::new(Service::Ud, Operation::Send, Position::Only, ImmOrInvalidate::None);
        let mut header = TransportHeader::new(Bth::new(opcode.unwrap(), Qpn::GSI, Psn::new(7)));
        header.deth = Some(Deth { qkey: QueueKey::GSI, source_qp: Qpn::GSI });
        let mut bytes = Vec::from([0; Bth::LEN + Deth::LEN]);
        header.emit(&mut bytes);
        bytes.extend(datagram.emit());
        bytes
    }

    #[test]
    fn bytes_and_message_have_the_same_target() {
        // Slot 5 of nine bits.
        let remote_id = CommunicationId(5 << 23 | 0x12345);
        let local_id = CommunicationId(0x8765_4321);
        let messages: [Message; 11] = [
            Req { local_id, ..Req::default() }.into(),
            Mra { local_id, remote_id, ..Mra::default() }.into(),
            Rej { local_id, remote_id, ..Rej::default() }.into(),
            Rep { local_id, remote_id, ..Rep::default() }.into(),
            Rtu { local_id, remote_id, ..Rtu::default() }.into(),
            Dreq { local_id, remote_id, ..Dreq::default() }.into(),
            Drep { local_id, remote_id, ..Drep::default() }.into(),
            SidrReq { request_id: local_id.0, ..SidrReq::default() }.into(),
            SidrRep { request_id: remote_id.0, ..SidrRep::default() }.into(),
            Lap { local_id, remote_id, ..Lap::default() }.into(),
            Apr { local_id, remote_id, ..Apr::default() }.into(),
        ];
        let slot = |target: PacketTarget| QpnSlot::of(target.qpn(), QpnSlot::BITS).number;
        for message in messages {
            let mut datagram = Datagram::new(1, message);
            let target = datagram.target();
            assert_eq!(PacketTarget::of(&packet(&datagram)), target, "{message}");
            if let PacketTarget::Process(_) = target {
                assert_eq!(slot(target), 5, "{message}");
                continue;
            }
            assert_eq!(slot(target), 0, "{message}");
            for (hint, led_to) in [(7, 7), (510, 510), (512, 0), (u16::MAX, 0)] {
                datagram.set_listener_slot(hint);
                let target = datagram.target();
                assert_eq!(PacketTarget::of(&packet(&datagram)), target, "{message}");
                assert_eq!(slot(target), led_to, "{message}");
            }
        }
    }

    #[test]
    fn other_packets_are_for_their_queue_pair() {
        let mut bytes = packet(&Datagram::new(1, Rtu::default()));
        bytes[5..8].copy_from_slice(&[0x12, 0x34, 0x56]);
        assert_eq!(PacketTarget::of(&bytes), PacketTarget::Process(Qpn::new(0x12_3456)));
        bytes[5..8].copy_from_slice(&[0, 0, 1]);
        bytes[PacketTarget::CLASS_OFFSET] = 3;
        assert_eq!(PacketTarget::of(&bytes), PacketTarget::Process(Qpn::GSI));
        assert_eq!(PacketTarget::of(&[]), PacketTarget::Process(Qpn::default()));
    }
}
