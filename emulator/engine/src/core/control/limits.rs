//! Checks of requested sizes.

use crate::{VerbsError, VerbsResult};

pub fn check_limit(what: &'static str, value: u64, limit: u64) -> VerbsResult {
    if value > limit { Err(VerbsError::LimitExceeded { what, value, limit }) } else { Ok(()) }
}
