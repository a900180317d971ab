//! One-sided operations: WRITE, READ, compare-and-swap and fetch-and-add on a peer's memory.
//!
//! The peer's application does nothing: its card serves its memory. Run it with
//! `cargo run --example write_read_atomic`.

use softhca::{AccessFlags, CompletionQueue, ConnectOptions, Device, Error, QpType, SendRequest};

fn main() -> Result<(), Error> {
    // Two cards in one process, each on a loopback address of its own.
    let [alice, bob] = [Device::embedded()?.open(), Device::embedded()?.open()];
    let [alice_domain, bob_domain] = [alice.allocate_protection_domain()?, bob.allocate_protection_domain()?];
    let queue = alice.create_completion_queue(16)?;
    let from = alice_domain.create_queue_pair(QpType::Rc, &queue).build()?;
    let to = bob_domain.create_queue_pair(QpType::Rc, &bob.create_completion_queue(16)?).build()?;
    from.connect_both(&to, &ConnectOptions::default())?;

    // Bob's memory says what peers may do to it; Alice's only that her own card may write it.
    let rights = AccessFlags::LOCAL_WRITE
        | AccessFlags::REMOTE_WRITE
        | AccessFlags::REMOTE_READ
        | AccessFlags::REMOTE_ATOMIC;
    let theirs = bob_domain.allocate_region(4096, rights)?;
    let mine = alice_domain.allocate_region(4096, AccessFlags::LOCAL_WRITE)?;

    // WRITE: my bytes go to a place in Bob's memory, named by address and remote key.
    mine.write_at(0, b"written by Alice");
    from.post_send(&SendRequest::rdma_write(1, &[mine.sge(0, 16)], theirs.remote_address(256)))?;
    finish(&queue, "WRITE");
    println!("Bob's memory at 256: {}", String::from_utf8_lossy(&theirs.read_at(256, 16)));

    // READ: the other way. Scattered: the first half to 100, the second to 200.
    from.post_send(&SendRequest::rdma_read(
        2,
        &[mine.sge(100, 8), mine.sge(200, 8)],
        theirs.remote_address(256),
    ))?;
    finish(&queue, "READ");
    let halves = [mine.read_at(100, 8), mine.read_at(200, 8)].map(|half| String::from_utf8(half).unwrap());
    println!("Alice read {halves:?}");

    // Fetch-and-add: a counter in Bob's memory. The old value comes back.
    for _ in 0..3 {
        from.post_send(&SendRequest::fetch_and_add(3, &[mine.sge(0, 8)], theirs.remote_address(0), 10))?;
        finish(&queue, "FETCH_ADD");
        println!("the counter was {} and is {}", mine.load(0), theirs.load(0));
    }

    // Compare-and-swap: a lock word. Taking it works once.
    for owner in [7, 8] {
        from.post_send(&SendRequest::compare_and_swap(
            4,
            &[mine.sge(0, 8)],
            theirs.remote_address(8),
            0,
            owner,
        ))?;
        finish(&queue, "COMPARE_SWAP");
        match mine.load(0) {
            0 => println!("{owner} took the lock"),
            holder => println!("{owner} found the lock taken by {holder}"),
        }
    }

    // An access that the region does not allow fails and ends the connection.
    let secret = bob_domain.allocate_region(64, AccessFlags::LOCAL_WRITE)?;
    from.post_send(&SendRequest::rdma_read(5, &[mine.sge(0, 8)], secret.remote_address(0)))?;
    let refused = queue.wait()?;
    println!("READ without the right to: {:?}, the queue pair is in {}", refused.status, from.state()?);
    Ok(())
}

fn finish(queue: &CompletionQueue, what: &str) {
    let completion = queue.wait().expect("a completion");
    assert!(completion.status.is_success(), "{what}: {:?}", completion.status);
}
