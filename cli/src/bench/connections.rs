//! Connection rate of rdma_cm, compared with TCP on loopback.

use super::mode::Mode;
use super::results::BenchResult;
use softhca::cm::{ConnectionParameters, EventChannel, EventType, Id, PortSpace};
use softhca::{CompletionQueue, Context, ProtectionDomain, QpType, QueuePair};
use std::collections::BTreeMap;
use std::io::Read;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long an endpoint waits for an event.
const EVENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The objects that the connections of one endpoint share.
struct Endpoint {
    channel: EventChannel,
    domain: ProtectionDomain,
    cq: CompletionQueue,
}

impl Endpoint {
    fn new(context: &Context) -> BenchResult<Endpoint> {
        let channel = EventChannel::new(context)?;
        Ok(Endpoint {
            channel,
            domain: context.allocate_protection_domain()?,
            cq: context.create_completion_queue(16)?,
        })
    }

    fn create_queue_pair(&self) -> BenchResult<QueuePair> {
        Ok(self.domain.create_queue_pair(QpType::Rc, &self.cq).max_send_wr(1).max_recv_wr(1).build()?)
    }
}

/// Connections per second between two devices with `at_once` in progress: each has a queue pair at both ends and is
/// disconnected.
pub fn rdma_cm_rate(mode: &Mode, at_once: usize, round: Duration) -> BenchResult<f64> {
    let [near, far] = mode.devices()?;
    let [client, server] = [Endpoint::new(&near.open())?, Endpoint::new(&far.open())?];
    let listener = server.channel.create_id(PortSpace::Tcp)?;
    listener.bind(SocketAddr::new(far.address(), 0))?;
    listener.listen(0)?;
    let peer = listener.local_address().ok_or("the listener has no address")?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| serve(&server, &stop));
        let counted = connect(&client, peer, at_once, round);
        stop.store(true, Ordering::Release);
        serving.join().map_err(|_| "the server panicked")??;
        counted
    })
}

/// Accepts every request and destroys disconnected ids.
fn serve(side: &Endpoint, stop: &AtomicBool) -> BenchResult {
    let mut open: BTreeMap<u32, Id> = BTreeMap::new();
    while !stop.load(Ordering::Acquire) {
        let Some(event) = side.channel.wait_for(Duration::from_millis(20))? else { continue };
        match event.kind {
            EventType::ConnectRequest => {
                event.id.attach_queue_pair(&side.create_queue_pair()?)?;
                event.id.accept(&ConnectionParameters::default())?;
                open.insert(event.id.handle(), event.id);
            }
            EventType::Disconnected => {
                event.id.disconnect()?;
                open.remove(&event.id.handle());
            }
            EventType::Established | EventType::TimewaitExit => {}
            _ => drop(event.expect(EventType::Established)?),
        }
    }
    Ok(())
}

/// Keeps `at_once` connections in progress and counts the disconnected ones.
fn connect(side: &Endpoint, peer: SocketAddr, at_once: usize, round: Duration) -> BenchResult<f64> {
    let mut open: BTreeMap<u32, Id> = BTreeMap::new();
    let (start, mut ended) = (Instant::now(), 0u64);
    loop {
        let is_over = start.elapsed() >= round;
        while open.len() < at_once && !is_over {
            let id = side.channel.create_id(PortSpace::Tcp)?;
            id.resolve_address(None, peer)?;
            open.insert(id.handle(), id);
        }
        if open.is_empty() {
            return Ok(ended as f64 / start.elapsed().as_secs_f64());
        }
        let event = side.channel.wait_for(EVENT_TIMEOUT)?.ok_or("a connection takes too long")?;
        let id = &event.id;
        match event.kind {
            EventType::AddressResolved => id.resolve_route()?,
            EventType::RouteResolved => {
                id.attach_queue_pair(&side.create_queue_pair()?)?;
                id.connect(&ConnectionParameters::default())?;
            }
            EventType::Established => id.disconnect()?,
            EventType::Disconnected => {
                open.remove(&id.handle());
                ended += 1;
            }
            _ => drop(event.expect(EventType::Established)?),
        }
    }
}

/// TCP connections per second on loopback with `at_once` in progress: connected, accepted, closed by both ends.
pub fn tcp_rate(at_once: usize, round: Duration) -> BenchResult<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| -> BenchResult {
            loop {
                let (mut stream, _) = listener.accept()?;
                if stop.load(Ordering::Acquire) {
                    return Ok(());
                }
                stream.read_to_end(&mut Vec::new())?;
            }
        });
        let (start, mut ended) = (Instant::now(), 0u64);
        while start.elapsed() < round {
            let made: Result<Vec<TcpStream>, _> = (0..at_once).map(|_| TcpStream::connect(address)).collect();
            let made = made?;
            for stream in &made {
                stream.shutdown(Shutdown::Write)?;
            }
            for mut stream in made {
                stream.read_to_end(&mut Vec::new())?;
                ended += 1;
            }
        }
        let figure = ended as f64 / start.elapsed().as_secs_f64();
        stop.store(true, Ordering::Release);
        drop(TcpStream::connect(address)?);
        serving.join().map_err(|_| "the server panicked")??;
        Ok(figure)
    })
}
