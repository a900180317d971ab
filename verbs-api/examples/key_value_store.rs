//! A key-value store whose clients read it with one-sided READs: `cargo run --example key_value_store`.
//!
//! The server's application changes values while clients read them; its CPU serves no read. How does a reader
//! know that what it read is whole, and not half old and half new? Each slot carries its version twice, before
//! and after the value. The server makes the first version odd, changes the value, then makes both the next
//! even number. A reader that finds an odd version, or two that differ, reads again.

use softhca::{
    Access, CompletionQueue, Device, Error, MemoryRegion, Path, QpKind, QueuePair, RemoteAddress, SendRequest,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// A slot: version, key, value, version again.
const VALUE: usize = 48;
const SLOT: u64 = 8 + 8 + VALUE as u64 + 8;
const SLOTS: u64 = 64;

/// The server's side: plain stores to its own registered memory.
struct Store {
    table: MemoryRegion,
}

impl Store {
    /// Where a key lives. (A real store would handle two keys with the same slot.)
    fn slot(key: u64) -> u64 {
        key % SLOTS * SLOT
    }

    fn put(&self, key: u64, value: &[u8; VALUE]) {
        let at = Store::slot(key);
        let version = self.table.load(at);
        // Odd: a change is under way. Eight aligned bytes are written at once, and in order.
        self.table.write_at(at, &(version + 1).to_ne_bytes());
        self.table.write_at(at + 8, &key.to_ne_bytes());
        self.table.write_at(at + 16, value);
        self.table.write_at(at + 16 + VALUE as u64, &(version + 2).to_ne_bytes());
        self.table.write_at(at, &(version + 2).to_ne_bytes());
    }
}

/// A client: a connection, a buffer, and the address of the table.
struct Client {
    pair: QueuePair,
    queue: CompletionQueue,
    buffer: MemoryRegion,
    table: RemoteAddress,
    /// Reads that met a change and were made again.
    torn: u64,
}

impl Client {
    /// One READ of the whole slot, and again if the server was just changing it.
    fn get(&mut self, key: u64) -> Result<Option<[u8; VALUE]>, Error> {
        loop {
            let remote = RemoteAddress { address: self.table.address + Store::slot(key), ..self.table };
            self.pair.post(&SendRequest::read(key, &[self.buffer.entry(0, SLOT as u32)], remote))?;
            let completion = self.queue.wait()?;
            assert!(completion.status.is_success(), "READ: {:?}", completion.status);
            let slot = self.buffer.read_at(0, SLOT as usize);
            let word = |at: usize| u64::from_ne_bytes(slot[at..at + 8].try_into().expect("eight bytes"));
            let (before, after) = (word(0), word(16 + VALUE));
            if before != after || before % 2 == 1 {
                self.torn += 1;
                continue;
            }
            let value = slot[16..16 + VALUE].try_into().expect("the size of a value");
            return Ok((before > 0 && word(8) == key).then_some(value));
        }
    }
}

fn main() -> Result<(), Error> {
    let [server, client] = [Device::embedded()?.open(), Device::embedded()?.open()];

    // The server registers its table and lets peers read it, nothing else.
    let domain = server.allocate_domain()?;
    let table = domain.register((SLOT * SLOTS) as usize, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
    let listening = domain.queue_pair(QpKind::Rc, &server.create_completion_queue(4)?).create()?;

    let client_domain = client.allocate_domain()?;
    let queue = client.create_completion_queue(4)?;
    let pair = client_domain.queue_pair(QpKind::Rc, &queue).create()?;
    pair.connect_both(&listening, &Path::default())?;
    let buffer = client_domain.register(SLOT as usize, Access::LOCAL_WRITE)?;
    // The client knows the table by address and key: in real life the server sends them once.
    let mut client = Client { pair, queue, buffer, table: table.remote(0), torn: 0 };

    let store = Store { table };
    store.put(1, &[b'a'; VALUE]);
    println!("key 1: {:?}", client.get(1)?.map(|value| value[0] as char));
    println!("key 2: {:?}", client.get(2)?);

    // One thread changes key 1 without a pause while the client reads it: every value that it sees is whole.
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for letter in (b'a'..=b'z').cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
                store.put(1, &[letter; VALUE]);
            }
        });
        let reads = 2000;
        for _ in 0..reads {
            let value = client.get(1)?.expect("key 1 is there");
            assert!(value.iter().all(|byte| *byte == value[0]), "a torn value: {value:?}");
        }
        stop.store(true, Ordering::Relaxed);
        println!("{reads} reads, every value whole; {} reads met a change and were made again", client.torn);
        Ok(())
    })
}
