//! Options, the two sides, the message loop and the result.

#![allow(missing_docs, reason = "the names of an example speak for themselves")]

use softhca::{CompletionChannel, CompletionQueue, CqNotify, Error, Qpn};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

/// Errors of both sides end up in `main`.
pub type Outcome = Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// The work request IDs. Completions carry them.
pub const RECV_WR_ID: u64 = 1;
pub const SEND_WR_ID: u64 = 2;

/// The type of the queue pairs: `--type`.
#[derive(Clone, Copy, PartialEq)]
pub enum Transport {
    Rc,
    Uc,
    Ud,
    /// RC with a shared receive queue.
    Srq,
}

#[derive(Clone)]
pub struct Options {
    pub transport: Transport,
    /// Bytes per message: `-s`.
    pub size: u32,
    /// Round trips: `-n`.
    pub iters: u64,
    /// Queue pairs: `-q`.
    pub queue_pairs: usize,
    /// Sleep until a completion event instead of polling: `-e`.
    pub events: bool,
    /// The TCP port of the exchange: `-p`.
    pub port: u16,
    server: bool,
    host: Option<String>,
}

impl Options {
    fn parse() -> Result<Options, Box<dyn std::error::Error + Send + Sync>> {
        let (mut size, mut queue_pairs) = (None, None);
        let (transport, server, host) = (Transport::Rc, false, None);
        let mut options = Options {
            transport,
            size: 0,
            iters: 1000,
            queue_pairs: 0,
            events: false,
            port: 18515,
            server,
            host,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match argument.as_str() {
                "--type" => {
                    options.transport = match value()?.as_str() {
                        "rc" => Transport::Rc,
                        "uc" => Transport::Uc,
                        "ud" => Transport::Ud,
                        "srq" => Transport::Srq,
                        other => return Err(format!("--type {other} is not rc, uc, ud or srq").into()),
                    }
                }
                "-s" => size = Some(value()?.parse()?),
                "-n" => options.iters = value()?.parse()?,
                "-q" => queue_pairs = Some(value()?.parse()?),
                "-p" => options.port = value()?.parse()?,
                "-e" => options.events = true,
                "--server" => options.server = true,
                host if !host.starts_with('-') => options.host = Some(host.into()),
                other => return Err(format!("unknown option {other}").into()),
            }
        }
        options.size = size.unwrap_or(if options.transport == Transport::Ud { 1024 } else { 4096 });
        options.queue_pairs = queue_pairs.unwrap_or(if options.transport == Transport::Srq { 8 } else { 1 });
        Ok(options)
    }
}

#[derive(Clone, Copy, PartialEq)]
pub enum Side {
    Server,
    Client,
}

/// Runs the side that the arguments ask for, or both in this process. The sides exchange their endpoints over a
/// TCP connection before RDMA works.
pub fn run(side: fn(Side, TcpStream, &Options) -> Outcome) -> Outcome {
    let options = Options::parse()?;
    if options.server {
        let (stream, _) = TcpListener::bind(("0.0.0.0", options.port))?.accept()?;
        return side(Side::Server, stream, &options);
    }
    if let Some(host) = &options.host {
        return side(Side::Client, TcpStream::connect((host.as_str(), options.port))?, &options);
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let copy = options.clone();
    let server = std::thread::spawn(move || side(Side::Server, listener.accept()?.0, &copy));
    side(Side::Client, TcpStream::connect(address)?, &options)?;
    server.join().expect("the server's thread")
}

/// One side, ready to send.
pub struct PingPong<'a> {
    pub side: Side,
    pub options: &'a Options,
    pub channel: &'a CompletionChannel,
    pub cq: &'a CompletionQueue,
    pub stream: TcpStream,
}

impl PingPong<'_> {
    /// Exchanges the messages and prints the result. The client sends the first message on each queue pair.
    /// `post_recv` posts a receive for a queue pair; `post_send` sends a message on a queue pair.
    pub fn run(
        mut self,
        queue_pairs: &[Qpn],
        post_recv: impl Fn(Qpn) -> Result<(), Error>,
        post_send: impl Fn(Qpn) -> Result<(), Error>,
    ) -> Outcome {
        let iters = self.options.iters;
        let start = Instant::now();
        let (mut started, mut sent, mut received) = (0, 0, 0);
        if self.side == Side::Client {
            for qpn in queue_pairs.iter().take(iters as usize) {
                post_send(*qpn)?;
                started += 1;
            }
        }
        while sent < iters || received < iters {
            let completion = loop {
                if let Some(completion) = self.cq.poll() {
                    break completion;
                }
                if self.options.events {
                    // After the event, request the next notification, then poll again: a completion that arrived
                    // before the request raises no event.
                    self.channel.wait();
                    self.cq.request_notification(CqNotify::NextCompletion);
                }
            };
            if !completion.status.is_success() {
                return Err(format!("request {} failed: {:?}", completion.wr_id, completion.status).into());
            }
            if completion.wr_id == SEND_WR_ID {
                sent += 1;
                continue;
            }
            received += 1;
            // Post the next receive before the reply: the peer's next message may arrive at once.
            post_recv(completion.qpn)?;
            if self.side == Side::Server || started < iters {
                post_send(completion.qpn)?;
                started += 1;
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        self.wait_for_peer()?;
        if self.side == Side::Client {
            let bytes = u64::from(self.options.size) * iters * 2;
            println!("{bytes} bytes in {seconds:.2} seconds = {:.2} Mbit/sec", bytes as f64 * 8e-6 / seconds);
            println!("{iters} iters in {seconds:.2} seconds = {:.2} usec/iter", seconds * 1e6 / iters as f64);
        }
        Ok(())
    }

    /// Waits until both sides are done: a destroyed queue pair could not acknowledge the last message.
    fn wait_for_peer(&mut self) -> Outcome {
        self.stream.write_all(b".")?;
        self.stream.read_exact(&mut [0])?;
        Ok(())
    }
}
