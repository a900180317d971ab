//! A client of a host: executes its commands within its quota, and frees its resources when it ends.

use crate::client_memory::{ClientMemory, MappedMemory, ProcessMemory, ProcessRange};
use crate::client_process::ClientProcess;
use crate::command_error::{CommandError, RequestResult};
use crate::host::DaemonHost;
use crate::notification_queue::NotificationQueue;
use crate::quota::{ClientQuota, MappingGuard};
use crate::slots::SlotLease;
use crate::state::DaemonState;
use softhca_control::{DeviceChange, DirectPath, RegionBacking, Response, limit_of};
use softhca_engine::{
    Attachments, ClientId, CmChannelId, CmId, Command, Context, CqId, Hca, MemoryId, MemoryRegion, QpType,
    Reply, Resource, VerbsError,
};
use softhca_queue::{DoorbellConsumer, DoorbellProducer, MapMode, SharedMemory, SharedWords};
use softhca_types::cm::{self, EventType, PortSpace};
use softhca_types::{AccessFlags, CallSite};
use softhca_udp::{RoceSocket, SlotGroup, SocketOptions};
use softhca_wire::Gid;
use std::fs::File;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A client of a host.
pub(crate) struct Client {
    daemon: Arc<DaemonState>,
    pub host: Arc<DaemonHost>,
    id: ClientId,
    process: Arc<ProcessMemory>,
    notifications: Arc<NotificationQueue>,
    pub quota: ClientQuota,
    completion_queues: Vec<CqId>,
    /// Wakes the engine thread that executes the work requests of the client, which has a copy.
    _waker: Option<OwnedFd>,
    /// The slot of a client with a direct data path.
    slot: Option<SlotLease>,
    send_sockets: usize,
}

/// Memory for the rings of a queue.
struct RingMemory {
    memory: Arc<SharedMemory>,
    guard: MappingGuard,
}

impl Client {
    /// Opens the device of a host for a process.
    pub fn open(
        daemon: &Arc<DaemonState>,
        host: &Arc<DaemonHost>,
        process: &ClientProcess,
        notifications: &Arc<NotificationQueue>,
        proc_mem: Option<OwnedFd>,
        can_be_direct: bool,
    ) -> Result<(Client, Response, Vec<OwnedFd>), CommandError> {
        let mut descriptors = Vec::new();
        let (mut slot, mut waker, mut rule_changes) = (None, None, Vec::new());
        let assigned = match host.slots.as_ref().filter(|_| can_be_direct) {
            Some(slots) => slots.assign(notifications, process.pid)?,
            None => None,
        };
        let (doorbells, doorbell_slots) = match assigned {
            Some(assigned) => {
                descriptors.extend(assigned.lease.descriptors()?);
                descriptors.extend([assigned.page, assigned.rule_counters]);
                rule_changes = assigned.rule_changes;
                slot = Some(assigned.lease);
                // Its queue pairs are in its own process.
                (SharedWords::heap(DoorbellProducer::words(1)), 1)
            }
            None => {
                let count = host.device.limits.max_qp;
                let words = DoorbellProducer::words(count);
                let page = Arc::new(SharedMemory::create("softhca-client", words * 8, MapMode::ReadWrite)?);
                let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
                let event = rustix::event::eventfd(0, flags).map_err(std::io::Error::from)?;
                host.driver.add_wake_source(event.as_fd())?;
                descriptors.extend([event.try_clone()?, host.sleep_flag.try_clone()?, descriptor(&page)?]);
                waker = Some(event);
                (page.words(0, words), count)
            }
        };
        let changes =
            if slot.is_some() { [rule_changes, host.device_changes()].concat() } else { Vec::new() };
        let mut direct = slot.as_ref().map(|lease| DirectPath {
            slot: lease.slot,
            foreign_recovery: daemon.config.foreign_recovery.name().into(),
            foreign_window: daemon.config.foreign_window,
            congestion: daemon.config.congestion.name().unwrap_or_default().into(),
            reserved: None,
            changes,
        });
        let (id, gids) = host.driver.control(|driver| {
            driver.control(|hca, _| {
                let id = hca.open_client(DoorbellConsumer::new(doorbells, doorbell_slots))?;
                if let Some(lease) = &slot {
                    hca.set_client_slot(id, lease.slot.number);
                }
                Ok::<_, CommandError>((id, hca.gids().to_vec()))
            })
        })?;
        host.event_bus.add_client(id, process, slot.is_some(), notifications);
        let mut client = Client {
            daemon: daemon.clone(),
            host: host.clone(),
            id,
            process: Arc::new(ProcessMemory::new(process.pid, proc_mem.map(File::from))),
            notifications: notifications.clone(),
            quota: ClientQuota::new(host.device.limits, daemon.config.client_limits.max_ring_bytes),
            completion_queues: Vec::new(),
            _waker: waker,
            slot,
            send_sockets: 0,
        };
        if let Some(direct) = &mut direct {
            direct.reserved = client.reserve_port();
        }
        let response = Response::Opened { host: host.device.clone(), gids, doorbell_slots, direct };
        Ok((client, response, descriptors))
    }

    /// Reserves a port for the first connection of a process with its own connection manager, which saves it a request.
    fn reserve_port(&mut self) -> Option<(CmId, u16)> {
        let command = Command::Cm(cm::Command::ReservePort {
            port_space: PortSpace::Tcp,
            qp_type: QpType::Rc,
            reuse_address: false,
            only_ipv6: false,
            address: SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
        });
        match self.execute(command, None, Vec::new(), None).ok()?.0 {
            Response::Executed(Reply::Cm(cm::Reply::Reserved(id, port))) => Some((id, port)),
            _ => None,
        }
    }

    /// Whether the client executes the transport itself.
    pub fn is_direct(&self) -> bool {
        self.slot.is_some()
    }

    /// The slot of a client with a direct data path.
    pub fn slot(&self) -> Result<&SlotLease, CommandError> {
        let message = "this client has no direct data path";
        self.slot.as_ref().ok_or_else(|| CommandError::new(libc::EINVAL, message))
    }

    /// Opens a socket that sends from an address of the host.
    pub fn open_send_socket(&mut self, source: IpAddr) -> RequestResult {
        let gids = self.control(|hca, _, _| hca.gids().to_vec());
        let slots =
            self.host.slots.as_ref().filter(|_| self.slot.is_some() && gids.contains(&Gid::from(source)));
        let Some(slots) = slots else {
            let message = format!("{source} is not an address that this client sends from");
            return Err(CommandError::new(libc::EADDRNOTAVAIL, message));
        };
        if self.send_sockets >= 2 * SlotGroup::MAX_SLOTS {
            return Err(CommandError::new(libc::EMFILE, "the client has a socket for every slot"));
        }
        // No reader: the smallest buffer is sufficient.
        let options = SocketOptions { receive_buffer: 0, ..SocketOptions::default() };
        let bind = || RoceSocket::bind(SocketAddr::new(source, 0), options);
        let socket = slots.within_namespace(bind)?.map_err(std::io::Error::other)?;
        self.send_sockets += 1;
        if let Some(slot) = &mut self.slot {
            slot.has_sent_to_hosts = true;
        }
        Ok((Response::Done, vec![socket.as_fd().try_clone_to_owned()?]))
    }

    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>, ClientId) -> R) -> R {
        self.host.driver.control(|driver| driver.control(|hca, ctx| act(hca, ctx, self.id)))
    }

    /// Polls the driver, so that work requests that need no peer complete before a completion queue is resized: a
    /// client that just posted them relies on that.
    fn process_posted_work(&self) {
        const POLLS: usize = 16;
        self.host.driver.control(|driver| (0..POLLS).take_while(|_| driver.poll().unwrap_or(false)).count());
    }

    /// Allocates the memory of rings within the client's quota.
    fn allocate_rings(&self, words: usize) -> Result<RingMemory, CommandError> {
        self.quota.check_rings(words as u64 * 8)?;
        let guard = self.daemon.mappings.reserve(self.process.pid(), words * 8)?;
        let memory = SharedMemory::create("softhca-ring", words * 8, MapMode::ReadWrite)
            .map_err(|error| mapping_error(words * 8, error))?;
        Ok(RingMemory { memory: Arc::new(memory), guard })
    }

    /// Executes a control verb. `backing` and a descriptor locate the memory to register.
    pub fn execute(
        &mut self,
        command: Command,
        backing: Option<RegionBacking>,
        descriptors: Vec<OwnedFd>,
        call_site: Option<CallSite>,
    ) -> RequestResult {
        if let Some(resource) = command.creates() {
            self.quota.check(resource)?;
        }
        let rings = match softhca_queue::ring_words(&command)? {
            0 => None,
            words => Some(self.allocate_rings(words)?),
        };
        let passed = rings.iter().map(|rings| descriptor(&rings.memory)).collect::<Result<_, _>>()?;
        let mut attachments = Attachments {
            rings: rings.as_ref().map(|rings| rings.memory.words(0, rings.memory.len() / 8)),
            memory: self.attach_memory(&command, backing, descriptors)?,
            call_site,
            is_part: false,
        };
        if let Command::ResizeCompletionQueue { .. } = command {
            self.process_posted_work();
        }
        let has_roles = !self.daemon.roles.is_idle();
        let mut raised = None;
        let result = self.host.driver.control(|driver| {
            let result = driver.execute(self.id, command.clone(), &mut attachments);
            raised = driver.take_raised_event();
            let reply = result?;
            if has_roles && let Some(qpn) = command.qp_ready_to_receive() {
                // With the driver locked, so that roles are assigned in the order of the transitions.
                self.daemon
                    .roles
                    .assign(&self.host.device.name, &driver.hca().query_queue_pair(self.id, qpn)?);
            }
            Ok::<_, VerbsError>(reply)
        });
        // Other processes of the host have the same device.
        match &command {
            Command::RaiseEvent { event, object: None } => raised = Some(*event),
            Command::NoteTrigger(trigger) => {
                self.host.notify_of_change(&DeviceChange::Trigger(trigger.clone()), None);
            }
            _ => {}
        }
        if let Some(event) = raised {
            self.host.notify_of_change(&DeviceChange::Event(event), None);
        }
        // Unmapping takes time, so the memory is dropped without the lock.
        drop(
            attachments
                .memory
                .map(|memory| self.host.driver.control(|driver| driver.memory().remove(memory))),
        );
        let reply = result?;
        if has_roles && let Some(qpn) = command.qp_ready_to_send() {
            let snapshot = self.control(|hca, _, id| hca.query_queue_pair(id, qpn))?;
            self.daemon.roles.publish_flow(&self.daemon.hosts(), &self.host, &snapshot);
        }
        self.count_resources(&command, &reply, rings);
        Ok((Response::Executed(reply), passed))
    }

    /// Updates the quota and the notifications after a command.
    fn count_resources(&mut self, command: &Command, reply: &Reply, rings: Option<RingMemory>) {
        if let Some(resource) = command.creates() {
            self.quota.add(resource);
        }
        let owner = match reply {
            Reply::CompletionQueue(cq) => {
                self.completion_queues.push(*cq);
                self.host.event_bus.add_completion_queue(*cq, &self.notifications);
                Some((Resource::CompletionQueue, cq.0))
            }
            Reply::SharedReceiveQueue(srq) => Some((Resource::SharedReceiveQueue, srq.0)),
            Reply::QueuePair(qpn) => Some((Resource::QueuePair, qpn.value())),
            // The client owns the identifier of a request from now on.
            Reply::Cm(cm::Reply::Event(Some(event), _)) if event.event_type == EventType::ConnectRequest => {
                self.quota.add(Resource::CmIdentifier);
                None
            }
            _ => match command {
                Command::ResizeCompletionQueue { cq, .. } => Some((Resource::CompletionQueue, cq.0)),
                Command::ModifySharedReceiveQueue { srq, .. } => Some((Resource::SharedReceiveQueue, srq.0)),
                _ => None,
            },
        };
        if let (Some((resource, number)), Some(rings)) = (owner, rings) {
            self.quota.add_rings(resource, number, rings.memory.len() as u64, rings.guard);
        }
        if let Some((resource, number)) = command.destroys() {
            self.quota.remove(resource);
            self.quota.remove_rings(resource, number);
            if resource == Resource::CompletionQueue {
                self.host.event_bus.remove_completion_queue(CqId(number));
                self.completion_queues.retain(|cq| cq.0 != number);
            }
        }
    }

    /// Dequeues the events of a CM channel: the client owns the identifiers of requests from now on.
    pub fn dequeue_cm_events(&mut self, channel: CmChannelId) -> Vec<cm::Event> {
        let events: Vec<cm::Event> = self.control(|hca, ctx, id| {
            let mut dequeue = || match hca.execute_cm(ctx, id, cm::Command::GetEvent(channel)) {
                Ok(cm::Reply::Event(event, _)) => event,
                // The client destroyed the channel meanwhile.
                _ => None,
            };
            std::iter::from_fn(&mut dequeue).collect()
        });
        for _ in events.iter().filter(|event| event.event_type == EventType::ConnectRequest) {
            self.quota.add(Resource::CmIdentifier);
        }
        events
    }

    /// Adds the memory that a command registers to the HCA's memory, and checks that the client may access it.
    fn attach_memory(
        &self,
        command: &Command,
        backing: Option<RegionBacking>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Option<MemoryId>, CommandError> {
        let (length, access) = match *command {
            Command::RegisterMemoryRegion { length, access, .. } => (length, access),
            Command::ReregisterMemoryRegion { rkey, mapping, access, .. } => {
                let region = self.control(|hca, _, id| hca.query_memory_region(id, rkey))?;
                let access = access.unwrap_or(region.access_flags);
                match mapping {
                    Some((_, length)) => (length, access),
                    None => return self.check_access(&region, access).map(|()| None),
                }
            }
            _ => return Ok(None),
        };
        let Some(backing) = backing else {
            return Err(CommandError::new(
                libc::EINVAL,
                "a memory registration needs the location of the memory",
            ));
        };
        let memory = self.map_region(length, backing, access, descriptors)?.into_block();
        Ok(Some(self.host.driver.control(|driver| driver.memory().add(memory))))
    }

    /// Checks that the mappings of the client allow the new access flags of a region.
    fn check_access(&self, region: &MemoryRegion, access: AccessFlags) -> Result<(), CommandError> {
        let memory = self.host.driver.control(|driver| driver.memory().get(region.memory).ok().cloned());
        memory.map_or(Ok(()), |memory| {
            memory.check_access(access).map_err(|why| CommandError::new(libc::EFAULT, why))
        })
    }

    /// Maps the memory of a region, or finds it in the client's process.
    fn map_region(
        &self,
        length: u64,
        backing: RegionBacking,
        access: AccessFlags,
        descriptors: Vec<OwnedFd>,
    ) -> Result<ClientMemory, CommandError> {
        let invalid = |message: &str| CommandError::new(libc::EINVAL, message);
        let size = usize::try_from(length).ok().filter(|size| *size <= isize::MAX as usize);
        let size = size.ok_or_else(|| invalid("the region is larger than the address space"))?;
        match backing {
            RegionBacking::MemoryFile => {
                let Some(descriptor) = descriptors.into_iter().next() else {
                    let message = "a region in shared memory needs its descriptor";
                    return Err(CommandError::new(libc::EBADF, message));
                };
                let mapping_guard = self.daemon.mappings.reserve(self.process.pid(), size)?;
                let memory = SharedMemory::adopt(descriptor, size, MapMode::ReadWrite)
                    .map_err(|error| mapping_error(size, error))?;
                Ok(ClientMemory::Mapped(MappedMemory { block: Arc::new(memory).block(), mapping_guard }))
            }
            RegionBacking::ProcessMemory { address } => {
                let denied = |why| CommandError::new(libc::EFAULT, why);
                self.process.check_mapped(address, length, access).map_err(denied)?;
                let (process, monitor) = (self.process.clone(), self.host.access_monitor.clone());
                Ok(ClientMemory::Process(ProcessRange { process, monitor, address, length }))
            }
        }
    }
}

impl Drop for Client {
    /// Frees all resources of the client. Its peers get no notice, as when a host fails.
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
        .ok_or_else(|| CommandError::new(libc::EBADF, "the descriptor was already passed"))
}

fn mapping_error(bytes: usize, error: std::io::Error) -> CommandError {
    match error.raw_os_error() {
        Some(errno) => CommandError::new(
            errno,
            format!("the daemon cannot map {bytes} bytes: {error}{}", limit_of(&error, "the daemon")),
        ),
        None => error.into(),
    }
}
