//! Connections in async code.

use super::{
    ConnectionParameters, Event, EventChannel, EventType, Id, PeerParameters, PortSpace, RejectReason,
    resolve,
};
use crate::{Context, Error, QueuePair};
use std::future::poll_fn;
use std::net::SocketAddr;
use std::task::Poll;

/// Takes requests for connections.
#[derive(Clone, Debug)]
pub struct Listener {
    id: Id,
    channel: EventChannel,
}

impl Listener {
    /// Listens at `host:port`; port 0 takes any.
    pub fn bind(context: &Context, address: &str) -> Result<Listener, Error> {
        Listener::bind_with(context, resolve(context, address)?, 0)
    }

    /// Listens at an address, where so many requests may wait.
    pub fn bind_with(context: &Context, address: SocketAddr, backlog: u32) -> Result<Listener, Error> {
        let channel = EventChannel::new(context)?;
        let id = channel.create_id(PortSpace::Tcp)?;
        id.bind(address)?;
        id.listen(backlog)?;
        Ok(Listener { id, channel })
    }

    /// Where it listens.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.id.local_address()
    }

    /// The next request. Nothing is lost if the future is dropped before it is ready.
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

    /// The next request; sleeps until there is one.
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

/// The requests. It never ends.
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

/// A request for a connection. It is refused when it is dropped.
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

    /// What the peer's application sent, filled up with zeros to [`REQUEST_DATA`](super::MAX_REQ_PRIVATE_DATA) bytes.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// What the peer offers and asks for.
    pub fn offer(&self) -> PeerParameters {
        self.offer
    }

    /// Accepts with a queue pair, for as many reads as the peer asks for.
    pub async fn accept(self, pair: &QueuePair) -> Result<Connection, Error> {
        let PeerParameters { responder_resources, initiator_depth, .. } = self.offer;
        let parameters =
            ConnectionParameters { responder_resources, initiator_depth, ..ConnectionParameters::default() };
        self.accept_with(pair, &parameters).await
    }

    /// Accepts with a queue pair and these parameters.
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

    /// Refuses.
    pub fn reject(self, private_data: &[u8]) -> Result<(), Error> {
        self.id.reject(private_data)
    }

    /// Refuses, for a reason of the specification's list.
    pub fn reject_with_reason(self, reason: RejectReason, private_data: &[u8]) -> Result<(), Error> {
        self.id.reject_with_reason(reason, private_data)
    }
}

/// Asks for connections.
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
    /// Asks from this device, with the default parameters.
    pub fn new(context: &Context) -> Connector {
        Connector { context: DebugContext(context.clone()), parameters: ConnectionParameters::default() }
    }

    /// Sends this to the listener's application: up to [`REQUEST_DATA`](super::MAX_REQ_PRIVATE_DATA) bytes.
    pub fn private_data(mut self, data: &[u8]) -> Connector {
        self.parameters.private_data = data.to_vec();
        self
    }

    /// How many reads and atomics may be outstanding, each way.
    pub fn max_rd_atomic(mut self, max_rd_atomic: u8) -> Connector {
        self.parameters.responder_resources = max_rd_atomic;
        self.parameters.initiator_depth = max_rd_atomic;
        self
    }

    /// Every parameter.
    pub fn parameters(mut self, parameters: ConnectionParameters) -> Connector {
        self.parameters = parameters;
        self
    }

    /// Connects a queue pair to the listener at `host:port`.
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

/// A connection that stands. It is ended when it is dropped.
#[derive(Debug)]
pub struct Connection {
    id: Id,
    channel: EventChannel,
    private_data: Vec<u8>,
}

impl Connection {
    /// The identifier.
    pub fn id(&self) -> &Id {
        &self.id
    }

    /// The queue pair.
    pub fn queue_pair(&self) -> Option<QueuePair> {
        self.id.queue_pair()
    }

    /// What the peer's application sent when it asked, or when it accepted.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The peer's address and port.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.id.peer_address()
    }

    /// Ends the connection, and waits until the peer knows.
    pub async fn disconnect(self) -> Result<(), Error> {
        self.id.disconnect()?;
        self.channel.next().await?.expect(EventType::Disconnected)?;
        Ok(())
    }

    /// Waits until the peer ends the connection, and agrees.
    pub async fn wait_disconnected(self) -> Result<(), Error> {
        self.channel.next().await?.expect(EventType::Disconnected)?;
        self.id.disconnect()
    }
}
