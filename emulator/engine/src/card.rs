//! What all queue pairs of a card share.

use crate::completion_queue::CompletionQueue;
use crate::event::is_failure;
use crate::inbound::Buffer;
use crate::owing::Owing;
use crate::protection::{Located, Protection};
use crate::shared_receive::SharedReceiveQueue;
use crate::table::Table;
use crate::timers::Timers;
use crate::{
    AddressVector, AsyncEvent, ClientId, Context, Counters, CqId, Denied, Event, Limits, PdId, PortState,
    Reason, Settings, SrqId,
};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_queue::{Access, Completion, CompletionFlags, Impossible, Sge};
use softhca_wire::{Gid, Psn, Qpn};

pub(crate) struct AddressHandle {
    pub client: ClientId,
    pub domain: PdId,
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
pub(crate) struct Card {
    pub ready: VecDeque<Qpn>,
    /// What the card itself is to send.
    pub owing: VecDeque<Owing>,
    pub timers: Timers,
    /// When queue pairs whose rate is limited may send again.
    pub pacers: Timers,
    /// Completion queues that overflowed and whose queue pairs are still to be stopped.
    pub overflowed: Vec<CqId>,
    /// Priorities that the port was told to stop.
    pub paused: u8,
    pub settings: Settings,
    pub port: PortState,
    /// The payload of the packet at hand is in its place already.
    pub is_placed: bool,
    pub protection: Protection,
    pub counters: Counters,
    /// Ports that do not answer now: no timer towards them runs out.
    pub stalled: BTreeSet<IpAddr>,
    pub completion_queues: Table<CompletionQueue>,
    pub shared_receive_queues: Table<SharedReceiveQueue>,
    pub address_handles: Table<AddressHandle>,
    pub xrc_domains: Table<XrcDomain>,
    pub gids: Vec<Gid>,
    /// The queue pairs that each multicast group reaches, in order of attachment.
    pub groups: BTreeMap<Gid, Vec<Qpn>>,
    /// Queue pairs that wait until the driver may send to their destination.
    pub parked: BTreeMap<IpAddr, Vec<Qpn>>,
    /// The queue pairs that wait for each priority to go on.
    pub halted: [Vec<Qpn>; 8],
    /// What of that may not go now.
    pub owing_held: Vec<Owing>,
}

impl Card {
    pub fn new(settings: Settings, gids: Vec<Gid>, limits: &Limits) -> Card {
        Card {
            settings,
            port: PortState::Active,
            is_placed: false,
            gids,
            protection: Protection::new(limits),
            completion_queues: Table::new(limits.completion_queues, 1),
            shared_receive_queues: Table::new(limits.shared_receive_queues, 1),
            address_handles: Table::new(limits.address_handles, 1),
            xrc_domains: Table::new(limits.xrc_domains, 1),
            groups: BTreeMap::new(),
            counters: Counters::default(),
            ready: VecDeque::new(),
            parked: BTreeMap::new(),
            timers: Timers::default(),
            pacers: Timers::default(),
            paused: 0,
            halted: Default::default(),
            owing: VecDeque::new(),
            owing_held: Vec::new(),
            stalled: BTreeSet::new(),
            overflowed: Vec::new(),
        }
    }

    pub fn gid(&self, index: u8) -> Gid {
        self.gids.get(usize::from(index)).copied().unwrap_or_default()
    }

    /// Reports a completion. A queue that is full fails, with everything that completes there.
    pub fn complete(&mut self, ctx: &mut Context<'_>, cq: CqId, mut completion: Completion, reason: Reason) {
        completion.vendor_error = reason.code();
        completion.timestamp = ctx.now.nanos();
        if is_failure(completion.status) {
            self.counters.completion_errors += 1;
        } else if !completion.status.is_success() {
            self.counters.wr_flushed += 1;
        }
        ctx.tell(Event::Completed { cq, completion, reason });
        let Some(queue) = self.completion_queues.get_mut(cq.0) else { return };
        if queue.failed {
            return;
        }
        if queue.ring.push(&completion).is_err() {
            queue.failed = true;
            self.counters.cq_overflow += 1;
            self.overflowed.push(cq);
            let client = Some(queue.client);
            ctx.tell(Event::Raised { client, event: AsyncEvent::CompletionQueueError(cq) });
            return;
        }
        let urgent = completion.flags.contains(CompletionFlags::SOLICITED) || !completion.status.is_success();
        if queue.ring.claim_notification(urgent) {
            ctx.tell(Event::Notified { cq });
        }
    }

    /// Takes a receive from a shared queue.
    pub fn take_shared(
        &mut self,
        ctx: &mut Context<'_>,
        number: SrqId,
        buffer: &mut Buffer,
    ) -> Result<bool, Impossible> {
        let Some(queue) = self.shared_receive_queues.get_mut(number.0) else { return Ok(false) };
        let taken = queue.take(&mut buffer.scatter).inspect_err(|_| {
            let event = AsyncEvent::SharedReceiveQueueError(number);
            ctx.tell(Event::Raised { client: Some(queue.client), event });
        })?;
        let Some((id, limit_passed)) = taken else { return Ok(false) };
        buffer.id = id;
        if limit_passed {
            let client = Some(queue.client);
            ctx.tell(Event::Raised { client, event: AsyncEvent::SharedReceiveQueueLimit(number) });
        }
        Ok(true)
    }

    /// Calls `each` with the checked pieces of `entries` that hold bytes `offset..offset + length`.
    fn pieces(
        &self,
        domain: PdId,
        entries: &[Sge],
        mut offset: u64,
        length: usize,
        needs: Access,
        mut each: impl FnMut(Located, core::ops::Range<usize>, u64) -> Result<(), Denied>,
    ) -> Result<(), Denied> {
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
            let located = self.protection.local(domain, entry, offset as u32, take as u32, needs)?;
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
    ) -> Result<(), Denied> {
        let memory = &*ctx.memory;
        self.pieces(domain, entries, offset, into.len(), Access::empty(), |located, range, _| {
            memory
                .read(located.memory, located.offset, &mut into[range])
                .map_err(|fault| located.unreachable(fault))
        })
    }

    /// Checks that every entry of a list may be used, without touching it.
    pub fn check_entries(&self, domain: PdId, entries: &[Sge], needs: Access) -> Result<(), Denied> {
        for entry in entries.iter().filter(|entry| entry.length > 0) {
            self.protection.local(domain, entry, 0, entry.length, needs)?;
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
    ) -> Result<(), Denied> {
        let Context { now, memory, events } = ctx;
        self.pieces(domain, entries, offset, from.len(), Access::LOCAL_WRITE, |located, range, address| {
            let length = range.len() as u32;
            if !self.is_placed {
                memory
                    .write(located.memory, located.offset, &from[range])
                    .map_err(|fault| located.unreachable(fault))?;
            }
            events.event(*now, &Event::MemoryWritten { qp, key: located.key, address, length, psn });
            Ok(())
        })
    }
}
