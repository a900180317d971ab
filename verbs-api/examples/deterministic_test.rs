//! A test in virtual time with a scripted loss, run twice: `cargo run --example deterministic_test`.
//!
//! This is what a test of your own RDMA program can look like: hosts as async code, a fault that hits the same
//! packet in every run, and assertions on what the program makes of it.

use softhca::{
    Access, Action, Classes, Error, Path, QpKind, ReceiveRequest, Repeat, Report, Selector, SendRequest,
    Span, Status, World,
};

fn lost_packet(seed: u64) -> Report {
    let mut world = World::new(seed);
    world.record();

    // The second packet that the client sends to the server is lost, once.
    let loss = world.fault(
        "client",
        "server",
        Selector { classes: Some(Classes::Data), psn: Some(Span::exactly(1)), ..Selector::default() },
        Repeat::times(1),
        Action::Drop,
    );

    world.host("server", |device| async move {
        let context = device.open();
        let domain = context.allocate_domain()?;
        let queue = context.create_completion_queue(16)?;
        let region = domain.register(8192, Access::LOCAL_WRITE)?;
        let pair = domain.queue_pair(QpKind::Rc, &queue).create()?;
        pair.post_receive(&ReceiveRequest { id: 1, scatter: &[region.entry(0, 8192)] })?;
        pair.meet(&device.rendezvous(), "the connection", &Path::default()).await?;
        // A loss is fatal by default: the receive is flushed, and the program gets to know.
        assert_eq!(queue.next().await.status, Status::Flushed);
        Ok::<(), Error>(())
    });

    world.host("client", |device| async move {
        let context = device.open();
        let domain = context.allocate_domain()?;
        let queue = context.create_completion_queue(16)?;
        let region = domain.register(8192, Access::LOCAL_WRITE)?;
        let pair = domain.queue_pair(QpKind::Rc, &queue).create()?;
        pair.meet(&device.rendezvous(), "the connection", &Path::default()).await?;
        pair.post(&SendRequest::send(1, &[region.entry(0, 4000)]))?;
        assert_eq!(queue.next().await.status, Status::RetryExceeded);
        Ok::<(), Error>(())
    });

    let report = world.run().expect("both hosts see the loss");
    assert_eq!(report.tally(loss).fired, 1);
    report
}

fn main() {
    let [first, second] = [lost_packet(42), lost_packet(42)];
    for moment in &first.record {
        println!("{moment}");
    }
    assert_eq!(first, second);
    println!("both runs ended at {:?} with digest {:016x}", first.ended_at, first.digest);
    // Another seed has other numbers, and the same story.
    assert_eq!(lost_packet(43).record.len(), first.record.len());
}
