//! libibverbs.so.1 and librdmacm.so.1 for unmodified programs, on the card of a daemon.
//!
//! One shared object carries all names. `exports.txt` says which symbol, under which version, is which function
//! here; the build makes a trampoline of each line. Nothing is done twice: every verb is the one of the crate
//! `softhca`, and what it does not have is refused with EOPNOTSUPP and absent from the capabilities.
//!
//! Safety: each exported function trusts its caller as far as the manual page of the C function lets it.
//! Pointers to objects are those that this library gave out; objects that were destroyed are recognised.

#![cfg(target_os = "linux")]

mod abi;
mod address;
mod channel;
mod completion_queue;
mod context;
mod destroyed_context;
mod device;
mod errno;
mod event_fd;
mod events;
mod extended_poll;
mod modify;
mod names;
mod object;
mod post;
mod protection;
mod query;
mod queue_pair;
mod rdma_cm;
mod shared_receive;
mod unsupported;
mod work_builder;

include!(concat!(env!("OUT_DIR"), "/exports.rs"));
