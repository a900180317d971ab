//! What a packet is for, in the words of a scenario.

use softhca_wire::{NakCode, Opcode, Operation, Qpn, Service, Syndrome, TransportPacket};

/// What one packet is for.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum PacketClass {
    /// Part of a SEND on a connection.
    Send,
    /// Part of a WRITE.
    Write,
    /// A READ request.
    ReadRequest,
    /// An atomic request: compare and swap, fetch and add, atomic write.
    Atomic,
    /// A FLUSH request.
    Flush,
    /// A SEND of an unreliable datagram queue pair other than QP1.
    Datagram,
    /// Part of the answer to a READ.
    ReadResponse,
    /// The answer to an atomic.
    AtomicResponse,
    /// A positive acknowledgement.
    Ack,
    /// A refusal.
    Nak(NakCode),
    /// A refusal for want of a receive buffer.
    RnrNak,
    /// A congestion notification packet.
    Cnp,
    /// A connection manager's message.
    Cm(CmMessage),
    /// Any other packet to or from QP1.
    Management,
    /// A priority pause frame. Rules see it only if they ask for it.
    Pause,
    /// Bytes that no packet format fits.
    Malformed,
}

impl PacketClass {
    /// The class of a packet.
    pub fn of(packet: &TransportPacket<'_>) -> PacketClass {
        PacketClass::of_opcode(packet.header.bth.opcode).unwrap_or_else(|| match packet.header.aeth {
            Some(aeth) => PacketClass::of_syndrome(aeth.syndrome),
            None => PacketClass::of_datagram(packet),
        })
    }

    /// The class of every packet with this opcode; none where the opcode alone does not tell: an
    /// acknowledgement, a datagram.
    fn of_opcode(opcode: Opcode) -> Option<PacketClass> {
        Some(match opcode.operation() {
            Operation::Send if opcode.service() == Service::Ud => return None,
            Operation::Acknowledge => return None,
            Operation::Send => PacketClass::Send,
            Operation::Write => PacketClass::Write,
            Operation::ReadRequest => PacketClass::ReadRequest,
            Operation::CompareSwap | Operation::FetchAdd | Operation::AtomicWrite => PacketClass::Atomic,
            Operation::Flush => PacketClass::Flush,
            Operation::ReadResponse => PacketClass::ReadResponse,
            Operation::AtomicAcknowledge => PacketClass::AtomicResponse,
            Operation::Cnp => PacketClass::Cnp,
        })
    }

    fn of_syndrome(syndrome: Syndrome) -> PacketClass {
        match syndrome {
            Syndrome::Ack(_) => PacketClass::Ack,
            Syndrome::RnrNak(_) => PacketClass::RnrNak,
            Syndrome::Nak(code) => PacketClass::Nak(code),
        }
    }

    fn of_datagram(packet: &TransportPacket<'_>) -> PacketClass {
        let from_gsi = packet.header.deth.is_some_and(|deth| deth.source_qp == Qpn::GSI);
        match packet.header.bth.destination_qp == Qpn::GSI || from_gsi {
            false => PacketClass::Datagram,
            true => CmMessage::of(packet.payload).map_or(PacketClass::Management, PacketClass::Cm),
        }
    }
}

/// A message of the connection manager, by its attribute identifier (IBA 12.6).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum CmMessage {
    /// Asks for a connection.
    Req = 0x10,
    /// Says that an answer takes longer.
    Mra = 0x11,
    /// Refuses.
    Rej = 0x12,
    /// Accepts.
    Rep = 0x13,
    /// Confirms.
    Rtu = 0x14,
    /// Asks to end the connection.
    Dreq = 0x15,
    /// Ends it.
    Drep = 0x16,
    /// Asks for the datagram queue pair of a service.
    SidrReq = 0x17,
    /// Names it.
    SidrRep = 0x18,
    /// Offers another path.
    Lap = 0x19,
    /// Answers that.
    Apr = 0x1a,
}

impl CmMessage {
    /// Every message, in numerical order.
    pub const ALL: [CmMessage; 11] = [
        CmMessage::Req,
        CmMessage::Mra,
        CmMessage::Rej,
        CmMessage::Rep,
        CmMessage::Rtu,
        CmMessage::Dreq,
        CmMessage::Drep,
        CmMessage::SidrReq,
        CmMessage::SidrRep,
        CmMessage::Lap,
        CmMessage::Apr,
    ];

    /// The name that the specification gives it.
    pub const fn name(self) -> &'static str {
        match self {
            CmMessage::Req => "REQ",
            CmMessage::Mra => "MRA",
            CmMessage::Rej => "REJ",
            CmMessage::Rep => "REP",
            CmMessage::Rtu => "RTU",
            CmMessage::Dreq => "DREQ",
            CmMessage::Drep => "DREP",
            CmMessage::SidrReq => "SIDR_REQ",
            CmMessage::SidrRep => "SIDR_REP",
            CmMessage::Lap => "LAP",
            CmMessage::Apr => "APR",
        }
    }

    /// The management class of the connection manager.
    const MANAGEMENT_CLASS: u8 = 0x07;

    /// The message in this management datagram, if it is one of the connection manager's.
    fn of(datagram: &[u8]) -> Option<CmMessage> {
        let header = datagram.first_chunk::<24>()?;
        let attribute = u16::from_be_bytes([header[16], header[17]]);
        let message = CmMessage::ALL.into_iter().find(|message| *message as u16 == attribute)?;
        (header[1] == Self::MANAGEMENT_CLASS).then_some(message)
    }
}

/// The classes that a rule speaks of: one, or a group that has a name.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PacketClasses {
    /// This one.
    Only(PacketClass),
    /// Everything that an application asked its queue pair to send: SEND, WRITE, READ requests, atomics,
    /// FLUSH and datagrams.
    Data,
    /// Everything that answers a request: READ and atomic responses, ACKs, NAKs and RNR NAKs.
    Responses,
    /// Refusals with any code. An RNR NAK is none: it asks for patience.
    Naks,
    /// Every message of the connection manager.
    Cm,
}

impl PacketClasses {
    /// Whether `class` is one of these.
    pub fn contains(self, class: PacketClass) -> bool {
        match self {
            PacketClasses::Only(only) => class == only,
            PacketClasses::Data => matches!(
                class,
                PacketClass::Send
                    | PacketClass::Write
                    | PacketClass::ReadRequest
                    | PacketClass::Atomic
                    | PacketClass::Flush
                    | PacketClass::Datagram
            ),
            PacketClasses::Responses => matches!(
                class,
                PacketClass::ReadResponse
                    | PacketClass::AtomicResponse
                    | PacketClass::Ack
                    | PacketClass::Nak(_)
                    | PacketClass::RnrNak
            ),
            PacketClasses::Naks => matches!(class, PacketClass::Nak(_)),
            PacketClasses::Cm => matches!(class, PacketClass::Cm(_)),
        }
    }

    /// Whether a packet with this opcode can be of one of these classes. A rule that asks for both and gets
    /// `false` can never fire.
    pub fn may_contain(self, opcode: Opcode) -> bool {
        let has = |class| self.contains(class);
        match PacketClass::of_opcode(opcode) {
            Some(class) => has(class),
            None if opcode.service() == Service::Ud => {
                let mut messages = CmMessage::ALL.into_iter();
                has(PacketClass::Datagram)
                    || has(PacketClass::Management)
                    || messages.any(|cm| has(PacketClass::Cm(cm)))
            }
            None => {
                let mut codes = NakCode::ALL.into_iter();
                has(PacketClass::Ack)
                    || has(PacketClass::RnrNak)
                    || codes.any(|code| has(PacketClass::Nak(code)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Packet, management_datagram};
    use softhca_wire::{ICRC_LEN, RnrTimer};

    fn class_of(packet: Packet) -> PacketClass {
        let frame = packet.frame();
        PacketClass::of(
            &TransportPacket::parse(&frame.bytes[..frame.bytes.len() - ICRC_LEN]).expect("a packet"),
        )
    }

    #[test]
    fn every_request_of_an_application_is_data_and_no_answer_is() {
        for opcode in Opcode::all() {
            let class = class_of(Packet::new(opcode, 5));
            assert_eq!(PacketClasses::Data.contains(class), opcode.operation().is_request(), "{opcode}");
        }
    }

    #[test]
    fn the_syndrome_tells_acknowledgements_apart() {
        let answer = |syndrome| class_of(Packet::rc(Operation::Acknowledge, 5).syndrome(syndrome));
        assert_eq!(answer(Syndrome::ACK), PacketClass::Ack);
        assert_eq!(answer(Syndrome::RnrNak(RnrTimer::new(3))), PacketClass::RnrNak);
        for code in NakCode::ALL {
            assert_eq!(answer(Syndrome::Nak(code)), PacketClass::Nak(code));
            assert!(PacketClasses::Naks.contains(PacketClass::Nak(code)));
        }
        assert!(!PacketClasses::Naks.contains(PacketClass::RnrNak));
    }

    #[test]
    fn a_datagram_to_qp1_is_told_by_its_attribute() {
        for message in CmMessage::ALL {
            let packet = management_datagram(0x07, message as u16);
            assert_eq!(class_of(packet), PacketClass::Cm(message));
        }
        assert_eq!(class_of(management_datagram(0x07, 0x77)), PacketClass::Management);
        assert_eq!(class_of(management_datagram(0x03, 0x10)), PacketClass::Management);
    }

    #[test]
    fn class_and_opcode_exclude_each_other_exactly_when_no_packet_has_both() {
        let opcode = |operation| Packet::rc(operation, 0).opcode;
        assert!(PacketClasses::Data.may_contain(opcode(Operation::Write)));
        assert!(!PacketClasses::Responses.may_contain(opcode(Operation::Write)));
        assert!(
            PacketClasses::Only(PacketClass::Nak(NakCode::RemoteAccessError))
                .may_contain(opcode(Operation::Acknowledge))
        );
        assert!(!PacketClasses::Cm.may_contain(opcode(Operation::Send)));
        assert!(PacketClasses::Cm.may_contain(management_datagram(7, 0x10).opcode));
    }
}
