//! A counter in the memory of a server that clients increment under a spin lock. They take the lock with a
//! compare-and-swap.

use super::peer::{Client, serve};
use softhca::history::{Consistency, History, Word, WordOperation};
use softhca::sim::World;
use softhca::{Error, SendRequest};
use std::time::Duration;

const LOCK: u64 = 0;
/// In another cache line than the lock.
const COUNTER: u64 = 64;
const CLIENTS: [&str; 2] = ["alice", "bob"];

/// How a client releases the lock after its WRITE to the counter.
#[derive(Clone, Copy, Debug)]
pub enum Release {
    /// With an atomic: its update is visible only after all earlier data of the queue pair.
    Atomic,
    /// With a WRITE. No specification orders it behind the WRITE to the counter.
    Write,
}

async fn increment(client: &Client, release: Release) -> Result<Option<u64>, Error> {
    while client.compare_and_swap(LOCK, 0, 1).await? != 0 {}
    let old = client.read(COUNTER).await?;
    let (counter, free) = ((old + 1).to_ne_bytes(), 0u64.to_ne_bytes());
    let write = |offset, bytes| SendRequest::rdma_write(1, &[], client.at(offset)).inline_data(bytes);
    let result = [client.buffer.sge(0, 8)];
    let unlock = match release {
        Release::Atomic => SendRequest::fetch_and_add(2, &result, client.at(LOCK), u64::MAX),
        Release::Write => write(LOCK, &free),
    };
    client.run(vec![write(COUNTER, &counter), unlock]).await?;
    Ok(Some(old))
}

pub fn prepare(world: &mut World, release: Release) {
    let history = History::<Word>::default();
    world.service("server", |device| async move {
        let _served = serve(&device, 4096, &CLIENTS).await?;
        std::future::pending::<Result<(), Error>>().await
    });
    for name in CLIENTS {
        let history = history.clone();
        world.host(name, move |device| async move {
            let client = Client::connect(&device, name).await?;
            for _ in 0..3 {
                softhca::sleep(Duration::from_nanos(softhca::rng().below(3_000))).await;
                let increment = increment(&client, release);
                history.record(name, WordOperation::FetchAdd { add: 1 }, increment).await?;
            }
            Ok::<(), Error>(())
        });
    }
    world.check(move || history.check(&Word(0), Consistency::Linearizable));
}
