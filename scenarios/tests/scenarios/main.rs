//! Scenario files: what they mean, what is rejected, and the library.

mod capture_inference;
mod connections;
mod fabric;
mod fault_actions;
mod library;
#[cfg(feature = "udp")]
mod real;
mod refusals;
