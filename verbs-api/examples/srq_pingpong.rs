//! Several connections that take their receives from one shared queue, as `ibv_srq_pingpong` does.
//!
//! A server with a thousand clients cannot keep buffers ready for each of them. With a shared receive queue
//! it keeps as many as messages may come at once, whoever sends them; the completion says which queue pair
//! a message came to.
//!
//! ```text
//! cargo run --release --example srq_pingpong                  both ends in this process
//! cargo run --release --example srq_pingpong -- --server      one end, waits on TCP port 18515
//! cargo run --release --example srq_pingpong -- HOST          the other end
//! ```
//!
//! Options: `-s BYTES` per message, `-n COUNT` of round trips of all pairs together, `-q COUNT` of queue pairs, `-e` to sleep until an event says that there
//! is a completion instead of polling, `-p PORT` for the exchange.

use softhca::{
    AccessFlags, ConnectOptions, CqNotify, Device, QpType, QueuePair, ReceiveRequest, SendRequest,
};
use std::error::Error;
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

/// Errors of both threads end up in `main`.
type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

/// The ids of our work requests: completions carry them, so that we know what is done.
const RECEIVED: u64 = 1;
const SENT: u64 = 2;

#[derive(Clone)]
struct Options {
    size: u32,
    rounds: u64,
    pairs: usize,
    events: bool,
    port: u16,
    server: bool,
    host: Option<String>,
}

#[derive(Clone, Copy, PartialEq)]
enum Side {
    Server,
    Client,
}

fn main() -> Outcome {
    let options = options()?;
    if options.server {
        // The two sides need a way to tell each other their addresses before RDMA works: a TCP connection.
        let (stream, _) = TcpListener::bind(("0.0.0.0", options.port))?.accept()?;
        return play(Side::Server, stream, &options);
    }
    if let Some(host) = &options.host {
        return play(Side::Client, TcpStream::connect((host.as_str(), options.port))?, &options);
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let copy = options.clone();
    let server = std::thread::spawn(move || play(Side::Server, listener.accept()?.0, &copy));
    play(Side::Client, TcpStream::connect(address)?, &options)?;
    server.join().expect("the server's thread")
}

fn play(side: Side, mut stream: TcpStream, options: &Options) -> Outcome {
    // A card, and what is needed to use it: a domain that says what belongs together, memory that the card
    // may reach, a queue where it reports, a queue pair that sends and receives.
    let device = Device::embedded()?;
    let context = device.open();
    let domain = context.allocate_protection_domain()?;
    let region = domain.allocate_region(options.size as usize, AccessFlags::LOCAL_WRITE)?;
    let channel = context.create_completion_channel()?;
    let queue = context.create_completion_queue_with_channel(256, &channel)?;
    let shared = domain.create_shared_receive_queue(64, 1)?;
    let pairs: Vec<QueuePair> = (0..options.pairs)
        .map(|_| domain.create_queue_pair(QpType::Rc, &queue).shared_receive_queue(&shared).build())
        .collect::<Result<_, _>>()?;

    // One receive per message that may be under way; every pair draws from them.
    let buffer = [region.sge(0, options.size)];
    let receive = ReceiveRequest { wr_id: RECEIVED, sg_list: &buffer };
    let send = SendRequest::send(SENT, &buffer);
    for _ in &pairs {
        shared.post_recv(&receive)?;
    }
    queue.request_notification(CqNotify::NextCompletion);
    for pair in &pairs {
        let peer = pair.connect_over_stream(&mut stream, &ConnectOptions::default())?;
        if side == Side::Client {
            println!("  QPN {} to GID {}, QPN {}", pair.qpn(), peer.gid, peer.qpn);
        }
    }

    let start = Instant::now();
    let (mut sent, mut received) = (0, 0);
    let mut started = 0;
    if side == Side::Client {
        // One message on each pair, so that all are under way at once.
        for pair in pairs.iter().take(options.rounds as usize) {
            pair.post_send(&send)?;
            started += 1;
        }
    }
    while sent < options.rounds || received < options.rounds {
        let completion = loop {
            if let Some(completion) = queue.poll() {
                break completion;
            }
            if options.events {
                // Sleep until the channel tells, ask to be told again, and look once more: what came between
                // the last look and the wish makes no event.
                channel.wait();
                queue.request_notification(CqNotify::NextCompletion);
            }
        };
        if !completion.status.is_success() {
            return Err(format!("request {} failed: {:?}", completion.wr_id, completion.status).into());
        }
        match completion.wr_id {
            SENT => sent += 1,
            _ => {
                received += 1;
                // The buffer goes back to the shared queue before the answer makes the peer send again.
                shared.post_recv(&receive)?;
                if side == Side::Server || started < options.rounds {
                    let pair = pairs.iter().find(|pair| pair.qpn() == completion.qpn);
                    pair.ok_or("a completion of no queue pair of ours")?.post_send(&send)?;
                    started += 1;
                }
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    // Wait for the peer: a queue pair that is gone could not acknowledge its last message.
    wait_for_peer(&mut stream)?;
    if side == Side::Client {
        let bytes = u64::from(options.size) * options.rounds * 2;
        println!("{bytes} bytes in {seconds:.2} seconds = {:.2} Mbit/sec", bytes as f64 * 8e-6 / seconds);
        let each = seconds * 1e6 / options.rounds as f64;
        println!("{} iters in {seconds:.2} seconds = {each:.2} usec/iter", options.rounds);
    }
    Ok(())
}

/// Says that this side is done, and waits until the other is.
fn wait_for_peer(stream: &mut TcpStream) -> Outcome {
    use std::io::{Read, Write};
    stream.write_all(b".")?;
    stream.read_exact(&mut [0])?;
    Ok(())
}

fn options() -> Result<Options, Box<dyn Error + Send + Sync>> {
    let mut options =
        Options { size: 4096, rounds: 1000, pairs: 8, events: false, port: 18515, server: false, host: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "-s" => options.size = value()?.parse()?,
            "-n" => options.rounds = value()?.parse()?,
            "-q" => options.pairs = value()?.parse()?,
            "-p" => options.port = value()?.parse()?,
            "-e" => options.events = true,
            "--server" => options.server = true,
            host if !host.starts_with('-') => options.host = Some(host.into()),
            other => return Err(format!("unknown option {other}").into()),
        }
    }
    Ok(options)
}
