//! Packet classes, as scenarios name them.

pub use softhca_wire::cm::MessageKind as CmMessage;
use softhca_wire::{MadHeader, NakCode, Opcode, Operation, Qpn, Service, Syndrome, TransportPacket};

/// The class of a packet.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum PacketClass {
    /// A packet of a SEND on a connection.
    Send,
    /// A packet of a WRITE.
    Write,
    /// A READ request.
    ReadRequest,
    /// An atomic request: compare and swap, fetch and add, atomic write.
    Atomic,
    /// A FLUSH request.
    Flush,
    /// A SEND of a UD queue pair other than QP1.
    Datagram,
    /// A READ response.
    ReadResponse,
    /// An atomic response.
    AtomicResponse,
    /// An ACK.
    Ack,
    /// A NAK.
    Nak(NakCode),
    /// An RNR NAK.
    RnrNak,
    /// A congestion notification packet.
    Cnp,
    /// A CM message.
    Cm(CmMessage),
    /// Any other packet to or from QP1.
    Management,
    /// A PFC pause frame. A rule matches it only if it selects this class.
    Pause,
    /// A malformed packet.
    Malformed,
}

impl PacketClass {
    /// The class of a packet that is described by its opcode and syndrome alone: every datagram counts as one of an
    /// application.
    pub fn of_summary(opcode: Opcode, syndrome: Option<Syndrome>) -> PacketClass {
        PacketClass::of_opcode(opcode).unwrap_or_else(|| match (opcode.operation(), syndrome) {
            (Operation::Send, _) => PacketClass::Datagram,
            (_, syndrome) => PacketClass::of_syndrome(syndrome.unwrap_or(Syndrome::ACK)),
        })
    }

    pub fn of(packet: &TransportPacket<'_>) -> PacketClass {
        PacketClass::of_opcode(packet.header.bth.opcode).unwrap_or_else(|| match packet.header.aeth {
            Some(aeth) => PacketClass::of_syndrome(aeth.syndrome),
            None => PacketClass::of_datagram(packet),
        })
    }

    /// The class of all packets with this opcode; `None` if the opcode does not determine it (ACK, datagram).
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
            true => cm_message(packet.payload).map_or(PacketClass::Management, PacketClass::Cm),
        }
    }
}

/// The CM message in a management datagram, if any.
fn cm_message(datagram: &[u8]) -> Option<CmMessage> {
    let header = datagram.first_chunk::<{ MadHeader::LEN }>()?;
    let attribute = u16::from_be_bytes([header[16], header[17]]);
    let message = CmMessage::ALL.iter().find(|message| **message as u16 == attribute)?;
    (header[1] == MadHeader::CLASS_CM).then_some(*message)
}

/// A selection of classes: one, or a named group.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PacketClasses {
    /// One class.
    Only(PacketClass),
    /// All requests of an application: SEND, WRITE, READ requests, atomics, FLUSH and datagrams.
    Data,
    /// All responses: READ and atomic responses, ACK, NAK and RNR NAK.
    Responses,
    /// NAKs with any code, without RNR NAKs.
    Naks,
    /// All CM messages.
    Cm,
}

impl PacketClasses {
    /// Whether `class` is included.
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

    /// Whether a packet with this opcode can have one of these classes. A rule that selects both never fires
    /// if this is false.
    pub fn may_contain(self, opcode: Opcode) -> bool {
        let has = |class| self.contains(class);
        match PacketClass::of_opcode(opcode) {
            Some(class) => has(class),
            None if opcode.service() == Service::Ud => {
                let mut messages = CmMessage::ALL.iter();
                has(PacketClass::Datagram)
                    || has(PacketClass::Management)
                    || messages.any(|cm| has(PacketClass::Cm(*cm)))
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
    fn requests_are_data_and_responses_are_not() {
        for opcode in Opcode::all() {
            let class = class_of(Packet::new(opcode, 5));
            assert_eq!(PacketClasses::Data.contains(class), opcode.operation().is_request(), "{opcode}");
        }
    }

    #[test]
    fn syndrome_distinguishes_ack_nak_and_rnr_nak() {
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
    fn datagram_to_qp1_is_classified_by_its_attribute_id() {
        for message in CmMessage::ALL.iter().copied() {
            let packet = management_datagram(0x07, message as u16);
            assert_eq!(class_of(packet), PacketClass::Cm(message));
        }
        assert_eq!(class_of(management_datagram(0x07, 0x77)), PacketClass::Management);
        assert_eq!(class_of(management_datagram(0x03, 0x10)), PacketClass::Management);
    }

    #[test]
    fn class_and_opcode_exclude_each_other_only_if_no_packet_has_both() {
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
