//! Copies the payload of several packets at once, for memory in which every access is expensive.
//!
//! This module decides nothing. Each packet is planned or checked, executed and reported in its own turn. A packet
//! whose payload could not be copied ahead copies it then, so that the packet that causes a fault also reports it.

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

/// The maximum number of packets whose payload is copied at once.
pub(crate) const MAX_BATCH: usize = 64;

pub(crate) const NO_LOCATION: MemoryLocation = MemoryLocation { memory: MemoryId(0), offset: 0, length: 0 };

/// Payload that is already in the batch buffer although its packets are not planned yet.
#[derive(Default)]
pub(crate) struct ReadAhead {
    reply: bool,
    /// The packet that carries the next part, and the position of that part in the buffer.
    psn: Psn,
    at: usize,
    /// The payload bytes of each packet but the last, and the distance between two packets.
    piece: usize,
    stride: usize,
    left: usize,
}

impl ReadAhead {
    /// Whether the payload of the planned packet is already at `at`.
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

/// Consecutive bytes of one message in memory.
#[derive(Clone, Copy)]
pub(crate) struct ContiguousRange {
    memory: MemoryId,
    offset: u64,
    length: u64,
    /// The remaining bytes of the message, if known.
    pub bytes_left_in_message: Option<u64>,
}

impl ContiguousRange {
    /// Splits off the first `length` bytes, if the range has that many.
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
    /// The bytes from `offset` on within one entry of a scatter/gather list.
    fn contiguous_range(
        &self,
        pd: PdId,
        sges: &[Sge],
        mut offset: u64,
        needs: AccessFlags,
    ) -> Option<ContiguousRange> {
        for sge in sges {
            let size = u64::from(sge.length);
            if offset >= size {
                offset -= size;
                continue;
            }
            let (skip, length) = (offset as u32, sge.length - offset as u32);
            let located = self.protection.check_local_access(pd, sge, skip, length, needs).ok()?;
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
    /// Reads the payload of the planned packet of `size` bytes at `at`, and of the packets after it, into `into`: at
    /// most `packets`, each at its position in the batch. `None` if that does not pay off or fails.
    pub(crate) fn read_ahead(
        &self,
        hca: &HcaState,
        ctx: &Context<'_>,
        plan: &PlannedPacket,
        (at, size): (usize, usize),
        into: &mut [u8],
        packets: usize,
    ) -> Option<ReadAhead> {
        let piece = plan.payload_length as usize;
        // A paced queue pair sends single packets.
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
            Position::Only => self.single_packet_locations(hca, piece, &mut places[..most]),
            _ => self.message_locations(hca, plan, piece, &mut places[..most]),
        };
        if count < 2 || !ctx.memory.read_batch(&places[..count], into, stride) {
            return None;
        }
        let left = (count - 1) * piece + places[count - 1].length;
        Some(ReadAhead { reply: plan.is_response, psn: plan.header.bth.psn, at, piece, stride, left })
    }

    /// The locations of the payload of the planned packet and of the packets after it in its message.
    fn message_locations(
        &self,
        hca: &HcaState,
        plan: &PlannedPacket,
        piece: usize,
        places: &mut [MemoryLocation],
    ) -> usize {
        let found = if plan.is_response {
            self.read_response_source(hca, plan)
        } else {
            self.request_range(hca, plan)
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

    /// The locations of the payload of the current request and of the requests after it, as long as each has one
    /// packet and the same shape.
    fn single_packet_locations(&self, hca: &HcaState, piece: usize, places: &mut [MemoryLocation]) -> usize {
        let mut wqes = self.requester.wqes.iter().skip(self.requester.wqe_index);
        let Some(first) = wqes.next() else { return 0 };
        let alike = |wqe: &&SendWqe| {
            wqe.packets == 1
                && wqe.length as usize == piece
                && wqe.outcome.is_none()
                && !wqe.is_inline()
                && kind(wqe) == kind(first)
        };
        let mut count = 0;
        for (wqe, place) in core::iter::once(first).chain(wqes).take_while(alike).zip(places) {
            let stretch = self.pd.and_then(|pd| hca.contiguous_range(pd, &wqe.sges, 0, AccessFlags::empty()));
            let Some(next) = stretch.and_then(|mut stretch| stretch.split_front(piece)) else { break };
            *place = next;
            count += 1;
        }
        count
    }

    /// The payload of the current request from the planned packet on.
    fn request_range(&self, hca: &HcaState, plan: &PlannedPacket) -> Option<ContiguousRange> {
        let wqe = &self.requester.wqes[self.requester.wqe_index];
        if wqe.is_inline() {
            return None;
        }
        let stretch = hca.contiguous_range(self.pd?, &wqe.sges, plan.offset, AccessFlags::empty())?;
        Some(ContiguousRange { bytes_left_in_message: Some(u64::from(wqe.length) - plan.offset), ..stretch })
    }

    /// The payload of the READ that is being answered from the planned packet on.
    fn read_response_source(&self, hca: &HcaState, plan: &PlannedPacket) -> Option<ContiguousRange> {
        let Some(PendingResponse::ReadResponse { reth: remote, pd, .. }) =
            self.responder.pending_responses.front()
        else {
            return None;
        };
        let (address, rest) =
            (remote.virtual_address.wrapping_add(plan.offset), remote.dma_length - plan.offset as u32);
        let target = hca
            .protection
            .check_remote_access(*pd, self.qpn, remote.rkey, address, rest, AccessFlags::REMOTE_READ)
            .ok()?;
        let rest = u64::from(rest);
        Some(ContiguousRange {
            memory: target.memory,
            offset: target.offset,
            length: rest,
            bytes_left_in_message: Some(rest),
        })
    }

    /// The target of the READ response `psn` and of the responses after it, if it is the expected one.
    pub(crate) fn read_response_target(&self, hca: &HcaState, psn: Psn) -> Option<ContiguousRange> {
        let wqe = self.requester.wqes.front()?;
        let is_due = self.state.accepts_responses()
            && matches!(wqe.operation.0, Request::Read { .. })
            && wqe.outcome.is_none()
            && psn == self.requester.unacked_psn
            && psn.is_within(wqe.first_psn, wqe.packets)
            && self.requester.is_outstanding_psn(psn);
        let pd = self.pd.filter(|_| is_due)?;
        let offset = u64::from(psn.since(wqe.first_psn)) * u64::from(self.attributes.path_mtu.bytes());
        let stretch = hca.contiguous_range(pd, &wqe.sges, offset, AccessFlags::LOCAL_WRITE)?;
        Some(ContiguousRange { bytes_left_in_message: Some(u64::from(wqe.length) - offset), ..stretch })
    }

    /// The target of the request with `psn` and of those after it, if it continues the message in progress.
    pub(crate) fn in_progress_target(
        &self,
        hca: &HcaState,
        header: &TransportHeader,
    ) -> Option<ContiguousRange> {
        let message = self
            .responder
            .in_progress_message
            .filter(|message| message.operation == header.bth.opcode.operation())?;
        if message.operation == Operation::Send {
            let buffer = self.responder.receive_wqe.as_ref()?;
            let pd = self.receive_pd(hca)?;
            return hca.contiguous_range(pd, &buffer.sges, message.bytes_received, AccessFlags::LOCAL_WRITE);
        }
        let remote = message.reth?;
        let target = self.check_remote_access(hca, header, remote, AccessFlags::REMOTE_WRITE).ok()?;
        let rest = u64::from(remote.dma_length).checked_sub(message.bytes_received)?;
        let offset = target.offset + message.bytes_received;
        Some(ContiguousRange {
            memory: target.memory,
            offset,
            length: rest,
            bytes_left_in_message: Some(rest),
        })
    }

    /// The target of a request that starts a message, after `before` receives have been consumed.
    pub(crate) fn new_message_target(
        &self,
        hca: &HcaState,
        header: &TransportHeader,
        before: u32,
        scatter: &mut Vec<Sge>,
    ) -> Option<ContiguousRange> {
        if header.bth.opcode.operation() == Operation::Send {
            // Another queue pair may consume a shared receive first.
            let ring = self.responder.ring.as_ref().filter(|_| self.srq.is_none())?;
            let is_there = self.responder.receive_wqe.is_none() && ring.peek(before, scatter);
            return hca.contiguous_range(self.pd.filter(|_| is_there)?, scatter, 0, AccessFlags::LOCAL_WRITE);
        }
        let remote =
            header.reth.filter(|remote| (1..=DeviceLimits::HCA.max_msg_sz).contains(&remote.dma_length))?;
        let target = self.check_remote_access(hca, header, remote, AccessFlags::REMOTE_WRITE).ok()?;
        let rest = u64::from(remote.dma_length);
        Some(ContiguousRange {
            memory: target.memory,
            offset: target.offset,
            length: rest,
            bytes_left_in_message: Some(rest),
        })
    }
}

/// Requests with equal shapes have headers of equal length.
fn kind(wqe: &SendWqe) -> impl PartialEq {
    let trailer = match wqe.operation.0 {
        Request::Send(trailer) => Some(discriminant(&trailer)),
        _ => None,
    };
    let is_immediate = matches!(wqe.operation.0, Request::Write { imm_data: Some(_), .. });
    (discriminant(&wqe.operation.0), trailer, is_immediate)
}
