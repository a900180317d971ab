//! Facts as text, for the reference.

use super::{InvalidateAnswer, RetryTiming, VendorError, WriteCheck, WriteCount};
use crate::Recovery;
use alloc::format;
use alloc::string::{String, ToString};
use softhca_types::{CompletionStatus, Errno};
use softhca_wire::NakCode;

/// A fact that the reference can print.
pub trait FactValue {
    /// The value as text.
    fn text(&self) -> String;
}

impl FactValue for u32 {
    fn text(&self) -> String {
        self.to_string()
    }
}

impl FactValue for u8 {
    fn text(&self) -> String {
        self.to_string()
    }
}

impl FactValue for bool {
    fn text(&self) -> String {
        if *self { "yes".into() } else { "no".into() }
    }
}

impl FactValue for Recovery {
    fn text(&self) -> String {
        self.name().into()
    }
}

impl FactValue for NakCode {
    fn text(&self) -> String {
        self.name().into()
    }
}

impl FactValue for CompletionStatus {
    fn text(&self) -> String {
        self.to_string()
    }
}

impl FactValue for Errno {
    fn text(&self) -> String {
        self.to_string()
    }
}

impl FactValue for VendorError {
    fn text(&self) -> String {
        match self {
            VendorError::Reason => "code of the reason".into(),
            VendorError::Code(code) => format!("{code:#x}"),
        }
    }
}

impl FactValue for InvalidateAnswer {
    fn text(&self) -> String {
        match self {
            InvalidateAnswer::Nothing => "none",
            InvalidateAnswer::Ack => "ACK",
        }
        .into()
    }
}

impl FactValue for WriteCheck {
    fn text(&self) -> String {
        match self {
            WriteCheck::Message => "of the whole message by every packet",
            WriteCheck::Packet => "of each packet",
        }
        .into()
    }
}

impl FactValue for WriteCount {
    fn text(&self) -> String {
        match self {
            WriteCount::OnArrival => "before all checks",
            WriteCount::AfterQueuePairAccess => "after the access flags of the queue pair, before the rkey",
        }
        .into()
    }
}

impl FactValue for RetryTiming {
    fn text(&self) -> String {
        let RetryTiming { min_exponent, factor, adaptive } = self;
        let base = match (factor, min_exponent) {
            (1, 0) => "4.096 µs · 2^T".into(),
            _ => format!("{factor} · 4.096 µs · 2^T, T at least {min_exponent}"),
        };
        match adaptive {
            None => format!("retry_cnt + 1 timeouts of {base}"),
            Some(adaptive) => format!(
                "{} adaptive retransmissions in {}/1000 of a timeout, then retry_cnt − 1 timeouts of {base}",
                adaptive.retransmissions, adaptive.per_mille
            ),
        }
    }
}
