//! Host code in virtual time: determinism, faults, and what a failure says.

use softhca::{
    AccessFlags, CompletionQueue, CompletionStatus, ConnectOptions, Device, Endpoint, Error, MemoryRegion,
    QpType, QueuePair, ReceiveRequest, Recovery, SendRequest, Settings, fault, now, rng,
    sim::{Failure, FailureCause, LinkSettings, Report, World},
    sleep, spawn, timeout, yield_now,
};
use std::time::Duration;

const MICROSECOND: Duration = Duration::from_micros(1);

/// A connected queue pair, after its peer called this too.
async fn connect(device: &Device) -> Result<(QueuePair, CompletionQueue), Error> {
    let context = device.open();
    let queue = context.create_completion_queue(64)?;
    let pair = context.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &queue).build()?;
    pair.init(&ConnectOptions::default())?;
    for id in 0..32 {
        pair.post_recv(&ReceiveRequest { wr_id: id, sg_list: &[] })?;
    }
    pair.exchange_and_connect(&device.endpoint_exchange(), "pair", &ConnectOptions::default()).await?;
    Ok((pair, queue))
}

/// Two hosts that write random amounts at random times over a link that loses packets.
fn busy_world(seed: u64) -> Result<Report, Failure> {
    let mut world = World::new(seed);
    world.settings(Settings { recovery: Recovery::GoBackN, ..Settings::default() }).record_log();
    let line = LinkSettings {
        bits_per_second: 10_000_000_000.try_into().ok(),
        delay_ns: 2_000,
        ..LinkSettings::default()
    };
    world.link("left", "right", line);
    world.fault("left", "right", fault::packets().with_probability(0.05).drop());
    world.fault("right", "left", fault::packets().with_probability(0.05).drop());
    for name in ["left", "right"] {
        world.host(name, move |device| async move {
            let context = device.open();
            let domain = context.allocate_protection_domain()?;
            let queue = context.create_completion_queue(64)?;
            let region = domain.allocate_region(65536, AccessFlags::all())?;
            let pair = domain.create_queue_pair(QpType::Rc, &queue).build()?;
            pair.exchange_and_connect(&device.endpoint_exchange(), "pair", &ConnectOptions::default())
                .await?;
            let remote = device.endpoint_exchange().exchange("memory", region.remote_address(0)).await;
            let mut rng = rng();
            for id in 0..20 {
                sleep(Duration::from_nanos(rng.below(20_000))).await;
                let length = rng.below(65536) as u32;
                pair.post_send(&SendRequest::rdma_write(id, &[region.sge(0, length)], remote))?;
                let completion = queue.next().await;
                assert_eq!((completion.wr_id, completion.status), (id, CompletionStatus::Success));
            }
            device.endpoint_exchange().exchange("done", ()).await;
            Ok::<(), Error>(())
        });
    }
    world.run()
}

#[test]
fn the_same_seed_gives_the_same_events() {
    let [first, second] = [busy_world(5).unwrap(), busy_world(5).unwrap()];
    assert!(first.log.len() > 1000, "{}", first.log.len());
    assert_eq!(first.digest, second.digest);
    assert_eq!(first, second);
    assert!(
        first.frame_counters.is_balanced() && first.frame_counters.dropped > 0,
        "{:?}",
        first.frame_counters
    );
    assert_ne!(busy_world(6).unwrap().digest, first.digest);
}

#[test]
fn time_passes_in_awaits_only_and_tasks_share_their_host() {
    let mut world = World::new(1);
    world.host("alone", |_| async {
        assert_eq!(now().nanos(), 0);
        let task = spawn(async {
            sleep(5 * MICROSECOND).await;
            now().nanos()
        });
        sleep(2 * MICROSECOND).await;
        assert_eq!(now().nanos(), 2_000);
        assert_eq!(task.await, 5_000);
        assert_eq!(timeout(MICROSECOND, std::future::pending::<()>()).await, None);
        assert_eq!(timeout(MICROSECOND, async { 3 }).await, Some(3));
    });
    assert_eq!(world.run().unwrap().ended_at.nanos(), 6_000);
}

#[test]
fn hosts_draw_numbers_of_their_own_that_the_seed_decides() {
    let draw = |seed| {
        let mut world = World::new(seed);
        let board = world.endpoint_exchange();
        for name in ["a", "b"] {
            world.host(name, move |device| async move {
                device.endpoint_exchange().publish(name, rng().next_u64())
            });
        }
        world.run().unwrap();
        ["a", "b"].map(|name| board.try_lookup::<u64>(name).unwrap())
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
    assert_ne!(draw(1)[0], draw(1)[1]);
}

#[test]
fn a_deadlock_names_the_hosts_and_what_they_wait_for() {
    let mut world = World::new(77);
    world.host("server", |device| async move {
        connect(&device).await?.1.next().await;
        Ok::<(), Error>(())
    });
    world.host("client", |device| async move {
        let _kept = connect(&device).await?;
        let _: u32 = device.endpoint_exchange().lookup("the go-ahead").await;
        Ok::<(), Error>(())
    });
    let failure = world.run().unwrap_err();
    assert!(matches!(failure.cause, FailureCause::Deadlock { .. }));
    let text = failure.to_string();
    for part in ["deadlock", "server waits for a completion on queue", "World::new(77)"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(text.contains("client waits for somebody to publish \"the go-ahead\""), "{text}");
}

fn panic_of<R: Future<Output = ()> + 'static>(code: impl FnOnce(Device) -> R + 'static) -> String {
    let mut world = World::new(3);
    world.host("careless", code);
    match world.run().unwrap_err().cause {
        FailureCause::Panic { host, message } => {
            assert_eq!(host, "careless");
            message
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn ten_thousand_empty_polls_without_an_await_panic() {
    let message = panic_of(|device| async move {
        let queue = device.open().create_completion_queue(4).unwrap();
        loop {
            assert_eq!(queue.poll(), None);
        }
    });
    assert!(message.contains("10000 empty polls without an await"), "{message}");
    assert!(message.contains("queue.next().await"), "{message}");
}

#[test]
fn blocking_calls_panic_and_name_what_to_await() {
    let message = panic_of(|device| async move {
        let _ = device.open().create_completion_queue(4).unwrap().wait();
    });
    assert!(message.contains("queue.next().await"), "{message}");
    let message = panic_of(|device| async move { device.endpoint_exchange().lookup_blocking::<()>("x") });
    assert!(message.contains("lookup(name).await"), "{message}");
    let message = panic_of(|device| async move {
        let _ = device.open().wait_async_event(MICROSECOND);
    });
    assert!(message.contains("next_async_event().await"), "{message}");
}

#[test]
fn polling_with_an_await_between_is_fine() {
    let mut world = World::new(9);
    world.host("polls", |device| async move {
        let (pair, queue) = connect(&device).await?;
        pair.post_send(&SendRequest::send(100, &[]))?;
        let mut done = 0;
        while done < 2 {
            match queue.poll() {
                Some(_) => done += 1,
                None => yield_now().await,
            }
        }
        Ok::<(), Error>(())
    });
    world.host("sleeps", |device| async move {
        let (pair, queue) = connect(&device).await?;
        sleep(50 * MICROSECOND).await;
        pair.post_send(&SendRequest::send(100, &[]))?;
        while queue.next().await.wr_id != 100 {}
        Ok::<(), Error>(())
    });
    assert_eq!(world.run().unwrap().ended_at.nanos(), 52_000);
}

#[test]
fn an_error_is_told_with_host_time_and_seed() {
    let mut world = World::new(4);
    world.host("fails", |_| async {
        sleep(3 * MICROSECOND).await;
        Err("out of ideas")
    });
    world.service("goes on", |_| async { std::future::pending::<()>().await });
    let failure = world.run().unwrap_err();
    assert_eq!(
        failure.to_string(),
        "host \"fails\" failed at 3 µs: out of ideas\n  to see it again: World::new(4)"
    );
}

#[test]
fn a_panic_of_a_spawned_task_is_told_with_its_host() {
    let message = panic_of(|_| async {
        spawn(async { panic!("in a task") });
        sleep(MICROSECOND).await;
    });
    assert_eq!(message, "in a task");
}

#[test]
fn endless_runs_and_unknown_names_are_refused() {
    let mut world = World::new(4);
    world.time_limit(Duration::from_millis(1)).host("sleeper", |_| async {
        loop {
            sleep(MICROSECOND).await;
        }
        #[allow(unreachable_code)]
        ()
    });
    assert!(matches!(world.run().unwrap_err().cause, FailureCause::TimeLimit { .. }));
    let mut world = World::new(4);
    world.host("a", |_| async {}).host("b", |_| async {}).link("a", "c", LinkSettings::default());
    assert!(world.run().unwrap_err().to_string().contains("the world has no host \"c\""));
}

#[test]
fn a_service_need_not_end_and_a_cut_link_fails_the_connection() {
    let mut world = World::new(12);
    let cut = world.fault("client", "server", fault::data().drop());
    world.service("server", |device| async move {
        let (_pair, queue) = connect(&device).await?;
        loop {
            queue.next().await;
        }
        #[allow(unreachable_code)]
        Ok::<(), Error>(())
    });
    world.host("client", |device| async move {
        let (pair, queue) = connect(&device).await?;
        pair.post_send(&SendRequest::send(100, &[]))?;
        assert_eq!(queue.next().await.status, CompletionStatus::RetryExceededError);
        Ok::<(), Error>(())
    });
    let report = world.run().unwrap();
    assert_eq!(report.rule_counters(cut).fired, 1);
    // timeout 14 is 67.1 ms; in fatal recovery the deadline is timeout × (retry_cnt + 1).
    assert!(report.ended_at.nanos() >= 8 * (4096 << 14), "{:?}", report.ended_at);
}

#[test]
fn hosts_without_a_cable_do_not_reach_each_other() {
    let mut world = World::new(2);
    world.default_link(None);
    let [a, b] = ["a", "b"].map(|name| world.device(name));
    let queues = [&a, &b].map(|device| device.open().create_completion_queue(8).unwrap());
    let pairs = [(&a, &queues[0]), (&b, &queues[1])].map(|(device, queue)| {
        device
            .open()
            .allocate_protection_domain()
            .unwrap()
            .create_queue_pair(QpType::Rc, queue)
            .build()
            .unwrap()
    });
    pairs[0].connect_both(&pairs[1], &ConnectOptions::default()).unwrap();
    pairs[0].post_send(&SendRequest::send(1, &[])).unwrap();
    assert_eq!(queues[0].wait().unwrap().status, CompletionStatus::RetryExceededError);
}

/// A server with a region that its client may not write, and a client that expects success.
fn forbidden_write(world: &mut World) {
    world.host("server", |device| async move {
        let (pair, _queue, region) = with_region(&device, AccessFlags::LOCAL_WRITE)?;
        device.endpoint_exchange().publish("target", region.remote_address(0));
        pair.exchange_and_connect(&device.endpoint_exchange(), "pair", &ConnectOptions::default()).await?;
        let _: () = device.endpoint_exchange().lookup("done").await;
        Ok::<(), Error>(())
    });
    world.host("client", |device| async move {
        let (pair, queue, region) = with_region(&device, AccessFlags::LOCAL_WRITE)?;
        let target = device.endpoint_exchange().lookup("target").await;
        pair.exchange_and_connect(&device.endpoint_exchange(), "pair", &ConnectOptions::default()).await?;
        pair.post_send(&SendRequest::rdma_write(7, &[region.sge(0, 8)], target))?;
        assert!(queue.next().await.status.is_success(), "the write failed");
        Ok::<(), Error>(())
    });
}

fn with_region(
    device: &Device,
    access: AccessFlags,
) -> Result<(QueuePair, CompletionQueue, MemoryRegion), Error> {
    let context = device.open();
    let domain = context.allocate_protection_domain()?;
    let queue = context.create_completion_queue(16)?;
    let pair = domain.create_queue_pair(QpType::Rc, &queue).build()?;
    Ok((pair, queue, domain.allocate_region(64, access)?))
}

#[test]
fn a_failure_explains_the_work_request_and_shows_the_ladder() {
    let mut world = World::new(3);
    forbidden_write(&mut world);
    let text = world.run().unwrap_err().to_string();
    for part in [
        "the write failed",
        "WRITE 7 of client.1 ended with REM_ACCESS_ERR",
        "allows LOCAL_WRITE; the access requires REMOTE_WRITE",
        "Cause:",
        "What to do:",
        "The last steps of the connection:",
        "WRITE_ONLY",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
}

#[test]
fn a_failure_shows_the_connection_that_failed_and_no_later_one() {
    let mut world = World::new(3);
    world.host("server", |device| async move {
        let (pair, _queue, region) = with_region(&device, AccessFlags::LOCAL_WRITE)?;
        device.endpoint_exchange().publish("target", region.remote_address(0));
        pair.exchange_and_connect(&device.endpoint_exchange(), "failing", &ConnectOptions::default()).await?;
        let (pair, queue, region) = with_region(&device, AccessFlags::LOCAL_WRITE)?;
        pair.init(&ConnectOptions::default())?;
        pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[region.sge(0, 64)] })?;
        pair.exchange_and_connect(&device.endpoint_exchange(), "later", &ConnectOptions::default()).await?;
        queue.next().await;
        Ok::<(), Error>(())
    });
    world.host("client", |device| async move {
        let (pair, queue, region) = with_region(&device, AccessFlags::LOCAL_WRITE)?;
        let target = device.endpoint_exchange().lookup("target").await;
        pair.exchange_and_connect(&device.endpoint_exchange(), "failing", &ConnectOptions::default()).await?;
        pair.post_send(&SendRequest::rdma_write(7, &[region.sge(0, 8)], target))?;
        let failed = queue.next().await;
        let (pair, queue, region) = with_region(&device, AccessFlags::LOCAL_WRITE)?;
        pair.exchange_and_connect(&device.endpoint_exchange(), "later", &ConnectOptions::default()).await?;
        pair.post_send(&SendRequest::send(8, &[region.sge(0, 8)]))?;
        queue.next().await;
        assert!(failed.status.is_success(), "the write failed");
        Ok::<(), Error>(())
    });
    let text = world.run().unwrap_err().to_string();
    let (_, ladder) = text.split_once("The last steps of the connection:").expect("a ladder");
    assert!(ladder.contains("WRITE_ONLY") && !ladder.contains("SEND_ONLY"), "{text}");
}

#[test]
#[should_panic(expected = "this rule can never fire")]
fn a_rule_that_can_never_fire_is_rejected() {
    let response = fault::Opcode::all().find(|opcode| opcode.to_string() == "RC READ_RESPONSE_ONLY").unwrap();
    let _ = fault::read_responses().opcode(response).drop();
    let _ = fault::data().opcode(response);
}

#[test]
fn a_test_over_seeds_names_the_seed_and_the_command() {
    let result = std::panic::catch_unwind(|| World::for_each_seed([5, 6], forbidden_write));
    let message = *result.unwrap_err().downcast::<String>().unwrap();
    assert!(
        message.contains("SOFTHCA_SEED=5 cargo test world::a_test_over_seeds_names_the_seed"),
        "{message}"
    );
    assert!(message.contains("Cause:"), "{message}");
}

#[test]
fn a_wait_for_a_receive_is_named() {
    let mut world = World::new(9);
    world.time_limit(Duration::from_millis(100));
    let options =
        ConnectOptions { rnr_retry: ConnectOptions::RNR_RETRY_INFINITE, ..ConnectOptions::default() };
    world.host("server", move |device| async move {
        let (pair, queue, _region) = with_region(&device, AccessFlags::LOCAL_WRITE)?;
        pair.exchange_and_connect(&device.endpoint_exchange(), "pair", &options).await?;
        queue.next().await;
        Ok::<(), Error>(())
    });
    world.host("client", move |device| async move {
        let (pair, queue, _region) = with_region(&device, AccessFlags::LOCAL_WRITE)?;
        pair.exchange_and_connect(&device.endpoint_exchange(), "pair", &options).await?;
        pair.post_send(&SendRequest::send(7, &[]))?;
        queue.next().await;
        Ok::<(), Error>(())
    });
    let failure = world.run().unwrap_err();
    assert!(matches!(failure.cause, FailureCause::TimeLimit { .. }), "{failure}");
    let text = failure.to_string();
    assert!(text.contains("is in RTS: send 7 waits for a receive of its peer (RNR)"), "{text}");
}

#[test]
fn a_missing_receive_is_an_rnr_error_by_default() {
    let mut world = World::new(9);
    world.host("server", |device| async move {
        let (pair, _queue, _region) = with_region(&device, AccessFlags::LOCAL_WRITE)?;
        pair.exchange_and_connect(&device.endpoint_exchange(), "pair", &ConnectOptions::default()).await?;
        let _: () = device.endpoint_exchange().lookup("done").await;
        Ok::<(), Error>(())
    });
    world.host("client", |device| async move {
        let (pair, queue, _region) = with_region(&device, AccessFlags::LOCAL_WRITE)?;
        pair.exchange_and_connect(&device.endpoint_exchange(), "pair", &ConnectOptions::default()).await?;
        pair.post_send(&SendRequest::send(7, &[]))?;
        assert_eq!(queue.next().await.status, CompletionStatus::RnrRetryExceededError);
        device.endpoint_exchange().publish("done", ());
        Ok::<(), Error>(())
    });
    world.run().unwrap();
}

/// The client sends while its peer is in INIT. Before the second of two sends, the peer enters RTR if `late` is set.
fn send_before_ready(recovery: Recovery, late: bool) -> Result<Report, Failure> {
    let mut world = World::new(9);
    world.settings(Settings { recovery, ..Settings::default() });
    world.host("server", move |device| async move {
        let (pair, queue, region) = with_region(&device, AccessFlags::LOCAL_WRITE)?;
        pair.init(&ConnectOptions::default())?;
        for wr_id in 0..2 {
            pair.post_recv(&ReceiveRequest { wr_id, sg_list: &[region.sge(0, 64)] })?;
        }
        let exchange = device.endpoint_exchange();
        let peer: Endpoint = exchange.exchange("pair", pair.endpoint()).await;
        let _: () = exchange.lookup("first packet sent").await;
        sleep(100 * MICROSECOND).await;
        if late {
            pair.connect(&peer, &ConnectOptions::default())?;
            exchange.publish("connected", ());
            queue.next().await;
        }
        let _: () = exchange.lookup("done").await;
        Ok::<(), Error>(())
    });
    world.host("client", move |device| async move {
        let (pair, queue, _region) = with_region(&device, AccessFlags::LOCAL_WRITE)?;
        let exchange = device.endpoint_exchange();
        let peer: Endpoint = exchange.exchange("pair", pair.endpoint()).await;
        pair.connect(&peer, &ConnectOptions::default())?;
        pair.post_send(&SendRequest::send(1, &[]))?;
        exchange.publish("first packet sent", ());
        if late {
            let _: () = exchange.lookup("connected").await;
            pair.post_send(&SendRequest::send(2, &[]))?;
        }
        let status = queue.next().await.status;
        exchange.publish("done", ());
        assert!(status.is_success(), "{status}");
        Ok::<(), Error>(())
    });
    world.run()
}

#[test]
fn a_send_before_the_peer_is_in_rtr_needs_retransmission_and_why_says_so() {
    for late in [false, true] {
        let text = send_before_ready(Recovery::Fatal, late).unwrap_err().to_string();
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in
            ["RETRY_EXC_ERR", "the queue pair is in INIT", "in RTR before the first packet", "go-back-n"]
        {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
    }
    send_before_ready(Recovery::GoBackN, true).unwrap();
}
