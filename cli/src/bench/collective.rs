//! The traffic of an all-reduce between two ranks, as NCCL's InfiniBand transport makes it, compared with the same over
//! TCP.
//!
//! Each rank is a process with two channels, which one thread drives. A chunk is a WRITE followed by an empty WRITE with
//! immediate. The receiver announces free buffers by an inline WRITE into the sender's memory. In an all-reduce of two
//! ranks, each sends and receives as many bytes as the buffer has. Nothing is added up: both transports would spend the
//! same time on it.

use super::mode::BenchDaemon;
use super::peer;
use super::rdma::check_completion;
use super::results::{BenchResult, Effort, Measurement, Rounds, median};
use softhca::{
    AccessFlags, CompletionQueue, ConnectOptions, Device, Loopback, MemoryRegion, Mtu, QpType, QueuePair,
    ReceiveRequest, RemoteAddress, RemoteKey, SendFlags, SendRequest,
};
use softhca_daemon::DataPath;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The name of the benchmark.
pub const NAME: &str = "all-reduce-64MiB";

const BUFFER: usize = 64 << 20;
const CHANNELS: usize = 2;
const CHUNK: usize = 512 << 10;
/// The chunks of a channel that may be on their way, as in NCCL.
const SLOTS: usize = 8;
const CHUNKS_PER_CHANNEL: usize = BUFFER / CHANNELS / CHUNK;
/// The region of a channel: chunks to send, chunks received, and how many chunks the peer has had buffers for.
const RECEIVED: u64 = (SLOTS * CHUNK) as u64;
const FREE: u64 = 2 * RECEIVED;
const REGION: u64 = FREE + 8;
/// The wr_id of an announcement.
const ANNOUNCEMENT: u64 = u64::MAX;

/// The other rank, over TCP: exchanges addresses, and agrees when a round begins.
struct Control(BufReader<TcpStream>);

impl Control {
    /// Sends a line and returns that of the other rank.
    fn exchange(&mut self, own: &str) -> BenchResult<String> {
        let mut peer = String::new();
        self.0.get_mut().write_all(format!("{own}\n").as_bytes())?;
        match self.0.read_line(&mut peer)? {
            0 => Err("the other rank is gone".into()),
            _ => Ok(peer),
        }
    }
}

/// One rank. Prints the seconds of each round if it is rank 0.
pub fn run_rank(arguments: &RankArguments) -> BenchResult {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, arguments.port));
    let mut streams = Vec::new();
    let listener = if arguments.rank == 0 { Some(TcpListener::bind(address)?) } else { None };
    for _ in 0..=CHANNELS {
        let stream = match &listener {
            Some(listener) => listener.accept()?.0,
            None => connect_to(address)?,
        };
        stream.set_nodelay(true)?;
        streams.push(stream);
    }
    let mut control = Control(BufReader::new(streams.remove(0)));
    let mut transport: Box<dyn Transport> = match &arguments.host {
        Some(host) => Box::new(RdmaTransport::connect(&arguments.daemon, host, &mut control)?),
        None => Box::new(TcpTransport::new(streams)?),
    };
    for round in 0..=arguments.rounds {
        control.exchange("ready")?;
        let start = Instant::now();
        transport.all_reduce()?;
        control.exchange("ready")?;
        // The first round warms up.
        if arguments.rank == 0 && round > 0 {
            outln!("{}", start.elapsed().as_secs_f64());
        }
    }
    Ok(())
}

/// Waits until rank 0 listens.
fn connect_to(address: SocketAddr) -> BenchResult<TcpStream> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match TcpStream::connect(address) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => return Ok(other?),
        }
    }
}

/// The arguments of one rank.
#[derive(clap::Args)]
pub struct RankArguments {
    #[arg(long)]
    rank: u8,
    /// The TCP port of rank 0.
    #[arg(long)]
    port: u16,
    #[arg(long)]
    rounds: usize,
    #[arg(long, default_value = "")]
    daemon: String,
    /// The host of the daemon; TCP without one.
    #[arg(long)]
    host: Option<String>,
}

trait Transport {
    /// Sends and receives the chunks of one all-reduce on every channel.
    fn all_reduce(&mut self) -> BenchResult;
}

struct TcpTransport {
    channels: Vec<TcpStream>,
    send: Vec<u8>,
    receive: Vec<u8>,
}

impl TcpTransport {
    fn new(channels: Vec<TcpStream>) -> BenchResult<TcpTransport> {
        channels.iter().try_for_each(|channel| channel.set_nonblocking(true))?;
        Ok(TcpTransport { channels, send: vec![1; CHUNK], receive: vec![0; CHUNK] })
    }
}

impl Transport for TcpTransport {
    fn all_reduce(&mut self) -> BenchResult {
        let total = CHUNKS_PER_CHANNEL * CHUNK;
        let mut progress = [[0usize; 2]; CHANNELS];
        while progress != [[total; 2]; CHANNELS] {
            for (channel, [sent, received]) in self.channels.iter_mut().zip(&mut progress) {
                if *sent < total {
                    *sent += moved(channel.write(&self.send[*sent % CHUNK..]))?;
                }
                if *received < total {
                    let at = *received % CHUNK;
                    *received += moved(channel.read(&mut self.receive[at..]))?;
                }
            }
        }
        Ok(())
    }
}

/// The bytes that a call moved; none if it would block.
fn moved(result: std::io::Result<usize>) -> BenchResult<usize> {
    match result {
        Ok(0) => Err("the other rank is gone".into()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        other => Ok(other?),
    }
}

struct RdmaTransport {
    cq: CompletionQueue,
    channels: Vec<Channel>,
}

/// A queue pair and its memory.
struct Channel {
    index: u64,
    qp: QueuePair,
    region: MemoryRegion,
    /// The first byte of the peer's region.
    remote: RemoteAddress,
    /// Chunks since the connection was made.
    posted: u64,
    sent: u64,
    received: u64,
}

impl RdmaTransport {
    fn connect(daemon: &str, host: &str, control: &mut Control) -> BenchResult<RdmaTransport> {
        let context = Device::daemon_host(Some(daemon), Some(host))?.open();
        let domain = context.allocate_protection_domain()?;
        let cq = context.create_completion_queue((CHANNELS * SLOTS * 8) as u32)?;
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        let options = ConnectOptions { path_mtu: Mtu::B4096, access, ..ConnectOptions::default() };
        let mut channels = Vec::new();
        for index in 0..CHANNELS as u64 {
            let region = domain.allocate_private_region(REGION, access)?;
            let depth = (4 * SLOTS) as u32;
            let qp =
                domain.create_queue_pair(QpType::Rc, &cq).max_send_wr(depth).max_recv_wr(depth).build()?;
            let (address, rkey) = (region.address(), region.rkey().0);
            let peer = control.exchange(&format!("{} {address} {rkey}", qp.endpoint()))?;
            let [endpoint, address, rkey] = peer.split_whitespace().collect::<Vec<_>>()[..] else {
                return Err(format!("the other rank says {peer:?}").into());
            };
            let remote = RemoteAddress { address: address.parse()?, rkey: RemoteKey(rkey.parse()?) };
            qp.connect(&endpoint.parse()?, &options)?;
            let channel = Channel { index, qp, region, remote, posted: 0, sent: 0, received: 0 };
            (0..2 * SLOTS).try_for_each(|_| channel.post_receive())?;
            channels.push(channel);
        }
        control.exchange("connected")?;
        channels.iter().try_for_each(Channel::announce)?;
        Ok(RdmaTransport { cq, channels })
    }
}

impl Channel {
    fn post_receive(&self) -> BenchResult {
        Ok(self.qp.post_recv(&ReceiveRequest { wr_id: self.index, sg_list: &[] })?)
    }

    /// The byte at `offset` of the peer's region.
    fn remote(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { address: self.remote.address + offset, ..self.remote }
    }

    /// Announces how many chunks the sender may have sent in all.
    fn announce(&self) -> BenchResult {
        let count = (self.received + SLOTS as u64).to_ne_bytes();
        let request = SendRequest::rdma_write(ANNOUNCEMENT, &[], self.remote(FREE)).inline_data(&count);
        Ok(self.qp.post_send(&request)?)
    }

    /// Sends the chunks up to number `last` for which the peer has buffers.
    fn send_chunks(&mut self, last: u64) -> BenchResult {
        let allowed = last.min(self.region.load(FREE)).min(self.sent + SLOTS as u64);
        while self.posted < allowed {
            let offset = self.posted % SLOTS as u64 * CHUNK as u64;
            let chunk = [self.region.sge(offset, CHUNK as u32)];
            let write = SendRequest::rdma_write(self.index, &chunk, self.remote(RECEIVED + offset));
            let notify =
                SendRequest::rdma_write_with_imm(self.index, &[], self.remote(0), self.posted as u32);
            self.qp.post_send_list(&[write.flags(SendFlags::empty()), notify])?;
            self.posted += 1;
        }
        Ok(())
    }
}

impl Transport for RdmaTransport {
    fn all_reduce(&mut self) -> BenchResult {
        let last: Vec<u64> =
            self.channels.iter().map(|channel| channel.received + CHUNKS_PER_CHANNEL as u64).collect();
        loop {
            let mut is_done = true;
            for (channel, last) in self.channels.iter_mut().zip(&last) {
                channel.send_chunks(*last)?;
                is_done &= channel.sent == *last && channel.received == *last;
            }
            if is_done {
                return Ok(());
            }
            let Some(completion) = self.cq.poll() else { continue };
            check_completion(completion)?;
            if completion.wr_id == ANNOUNCEMENT {
                continue;
            }
            let channel = &mut self.channels[completion.wr_id as usize];
            if completion.opcode.is_receive() {
                channel.received += 1;
                channel.post_receive()?;
                channel.announce()?;
            } else {
                channel.sent += 1;
            }
        }
    }
}

/// Measures two ranks on two hosts of a daemon, each next to two ranks over TCP.
pub fn measure(effort: Effort, row: &mut dyn FnMut(&Measurement)) -> BenchResult {
    for data_path in [DataPath::Direct, DataPath::Daemon] {
        let daemon = BenchDaemon::start(data_path, Loopback::Internal)?;
        let mut rounds = Rounds::default();
        for _ in 0..effort.rounds {
            rounds.raws.push(run_ranks(None)?);
            rounds.values.push(run_ranks(Some(daemon.name()))?);
        }
        row(&rounds.measurement(NAME, data_path.name(), "GB/s"));
    }
    Ok(())
}

/// The bytes that each rank sends and receives per second, as a median of a few all-reduces, in gigabytes.
fn run_ranks(daemon: Option<&str>) -> BenchResult<f64> {
    const ROUNDS: usize = 3;
    let (own, port) = (std::env::current_exe()?, peer::free_port()?);
    let rank = |rank: &str, host: &str| {
        let mut command = Command::new(&own);
        command.args(["bench-rank", "--rank", rank, "--port", &port, "--rounds", &ROUNDS.to_string()]);
        if let Some(daemon) = daemon {
            command.args(["--daemon", daemon, "--host", host]);
        }
        command.stdin(Stdio::null());
        command
    };
    let text = peer::run_together(rank("1", "bob"), rank("0", "alice"))?;
    let seconds: Result<Vec<f64>, _> = text.lines().map(str::parse).collect();
    let seconds = seconds?;
    if seconds.len() != ROUNDS {
        return Err(format!("rank 0 says {text:?}").into());
    }
    Ok(BUFFER as f64 / median(seconds) / 1e9)
}
