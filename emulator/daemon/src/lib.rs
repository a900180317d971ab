//! One or more cards shared by the processes of a user.
//!
//! [`Daemon`] has one engine thread per host, and one thread per connection that answers control calls and
//! passes news on. Work and completions go through rings in shared memory. A client is never trusted: its
//! indices are clamped, its descriptors checked, its share limited, and its death noticed.

#![cfg(target_os = "linux")]

mod client;
mod client_memory;
mod client_process;
mod command_error;
mod config;
mod fault_rules;
mod host;
mod mount_namespace;
mod notification_queue;
mod port_counters;
mod quota;
mod recording;
mod server;
mod session;
mod signals;

pub use config::{ClientLimits, Config, ConfigError, HostConfig};
pub use mount_namespace::MountNamespace;
pub use server::{Daemon, StartError};
pub use signals::{Signal, Signals};
