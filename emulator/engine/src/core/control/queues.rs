//! Control verbs of completion queues, shared receive queues and XRC domains.

use super::limits::check_limit;
use crate::core::completion_queue::CompletionQueue;
use crate::core::hca::Hca;
use crate::core::hca_state::XrcDomain;
use crate::core::shared_receive_queue::SharedReceiveQueue;
use crate::core::transport::Transport;
use crate::{
    AsyncEvent, ClientId, Context, CqId, Event, Resource, SrqAttributes, SrqId, SrqInitAttributes,
    VerbsError, VerbsResult, XrcdId,
};
use softhca_queue::{CompletionProducer, ReceiveConsumer};

impl<T: Transport> Hca<T> {
    /// Creates a completion queue on the given ring.
    pub fn create_completion_queue(
        &mut self,
        client: ClientId,
        ring: CompletionProducer,
    ) -> VerbsResult<CqId> {
        self.check_client(client)?;
        let tag = self.next_tag();
        let queue = CompletionQueue { client, ring, users: 0, failed: false };
        let limit = self.limits.max_cq;
        let number = self.state.objects.completion_queues.insert(tag, |_| queue);
        number.map(CqId).ok_or(VerbsError::Exhausted { resource: Resource::CompletionQueue, limit })
    }

    pub(super) fn completion_queue(
        &mut self,
        client: ClientId,
        cq: CqId,
    ) -> VerbsResult<&mut CompletionQueue> {
        let queue = self.state.objects.completion_queues.get_mut(cq.0).filter(|queue| queue.client == client);
        queue.ok_or(VerbsError::NotFound { resource: Resource::CompletionQueue, number: cq.0 })
    }

    /// Moves a completion queue to another ring, with everything that waits in it.
    pub fn resize_completion_queue(
        &mut self,
        client: ClientId,
        cq: CqId,
        mut ring: CompletionProducer,
    ) -> VerbsResult {
        let queue = self.completion_queue(client, cq)?;
        if !queue.ring.move_to(&mut ring) {
            let why = "more completions wait than the new size holds";
            return Err(VerbsError::Invalid { what: "completion queue size", why });
        }
        queue.ring = ring;
        Ok(())
    }

    /// Destroys a completion queue that nothing completes to.
    pub fn destroy_completion_queue(&mut self, client: ClientId, cq: CqId) -> VerbsResult {
        if self.completion_queue(client, cq)?.users > 0 {
            return Err(VerbsError::Busy {
                resource: Resource::CompletionQueue,
                number: cq.0,
                user: Resource::QueuePair,
            });
        }
        self.state.objects.completion_queues.remove(cq.0);
        self.state.discard_held_completions(cq);
        Ok(())
    }

    pub(super) fn release_completion_queue(&mut self, cq: Option<CqId>) {
        if let Some(queue) = cq.and_then(|cq| self.state.objects.completion_queues.get_mut(cq.0)) {
            queue.users -= 1;
        }
    }

    /// Creates a shared receive queue on the given ring.
    pub fn create_shared_receive_queue(
        &mut self,
        client: ClientId,
        init: SrqInitAttributes,
        ring: ReceiveConsumer,
    ) -> VerbsResult<SrqId> {
        check_limit("srq_limit", u64::from(init.srq_limit), u64::from(ring.slots()))?;
        if let Some((cq, domain)) = init.xrc {
            self.completion_queue(client, cq)?;
            self.xrc_domain(domain)?;
        }
        if !self.state.objects.shared_receive_queues.has_room() {
            let limit = self.limits.max_srq;
            return Err(VerbsError::Exhausted { resource: Resource::SharedReceiveQueue, limit });
        }
        self.state.objects.protection.acquire_pd(client, init.pd)?;
        if let Some((cq, domain)) = init.xrc {
            self.completion_queue(client, cq)?.users += 1;
            self.xrc_domain(domain)?.users += 1;
        }
        let tag = self.next_tag();
        let SrqInitAttributes { pd: domain, srq_limit: limit, xrc: extended } = init;
        let queue = SharedReceiveQueue { client, pd: domain, ring, limit, xrc: extended, users: 0 };
        let number = self.state.objects.shared_receive_queues.insert(tag, |_| queue);
        Ok(SrqId(number.expect("there is room")))
    }

    pub(super) fn shared_receive_queue(
        &mut self,
        client: ClientId,
        srq: SrqId,
    ) -> VerbsResult<&mut SharedReceiveQueue> {
        let queue =
            self.state.objects.shared_receive_queues.get_mut(srq.0).filter(|queue| queue.client == client);
        queue.ok_or(VerbsError::NotFound { resource: Resource::SharedReceiveQueue, number: srq.0 })
    }

    /// Moves a shared receive queue to another ring, with everything that waits in it, and arms its limit event; a limit
    /// of zero disarms it.
    pub fn modify_shared_receive_queue(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        srq: SrqId,
        ring: Option<ReceiveConsumer>,
        limit: Option<u32>,
    ) -> VerbsResult {
        let queue = self.shared_receive_queue(client, srq)?;
        let slots = ring.as_ref().map_or(queue.ring.slots(), ReceiveConsumer::slots);
        check_limit("srq_limit", u64::from(limit.unwrap_or(queue.limit)), u64::from(slots))?;
        if let Some(mut ring) = ring {
            if !queue.ring.move_to(&mut ring)? {
                let why = "more receives wait than the new size holds";
                return Err(VerbsError::Invalid { what: "shared receive queue size", why });
            }
            queue.ring = ring;
        }
        let Some(limit) = limit else { return Ok(()) };
        let passed = limit > 0 && queue.ring.pending()? < limit;
        queue.limit = if passed { 0 } else { limit };
        if passed {
            let event = AsyncEvent::SharedReceiveQueueLimit(srq);
            ctx.emit(Event::AsyncEventRaised { client: Some(client), event });
        }
        Ok(())
    }

    /// The attributes of a shared receive queue.
    pub fn query_shared_receive_queue(&mut self, client: ClientId, srq: SrqId) -> VerbsResult<SrqAttributes> {
        let queue = self.shared_receive_queue(client, srq)?;
        let (slots, entries) = (queue.ring.slots(), queue.ring.max_sge() as u32);
        Ok(SrqAttributes { max_wr: slots, max_sge: entries, srq_limit: queue.limit })
    }

    /// Destroys a shared receive queue that no queue pair takes from.
    pub fn destroy_shared_receive_queue(&mut self, client: ClientId, srq: SrqId) -> VerbsResult {
        if self.shared_receive_queue(client, srq)?.users > 0 {
            return Err(VerbsError::Busy {
                resource: Resource::SharedReceiveQueue,
                number: srq.0,
                user: Resource::QueuePair,
            });
        }
        let queue = self.state.objects.shared_receive_queues.remove(srq.0).expect("it was found above");
        self.state.objects.protection.release_pd(queue.pd);
        if let Some((cq, domain)) = queue.xrc {
            self.release_completion_queue(Some(cq));
            self.release_xrc_domain(Some(domain));
        }
        Ok(())
    }

    /// Opens an XRC domain.
    pub fn open_xrc_domain(&mut self, client: ClientId) -> VerbsResult<XrcdId> {
        self.check_client(client)?;
        let limit = self.limits.max_xrcd;
        let number =
            self.state.objects.xrc_domains.insert(0, |_| XrcDomain { client, users: 0, orphaned: false });
        number.map(XrcdId).ok_or(VerbsError::Exhausted { resource: Resource::XrcDomain, limit })
    }

    pub(super) fn xrc_domain(&mut self, domain: XrcdId) -> VerbsResult<&mut XrcDomain> {
        let found = self.state.objects.xrc_domains.get_mut(domain.0);
        found.ok_or(VerbsError::NotFound { resource: Resource::XrcDomain, number: domain.0 })
    }

    /// Closes an XRC domain that nothing uses.
    pub fn close_xrc_domain(&mut self, client: ClientId, domain: XrcdId) -> VerbsResult {
        let found = self.xrc_domain(domain)?;
        if found.client != client {
            return Err(VerbsError::NotFound { resource: Resource::XrcDomain, number: domain.0 });
        }
        if found.users > 0 {
            let user = Resource::SharedReceiveQueue;
            return Err(VerbsError::Busy { resource: Resource::XrcDomain, number: domain.0, user });
        }
        self.state.objects.xrc_domains.remove(domain.0);
        Ok(())
    }

    pub(super) fn release_xrc_domain(&mut self, domain: Option<XrcdId>) {
        let Some(id) = domain else { return };
        if let Some(domain) = self.state.objects.xrc_domains.get_mut(id.0) {
            domain.users -= 1;
            if domain.users == 0 && domain.orphaned {
                self.state.objects.xrc_domains.remove(id.0);
            }
        }
    }
}
