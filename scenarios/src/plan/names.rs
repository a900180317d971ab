//! Packet classes of selectors, and selectors in words.

use crate::quantity::{IntegerRange, PsnRange};
use crate::spec::{ClassName, PacketMatch};
use softhca_fabric::{CmMessage, InclusiveRange, PacketClass, PacketClasses};
use softhca_wire::NakCode;

/// The CM messages of the active side and of the passive side.
pub(super) const fn cm_messages_by_side(datagrams: bool) -> [&'static [CmMessage]; 2] {
    use CmMessage as M;
    match datagrams {
        true => [&[M::SidrReq], &[M::SidrRep]],
        false => {
            [&[M::Req, M::Rtu, M::Mra, M::Rej, M::Dreq, M::Drep], &[M::Rep, M::Mra, M::Rej, M::Dreq, M::Drep]]
        }
    }
}

/// The packet classes of a selector. The error names the keys that exclude each other.
pub(super) fn packet_classes(matching: &PacketMatch) -> Result<Option<PacketClasses>, &'static str> {
    let class = match (matching.class, matching.code, matching.cm) {
        (None | Some(ClassName::Nak), Some(code), None) => {
            return Ok(Some(PacketClasses::Only(PacketClass::Nak(code))));
        }
        (_, Some(_), _) => return Err("`code` requires class `nak`"),
        (None | Some(ClassName::Cm), None, Some(message)) => {
            return Ok(Some(PacketClasses::Only(PacketClass::Cm(message))));
        }
        (_, _, Some(_)) => return Err("`cm` requires class `cm`"),
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

/// Whether the classes include requests and responses.
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

fn describe_range(span: InclusiveRange, sign: &str) -> String {
    match (span.first, span.last) {
        (first, last) if first == last => format!("{sign}{first}"),
        (first, u64::MAX) => format!("{sign}{first} and above"),
        (first, last) => format!("{sign}{first} to {sign}{last}"),
    }
}

/// The packets of a selector in words: `NAK sequence error, PSN +1`.
pub(super) fn describe_packets(matching: &PacketMatch) -> String {
    let mut words = Vec::new();
    let numbers = |numbers: &IntegerRange| describe_range(numbers.0, "");
    if let Some(opcodes) = &matching.opcode {
        words.push(opcodes.all().join(" or "));
    }
    match (matching.class, matching.code, matching.cm) {
        (_, Some(code), _) => words.push(format!("NAK {}", code.name())),
        (_, _, Some(message)) => words.push(format!("CM {}", message.name())),
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
            u64::MAX => format!("from {first}"),
            last => format!("from {first} to {}", crate::quantity::Time(last)),
        });
    }
    words.join(", ")
}
