//! Payload that is moved for several packets at once, where every access to memory costs much by itself.
//!
//! Nothing is decided here: each packet is planned or checked, executed and told of in its own turn, and one whose
//! payload could not be moved ahead moves it then, so that a fault is found by the packet that it belongs to.

use super::QueuePair;
use super::planned_packet::PlannedPacket;
use super::requester_state::SendWqe;
use super::responder_state::PendingResponse;
use crate::hca_state::HcaState;
use crate::memory::{MemoryId, MemoryLocation};
use crate::{Context, DeviceLimits, PdId};
use alloc::vec::Vec;
use core::mem::discriminant;
use softhca_queue::{AccessFlags, Operation as Request, Sge};
use softhca_wire::{ICRC_LEN, ImmOrInvalidate, Opcode, Operation, Position, Psn, TransportHeader};

/// The most packets whose payload is moved at once.
pub(crate) const MAX_BATCH: usize = 64;

pub(crate) const NO_LOCATION: MemoryLocation = MemoryLocation { memory: MemoryId(0), offset: 0, length: 0 };

/// Payload that stands in the buffer of a run although its packets are still to be planned.
#[derive(Default)]
pub(crate) struct ReadAhead {
    reply: bool,
    /// The packet that carries the next of it, and where in the buffer that is.
    psn: Psn,
    at: usize,
    /// Bytes of each packet but the last, and from one to the next.
    piece: usize,
    stride: usize,
    left: usize,
}

impl ReadAhead {
    /// Whether the payload of the planned packet stands at `at` already.
    #[inline]
    pub fn holds(&mut self, plan: &PlannedPacket, at: usize, payload: usize) -> bool {
        if self.left == 0 {
            return false;
        }
        let is_next = (plan.is_response, plan.header.bth.psn, at) == (self.reply, self.psn, self.at)
            && payload == self.left.min(self.piece);
        self.psn = self.psn.plus(1);
        self.at += self.stride;
        self.left = if is_next { self.left - payload } else { 0 };
        is_next
    }
}

/// Bytes of one message that stand behind each other in memory.
#[derive(Clone, Copy)]
pub(crate) struct ContiguousRange {
    memory: MemoryId,
    offset: u64,
    length: u64,
    /// Bytes of the message from there on, if that is known.
    pub bytes_left_in_message: Option<u64>,
}

impl ContiguousRange {
    /// The first `length` bytes, if there are as many.
    pub fn split_front(&mut self, length: usize) -> Option<MemoryLocation> {
        let size = length as u64;
        self.length = self.length.checked_sub(size)?;
        let place = MemoryLocation { memory: self.memory, offset: self.offset, length };
        self.offset += size;
        self.bytes_left_in_message = self.bytes_left_in_message.map(|rest| rest.saturating_sub(size));
        Some(place)
    }
}

impl HcaState {
    /// The bytes from `offset` on that are in one entry of a list.
    fn contiguous_range(
        &self,
        domain: PdId,
        entries: &[Sge],
        mut offset: u64,
        needs: AccessFlags,
    ) -> Option<ContiguousRange> {
        for entry in entries {
            let size = u64::from(entry.length);
            if offset >= size {
                offset -= size;
                continue;
            }
            let (skip, length) = (offset as u32, entry.length - offset as u32);
            let located = self.protection.check_local_access(domain, entry, skip, length, needs).ok()?;
            let length = u64::from(length);
            return Some(ContiguousRange {
                memory: located.memory,
                offset: located.offset,
                length,
                bytes_left_in_message: None,
            });
        }
        None
    }
}

impl QueuePair {
    /// Reads the payload of the planned packet of `size` bytes, which will be at `at`, and of those behind it into
    /// `into`, where each will be looked for: at most `packets`. Nothing is there if that does not pay, or not work.
    pub(crate) fn read_ahead(
        &self,
        card: &HcaState,
        ctx: &Context<'_>,
        plan: &PlannedPacket,
        (at, size): (usize, usize),
        into: &mut [u8],
        packets: usize,
    ) -> Option<ReadAhead> {
        let piece = plan.payload_length as usize;
        // Who is slowed down sends a packet now and then.
        if packets < 2 || piece == 0 || self.rate_control.is_some() {
            return None;
        }
        let opcode = plan.header.bth.opcode;
        let stride = match opcode.position() {
            Position::Only => size,
            Position::Last => return None,
            Position::First | Position::Middle => {
                let (service, operation) = (opcode.service(), opcode.operation());
                let middle = Opcode::new(service, operation, Position::Middle, ImmOrInvalidate::None)?;
                piece + ICRC_LEN + middle.header_length()
            }
        };
        let most = packets.min(into.len().checked_sub(piece)? / stride + 1).min(MAX_BATCH);
        let mut places = [NO_LOCATION; MAX_BATCH];
        let count = match opcode.position() {
            Position::Only if plan.is_response => 0,
            Position::Only => self.single_packet_locations(card, piece, &mut places[..most]),
            _ => self.message_locations(card, plan, piece, &mut places[..most]),
        };
        if count < 2 || !ctx.memory.read_batch(&places[..count], into, stride) {
            return None;
        }
        let left = (count - 1) * piece + places[count - 1].length;
        Some(ReadAhead { reply: plan.is_response, psn: plan.header.bth.psn, at, piece, stride, left })
    }

    /// Where the payload of the planned packet and of those behind it in its message is.
    fn message_locations(
        &self,
        card: &HcaState,
        plan: &PlannedPacket,
        piece: usize,
        places: &mut [MemoryLocation],
    ) -> usize {
        let found = if plan.is_response {
            self.read_response_source(card, plan)
        } else {
            self.request_range(card, plan)
        };
        let Some(mut stretch) = found else { return 0 };
        let mut count = 0;
        for place in places {
            let length = stretch.bytes_left_in_message.unwrap_or(0).min(piece as u64) as usize;
            match stretch.split_front(length) {
                Some(next) if length > 0 => *place = next,
                _ => break,
            }
            count += 1;
        }
        count
    }

    /// Where the payload of the request that is being sent is and of those behind it, as far as each has one packet and
    /// they are all alike.
    fn single_packet_locations(&self, card: &HcaState, piece: usize, places: &mut [MemoryLocation]) -> usize {
        let mut works = self.requester.wqes.iter().skip(self.requester.wqe_index);
        let Some(first) = works.next() else { return 0 };
        let alike = |work: &&SendWqe| {
            work.packets == 1
                && work.length as usize == piece
                && work.outcome.is_none()
                && !work.is_inline()
                && kind(work) == kind(first)
        };
        let mut count = 0;
        for (work, place) in core::iter::once(first).chain(works).take_while(alike).zip(places) {
            let stretch =
                self.pd.and_then(|domain| card.contiguous_range(domain, &work.sges, 0, AccessFlags::empty()));
            let Some(next) = stretch.and_then(|mut stretch| stretch.split_front(piece)) else { break };
            *place = next;
            count += 1;
        }
        count
    }

    /// What the request that is being sent has from the planned packet on.
    fn request_range(&self, card: &HcaState, plan: &PlannedPacket) -> Option<ContiguousRange> {
        let work = &self.requester.wqes[self.requester.wqe_index];
        if work.is_inline() {
            return None;
        }
        let stretch = card.contiguous_range(self.pd?, &work.sges, plan.offset, AccessFlags::empty())?;
        Some(ContiguousRange { bytes_left_in_message: Some(u64::from(work.length) - plan.offset), ..stretch })
    }

    /// What the read that is being answered has from the planned packet on.
    fn read_response_source(&self, card: &HcaState, plan: &PlannedPacket) -> Option<ContiguousRange> {
        let Some(PendingResponse::ReadResponse { reth: remote, pd: domain, .. }) =
            self.responder.pending_responses.front()
        else {
            return None;
        };
        let (address, rest) =
            (remote.virtual_address.wrapping_add(plan.offset), remote.dma_length - plan.offset as u32);
        let target = card
            .protection
            .check_remote_access(*domain, self.qpn, remote.rkey, address, rest, AccessFlags::REMOTE_READ)
            .ok()?;
        let rest = u64::from(rest);
        Some(ContiguousRange {
            memory: target.memory,
            offset: target.offset,
            length: rest,
            bytes_left_in_message: Some(rest),
        })
    }

    /// Where the payload of the response with `psn` goes, and of those behind it, if it is the one that is due.
    pub(crate) fn read_response_target(&self, card: &HcaState, psn: Psn) -> Option<ContiguousRange> {
        let work = self.requester.wqes.front()?;
        let is_due = self.state.accepts_responses()
            && matches!(work.operation.0, Request::Read { .. })
            && work.outcome.is_none()
            && psn == self.requester.unacked_psn
            && psn.is_within(work.first_psn, work.packets)
            && self.requester.is_outstanding_psn(psn);
        let domain = self.pd.filter(|_| is_due)?;
        let offset = u64::from(psn.since(work.first_psn)) * u64::from(self.attributes.path_mtu.bytes());
        let stretch = card.contiguous_range(domain, &work.sges, offset, AccessFlags::LOCAL_WRITE)?;
        Some(ContiguousRange { bytes_left_in_message: Some(u64::from(work.length) - offset), ..stretch })
    }

    /// Where the payload of the request with `psn` goes, and of those behind it, if it continues the open message.
    pub(crate) fn in_progress_target(
        &self,
        card: &HcaState,
        header: &TransportHeader,
    ) -> Option<ContiguousRange> {
        let open = self
            .responder
            .in_progress_message
            .filter(|open| open.operation == header.bth.opcode.operation())?;
        if open.operation == Operation::Send {
            let buffer = self.responder.receive_wqe.as_ref()?;
            let domain = self.receive_pd(card)?;
            return card.contiguous_range(
                domain,
                &buffer.sges,
                open.bytes_received,
                AccessFlags::LOCAL_WRITE,
            );
        }
        let remote = open.reth?;
        let target = self.check_remote_access(card, header, remote, AccessFlags::REMOTE_WRITE).ok()?;
        let rest = u64::from(remote.dma_length).checked_sub(open.bytes_received)?;
        let offset = target.offset + open.bytes_received;
        Some(ContiguousRange {
            memory: target.memory,
            offset,
            length: rest,
            bytes_left_in_message: Some(rest),
        })
    }

    /// Where the payload of a request goes that begins a message, when `before` receives will have been taken.
    pub(crate) fn new_message_target(
        &self,
        card: &HcaState,
        header: &TransportHeader,
        before: u32,
        scatter: &mut Vec<Sge>,
    ) -> Option<ContiguousRange> {
        if header.bth.opcode.operation() == Operation::Send {
            // What others may take too cannot be foreseen.
            let ring = self.responder.ring.as_ref().filter(|_| self.srq.is_none())?;
            let is_there = self.responder.receive_wqe.is_none() && ring.peek(before, scatter);
            return card.contiguous_range(
                self.pd.filter(|_| is_there)?,
                scatter,
                0,
                AccessFlags::LOCAL_WRITE,
            );
        }
        let remote =
            header.reth.filter(|remote| (1..=DeviceLimits::HCA.max_msg_sz).contains(&remote.dma_length))?;
        let target = self.check_remote_access(card, header, remote, AccessFlags::REMOTE_WRITE).ok()?;
        let rest = u64::from(remote.dma_length);
        Some(ContiguousRange {
            memory: target.memory,
            offset: target.offset,
            length: rest,
            bytes_left_in_message: Some(rest),
        })
    }
}

/// What requests have in common whose packets have headers of one length.
fn kind(work: &SendWqe) -> impl PartialEq {
    let trailer = match work.operation.0 {
        Request::Send(trailer) => Some(discriminant(&trailer)),
        _ => None,
    };
    let is_immediate = matches!(work.operation.0, Request::Write { imm_data: Some(_), .. });
    (discriminant(&work.operation.0), trailer, is_immediate)
}
