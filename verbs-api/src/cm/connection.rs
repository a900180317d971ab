//! Connections in async code.

use super::{
    ConnectionParameters, Event, EventChannel, EventType, Id, PeerParameters, PortSpace, RejectReason,
    resolve,
};
use crate::{Context, Error, QueuePair};
use std::future::poll_fn;
use std::net::SocketAddr;
use std::task::Poll;

/// Accepts connections, in async code. The module has an [example](super).
#[derive(Clone, Debug)]
pub struct Listener {
    id: Id,
    channel: EventChannel,
}

impl Listener {
    /// Listens at `host:port`; port 0 takes any free port, which [`Listener::local_address`] returns.
    pub fn bind(context: &Context, address: &str) -> Result<Listener, Error> {
        Listener::bind_with(context, resolve(context, address)?, 0)
    }

    /// Listens at an address. At most `backlog` requests wait to be accepted, others are rejected; zero is as many as the
    /// device allows.
    pub fn bind_with(context: &Context, address: SocketAddr, backlog: u32) -> Result<Listener, Error> {
        let channel = EventChannel::new(context)?;
        let id = channel.create_id(PortSpace::Tcp)?;
        id.bind(address)?;
        id.listen(backlog)?;
        Ok(Listener { id, channel })
    }

    /// The address and port at which it listens.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.id.local_address()
    }

    /// Waits for the next request. No request is lost if the future is dropped before it is ready.
    pub async fn accept(&self) -> Result<ConnectRequest, Error> {
        poll_fn(|context| self.poll_accept(context)).await
    }

    fn poll_accept(&self, context: &mut std::task::Context<'_>) -> Poll<Result<ConnectRequest, Error>> {
        loop {
            let event = std::task::ready!(self.channel.poll_next_event(context))?;
            if let Some(request) = self.accept_event(event)? {
                return Poll::Ready(Ok(request));
            }
        }
    }

    /// Waits for the next request in code that is not async: the thread sleeps.
    ///
    /// # Panics
    /// In the host code of a `World`, where [`Listener::accept`] is to be awaited.
    pub fn wait(&self) -> Result<ConnectRequest, Error> {
        loop {
            if let Some(request) = self.accept_event(self.channel.wait()?)? {
                return Ok(request);
            }
        }
    }

    /// A request, unless its peer has given up meanwhile.
    fn accept_event(&self, event: Event) -> Result<Option<ConnectRequest>, Error> {
        if event.kind != EventType::ConnectRequest {
            return Ok(None);
        }
        let offer = event.offer();
        let Event { id, private_data, .. } = event;
        let channel = EventChannel::new(self.channel.context())?;
        id.migrate(&channel)?;
        Ok(offer.map(|offer| ConnectRequest { id, channel, private_data, offer }))
    }
}

/// A stream of requests, which never ends.
#[cfg(feature = "tokio")]
impl futures_core::Stream for Listener {
    type Item = Result<ConnectRequest, Error>;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> Poll<Option<Self::Item>> {
        self.poll_accept(context).map(Some)
    }
}

/// A request for a connection. Dropping it rejects the connection.
#[derive(Debug)]
pub struct ConnectRequest {
    id: Id,
    channel: EventChannel,
    private_data: Vec<u8>,
    offer: PeerParameters,
}

impl ConnectRequest {
    /// The peer's address and port.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.id.peer_address()
    }

    /// The private data of the REQ, filled up with zeros to [`MAX_REQ_PRIVATE_DATA`](super::MAX_REQ_PRIVATE_DATA) bytes.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The parameters that the peer asks for, such as its `initiator_depth`.
    pub fn offer(&self) -> PeerParameters {
        self.offer
    }

    /// Accepts the connection with a queue pair in RESET, which is in RTS when this returns. It permits as many outstanding
    /// READs and atomics as the peer asks for. Post receives to the queue pair before: the peer may send at once.
    pub async fn accept(self, pair: &QueuePair) -> Result<Connection, Error> {
        let PeerParameters { responder_resources, initiator_depth, .. } = self.offer;
        let parameters =
            ConnectionParameters { responder_resources, initiator_depth, ..ConnectionParameters::default() };
        self.accept_with(pair, &parameters).await
    }

    /// Accepts the connection with these parameters.
    pub async fn accept_with(
        self,
        pair: &QueuePair,
        parameters: &ConnectionParameters,
    ) -> Result<Connection, Error> {
        self.id.attach_queue_pair(pair)?;
        self.id.accept(parameters)?;
        self.channel.next().await?.expect(EventType::Established)?;
        let ConnectRequest { id, channel, private_data, .. } = self;
        Ok(Connection { id, channel, private_data })
    }

    /// Rejects the connection. The peer's `connect` fails and gets up to
    /// [`MAX_REJ_PRIVATE_DATA`](super::MAX_REJ_PRIVATE_DATA) bytes of private data.
    pub fn reject(self, private_data: &[u8]) -> Result<(), Error> {
        self.id.reject(private_data)
    }

    /// Rejects the connection with a reason of the specification's list.
    pub fn reject_with_reason(self, reason: RejectReason, private_data: &[u8]) -> Result<(), Error> {
        self.id.reject_with_reason(reason, private_data)
    }
}

/// Connects to listeners, in async code. The module has an [example](super).
#[derive(Clone, Debug)]
pub struct Connector {
    context: DebugContext,
    parameters: ConnectionParameters,
}

/// A context that has nothing to show.
#[derive(Clone)]
struct DebugContext(Context);

impl std::fmt::Debug for DebugContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.address())
    }
}

impl Connector {
    /// Connects from this device, with the default parameters.
    pub fn new(context: &Context) -> Connector {
        Connector { context: DebugContext(context.clone()), parameters: ConnectionParameters::default() }
    }

    /// Sends private data to the listener: up to [`MAX_REQ_PRIVATE_DATA`](super::MAX_REQ_PRIVATE_DATA) bytes.
    pub fn private_data(mut self, data: &[u8]) -> Connector {
        self.parameters.private_data = data.to_vec();
        self
    }

    /// How many READs and atomics may be outstanding in each direction; the listener may lower it.
    pub fn max_rd_atomic(mut self, max_rd_atomic: u8) -> Connector {
        self.parameters.responder_resources = max_rd_atomic;
        self.parameters.initiator_depth = max_rd_atomic;
        self
    }

    /// Sets all parameters at once.
    pub fn parameters(mut self, parameters: ConnectionParameters) -> Connector {
        self.parameters = parameters;
        self
    }

    /// Connects a queue pair in RESET to the listener at `host:port`. It is in RTS when this returns. The error
    /// [`Error::Connection`] has the reason if the listener rejects or nothing answers.
    pub async fn connect(&self, pair: &QueuePair, peer: &str) -> Result<Connection, Error> {
        let channel = EventChannel::new(&self.context.0)?;
        let id = channel.create_id(PortSpace::Tcp)?;
        id.resolve_peer(peer).await?;
        id.attach_queue_pair(pair)?;
        id.connect(&self.parameters)?;
        let Event { private_data, .. } = channel.next().await?.expect(EventType::Established)?;
        Ok(Connection { id, channel, private_data })
    }
}

/// An established connection. Dropping it disconnects.
#[derive(Debug)]
pub struct Connection {
    id: Id,
    channel: EventChannel,
    private_data: Vec<u8>,
}

impl Connection {
    /// The identifier, for the calls of librdmacm that this type does not have.
    pub fn id(&self) -> &Id {
        &self.id
    }

    /// The queue pair that the connection uses.
    pub fn queue_pair(&self) -> Option<QueuePair> {
        self.id.queue_pair()
    }

    /// The private data of the peer's REQ or REP, filled up with zeros.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The peer's address and port.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.id.peer_address()
    }

    /// Ends the connection and waits for the peer's DREP. The queue pair enters ERR: outstanding work is flushed.
    pub async fn disconnect(self) -> Result<(), Error> {
        self.id.disconnect()?;
        self.channel.next().await?.expect(EventType::Disconnected)?;
        Ok(())
    }

    /// Waits until the peer ends the connection, and answers with a DREP.
    pub async fn wait_disconnected(self) -> Result<(), Error> {
        self.channel.next().await?.expect(EventType::Disconnected)?;
        self.id.disconnect()
    }
}
