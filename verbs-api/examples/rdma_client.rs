//! Sends one message and receives one back, as `rdma_client` does, with endpoints and blocking calls.
//!
//! ```text
//! cargo run --release --example rdma_client -- -s HOST [-p PORT]
//! ```

#[path = "common/mod.rs"]
mod common;

use common::{Options, Outcome};
use softhca::rdma_cm::{Hints, Parameters, address_info, create_endpoint};
use softhca::{Access, ReceiveRequest, SendRequest};

fn main() -> Outcome {
    let options = Options::read("p:s:")?;
    println!("rdma_client: start");
    run(&options)?;
    println!("rdma_client: end 0");
    Ok(())
}

fn run(options: &Options) -> Outcome {
    let context = common::device()?.open();
    let server = options.text('s').unwrap_or("127.0.0.1");
    let port = options.text('p').unwrap_or("7471");
    let info = address_info(&context, Some(server), port, &Hints::default())?;
    let endpoint = create_endpoint(&context, &info, 1)?;
    let pair = endpoint.queue_pair.as_ref().expect("an endpoint that connects has a queue pair");
    let region = endpoint.domain.register(32, Access::LOCAL_WRITE)?;
    pair.post_receive(&ReceiveRequest { id: 0, scatter: &[region.entry(0, 16)] })?;
    let all = Parameters { responder_resources: 255, initiator_depth: 255, ..Parameters::default() };
    endpoint.id.connect(&all)?;
    pair.post(&SendRequest::send(0, &[region.entry(16, 16)]))?;
    for completion in [endpoint.sends.wait()?, endpoint.receives.wait()?] {
        if !completion.status.is_success() {
            return Err(format!("a request failed: {:?}", completion.status).into());
        }
    }
    endpoint.id.disconnect()?;
    Ok(())
}
