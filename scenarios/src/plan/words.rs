//! What names of the language stand for in the fabric and the engine, and back.

use crate::language::{ClassName, CmName, CompletedName, FieldName, Match, NakName, StatusName};
use crate::quantity::{Numbers, Psns};
use softhca_fabric::{Class, Classes, CmMessage, Field, Span};
use softhca_queue::{CompletionOperation, Status};
use softhca_wire::NakCode;

pub(super) const fn nak(name: NakName) -> NakCode {
    match name {
        NakName::Sequence => NakCode::SequenceError,
        NakName::InvalidRequest => NakCode::InvalidRequest,
        NakName::RemoteAccess => NakCode::RemoteAccess,
        NakName::RemoteOperation => NakCode::RemoteOperational,
    }
}

const fn cm(name: CmName) -> CmMessage {
    match name {
        CmName::Req => CmMessage::ConnectRequest,
        CmName::Mra => CmMessage::MessageReceiptAcknowledge,
        CmName::Rej => CmMessage::Reject,
        CmName::Rep => CmMessage::ConnectReply,
        CmName::Rtu => CmMessage::ReadyToUse,
        CmName::Dreq => CmMessage::DisconnectRequest,
        CmName::Drep => CmMessage::DisconnectReply,
        CmName::SidrReq => CmMessage::ServiceRequest,
        CmName::SidrRep => CmMessage::ServiceReply,
    }
}

/// The messages that the side that asks sends, and those of the side that is asked.
pub(super) const fn messages(datagrams: bool) -> [&'static [CmMessage]; 2] {
    use CmMessage as M;
    match datagrams {
        true => [&[M::ServiceRequest], &[M::ServiceReply]],
        false => [
            &[
                M::ConnectRequest,
                M::ReadyToUse,
                M::MessageReceiptAcknowledge,
                M::Reject,
                M::DisconnectRequest,
                M::DisconnectReply,
            ],
            &[
                M::ConnectReply,
                M::MessageReceiptAcknowledge,
                M::Reject,
                M::DisconnectRequest,
                M::DisconnectReply,
            ],
        ],
    }
}

/// The classes that a selector names; the error says which two of its words do not go together.
pub(super) fn classes(matching: &Match) -> Result<Option<Classes>, &'static str> {
    let class = match (matching.class, matching.code, matching.cm) {
        (None | Some(ClassName::Nak), Some(code), None) => {
            return Ok(Some(Classes::Only(Class::Nak(nak(code)))));
        }
        (_, Some(_), _) => return Err("only class `nak` has a `code`"),
        (None | Some(ClassName::Cm), None, Some(message)) => {
            return Ok(Some(Classes::Only(Class::Cm(cm(message)))));
        }
        (_, _, Some(_)) => return Err("only class `cm` has a `cm` message"),
        (None, None, None) => return Ok(None),
        (Some(class), None, None) => class,
    };
    Ok(Some(match class {
        ClassName::Data => Classes::Data,
        ClassName::Answer => Classes::Answers,
        ClassName::Nak => Classes::Naks,
        ClassName::Cm => Classes::Cm,
        ClassName::Send => Classes::Only(Class::Send),
        ClassName::Write => Classes::Only(Class::Write),
        ClassName::ReadRequest => Classes::Only(Class::ReadRequest),
        ClassName::Atomic => Classes::Only(Class::Atomic),
        ClassName::Datagram => Classes::Only(Class::Datagram),
        ClassName::ReadResponse => Classes::Only(Class::ReadResponse),
        ClassName::AtomicResponse => Classes::Only(Class::AtomicResponse),
        ClassName::Ack => Classes::Only(Class::Ack),
        ClassName::Rnr => Classes::Only(Class::ReceiverNotReady),
        ClassName::Cnp => Classes::Only(Class::CongestionNotification),
        ClassName::Management => Classes::Only(Class::Management),
        ClassName::Pfc => Classes::Only(Class::Pause),
    }))
}

/// Whether requests, answers or both are of these classes.
pub(super) fn senses(classes: Option<Classes>) -> (bool, bool) {
    let Some(classes) = classes else { return (true, true) };
    let requests =
        [Class::Send, Class::Write, Class::ReadRequest, Class::Atomic, Class::Flush, Class::Datagram];
    let asks = requests.into_iter().any(|class| classes.contains(class));
    let answers = [Class::ReadResponse, Class::AtomicResponse, Class::Ack, Class::ReceiverNotReady];
    let answered = answers.into_iter().any(|class| classes.contains(class))
        || NakCode::ALL.into_iter().any(|code| classes.contains(Class::Nak(code)));
    (asks, answered)
}

pub(super) const fn field(name: FieldName) -> Field {
    match name {
        FieldName::Opcode => Field::Opcode,
        FieldName::Solicited => Field::Solicited,
        FieldName::Migration => Field::Migration,
        FieldName::Pad => Field::Pad,
        FieldName::Version => Field::Version,
        FieldName::PKey => Field::PartitionKey,
        FieldName::Reserved => Field::Reserved,
        FieldName::DestinationQp => Field::DestinationQp,
        FieldName::AckRequest => Field::AckRequest,
        FieldName::Psn => Field::Psn,
        FieldName::QKey => Field::QueueKey,
        FieldName::SourceQp => Field::SourceQp,
        FieldName::Address => Field::Address,
        FieldName::RKey => Field::RemoteKey,
        FieldName::Length => Field::Length,
        FieldName::AtomicAddress => Field::AtomicAddress,
        FieldName::AtomicKey => Field::AtomicKey,
        FieldName::SwapOrAdd => Field::SwapOrAdd,
        FieldName::Compare => Field::Compare,
        FieldName::Syndrome => Field::Syndrome,
        FieldName::Msn => Field::Msn,
        FieldName::Original => Field::Original,
        FieldName::Immediate => Field::Immediate,
        FieldName::InvalidatedKey => Field::InvalidatedKey,
    }
}

impl StatusName {
    /// The status of the verbs.
    pub const fn status(self) -> Status {
        match self {
            StatusName::Success => Status::Success,
            StatusName::LocalLength => Status::LocalLength,
            StatusName::LocalQpOperation => Status::LocalQueuePairOperation,
            StatusName::LocalProtection => Status::LocalProtection,
            StatusName::Flushed => Status::Flushed,
            StatusName::WindowBind => Status::WindowBind,
            StatusName::BadResponse => Status::BadResponse,
            StatusName::LocalAccess => Status::LocalAccess,
            StatusName::RemoteInvalidRequest => Status::RemoteInvalidRequest,
            StatusName::RemoteAccess => Status::RemoteAccess,
            StatusName::RemoteOperation => Status::RemoteOperation,
            StatusName::RetryExceeded => Status::RetryExceeded,
            StatusName::RnrRetryExceeded => Status::RnrRetryExceeded,
            StatusName::RemoteAbort => Status::RemoteAbort,
            StatusName::Fatal => Status::Fatal,
            StatusName::General => Status::General,
        }
    }
}

impl CompletedName {
    /// The operation of the verbs.
    pub const fn operation(self) -> CompletionOperation {
        match self {
            CompletedName::Send => CompletionOperation::Send,
            CompletedName::Write => CompletionOperation::Write,
            CompletedName::Read => CompletionOperation::Read,
            CompletedName::CompareSwap => CompletionOperation::CompareSwap,
            CompletedName::FetchAdd => CompletionOperation::FetchAdd,
            CompletedName::BindWindow => CompletionOperation::BindWindow,
            CompletedName::LocalInvalidate => CompletionOperation::LocalInvalidate,
            CompletedName::Receive => CompletionOperation::Receive,
            CompletedName::ReceiveWriteImmediate => CompletionOperation::ReceiveWriteImmediate,
        }
    }
}

fn span(span: Span, sign: &str) -> String {
    match (span.first, span.last) {
        (first, last) if first == last => format!("{sign}{first}"),
        (first, u64::MAX) => format!("{sign}{first} and later"),
        (first, last) => format!("{sign}{first} to {sign}{last}"),
    }
}

/// The packets of a selector in words: `NAK sequence, PSN +1`.
pub(super) fn packets(matching: &Match) -> String {
    let mut words = Vec::new();
    let numbers = |numbers: &Numbers| span(numbers.0, "");
    if let Some(opcodes) = &matching.opcode {
        words.push(opcodes.all().join(" or "));
    }
    match (matching.class, matching.code, matching.cm) {
        (_, Some(code), _) => words.push(format!("NAK {}", nak(code).name())),
        (_, _, Some(message)) => words.push(format!("CM {}", cm(message).name())),
        (Some(class), None, None) => words.push(match class {
            ClassName::Data => "data packet".into(),
            ClassName::ReadRequest => "READ request".into(),
            ClassName::ReadResponse => "READ response".into(),
            ClassName::AtomicResponse => "atomic response".into(),
            ClassName::Answer => "answer".into(),
            ClassName::Atomic => "atomic request".into(),
            ClassName::Datagram => "datagram".into(),
            ClassName::Management => "management datagram".into(),
            ClassName::Rnr => "RNR NAK".into(),
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
            Psns::Relative(psns) => format!("PSN {}", span(*psns, "+")),
            Psns::Absolute(psns) => format!("absolute PSN {}", span(*psns, "")),
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
