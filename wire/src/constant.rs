//! Constant names in serialized values.

extern crate std;

use serde::{Deserialize, Deserializer, de::Error};
use std::boxed::Box;
use std::collections::BTreeSet;
use std::string::String;
use std::sync::{Mutex, PoisonError};

/// The most names and texts, and the most bytes of each: more than this program has.
const MAX_NAMES: usize = 512;
const MAX_LENGTH: usize = 256;

static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// Reads a name or text that is a constant in the program that wrote it. Each is stored once, and never freed.
pub fn deserialize_constant<'de, D: Deserializer<'de>>(deserializer: D) -> Result<&'static str, D::Error> {
    let name = String::deserialize(deserializer)?;
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name.as_str()) {
        return Ok(known);
    }
    if names.len() >= MAX_NAMES || name.len() > MAX_LENGTH {
        return Err(D::Error::custom("not a name of this program"));
    }
    let name: &'static str = Box::leak(name.into_boxed_str());
    names.insert(name);
    Ok(name)
}
