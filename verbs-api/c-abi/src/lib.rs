//! libibverbs.so.1 and librdmacm.so.1 for unmodified programs, on the HCA of a daemon.
//!
//! One shared object exports all symbols. `exports.txt` maps each symbol and version to a function of this crate; the
//! build generates a trampoline for each line. Every verb is implemented once, in the crate `softhca`. Unsupported
//! verbs fail with EOPNOTSUPP and are absent from the capabilities.
//!
//! Safety: each exported function trusts its caller as far as the manual page of the C function allows. The types of its
//! arguments say how far: a [`Handle`](object::Handle) is null or came from this library, destroyed objects are detected,
//! and a reference is a valid pointer. Only C programs call these functions, which therefore are not `unsafe`.

#![cfg(target_os = "linux")]

mod abi;
mod address;
mod call_site;
mod channel;
mod completion_events;
mod completion_queue;
mod context;
mod destroyed_context;
mod device;
mod errno;
mod event_fd;
mod events;
mod extended_poll;
mod faults;
mod modify;
mod names;
mod object;
mod ops;
mod poll_cursor;
mod post;
mod protection;
mod query;
mod queue_pair;
mod rdma_cm;
mod shared_receive;
mod started_requests;
mod unacknowledged;
mod unsupported;
mod work_builder;

include!(concat!(env!("OUT_DIR"), "/exports.rs"));
