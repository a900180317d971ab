//! Connection management, with the options and the output of the programs in Debian's rdmacm-utils.
//!
//! ```text
//! cargo run --release --example cm -- PROGRAM [OPTIONS]
//! ```
//!
//! Each program is a module, which lists its options.

#![allow(missing_docs, reason = "the names of an example speak for themselves")]

mod cmtime;
pub mod common;
mod mckey;
mod rdma_client;
pub mod rping;
mod ucmatose;
pub mod udaddy;

use common::{Options, Outcome};

fn main() -> Outcome {
    let mut arguments = std::env::args().skip(1);
    let program = arguments.next().unwrap_or_default();
    let mut options = |letters| Options::parse(letters, &mut arguments);
    match program.as_str() {
        "cmtime" => common::run(options("s:qb:p:c:")?, cmtime::server, cmtime::client),
        "mckey" => common::conclude(mckey::run(&options("m:srC:S:")?)),
        "rdma_client" => rdma_client::run("rdma_client", rdma_client::client, &options("p:s:")?),
        "rdma_server" => rdma_client::run("rdma_server", rdma_client::server, &options("p:s:")?),
        "rping" => rping::run(options("sca:p:S:C:vVq")?),
        "ucmatose" => {
            common::conclude(common::run(options("s:qb:p:c:C:S:t:m")?, ucmatose::server, ucmatose::client))
        }
        "udaddy" => common::conclude(common::run(options("s:qb:p:c:C:S:")?, udaddy::server, udaddy::client)),
        other => {
            let programs = "cmtime, mckey, rdma_client, rdma_server, rping, ucmatose and udaddy";
            Err(format!("{other:?} is no program; the programs are {programs}").into())
        }
    }
}
