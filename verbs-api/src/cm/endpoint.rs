//! Endpoints: an identifier with everything that belongs to it, made in one call.

use super::{AddressInfo, Id};
use crate::{CompletionQueue, Context, Error, ProtectionDomain, QpType, QueuePair};

/// A synchronous identifier with its domain, queues and queue pair. [`create_endpoint`] creates it.
pub struct Endpoint {
    /// The identifier. [`Id::get_request`] of a listener returns the next request.
    pub id: Id,
    /// The protection domain of the queue pair.
    pub protection_domain: ProtectionDomain,
    /// The completion queue of sends.
    pub send_cq: CompletionQueue,
    /// The completion queue of receives.
    pub recv_cq: CompletionQueue,
    /// The queue pair; a listener has none.
    pub queue_pair: Option<QueuePair>,
}

impl Endpoint {
    /// The domain and queues of an endpoint of this device, and the queue pair of a connection.
    fn new(context: &Context, id: Id, slots: u32, connects: bool) -> Result<Endpoint, Error> {
        let domain = context.allocate_protection_domain()?;
        let [sends, receives] =
            [context.create_completion_queue(slots)?, context.create_completion_queue(slots)?];
        let mut endpoint =
            Endpoint { id, protection_domain: domain, send_cq: sends, recv_cq: receives, queue_pair: None };
        if connects {
            endpoint.create_queue_pair(slots)?;
        }
        Ok(endpoint)
    }

    fn create_queue_pair(&mut self, slots: u32) -> Result<(), Error> {
        let kind = self.id.query()?.qp_type;
        let pair = self.protection_domain.create_queue_pair(kind, &self.send_cq).recv_cq(&self.recv_cq);
        let pair = pair.max_send_wr(slots).max_recv_wr(slots).build()?;
        self.id.attach_queue_pair(&pair)?;
        self.queue_pair = Some(pair);
        Ok(())
    }

    /// Makes an endpoint of a request to a synchronous listener, with `slots` sends and receives. Post receives, then call
    /// [`Id::accept`].
    pub fn from_request(id: Id, slots: u32) -> Result<Endpoint, Error> {
        Endpoint::new(&id.context(), id, slots, true)
    }
}

/// Creates an endpoint: `rdma_create_ep`. An endpoint of the active side is resolved and has a queue pair with `slots`
/// sends and receives. Receives can thus be posted before [`Id::connect`]. A listener's endpoint is bound.
pub fn create_endpoint(context: &Context, info: &AddressInfo, slots: u32) -> Result<Endpoint, Error> {
    let id = Id::synchronous(context, info.space)?;
    match (info.destination, info.source) {
        (Some(destination), source) => {
            id.resolve_address(source, destination)?;
            id.resolve_route()?;
            Endpoint::new(context, id, slots, true)
        }
        (None, Some(source)) => {
            id.bind(source)?;
            Endpoint::new(context, id, slots, false)
        }
        (None, None) => {
            let why = "it names neither a source nor a destination".into();
            Err(Error::UnknownHost { name: String::new(), why })
        }
    }
}

impl Endpoint {
    /// The service type of the queue pair; `None` for a listener.
    pub fn kind(&self) -> Option<QpType> {
        self.queue_pair.as_ref().map(QueuePair::kind)
    }
}
