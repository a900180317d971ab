//! A test in virtual time with a scripted loss, run twice: `cargo run --example deterministic_test`.
//!
//! A test of your own RDMA program can look like this. Hosts are async code, a fault hits the same packet in every run,
//! and assertions check how the program handles it.

use softhca::sim::{Report, World};
use softhca::{
    AccessFlags, CompletionStatus, ConnectOptions, Error, QpType, ReceiveRequest, SendRequest, fault,
};

fn lost_packet(seed: u64) -> Report {
    let mut world = World::new(seed);
    world.record_log();

    // The second packet that the client sends to the server is lost, once.
    let loss = world.fault("client", "server", fault::data().psn(1).times(1).drop());

    world.host("server", |device| async move {
        let context = device.open();
        let domain = context.allocate_protection_domain()?;
        let queue = context.create_completion_queue(16)?;
        let region = domain.allocate_region(8192, AccessFlags::LOCAL_WRITE)?;
        let pair = domain.create_queue_pair(QpType::Rc, &queue).build()?;
        pair.init(&ConnectOptions::default())?;
        pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[region.sge(0, 8192)] })?;
        pair.exchange_and_connect(&device.endpoint_exchange(), "the connection", &ConnectOptions::default())
            .await?;
        // A loss is fatal by default: the receive is flushed, and the program gets to know.
        assert_eq!(queue.next().await.status, CompletionStatus::WrFlushError);
        Ok::<(), Error>(())
    });

    world.host("client", |device| async move {
        let context = device.open();
        let domain = context.allocate_protection_domain()?;
        let queue = context.create_completion_queue(16)?;
        let region = domain.allocate_region(8192, AccessFlags::LOCAL_WRITE)?;
        let pair = domain.create_queue_pair(QpType::Rc, &queue).build()?;
        pair.exchange_and_connect(&device.endpoint_exchange(), "the connection", &ConnectOptions::default())
            .await?;
        pair.post_send(&SendRequest::send(1, &[region.sge(0, 4000)]))?;
        assert_eq!(queue.next().await.status, CompletionStatus::RetryExceededError);
        Ok::<(), Error>(())
    });

    let report = world.run().expect("both hosts see the loss");
    assert_eq!(report.rule_counters(loss).fired, 1);
    report
}

fn main() {
    let [first, second] = [lost_packet(42), lost_packet(42)];
    for entry in &first.log {
        println!("{entry}");
    }
    assert_eq!(first, second);
    println!("both runs ended at {:?} with digest {:016x}", first.ended_at, first.digest);
    // Another seed has other numbers, and the same events.
    assert_eq!(lost_packet(43).log.len(), first.log.len());
}
