//! A client of a host: carries its control calls out, within its share, and cleans up behind it.

use crate::host::Host;
use crate::outbox::Outbox;
use crate::peer::Peer;
use crate::quota::{Quota, count_mapping};
use crate::reach::{Far, Near, Process, Reach};
use crate::refusal::Refusal;
use crate::server::Shared;
use softhca_engine::{
    ClientId, CmChannelId, Context, CqId, Hca, Limits, PdId, QpInit, QpKind, QpRings, Region, Resource,
    SrqInit, State,
};
use softhca_queue::control::{Call, Part, Place, Reply, Sizes, Translation};
use softhca_queue::{
    Access, Bell, CompletionProducer, DoorbellConsumer, DoorbellProducer, ReceiveConsumer, ReceiveProducer,
    Rights, SendConsumer, SendProducer, SharedMemory, Words, cm,
};
use softhca_wire::RemoteKey;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// What a call comes to: a reply, and the descriptors that go with it.
pub(crate) type Answer = Result<(Reply, Vec<OwnedFd>), Refusal>;

/// A client of a host.
pub(crate) struct Client {
    shared: Arc<Shared>,
    pub host: Arc<Host>,
    id: ClientId,
    process: Arc<Process>,
    outbox: Arc<Outbox>,
    bell: Bell,
    pub quota: Quota,
    queues: Vec<CqId>,
    /// Where the next region that the card allocates begins: the same in every run.
    next_address: u64,
    /// Wakes the engine thread; the client has a copy.
    _waker: OwnedFd,
}

impl Client {
    /// Lets a process in.
    pub fn open(
        shared: &Arc<Shared>,
        host: &Arc<Host>,
        peer: &Peer,
        outbox: &Arc<Outbox>,
        memory: Option<OwnedFd>,
    ) -> Result<(Client, Reply, Vec<OwnedFd>), Refusal> {
        let doorbells = host.card.limits.queue_pairs as u32;
        let words = Bell::WORDS + DoorbellProducer::words(doorbells);
        let page = Arc::new(SharedMemory::create("softhca-client", words * 8, Rights::ReadWrite)?);
        let bell = Bell::new(page.words(0, Bell::WORDS));
        let rung = page.words(Bell::WORDS, DoorbellProducer::words(doorbells));
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let waker = rustix::event::eventfd(0, flags).map_err(std::io::Error::from)?;
        host.station.listen(waker.as_fd())?;
        let descriptors = vec![waker.try_clone()?, host.asleep.try_clone()?, descriptor(&page)?];
        let (id, gids) = host.station.control(|driver| {
            driver.control(|hca, _| {
                let id = hca.open_client(DoorbellConsumer::new(rung, doorbells))?;
                Ok::<_, Refusal>((id, hca.gids().to_vec()))
            })
        })?;
        host.board.add_client(id, peer.process, &peer.name, outbox);
        let client = Client {
            shared: shared.clone(),
            host: host.clone(),
            id,
            process: Arc::new(Process::new(peer.process, memory.map(File::from))),
            outbox: outbox.clone(),
            bell,
            quota: Quota::new(shared.config.share),
            queues: Vec::new(),
            next_address: 0x1000_0000,
            _waker: waker,
        };
        Ok((client, Reply::Opened { host: host.card.clone(), gids, doorbells }, descriptors))
    }

    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>, ClientId) -> R) -> R {
        self.host.station.control(|driver| driver.control(|hca, ctx| act(hca, ctx, self.id)))
    }

    /// Gives the card the turns that it would have had by now: a queue is resized by what completes without
    /// waiting for a peer, and a client that just posted counts on that.
    fn carry_out_what_was_posted(&self) {
        const TURNS: usize = 16;
        self.host.station.control(|driver| (0..TURNS).take_while(|_| driver.turn().unwrap_or(false)).count());
    }

    /// Memory for rings of so many words, within the client's share.
    fn rings(&self, words: usize) -> Result<(Arc<SharedMemory>, crate::quota::Counted, u64), Refusal> {
        let bytes = words as u64 * 8;
        self.quota.check_rings(bytes)?;
        let counted = count_mapping(&self.shared.mappings, self.shared.config.mappings)?;
        let memory = SharedMemory::create("softhca-ring", words * 8, Rights::ReadWrite)?;
        Ok((Arc::new(memory), counted, bytes))
    }

    /// Carries out a call.
    pub fn call(&mut self, call: Call, descriptors: Vec<OwnedFd>) -> Answer {
        let reply = match call {
            Call::CreateCompletionQueue { slots } => return self.create_completion_queue(slots),
            Call::ResizeCompletionQueue { cq, slots } => return self.resize_completion_queue(cq, slots),
            Call::CreateSharedReceiveQueue { init, slots, entries } => {
                return self.create_shared_receive_queue(init, slots, entries);
            }
            Call::CreateQueuePair { init, sizes } => return self.create_queue_pair(init, sizes),
            Call::Register { domain, translation, access } => {
                self.register(domain, translation, access, descriptors)?
            }
            Call::Reregister { key, domain, translation, access } => {
                self.reregister(key, domain, translation, access, descriptors)?
            }
            Call::Deregister(key) => {
                let region = self.control(|hca, _, id| hca.deregister(id, key))?;
                // Unmapped here, not under the lock.
                drop(self.host.station.control(|driver| driver.memory().remove(region.memory)));
                self.quota.remove(Resource::MemoryRegion);
                Reply::Done
            }
            Call::AdvanceQueuePair(advance) => self.advance_queue_pair(&advance)?,
            other => self.plain_call(other)?,
        };
        Ok((reply, Vec::new()))
    }

    /// Has a queue pair follow its connection: in one go, unless somebody follows queue pairs.
    fn advance_queue_pair(&mut self, advance: &cm::Advance) -> Result<Reply, Refusal> {
        let cm::Advance { id: identifier, queue_pair: number, .. } = *advance;
        if self.shared.names.is_idle() {
            return self.control(|hca, ctx, id| {
                for state in &advance.states {
                    let asked = cm::Call::Attributes { id: identifier, state: *state };
                    let cm::Reply::Attributes(modify) = hca.cm(ctx, id, asked)? else { continue };
                    let moved = hca.modify_queue_pair(ctx, id, number, &advance.adjust(modify));
                    if *state != State::Error {
                        moved?;
                    }
                }
                let last = advance.last_call().map(|call| hca.cm(ctx, id, call)).transpose()?;
                Ok(Reply::Cm(last.unwrap_or(cm::Reply::Done)))
            });
        }
        for state in &advance.states {
            let asked = cm::Call::Attributes { id: identifier, state: *state };
            let Reply::Cm(cm::Reply::Attributes(modify)) = self.plain_call(Call::Cm(asked))? else {
                continue;
            };
            let moved = self.plain_call(Call::ModifyQueuePair { number, modify: advance.adjust(modify) });
            if *state != State::Error {
                moved?;
            }
        }
        match advance.last_call() {
            Some(call) => self.plain_call(Call::Cm(call)),
            None => Ok(Reply::Cm(cm::Reply::Done)),
        }
    }

    /// Takes what waits in a channel of connection management: the identifiers of requests are the client's now.
    pub fn take_cm_events(&mut self, channel: CmChannelId) -> Vec<cm::Event> {
        let events: Vec<cm::Event> = self.control(|hca, ctx, id| {
            let mut take = || match hca.cm(ctx, id, cm::Call::Take(channel)) {
                Ok(cm::Reply::Event(event, _)) => event,
                // It has been destroyed meanwhile.
                _ => None,
            };
            std::iter::from_fn(&mut take).collect()
        });
        for _ in events.iter().filter(|event| event.kind == cm::EventKind::ConnectRequest) {
            self.quota.add(Resource::CmIdentifier);
        }
        events
    }

    /// Calls that make or end something without memory of its own.
    fn plain_call(&mut self, call: Call) -> Result<Reply, Refusal> {
        let made = match &call {
            Call::AllocateDomain => Some(Resource::ProtectionDomain),
            Call::AllocateWindow { .. } => Some(Resource::MemoryWindow),
            Call::OpenXrcDomain => Some(Resource::XrcDomain),
            Call::CreateAddressHandle { .. } => Some(Resource::AddressHandle),
            Call::Cm(cm::Call::Create { .. }) => Some(Resource::CmIdentifier),
            Call::Cm(cm::Call::CreateChannel) => Some(Resource::CmChannel),
            _ => None,
        };
        if let Some(resource) = made {
            self.quota.check(resource)?;
        }
        let (mut ended, mut attached) = (None, None);
        let modified = match &call {
            Call::ModifyQueuePair { number, modify } if !self.shared.names.is_idle() => {
                Some((*number, *modify))
            }
            _ => None,
        };
        let (names, host) = (&self.shared.names, &self.host.card.name);
        let reply = self.control(|hca, ctx, id| {
            let mut end = |resource, number| ended = Some((resource, number));
            Ok::<_, Refusal>(match call {
                Call::AllocateDomain => Reply::Domain(hca.allocate_domain(id)?),
                Call::FreeDomain(domain) => {
                    hca.free_domain(id, domain)?;
                    end(Resource::ProtectionDomain, domain.0);
                    Reply::Done
                }
                Call::AllocateWindow { domain, kind } => {
                    Reply::Window(hca.allocate_window(id, domain, kind)?)
                }
                Call::FreeWindow(key) => {
                    hca.free_window(id, key)?;
                    end(Resource::MemoryWindow, key.0);
                    Reply::Done
                }
                Call::DestroyCompletionQueue(cq) => {
                    hca.destroy_completion_queue(id, cq)?;
                    end(Resource::CompletionQueue, cq.0);
                    Reply::Done
                }
                Call::ArmSharedReceiveQueue { srq, limit } => {
                    hca.arm_shared_receive_queue(ctx, id, srq, limit)?;
                    Reply::Done
                }
                Call::QuerySharedReceiveQueue(srq) => {
                    Reply::SharedReceiveView(hca.query_shared_receive_queue(id, srq)?)
                }
                Call::DestroySharedReceiveQueue(srq) => {
                    hca.destroy_shared_receive_queue(id, srq)?;
                    end(Resource::SharedReceiveQueue, srq.0);
                    Reply::Done
                }
                Call::OpenXrcDomain => Reply::XrcDomain(hca.open_xrc_domain(id)?),
                Call::CloseXrcDomain(domain) => {
                    hca.close_xrc_domain(id, domain)?;
                    end(Resource::XrcDomain, domain.0);
                    Reply::Done
                }
                Call::CreateAddressHandle { domain, vector } => {
                    Reply::AddressHandle(hca.create_address_handle(id, domain, vector)?)
                }
                Call::DestroyAddressHandle(handle) => {
                    hca.destroy_address_handle(id, handle)?;
                    end(Resource::AddressHandle, handle.0);
                    Reply::Done
                }
                Call::ModifyQueuePair { number, mut modify } => {
                    modify.access = modify.access.map(known_rights);
                    let state = hca.modify_queue_pair(ctx, id, number, &modify)?;
                    if modified.is_some() && modify.state == Some(State::ReadyToReceive) {
                        names.claim(host, &hca.query_queue_pair(id, number)?);
                    }
                    Reply::State(state)
                }
                Call::QueryPort => Reply::Port(hca.port()),
                Call::QueryQueuePair(number) => Reply::View(hca.query_queue_pair(id, number)?),
                Call::DestroyQueuePair(number) => {
                    hca.destroy_queue_pair(ctx, id, number)?;
                    end(Resource::QueuePair, number.value());
                    Reply::Done
                }
                Call::AttachMulticast { number, group } => {
                    hca.attach_multicast(id, number, group)?;
                    attached = Some((number, group));
                    Reply::Done
                }
                Call::DetachMulticast { number, group } => {
                    hca.detach_multicast(id, number, group)?;
                    Reply::Done
                }
                Call::Cm(call) => {
                    match &call {
                        cm::Call::Destroy(id) => end(Resource::CmIdentifier, id.0),
                        cm::Call::DestroyChannel(channel) => end(Resource::CmChannel, channel.0),
                        _ => {}
                    }
                    let reply = hca.cm(ctx, id, call)?;
                    Reply::Cm(reply)
                }
                _ => return Err(Refusal::new(libc::EINVAL, "this call has no place here")),
            })
        })?;
        if let (Some((number, modify)), Reply::State(state)) = (modified, &reply) {
            let view = self.control(|hca, _, id| hca.query_queue_pair(id, number))?;
            self.shared.names.follow(&self.shared.hosts, &self.host, &view, &modify, *state);
        }
        if let Some((number, group)) = attached
            && let Some(error) = self.host.station.control(|driver| driver.multicast_failure(group))
        {
            let _ = self.control(|hca, _, id| hca.detach_multicast(id, number, group));
            return Err(error.into());
        }
        if let Some(resource) = made {
            self.quota.add(resource);
        }
        // A request that the client takes is an identifier of its own from now on.
        if let Reply::Cm(cm::Reply::Event(Some(event), _)) = &reply
            && event.kind == cm::EventKind::ConnectRequest
        {
            self.quota.add(Resource::CmIdentifier);
        }
        if let Some((resource, number)) = ended {
            self.quota.remove(resource);
            self.quota.remove_rings(resource, number);
            if resource == Resource::CompletionQueue {
                self.host.board.remove_queue(CqId(number));
                self.queues.retain(|cq| cq.0 != number);
            }
        }
        Ok(reply)
    }

    fn completion_ring(&self, words: Words, slots: u32) -> CompletionProducer {
        let bell = self.bell.clone();
        CompletionProducer::new(words, slots).telling(move || bell.strike())
    }

    fn create_completion_queue(&mut self, slots: u32) -> Answer {
        self.quota.check(Resource::CompletionQueue)?;
        between("completions", slots, 1, Limits::CARD.completions)?;
        let words = CompletionProducer::shape(slots).words();
        let (memory, counted, bytes) = self.rings(words)?;
        let ring = self.completion_ring(memory.words(0, words), slots);
        let passed = vec![descriptor(&memory)?];
        let cq = self.control(|hca, _, id| hca.create_completion_queue(id, ring))?;
        self.quota.add(Resource::CompletionQueue);
        self.quota.add_rings(Resource::CompletionQueue, cq.0, bytes, counted);
        self.queues.push(cq);
        self.host.board.add_queue(cq, &self.outbox);
        Ok((Reply::CompletionQueue(cq), passed))
    }

    fn resize_completion_queue(&mut self, cq: CqId, slots: u32) -> Answer {
        between("completions", slots, 1, Limits::CARD.completions)?;
        let words = CompletionProducer::shape(slots).words();
        let (memory, counted, bytes) = self.rings(words)?;
        let ring = self.completion_ring(memory.words(0, words), slots);
        let passed = vec![descriptor(&memory)?];
        self.carry_out_what_was_posted();
        self.control(|hca, _, id| hca.resize_completion_queue(id, cq, ring))?;
        self.quota.add_rings(Resource::CompletionQueue, cq.0, bytes, counted);
        Ok((Reply::CompletionQueue(cq), passed))
    }

    fn create_shared_receive_queue(&mut self, init: SrqInit, slots: u32, entries: u32) -> Answer {
        self.quota.check(Resource::SharedReceiveQueue)?;
        between("receive work requests", slots, 1, Limits::CARD.work_requests)?;
        between("receive entries", entries, 0, Limits::CARD.entries as u32)?;
        let words = ReceiveProducer::shape(slots, entries as usize).words();
        let (memory, counted, bytes) = self.rings(words)?;
        let ring = ReceiveConsumer::new(memory.words(0, words), slots, entries as usize);
        let passed = vec![descriptor(&memory)?];
        let srq = self.control(|hca, _, id| hca.create_shared_receive_queue(id, init, ring))?;
        self.quota.add(Resource::SharedReceiveQueue);
        self.quota.add_rings(Resource::SharedReceiveQueue, srq.0, bytes, counted);
        Ok((Reply::SharedReceiveQueue(srq), passed))
    }

    fn create_queue_pair(&mut self, init: QpInit, sizes: Sizes) -> Answer {
        self.quota.check(Resource::QueuePair)?;
        let Sizes { sends, receives, entries, inline } = sizes;
        between("send work requests", sends, 0, Limits::CARD.work_requests)?;
        between("receive work requests", receives, 0, Limits::CARD.work_requests)?;
        between("entries", entries, 0, Limits::CARD.entries as u32)?;
        between("inline data", inline, 0, Limits::CARD.inline as u32)?;
        let (entries, inline) = (entries as usize, inline as usize);
        let has_sends = init.kind != QpKind::XrcTarget;
        let has_receives = !matches!(init.kind, QpKind::XrcInitiator | QpKind::XrcTarget)
            && init.shared_receive_queue.is_none();
        let send_words = if has_sends { SendProducer::shape(sends, entries, inline).words() } else { 0 };
        let receive_words = if has_receives { ReceiveProducer::shape(receives, entries).words() } else { 0 };
        let (memory, counted, bytes) = self.rings(send_words + receive_words)?;
        let send = memory.words(0, send_words);
        let receive = memory.words(send_words, receive_words);
        let rings = QpRings {
            send: has_sends.then(|| SendConsumer::new(send, sends, entries, inline)),
            receive: has_receives.then(|| ReceiveConsumer::new(receive, receives, entries)),
        };
        let passed = vec![descriptor(&memory)?];
        let number = self.control(|hca, _, id| hca.create_queue_pair(id, init, rings))?;
        self.quota.add(Resource::QueuePair);
        self.quota.add_rings(Resource::QueuePair, number.value(), bytes, counted);
        Ok((Reply::QueuePair(number), passed))
    }

    fn register(
        &mut self,
        domain: PdId,
        translation: Translation,
        access: Access,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Reply, Refusal> {
        self.quota.check(Resource::MemoryRegion)?;
        let access = known_rights(access);
        let (base, length, reach) = self.translate(translation, access, descriptors)?;
        let (id, reach) = (self.id, Arc::new(reach));
        let key = self.host.station.control(|driver| {
            let memory = driver.memory().add(reach.clone());
            let region = Region { client: id, domain, base, length, access, memory };
            driver.control(|hca, _| hca.register(region)).inspect_err(|_| {
                driver.memory().remove(memory);
            })
        })?;
        self.quota.add(Resource::MemoryRegion);
        let next = length.checked_next_multiple_of(4096).and_then(|size| size.checked_add(4096));
        self.next_address = next.and_then(|size| self.next_address.checked_add(size)).unwrap_or(0x1000_0000);
        let base = if access.contains(Access::ZERO_BASED) { 0 } else { base };
        Ok(Reply::Region { key, base })
    }

    /// Finds the bytes of a region: its base, its length, and how to reach it.
    fn translate(
        &self,
        translation: Translation,
        access: Access,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(u64, u64, Reach), Refusal> {
        let Translation { base, length, place } = translation;
        let size = usize::try_from(length).ok().filter(|size| *size <= isize::MAX as usize);
        let size = size.ok_or_else(|| Refusal::new(libc::EINVAL, format!("a region of {length} bytes")))?;
        let near = |offset, size| {
            let Some(descriptor) = descriptors.into_iter().next() else {
                return Err(Refusal::new(libc::EBADF, "a region in shared memory needs its descriptor"));
            };
            let counted = count_mapping(&self.shared.mappings, self.shared.config.mappings)?;
            let memory = Arc::new(SharedMemory::adopt(descriptor, size, Rights::ReadWrite)?);
            Ok(Near { block: memory.block(), offset, counted })
        };
        let reach = match place {
            Place::Shared => Reach { near: Some(near(0, size)?), far: None },
            Place::Process { address, shared } => {
                self.process.check(address, length, access).map_err(|why| Refusal::new(libc::EFAULT, why))?;
                let near = match shared {
                    None => None,
                    Some(Part { offset, length: part }) => {
                        let end = offset.checked_add(part).filter(|end| *end <= length);
                        let outside =
                            || Refusal::new(libc::EINVAL, "the shared part is not inside of its region");
                        end.ok_or_else(outside)?;
                        Some(near(offset, part as usize)?)
                    }
                };
                Reach { near, far: Some(Far { process: self.process.clone(), address, length }) }
            }
        };
        let base = base.unwrap_or(self.next_address);
        if base.checked_add(length).is_none() {
            return Err(Refusal::new(libc::EINVAL, "the region ends beyond the address space"));
        }
        Ok((base, length, reach))
    }

    fn reregister(
        &mut self,
        key: RemoteKey,
        domain: Option<PdId>,
        translation: Option<Translation>,
        access: Option<Access>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Reply, Refusal> {
        let mut region = self.control(|hca, _, id| hca.region(id, key))?;
        let old = region.memory;
        region.domain = domain.unwrap_or(region.domain);
        region.access = access.map_or(region.access, known_rights);
        let station = &self.host.station;
        if let Some(translation) = translation {
            let (base, length, reach) = self.translate(translation, region.access, descriptors)?;
            (region.base, region.length) = (base, length);
            region.memory = station.control(|driver| driver.memory().add(Arc::new(reach)));
        } else {
            let reach = station.control(|driver| driver.memory().get(region.memory).ok().cloned());
            if let Some(Far { process, address, length }) =
                reach.as_deref().and_then(|reach| reach.far.as_ref())
            {
                let denied = |why| Refusal::new(libc::EFAULT, why);
                process.check(*address, *length, region.access).map_err(denied)?;
            }
        }
        let result = self.control(|hca, _, id| hca.reregister(id, key, region));
        // Of two places the one that the region is not in is forgotten, and unmapped here, not under the lock.
        let unused = if result.is_ok() { old } else { region.memory };
        if old != region.memory {
            drop(station.control(|driver| driver.memory().remove(unused)));
        }
        Ok(Reply::Region { key: result?, base: region.base })
    }
}

impl Drop for Client {
    /// Everything that the client had goes with it; its peers meet silence, as with any dead host.
    fn drop(&mut self) {
        self.process.bury();
        for cq in &self.queues {
            self.host.board.remove_queue(*cq);
        }
        let freed = self.host.station.control(|driver| {
            let regions = driver.control(|hca, ctx| hca.close_client(ctx, self.id));
            regions.iter().map(|region| driver.memory().remove(region.memory)).collect::<Vec<_>>()
        });
        drop(freed);
        self.host.board.remove_client(self.id);
    }
}

fn descriptor(memory: &SharedMemory) -> Result<OwnedFd, Refusal> {
    memory.take_descriptor().ok_or_else(|| Refusal::new(libc::EBADF, "the descriptor was passed already"))
}

/// The rights that there are: bits come over the socket as they are.
fn known_rights(access: Access) -> Access {
    Access::from_bits_truncate(access.bits())
}

fn between(what: &str, value: u32, least: u32, most: u32) -> Result<(), Refusal> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(Refusal::new(libc::EINVAL, format!("{what} is {value}, the card allows {least} to {most}")))
}
