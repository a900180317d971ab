//! The one entry of all control verbs.

use super::client::FIRST_IOVA;
use super::queue_pair::QpRings;
use crate::core::hca::{Client, Hca};
use crate::core::transport::Transport;
use crate::{ClientId, Context, Event, MemoryId, MemoryRegion, Resource, VerbsError, VerbsResult};
use softhca_queue::{CompletionProducer, QpRingLayout, ReceiveConsumer, SharedWords};
use softhca_types::{AccessFlags, CallSite, Command, Completion, Errno, Reply, cm};
use softhca_wire::{LocalKey, Qpn, RemoteKey};

/// Additions of the back end to a command: the memory that it allocates, and the command's origin.
#[derive(Default)]
pub struct Attachments {
    /// Memory for the rings of a queue: [`softhca_queue::ring_words`].
    pub rings: Option<SharedWords>,
    /// Memory to register. After the call: memory that no region uses, which the back end releases.
    pub memory: Option<MemoryId>,
    /// The place in the program that calls the verb, for a recording of calls.
    pub call_site: Option<CallSite>,
    /// The command is a part of a call of the program, which was counted as a whole.
    pub is_part: bool,
}

impl Attachments {
    /// An XRC target has no rings.
    fn rings(&mut self) -> SharedWords {
        self.rings.take().unwrap_or_else(|| SharedWords::heap(0))
    }

    fn completion_ring(&mut self, cqe: u32) -> CompletionProducer {
        CompletionProducer::new(self.rings(), cqe)
    }
}

/// Clears the bits that no flag has: they come over a socket as they are.
fn known(access: AccessFlags) -> AccessFlags {
    AccessFlags::from_bits_truncate(access.bits())
}

impl<T: Transport> Hca<T> {
    /// Executes a control verb of a client, unless a fault of its process hits it.
    pub fn execute(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        command: Command,
        attachments: &mut Attachments,
    ) -> VerbsResult<Reply> {
        let has_device = |client: &Client| !self.state.health.device_failed && !client.has_lost_device;
        let needs_device = command.call().is_some() || matches!(command, Command::QueryPort);
        if needs_device && !self.clients.get(&client).is_none_or(has_device) {
            return Err(VerbsError::DeviceFailed);
        }
        if self.state.faults.is_none() || attachments.is_part {
            return self.execute_command(ctx, client, command, attachments);
        }
        if let Some(reply) = self.inject_into_call(ctx, client, &command, attachments.call_site)? {
            return Ok(reply);
        }
        let creates =
            command.creates().is_some() || matches!(command, Command::Cm(cm::Command::CreateEventChannel));
        let result = self.execute_command(ctx, client, command, attachments);
        if let (true, Ok(reply)) = (creates, &result) {
            self.note_created(client, reply);
        }
        result
    }

    fn execute_command(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        command: Command,
        attachments: &mut Attachments,
    ) -> VerbsResult<Reply> {
        command.check_sizes()?;
        match command {
            Command::AllocateProtectionDomain => {
                return self.allocate_protection_domain(client).map(Reply::ProtectionDomain);
            }
            Command::DeallocateProtectionDomain(pd) => {
                self.state.objects.protection.free_protection_domain(client, pd)?
            }
            Command::RegisterMemoryRegion { pd, iova, length, access } => {
                return self.register(client, pd, iova, length, access, attachments);
            }
            Command::ReregisterMemoryRegion { rkey, pd, mapping, access } => {
                let mut region = self.query_memory_region(client, rkey)?;
                let old = region.memory;
                region.pd = pd.unwrap_or(region.pd);
                region.access_flags = access.map_or(region.access_flags, known);
                if let Some((iova, length)) = mapping {
                    let memory = attachments.memory.expect("the back end attaches the new memory");
                    (region.iova, region.length, region.memory) = (iova, length, memory);
                }
                let rkey = self.reregister_memory_region(client, rkey, region)?;
                attachments.memory = mapping.map(|_| old);
                return Ok(registered(rkey, &region));
            }
            Command::DeregisterMemoryRegion { rkey, invalidate_windows } => {
                let protection = &mut self.state.objects.protection;
                if invalidate_windows {
                    protection.invalidate_windows(client, rkey)?;
                }
                let is_invalid = self.state.settings.profile.errno_of_bound_region == Errno::EINVAL;
                let region =
                    protection.deregister_memory_region(client, rkey).map_err(|error| match error {
                        VerbsError::Busy { .. } if is_invalid => VerbsError::Invalid {
                            what: "memory region",
                            why: "a memory window is bound to it",
                        },
                        other => other,
                    })?;
                attachments.memory = Some(region.memory);
                self.report_use(ctx, client, rkey);
            }
            Command::AllocateMemoryWindow { pd, mw_type } => {
                return self.allocate_memory_window(client, pd, mw_type).map(Reply::MemoryWindow);
            }
            Command::DeallocateMemoryWindow(rkey) => {
                self.state.objects.protection.free_memory_window(client, rkey)?
            }
            Command::CreateCompletionQueue { cqe } => {
                let ring = attachments.completion_ring(cqe);
                return self.create_completion_queue(client, ring).map(Reply::CompletionQueue);
            }
            Command::ResizeCompletionQueue { cq, cqe } => {
                self.resize_completion_queue(client, cq, attachments.completion_ring(cqe))?;
            }
            Command::DestroyCompletionQueue(cq) => self.destroy_completion_queue(client, cq)?,
            Command::CreateSharedReceiveQueue { init, max_wr, max_sge } => {
                let ring = ReceiveConsumer::new(attachments.rings(), max_wr, max_sge as usize);
                return self.create_shared_receive_queue(client, init, ring).map(Reply::SharedReceiveQueue);
            }
            Command::ModifySharedReceiveQueue { srq, max_wr, max_sge, srq_limit } => {
                let new_ring = |max_wr| ReceiveConsumer::new(attachments.rings(), max_wr, max_sge as usize);
                self.modify_shared_receive_queue(ctx, client, srq, max_wr.map(new_ring), srq_limit)?;
            }
            Command::QuerySharedReceiveQueue(srq) => {
                return self.query_shared_receive_queue(client, srq).map(Reply::SrqAttributes);
            }
            Command::DestroySharedReceiveQueue(srq) => self.destroy_shared_receive_queue(client, srq)?,
            Command::OpenXrcDomain => return self.open_xrc_domain(client).map(Reply::XrcDomain),
            Command::CloseXrcDomain(xrcd) => self.close_xrc_domain(client, xrcd)?,
            Command::CreateAddressHandle { pd, address_vector } => {
                return self.create_address_handle(client, pd, address_vector).map(Reply::AddressHandle);
            }
            Command::DestroyAddressHandle(ah) => self.destroy_address_handle(client, ah)?,
            Command::CreateQueuePair { init, capabilities } => {
                let (send, receive) = QpRingLayout { init: &init, capabilities: &capabilities }
                    .consumers(&attachments.rings(), false);
                return self.create_queue_pair(client, init, QpRings { send, receive }).map(Reply::QueuePair);
            }
            Command::ModifyQueuePair { qpn, mut modify } => {
                modify.access_flags = modify.access_flags.map(known);
                return self.modify_queue_pair(ctx, client, qpn, &modify).map(Reply::QpState);
            }
            Command::QueryQueuePair(qpn) => return self.query_queue_pair(client, qpn).map(Reply::QpSnapshot),
            Command::DestroyQueuePair(qpn) => self.destroy_queue_pair(ctx, client, qpn)?,
            Command::AttachMulticast { qpn, group } => self.attach_multicast(client, qpn, group)?,
            Command::DetachMulticast { qpn, group } => self.detach_multicast(client, qpn, group)?,
            Command::QueryPort => return Ok(Reply::PortState(self.port_state())),
            Command::QueryInfiniBandPort => {
                return Ok(Reply::InfiniBandPort(self.state.infiniband.as_deref().cloned()));
            }
            Command::InjectFaults(faults) => self.set_process_faults(ctx, client, faults),
            Command::AnnounceCall { .. } => {}
            Command::NameCallSite { number, call_site } => self.name_call_site(client, number, call_site)?,
            Command::NoteTrigger(trigger) => self.note_trigger(&trigger),
            Command::RaiseEvent { event, object } => self.raise_injected_event(ctx, event, object),
            Command::Cm(command) => return T::execute_cm(self, ctx, client, command).map(Reply::Cm),
            Command::TransitionQueuePair(transition) => {
                return self.transition_queue_pair(ctx, client, &transition).map(Reply::Cm);
            }
        }
        Ok(Reply::Done)
    }

    /// Reports the work requests that use a region which was deregistered. Their outcome depends on the moment, on every card.
    fn report_use(&mut self, ctx: &mut Context<'_>, client: ClientId, rkey: RemoteKey) {
        if !self.state.is_observed {
            return;
        }
        let lkey = LocalKey(rkey.0);
        for qpn in self.queue_pairs.numbers(|qp| qp.client == client) {
            let Some(qp) = self.queue_pairs.get_mut(qpn) else { continue };
            let found = T::find_request(qp, lkey).map(|wr_id| (wr_id, false)).or_else(|| {
                let queue = self.state.objects.completion_queues.get(qp.send_cq?.0)?;
                let is_own = |completion: &Completion| {
                    completion.qpn.value() == qpn && !completion.opcode.is_receive()
                };
                let mut unpolled = queue.ring.unpolled().filter(is_own).map(|completion| completion.wr_id);
                T::find_completed_request(qp, lkey, &mut unpolled).map(|wr_id| (wr_id, true))
            });
            if let Some((wr_id, completed)) = found {
                ctx.emit(Event::DeregisteredInUse { qp: Qpn::new(qpn), wr_id, key: rkey.0, completed });
            }
        }
    }

    fn name_call_site(&mut self, client: ClientId, number: u16, call_site: CallSite) -> VerbsResult {
        self.check_client(client)?;
        self.state.objects.call_sites.insert((client, number), call_site);
        Ok(())
    }

    fn register(
        &mut self,
        client: ClientId,
        pd: crate::PdId,
        iova: Option<u64>,
        length: u64,
        access: AccessFlags,
        attachments: &mut Attachments,
    ) -> VerbsResult<Reply> {
        let not_found = VerbsError::NotFound { resource: Resource::Client, number: client.0 };
        let next_iova = self.clients.get(&client).ok_or(not_found)?.next_iova;
        let memory = attachments.memory.expect("the back end attaches the memory");
        let (iova, access_flags) = (iova.unwrap_or(next_iova), known(access));
        let region = MemoryRegion { client, pd, iova, length, access_flags, memory };
        let rkey = self.register_memory_region(region)?;
        attachments.memory = None;
        if let Some(client) = self.clients.get_mut(&client) {
            // The next region begins on a page of its own, behind a page that belongs to no region.
            let size = length.checked_next_multiple_of(4096).and_then(|size| size.checked_add(4096));
            let next = size.and_then(|size| next_iova.checked_add(size));
            client.next_iova = next.unwrap_or(FIRST_IOVA);
        }
        Ok(registered(rkey, &region))
    }

    /// Takes the queue pair of a connection through its states, then makes the connection manager's call.
    fn transition_queue_pair(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        transition: &cm::QpTransition,
    ) -> VerbsResult<cm::Reply> {
        transition.execute(
            &mut (self, ctx),
            |(hca, ctx), command| T::execute_cm(hca, ctx, client, command),
            |(hca, ctx), modify| hca.modify_queue_pair(ctx, client, transition.qpn, modify).map(drop),
        )
    }
}

fn registered(rkey: RemoteKey, region: &MemoryRegion) -> Reply {
    let is_zero_based = region.access_flags.contains(AccessFlags::ZERO_BASED);
    Reply::MemoryRegion { rkey, iova: if is_zero_based { 0 } else { region.iova } }
}
