//! Queue pairs.

use crate::backend::{NewQueuePair, Sizes};
use crate::{
    Access, AddressVector, CompletionQueue, Context, Error, Gid, Modify, Mtu, ProtectionDomain, Psn, QpKind,
    QpView, Qpn, QueueKey, ReceiveRequest, Rendezvous, RnrTimer, SendRequest, SharedReceiveQueue, State,
    XrcDomain,
};
use parking_lot::{Mutex, MutexGuard};
use softhca_engine::QpInit;
use softhca_queue::{ReceiveProducer, SendProducer};
use std::fmt;
use std::io::{Read, Write};
use std::str::FromStr;
use std::sync::Arc;

/// What a peer must know to connect: carry it over by any means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The host.
    pub gid: Gid,
    /// The queue pair.
    pub queue_pair: Qpn,
    /// The first PSN that it sends.
    pub psn: Psn,
}

/// One word: the GID, the queue pair and the PSN in hexadecimal, separated by slashes.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gid = u128::from_be_bytes(self.gid.0);
        write!(f, "{gid:032x}/{:06x}/{:06x}", self.queue_pair.value(), self.psn.value())
    }
}

impl FromStr for Endpoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Endpoint, Error> {
        let mut words = text.trim().split('/');
        let mut number = || words.next().and_then(|word| u128::from_str_radix(word, 16).ok());
        let (Some(gid), Some(queue_pair), Some(psn)) = (number(), number(), number()) else {
            return Err(Error::NotAnEndpoint(text.into()));
        };
        let [queue_pair, psn] = [queue_pair as u32, psn as u32];
        Ok(Endpoint { gid: Gid(gid.to_be_bytes()), queue_pair: Qpn::new(queue_pair), psn: Psn::new(psn) })
    }
}

/// How a connection behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Payload bytes per packet.
    pub mtu: Mtu,
    /// What the peer may do.
    pub access: Access,
    /// Reads and atomics outstanding, each way.
    pub reads: u8,
    /// The exponent of 4.096 µs that an acknowledgement may take.
    pub timeout: u8,
    /// How often to try again.
    pub retry_count: u8,
    /// How often to try again when no receive is posted; 7 means for ever.
    pub rnr_retry: u8,
    /// How long a peer waits when no receive is posted.
    pub min_rnr_timer: RnrTimer,
    /// DSCP and ECN bits of the IP header.
    pub traffic_class: u8,
}

impl Default for Path {
    fn default() -> Path {
        Path {
            mtu: Mtu::B1024,
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            reads: 16,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: RnrTimer::new(12),
            traffic_class: 0,
        }
    }
}

/// What a queue pair completes to and takes from.
#[derive(Default)]
struct Queues {
    send: Option<CompletionQueue>,
    receive: Option<CompletionQueue>,
    shared: Option<SharedReceiveQueue>,
    xrc_domain: Option<XrcDomain>,
}

/// A queue pair that is about to be created.
pub struct QueuePairBuilder {
    context: Context,
    domain: Option<ProtectionDomain>,
    kind: QpKind,
    queues: Queues,
    sizes: Sizes,
    signal_all: bool,
}

impl QueuePairBuilder {
    pub(crate) fn new(domain: &ProtectionDomain, kind: QpKind, queue: &CompletionQueue) -> QueuePairBuilder {
        QueuePairBuilder {
            context: domain.inner.context.clone(),
            domain: Some(domain.clone()),
            kind,
            queues: Queues {
                send: Some(queue.clone()),
                receive: Some(queue.clone()),
                shared: None,
                xrc_domain: None,
            },
            sizes: Sizes { sends: 128, receives: 128, entries: 4, inline: 64 },
            signal_all: false,
        }
    }

    pub(crate) fn xrc_target(context: &Context, xrc_domain: &XrcDomain) -> QueuePairBuilder {
        QueuePairBuilder {
            context: context.clone(),
            domain: None,
            kind: QpKind::XrcTarget,
            queues: Queues { xrc_domain: Some(xrc_domain.clone()), ..Queues::default() },
            sizes: Sizes { sends: 0, receives: 0, entries: 0, inline: 0 },
            signal_all: false,
        }
    }

    /// Reports receives to a queue of their own.
    pub fn receives_complete_to(mut self, queue: &CompletionQueue) -> Self {
        self.queues.receive = Some(queue.clone());
        self
    }

    /// Takes receives from a shared queue.
    pub fn shared_receive_queue(mut self, queue: &SharedReceiveQueue) -> Self {
        self.queues.shared = Some(queue.clone());
        self
    }

    /// How many sends may wait.
    pub fn sends(mut self, slots: u32) -> Self {
        self.sizes.sends = slots;
        self
    }

    /// How many receives may wait.
    pub fn receives(mut self, slots: u32) -> Self {
        self.sizes.receives = slots;
        self
    }

    /// How many entries a scatter/gather list may have.
    pub fn entries(mut self, entries: usize) -> Self {
        self.sizes.entries = entries;
        self
    }

    /// How many bytes may travel in a request itself.
    pub fn inline(mut self, bytes: usize) -> Self {
        self.sizes.inline = bytes;
        self
    }

    /// Reports the success of every send, signalled or not.
    pub fn signal_all(mut self) -> Self {
        self.signal_all = true;
        self
    }

    /// Creates the queue pair, in RESET.
    pub fn create(self) -> Result<QueuePair, Error> {
        let init = QpInit {
            kind: self.kind,
            domain: self.domain.as_ref().map(|domain| domain.inner.id),
            send_cq: self.queues.send.as_ref().map(CompletionQueue::id),
            receive_cq: self.queues.receive.as_ref().map(CompletionQueue::id),
            shared_receive_queue: self.queues.shared.as_ref().map(SharedReceiveQueue::id),
            xrc_domain: self.queues.xrc_domain.as_ref().map(XrcDomain::id),
            signal_all: self.signal_all,
        };
        let NewQueuePair { number, send, receive } =
            self.context.backend.create_queue_pair(init, self.sizes)?;
        let psn = Psn::new(self.context.backend.random() as u32);
        Ok(QueuePair {
            inner: Arc::new(Inner {
                context: self.context,
                _domain: self.domain,
                kind: self.kind,
                number,
                psn,
                send: send.map(Mutex::new),
                receive: receive.map(Mutex::new),
                queues: self.queues,
            }),
        })
    }
}

/// A queue pair.
#[derive(Clone)]
pub struct QueuePair {
    inner: Arc<Inner>,
}

struct Inner {
    context: Context,
    /// What its work requests name lives in it; an XRC target has none.
    _domain: Option<ProtectionDomain>,
    kind: QpKind,
    number: Qpn,
    psn: Psn,
    send: Option<Mutex<SendProducer>>,
    receive: Option<Mutex<ReceiveProducer>>,
    /// What it completes to and takes from lives at least as long.
    queues: Queues,
}

impl QueuePair {
    /// Its number.
    pub fn number(&self) -> Qpn {
        self.inner.number
    }

    /// What it is.
    pub fn kind(&self) -> QpKind {
        self.inner.kind
    }

    /// Whether it takes receives from a shared queue.
    pub fn has_shared_receive_queue(&self) -> bool {
        self.inner.queues.shared.is_some()
    }

    /// What a peer must know to connect.
    pub fn endpoint(&self) -> Endpoint {
        let gid = self.inner.context.gid(0).unwrap_or_default();
        Endpoint { gid, queue_pair: self.inner.number, psn: self.inner.psn }
    }

    /// The same by another entry of the GID table, if there is one: 1 is the IPv6 address of a host with both.
    pub fn endpoint_at(&self, index: usize) -> Option<Endpoint> {
        Some(Endpoint { gid: self.inner.context.gid(index)?, ..self.endpoint() })
    }

    /// Changes attributes and state. The error names what is missing or not allowed. A queue pair that is reset
    /// takes its completions with it, as most cards do it.
    pub fn modify(&self, modify: &Modify) -> Result<State, Error> {
        let state = self.inner.context.backend.modify_queue_pair(self.inner.number, modify)?;
        if state == State::Reset {
            for queue in [&self.inner.queues.send, &self.inner.queues.receive].into_iter().flatten() {
                queue.discard(self.inner.number);
            }
        }
        Ok(state)
    }

    /// What it is doing.
    pub fn query(&self) -> Result<QpView, Error> {
        self.inner.context.backend.query_queue_pair(self.inner.number)
    }

    /// The state that it is in.
    pub fn state(&self) -> Result<State, Error> {
        self.query().map(|view| view.state)
    }

    /// Takes a connected queue pair through INIT and RTR to RTS, towards a peer.
    pub fn connect(&self, peer: &Endpoint, path: &Path) -> Result<(), Error> {
        let source_index = self.inner.context.gid_index_towards(peer.gid);
        let vector =
            AddressVector { traffic_class: path.traffic_class, source_index, ..AddressVector::to(peer.gid) };
        let modify = Modify::default();
        self.modify(&modify.state(State::Init).partition_index(0).port(1).access(path.access))?;
        let mut receive = modify
            .state(State::ReadyToReceive)
            .path(vector)
            .mtu(path.mtu)
            .destination(peer.queue_pair)
            .receive_psn(peer.psn);
        if matches!(self.inner.kind, QpKind::Rc | QpKind::XrcTarget) {
            receive = receive.max_reads_in(path.reads).min_rnr_timer(path.min_rnr_timer);
        }
        self.modify(&receive)?;
        let mut send = modify.state(State::ReadyToSend).send_psn(self.inner.psn);
        if matches!(self.inner.kind, QpKind::Rc | QpKind::XrcInitiator) {
            send = send
                .timeout(path.timeout)
                .retry_count(path.retry_count)
                .rnr_retry(path.rnr_retry)
                .max_reads_out(path.reads);
        } else if self.inner.kind == QpKind::XrcTarget {
            send = send.timeout(path.timeout);
        }
        self.modify(&send)?;
        Ok(())
    }

    /// Connects to the one other queue pair that meets this one under `name`: both call this. When it
    /// returns, both can receive and send.
    pub async fn meet(&self, at: &Rendezvous, name: &str, path: &Path) -> Result<Endpoint, Error> {
        let peer = at.exchange(name, self.endpoint()).await;
        self.connect(&peer, path)?;
        at.exchange(&format!("{name}, connected"), ()).await;
        Ok(peer)
    }

    /// Connects to the queue pair at the other end of a stream, a TCP connection as a rule: both call this.
    /// When it returns, both can receive and send, and the stream is as it was.
    pub fn connect_over(&self, stream: &mut (impl Read + Write), path: &Path) -> Result<Endpoint, Error> {
        let peer: Endpoint = exchange_line(stream, &self.endpoint().to_string())?.parse()?;
        self.connect(&peer, path)?;
        exchange_line(stream, "connected")?;
        Ok(peer)
    }

    /// Connects this queue pair and another of the same process or world to each other.
    pub fn connect_both(&self, other: &QueuePair, path: &Path) -> Result<(), Error> {
        self.connect(&other.endpoint(), path)?;
        other.connect(&self.endpoint(), path)
    }

    /// Takes a datagram queue pair to RTS.
    pub fn start_datagrams(&self, queue_key: QueueKey) -> Result<(), Error> {
        let modify = Modify::default();
        self.modify(&modify.state(State::Init).partition_index(0).port(1).queue_key(queue_key))?;
        self.modify(&modify.state(State::ReadyToReceive))?;
        self.modify(&modify.state(State::ReadyToSend).send_psn(self.inner.psn))?;
        Ok(())
    }

    /// Posts a send work request.
    pub fn post(&self, request: &SendRequest<'_>) -> Result<(), Error> {
        self.post_all(std::slice::from_ref(request))
    }

    /// Posts several send work requests with one doorbell: all or none.
    pub fn post_all(&self, requests: &[SendRequest<'_>]) -> Result<(), Error> {
        let mut batch = self.batch()?;
        for request in requests {
            batch.add(request)?;
        }
        batch.post();
        Ok(())
    }

    /// Begins to post several send work requests with one doorbell. Other posts wait meanwhile.
    pub fn batch(&self) -> Result<Batch<'_>, Error> {
        self.inner.context.backend.check_process()?;
        let ring = self.inner.send.as_ref().ok_or(Error::NoQueue("send"))?;
        Ok(Batch { pair: &self.inner, ring: ring.lock() })
    }

    /// Posts a receive work request.
    pub fn post_receive(&self, request: &ReceiveRequest<'_>) -> Result<(), Error> {
        self.post_receives(std::slice::from_ref(request))
    }

    /// Posts several receive work requests at once: all or none.
    pub fn post_receives(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), Error> {
        self.inner.context.backend.check_process()?;
        let ring = self.inner.receive.as_ref().ok_or(Error::NoQueue("receive"))?;
        let mut ring = ring.lock();
        for request in requests {
            if let Err(why) = ring.place(request) {
                ring.abandon();
                return Err(why.into());
            }
        }
        if ring.publish()
            && let Some(send) = &self.inner.send
        {
            self.inner.context.backend.ring(self.inner.number, &send.lock());
        }
        Ok(())
    }

    /// Makes a datagram queue pair a member of a multicast group.
    pub fn attach_multicast(&self, group: Gid) -> Result<(), Error> {
        self.inner.context.backend.attach_multicast(self.inner.number, group)
    }

    /// Takes it out of a multicast group.
    pub fn detach_multicast(&self, group: Gid) -> Result<(), Error> {
        self.inner.context.backend.detach_multicast(self.inner.number, group)
    }
}

/// Send work requests that are posted together. Those of a batch that is dropped are forgotten.
pub struct Batch<'a> {
    pair: &'a Inner,
    ring: MutexGuard<'a, SendProducer>,
}

impl Batch<'_> {
    /// Adds a request. One that cannot be posted leaves the others as they are.
    pub fn add(&mut self, request: &SendRequest<'_>) -> Result<(), Error> {
        Ok(self.ring.place(&request.inner)?)
    }

    /// Posts everything that was added.
    pub fn post(mut self) {
        self.ring.publish();
        self.pair.context.backend.ring(self.pair.number, &self.ring);
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        // What was posted is published already and stays.
        self.ring.abandon();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.context.backend.destroy_queue_pair(self.number);
    }
}

/// Sends a line and returns the other side's, without reading past it.
fn exchange_line(stream: &mut (impl Read + Write), mine: &str) -> Result<String, Error> {
    let failed = |source| Error::System { what: "exchanging endpoints", source };
    stream.write_all(format!("{mine}\n").as_bytes()).and_then(|()| stream.flush()).map_err(failed)?;
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') && line.len() < 256 {
        let mut byte = [0];
        stream.read_exact(&mut byte).map_err(failed)?;
        line.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&line).trim().into())
}
