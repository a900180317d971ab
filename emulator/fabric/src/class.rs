//! What a packet is for, in the words of a scenario.

use softhca_wire::{NakCode, Opcode, Operation, Qpn, Service, Syndrome, Transport};

/// What one packet is for.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Class {
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
    ReceiverNotReady,
    /// A congestion notification packet.
    CongestionNotification,
    /// A connection manager's message.
    Cm(CmMessage),
    /// Any other packet to or from QP1.
    Management,
    /// A priority pause frame. Rules see it only if they ask for it.
    Pause,
    /// Bytes that no packet format fits.
    Malformed,
}

impl Class {
    /// The class of a packet.
    pub fn of(packet: &Transport<'_>) -> Class {
        Class::of_opcode(packet.header.bth.opcode).unwrap_or_else(|| match packet.header.aeth {
            Some(aeth) => Class::of_syndrome(aeth.syndrome),
            None => Class::of_datagram(packet),
        })
    }

    /// The class of every packet with this opcode; none where the opcode alone does not tell: an
    /// acknowledgement, a datagram.
    fn of_opcode(opcode: Opcode) -> Option<Class> {
        Some(match opcode.operation() {
            Operation::Send if opcode.service() == Service::Ud => return None,
            Operation::Acknowledge => return None,
            Operation::Send => Class::Send,
            Operation::Write => Class::Write,
            Operation::ReadRequest => Class::ReadRequest,
            Operation::CompareSwap | Operation::FetchAdd | Operation::AtomicWrite => Class::Atomic,
            Operation::Flush => Class::Flush,
            Operation::ReadResponse => Class::ReadResponse,
            Operation::AtomicAcknowledge => Class::AtomicResponse,
            Operation::CongestionNotification => Class::CongestionNotification,
        })
    }

    fn of_syndrome(syndrome: Syndrome) -> Class {
        match syndrome {
            Syndrome::Ack(_) => Class::Ack,
            Syndrome::RnrNak(_) => Class::ReceiverNotReady,
            Syndrome::Nak(code) => Class::Nak(code),
        }
    }

    fn of_datagram(packet: &Transport<'_>) -> Class {
        let from_gsi = packet.header.deth.is_some_and(|deth| deth.source == Qpn::GSI);
        match packet.header.bth.destination == Qpn::GSI || from_gsi {
            false => Class::Datagram,
            true => CmMessage::of(packet.payload).map_or(Class::Management, Class::Cm),
        }
    }
}

/// A message of the connection manager, by its attribute identifier (IBA 12.6).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum CmMessage {
    /// Asks for a connection.
    ConnectRequest = 0x10,
    /// Says that an answer takes longer.
    MessageReceiptAcknowledge = 0x11,
    /// Refuses.
    Reject = 0x12,
    /// Accepts.
    ConnectReply = 0x13,
    /// Confirms.
    ReadyToUse = 0x14,
    /// Asks to end the connection.
    DisconnectRequest = 0x15,
    /// Ends it.
    DisconnectReply = 0x16,
    /// Asks for the datagram queue pair of a service.
    ServiceRequest = 0x17,
    /// Names it.
    ServiceReply = 0x18,
    /// Offers another path.
    LoadAlternatePath = 0x19,
    /// Answers that.
    AlternatePathResponse = 0x1a,
}

impl CmMessage {
    /// Every message, in numerical order.
    pub const ALL: [CmMessage; 11] = [
        CmMessage::ConnectRequest,
        CmMessage::MessageReceiptAcknowledge,
        CmMessage::Reject,
        CmMessage::ConnectReply,
        CmMessage::ReadyToUse,
        CmMessage::DisconnectRequest,
        CmMessage::DisconnectReply,
        CmMessage::ServiceRequest,
        CmMessage::ServiceReply,
        CmMessage::LoadAlternatePath,
        CmMessage::AlternatePathResponse,
    ];

    /// The name that the specification gives it.
    pub const fn name(self) -> &'static str {
        match self {
            CmMessage::ConnectRequest => "REQ",
            CmMessage::MessageReceiptAcknowledge => "MRA",
            CmMessage::Reject => "REJ",
            CmMessage::ConnectReply => "REP",
            CmMessage::ReadyToUse => "RTU",
            CmMessage::DisconnectRequest => "DREQ",
            CmMessage::DisconnectReply => "DREP",
            CmMessage::ServiceRequest => "SIDR_REQ",
            CmMessage::ServiceReply => "SIDR_REP",
            CmMessage::LoadAlternatePath => "LAP",
            CmMessage::AlternatePathResponse => "APR",
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
pub enum Classes {
    /// This one.
    Only(Class),
    /// Everything that an application asked its queue pair to send: SEND, WRITE, READ requests, atomics,
    /// FLUSH and datagrams.
    Data,
    /// Everything that answers a request: READ and atomic responses, ACKs, NAKs and RNR NAKs.
    Answers,
    /// Refusals with any code. An RNR NAK is none: it asks for patience.
    Naks,
    /// Every message of the connection manager.
    Cm,
}

impl Classes {
    /// Whether `class` is one of these.
    pub fn contains(self, class: Class) -> bool {
        match self {
            Classes::Only(only) => class == only,
            Classes::Data => matches!(
                class,
                Class::Send
                    | Class::Write
                    | Class::ReadRequest
                    | Class::Atomic
                    | Class::Flush
                    | Class::Datagram
            ),
            Classes::Answers => matches!(
                class,
                Class::ReadResponse
                    | Class::AtomicResponse
                    | Class::Ack
                    | Class::Nak(_)
                    | Class::ReceiverNotReady
            ),
            Classes::Naks => matches!(class, Class::Nak(_)),
            Classes::Cm => matches!(class, Class::Cm(_)),
        }
    }

    /// Whether a packet with this opcode can be of one of these classes. A rule that asks for both and gets
    /// `false` can never fire.
    pub fn allow(self, opcode: Opcode) -> bool {
        let has = |class| self.contains(class);
        match Class::of_opcode(opcode) {
            Some(class) => has(class),
            None if opcode.service() == Service::Ud => {
                let mut messages = CmMessage::ALL.into_iter();
                has(Class::Datagram) || has(Class::Management) || messages.any(|cm| has(Class::Cm(cm)))
            }
            None => {
                let mut codes = NakCode::ALL.into_iter();
                has(Class::Ack) || has(Class::ReceiverNotReady) || codes.any(|code| has(Class::Nak(code)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Packet, management_datagram};
    use softhca_wire::{ICRC_LEN, RnrTimer};

    fn class_of(packet: Packet) -> Class {
        let frame = packet.frame();
        Class::of(&Transport::parse(&frame.bytes[..frame.bytes.len() - ICRC_LEN]).expect("a packet"))
    }

    #[test]
    fn every_request_of_an_application_is_data_and_no_answer_is() {
        for opcode in Opcode::all() {
            let class = class_of(Packet::new(opcode, 5));
            assert_eq!(Classes::Data.contains(class), opcode.operation().is_request(), "{opcode}");
        }
    }

    #[test]
    fn the_syndrome_tells_acknowledgements_apart() {
        let answer = |syndrome| class_of(Packet::rc(Operation::Acknowledge, 5).syndrome(syndrome));
        assert_eq!(answer(Syndrome::ACK), Class::Ack);
        assert_eq!(answer(Syndrome::RnrNak(RnrTimer::new(3))), Class::ReceiverNotReady);
        for code in NakCode::ALL {
            assert_eq!(answer(Syndrome::Nak(code)), Class::Nak(code));
            assert!(Classes::Naks.contains(Class::Nak(code)));
        }
        assert!(!Classes::Naks.contains(Class::ReceiverNotReady));
    }

    #[test]
    fn a_datagram_to_qp1_is_told_by_its_attribute() {
        for message in CmMessage::ALL {
            let packet = management_datagram(0x07, message as u16);
            assert_eq!(class_of(packet), Class::Cm(message));
        }
        assert_eq!(class_of(management_datagram(0x07, 0x77)), Class::Management);
        assert_eq!(class_of(management_datagram(0x03, 0x10)), Class::Management);
    }

    #[test]
    fn class_and_opcode_exclude_each_other_exactly_when_no_packet_has_both() {
        let opcode = |operation| Packet::rc(operation, 0).opcode;
        assert!(Classes::Data.allow(opcode(Operation::Write)));
        assert!(!Classes::Answers.allow(opcode(Operation::Write)));
        assert!(Classes::Only(Class::Nak(NakCode::RemoteAccess)).allow(opcode(Operation::Acknowledge)));
        assert!(!Classes::Cm.allow(opcode(Operation::Send)));
        assert!(Classes::Cm.allow(management_datagram(7, 0x10).opcode));
    }
}
