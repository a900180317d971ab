//! Control verbs of completion queues, shared receive queues and XRC domains.

use super::{at_most, check_receive};
use crate::card::XrcDomain;
use crate::completion_queue::CompletionQueue;
use crate::shared_receive::SharedReceiveQueue;
use crate::{
    AsyncEvent, ClientId, Context, CqId, Error, Event, Hca, Resource, SharedReceiveView, SrqId, SrqInit,
    XrcdId,
};
use softhca_queue::{CompletionProducer, ReceiveConsumer};

impl Hca {
    /// Creates a completion queue on the given ring.
    pub fn create_completion_queue(
        &mut self,
        client: ClientId,
        ring: CompletionProducer,
    ) -> Result<CqId, Error> {
        self.known(client)?;
        at_most("completions", u64::from(ring.slots()), u64::from(self.limits.completions))?;
        let tag = self.tag();
        let queue = CompletionQueue { client, ring, users: 0, failed: false };
        let limit = self.limits.completion_queues;
        let number = self.card.completion_queues.insert(tag, |_| queue);
        number.map(CqId).ok_or(Error::Exhausted { resource: Resource::CompletionQueue, limit })
    }

    pub(super) fn completion_queue(
        &mut self,
        client: ClientId,
        cq: CqId,
    ) -> Result<&mut CompletionQueue, Error> {
        let queue = self.card.completion_queues.get_mut(cq.0).filter(|queue| queue.client == client);
        queue.ok_or(Error::NotFound { resource: Resource::CompletionQueue, number: cq.0 })
    }

    /// Moves a completion queue to another ring, with everything that waits in it.
    pub fn resize_completion_queue(
        &mut self,
        client: ClientId,
        cq: CqId,
        mut ring: CompletionProducer,
    ) -> Result<(), Error> {
        at_most("completions", u64::from(ring.slots()), u64::from(self.limits.completions))?;
        let queue = self.completion_queue(client, cq)?;
        if !queue.ring.move_to(&mut ring) {
            let why = "more completions wait than the new size holds";
            return Err(Error::Invalid { what: "completion queue size", why });
        }
        queue.ring = ring;
        Ok(())
    }

    /// Destroys a completion queue that nothing completes to.
    pub fn destroy_completion_queue(&mut self, client: ClientId, cq: CqId) -> Result<(), Error> {
        if self.completion_queue(client, cq)?.users > 0 {
            return Err(Error::Busy {
                resource: Resource::CompletionQueue,
                number: cq.0,
                user: Resource::QueuePair,
            });
        }
        self.card.completion_queues.remove(cq.0);
        Ok(())
    }

    pub(super) fn release_completion_queue(&mut self, cq: Option<CqId>) {
        if let Some(queue) = cq.and_then(|cq| self.card.completion_queues.get_mut(cq.0)) {
            queue.users -= 1;
        }
    }

    /// Creates a shared receive queue on the given ring.
    pub fn create_shared_receive_queue(
        &mut self,
        client: ClientId,
        init: SrqInit,
        ring: ReceiveConsumer,
    ) -> Result<SrqId, Error> {
        check_receive(&ring)?;
        at_most("limit", u64::from(init.limit), u64::from(ring.slots()))?;
        if let Some((cq, domain)) = init.extended {
            self.completion_queue(client, cq)?;
            self.xrc_domain(domain)?;
        }
        if !self.card.shared_receive_queues.has_room() {
            let limit = self.limits.shared_receive_queues;
            return Err(Error::Exhausted { resource: Resource::SharedReceiveQueue, limit });
        }
        self.card.protection.hold(client, init.domain)?;
        if let Some((cq, domain)) = init.extended {
            self.completion_queue(client, cq)?.users += 1;
            self.xrc_domain(domain)?.users += 1;
        }
        let tag = self.tag();
        let SrqInit { domain, limit, extended } = init;
        let queue = SharedReceiveQueue { client, domain, ring, limit, extended, users: 0 };
        let number = self.card.shared_receive_queues.insert(tag, |_| queue);
        Ok(SrqId(number.expect("there is room")))
    }

    pub(super) fn shared_receive_queue(
        &mut self,
        client: ClientId,
        srq: SrqId,
    ) -> Result<&mut SharedReceiveQueue, Error> {
        let queue = self.card.shared_receive_queues.get_mut(srq.0).filter(|queue| queue.client == client);
        queue.ok_or(Error::NotFound { resource: Resource::SharedReceiveQueue, number: srq.0 })
    }

    /// Arms the limit event of a shared receive queue; zero disarms it.
    pub fn arm_shared_receive_queue(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        srq: SrqId,
        limit: u32,
    ) -> Result<(), Error> {
        let queue = self.shared_receive_queue(client, srq)?;
        at_most("limit", u64::from(limit), u64::from(queue.ring.slots()))?;
        let passed = limit > 0 && queue.ring.waiting()? < limit;
        queue.limit = if passed { 0 } else { limit };
        if passed {
            let event = AsyncEvent::SharedReceiveQueueLimit(srq);
            ctx.tell(Event::Raised { client: Some(client), event });
        }
        Ok(())
    }

    /// What a shared receive queue is like.
    pub fn query_shared_receive_queue(
        &mut self,
        client: ClientId,
        srq: SrqId,
    ) -> Result<SharedReceiveView, Error> {
        let queue = self.shared_receive_queue(client, srq)?;
        let (slots, entries) = (queue.ring.slots(), queue.ring.entries() as u32);
        Ok(SharedReceiveView { slots, entries, limit: queue.limit })
    }

    /// Destroys a shared receive queue that no queue pair takes from.
    pub fn destroy_shared_receive_queue(&mut self, client: ClientId, srq: SrqId) -> Result<(), Error> {
        if self.shared_receive_queue(client, srq)?.users > 0 {
            return Err(Error::Busy {
                resource: Resource::SharedReceiveQueue,
                number: srq.0,
                user: Resource::QueuePair,
            });
        }
        let queue = self.card.shared_receive_queues.remove(srq.0).expect("it was found above");
        self.card.protection.release(queue.domain);
        if let Some((cq, domain)) = queue.extended {
            self.release_completion_queue(Some(cq));
            self.release_xrc_domain(Some(domain));
        }
        Ok(())
    }

    /// Opens an XRC domain.
    pub fn open_xrc_domain(&mut self, client: ClientId) -> Result<XrcdId, Error> {
        self.known(client)?;
        let limit = self.limits.xrc_domains;
        let number = self.card.xrc_domains.insert(0, |_| XrcDomain { client, users: 0, orphaned: false });
        number.map(XrcdId).ok_or(Error::Exhausted { resource: Resource::XrcDomain, limit })
    }

    pub(super) fn xrc_domain(&mut self, domain: XrcdId) -> Result<&mut XrcDomain, Error> {
        let found = self.card.xrc_domains.get_mut(domain.0);
        found.ok_or(Error::NotFound { resource: Resource::XrcDomain, number: domain.0 })
    }

    /// Closes an XRC domain that nothing uses.
    pub fn close_xrc_domain(&mut self, client: ClientId, domain: XrcdId) -> Result<(), Error> {
        let found = self.xrc_domain(domain)?;
        if found.client != client {
            return Err(Error::NotFound { resource: Resource::XrcDomain, number: domain.0 });
        }
        if found.users > 0 {
            let user = Resource::SharedReceiveQueue;
            return Err(Error::Busy { resource: Resource::XrcDomain, number: domain.0, user });
        }
        self.card.xrc_domains.remove(domain.0);
        Ok(())
    }

    pub(super) fn release_xrc_domain(&mut self, domain: Option<XrcdId>) {
        let Some(id) = domain else { return };
        if let Some(domain) = self.card.xrc_domains.get_mut(id.0) {
            domain.users -= 1;
            if domain.users == 0 && domain.orphaned {
                self.card.xrc_domains.remove(id.0);
            }
        }
    }
}
