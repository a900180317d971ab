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

pub use attributes::*;
pub use connection::*;
pub use constants::*;
pub use objects::*;
pub use work::*;

include!(concat!(env!("OUT_DIR"), "/layout.rs"));
