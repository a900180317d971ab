//! Verbs on the hosts of a world, without the verbs API: for tests that look at the HCA itself.

#![allow(dead_code, unused_imports, missing_docs, reason = "each test uses a part")]

mod connect;

pub use connect::ConnectOptions;

use softhca_engine::{
    AddressVector, AhId, Attachments, ClientId, Command, CqId, Hca, Memory, MemoryId, MemoryRegion,
    MemoryWindowType, ModifyQp, PdId, QpAttributes, QpCapabilities, QpInitAttributes, QpRings, QpSnapshot,
    QpState, QpType, Reply, SrqId, SrqInitAttributes, VerbsError, XrcdId,
};
use softhca_fabric::{HostId, simulated_memory};
use softhca_queue::{
    CompletionConsumer, InvalidWorkRequest, QpRingLayout, ReceiveProducer, SendProducer, SharedWords,
};
use softhca_types::{AccessFlags, Completion, CqNotify, ReceiveWorkRequest, SendWorkRequest, cm, reply};
use softhca_wire::{Gid, Qpn, RemoteKey};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

/// The application's side of a queue pair's rings.
struct QueueProducers {
    send: Option<SendProducer>,
    receive: Option<ReceiveProducer>,
}

/// The application's side of all rings of a host.
#[derive(Default)]
struct Application {
    queue_pairs: BTreeMap<Qpn, QueueProducers>,
    completion_queues: BTreeMap<CqId, CompletionConsumer>,
    shared_receive_queues: BTreeMap<SrqId, ReceiveProducer>,
}

/// A world with an application on each host.
pub struct World {
    world: softhca_fabric::World,
    applications: BTreeMap<HostId, Application>,
}

impl World {
    /// As [`softhca_fabric::World::new`].
    pub fn new(seed: u64) -> World {
        World { world: softhca_fabric::World::new(seed), applications: BTreeMap::new() }
    }

    pub fn verbs(&mut self, host: HostId) -> Verbs<'_> {
        let application = self.applications.entry(host).or_default();
        Verbs { world: &mut self.world, id: host, application }
    }

    /// Runs for this long.
    pub fn run_for(&mut self, duration: Duration) -> bool {
        let until = self.now().plus(duration);
        self.run_until(until)
    }
}

impl Deref for World {
    type Target = softhca_fabric::World;

    fn deref(&self) -> &softhca_fabric::World {
        &self.world
    }
}

impl DerefMut for World {
    fn deref_mut(&mut self) -> &mut softhca_fabric::World {
        &mut self.world
    }
}

/// Ring sizes of a queue pair, and its SRQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpOptions {
    /// Capacity of the send queue in work requests.
    pub max_send_wr: u32,
    /// Capacity of the receive queue in work requests.
    pub max_recv_wr: u32,
    /// Scatter/gather entries per work request.
    pub max_sge: usize,
    /// Inline data in bytes.
    pub max_inline_data: usize,
    /// All send work requests are signaled.
    pub sq_sig_all: bool,
    /// The SRQ, if the queue pair has no receive queue of its own.
    pub shared_receive_queue: Option<SrqId>,
    /// The XRC domain of an XRC target.
    pub xrc_domain: Option<XrcdId>,
}

impl Default for QpOptions {
    fn default() -> QpOptions {
        QpOptions {
            max_send_wr: 64,
            max_recv_wr: 64,
            max_sge: 4,
            max_inline_data: 64,
            sq_sig_all: false,
            shared_receive_queue: None,
            xrc_domain: None,
        }
    }
}

impl QpOptions {
    fn capabilities(&self) -> QpCapabilities {
        QpCapabilities {
            max_send_wr: self.max_send_wr,
            max_recv_wr: self.max_recv_wr,
            max_send_sge: self.max_sge as u32,
            max_recv_sge: self.max_sge as u32,
            max_inline_data: self.max_inline_data as u32,
        }
    }
}

/// The verbs of one host.
pub struct Verbs<'a> {
    world: &'a mut softhca_fabric::World,
    id: HostId,
    application: &'a mut Application,
}

impl Verbs<'_> {
    fn client(&self) -> ClientId {
        self.world.host(self.id).client()
    }

    /// Allocates zeroed memory; it stays zeroed if payloads are elided.
    fn allocate_memory(&mut self, length: u64) -> MemoryId {
        let payload_mode = self.world.host(self.id).hca().settings().payload_mode;
        self.world.memory(self.id).add(simulated_memory(length, payload_mode))
    }

    /// Executes a control verb. The HCA transmits nothing before the world continues.
    fn execute(&mut self, command: Command) -> Result<Reply, VerbsError> {
        self.execute_with(command, &mut Attachments::default())
    }

    fn execute_with(&mut self, command: Command, attachments: &mut Attachments) -> Result<Reply, VerbsError> {
        let client = self.client();
        self.world.with_context(self.id, |hca, ctx| hca.execute(ctx, client, command, attachments))
    }

    /// Executes a control verb that creates rings, and returns their memory.
    fn execute_with_rings(&mut self, command: Command) -> Result<(Reply, SharedWords), VerbsError> {
        let rings = SharedWords::heap(softhca_queue::ring_words(&command)?);
        let mut attachments = Attachments { rings: Some(rings.clone()), ..Attachments::default() };
        Ok((self.execute_with(command, &mut attachments)?, rings))
    }

    /// Executes a control verb, then lets the HCA transmit.
    fn execute_and_transmit(&mut self, command: Command) -> Result<Reply, VerbsError> {
        let client = self.client();
        let mut attachments = Attachments::default();
        self.world.with_hca(self.id, |hca, ctx| hca.execute(ctx, client, command, &mut attachments))
    }

    /// Allocates a protection domain.
    pub fn allocate_protection_domain(&mut self) -> Result<PdId, VerbsError> {
        Ok(reply!(self.execute(Command::AllocateProtectionDomain)?, Reply::ProtectionDomain(pd) => pd))
    }

    /// Deallocates a protection domain.
    pub fn deallocate_protection_domain(&mut self, pd: PdId) -> Result<(), VerbsError> {
        self.execute(Command::DeallocateProtectionDomain(pd)).map(|_| ())
    }

    /// Allocates and registers zeroed memory; it stays zeroed if payloads are elided. Returns the key and the
    /// address of its first byte.
    pub fn register_memory(
        &mut self,
        pd: PdId,
        length: u64,
        access: AccessFlags,
    ) -> Result<(RemoteKey, u64), VerbsError> {
        let memory = self.allocate_memory(length);
        let iova = access.contains(AccessFlags::ZERO_BASED).then_some(0);
        let command = Command::RegisterMemoryRegion { pd, iova, length, access };
        let mut attachments = Attachments { memory: Some(memory), ..Attachments::default() };
        Ok(
            reply!(self.execute_with(command, &mut attachments)?, Reply::MemoryRegion { rkey, iova } => (rkey, iova)),
        )
    }

    /// Registers zeroed memory with a chosen key and address. For replaying captures.
    pub fn register_memory_with_key(
        &mut self,
        domain: PdId,
        base: u64,
        length: u64,
        access: AccessFlags,
        key: RemoteKey,
    ) -> Result<(), VerbsError> {
        let (client, memory) = (self.client(), self.allocate_memory(length));
        let region = MemoryRegion { client, pd: domain, iova: base, length, access_flags: access, memory };
        self.world.with_context(self.id, |hca, _| hca.register_memory_region_with_key(region, key))
    }

    /// The registration of a region.
    pub fn memory_region(&mut self, key: RemoteKey) -> Result<MemoryRegion, VerbsError> {
        let client = self.client();
        self.world.with_context(self.id, |hca, _| hca.query_memory_region(client, key))
    }

    /// Changes a region in place.
    pub fn reregister_memory(
        &mut self,
        key: RemoteKey,
        change: impl FnOnce(&mut MemoryRegion),
    ) -> Result<RemoteKey, VerbsError> {
        let (client, mut region) = (self.client(), self.memory_region(key)?);
        change(&mut region);
        self.world.with_context(self.id, |hca, _| hca.reregister_memory_region(client, key, region))
    }

    /// Deregisters a region.
    pub fn deregister_memory(&mut self, key: RemoteKey) -> Result<(), VerbsError> {
        self.execute(Command::DeregisterMemoryRegion { rkey: key, invalidate_windows: false }).map(|_| ())
    }

    /// Frees the memory of a region without deregistering it: accesses fault.
    pub fn unmap(&mut self, key: RemoteKey) -> Result<(), VerbsError> {
        let memory = self.memory_region(key)?.memory;
        self.world.memory(self.id).unmap(memory);
        Ok(())
    }

    /// Writes bytes to a region, as the application does.
    ///
    /// # Panics
    /// If the bytes are outside the region: a bug in the caller.
    pub fn write_memory(&mut self, key: RemoteKey, address: u64, bytes: &[u8]) {
        let region = self.memory_region(key).expect("a region of this host");
        let offset = address - region.iova;
        self.world.memory(self.id).write(region.memory, offset, bytes).expect("bytes inside of the region");
    }

    /// Reads bytes from a region, as the application does.
    ///
    /// # Panics
    /// If the bytes are outside the region: a bug in the caller.
    pub fn read_memory(&mut self, key: RemoteKey, address: u64, length: usize) -> Vec<u8> {
        let region = self.memory_region(key).expect("a region of this host");
        let mut bytes = vec![0; length];
        let offset = address - region.iova;
        self.world
            .memory(self.id)
            .read(region.memory, offset, &mut bytes)
            .expect("bytes inside of the region");
        bytes
    }

    /// Allocates a memory window.
    pub fn allocate_memory_window(
        &mut self,
        pd: PdId,
        mw_type: MemoryWindowType,
    ) -> Result<RemoteKey, VerbsError> {
        let command = Command::AllocateMemoryWindow { pd, mw_type };
        Ok(reply!(self.execute(command)?, Reply::MemoryWindow(rkey) => rkey))
    }

    /// Deallocates a memory window.
    pub fn deallocate_memory_window(&mut self, key: RemoteKey) -> Result<(), VerbsError> {
        self.execute(Command::DeallocateMemoryWindow(key)).map(|_| ())
    }

    /// Creates a completion queue.
    pub fn create_completion_queue(&mut self, cqe: u32) -> Result<CqId, VerbsError> {
        let (reply, rings) = self.execute_with_rings(Command::CreateCompletionQueue { cqe })?;
        let cq = reply!(reply, Reply::CompletionQueue(cq) => cq);
        self.application.completion_queues.insert(cq, CompletionConsumer::new(rings, cqe));
        Ok(cq)
    }

    /// Resizes a completion queue.
    pub fn resize_completion_queue(&mut self, cq: CqId, cqe: u32) -> Result<(), VerbsError> {
        let (_, rings) = self.execute_with_rings(Command::ResizeCompletionQueue { cq, cqe })?;
        self.application.completion_queues.insert(cq, CompletionConsumer::new(rings, cqe));
        Ok(())
    }

    pub fn destroy_completion_queue(&mut self, cq: CqId) -> Result<(), VerbsError> {
        self.execute(Command::DestroyCompletionQueue(cq))?;
        self.application.completion_queues.remove(&cq);
        Ok(())
    }

    /// Requests a notification for the next completion.
    pub fn request_notification(&mut self, cq: CqId, notify: CqNotify) {
        if let Some(queue) = self.application.completion_queues.get(&cq) {
            queue.request_notification(notify);
        }
    }

    /// Removes the oldest completion.
    pub fn poll(&mut self, cq: CqId) -> Option<Completion> {
        self.application.completion_queues.get_mut(&cq)?.pop()
    }

    /// Removes all completions.
    pub fn poll_all(&mut self, cq: CqId) -> Vec<Completion> {
        std::iter::from_fn(|| self.poll(cq)).collect()
    }

    /// Creates a shared receive queue.
    pub fn create_shared_receive_queue(
        &mut self,
        init: SrqInitAttributes,
        max_wr: u32,
        max_sge: usize,
    ) -> Result<SrqId, VerbsError> {
        let command = Command::CreateSharedReceiveQueue { init, max_wr, max_sge: max_sge as u32 };
        let (reply, rings) = self.execute_with_rings(command)?;
        let srq = reply!(reply, Reply::SharedReceiveQueue(srq) => srq);
        let ring = ReceiveProducer::new(rings, max_wr, max_sge);
        self.application.shared_receive_queues.insert(srq, ring);
        Ok(srq)
    }

    /// Arms the limit event of a shared receive queue.
    pub fn set_srq_limit(&mut self, srq: SrqId, srq_limit: u32) -> Result<(), VerbsError> {
        let srq_limit = Some(srq_limit);
        let command = Command::ModifySharedReceiveQueue { srq, max_wr: None, max_sge: 0, srq_limit };
        self.execute_and_transmit(command).map(|_| ())
    }

    /// Resizes a shared receive queue.
    pub fn resize_shared_receive_queue(
        &mut self,
        srq: SrqId,
        max_wr: u32,
        max_sge: usize,
    ) -> Result<(), VerbsError> {
        let (size, entries) = (Some(max_wr), max_sge as u32);
        let command =
            Command::ModifySharedReceiveQueue { srq, max_wr: size, max_sge: entries, srq_limit: None };
        let (_, rings) = self.execute_with_rings(command)?;
        let ring = ReceiveProducer::resume(rings, max_wr, max_sge);
        self.application.shared_receive_queues.insert(srq, ring);
        Ok(())
    }

    pub fn destroy_shared_receive_queue(&mut self, srq: SrqId) -> Result<(), VerbsError> {
        self.execute(Command::DestroySharedReceiveQueue(srq))?;
        self.application.shared_receive_queues.remove(&srq);
        Ok(())
    }

    pub fn open_xrc_domain(&mut self) -> Result<XrcdId, VerbsError> {
        Ok(reply!(self.execute(Command::OpenXrcDomain)?, Reply::XrcDomain(xrcd) => xrcd))
    }

    /// Closes an XRC domain.
    pub fn close_xrc_domain(&mut self, xrcd: XrcdId) -> Result<(), VerbsError> {
        self.execute(Command::CloseXrcDomain(xrcd)).map(|_| ())
    }

    /// Creates an address handle.
    pub fn create_address_handle(
        &mut self,
        pd: PdId,
        address_vector: AddressVector,
    ) -> Result<AhId, VerbsError> {
        let command = Command::CreateAddressHandle { pd, address_vector };
        Ok(reply!(self.execute(command)?, Reply::AddressHandle(ah) => ah))
    }

    pub fn destroy_address_handle(&mut self, ah: AhId) -> Result<(), VerbsError> {
        self.execute(Command::DestroyAddressHandle(ah)).map(|_| ())
    }

    /// Creates a queue pair whose sends and receives complete to `cq`.
    pub fn create_queue_pair(
        &mut self,
        kind: QpType,
        domain: PdId,
        cq: CqId,
        options: QpOptions,
    ) -> Result<Qpn, VerbsError> {
        self.create_queue_pair_with(kind, domain, [cq, cq], options, None)
    }

    /// Creates a queue pair with separate completion queues for sends and receives, and with a chosen QPN if
    /// given.
    pub fn create_queue_pair_with(
        &mut self,
        qp_type: QpType,
        pd: PdId,
        [send_cq, recv_cq]: [CqId; 2],
        options: QpOptions,
        qpn: Option<Qpn>,
    ) -> Result<Qpn, VerbsError> {
        let capabilities = options.capabilities();
        let is_target = qp_type == QpType::XrcTarget;
        let init = QpInitAttributes {
            qp_type,
            pd: (!is_target).then_some(pd),
            send_cq: (!is_target).then_some(send_cq),
            recv_cq: (!is_target).then_some(recv_cq),
            srq: options.shared_receive_queue,
            xrcd: options.xrc_domain,
            sq_sig_all: options.sq_sig_all,
        };
        let command = Command::CreateQueuePair { init, capabilities };
        let (qpn, rings) = match qpn {
            Some(qpn) => {
                let rings = SharedWords::heap(softhca_queue::ring_words(&command)?);
                let (send, receive) =
                    QpRingLayout { init: &init, capabilities: &capabilities }.consumers(&rings, false);
                let (client, consumers) = (self.client(), QpRings { send, receive });
                let create = |hca: &mut Hca| hca.create_queue_pair_with_qpn(client, init, consumers, qpn);
                (self.world.with_context(self.id, |hca, _| create(hca))?, rings)
            }
            None => {
                let (reply, rings) = self.execute_with_rings(command)?;
                (reply!(reply, Reply::QueuePair(qpn) => qpn), rings)
            }
        };
        let (send, receive) = QpRingLayout { init: &init, capabilities: &capabilities }.producers(&rings);
        self.application.queue_pairs.insert(qpn, QueueProducers { send, receive });
        Ok(qpn)
    }

    /// Modifies a queue pair.
    pub fn modify_queue_pair(&mut self, qpn: Qpn, modify: ModifyQp) -> Result<QpState, VerbsError> {
        let command = Command::ModifyQueuePair { qpn, modify };
        Ok(reply!(self.execute_and_transmit(command)?, Reply::QpState(state) => state))
    }

    /// Queries a queue pair.
    pub fn query_queue_pair(&self, qpn: Qpn) -> Result<QpSnapshot, VerbsError> {
        self.world.host(self.id).hca().query_queue_pair(self.client(), qpn)
    }

    pub fn attributes(&self, qpn: Qpn) -> Result<QpAttributes, VerbsError> {
        self.query_queue_pair(qpn).map(|view| view.attributes)
    }

    pub fn destroy_queue_pair(&mut self, qpn: Qpn) -> Result<(), VerbsError> {
        self.execute_and_transmit(Command::DestroyQueuePair(qpn))?;
        self.application.queue_pairs.remove(&qpn);
        Ok(())
    }

    /// Attaches a UD queue pair to a multicast group.
    pub fn attach_multicast(&mut self, qpn: Qpn, group: Gid) -> Result<(), VerbsError> {
        self.execute(Command::AttachMulticast { qpn, group }).map(|_| ())
    }

    /// Detaches a queue pair from a multicast group.
    pub fn detach_multicast(&mut self, qpn: Qpn, group: Gid) -> Result<(), VerbsError> {
        self.execute(Command::DetachMulticast { qpn, group }).map(|_| ())
    }

    /// Executes a connection manager call.
    pub fn cm(&mut self, command: cm::Command) -> Result<cm::Reply, VerbsError> {
        Ok(reply!(self.execute_and_transmit(Command::Cm(command))?, Reply::Cm(reply) => reply))
    }

    /// Posts send work requests; all or none.
    ///
    /// # Panics
    /// If the queue pair does not belong to this host or has no send queue: a bug in the caller.
    pub fn post_sends(
        &mut self,
        qpn: Qpn,
        requests: &[SendWorkRequest<'_>],
    ) -> Result<(), InvalidWorkRequest> {
        let queues = self.application.queue_pairs.get_mut(&qpn).expect("a queue pair of this host");
        let ring = queues.send.as_mut().expect("a queue pair with a send queue");
        for request in requests {
            if let Err(why) = ring.enqueue(request) {
                ring.discard_unpublished();
                return Err(why);
            }
        }
        ring.publish();
        ring.ring(self.world.host(self.id).doorbell(), qpn);
        self.world.with_hca(self.id, |_, _| ());
        Ok(())
    }

    pub fn post_send(&mut self, qpn: Qpn, request: &SendWorkRequest<'_>) -> Result<(), InvalidWorkRequest> {
        self.post_sends(qpn, std::slice::from_ref(request))
    }

    /// Posts a receive work request.
    ///
    /// # Panics
    /// If the queue pair does not belong to this host or has no receive queue: a bug in the caller.
    pub fn post_receive(
        &mut self,
        qpn: Qpn,
        receive: &ReceiveWorkRequest<'_>,
    ) -> Result<(), InvalidWorkRequest> {
        let queues = self.application.queue_pairs.get_mut(&qpn).expect("a queue pair of this host");
        let ring = queues.receive.as_mut().expect("a queue pair with a receive queue");
        ring.enqueue(receive)?;
        if ring.publish()
            && let Some(send) = &queues.send
        {
            send.ring(self.world.host(self.id).doorbell(), qpn);
        }
        self.world.with_hca(self.id, |_, _| ());
        Ok(())
    }

    /// Posts a receive work request to an SRQ.
    ///
    /// # Panics
    /// If the SRQ does not belong to this host: a bug in the caller.
    pub fn post_srq_receive(
        &mut self,
        srq: SrqId,
        receive: &ReceiveWorkRequest<'_>,
    ) -> Result<(), InvalidWorkRequest> {
        let ring = self
            .application
            .shared_receive_queues
            .get_mut(&srq)
            .expect("a shared receive queue of this host");
        ring.enqueue(receive)?;
        let _ = ring.publish();
        Ok(())
    }
}
