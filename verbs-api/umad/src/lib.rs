//! libibumad.so.3: management datagrams of unmodified programs, on the InfiniBand subnet of a daemon.
//!
//! `exports.txt` of the C library maps each symbol to a function here. A port is a connection to the daemon, over which
//! agents are registered, and a stream with MADs, whose descriptor the program may poll. The daemon keeps the semantics
//! of the kernel's user MAD device: transaction IDs, timeouts, retries and RMPP.
//!
//! Safety: each function trusts its caller as far as the manual page of the C function allows.

#![cfg(target_os = "linux")]

mod abi;
pub mod ca;
pub mod dump;
pub mod message;
pub mod names;
pub mod pair;
pub mod port;
pub mod registration;
mod subnet;
