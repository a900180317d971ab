//! A log in the memory of a server, to which a client appends with WRITEs. The server polls a flag.

use super::peer::{Client, serve};
use softhca::history::{Consistency, History, Log, LogOperation};
use softhca::sim::World;
use softhca::{Error, SendRequest};

/// The words of an entry are in different cache lines, and the flag follows them.
const WORDS: u64 = 3;
const FLAG: u64 = 64 * WORDS;
const ENTRY: u64 = FLAG + 64;
const ENTRIES: u64 = 2;

/// How a client appends an entry.
#[derive(Clone, Copy, Debug)]
pub enum Append {
    /// A WRITE of the entry, then an atomic on the flag: its update is visible only after all earlier data.
    WriteThenAtomic,
    /// A WRITE of the entry, then a WRITE of the flag. Cards keep their order, the specification does not promise it.
    WriteThenWrite,
    /// One WRITE of entry and flag. The flag is its last word, but nothing orders the bytes of a message.
    OneWrite,
}

async fn append(client: &Client, how: Append, index: u64) -> Result<Option<Vec<u64>>, Error> {
    for word in 0..WORDS {
        client.buffer.write_at(64 * word, &(index + 1).to_ne_bytes());
    }
    let at = ENTRY * index;
    client.buffer.write_at(FLAG, &1u64.to_ne_bytes());
    let entry = [client.buffer.sge(0, FLAG as u32)];
    let flag = [client.buffer.sge(FLAG, 8)];
    let both = [client.buffer.sge(0, FLAG as u32 + 8)];
    let result = [client.buffer.sge(2048, 8)];
    let write_entry = SendRequest::rdma_write(1, &entry, client.at(at));
    client
        .run(match how {
            Append::WriteThenAtomic => {
                vec![write_entry, SendRequest::fetch_and_add(2, &result, client.at(at + FLAG), 1)]
            }
            Append::WriteThenWrite => {
                vec![write_entry, SendRequest::rdma_write(2, &flag, client.at(at + FLAG))]
            }
            Append::OneWrite => vec![SendRequest::rdma_write(1, &both, client.at(at))],
        })
        .await?;
    Ok(None)
}

pub fn prepare(world: &mut World, how: Append) {
    let history = History::<Log<Vec<u64>>>::default();
    let reads = history.clone();
    world.host("server", |device| async move {
        let served = serve(&device, 4096, &["client"]).await?;
        for index in 0..ENTRIES {
            while served.region.load(ENTRY * index + FLAG) == 0 {
                softhca::yield_now().await;
            }
            let read = reads.invoke("server", LogOperation::Read(index as usize));
            let words = (0..WORDS).map(|word| served.region.load(ENTRY * index + 64 * word)).collect();
            reads.respond(read, Some(words));
        }
        Ok::<(), Error>(())
    });
    let appends = history.clone();
    world.host("client", move |device| async move {
        let client = Client::connect(&device, "client").await?;
        for index in 0..ENTRIES {
            let entry = vec![index + 1; WORDS as usize];
            appends.record("client", LogOperation::Append(entry), append(&client, how, index)).await?;
        }
        Ok::<(), Error>(())
    });
    world.check(move || history.check(&Log::new(), Consistency::Linearizable));
}
