//! The structures and constants of libibverbs, with the layout of its headers on 64-bit Linux.
//!
//! The names are those of the headers. `layout.txt` lists every size and offset; the build compares this file with
//! it, and a test compares it with the installed headers.

#![allow(non_camel_case_types, missing_docs)]

mod attributes;
mod connection;
mod constants;
mod objects;
mod work;

use crate::address::Ah;
use crate::channel::CompletionChannelState;
use crate::completion_queue::Cq;
use crate::context::ContextHandle;
use crate::device::DeviceState;
use crate::object::Handle;
use crate::protection::{Mr, Mw, Pd, Td};
use crate::queue_pair::Qp;
use crate::rdma_cm::{CmEventObject, CmIdState, EventChannelState};
use crate::shared_receive::{Srq, Xrcd};
use std::sync::Arc;

pub use attributes::*;
pub use connection::*;
pub use constants::*;
pub use objects::*;
pub use work::*;

include!(concat!(env!("OUT_DIR"), "/layout.rs"));
