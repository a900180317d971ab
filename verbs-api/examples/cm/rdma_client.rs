//! One message each way, as between `rdma_client` and `rdma_server`, with endpoints and blocking calls.
//!
//! ```text
//! cm rdma_server [-p PORT]
//! cm rdma_client -s HOST [-p PORT]
//! ```

use super::common::{self, Options, Outcome};
use softhca::cm::{ConnectionParameters, Endpoint, EventType, Hints, address_info, create_endpoint};
use softhca::{AccessFlags, Completion, MemoryRegion, QueuePair, ReceiveRequest, SendRequest};

pub fn run(name: &str, end: fn(&Options) -> Outcome, options: &Options) -> Outcome {
    println!("{name}: start");
    end(options)?;
    println!("{name}: end 0");
    Ok(())
}

/// As many reads as the peer asks for and the card can do.
fn all_reads() -> ConnectionParameters {
    ConnectionParameters { responder_resources: 255, initiator_depth: 255, ..ConnectionParameters::default() }
}

/// Memory for one message each way, with a receive for the peer's, and the queue pair.
fn prepare(endpoint: &Endpoint) -> Result<(&QueuePair, MemoryRegion), softhca::Error> {
    let pair = endpoint.queue_pair.as_ref().expect("an endpoint that connects has a queue pair");
    let region = endpoint.protection_domain.allocate_region(32, AccessFlags::LOCAL_WRITE)?;
    pair.post_recv(&ReceiveRequest { wr_id: 0, sg_list: &[region.sge(0, 16)] })?;
    Ok((pair, region))
}

fn succeed(completion: Completion) -> Outcome {
    match completion.status.is_success() {
        true => Ok(()),
        false => Err(format!("a request failed: {:?}", completion.status).into()),
    }
}

/// Sends a message and receives one back.
pub fn client(options: &Options) -> Outcome {
    let context = common::device()?.open();
    let server = options.text('s').unwrap_or("127.0.0.1");
    let info = address_info(&context, Some(server), options.text('p').unwrap_or("7471"), &Hints::default())?;
    let endpoint = create_endpoint(&context, &info, 1)?;
    let (pair, region) = prepare(&endpoint)?;
    endpoint.id.connect(&all_reads())?;
    pair.post_send(&SendRequest::send(0, &[region.sge(16, 16)]))?;
    succeed(endpoint.send_cq.wait()?)?;
    succeed(endpoint.recv_cq.wait()?)?;
    Ok(endpoint.id.disconnect()?)
}

/// Receives a message and sends one back.
pub fn server(options: &Options) -> Outcome {
    let context = common::device()?.open();
    let hints = Hints { passive: true, ..Hints::default() };
    let info = address_info(&context, options.text('s'), options.text('p').unwrap_or("7471"), &hints)?;
    let listening = create_endpoint(&context, &info, 1)?;
    listening.id.listen(0)?;
    let endpoint = Endpoint::from_request(listening.id.get_request()?, 1)?;
    let (pair, region) = prepare(&endpoint)?;
    endpoint.id.accept(&all_reads())?;
    succeed(endpoint.recv_cq.wait()?)?;
    pair.post_send(&SendRequest::send(0, &[region.sge(16, 16)]))?;
    succeed(endpoint.send_cq.wait()?)?;
    // The client leaves first, or both do at once.
    endpoint.id.channel().wait()?.expect(EventType::Disconnected)?;
    let _ = endpoint.id.disconnect();
    Ok(())
}
