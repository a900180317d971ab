//! The set of connection manager messages, and the management datagram that carries one.

use super::alternate_path::{Apr, Lap};
use super::codes::{ADDITIONAL_INFO_LEN, CommunicationId};
use super::connect::{Mra, Rej, Rep, Req, Rtu};
use super::disconnect::{Drep, Dreq};
use super::sidr::{SidrRep, SidrReq};
use crate::layout::{Field, START};
use crate::{MadHeader, Malformed};
use core::fmt;

/// Bytes of a message after the MAD header.
const BODY_LEN: usize = MadHeader::DATAGRAM_LEN - MadHeader::LEN;

macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident = $attribute:literal $label:literal,)*) => {
        /// A CM message.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Message { $( $(#[$doc])* $name($name), )* }

        crate::named_enum! {
            /// A CM message by its attribute ID (IBA 12.6).
            #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
            #[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "CmMessage"))]
            #[repr(u16)]
            pub enum MessageKind { $( $(#[$doc])* $name = $attribute => $label, )* }
        }

        impl Message {
            fn read(attribute: u16, body: &[u8; BODY_LEN]) -> Option<Message> {
                Some(match attribute {
                    $( $attribute => Message::$name($name::read(body, START)), )*
                    _ => return None,
                })
            }

            fn write(&self, body: &mut [u8; BODY_LEN]) {
                match self { $( Message::$name(message) => message.write(body, START), )* }
            }

            /// The kind of message.
            pub const fn kind(&self) -> MessageKind {
                match self { $( Message::$name(_) => MessageKind::$name, )* }
            }
        }

        impl fmt::Display for Message {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} ", self.name())?;
                match self { $( Message::$name(message) => message.fmt(f), )* }
            }
        }

        $(
            const _: () = assert!($name::WIDTH == BODY_LEN * 8);

            impl From<$name> for Message {
                fn from(message: $name) -> Message {
                    Message::$name(message)
                }
            }
        )*
    };
}

messages! {
    /// Connection request.
    Req = 0x10 "REQ",
    /// Message receipt acknowledgement.
    Mra = 0x11 "MRA",
    /// Connection reject.
    Rej = 0x12 "REJ",
    /// Connection reply.
    Rep = 0x13 "REP",
    /// Ready to use.
    Rtu = 0x14 "RTU",
    /// Disconnect request.
    Dreq = 0x15 "DREQ",
    /// Disconnect reply.
    Drep = 0x16 "DREP",
    /// Service ID resolution request.
    SidrReq = 0x17 "SIDR_REQ",
    /// Service ID resolution response.
    SidrRep = 0x18 "SIDR_REP",
    /// Load alternate path.
    Lap = 0x19 "LAP",
    /// Alternate path response.
    Apr = 0x1a "APR",
}

impl Message {
    /// The attribute ID of the message in a MAD header.
    pub const fn attribute_id(&self) -> u16 {
        self.kind() as u16
    }

    /// The name in the specification.
    pub const fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// The communication ID that the sender chose; zero in a SIDR_REP, which has none.
    pub const fn sender_id(&self) -> CommunicationId {
        match self {
            Message::Req(req) => req.local_id,
            Message::Mra(mra) => mra.local_id,
            Message::Rej(rej) => rej.local_id,
            Message::Rep(rep) => rep.local_id,
            Message::Rtu(rtu) => rtu.local_id,
            Message::Dreq(dreq) => dreq.local_id,
            Message::Drep(drep) => drep.local_id,
            Message::SidrReq(req) => CommunicationId(req.request_id),
            Message::SidrRep(_) => CommunicationId(0),
            Message::Lap(lap) => lap.local_id,
            Message::Apr(apr) => apr.local_id,
        }
    }

    /// The stated length of the additional information.
    fn additional_info_length(&self) -> usize {
        usize::from(match self {
            Message::Rej(rej) => rej.additional_info_length,
            Message::SidrRep(rep) => rep.additional_info_length,
            Message::Apr(apr) => apr.additional_info_length,
            _ => 0,
        })
    }
}

/// A CM message in a management datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The MAD header; its attribute ID matches `message`.
    pub header: MadHeader,
    /// The message.
    pub message: Message,
}

impl Datagram {
    /// The CM class version of these layouts.
    pub const CLASS_VERSION: u8 = 2;

    /// A datagram with this transaction ID.
    pub fn new(transaction: u64, message: impl Into<Message>) -> Datagram {
        let message = message.into();
        let header = MadHeader {
            base_version: 1,
            mgmt_class: MadHeader::CLASS_CM,
            class_version: Self::CLASS_VERSION,
            method: MadHeader::METHOD_SEND,
            transaction_id: transaction,
            attribute_id: message.attribute_id(),
            ..MadHeader::default()
        };
        Datagram { header, message }
    }

    /// Parses the payload of a packet to QP1; fails for other management classes.
    pub fn parse(bytes: &[u8]) -> Result<Datagram, Malformed> {
        let header = MadHeader::parse(bytes)?;
        let field = |what, value: u16| Err(Malformed::Field { what, value: value.into() });
        if header.mgmt_class != MadHeader::CLASS_CM {
            return field("MAD class", header.mgmt_class.into());
        }
        if header.class_version != Self::CLASS_VERSION {
            return Err(Malformed::Version { what: "CM class", version: header.class_version });
        }
        if header.method != MadHeader::METHOD_SEND {
            return field("CM method", header.method.into());
        }
        let Ok(body) = bytes[MadHeader::LEN..].try_into() else {
            let (stated, actual) = (MadHeader::DATAGRAM_LEN, bytes.len());
            return Err(Malformed::Length { what: "management datagram", stated, actual });
        };
        let Some(message) = Message::read(header.attribute_id, body) else {
            return field("CM attribute", header.attribute_id);
        };
        let stated = message.additional_info_length();
        if stated > ADDITIONAL_INFO_LEN {
            let actual = ADDITIONAL_INFO_LEN;
            return Err(Malformed::Length { what: "additional information", stated, actual });
        }
        Ok(Datagram { header, message })
    }

    /// The datagram's bytes.
    pub fn emit(&self) -> [u8; MadHeader::DATAGRAM_LEN] {
        let mut bytes = [0; MadHeader::DATAGRAM_LEN];
        MadHeader { attribute_id: self.message.attribute_id(), ..self.header }.emit(&mut bytes);
        self.message.write(bytes.last_chunk_mut().expect("a MAD has a body"));
        bytes
    }
}

impl fmt::Display for Datagram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tid={:#x}", self.message, self.header.transaction_id)
    }
}
