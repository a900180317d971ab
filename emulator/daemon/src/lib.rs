//! The daemon: devices that the processes of a user share.
//!
//! [`Daemon`] has one engine thread per host, and one tokio task per connection that handles requests and sends
//! notifications. Work requests and completions use rings in shared memory. The daemon does not trust its clients: it
//! validates their indices and descriptors, limits their resources, and cleans up when they exit.

#![cfg(target_os = "linux")]

mod async_event_watchers;
mod client;
mod client_memory;
mod client_process;
mod command_error;
mod config;
mod control_socket;
mod fault_rules;
mod host;
mod host_driver;
mod host_rules;
mod messages;
mod mount_namespace;
mod network_namespace;
mod notification_queue;
mod port_counters;
mod qp_roles;
mod quota;
mod readable_fd;
mod record_writer;
mod recording;
mod server;
mod session;
mod signals;
mod slots;
mod stall_watchdog;
mod start_error;
mod state;
mod subnet;
mod sysfs;

pub use config::{ClientLimits, Config, ConfigError, DataPath, HostConfig};
pub use mount_namespace::MountNamespace;
pub use server::Daemon;
pub use signals::{Signal, Signals};
pub use start_error::StartError;
pub use subnet::{DEFAULT_TOPOLOGY, SubnetConfig, SubnetManager};
pub use sysfs::PCI_ROOT;
