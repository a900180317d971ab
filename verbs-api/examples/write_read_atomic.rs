//! One-sided operations: WRITE, READ, compare-and-swap and fetch-and-add on a peer's memory.
//!
//! The peer's application does nothing: its card serves its memory. Run it with
//! `cargo run --example write_read_atomic`.

use softhca::{Access, CompletionQueue, Device, Error, Path, QpKind, SendRequest};

fn main() -> Result<(), Error> {
    // Two cards in one process, each on a loopback address of its own.
    let [alice, bob] = [Device::embedded()?.open(), Device::embedded()?.open()];
    let [alice_domain, bob_domain] = [alice.allocate_domain()?, bob.allocate_domain()?];
    let queue = alice.create_completion_queue(16)?;
    let from = alice_domain.queue_pair(QpKind::Rc, &queue).create()?;
    let to = bob_domain.queue_pair(QpKind::Rc, &bob.create_completion_queue(16)?).create()?;
    from.connect_both(&to, &Path::default())?;

    // Bob's memory says what peers may do to it; Alice's only that her own card may write it.
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let theirs = bob_domain.register(4096, rights)?;
    let mine = alice_domain.register(4096, Access::LOCAL_WRITE)?;

    // WRITE: my bytes go to a place in Bob's memory, named by address and remote key.
    mine.write_at(0, b"written by Alice");
    from.post(&SendRequest::write(1, &[mine.entry(0, 16)], theirs.remote(256)))?;
    finish(&queue, "WRITE");
    println!("Bob's memory at 256: {}", String::from_utf8_lossy(&theirs.read_at(256, 16)));

    // READ: the other way. Scattered: the first half to 100, the second to 200.
    from.post(&SendRequest::read(2, &[mine.entry(100, 8), mine.entry(200, 8)], theirs.remote(256)))?;
    finish(&queue, "READ");
    let halves = [mine.read_at(100, 8), mine.read_at(200, 8)].map(|half| String::from_utf8(half).unwrap());
    println!("Alice read {halves:?}");

    // Fetch-and-add: a counter in Bob's memory. The old value comes back.
    for _ in 0..3 {
        from.post(&SendRequest::fetch_add(3, &[mine.entry(0, 8)], theirs.remote(0), 10))?;
        finish(&queue, "FETCH_ADD");
        println!("the counter was {} and is {}", mine.load(0), theirs.load(0));
    }

    // Compare-and-swap: a lock word. Taking it works once.
    for owner in [7, 8] {
        from.post(&SendRequest::compare_swap(4, &[mine.entry(0, 8)], theirs.remote(8), 0, owner))?;
        finish(&queue, "COMPARE_SWAP");
        match mine.load(0) {
            0 => println!("{owner} took the lock"),
            holder => println!("{owner} found the lock taken by {holder}"),
        }
    }

    // What the region does not allow fails, and takes the connection with it.
    let secret = bob_domain.register(64, Access::LOCAL_WRITE)?;
    from.post(&SendRequest::read(5, &[mine.entry(0, 8)], secret.remote(0)))?;
    let refused = queue.wait()?;
    println!("READ without the right to: {:?}, the queue pair is in {}", refused.status, from.state()?);
    Ok(())
}

fn finish(queue: &CompletionQueue, what: &str) {
    let completion = queue.wait().expect("a completion");
    assert!(completion.status.is_success(), "{what}: {:?}", completion.status);
}
