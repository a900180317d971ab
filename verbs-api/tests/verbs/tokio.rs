//! The async API under tokio's runtimes.

#[path = "../../examples/async_server.rs"]
mod async_server;

use softhca::sim::World;
use softhca::{
    AccessFlags, AsyncEvent, CompletionQueue, CompletionStatus, ConnectOptions, Context, Device,
    MemoryRegion, ProtectionDomain, QpType, QueuePair, SendRequest,
};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use tokio::runtime::{Builder, Runtime};
use tokio_stream::StreamExt;

const CLIENTS: usize = 12;

/// Both of tokio's runtimes.
fn runtimes() -> [Runtime; 2] {
    [Builder::new_multi_thread(), Builder::new_current_thread()]
        .map(|mut builder| builder.enable_all().build().unwrap())
}

/// Two connected queue pairs on embedded devices.
struct Pair {
    contexts: [Context; 2],
    _domains: [ProtectionDomain; 2],
    cq: CompletionQueue,
    regions: [MemoryRegion; 2],
    pairs: [QueuePair; 2],
}

fn connected(access: AccessFlags) -> Pair {
    let contexts = [(); 2].map(|()| Device::embedded().unwrap().open());
    let domains = [0, 1].map(|index: usize| contexts[index].allocate_protection_domain().unwrap());
    let cq = contexts[0].create_completion_queue(16).unwrap();
    let other = contexts[1].create_completion_queue(16).unwrap();
    let regions = [0, 1].map(|index: usize| domains[index].allocate_region(64, access).unwrap());
    let pairs = [(0, &cq), (1, &other)]
        .map(|(index, cq): (usize, _)| domains[index].create_queue_pair(QpType::Rc, cq).build().unwrap());
    pairs[0].connect_both(&pairs[1], &ConnectOptions::default()).unwrap();
    Pair { contexts, _domains: domains, cq, regions, pairs }
}

impl Pair {
    fn write(&self, id: u64) {
        let gather = [self.regions[0].sge(0, 8)];
        let remote = self.regions[1].remote_address(0);
        self.pairs[0].post_send(&SendRequest::rdma_write(id, &gather, remote)).unwrap();
    }
}

/// Polls a future once, and drops it.
async fn poll_once<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

#[test]
fn many_connections_are_served_under_both_runtimes() {
    for runtime in runtimes() {
        runtime.block_on(async_server::run_on_sockets(CLIENTS)).unwrap();
    }
}

#[test]
fn the_same_code_runs_in_a_world() {
    let [first, second] = [(); 2].map(|()| async_server::run_in_world(CLIENTS));
    assert_eq!(first.digest, second.digest);
}

#[test]
fn a_completion_queue_is_a_stream() {
    for runtime in runtimes() {
        runtime.block_on(async {
            let pair = connected(AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE);
            (0..5).for_each(|id| pair.write(id));
            let ids: Vec<u64> = pair.cq.clone().take(5).map(|completion| completion.wr_id).collect().await;
            assert_eq!(ids, [0, 1, 2, 3, 4]);
        });
    }
}

#[test]
fn a_dropped_future_loses_no_completion() {
    for runtime in runtimes() {
        runtime.block_on(async {
            let pair = connected(AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE);
            let mut seen = Vec::new();
            for id in 0..100 {
                seen.extend(poll_once(pair.cq.next()).await);
                pair.write(id);
                seen.extend(poll_once(pair.cq.next()).await);
                // The queue holds 16.
                if id % 8 == 7 {
                    while seen.len() <= id as usize {
                        seen.push(pair.cq.next().await);
                    }
                }
            }
            while seen.len() < 100 {
                seen.push(pair.cq.next().await);
            }
            let ids: Vec<u64> = seen.iter().map(|completion| completion.wr_id).collect();
            assert_eq!(ids, (0..100).collect::<Vec<_>>());
        });
    }
}

#[test]
fn asynchronous_events_are_a_stream() {
    for runtime in runtimes() {
        runtime.block_on(async {
            let pair = connected(AccessFlags::LOCAL_WRITE);
            let mut events = pair.contexts[1].async_events();
            assert_eq!(poll_once(events.next()).await, None);
            pair.write(1);
            assert_eq!(pair.cq.next().await.status, CompletionStatus::RemoteAccessError);
            let event = StreamExt::next(&mut events).await;
            assert_eq!(event, Some(AsyncEvent::QueuePairAccessError(pair.pairs[1].qpn())));
        });
    }
}

#[test]
fn a_task_that_panics_does_not_hang_its_handle() {
    let runtime = Builder::new_current_thread().build().unwrap();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        runtime.block_on(async { softhca::spawn_send(async { assert!(false_value(), "a bug") }).await })
    }));
    assert!(outcome.is_err());
}

fn false_value() -> bool {
    std::hint::black_box(false)
}

#[test]
fn tasks_of_a_world_can_be_joined() {
    let mut world = World::new(1);
    world.host("only", |_| async { assert_eq!(softhca::spawn_send(async { 7 }).await, 7) });
    world.run().unwrap();
}
