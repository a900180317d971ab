//! A key-value store whose clients read it with one-sided READs: `cargo run --example key_value_store`.
//!
//! The server's application changes values while clients read them; its CPU serves no read. How does a reader know that
//! what it read is whole, and not half old and half new? Each slot has a version. The server makes it odd, changes the
//! value, and makes it the next even number. A reader asks for the version, the slot, and the version again. A
//! connection serves READs in their order. If both versions are the same even number, nothing changed in between.
//!
//! Two versions around the value and one READ of all would not suffice: the card may fetch the bytes of one READ in any
//! order.

use softhca::{
    AccessFlags, CompletionQueue, ConnectOptions, Device, Error, MemoryRegion, QpType, QueuePair,
    RemoteAddress, SendFlags, SendRequest,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// A slot: version, key, value.
const VALUE: usize = 48;
const SLOT: u64 = 8 + 8 + VALUE as u64;
const SLOTS: u64 = 64;

/// The server's side: plain stores to its own registered memory.
struct Store {
    table: MemoryRegion,
}

impl Store {
    /// The slot of a key. (A real store would handle two keys with the same slot.)
    fn slot(key: u64) -> u64 {
        key % SLOTS * SLOT
    }

    fn put(&self, key: u64, value: &[u8; VALUE]) {
        let at = Store::slot(key);
        let version = self.table.load(at);
        // Odd: a change is under way. Eight aligned bytes are written at once, and writes keep their order.
        self.table.write_at(at, &(version + 1).to_ne_bytes());
        self.table.write_at(at + 8, &key.to_ne_bytes());
        self.table.write_at(at + 16, value);
        self.table.write_at(at, &(version + 2).to_ne_bytes());
    }
}

/// A client: a connection, a buffer, and the address of the table.
struct Client {
    pair: QueuePair,
    queue: CompletionQueue,
    buffer: MemoryRegion,
    table: RemoteAddress,
    /// How often a read met a change and was made again.
    retries: u64,
}

impl Client {
    /// Version, slot, version: three READs in one batch, and again if the server was just changing the slot.
    fn get(&mut self, key: u64) -> Result<Option<[u8; VALUE]>, Error> {
        let remote = RemoteAddress { address: self.table.address + Store::slot(key), ..self.table };
        let [before, slot, after] =
            [(0, 8), (8, SLOT as u32), (8 + SLOT, 8)].map(|(at, length)| [self.buffer.sge(at, length)]);
        loop {
            // Only the last reports: when it is done, those before it are.
            self.pair.post_send_list(&[
                SendRequest::rdma_read(1, &before, remote).flags(SendFlags::empty()),
                SendRequest::rdma_read(2, &slot, remote).flags(SendFlags::empty()),
                SendRequest::rdma_read(3, &after, remote),
            ])?;
            let completion = self.queue.wait()?;
            assert!(completion.status.is_success(), "READ: {:?}", completion.status);
            let (version, again) = (self.buffer.load(0), self.buffer.load(8 + SLOT));
            if version != again || version % 2 == 1 {
                self.retries += 1;
                continue;
            }
            let found = version > 0 && self.buffer.load(16) == key;
            let value = self.buffer.read_at(24, VALUE as u64).try_into().expect("the size of a value");
            return Ok(found.then_some(value));
        }
    }
}

/// Tells the writer to stop, however the reader ends.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn main() -> Result<(), Error> {
    let [server, client] = [Device::embedded()?.open(), Device::embedded()?.open()];

    // The server registers its table and lets peers read it, nothing else.
    let domain = server.allocate_protection_domain()?;
    let table = domain.allocate_region(SLOT * SLOTS, AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ)?;
    let listening = domain.create_queue_pair(QpType::Rc, &server.create_completion_queue(4)?).build()?;

    let client_domain = client.allocate_protection_domain()?;
    let queue = client.create_completion_queue(4)?;
    let pair = client_domain.create_queue_pair(QpType::Rc, &queue).build()?;
    pair.connect_both(&listening, &ConnectOptions::default())?;
    let buffer = client_domain.allocate_region(SLOT + 16, AccessFlags::LOCAL_WRITE)?;
    // The client knows the table by address and key: in real life the server sends them once.
    let mut client = Client { pair, queue, buffer, table: table.remote_address(0), retries: 0 };

    let store = Store { table };
    store.put(1, &[b'a'; VALUE]);
    println!("key 1: {:?}", client.get(1)?.map(|value| value[0] as char));
    println!("key 2: {:?}", client.get(2)?);

    // A thread changes key 1 all the time while the client reads it: every value that the client gets is whole.
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| {
            for letter in (b'a'..=b'z').cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
                store.put(1, &[letter; VALUE]);
                thread::sleep(Duration::from_micros(20));
            }
        });
        let reads = 2000;
        for _ in 0..reads {
            let value = client.get(1)?.expect("key 1 is there");
            assert!(value.iter().all(|byte| *byte == value[0]), "a torn value: {value:?}");
        }
        println!("{reads} reads, every value whole; {} met a change and were made again", client.retries);
        Ok(())
    })
}
