//! One or more cards shared by the processes of a user.
//!
//! [`Daemon`] has one engine thread per host, and one thread per connection that answers control calls and
//! passes news on. Work and completions go through rings in shared memory. A client is never trusted: its
//! indices are clamped, its descriptors checked, its share limited, and its death noticed.

#![cfg(target_os = "linux")]

mod client;
mod config;
mod faults;
mod host;
mod outbox;
mod peer;
mod ports;
mod quota;
mod reach;
mod record;
mod refusal;
mod server;
mod session;
mod signals;
mod view;

pub use config::{Config, ConfigError, HostConfig, Share};
pub use server::{Daemon, StartError};
pub use signals::{Came, Signals};
pub use view::View;
