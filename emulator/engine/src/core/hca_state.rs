//! The state that all queue pairs of an HCA share.

use crate::core::completion_queue::CompletionQueue;
use crate::core::control_packets::ControlPackets;
use crate::core::injection::{CqeFaults, InjectedCompletions};
use crate::core::peer_window::PeerWindow;
use crate::core::processes::{Processes, SingleProgram};
use crate::core::protection::{Protection, TranslatedAddress};
use crate::core::random::Random;
use crate::core::reason::is_failure;
use crate::core::shared_receive_queue::SharedReceiveQueue;
use crate::core::table::Table;
use crate::core::timers::Timers;
use crate::{
    AccessError, AddressVector, AsyncEvent, ClientId, Context, Counters, CqId, DeviceLimits, Event, PdId,
    Peer, Placement, PortState, Reason, Recovery, Settings, SrqId, WriteOrigin, WriterRole,
};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_types::{AccessFlags, CallSite, Completion, CompletionFlags, CorruptRing, InfiniBandPort, Sge};
use softhca_wire::{Gid, Psn, Qpn};

pub(crate) struct AddressHandle {
    pub client: ClientId,
    pub pd: PdId,
    pub vector: AddressVector,
}

pub(crate) struct XrcDomain {
    pub client: ClientId,
    pub users: u32,
    /// The client is gone; the last user removes the domain.
    pub orphaned: bool,
}

/// The packets that the port sends next, and the queue pairs that wait for it.
#[derive(Default)]
pub(crate) struct Egress {
    /// Queue pairs that may have packets, in order.
    pub queue: VecDeque<Qpn>,
    pub control_packets: ControlPackets,
    /// The priorities that PFC pauses.
    pub paused_priorities: u8,
    /// Queue pairs that wait for the transmit gate of their destination.
    pub blocked_qps: BTreeMap<IpAddr, Vec<Qpn>>,
    /// The queue pairs that wait for each paused priority.
    pub paused_qps: [Vec<Qpn>; 8],
}

/// Other ports, where they need a state.
#[derive(Default)]
pub(crate) struct Peers {
    /// Peers that do not respond at present: timers of their connections do not expire.
    pub stalled: BTreeSet<Peer>,
    /// The windows of foreign peers.
    pub windows: BTreeMap<IpAddr, PeerWindow>,
}

/// The objects that applications create, except queue pairs.
pub(crate) struct Objects {
    pub protection: Protection,
    pub completion_queues: Table<CompletionQueue>,
    pub shared_receive_queues: Table<SharedReceiveQueue>,
    pub address_handles: Table<AddressHandle>,
    pub xrc_domains: Table<XrcDomain>,
    /// The queue pairs of each multicast group, in order of attachment.
    pub multicast_groups: BTreeMap<Gid, Vec<Qpn>>,
    /// Completion queues that overflowed and whose queue pairs have not failed yet.
    pub overflowed_cqs: Vec<CqId>,
    /// The places of the calls that post work requests, by client and number.
    pub call_sites: BTreeMap<(ClientId, u16), CallSite>,
    /// The generator of numbers and keys.
    pub random: Random,
}

/// The condition of the port and of the device.
pub(crate) struct Health {
    pub port_state: PortState,
    /// An injected PORT_ERR is in effect: what the port sends is lost.
    pub port_fault: bool,
    /// DEVICE_FATAL was raised: control verbs fail.
    pub device_failed: bool,
    /// The device is removed: it cannot be opened.
    pub device_removed: bool,
}

/// Fields that every packet touches come first: with a thousand HCAs, their states exceed the caches.
#[repr(C)]
pub(crate) struct HcaState {
    pub egress: Egress,
    pub timers: Timers,
    /// Wake-ups of paced queue pairs.
    pub pacing_timers: Timers,
    pub health: Health,
    /// The settings of the device allow the straight path.
    pub allows_straight_path: bool,
    /// Somebody listens to the events of packets, of work requests and of memory. Without a listener they are not built.
    pub is_observed: bool,
    pub settings: Settings,
    /// `None` while no process has faults.
    pub faults: Option<Box<InjectedCompletions>>,
    pub objects: Objects,
    pub counters: Counters,
    pub peers: Peers,
    pub gids: Vec<Gid>,
    /// The port, if it is one of an InfiniBand subnet.
    pub infiniband: Option<Box<InfiniBandPort>>,
    pub processes: Box<dyn Processes>,
}

impl HcaState {
    pub fn new(settings: Settings, gids: Vec<Gid>, limits: &DeviceLimits) -> HcaState {
        HcaState {
            egress: Egress::default(),
            timers: Timers::default(),
            pacing_timers: Timers::default(),
            health: Health {
                port_state: PortState::Active,
                port_fault: false,
                device_failed: false,
                device_removed: false,
            },
            allows_straight_path: settings.allow_straight_path(),
            is_observed: true,
            faults: None,
            objects: Objects {
                protection: Protection::new(limits),
                completion_queues: Table::new(limits.max_cq, 1),
                shared_receive_queues: Table::new(limits.max_srq, 1),
                address_handles: Table::new(limits.max_ah, 1),
                xrc_domains: Table::new(limits.max_xrcd, 1),
                multicast_groups: BTreeMap::new(),
                overflowed_cqs: Vec::new(),
                call_sites: BTreeMap::new(),
                random: Random::Seeded(settings.seed),
            },
            settings,
            counters: Counters::default(),
            peers: Peers::default(),
            gids,
            infiniband: None,
            processes: Box::new(SingleProgram),
        }
    }

    /// The recovery mode of connections to this peer.
    pub fn recovery(&self, peer: IpAddr) -> Recovery {
        match self.peers.windows.contains_key(&peer) {
            true => self.settings.foreign_recovery,
            false => self.settings.recovery,
        }
    }

    pub fn gid(&self, index: u8) -> Gid {
        self.gids.get(usize::from(index)).copied().unwrap_or_default()
    }

    /// Posts a CQE. A full completion queue fails, with all queue pairs that use it.
    #[inline]
    pub fn post_completion(
        &mut self,
        ctx: &mut Context<'_>,
        cq: CqId,
        mut completion: Completion,
        reason: Reason,
    ) {
        completion.vendor_error = self.settings.profile.vendor_error(reason);
        if self.faults.is_some() {
            return self.post_completion_with_faults(ctx, cq, completion, reason);
        }
        self.write_cqe(ctx, cq, completion, reason, CqeFaults::default());
    }

    /// As [`HcaState::post_completion`], for a success.
    #[inline]
    pub fn post_success(&mut self, ctx: &mut Context<'_>, cq: CqId, mut completion: Completion) {
        if self.faults.is_some() || self.is_observed {
            return self.post_completion(ctx, cq, completion, Reason::None);
        }
        completion.timestamp = ctx.now.nanos();
        self.push_cqe(ctx, cq, &completion, CqeFaults::default());
    }

    /// Writes a CQE, with the faults that concern it.
    pub(crate) fn write_cqe(
        &mut self,
        ctx: &mut Context<'_>,
        cq: CqId,
        mut completion: Completion,
        reason: Reason,
        faults: CqeFaults,
    ) {
        if self.settings.placement != Placement::InOrder {
            let role = match completion.opcode.is_receive() {
                true => WriterRole::Responder,
                false => WriterRole::Requester,
            };
            ctx.memory.order(completion.qpn, role);
        }
        completion.timestamp = ctx.now.nanos();
        if is_failure(completion.status) {
            self.counters.completion_errors += 1;
        } else if !completion.status.is_success() {
            self.counters.wr_flushed += 1;
        }
        if self.is_observed {
            ctx.emit(Event::Completed { cq, completion, reason });
        }
        self.push_cqe(ctx, cq, &completion, faults);
    }

    #[inline]
    fn push_cqe(&mut self, ctx: &mut Context<'_>, cq: CqId, completion: &Completion, faults: CqeFaults) {
        let Some(queue) = self.objects.completion_queues.get_mut(cq.0) else { return };
        if queue.failed {
            return;
        }
        if faults.overflow || queue.ring.push(completion).is_err() {
            queue.failed = true;
            self.counters.cq_overflow += 1;
            self.objects.overflowed_cqs.push(cq);
            let client = Some(queue.client);
            ctx.emit(Event::AsyncEventRaised { client, event: AsyncEvent::CompletionQueueError(cq) });
            return;
        }
        let urgent = completion.flags.contains(CompletionFlags::SOLICITED) || !completion.status.is_success();
        if queue.ring.claim_notification(urgent) && !faults.drop_notification {
            ctx.emit(Event::CompletionNotified { cq });
        }
    }

    /// Pops a receive WQE from a shared receive queue: fills `sges`, returns its wr_id.
    pub fn pop_srq_wqe(
        &mut self,
        ctx: &mut Context<'_>,
        srq: SrqId,
        sges: &mut Vec<Sge>,
    ) -> Result<Option<u64>, CorruptRing> {
        let Some(queue) = self.objects.shared_receive_queues.get_mut(srq.0) else { return Ok(None) };
        let client = Some(queue.client);
        let popped = queue.pop_wqe(sges).inspect_err(|_| {
            ctx.emit(Event::AsyncEventRaised { client, event: AsyncEvent::SharedReceiveQueueError(srq) });
        })?;
        Ok(popped.map(|(wr_id, limit_reached)| {
            if limit_reached {
                ctx.emit(Event::AsyncEventRaised { client, event: AsyncEvent::SharedReceiveQueueLimit(srq) });
            }
            wr_id
        }))
    }

    /// Calls `each` with the translated parts of `sges` that contain bytes `offset..offset + length`.
    fn for_each_sge_range(
        &self,
        pd: PdId,
        sges: &[Sge],
        mut offset: u64,
        length: usize,
        required: AccessFlags,
        mut each: impl FnMut(TranslatedAddress, core::ops::Range<usize>, u64) -> Result<(), AccessError>,
    ) -> Result<(), AccessError> {
        let mut done = 0;
        for sge in sges {
            if done == length {
                break;
            }
            let size = u64::from(sge.length);
            if offset >= size {
                offset -= size;
                continue;
            }
            let take = (size - offset).min((length - done) as u64) as usize;
            let located =
                self.objects.protection.check_local_access(pd, sge, offset as u32, take as u32, required)?;
            each(located, done..done + take, sge.address.wrapping_add(offset))?;
            done += take;
            offset = 0;
        }
        debug_assert_eq!(done, length, "the caller has checked the length of the list");
        Ok(())
    }

    /// Copies bytes `offset..` of a gather list to `into`.
    #[inline]
    pub fn gather(
        &self,
        ctx: &Context<'_>,
        pd: PdId,
        sges: &[Sge],
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), AccessError> {
        let memory = &*ctx.memory;
        self.for_each_sge_range(pd, sges, offset, into.len(), AccessFlags::empty(), |located, range, _| {
            memory
                .read(located.memory, located.offset, &mut into[range])
                .map_err(|fault| located.to_access_error(fault))
        })
    }

    /// Checks the access to all entries of a gather list.
    pub fn check_gather_list(&self, pd: PdId, sges: &[Sge]) -> Result<(), AccessError> {
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            self.objects.protection.check_local_access(pd, sge, 0, sge.length, AccessFlags::empty())?;
        }
        Ok(())
    }

    /// Copies `from` to bytes `offset..` of a scatter list.
    pub fn scatter(
        &self,
        ctx: &mut Context<'_>,
        (qp, role, psn): (Qpn, WriterRole, Psn),
        pd: PdId,
        sges: &[Sge],
        offset: u64,
        from: &[u8],
    ) -> Result<(), AccessError> {
        let Context { now, memory, events } = ctx;
        let origin = WriteOrigin { qp, role, first_psn: psn, now_ns: now.nanos() };
        self.for_each_sge_range(
            pd,
            sges,
            offset,
            from.len(),
            AccessFlags::LOCAL_WRITE,
            |located, range, address| {
                let length = range.len() as u32;
                memory
                    .place(located.memory, located.offset, &from[range], &origin)
                    .map_err(|fault| located.to_access_error(fault))?;
                if self.is_observed {
                    events(*now, &Event::MemoryWritten { qp, key: located.key, address, length, psn });
                }
                Ok(())
            },
        )
    }
}
