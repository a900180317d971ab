//! Sends one message and receives one back, as `rdma_client` does, with endpoints and blocking calls.
//!
//! ```text
//! cargo run --release --example rdma_client -- -s HOST [-p PORT]
//! ```

#[path = "common/mod.rs"]
mod common;

use common::{Options, Outcome};
use softhca::cm::{ConnectionParameters, Hints, address_info, create_endpoint};
use softhca::{AccessFlags, ReceiveRequest, SendRequest};

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
    let region = endpoint.protection_domain.allocate_region(32, AccessFlags::LOCAL_WRITE)?;
    pair.post_recv(&ReceiveRequest { wr_id: 0, sg_list: &[region.sge(0, 16)] })?;
    let all = ConnectionParameters {
        responder_resources: 255,
        initiator_depth: 255,
        ..ConnectionParameters::default()
    };
    endpoint.id.connect(&all)?;
    pair.post_send(&SendRequest::send(0, &[region.sge(16, 16)]))?;
    for completion in [endpoint.send_cq.wait()?, endpoint.recv_cq.wait()?] {
        if !completion.status.is_success() {
            return Err(format!("a request failed: {:?}", completion.status).into());
        }
    }
    endpoint.id.disconnect()?;
    Ok(())
}
