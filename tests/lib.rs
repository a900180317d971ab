//! Shared by the end-to-end tests: paths of test data, and two connected hosts with a recording of all events.

#![allow(missing_docs, reason = "test support: the tests that use it are its documentation")]

use std::path::PathBuf;

// The fabric tests use a single HCA without a network, and verbs on a world, too.
#[path = "../emulator/fabric/tests/bare/mod.rs"]
pub mod bare;
pub mod namespace;
pub mod pair;
pub mod process;
pub mod tools;
#[path = "../emulator/fabric/tests/verbs/mod.rs"]
pub mod verbs;

/// The path of a capture, given its name without extension.
pub fn capture(name: &str) -> PathBuf {
    captures_folder().join(name).with_extension("pcap")
}

/// The folder with the captures.
pub fn captures_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("captures")
}
