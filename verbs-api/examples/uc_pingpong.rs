//! Two unreliable connections that throw a message back and forth, as `ibv_uc_pingpong` does.
//!
//! An unreliable connection has no acknowledgements: a send is complete when it has left, and a message that
//! loses a packet is lost as a whole, without a word. Between two of our cards nothing is lost.
//!
//! ```text
//! cargo run --release --example uc_pingpong                  both ends in this process
//! cargo run --release --example uc_pingpong -- --server      one end, waits on TCP port 18515
//! cargo run --release --example uc_pingpong -- HOST          the other end
//! ```
//!
//! Options: `-s BYTES` per message, `-n COUNT` of round trips, `-e` to sleep until an event says that there
//! is a completion instead of polling, `-p PORT` for the exchange.

use softhca::{AccessFlags, ConnectOptions, CqNotify, Device, QpType, ReceiveRequest, SendRequest};
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
    let queue = context.create_completion_queue_with_channel(16, &channel)?;
    let pair = domain.create_queue_pair(QpType::Uc, &queue).build()?;

    // A message needs a receive that waits for it: post one before the peer can send.
    let buffer = [region.sge(0, options.size)];
    let receive = ReceiveRequest { wr_id: RECEIVED, sg_list: &buffer };
    let send = SendRequest::send(SENT, &buffer);
    pair.post_recv(&receive)?;
    queue.request_notification(CqNotify::NextCompletion);

    // UC has neither timeout nor retries to set; the same call leaves them out. It takes the queue pair
    // through RESET, INIT, RTR and RTS towards the peer.
    let peer = pair.connect_over_stream(&mut stream, &ConnectOptions::default())?;
    if side == Side::Client {
        println!("  local address:  GID {}, QPN {}", pair.endpoint().gid, pair.qpn());
        println!("  remote address: GID {}, QPN {}", peer.gid, peer.qpn);
    }

    let start = Instant::now();
    let (mut sent, mut received) = (0, 0);
    if side == Side::Client {
        pair.post_send(&send)?;
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
                // The next receive first, then the answer: the peer's next message may be here at once.
                if received < options.rounds {
                    pair.post_recv(&receive)?;
                }
                let answers = if side == Side::Server { options.rounds } else { options.rounds - 1 };
                if received <= answers {
                    pair.post_send(&send)?;
                }
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    // Wait for the peer: a queue pair that is gone could not take our last message.
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
        Options { size: 4096, rounds: 1000, events: false, port: 18515, server: false, host: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "-s" => options.size = value()?.parse()?,
            "-n" => options.rounds = value()?.parse()?,
            "-p" => options.port = value()?.parse()?,
            "-e" => options.events = true,
            "--server" => options.server = true,
            host if !host.starts_with('-') => options.host = Some(host.into()),
            other => return Err(format!("unknown option {other}").into()),
        }
    }
    Ok(options)
}
