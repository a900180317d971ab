//! Connections made and ended a second, beside TCP's on loopback.

use super::{Failure, Mode};
use softhca::rdma_cm::{EventChannel, EventKind, Id, Parameters, PortSpace};
use softhca::{CompletionQueue, Context, ProtectionDomain, QpKind, QueuePair};
use std::collections::BTreeMap;
use std::io::Read;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a side waits for what has to come.
const PATIENCE: Duration = Duration::from_secs(10);

/// What connections of one side share.
struct Side {
    channel: EventChannel,
    domain: ProtectionDomain,
    queue: CompletionQueue,
}

impl Side {
    fn new(context: &Context) -> Result<Side, Failure> {
        let channel = EventChannel::new(context)?;
        Ok(Side { channel, domain: context.allocate_domain()?, queue: context.create_completion_queue(16)? })
    }

    fn pair(&self) -> Result<QueuePair, Failure> {
        Ok(self.domain.queue_pair(QpKind::Rc, &self.queue).sends(1).receives(1).create()?)
    }
}

/// Connections a second of two cards, so many at a time: each with a queue pair at both sides, each ended.
pub fn over_card(mode: &Mode, at_once: usize, round: Duration) -> Result<f64, Failure> {
    let [near, far] = mode.devices()?;
    let [client, server] = [Side::new(&near.open())?, Side::new(&far.open())?];
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

/// Accepts every request, and lets go of who leaves.
fn serve(side: &Side, stop: &AtomicBool) -> Result<(), Failure> {
    let mut open: BTreeMap<u32, Id> = BTreeMap::new();
    while !stop.load(Ordering::Acquire) {
        let Some(event) = side.channel.wait_for(Duration::from_millis(20))? else { continue };
        match event.kind {
            EventKind::ConnectRequest => {
                event.id.attach(&side.pair()?)?;
                event.id.accept(&Parameters::default())?;
                open.insert(event.id.number(), event.id);
            }
            EventKind::Disconnected => {
                event.id.disconnect()?;
                open.remove(&event.id.number());
            }
            EventKind::Established | EventKind::TimewaitExit => {}
            _ => drop(event.expect(EventKind::Established)?),
        }
    }
    Ok(())
}

/// Keeps so many connections in the making, and counts those that ended.
fn connect(side: &Side, peer: SocketAddr, at_once: usize, round: Duration) -> Result<f64, Failure> {
    let mut open: BTreeMap<u32, Id> = BTreeMap::new();
    let (start, mut ended) = (Instant::now(), 0u64);
    loop {
        let is_over = start.elapsed() >= round;
        while open.len() < at_once && !is_over {
            let id = side.channel.create_id(PortSpace::Tcp)?;
            id.resolve_address(None, peer)?;
            open.insert(id.number(), id);
        }
        if open.is_empty() {
            return Ok(ended as f64 / start.elapsed().as_secs_f64());
        }
        let event = side.channel.wait_for(PATIENCE)?.ok_or("a connection takes too long")?;
        let id = &event.id;
        match event.kind {
            EventKind::AddressResolved => id.resolve_route()?,
            EventKind::RouteResolved => {
                id.attach(&side.pair()?)?;
                id.connect(&Parameters::default())?;
            }
            EventKind::Established => id.disconnect()?,
            EventKind::Disconnected => {
                open.remove(&id.number());
                ended += 1;
            }
            _ => drop(event.expect(EventKind::Established)?),
        }
    }
}

/// Connections a second of TCP on loopback, so many at a time: made, accepted, ended by both sides.
pub fn over_tcp(at_once: usize, round: Duration) -> Result<f64, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| -> Result<(), Failure> {
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
