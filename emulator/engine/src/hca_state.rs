//! What all queue pairs of a card share.

use crate::completion_queue::CompletionQueue;
use crate::control_packets::ControlPackets;
use crate::event::is_failure;
use crate::protection::{Protection, TranslatedAddress};
use crate::shared_receive_queue::SharedReceiveQueue;
use crate::table::Table;
use crate::timers::Timers;
use crate::{
    AccessError, AddressVector, AsyncEvent, ClientId, Context, Counters, CqId, DeviceLimits, Event, PdId,
    PortState, Reason, Settings, SrqId,
};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_queue::{AccessFlags, Completion, CompletionFlags, CorruptRing, Sge};
use softhca_wire::{Gid, Psn, Qpn};

pub(crate) struct AddressHandle {
    pub client: ClientId,
    pub pd: PdId,
    pub vector: AddressVector,
}

pub(crate) struct XrcDomain {
    pub client: ClientId,
    pub users: u32,
    /// Its client is gone: it goes with its last user.
    pub orphaned: bool,
}

/// What every packet touches stands together and first: with a thousand cards, cards do not fit the caches.
#[repr(C)]
pub(crate) struct HcaState {
    pub transmit_queue: VecDeque<Qpn>,
    /// What the card itself is to send.
    pub control_packets: ControlPackets,
    pub timers: Timers,
    /// When queue pairs whose rate is limited may send again.
    pub pacing_timers: Timers,
    /// Completion queues that overflowed and whose queue pairs are still to be stopped.
    pub overflowed_cqs: Vec<CqId>,
    /// Priorities that the port was told to stop.
    pub paused_priorities: u8,
    pub settings: Settings,
    pub port_state: PortState,
    /// The payload of the packet at hand is in its place already.
    pub payload_placed: bool,
    pub protection: Protection,
    pub counters: Counters,
    /// Ports that do not answer now: no timer towards them runs out.
    pub stalled_peers: BTreeSet<IpAddr>,
    pub completion_queues: Table<CompletionQueue>,
    pub shared_receive_queues: Table<SharedReceiveQueue>,
    pub address_handles: Table<AddressHandle>,
    pub xrc_domains: Table<XrcDomain>,
    pub gids: Vec<Gid>,
    /// The queue pairs that each multicast group reaches, in order of attachment.
    pub multicast_groups: BTreeMap<Gid, Vec<Qpn>>,
    /// Queue pairs that wait until the driver may send to their destination.
    pub blocked_qps: BTreeMap<IpAddr, Vec<Qpn>>,
    /// The queue pairs that wait for each priority to go on.
    pub paused_qps: [Vec<Qpn>; 8],
}

impl HcaState {
    pub fn new(settings: Settings, gids: Vec<Gid>, limits: &DeviceLimits) -> HcaState {
        HcaState {
            settings,
            port_state: PortState::Active,
            payload_placed: false,
            gids,
            protection: Protection::new(limits),
            completion_queues: Table::new(limits.max_cq, 1),
            shared_receive_queues: Table::new(limits.max_srq, 1),
            address_handles: Table::new(limits.max_ah, 1),
            xrc_domains: Table::new(limits.max_xrcd, 1),
            multicast_groups: BTreeMap::new(),
            counters: Counters::default(),
            transmit_queue: VecDeque::new(),
            blocked_qps: BTreeMap::new(),
            timers: Timers::default(),
            pacing_timers: Timers::default(),
            paused_priorities: 0,
            paused_qps: Default::default(),
            control_packets: ControlPackets::default(),
            stalled_peers: BTreeSet::new(),
            overflowed_cqs: Vec::new(),
        }
    }

    pub fn gid(&self, index: u8) -> Gid {
        self.gids.get(usize::from(index)).copied().unwrap_or_default()
    }

    /// Reports a completion. A queue that is full fails, with everything that completes there.
    pub fn post_completion(
        &mut self,
        ctx: &mut Context<'_>,
        cq: CqId,
        mut completion: Completion,
        reason: Reason,
    ) {
        completion.vendor_error = reason.code();
        completion.timestamp = ctx.now.nanos();
        if is_failure(completion.status) {
            self.counters.completion_errors += 1;
        } else if !completion.status.is_success() {
            self.counters.wr_flushed += 1;
        }
        ctx.emit(Event::Completed { cq, completion, reason });
        let Some(queue) = self.completion_queues.get_mut(cq.0) else { return };
        if queue.failed {
            return;
        }
        if queue.ring.push(&completion).is_err() {
            queue.failed = true;
            self.counters.cq_overflow += 1;
            self.overflowed_cqs.push(cq);
            let client = Some(queue.client);
            ctx.emit(Event::AsyncEventRaised { client, event: AsyncEvent::CompletionQueueError(cq) });
            return;
        }
        let urgent = completion.flags.contains(CompletionFlags::SOLICITED) || !completion.status.is_success();
        if queue.ring.claim_notification(urgent) {
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
        let Some(queue) = self.shared_receive_queues.get_mut(srq.0) else { return Ok(None) };
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

    /// Calls `each` with the checked pieces of `entries` that hold bytes `offset..offset + length`.
    fn for_each_sge_range(
        &self,
        domain: PdId,
        entries: &[Sge],
        mut offset: u64,
        length: usize,
        needs: AccessFlags,
        mut each: impl FnMut(TranslatedAddress, core::ops::Range<usize>, u64) -> Result<(), AccessError>,
    ) -> Result<(), AccessError> {
        let mut done = 0;
        for entry in entries {
            if done == length {
                break;
            }
            let size = u64::from(entry.length);
            if offset >= size {
                offset -= size;
                continue;
            }
            let take = (size - offset).min((length - done) as u64) as usize;
            let located =
                self.protection.check_local_access(domain, entry, offset as u32, take as u32, needs)?;
            each(located, done..done + take, entry.address.wrapping_add(offset))?;
            done += take;
            offset = 0;
        }
        debug_assert_eq!(done, length, "the caller checked that the entries have room");
        Ok(())
    }

    /// Copies bytes `offset..` of a gather list into `into`.
    #[inline]
    pub fn gather(
        &self,
        ctx: &Context<'_>,
        domain: PdId,
        entries: &[Sge],
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), AccessError> {
        let memory = &*ctx.memory;
        self.for_each_sge_range(
            domain,
            entries,
            offset,
            into.len(),
            AccessFlags::empty(),
            |located, range, _| {
                memory
                    .read(located.memory, located.offset, &mut into[range])
                    .map_err(|fault| located.to_access_error(fault))
            },
        )
    }

    /// Checks that every entry of a list may be used, without touching it.
    pub fn check_sges(&self, domain: PdId, entries: &[Sge], needs: AccessFlags) -> Result<(), AccessError> {
        for entry in entries.iter().filter(|entry| entry.length > 0) {
            self.protection.check_local_access(domain, entry, 0, entry.length, needs)?;
        }
        Ok(())
    }

    /// Copies `from` to bytes `offset..` of a scatter list.
    pub fn scatter(
        &self,
        ctx: &mut Context<'_>,
        (qp, psn): (Qpn, Psn),
        domain: PdId,
        entries: &[Sge],
        offset: u64,
        from: &[u8],
    ) -> Result<(), AccessError> {
        let Context { now, memory, events } = ctx;
        self.for_each_sge_range(
            domain,
            entries,
            offset,
            from.len(),
            AccessFlags::LOCAL_WRITE,
            |located, range, address| {
                let length = range.len() as u32;
                if !self.payload_placed {
                    memory
                        .write(located.memory, located.offset, &from[range])
                        .map_err(|fault| located.to_access_error(fault))?;
                }
                events(*now, &Event::MemoryWritten { qp, key: located.key, address, length, psn });
                Ok(())
            },
        )
    }
}
