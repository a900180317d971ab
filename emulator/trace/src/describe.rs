//! Facts of the fabric as words: sentences for people, short names for programs.

use crate::NameTable;
use softhca_fabric::{DownDirections, Fault, FaultCause, FaultEffect, IcrcPolicy};
use std::fmt::Debug;

/// The name of an enum's variant as programs read it: `ResponseGap` is `response-gap`, and a variant inside
/// of another follows it: `request-rejected/psn-out-of-sequence`. Taken from the derived `Debug`, so that no list is kept twice.
pub(crate) fn kebab_case(value: &impl Debug) -> String {
    let text = format!("{value:?}");
    let mut slug = String::new();
    for (depth, part) in text.split('(').enumerate() {
        let name: String = part.chars().take_while(char::is_ascii_alphanumeric).collect();
        if !name.starts_with(|first: char| first.is_ascii_uppercase()) {
            break;
        }
        if depth > 0 {
            slug.push('/');
        }
        for (at, character) in name.chars().enumerate() {
            if at > 0 && character.is_ascii_uppercase() {
                slug.push('-');
            }
            slug.push(character.to_ascii_lowercase());
        }
        if name.len() < part.trim_end().len() {
            break;
        }
    }
    slug
}

/// The change of a packet in words.
pub fn effect(fault: &Fault) -> String {
    match fault.effect {
        FaultEffect::Dropped { copies: 0 } => "dropped".into(),
        FaultEffect::Dropped { copies } => format!("dropped with {copies} duplicates"),
        FaultEffect::Duplicated { copies: 1 } => "duplicated".into(),
        FaultEffect::Duplicated { copies } => format!("duplicated {copies} times"),
        FaultEffect::Reordered { by } => format!("held back behind {by}"),
        FaultEffect::Delayed { ns } => format!("delayed {}", duration(ns)),
        FaultEffect::Corrupted { bit, icrc: IcrcPolicy::Stale } => format!("bit {bit} flipped"),
        FaultEffect::Corrupted { bit, icrc: IcrcPolicy::Recomputed } => {
            format!("bit {bit} flipped, ICRC repaired")
        }
        FaultEffect::MarkedCe => "marked CE".into(),
        FaultEffect::Rewritten { field, from, to } => {
            format!("{} {from:#x} made {to:#x}", kebab_case(&field))
        }
        FaultEffect::LinkTakenDown { directions: cut, until_ns } => {
            let ways = if cut == DownDirections::BothWays { "both ways" } else { "one way" };
            format!("link cut {ways} until {}", duration(until_ns))
        }
    }
}

/// The effect of a fault without the time until which a link is cut.
pub(crate) fn effect_without_time(fault: &Fault) -> String {
    match fault.effect {
        FaultEffect::LinkTakenDown { directions: DownDirections::BothWays, .. } => {
            "link cut both ways".into()
        }
        FaultEffect::LinkTakenDown { directions: DownDirections::OneWay, .. } => "link cut one way".into(),
        _ => effect(fault),
    }
}

/// The actor.
pub(crate) fn cause(fault: &Fault, names: &NameTable) -> String {
    match fault.cause {
        FaultCause::Rule(id) => names.rule_name(id),
        FaultCause::LinkDown => "the link: it is down".into(),
        FaultCause::ExceedsMtu => "the line: larger than its MTU".into(),
    }
}

/// The text of a fault: its effect on a packet, and its actor.
pub(crate) fn fault(fault: &Fault, names: &NameTable) -> String {
    format!("{} by {}", effect(fault), cause(fault, names))
}

/// How often: `once`, `twice`, `3 times`.
pub(crate) fn times(count: u32) -> String {
    match count {
        1 => "once".into(),
        2 => "twice".into(),
        _ => format!("{count} times"),
    }
}

/// A time in the largest unit that leaves it readable.
pub fn duration(ns: u64) -> String {
    let (unit, name) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..1_000_000 => (1_000, "µs"),
        1_000_000..1_000_000_000 => (1_000_000, "ms"),
        _ => (1_000_000_000, "s"),
    };
    // Three digits are enough for people.
    let thousandths = ns / (unit / 1_000);
    let text = format!("{}.{:03}", thousandths / 1_000, thousandths % 1_000);
    format!("{} {name}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_engine::{DropReason, QpState, Reason, RequestError};
    use softhca_wire::Psn;

    #[test]
    fn variants_have_short_names() {
        let psn = Psn::new(1);
        assert_eq!(kebab_case(&Reason::AckTimeout { psn }), "ack-timeout");
        assert_eq!(
            kebab_case(&Reason::RequestRejected(RequestError::PsnOutOfSequence { expected: psn, got: psn })),
            "request-rejected/psn-out-of-sequence"
        );
        assert_eq!(kebab_case(&DropReason::InvalidQpState(QpState::Error)), "invalid-qp-state/error");
        assert_eq!(kebab_case(&DropReason::BadIcrc), "bad-icrc");
    }

    #[test]
    fn durations_are_readable() {
        let shown = [0, 999, 1_000, 1_500, 655_360_000, 2_000_000_001].map(duration);
        assert_eq!(shown, ["0 ns", "999 ns", "1 µs", "1.5 µs", "655.36 ms", "2 s"]);
    }
}
