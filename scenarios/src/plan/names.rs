//! What names of the language stand for in the fabric and the engine, and back.

use crate::quantity::{IntegerRange, PsnRange};
use crate::spec::{ClassName, CmName, CompletedName, FieldName, NakName, PacketMatch, StatusName};
use softhca_fabric::{CmMessage, HeaderField, InclusiveRange, PacketClass, PacketClasses};
use softhca_queue::{CompletionOpcode, CompletionStatus};
use softhca_wire::NakCode;

pub(super) const fn nak_code(name: NakName) -> NakCode {
    match name {
        NakName::Sequence => NakCode::PsnSequenceError,
        NakName::InvalidRequest => NakCode::InvalidRequest,
        NakName::RemoteAccess => NakCode::RemoteAccessError,
        NakName::RemoteOperation => NakCode::RemoteOperationalError,
    }
}

const fn cm_message(name: CmName) -> CmMessage {
    match name {
        CmName::Req => CmMessage::Req,
        CmName::Mra => CmMessage::Mra,
        CmName::Rej => CmMessage::Rej,
        CmName::Rep => CmMessage::Rep,
        CmName::Rtu => CmMessage::Rtu,
        CmName::Dreq => CmMessage::Dreq,
        CmName::Drep => CmMessage::Drep,
        CmName::SidrReq => CmMessage::SidrReq,
        CmName::SidrRep => CmMessage::SidrRep,
    }
}

/// The messages that the side that asks sends, and those of the side that is asked.
pub(super) const fn cm_messages_by_side(datagrams: bool) -> [&'static [CmMessage]; 2] {
    use CmMessage as M;
    match datagrams {
        true => [&[M::SidrReq], &[M::SidrRep]],
        false => {
            [&[M::Req, M::Rtu, M::Mra, M::Rej, M::Dreq, M::Drep], &[M::Rep, M::Mra, M::Rej, M::Dreq, M::Drep]]
        }
    }
}

/// The classes that a selector names; the error says which two of its words do not go together.
pub(super) fn packet_classes(matching: &PacketMatch) -> Result<Option<PacketClasses>, &'static str> {
    let class = match (matching.class, matching.code, matching.cm) {
        (None | Some(ClassName::Nak), Some(code), None) => {
            return Ok(Some(PacketClasses::Only(PacketClass::Nak(nak_code(code)))));
        }
        (_, Some(_), _) => return Err("only class `nak` has a `code`"),
        (None | Some(ClassName::Cm), None, Some(message)) => {
            return Ok(Some(PacketClasses::Only(PacketClass::Cm(cm_message(message)))));
        }
        (_, _, Some(_)) => return Err("only class `cm` has a `cm` message"),
        (None, None, None) => return Ok(None),
        (Some(class), None, None) => class,
    };
    Ok(Some(match class {
        ClassName::Request => PacketClasses::Data,
        ClassName::Response => PacketClasses::Responses,
        ClassName::Nak => PacketClasses::Naks,
        ClassName::Cm => PacketClasses::Cm,
        ClassName::Send => PacketClasses::Only(PacketClass::Send),
        ClassName::Write => PacketClasses::Only(PacketClass::Write),
        ClassName::ReadRequest => PacketClasses::Only(PacketClass::ReadRequest),
        ClassName::Atomic => PacketClasses::Only(PacketClass::Atomic),
        ClassName::Datagram => PacketClasses::Only(PacketClass::Datagram),
        ClassName::ReadResponse => PacketClasses::Only(PacketClass::ReadResponse),
        ClassName::AtomicResponse => PacketClasses::Only(PacketClass::AtomicResponse),
        ClassName::Ack => PacketClasses::Only(PacketClass::Ack),
        ClassName::RnrNak => PacketClasses::Only(PacketClass::RnrNak),
        ClassName::Cnp => PacketClasses::Only(PacketClass::Cnp),
        ClassName::Management => PacketClasses::Only(PacketClass::Management),
        ClassName::Pfc => PacketClasses::Only(PacketClass::Pause),
    }))
}

/// Whether requests, answers or both are of these classes.
pub(super) fn request_and_response(classes: Option<PacketClasses>) -> (bool, bool) {
    let Some(classes) = classes else { return (true, true) };
    let requests = [
        PacketClass::Send,
        PacketClass::Write,
        PacketClass::ReadRequest,
        PacketClass::Atomic,
        PacketClass::Flush,
        PacketClass::Datagram,
    ];
    let asks = requests.into_iter().any(|class| classes.contains(class));
    let answers =
        [PacketClass::ReadResponse, PacketClass::AtomicResponse, PacketClass::Ack, PacketClass::RnrNak];
    let answered = answers.into_iter().any(|class| classes.contains(class))
        || NakCode::ALL.into_iter().any(|code| classes.contains(PacketClass::Nak(code)));
    (asks, answered)
}

pub(super) const fn header_field(name: FieldName) -> HeaderField {
    match name {
        FieldName::Opcode => HeaderField::Opcode,
        FieldName::Solicited => HeaderField::Solicited,
        FieldName::Migration => HeaderField::Migration,
        FieldName::Pad => HeaderField::Pad,
        FieldName::Version => HeaderField::Version,
        FieldName::PKey => HeaderField::PartitionKey,
        FieldName::Reserved => HeaderField::Reserved,
        FieldName::DestinationQp => HeaderField::DestinationQp,
        FieldName::AckRequest => HeaderField::AckRequest,
        FieldName::Psn => HeaderField::Psn,
        FieldName::QKey => HeaderField::QueueKey,
        FieldName::SourceQp => HeaderField::SourceQp,
        FieldName::Address => HeaderField::Address,
        FieldName::RKey => HeaderField::RemoteKey,
        FieldName::Length => HeaderField::Length,
        FieldName::AtomicAddress => HeaderField::AtomicAddress,
        FieldName::AtomicKey => HeaderField::AtomicKey,
        FieldName::SwapOrAdd => HeaderField::SwapOrAdd,
        FieldName::Compare => HeaderField::Compare,
        FieldName::Syndrome => HeaderField::Syndrome,
        FieldName::Msn => HeaderField::Msn,
        FieldName::Original => HeaderField::Original,
        FieldName::Immediate => HeaderField::Immediate,
        FieldName::InvalidatedKey => HeaderField::InvalidatedKey,
    }
}

impl StatusName {
    /// The status of the verbs.
    pub const fn status(self) -> CompletionStatus {
        match self {
            StatusName::Success => CompletionStatus::Success,
            StatusName::LocalLength => CompletionStatus::LocalLengthError,
            StatusName::LocalQpOperation => CompletionStatus::LocalQpOperationError,
            StatusName::LocalProtection => CompletionStatus::LocalProtectionError,
            StatusName::Flushed => CompletionStatus::WrFlushError,
            StatusName::WindowBind => CompletionStatus::MwBindError,
            StatusName::BadResponse => CompletionStatus::BadResponseError,
            StatusName::LocalAccess => CompletionStatus::LocalAccessError,
            StatusName::RemoteInvalidRequest => CompletionStatus::RemoteInvalidRequestError,
            StatusName::RemoteAccess => CompletionStatus::RemoteAccessError,
            StatusName::RemoteOperation => CompletionStatus::RemoteOperationError,
            StatusName::RetryExceeded => CompletionStatus::RetryExceededError,
            StatusName::RnrRetryExceeded => CompletionStatus::RnrRetryExceededError,
            StatusName::RemoteAbort => CompletionStatus::RemoteAbortedError,
            StatusName::Fatal => CompletionStatus::FatalError,
            StatusName::General => CompletionStatus::GeneralError,
        }
    }
}

impl CompletedName {
    /// The operation of the verbs.
    pub const fn operation(self) -> CompletionOpcode {
        match self {
            CompletedName::Send => CompletionOpcode::Send,
            CompletedName::Write => CompletionOpcode::Write,
            CompletedName::Read => CompletionOpcode::Read,
            CompletedName::CompareSwap => CompletionOpcode::CompareSwap,
            CompletedName::FetchAdd => CompletionOpcode::FetchAdd,
            CompletedName::BindWindow => CompletionOpcode::BindMemoryWindow,
            CompletedName::LocalInvalidate => CompletionOpcode::LocalInvalidate,
            CompletedName::Receive => CompletionOpcode::Receive,
            CompletedName::ReceiveWriteImmediate => CompletionOpcode::ReceiveWriteWithImm,
        }
    }
}

fn describe_range(span: InclusiveRange, sign: &str) -> String {
    match (span.first, span.last) {
        (first, last) if first == last => format!("{sign}{first}"),
        (first, u64::MAX) => format!("{sign}{first} and later"),
        (first, last) => format!("{sign}{first} to {sign}{last}"),
    }
}

/// The packets of a selector in words: `NAK sequence, PSN +1`.
pub(super) fn describe_packets(matching: &PacketMatch) -> String {
    let mut words = Vec::new();
    let numbers = |numbers: &IntegerRange| describe_range(numbers.0, "");
    if let Some(opcodes) = &matching.opcode {
        words.push(opcodes.all().join(" or "));
    }
    match (matching.class, matching.code, matching.cm) {
        (_, Some(code), _) => words.push(format!("NAK {}", nak_code(code).name())),
        (_, _, Some(message)) => words.push(format!("CM {}", cm_message(message).name())),
        (Some(class), None, None) => words.push(match class {
            ClassName::Request => "request".into(),
            ClassName::ReadRequest => "READ request".into(),
            ClassName::ReadResponse => "READ response".into(),
            ClassName::AtomicResponse => "atomic response".into(),
            ClassName::Response => "response".into(),
            ClassName::Atomic => "atomic request".into(),
            ClassName::Datagram => "datagram".into(),
            ClassName::Management => "management datagram".into(),
            ClassName::RnrNak => "RNR NAK".into(),
            other => format!("{other:?}").to_uppercase(),
        }),
        (None, None, None) if words.is_empty() => words.push("packet".into()),
        _ => {}
    }
    if let Some(qp) = &matching.qp {
        words.push(format!("of {qp}"));
    }
    if let Some(psns) = &matching.psn {
        words.push(match psns {
            PsnRange::Relative(psns) => format!("PSN {}", describe_range(*psns, "+")),
            PsnRange::Absolute(psns) => format!("absolute PSN {}", describe_range(*psns, "")),
        });
    }
    if let Some(message) = &matching.message {
        words.push(format!("message {}", numbers(message)));
    }
    if let Some(packet) = &matching.packet {
        words.push(format!("packet {} of its message", numbers(packet)));
    }
    if let Some(transmission) = &matching.transmission {
        words.push(format!("transmission {}", numbers(transmission)));
    }
    if let Some(priority) = matching.priority {
        words.push(format!("priority {priority}"));
    }
    if let Some(time) = &matching.time {
        let (first, last) = (crate::quantity::Time(time.0.first), time.0.last);
        words.push(match last {
            u64::MAX => format!("from {first} on"),
            last => format!("from {first} to {}", crate::quantity::Time(last)),
        });
    }
    words.join(", ")
}
