//! Receives one message and sends one back, as `rdma_server` does, with endpoints and blocking calls.
//!
//! ```text
//! cargo run --release --example rdma_server -- [-p PORT]
//! cargo run --release --example rdma_client -- -s HOST [-p PORT]
//! ```

#[path = "common/mod.rs"]
mod common;

use common::{Options, Outcome};
use softhca::cm::{ConnectionParameters, Endpoint, EventType, Hints, address_info, create_endpoint};
use softhca::{AccessFlags, ReceiveRequest, SendRequest};

fn main() -> Outcome {
    let options = Options::read("p:s:")?;
    println!("rdma_server: start");
    run(&options)?;
    println!("rdma_server: end 0");
    Ok(())
}

fn run(options: &Options) -> Outcome {
    let context = common::device()?.open();
    let hints = Hints { passive: true, ..Hints::default() };
    let info = address_info(&context, options.text('s'), options.text('p').unwrap_or("7471"), &hints)?;
    let listening = create_endpoint(&context, &info, 1)?;
    listening.id.listen(0)?;
    let endpoint = Endpoint::from_request(listening.id.get_request()?, 1)?;
    let pair = endpoint.queue_pair.as_ref().expect("the endpoint of a request has a queue pair");
    let region = endpoint.protection_domain.allocate_region(32, AccessFlags::LOCAL_WRITE)?;
    pair.post_recv(&ReceiveRequest { wr_id: 0, sg_list: &[region.sge(0, 16)] })?;
    // As many reads as the peer asks for and the card can do.
    let all = ConnectionParameters {
        responder_resources: 255,
        initiator_depth: 255,
        ..ConnectionParameters::default()
    };
    endpoint.id.accept(&all)?;
    let received = endpoint.recv_cq.wait()?;
    let sent = match received.status.is_success() {
        true => {
            pair.post_send(&SendRequest::send(0, &[region.sge(16, 16)]))?;
            endpoint.send_cq.wait()?
        }
        false => received,
    };
    if !sent.status.is_success() {
        return Err(format!("a request failed: {:?}", sent.status).into());
    }
    // The client leaves first, or both do at once.
    endpoint.id.channel().wait()?.expect(EventType::Disconnected)?;
    let _ = endpoint.id.disconnect();
    Ok(())
}
