//! Checks of requested sizes.

use crate::VerbsError;

pub fn check_limit(what: &'static str, value: u64, limit: u64) -> Result<(), VerbsError> {
    if value > limit { Err(VerbsError::LimitExceeded { what, value, limit }) } else { Ok(()) }
}
