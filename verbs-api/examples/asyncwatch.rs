//! Prints the asynchronous events of a device, as `ibv_asyncwatch` does: `cargo run --example asyncwatch`.
//!
//! An embedded card serves this process alone, so the example causes events itself. A shared receive queue runs low,
//! and a peer asks for memory that it must not access.

use softhca::{AccessFlags, ConnectOptions, Context, Device, Error, QpType, ReceiveRequest, SendRequest};
use std::time::Duration;

fn main() -> Result<(), Error> {
    let [watched, peer] = [Device::embedded()?, Device::embedded()?];
    let context = watched.open();
    println!("{}: async event FD is embedded", watched.name());

    // Events come at any time, so a program watches them on a thread (or a task) of its own.
    let watcher = std::thread::spawn({
        let context = context.clone();
        move || {
            while let Some(event) = context.wait_async_event(Duration::from_secs(1)) {
                println!("  event {event:?}");
            }
        }
    });
    provoke(&context, &peer.open())?;
    watcher.join().expect("the watcher's thread");
    Ok(())
}

fn provoke(watched: &Context, peer: &Context) -> Result<(), Error> {
    let domain = watched.allocate_protection_domain()?;
    let queue = watched.create_completion_queue(16)?;
    let region = domain.allocate_region(64, AccessFlags::LOCAL_WRITE)?;
    let shared = domain.create_shared_receive_queue(8, 1)?;
    let pair = domain.create_queue_pair(QpType::Rc, &queue).shared_receive_queue(&shared).build()?;

    let peer_queue = peer.create_completion_queue(16)?;
    let peer_domain = peer.allocate_protection_domain()?;
    let peer_region = peer_domain.allocate_region(64, AccessFlags::LOCAL_WRITE)?;
    let peer_pair = peer_domain.create_queue_pair(QpType::Rc, &peer_queue).build()?;
    pair.connect_both(&peer_pair, &ConnectOptions::default())?;

    // SRQ_LIMIT_REACHED: fewer than two receives are left when the second message takes one.
    for id in 0..3 {
        shared.post_recv(&ReceiveRequest { wr_id: id, sg_list: &[region.sge(0, 64)] })?;
    }
    shared.set_limit(2)?;
    for id in 0..2 {
        peer_pair.post_send(&SendRequest::send(id, &[peer_region.sge(0, 64)]))?;
        peer_queue.wait()?;
    }

    // QP_ACCESS_ERR: the region may not be read by peers. Both queue pairs go to the error state.
    peer_pair.post_send(&SendRequest::rdma_read(9, &[peer_region.sge(0, 8)], region.remote_address(0)))?;
    println!("the peer's read: {:?}", peer_queue.wait()?.status);
    Ok(())
}
