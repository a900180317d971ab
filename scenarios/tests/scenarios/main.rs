//! Scenario files: what they mean, what is rejected, and the library.

mod bisect;
mod capture_inference;
mod connections;
mod fabric;
mod fault_actions;
mod heal;
mod library;
#[cfg(feature = "udp")]
mod real;
mod refusals;
mod swarm;
