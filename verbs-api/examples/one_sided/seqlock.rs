//! A value of three cache lines that its host changes with plain stores, and that a client reads with READs.

use super::peer::{Client, serve};
use softhca::history::{Consistency, History, Register, RegisterOperation};
use softhca::sim::World;
use softhca::{Error, SendRequest};
use std::time::Duration;

const VERSION: u64 = 0;
/// Its words are in different cache lines.
const VALUE: u64 = 64;
const WORDS: u64 = 3;

/// How a client reads.
#[derive(Clone, Copy, Debug)]
pub enum Read {
    /// The version, the value, and the version again, as three READs. It reads again unless both versions are the same
    /// even number. READs of a queue pair are executed in their order.
    Checked,
    /// One READ of the value.
    Unchecked,
}

async fn read(client: &Client, how: Read) -> Result<Option<Vec<u64>>, Error> {
    let length = (64 * WORDS) as u32;
    let [before, value, after] =
        [(0, 8), (64, length), (8, 8)].map(|(offset, length)| [client.buffer.sge(offset, length)]);
    loop {
        let read_value = SendRequest::rdma_read(2, &value, client.at(VALUE));
        client
            .run(match how {
                Read::Unchecked => vec![read_value],
                Read::Checked => vec![
                    SendRequest::rdma_read(1, &before, client.at(VERSION)),
                    read_value,
                    SendRequest::rdma_read(3, &after, client.at(VERSION)),
                ],
            })
            .await?;
        let versions = (client.buffer.load(0), client.buffer.load(8));
        let is_whole = versions.0 == versions.1 && versions.0.is_multiple_of(2);
        if is_whole || matches!(how, Read::Unchecked) {
            return Ok(Some((0..WORDS).map(|word| client.buffer.load(64 + 64 * word)).collect()));
        }
    }
}

pub fn prepare(world: &mut World, how: Read) {
    let history = History::<Register<Vec<u64>>>::default();
    let writes = history.clone();
    world.host("server", |device| async move {
        let served = serve(&device, 4096, &["client"]).await?;
        let store = |offset, value: u64| served.region.write_at(offset, &value.to_ne_bytes());
        for value in 1..=6 {
            softhca::sleep(Duration::from_nanos(1_500)).await;
            let write = writes.invoke("server", RegisterOperation::Write(vec![value; WORDS as usize]));
            // Odd: a change is in progress.
            store(VERSION, 2 * value - 1);
            for word in 0..WORDS {
                store(VALUE + 64 * word, value);
            }
            store(VERSION, 2 * value);
            writes.respond(write, None);
        }
        // The client still reads.
        softhca::sleep(Duration::from_micros(100)).await;
        Ok::<(), Error>(())
    });
    let reads = history.clone();
    world.host("client", move |device| async move {
        let client = Client::connect(&device, "client").await?;
        for _ in 0..3 {
            reads.record("client", RegisterOperation::Read, read(&client, how)).await?;
        }
        Ok::<(), Error>(())
    });
    world.check(move || history.check(&Register(vec![0; WORDS as usize]), Consistency::Linearizable));
}
