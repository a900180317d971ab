//! Queue pairs.

use crate::{
    AccessFlags, AddressVector, CompletionQueue, Context, EndpointExchange, Error, Gid, ModifyQp, Mtu,
    ProtectionDomain, Psn, QpSnapshot, QpState, QpType, Qpn, QueueKey, ReceiveRequest, Resource, RnrTimer,
    SendRequest, SharedReceiveQueue, Verb, XrcDomain,
};
use parking_lot::{Mutex, MutexGuard};
use softhca_engine::{Command, QpCapabilities, QpInitAttributes, Reply};
use softhca_queue::{QpRingLayout, ReceiveProducer, SendProducer};
use softhca_types::{CallSite, reply};
#[cfg(feature = "sockets")]
use softhca_udp::PollGate;
use std::fmt;
use std::io::{Read, Write};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// The data that a peer needs to connect. Carry it over by any means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The host.
    pub gid: Gid,
    /// The queue pair.
    pub qpn: Qpn,
    /// The first PSN that it sends.
    pub psn: Psn,
}

/// One word: the GID, the queue pair and the PSN in hexadecimal, separated by slashes.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gid = u128::from_be_bytes(self.gid.0);
        write!(f, "{gid:032x}/{:06x}/{:06x}", self.qpn.value(), self.psn.value())
    }
}

impl FromStr for Endpoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Endpoint, Error> {
        let mut words = text.trim().split('/');
        let mut number = || words.next().and_then(|word| u128::from_str_radix(word, 16).ok());
        let (Some(gid), Some(queue_pair), Some(psn)) = (number(), number(), number()) else {
            return Err(Error::InvalidEndpoint(text.into()));
        };
        let [queue_pair, psn] = [queue_pair as u32, psn as u32];
        Ok(Endpoint { gid: Gid(gid.to_be_bytes()), qpn: Qpn::new(queue_pair), psn: Psn::new(psn) })
    }
}

/// How a connection behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectOptions {
    /// The maximum payload of a packet.
    pub path_mtu: Mtu,
    /// The remote accesses that the peer may perform.
    pub access: AccessFlags,
    /// The maximum number of outstanding READs and atomics, in each direction.
    pub max_rd_atomic: u8,
    /// The ACK timeout: 4.096 µs × 2^timeout. 0 waits forever.
    pub timeout: u8,
    /// The number of retries after an ACK timeout or a sequence NAK.
    pub retry_cnt: u8,
    /// How often to send again when the peer has no receive posted. The default, 6, fails with
    /// [`RnrRetryExceededError`](crate::CompletionStatus::RnrRetryExceededError) after about 30 ms.
    /// [`ConnectOptions::RNR_RETRY_INFINITE`] never fails.
    pub rnr_retry: u8,
    /// The time that a peer waits before it retries when no receive is posted here.
    pub min_rnr_timer: RnrTimer,
    /// DSCP and ECN bits of the IP header.
    pub traffic_class: u8,
}

impl ConnectOptions {
    /// The `rnr_retry` that waits for a receive forever.
    pub const RNR_RETRY_INFINITE: u8 = 7;
}

impl Default for ConnectOptions {
    fn default() -> ConnectOptions {
        ConnectOptions {
            path_mtu: Mtu::B1024,
            access: AccessFlags::LOCAL_WRITE
                | AccessFlags::REMOTE_WRITE
                | AccessFlags::REMOTE_READ
                | AccessFlags::REMOTE_ATOMIC,
            max_rd_atomic: 16,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 6,
            min_rnr_timer: RnrTimer::new(18),
            traffic_class: 0,
        }
    }
}

/// The queues that a queue pair completes to and takes receives from.
#[derive(Default)]
struct Queues {
    send_cq: Option<CompletionQueue>,
    recv_cq: Option<CompletionQueue>,
    shared_receive_queue: Option<SharedReceiveQueue>,
    xrc_domain: Option<XrcDomain>,
}

/// The attributes of a queue pair to create, from [`ProtectionDomain::create_queue_pair`](crate::ProtectionDomain::create_queue_pair).
pub struct QueuePairBuilder {
    context: Context,
    domain: Option<ProtectionDomain>,
    kind: QpType,
    queues: Queues,
    capabilities: QpCapabilities,
    sq_sig_all: bool,
    sq_psn: Option<Psn>,
    has_silent_waits: bool,
}

impl ProtectionDomain {
    /// Starts to create a queue pair whose sends and receives complete to `queue`; `build` creates it.
    pub fn create_queue_pair(&self, kind: QpType, queue: &CompletionQueue) -> QueuePairBuilder {
        QueuePairBuilder::new(self, kind, queue)
    }
}

impl XrcDomain {
    /// Creates the receiving end of a connection, in RESET. Every request from the peer (an `XrcInitiator`), RDMA
    /// included, names a shared receive queue of this domain. The request can access only memory in that queue's
    /// protection domain.
    pub fn create_target_queue_pair(&self) -> Result<QueuePair, Error> {
        self.target_builder().build()
    }

    /// Begins to create such a receiving end.
    pub fn target_builder(&self) -> QueuePairBuilder {
        QueuePairBuilder::xrc_target(self)
    }
}

impl QueuePairBuilder {
    fn new(domain: &ProtectionDomain, kind: QpType, queue: &CompletionQueue) -> QueuePairBuilder {
        QueuePairBuilder {
            context: domain.inner.context.clone(),
            domain: Some(domain.clone()),
            kind,
            queues: Queues {
                send_cq: Some(queue.clone()),
                recv_cq: Some(queue.clone()),
                shared_receive_queue: None,
                xrc_domain: None,
            },
            capabilities: QpCapabilities {
                max_send_wr: 128,
                max_recv_wr: 128,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: 64,
            },
            sq_sig_all: false,
            sq_psn: None,
            has_silent_waits: true,
        }
    }

    fn xrc_target(xrc_domain: &XrcDomain) -> QueuePairBuilder {
        QueuePairBuilder {
            context: xrc_domain.context().clone(),
            domain: None,
            kind: QpType::XrcTarget,
            queues: Queues { xrc_domain: Some(xrc_domain.clone()), ..Queues::default() },
            capabilities: QpCapabilities::default(),
            sq_sig_all: false,
            sq_psn: None,
            has_silent_waits: true,
        }
    }

    /// Sets another completion queue for receives.
    pub fn recv_cq(mut self, cq: &CompletionQueue) -> Self {
        self.queues.recv_cq = Some(cq.clone());
        self
    }

    /// Takes receives from a shared receive queue.
    pub fn shared_receive_queue(mut self, srq: &SharedReceiveQueue) -> Self {
        self.queues.shared_receive_queue = Some(srq.clone());
        self
    }

    /// The maximum number of outstanding send work requests: 128 by default.
    pub fn max_send_wr(mut self, max_send_wr: u32) -> Self {
        self.capabilities.max_send_wr = max_send_wr;
        self
    }

    /// The maximum number of outstanding receive work requests: 128 by default.
    pub fn max_recv_wr(mut self, max_recv_wr: u32) -> Self {
        self.capabilities.max_recv_wr = max_recv_wr;
        self
    }

    /// The maximum number of scatter/gather entries of a send work request: 4 by default.
    pub fn max_send_sge(mut self, max_send_sge: u32) -> Self {
        self.capabilities.max_send_sge = max_send_sge;
        self
    }

    /// The maximum number of scatter entries of a receive work request: 4 by default.
    pub fn max_recv_sge(mut self, max_recv_sge: u32) -> Self {
        self.capabilities.max_recv_sge = max_recv_sge;
        self
    }

    /// The maximum number of bytes of inline data: 64 by default.
    pub fn max_inline_data(mut self, bytes: u32) -> Self {
        self.capabilities.max_inline_data = bytes;
        self
    }

    /// Signals the completion of every send work request.
    pub fn sq_sig_all(mut self) -> Self {
        self.sq_sig_all = true;
        self
    }

    /// The first PSN that [`QueuePair::connect`] and [`QueuePair::start_ud`] use: random by default.
    pub fn sq_psn(mut self, psn: Psn) -> Self {
        self.sq_psn = Some(psn);
        self
    }

    /// The application never polls memory for a write of the peer: it always calls this library to wait.
    #[doc(hidden)]
    pub fn without_silent_waits(mut self) -> Self {
        self.has_silent_waits = false;
        self
    }

    /// Creates the queue pair, in RESET.
    pub fn build(self) -> Result<QueuePair, Error> {
        let init = QpInitAttributes {
            qp_type: self.kind,
            pd: self.domain.as_ref().map(|domain| domain.inner.id),
            send_cq: self.queues.send_cq.as_ref().map(CompletionQueue::id),
            recv_cq: self.queues.recv_cq.as_ref().map(CompletionQueue::id),
            srq: self.queues.shared_receive_queue.as_ref().map(SharedReceiveQueue::id),
            xrcd: self.queues.xrc_domain.as_ref().map(XrcDomain::id),
            sq_sig_all: self.sq_sig_all,
        };
        let capabilities = self.capabilities;
        let command = Command::CreateQueuePair { init, capabilities };
        let (reply, rings) = self.context.backend.execute_with_rings(command)?;
        let qpn = reply!(reply, Reply::QueuePair(qpn) => qpn);
        if self.has_silent_waits {
            self.context.allow_silent_waits();
        }
        let (send_queue, recv_queue) =
            QpRingLayout { init: &init, capabilities: &capabilities }.producers(&rings);
        let psn = self.sq_psn.unwrap_or_else(|| Psn::new(self.context.backend.random() as u32));
        Ok(QueuePair {
            inner: Arc::new(Inner {
                #[cfg(feature = "sockets")]
                gate: self.context.backend.poll_gate(),
                context: self.context,
                _domain: self.domain,
                kind: self.kind,
                qpn,
                psn,
                state: AtomicU8::new(QpState::Reset as u8),
                send_queue: send_queue.map(Mutex::new),
                recv_queue: recv_queue.map(Mutex::new),
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
    /// Shows whether this is the process that opened the device.
    #[cfg(feature = "sockets")]
    gate: Option<Arc<PollGate>>,
    /// The domain of everything that its work requests name. An XRC target has none.
    _domain: Option<ProtectionDomain>,
    kind: QpType,
    qpn: Qpn,
    psn: Psn,
    /// The state to which the application took it. The device may have taken it to SQE or ERR since.
    state: AtomicU8,
    send_queue: Option<Mutex<SendProducer>>,
    recv_queue: Option<Mutex<ReceiveProducer>>,
    /// Queues that it completes to and takes from. They live at least as long.
    queues: Queues,
}

impl QueuePair {
    /// Its number.
    pub fn qpn(&self) -> Qpn {
        self.inner.qpn
    }

    /// Its service type.
    pub fn kind(&self) -> QpType {
        self.inner.kind
    }

    /// Whether it takes receives from a shared queue.
    pub fn has_shared_receive_queue(&self) -> bool {
        self.inner.queues.shared_receive_queue.is_some()
    }

    /// The address, number and first PSN that a peer needs to connect. It prints as text and parses from it.
    pub fn endpoint(&self) -> Endpoint {
        let gid = self.inner.context.gid(0).unwrap_or_default();
        Endpoint { gid, qpn: self.inner.qpn, psn: self.inner.psn }
    }

    /// The endpoint with another entry of the GID table, if it exists. Index 1 is the IPv6 address of a host with both.
    pub fn endpoint_with_gid_index(&self, index: u8) -> Option<Endpoint> {
        Some(Endpoint { gid: self.inner.context.gid(index)?, ..self.endpoint() })
    }

    /// Changes attributes and state. The error names what is missing or not allowed. A queue pair that is reset
    /// takes its completions with it, as most cards do it.
    pub fn modify(&self, modify: &ModifyQp) -> Result<QpState, Error> {
        let command = Command::ModifyQueuePair { qpn: self.inner.qpn, modify: *modify };
        let state = reply!(self.inner.context.backend.execute(command)?, Reply::QpState(state) => state);
        self.set_state(state);
        if state == QpState::Reset {
            for queue in [&self.inner.queues.send_cq, &self.inner.queues.recv_cq].into_iter().flatten() {
                queue.discard_qp(self.inner.qpn);
            }
        }
        Ok(state)
    }

    /// The application took it to this state.
    pub(crate) fn set_state(&self, state: QpState) {
        self.inner.state.store(state as u8, Ordering::Release);
    }

    /// Its state and attributes, as `ibv_query_qp` returns them.
    pub fn query(&self) -> Result<QpSnapshot, Error> {
        self.inner.announce(Verb::QueryQp)?;
        self.inner.snapshot()
    }

    /// Its state.
    pub fn state(&self) -> Result<QpState, Error> {
        self.inner.snapshot().map(|view| view.state)
    }

    /// Takes a connected queue pair to INIT, in which receives can be posted before the peer can send.
    pub fn init(&self, path: &ConnectOptions) -> Result<(), Error> {
        let modify = ModifyQp::default().state(QpState::Init).pkey_index(0).port(1);
        self.modify(&modify.access_flags(path.access)).map(|_| ())
    }

    /// Takes a connected queue pair through INIT and RTR to RTS, towards a peer. It may be in INIT already.
    pub fn connect(&self, peer: &Endpoint, path: &ConnectOptions) -> Result<(), Error> {
        let source_index = self.inner.context.gid_index_for(peer.gid);
        let vector = AddressVector {
            traffic_class: path.traffic_class,
            sgid_index: source_index,
            ..AddressVector::to(peer.gid)
        };
        let modify = ModifyQp::default();
        self.init(path)?;
        let mut receive = modify
            .state(QpState::ReadyToReceive)
            .address_vector(vector)
            .path_mtu(path.path_mtu)
            .dest_qpn(peer.qpn)
            .rq_psn(peer.psn);
        if matches!(self.inner.kind, QpType::Rc | QpType::XrcTarget) {
            receive = receive.max_dest_rd_atomic(path.max_rd_atomic).min_rnr_timer(path.min_rnr_timer);
        }
        self.modify(&receive)?;
        let mut send = modify.state(QpState::ReadyToSend).sq_psn(self.inner.psn);
        if matches!(self.inner.kind, QpType::Rc | QpType::XrcInitiator) {
            send = send
                .timeout(path.timeout)
                .retry_count(path.retry_cnt)
                .rnr_retry(path.rnr_retry)
                .max_rd_atomic(path.max_rd_atomic);
        } else if self.inner.kind == QpType::XrcTarget {
            send = send.timeout(path.timeout);
        }
        self.modify(&send)?;
        Ok(())
    }

    /// Connects to the one other queue pair that meets this one under `name`: both call this. When it
    /// returns, both can receive and send.
    pub async fn exchange_and_connect(
        &self,
        at: &EndpointExchange,
        name: &str,
        path: &ConnectOptions,
    ) -> Result<Endpoint, Error> {
        let peer = at.exchange(name, self.endpoint()).await;
        self.connect(&peer, path)?;
        at.exchange(&format!("{name}, connected"), ()).await;
        Ok(peer)
    }

    /// Connects to the queue pair at the other end of a stream, a TCP connection as a rule: both call this.
    /// When it returns, both can receive and send, and the stream is as it was.
    pub fn connect_over_stream(
        &self,
        stream: &mut (impl Read + Write),
        path: &ConnectOptions,
    ) -> Result<Endpoint, Error> {
        let peer: Endpoint = exchange_line(stream, &self.endpoint().to_string())?.parse()?;
        self.connect(&peer, path)?;
        exchange_line(stream, "connected")?;
        Ok(peer)
    }

    /// Connects this queue pair and another of the same process or world to each other.
    pub fn connect_both(&self, other: &QueuePair, path: &ConnectOptions) -> Result<(), Error> {
        self.connect(&other.endpoint(), path)?;
        other.connect(&self.endpoint(), path)
    }

    /// Takes a datagram queue pair to INIT, in which receives can be posted.
    pub fn init_ud(&self, queue_key: QueueKey) -> Result<(), Error> {
        let modify = ModifyQp::default().state(QpState::Init).pkey_index(0).port(1);
        self.modify(&modify.qkey(queue_key)).map(|_| ())
    }

    /// Takes a datagram queue pair to RTS. It may be in INIT already.
    pub fn start_ud(&self, queue_key: QueueKey) -> Result<(), Error> {
        let modify = ModifyQp::default();
        self.init_ud(queue_key)?;
        self.modify(&modify.state(QpState::ReadyToReceive))?;
        self.modify(&modify.state(QpState::ReadyToSend).sq_psn(self.inner.psn))?;
        Ok(())
    }

    /// Posts a send work request.
    ///
    /// # Errors
    /// In RESET, INIT and RTR: [`Error::InvalidState`]. In SQE and ERR the request is accepted, and completes as
    /// flushed. [`Error::QueueFull`] if `max_send_wr` requests are outstanding.
    pub fn post_send(&self, request: &SendRequest<'_>) -> Result<(), Error> {
        self.post_send_list(std::slice::from_ref(request))
    }

    /// Posts several send work requests with one doorbell: all or none.
    pub fn post_send_list(&self, requests: &[SendRequest<'_>]) -> Result<(), Error> {
        let mut batch = self.send_batch()?;
        for request in requests {
            batch.add(request)?;
        }
        batch.post();
        Ok(())
    }

    /// Begins to post several send work requests with one doorbell. Other posts wait meanwhile.
    #[inline]
    pub fn send_batch(&self) -> Result<SendBatch<'_>, Error> {
        self.inner.check_process()?;
        let ring = self.inner.send_queue.as_ref().ok_or(Error::NoQueue("send"))?;
        self.inner.check_state("post_send", QpState::ReadyToSend)?;
        self.inner.announce(Verb::PostSend)?;
        Ok(SendBatch { queue_pair: &self.inner, ring: ring.lock() })
    }

    /// Posts a receive work request.
    ///
    /// # Errors
    /// In RESET: [`Error::InvalidState`]. In ERR the request is accepted, and completes as flushed.
    /// [`Error::QueueFull`] if `max_recv_wr` requests are outstanding.
    #[inline]
    pub fn post_recv(&self, request: &ReceiveRequest<'_>) -> Result<(), Error> {
        self.post_recv_list(std::slice::from_ref(request))
    }

    /// Posts several receive work requests at once: all or none.
    #[inline]
    pub fn post_recv_list(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), Error> {
        self.inner.check_process()?;
        let ring = self.inner.recv_queue.as_ref().ok_or(Error::NoQueue("receive"))?;
        self.inner.check_state("post_recv", QpState::Init)?;
        self.inner.announce(Verb::PostRecv)?;
        let mut ring = ring.lock();
        for request in requests {
            if let Err(why) = ring.enqueue(request) {
                ring.discard_unpublished();
                return Err(Error::from_post("receive", why));
            }
        }
        if ring.publish()
            && let Some(send) = &self.inner.send_queue
        {
            self.inner.context.backend.ring_doorbell(self.inner.qpn, &send.lock());
        }
        Ok(())
    }

    /// Tells contexts apart.
    #[doc(hidden)]
    pub fn context_address(&self) -> usize {
        Arc::as_ptr(&self.inner.context.backend).addr()
    }

    /// Names the place of calls that post work requests with this number, for the event log.
    #[doc(hidden)]
    pub fn name_call_site(&self, number: u16, call_site: CallSite) -> Result<(), Error> {
        self.inner.context.backend.execute(Command::NameCallSite { number, call_site }).map(|_| ())
    }

    /// Attaches a datagram queue pair to a multicast group. A card without an IPv6 address uses an IPv4 group in place of an
    /// IPv6 one.
    pub fn attach_multicast(&self, group: Gid) -> Result<(), Error> {
        let group = self.inner.context.group_of(group);
        let command = Command::AttachMulticast { qpn: self.inner.qpn, group };
        self.inner.context.backend.execute(command).map(|_| ())
    }

    /// Detaches it from a multicast group.
    pub fn detach_multicast(&self, group: Gid) -> Result<(), Error> {
        let group = self.inner.context.group_of(group);
        let command = Command::DetachMulticast { qpn: self.inner.qpn, group };
        self.inner.context.backend.execute(command).map(|_| ())
    }
}

/// Send work requests that are posted together. A batch that is dropped posts nothing.
pub struct SendBatch<'a> {
    queue_pair: &'a Inner,
    ring: MutexGuard<'a, SendProducer>,
}

impl SendBatch<'_> {
    /// Adds a request. If it cannot be posted, the others stay as they are.
    #[inline]
    pub fn add(&mut self, request: &SendRequest<'_>) -> Result<(), Error> {
        self.ring.enqueue(&request.inner).map_err(|why| Error::from_post("send", why))
    }

    /// Posts all added requests with one doorbell.
    #[inline]
    pub fn post(mut self) {
        self.ring.publish();
        self.queue_pair.context.backend.ring_doorbell(self.queue_pair.qpn, &self.ring);
    }
}

impl Drop for SendBatch<'_> {
    #[inline]
    fn drop(&mut self) {
        // Requests that were posted are published already and stay.
        self.ring.discard_unpublished();
    }
}

impl Inner {
    /// As [`Context::check_process`].
    #[inline]
    fn check_process(&self) -> Result<(), Error> {
        #[cfg(feature = "sockets")]
        if self.gate.as_ref().is_some_and(|gate| gate.is_of_this_process()) {
            return Ok(());
        }
        self.context.backend.check_process()
    }

    /// As [`Context::announce_call`].
    #[inline]
    fn announce(&self, verb: Verb) -> Result<(), Error> {
        self.context.announce_call(verb, Some((Resource::QueuePair, self.qpn.value())))
    }

    fn snapshot(&self) -> Result<QpSnapshot, Error> {
        let reply = self.context.backend.execute(Command::QueryQueuePair(self.qpn))?;
        Ok(reply!(reply, Reply::QpSnapshot(snapshot) => snapshot))
    }

    /// Fails in states before `least`, in the order of `enum ibv_qp_state`. The device may be ahead of the noted state
    /// while another thread is in the call that changes it. A peer's message can arrive before the call returns.
    #[inline]
    fn check_state(&self, call: &'static str, least: QpState) -> Result<(), Error> {
        if self.state.load(Ordering::Acquire) >= least as u8 {
            return Ok(());
        }
        match self.snapshot()?.state {
            state if state as u8 >= least as u8 => Ok(()),
            state => Err(Error::InvalidState { qpn: self.qpn, state, call }),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.context.backend.execute(Command::DestroyQueuePair(self.qpn));
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

#[cfg(all(test, feature = "sockets"))]
mod tests {
    use crate::{Device, QpState, QpType, ReceiveRequest};

    #[test]
    fn a_post_sees_a_state_that_a_call_of_another_thread_has_reached() {
        let context = Device::embedded().unwrap().open();
        let domain = context.allocate_protection_domain().unwrap();
        let queue = context.create_completion_queue(1).unwrap();
        let pair = domain.create_queue_pair(QpType::Rc, &queue).build().unwrap();
        assert!(pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[] }).is_err());
        pair.init(&Default::default()).unwrap();
        pair.set_state(QpState::Reset);
        pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[] }).unwrap();
    }
}
