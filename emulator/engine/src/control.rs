//! The control verbs: creating, changing and destroying resources.

use crate::card::{AddressHandle, XrcDomain};
use crate::completion_queue::CompletionQueue;
use crate::inbound::Inbound;
use crate::outbound::Outbound;
use crate::queue_pair::QueuePair;
use crate::shared_receive::SharedReceiveQueue;
use crate::{
    AddressVector, AhId, AsyncEvent, Attributes, ClientId, Context, CqId, Error, Event, Hca, Modify, PdId,
    QpInit, QpKind, QpView, Reason, Region, Resource, SharedReceiveView, SrqId, SrqInit, State, WindowKind,
    XrcdId, address, transition,
};
use core::net::{IpAddr, Ipv4Addr};
use softhca_queue::{CompletionProducer, DoorbellConsumer, ReceiveConsumer, SendConsumer};
use softhca_wire::{Envelope, Gid, Mtu, Qpn, RemoteKey};

/// The card's ends of a queue pair's rings.
#[derive(Default)]
pub struct QpRings {
    /// The send queue, unless it is an XRC target.
    pub send: Option<SendConsumer>,
    /// The receive queue, unless receives are shared.
    pub receive: Option<ReceiveConsumer>,
}

impl Hca {
    /// A tag for numbers and keys: different for each seed and each resource, the same in every run.
    fn tag(&mut self) -> u8 {
        let mut z = self.card.settings.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.card.settings.seed = z;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as u8
    }

    /// Lets an application in: the owner of everything that it creates.
    pub fn open_client(&mut self, doorbell: DoorbellConsumer) -> Result<ClientId, Error> {
        let limit = self.limits.clients;
        if self.clients.len() >= limit {
            return Err(Error::Exhausted { resource: Resource::Client, limit });
        }
        let client = ClientId(self.next_client);
        self.next_client += 1;
        self.clients.insert(client, doorbell);
        Ok(client)
    }

    /// Destroys everything that `client` owns. Its peers meet silence, as they would with any dead host.
    /// Returns the memory of its regions, which the driver may forget.
    pub fn close_client(&mut self, ctx: &mut Context<'_>, client: ClientId) -> alloc::vec::Vec<Region> {
        self.cm.close_client(&mut self.card, ctx, client);
        for number in self.queue_pairs.numbers(|qp| qp.client == client) {
            let destroyed = self.destroy_queue_pair(ctx, client, Qpn::new(number));
            debug_assert_eq!(destroyed, Ok(()));
        }
        for number in self.card.shared_receive_queues.numbers(|queue| queue.client == client) {
            let _ = self.destroy_shared_receive_queue(client, SrqId(number));
        }
        for number in self.card.completion_queues.numbers(|queue| queue.client == client) {
            let _ = self.destroy_completion_queue(client, CqId(number));
        }
        for number in self.card.address_handles.numbers(|handle| handle.client == client) {
            let _ = self.destroy_address_handle(client, AhId(number));
        }
        for number in self.card.xrc_domains.numbers(|domain| domain.client == client) {
            // What another client has in it keeps it.
            if self.close_xrc_domain(client, XrcdId(number)).is_err()
                && let Some(domain) = self.card.xrc_domains.get_mut(number)
            {
                domain.orphaned = true;
            }
        }
        let (regions, windows) = self.card.protection.owned(client);
        for key in windows {
            let _ = self.card.protection.free_window(client, key);
        }
        let regions = regions.into_iter().filter_map(|key| self.deregister(client, key).ok()).collect();
        for domain in self.card.protection.domains_of(client) {
            let _ = self.card.protection.free_domain(client, domain);
        }
        self.clients.remove(&client);
        regions
    }

    pub(crate) fn known(&self, client: ClientId) -> Result<(), Error> {
        let found = self.clients.contains_key(&client);
        found.then_some(()).ok_or(Error::NotFound { resource: Resource::Client, number: client.0 })
    }

    /// Allocates a protection domain.
    pub fn allocate_domain(&mut self, client: ClientId) -> Result<PdId, Error> {
        self.known(client)?;
        self.card.protection.allocate_domain(client)
    }

    /// Frees a protection domain that nothing uses.
    pub fn free_domain(&mut self, client: ClientId, domain: PdId) -> Result<(), Error> {
        self.card.protection.free_domain(client, domain)
    }

    /// Registers a region. The key serves local and remote access.
    pub fn register(&mut self, region: Region) -> Result<RemoteKey, Error> {
        let tag = self.tag();
        self.card.protection.register(region, tag)
    }

    /// Registers a region under a key of the caller's choice, if it is free. For replaying captures.
    pub fn register_as(&mut self, region: Region, key: RemoteKey) -> Result<(), Error> {
        self.card.protection.register_as(region, key)
    }

    /// Changes a region in place. It gets a new key if its addresses now mean something else.
    pub fn reregister(&mut self, client: ClientId, key: RemoteKey, new: Region) -> Result<RemoteKey, Error> {
        self.card.protection.reregister(client, key, new)
    }

    /// What a region was registered as.
    pub fn region(&mut self, client: ClientId, key: RemoteKey) -> Result<Region, Error> {
        self.card.protection.region(client, key)
    }

    /// Removes a region that no window is bound to.
    pub fn deregister(&mut self, client: ClientId, key: RemoteKey) -> Result<Region, Error> {
        self.card.protection.deregister(client, key)
    }

    /// Allocates a memory window.
    pub fn allocate_window(
        &mut self,
        client: ClientId,
        domain: PdId,
        kind: WindowKind,
    ) -> Result<RemoteKey, Error> {
        let tag = self.tag();
        self.card.protection.allocate_window(client, domain, kind, tag)
    }

    /// Frees a memory window, bound or not.
    pub fn free_window(&mut self, client: ClientId, key: RemoteKey) -> Result<(), Error> {
        self.card.protection.free_window(client, key)
    }

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

    fn completion_queue(&mut self, client: ClientId, cq: CqId) -> Result<&mut CompletionQueue, Error> {
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

    fn shared_receive_queue(
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

    fn xrc_domain(&mut self, domain: XrcdId) -> Result<&mut XrcDomain, Error> {
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

    fn release_xrc_domain(&mut self, domain: Option<XrcdId>) {
        let Some(id) = domain else { return };
        if let Some(domain) = self.card.xrc_domains.get_mut(id.0) {
            domain.users -= 1;
            if domain.users == 0 && domain.orphaned {
                self.card.xrc_domains.remove(id.0);
            }
        }
    }

    fn release_completion_queue(&mut self, cq: Option<CqId>) {
        if let Some(queue) = cq.and_then(|cq| self.card.completion_queues.get_mut(cq.0)) {
            queue.users -= 1;
        }
    }

    fn check_path(&self, path: &AddressVector) -> Result<(), Error> {
        if path.destination.is_unspecified() {
            let why = "RoCE needs a GRH: set the destination GID";
            return Err(Error::Invalid { what: "address vector", why });
        }
        if usize::from(path.source_index) >= self.card.gids.len() {
            let limit = self.card.gids.len().saturating_sub(1) as u64;
            return Err(Error::TooLarge { what: "source GID index", value: path.source_index.into(), limit });
        }
        let source = self.card.gid(path.source_index).ip();
        if source.is_ipv4() != path.destination.ip().is_ipv4() {
            let why = "source and destination GID are of different IP versions: choose the other GID index";
            return Err(Error::Invalid { what: "address vector", why });
        }
        Ok(())
    }

    /// Creates an address handle.
    pub fn create_address_handle(
        &mut self,
        client: ClientId,
        domain: PdId,
        vector: AddressVector,
    ) -> Result<AhId, Error> {
        self.check_path(&vector)?;
        let limit = self.limits.address_handles;
        if !self.card.address_handles.has_room() {
            return Err(Error::Exhausted { resource: Resource::AddressHandle, limit });
        }
        self.card.protection.hold(client, domain)?;
        let tag = self.tag();
        let number = self.card.address_handles.insert(tag, |_| AddressHandle { client, domain, vector });
        Ok(AhId(number.expect("there is room")))
    }

    /// Destroys an address handle.
    pub fn destroy_address_handle(&mut self, client: ClientId, handle: AhId) -> Result<(), Error> {
        let found = self.card.address_handles.get(handle.0).filter(|found| found.client == client);
        let domain =
            found.ok_or(Error::NotFound { resource: Resource::AddressHandle, number: handle.0 })?.domain;
        self.card.address_handles.remove(handle.0);
        self.card.protection.release(domain);
        Ok(())
    }

    /// Creates a queue pair, in RESET.
    pub fn create_queue_pair(
        &mut self,
        client: ClientId,
        init: QpInit,
        rings: QpRings,
    ) -> Result<Qpn, Error> {
        let tag = self.tag();
        self.add_queue_pair(client, init, rings, |table, make| table.insert(tag, make))
    }

    /// Creates a queue pair under a number of the caller's choice, if it is free. For replaying captures.
    pub fn create_queue_pair_as(
        &mut self,
        client: ClientId,
        init: QpInit,
        rings: QpRings,
        number: Qpn,
    ) -> Result<Qpn, Error> {
        self.add_queue_pair(client, init, rings, |table, make| table.insert_at(number.value(), make))
    }

    fn add_queue_pair(
        &mut self,
        client: ClientId,
        init: QpInit,
        rings: QpRings,
        insert: impl FnOnce(&mut crate::table::Table<QueuePair>, &mut dyn FnMut(u32) -> QueuePair) -> Option<u32>,
    ) -> Result<Qpn, Error> {
        self.known(client)?;
        self.check_init(client, &init, &rings)?;
        let limit = self.limits.queue_pairs;
        if !self.queue_pairs.has_room() {
            return Err(Error::Exhausted { resource: Resource::QueuePair, limit });
        }
        if let Some(domain) = init.domain {
            self.card.protection.hold(client, domain)?;
        }
        let (mut rings, mtu) = (Some(rings), self.card.settings.mtu);
        let mut make = |number| {
            let rings = rings.take().unwrap_or_default();
            new_queue_pair(client, Qpn::new(number), &init, rings, mtu)
        };
        let Some(number) = insert(&mut self.queue_pairs, &mut make) else {
            if let Some(domain) = init.domain {
                self.card.protection.release(domain);
            }
            return Err(Error::Exhausted { resource: Resource::QueuePair, limit });
        };
        for cq in [init.send_cq, init.receive_cq].into_iter().flatten() {
            self.completion_queue(client, cq)?.users += 1;
        }
        if let Some(srq) = init.shared_receive_queue {
            self.shared_receive_queue(client, srq)?.users += 1;
        }
        if let Some(domain) = init.xrc_domain {
            self.xrc_domain(domain)?.users += 1;
        }
        Ok(Qpn::new(number))
    }

    fn check_init(&mut self, client: ClientId, init: &QpInit, rings: &QpRings) -> Result<(), Error> {
        let invalid = |what, why| Err(Error::Invalid { what, why });
        for cq in [init.send_cq, init.receive_cq].into_iter().flatten() {
            self.completion_queue(client, cq)?;
        }
        if let Some(ring) = &rings.send {
            at_most("send work requests", ring.slots().into(), self.limits.work_requests.into())?;
            at_most("send entries", ring.entries() as u64, self.limits.entries as u64)?;
            at_most("inline data", ring.inline() as u64, self.limits.inline as u64)?;
        }
        if let Some(ring) = &rings.receive {
            check_receive(ring)?;
        }
        match init.kind {
            QpKind::XrcTarget => match init.xrc_domain {
                None => return invalid("XRC target", "it needs an XRC domain"),
                Some(domain) => {
                    self.xrc_domain(domain)?;
                }
            },
            _ if init.domain.is_none() => return invalid("queue pair", "it needs a protection domain"),
            _ if init.send_cq.is_none() => return invalid("queue pair", "it needs a send completion queue"),
            QpKind::XrcInitiator => {}
            _ if init.receive_cq.is_none() => {
                return invalid("queue pair", "it needs a receive completion queue");
            }
            _ => {}
        }
        if let Some(srq) = init.shared_receive_queue {
            if !matches!(init.kind, QpKind::Rc | QpKind::Ud) {
                return invalid("shared receive queue", "only RC and UD queue pairs take from one");
            }
            if self.shared_receive_queue(client, srq)?.extended.is_some() {
                return invalid("shared receive queue", "it is of XRC: senders name it, queue pairs do not");
            }
        }
        Ok(())
    }

    fn queue_pair(&mut self, client: ClientId, number: Qpn) -> Result<&mut QueuePair, Error> {
        let found = self.queue_pairs.get_mut(number.value()).filter(|qp| qp.client == client);
        found.ok_or(Error::NotFound { resource: Resource::QueuePair, number: number.value() })
    }

    /// What a queue pair is doing.
    pub fn query_queue_pair(&self, client: ClientId, number: Qpn) -> Result<QpView, Error> {
        let found = self.queue_pairs.get(number.value()).filter(|qp| qp.client == client);
        found
            .map(QueuePair::view)
            .ok_or(Error::NotFound { resource: Resource::QueuePair, number: number.value() })
    }

    /// Every queue pair of the card, whoever owns it.
    pub fn queue_pairs(&self) -> impl Iterator<Item = QpView> {
        self.queue_pairs.iter().map(|(_, qp)| qp.view())
    }

    /// How many queue pairs there are.
    pub fn queue_pair_count(&self) -> usize {
        self.queue_pairs.len()
    }

    /// The ports at which connections are taken, of all port spaces.
    pub fn listening_ports(&self) -> impl Iterator<Item = u16> {
        self.cm.listening_ports()
    }

    /// Changes a queue pair's attributes and state.
    pub fn modify_queue_pair(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        number: Qpn,
        modify: &Modify,
    ) -> Result<State, Error> {
        let qp = self.queue_pair(client, number)?;
        let (kind, from) = (qp.kind, qp.state);
        let to = transition::check(number, kind, from, modify)?;
        if let Some(path) = &modify.path {
            self.check_path(path)?;
        }
        if let Some(mtu) = modify.mtu {
            at_most("path MTU", mtu.bytes().into(), self.card.settings.mtu.bytes().into())?;
        }
        let gids = self.card.gids.clone();
        let card = &mut self.card;
        let qp = self.queue_pairs.get_mut(number.value()).expect("it was found above");
        match to {
            State::Reset => {
                qp.change_state(ctx, to, Reason::Asked);
                qp.reset();
                qp.attributes = Attributes::reset(card.settings.mtu);
                return Ok(to);
            }
            State::Error => {
                // Nobody is answered any more; what a refusal owes is another matter.
                qp.inbound.owed.clear();
                qp.enter_error(card, ctx, Reason::Asked, None);
                self.settle(ctx);
                return Ok(to);
            }
            _ => {}
        }
        qp.attributes.apply(modify);
        if let Some(path) = &modify.path {
            let source = gids[usize::from(path.source_index)];
            qp.envelope = address::envelope(path, source, number, qp.attributes.destination);
        }
        if let Some(psn) = modify.receive_psn {
            qp.inbound.start(psn);
        }
        if let Some(psn) = modify.send_psn {
            qp.outbound.start(psn);
        }
        qp.outbound.retries = qp.attributes.retry_count;
        qp.outbound.rnr_retries = qp.attributes.rnr_retry;
        if from != State::SendQueueDrained {
            qp.outbound.drained = false;
        }
        qp.change_state(ctx, to, Reason::Asked);
        if matches!(to, State::ReadyToReceive | State::ReadyToSend) {
            ctx.tell(Event::Configured { qp: number, profile: qp.profile(card) });
        }
        // What was posted before may be sent now; a queue that drains may have finished.
        qp.wake(card);
        self.settle(ctx);
        Ok(to)
    }

    /// Destroys a queue pair.
    pub fn destroy_queue_pair(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        number: Qpn,
    ) -> Result<(), Error> {
        let qp = self.queue_pair(client, number)?;
        qp.change_state(ctx, State::Reset, Reason::Asked);
        let qp = self.queue_pairs.remove(number.value()).expect("it was found above");
        if let Some(domain) = qp.domain {
            self.card.protection.release(domain);
        }
        self.release_completion_queue(qp.send_cq);
        self.release_completion_queue(qp.receive_cq);
        self.release_xrc_domain(qp.xrc_domain);
        if let Some(srq) = qp.shared_receive_queue.filter(|_| qp.kind != QpKind::XrcTarget)
            && let Some(queue) = self.card.shared_receive_queues.get_mut(srq.0)
        {
            queue.users -= 1;
        }
        for members in self.card.groups.values_mut() {
            members.retain(|member| *member != number);
        }
        self.card.groups.retain(|_, members| !members.is_empty());
        Ok(())
    }

    /// Makes a datagram queue pair a member of a multicast group.
    pub fn attach_multicast(&mut self, client: ClientId, number: Qpn, group: Gid) -> Result<(), Error> {
        let (groups, members) = (self.limits.multicast_groups, self.limits.multicast_attachments);
        if !self.queue_pair(client, number)?.kind.is_datagram() {
            let why = "only UD queue pairs can be members";
            return Err(Error::Invalid { what: "multicast", why });
        }
        if !group.is_multicast() {
            return Err(Error::Invalid { what: "multicast", why: "the GID is not a multicast address" });
        }
        if !self.card.groups.contains_key(&group) && self.card.groups.len() >= groups {
            return Err(Error::Exhausted { resource: Resource::MulticastGroup, limit: groups });
        }
        let list = self.card.groups.entry(group).or_default();
        if !list.contains(&number) {
            if list.len() >= members {
                return Err(Error::Exhausted { resource: Resource::MulticastGroup, limit: members });
            }
            list.push(number);
        }
        Ok(())
    }

    /// Takes a queue pair out of a multicast group.
    pub fn detach_multicast(&mut self, client: ClientId, number: Qpn, group: Gid) -> Result<(), Error> {
        self.queue_pair(client, number)?;
        let not_member = Error::NotFound { resource: Resource::MulticastGroup, number: number.value() };
        let list = self.card.groups.get_mut(&group).ok_or(not_member)?;
        let place = list.iter().position(|member| *member == number).ok_or(not_member)?;
        list.remove(place);
        if list.is_empty() {
            self.card.groups.remove(&group);
        }
        Ok(())
    }

    /// The multicast groups with members here.
    pub fn multicast_groups(&self) -> impl Iterator<Item = Gid> {
        self.card.groups.keys().copied()
    }
}

fn at_most(what: &'static str, value: u64, limit: u64) -> Result<(), Error> {
    if value > limit { Err(Error::TooLarge { what, value, limit }) } else { Ok(()) }
}

fn check_receive(ring: &ReceiveConsumer) -> Result<(), Error> {
    at_most("receive work requests", ring.slots().into(), crate::Limits::CARD.work_requests.into())?;
    at_most("receive entries", ring.entries() as u64, crate::Limits::CARD.entries as u64)
}

fn new_queue_pair(client: ClientId, number: Qpn, init: &QpInit, rings: QpRings, mtu: Mtu) -> QueuePair {
    let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    QueuePair {
        number,
        client,
        kind: init.kind,
        domain: init.domain,
        send_cq: init.send_cq,
        receive_cq: init.receive_cq,
        shared_receive_queue: init.shared_receive_queue,
        xrc_domain: init.xrc_domain,
        signal_all: init.signal_all,
        state: State::Reset,
        attributes: Attributes::reset(mtu),
        envelope: Envelope::between(nowhere, nowhere),
        outbound: Outbound::new(rings.send),
        inbound: Inbound::new(rings.receive),
        is_ready: false,
        is_parked: false,
        timer_at: None,
        is_halted: false,
        limiter: None,
        paced_at: None,
        notified_at: None,
        replies_last: true,
    }
}
