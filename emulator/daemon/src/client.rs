//! A client of a host: carries its control calls out, within its share, and cleans up behind it.

use crate::client_memory::{ClientMemory, MappedMemory, ProcessMemory, ProcessRange};
use crate::client_process::ClientProcess;
use crate::command_error::CommandError;
use crate::host::DaemonHost;
use crate::notification_queue::NotificationQueue;
use crate::quota::{ClientQuota, reserve_mapping};
use crate::server::DaemonState;
use softhca_engine::{
    ClientId, CmChannelId, Context, CqId, DeviceLimits, Hca, MemoryRegion, PdId, QpInitAttributes, QpRings,
    QpState, QpType, Resource, SrqInitAttributes,
};
use softhca_queue::control::{QpCapabilities, RegionBacking, RegionMapping, Request, Response, SharedRange};
use softhca_queue::{
    AccessFlags, CompletionDoorbell, CompletionProducer, DoorbellConsumer, DoorbellProducer, MapMode,
    ReceiveConsumer, ReceiveProducer, SendConsumer, SendProducer, SharedMemory, SharedWords, cm,
};
use softhca_wire::RemoteKey;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// What a call comes to: a reply, and the descriptors that go with it.
pub(crate) type RequestResult = Result<(Response, Vec<OwnedFd>), CommandError>;

/// A client of a host.
pub(crate) struct Client {
    daemon: Arc<DaemonState>,
    pub host: Arc<DaemonHost>,
    id: ClientId,
    process: Arc<ProcessMemory>,
    notifications: Arc<NotificationQueue>,
    completion_doorbell: CompletionDoorbell,
    pub quota: ClientQuota,
    completion_queues: Vec<CqId>,
    /// Where the next region that the card allocates begins: the same in every run.
    next_iova: u64,
    /// Wakes the engine thread; the client has a copy.
    _waker: OwnedFd,
}

impl Client {
    /// Lets a process in.
    pub fn open(
        shared: &Arc<DaemonState>,
        host: &Arc<DaemonHost>,
        peer: &ClientProcess,
        outbox: &Arc<NotificationQueue>,
        memory: Option<OwnedFd>,
    ) -> Result<(Client, Response, Vec<OwnedFd>), CommandError> {
        let doorbells = host.device.limits.max_qp as u32;
        let words = CompletionDoorbell::WORDS + DoorbellProducer::words(doorbells);
        let page = Arc::new(SharedMemory::create("softhca-client", words * 8, MapMode::ReadWrite)?);
        let bell = CompletionDoorbell::new(page.words(0, CompletionDoorbell::WORDS));
        let rung = page.words(CompletionDoorbell::WORDS, DoorbellProducer::words(doorbells));
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let waker = rustix::event::eventfd(0, flags).map_err(std::io::Error::from)?;
        host.driver.add_wake_source(waker.as_fd())?;
        let descriptors = vec![waker.try_clone()?, host.sleep_flag.try_clone()?, descriptor(&page)?];
        let (id, gids) = host.driver.control(|driver| {
            driver.control(|hca, _| {
                let id = hca.open_client(DoorbellConsumer::new(rung, doorbells))?;
                Ok::<_, CommandError>((id, hca.gids().to_vec()))
            })
        })?;
        host.event_bus.add_client(id, peer.pid, &peer.name, outbox);
        let client = Client {
            daemon: shared.clone(),
            host: host.clone(),
            id,
            process: Arc::new(ProcessMemory::new(peer.pid, memory.map(File::from))),
            notifications: outbox.clone(),
            completion_doorbell: bell,
            quota: ClientQuota::new(shared.config.client_limits),
            completion_queues: Vec::new(),
            next_iova: 0x1000_0000,
            _waker: waker,
        };
        Ok((
            client,
            Response::Opened { host: host.device.clone(), gids, doorbell_slots: doorbells },
            descriptors,
        ))
    }

    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>, ClientId) -> R) -> R {
        self.host.driver.control(|driver| driver.control(|hca, ctx| act(hca, ctx, self.id)))
    }

    /// Gives the card the turns that it would have had by now: a queue is resized by what completes without
    /// waiting for a peer, and a client that just posted counts on that.
    fn process_posted_work(&self) {
        const TURNS: usize = 16;
        self.host.driver.control(|driver| (0..TURNS).take_while(|_| driver.poll().unwrap_or(false)).count());
    }

    /// Memory for rings of so many words, within the client's share.
    fn allocate_rings(
        &self,
        words: usize,
    ) -> Result<(Arc<SharedMemory>, crate::quota::MappingGuard, u64), CommandError> {
        let bytes = words as u64 * 8;
        self.quota.check_rings(bytes)?;
        let counted = reserve_mapping(&self.daemon.mappings, self.daemon.config.max_mappings)?;
        let memory = SharedMemory::create("softhca-ring", words * 8, MapMode::ReadWrite)?;
        Ok((Arc::new(memory), counted, bytes))
    }

    /// Carries out a call.
    pub fn execute(&mut self, execute: Request, descriptors: Vec<OwnedFd>) -> RequestResult {
        let reply = match execute {
            Request::CreateCompletionQueue { cqe: slots } => return self.create_completion_queue(slots),
            Request::ResizeCompletionQueue { cq, cqe: slots } => {
                return self.resize_completion_queue(cq, slots);
            }
            Request::CreateSharedReceiveQueue { init, max_wr: slots, max_sge: entries } => {
                return self.create_shared_receive_queue(init, slots, entries);
            }
            Request::CreateQueuePair { init, capabilities: sizes } => {
                return self.create_queue_pair(init, sizes);
            }
            Request::RegisterMemoryRegion { pd: domain, mapping: translation, access } => {
                self.register(domain, translation, access, descriptors)?
            }
            Request::ReregisterMemoryRegion { rkey: key, pd: domain, mapping: translation, access } => {
                self.reregister(key, domain, translation, access, descriptors)?
            }
            Request::DeregisterMemoryRegion(key) => {
                let region = self.control(|hca, _, id| hca.deregister_memory_region(id, key))?;
                // Unmapped here, not under the lock.
                drop(self.host.driver.control(|driver| driver.memory().remove(region.memory)));
                self.quota.remove(Resource::MemoryRegion);
                Response::Done
            }
            Request::TransitionQueuePair(advance) => self.transition_queue_pair(&advance)?,
            other => self.execute_verb(other)?,
        };
        Ok((reply, Vec::new()))
    }

    /// Has a queue pair follow its connection: in one go, unless somebody follows queue pairs.
    fn transition_queue_pair(&mut self, advance: &cm::QpTransition) -> Result<Response, CommandError> {
        let cm::QpTransition { id: identifier, qpn: number, .. } = *advance;
        if self.daemon.roles.is_idle() {
            return self.control(|hca, ctx, id| {
                for state in &advance.states {
                    let asked = cm::Command::InitQpAttributes { id: identifier, state: *state };
                    let cm::Reply::QpAttributes(modify) = hca.execute_cm(ctx, id, asked)? else { continue };
                    let moved = hca.modify_queue_pair(ctx, id, number, &advance.limit_rd_atomic(modify));
                    if *state != QpState::Error {
                        moved?;
                    }
                }
                let last = advance.final_command().map(|call| hca.execute_cm(ctx, id, call)).transpose()?;
                Ok(Response::Cm(last.unwrap_or(cm::Reply::Done)))
            });
        }
        for state in &advance.states {
            let asked = cm::Command::InitQpAttributes { id: identifier, state: *state };
            let Response::Cm(cm::Reply::QpAttributes(modify)) = self.execute_verb(Request::Cm(asked))? else {
                continue;
            };
            let moved = self.execute_verb(Request::ModifyQueuePair {
                qpn: number,
                modify: advance.limit_rd_atomic(modify),
            });
            if *state != QpState::Error {
                moved?;
            }
        }
        match advance.final_command() {
            Some(call) => self.execute_verb(Request::Cm(call)),
            None => Ok(Response::Cm(cm::Reply::Done)),
        }
    }

    /// Takes what waits in a channel of connection management: the identifiers of requests are the client's now.
    pub fn dequeue_cm_events(&mut self, channel: CmChannelId) -> Vec<cm::Event> {
        let events: Vec<cm::Event> = self.control(|hca, ctx, id| {
            let mut take = || match hca.execute_cm(ctx, id, cm::Command::GetEvent(channel)) {
                Ok(cm::Reply::Event(event, _)) => event,
                // It has been destroyed meanwhile.
                _ => None,
            };
            std::iter::from_fn(&mut take).collect()
        });
        for _ in events.iter().filter(|event| event.event_type == cm::EventType::ConnectRequest) {
            self.quota.add(Resource::CmIdentifier);
        }
        events
    }

    /// Calls that make or end something without memory of its own.
    fn execute_verb(&mut self, call: Request) -> Result<Response, CommandError> {
        let made = match &call {
            Request::AllocateProtectionDomain => Some(Resource::ProtectionDomain),
            Request::AllocateMemoryWindow { .. } => Some(Resource::MemoryWindow),
            Request::OpenXrcDomain => Some(Resource::XrcDomain),
            Request::CreateAddressHandle { .. } => Some(Resource::AddressHandle),
            Request::Cm(cm::Command::CreateId { .. }) => Some(Resource::CmIdentifier),
            Request::Cm(cm::Command::CreateEventChannel) => Some(Resource::CmChannel),
            _ => None,
        };
        if let Some(resource) = made {
            self.quota.check(resource)?;
        }
        let (mut ended, mut attached) = (None, None);
        let modified = match &call {
            Request::ModifyQueuePair { qpn: number, modify } if !self.daemon.roles.is_idle() => {
                Some((*number, *modify))
            }
            _ => None,
        };
        let (names, host) = (&self.daemon.roles, &self.host.device.name);
        let reply = self.control(|hca, ctx, id| {
            let mut end = |resource, number| ended = Some((resource, number));
            Ok::<_, CommandError>(match call {
                Request::AllocateProtectionDomain => {
                    Response::ProtectionDomain(hca.allocate_protection_domain(id)?)
                }
                Request::DeallocateProtectionDomain(domain) => {
                    hca.free_protection_domain(id, domain)?;
                    end(Resource::ProtectionDomain, domain.0);
                    Response::Done
                }
                Request::AllocateMemoryWindow { pd: domain, mw_type: kind } => {
                    Response::MemoryWindow(hca.allocate_memory_window(id, domain, kind)?)
                }
                Request::DeallocateMemoryWindow(key) => {
                    hca.free_memory_window(id, key)?;
                    end(Resource::MemoryWindow, key.0);
                    Response::Done
                }
                Request::DestroyCompletionQueue(cq) => {
                    hca.destroy_completion_queue(id, cq)?;
                    end(Resource::CompletionQueue, cq.0);
                    Response::Done
                }
                Request::ModifySharedReceiveQueue { srq, srq_limit: limit } => {
                    hca.arm_shared_receive_queue(ctx, id, srq, limit)?;
                    Response::Done
                }
                Request::QuerySharedReceiveQueue(srq) => {
                    Response::SrqAttributes(hca.query_shared_receive_queue(id, srq)?)
                }
                Request::DestroySharedReceiveQueue(srq) => {
                    hca.destroy_shared_receive_queue(id, srq)?;
                    end(Resource::SharedReceiveQueue, srq.0);
                    Response::Done
                }
                Request::OpenXrcDomain => Response::XrcDomain(hca.open_xrc_domain(id)?),
                Request::CloseXrcDomain(domain) => {
                    hca.close_xrc_domain(id, domain)?;
                    end(Resource::XrcDomain, domain.0);
                    Response::Done
                }
                Request::CreateAddressHandle { pd: domain, address_vector: vector } => {
                    Response::AddressHandle(hca.create_address_handle(id, domain, vector)?)
                }
                Request::DestroyAddressHandle(handle) => {
                    hca.destroy_address_handle(id, handle)?;
                    end(Resource::AddressHandle, handle.0);
                    Response::Done
                }
                Request::ModifyQueuePair { qpn: number, mut modify } => {
                    modify.access_flags = modify.access_flags.map(known_access_flags);
                    let state = hca.modify_queue_pair(ctx, id, number, &modify)?;
                    if modified.is_some() && modify.state == Some(QpState::ReadyToReceive) {
                        names.assign(host, &hca.query_queue_pair(id, number)?);
                    }
                    Response::QpState(state)
                }
                Request::QueryPort => Response::PortState(hca.port_state()),
                Request::QueryQueuePair(number) => Response::QpSnapshot(hca.query_queue_pair(id, number)?),
                Request::DestroyQueuePair(number) => {
                    hca.destroy_queue_pair(ctx, id, number)?;
                    end(Resource::QueuePair, number.value());
                    Response::Done
                }
                Request::AttachMulticast { qpn: number, group } => {
                    hca.attach_multicast(id, number, group)?;
                    attached = Some((number, group));
                    Response::Done
                }
                Request::DetachMulticast { qpn: number, group } => {
                    hca.detach_multicast(id, number, group)?;
                    Response::Done
                }
                Request::Cm(call) => {
                    match &call {
                        cm::Command::DestroyId(id) => end(Resource::CmIdentifier, id.0),
                        cm::Command::DestroyEventChannel(channel) => end(Resource::CmChannel, channel.0),
                        _ => {}
                    }
                    let reply = hca.execute_cm(ctx, id, call)?;
                    Response::Cm(reply)
                }
                _ => return Err(CommandError::new(libc::EINVAL, "this call has no place here")),
            })
        })?;
        if let (Some((number, modify)), Response::QpState(state)) = (modified, &reply) {
            let view = self.control(|hca, _, id| hca.query_queue_pair(id, number))?;
            self.daemon.roles.publish_flow(&self.daemon.hosts, &self.host, &view, &modify, *state);
        }
        if let Some((number, group)) = attached
            && let Some(error) = self.host.driver.control(|driver| driver.multicast_join_error(group))
        {
            let _ = self.control(|hca, _, id| hca.detach_multicast(id, number, group));
            return Err(error.into());
        }
        if let Some(resource) = made {
            self.quota.add(resource);
        }
        // A request that the client takes is an identifier of its own from now on.
        if let Response::Cm(cm::Reply::Event(Some(event), _)) = &reply
            && event.event_type == cm::EventType::ConnectRequest
        {
            self.quota.add(Resource::CmIdentifier);
        }
        if let Some((resource, number)) = ended {
            self.quota.remove(resource);
            self.quota.remove_rings(resource, number);
            if resource == Resource::CompletionQueue {
                self.host.event_bus.remove_completion_queue(CqId(number));
                self.completion_queues.retain(|cq| cq.0 != number);
            }
        }
        Ok(reply)
    }

    fn completion_ring(&self, words: SharedWords, slots: u32) -> CompletionProducer {
        let bell = self.completion_doorbell.clone();
        CompletionProducer::new(words, slots).with_notifier(move || bell.ring())
    }

    fn create_completion_queue(&mut self, slots: u32) -> RequestResult {
        self.quota.check(Resource::CompletionQueue)?;
        check_range("completions", slots, 1, DeviceLimits::HCA.max_cqe)?;
        let words = CompletionProducer::layout(slots).words();
        let (memory, counted, bytes) = self.allocate_rings(words)?;
        let ring = self.completion_ring(memory.words(0, words), slots);
        let passed = vec![descriptor(&memory)?];
        let cq = self.control(|hca, _, id| hca.create_completion_queue(id, ring))?;
        self.quota.add(Resource::CompletionQueue);
        self.quota.add_rings(Resource::CompletionQueue, cq.0, bytes, counted);
        self.completion_queues.push(cq);
        self.host.event_bus.add_completion_queue(cq, &self.notifications);
        Ok((Response::CompletionQueue(cq), passed))
    }

    fn resize_completion_queue(&mut self, cq: CqId, slots: u32) -> RequestResult {
        check_range("completions", slots, 1, DeviceLimits::HCA.max_cqe)?;
        let words = CompletionProducer::layout(slots).words();
        let (memory, counted, bytes) = self.allocate_rings(words)?;
        let ring = self.completion_ring(memory.words(0, words), slots);
        let passed = vec![descriptor(&memory)?];
        self.process_posted_work();
        self.control(|hca, _, id| hca.resize_completion_queue(id, cq, ring))?;
        self.quota.add_rings(Resource::CompletionQueue, cq.0, bytes, counted);
        Ok((Response::CompletionQueue(cq), passed))
    }

    fn create_shared_receive_queue(
        &mut self,
        init: SrqInitAttributes,
        slots: u32,
        entries: u32,
    ) -> RequestResult {
        self.quota.check(Resource::SharedReceiveQueue)?;
        check_range("receive work requests", slots, 1, DeviceLimits::HCA.max_qp_wr)?;
        check_range("receive entries", entries, 0, DeviceLimits::HCA.max_sge as u32)?;
        let words = ReceiveProducer::layout(slots, entries as usize).words();
        let (memory, counted, bytes) = self.allocate_rings(words)?;
        let ring = ReceiveConsumer::new(memory.words(0, words), slots, entries as usize);
        let passed = vec![descriptor(&memory)?];
        let srq = self.control(|hca, _, id| hca.create_shared_receive_queue(id, init, ring))?;
        self.quota.add(Resource::SharedReceiveQueue);
        self.quota.add_rings(Resource::SharedReceiveQueue, srq.0, bytes, counted);
        Ok((Response::SharedReceiveQueue(srq), passed))
    }

    fn create_queue_pair(&mut self, init: QpInitAttributes, sizes: QpCapabilities) -> RequestResult {
        self.quota.check(Resource::QueuePair)?;
        let QpCapabilities {
            max_send_wr: sends,
            max_recv_wr: receives,
            max_sge: entries,
            max_inline_data: inline,
        } = sizes;
        check_range("send work requests", sends, 0, DeviceLimits::HCA.max_qp_wr)?;
        check_range("receive work requests", receives, 0, DeviceLimits::HCA.max_qp_wr)?;
        check_range("entries", entries, 0, DeviceLimits::HCA.max_sge as u32)?;
        check_range("inline data", inline, 0, DeviceLimits::HCA.max_inline_data as u32)?;
        let (entries, inline) = (entries as usize, inline as usize);
        let has_sends = init.qp_type != QpType::XrcTarget;
        let has_receives =
            !matches!(init.qp_type, QpType::XrcInitiator | QpType::XrcTarget) && init.srq.is_none();
        let send_words = if has_sends { SendProducer::layout(sends, entries, inline).words() } else { 0 };
        let receive_words = if has_receives { ReceiveProducer::layout(receives, entries).words() } else { 0 };
        let (memory, counted, bytes) = self.allocate_rings(send_words + receive_words)?;
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
        Ok((Response::QueuePair(number), passed))
    }

    fn register(
        &mut self,
        domain: PdId,
        translation: RegionMapping,
        access: AccessFlags,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Response, CommandError> {
        self.quota.check(Resource::MemoryRegion)?;
        let access = known_access_flags(access);
        let (base, length, reach) = self.map_region(translation, access, descriptors)?;
        let (id, reach) = (self.id, Arc::new(reach));
        let key = self.host.driver.control(|driver| {
            let memory = driver.memory().add(reach.clone());
            let region =
                MemoryRegion { client: id, pd: domain, iova: base, length, access_flags: access, memory };
            driver.control(|hca, _| hca.register_memory_region(region)).inspect_err(|_| {
                driver.memory().remove(memory);
            })
        })?;
        self.quota.add(Resource::MemoryRegion);
        let next = length.checked_next_multiple_of(4096).and_then(|size| size.checked_add(4096));
        self.next_iova = next.and_then(|size| self.next_iova.checked_add(size)).unwrap_or(0x1000_0000);
        let base = if access.contains(AccessFlags::ZERO_BASED) { 0 } else { base };
        Ok(Response::MemoryRegion { rkey: key, iova: base })
    }

    /// Finds the bytes of a region: its base, its length, and how to reach it.
    fn map_region(
        &self,
        translation: RegionMapping,
        access: AccessFlags,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(u64, u64, ClientMemory), CommandError> {
        let RegionMapping { iova: base, length, backing: place } = translation;
        let size = usize::try_from(length).ok().filter(|size| *size <= isize::MAX as usize);
        let size =
            size.ok_or_else(|| CommandError::new(libc::EINVAL, format!("a region of {length} bytes")))?;
        let near = |offset, size| {
            let Some(descriptor) = descriptors.into_iter().next() else {
                return Err(CommandError::new(libc::EBADF, "a region in shared memory needs its descriptor"));
            };
            let counted = reserve_mapping(&self.daemon.mappings, self.daemon.config.max_mappings)?;
            let memory = Arc::new(SharedMemory::adopt(descriptor, size, MapMode::ReadWrite)?);
            Ok(MappedMemory { block: memory.block(), offset, mapping_guard: counted })
        };
        let reach = match place {
            RegionBacking::MemoryFile => ClientMemory { mapped: Some(near(0, size)?), process: None },
            RegionBacking::ProcessMemory { address, shared } => {
                self.process
                    .check_mapped(address, length, access)
                    .map_err(|why| CommandError::new(libc::EFAULT, why))?;
                let near = match shared {
                    None => None,
                    Some(SharedRange { offset, length: part }) => {
                        let end = offset.checked_add(part).filter(|end| *end <= length);
                        let outside =
                            || CommandError::new(libc::EINVAL, "the shared part is not inside of its region");
                        end.ok_or_else(outside)?;
                        Some(near(offset, part as usize)?)
                    }
                };
                ClientMemory {
                    mapped: near,
                    process: Some(ProcessRange { process: self.process.clone(), address, length }),
                }
            }
        };
        let base = base.unwrap_or(self.next_iova);
        if base.checked_add(length).is_none() {
            return Err(CommandError::new(libc::EINVAL, "the region ends beyond the address space"));
        }
        Ok((base, length, reach))
    }

    fn reregister(
        &mut self,
        key: RemoteKey,
        domain: Option<PdId>,
        translation: Option<RegionMapping>,
        access: Option<AccessFlags>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Response, CommandError> {
        let mut region = self.control(|hca, _, id| hca.query_memory_region(id, key))?;
        let old = region.memory;
        region.pd = domain.unwrap_or(region.pd);
        region.access_flags = access.map_or(region.access_flags, known_access_flags);
        let station = &self.host.driver;
        if let Some(translation) = translation {
            let (base, length, reach) = self.map_region(translation, region.access_flags, descriptors)?;
            (region.iova, region.length) = (base, length);
            region.memory = station.control(|driver| driver.memory().add(Arc::new(reach)));
        } else {
            let reach = station.control(|driver| driver.memory().get(region.memory).ok().cloned());
            if let Some(ProcessRange { process, address, length }) =
                reach.as_deref().and_then(|reach| reach.process.as_ref())
            {
                let denied = |why| CommandError::new(libc::EFAULT, why);
                process.check_mapped(*address, *length, region.access_flags).map_err(denied)?;
            }
        }
        let result = self.control(|hca, _, id| hca.reregister_memory_region(id, key, region));
        // Of two places the one that the region is not in is forgotten, and unmapped here, not under the lock.
        let unused = if result.is_ok() { old } else { region.memory };
        if old != region.memory {
            drop(station.control(|driver| driver.memory().remove(unused)));
        }
        Ok(Response::MemoryRegion { rkey: result?, iova: region.iova })
    }
}

impl Drop for Client {
    /// Everything that the client had goes with it; its peers meet silence, as with any dead host.
    fn drop(&mut self) {
        self.process.mark_exited();
        for cq in &self.completion_queues {
            self.host.event_bus.remove_completion_queue(*cq);
        }
        let freed = self.host.driver.control(|driver| {
            let regions = driver.control(|hca, ctx| hca.close_client(ctx, self.id));
            regions.iter().map(|region| driver.memory().remove(region.memory)).collect::<Vec<_>>()
        });
        drop(freed);
        self.host.event_bus.remove_client(self.id);
    }
}

fn descriptor(memory: &SharedMemory) -> Result<OwnedFd, CommandError> {
    memory
        .take_descriptor()
        .ok_or_else(|| CommandError::new(libc::EBADF, "the descriptor was passed already"))
}

/// The rights that there are: bits come over the socket as they are.
fn known_access_flags(access: AccessFlags) -> AccessFlags {
    AccessFlags::from_bits_truncate(access.bits())
}

fn check_range(what: &str, value: u32, least: u32, most: u32) -> Result<(), CommandError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(CommandError::new(libc::EINVAL, format!("{what} is {value}, the card allows {least} to {most}")))
}
