//! The messages of a capture: where they begin, whether their packets add up, and what a WRITE writes where.

use super::{CaptureConverter, RoceInfo};
use crate::log::Certainty;
use crate::log::inference::SeenPacket;
use crate::sequence::Arrival;
use softhca_wire::{Opcode, Operation, Position, Psn, Reth};

/// How many WRITEs back a packet may still belong to.
const RECENT_WRITES: usize = 64;

#[derive(Debug)]
pub(super) struct Message {
    pub(super) wr_id: u64,
    pub(super) flow: usize,
    pub(super) operation: &'static str,
    pub(super) first_psn: Psn,
    pub(super) last_psn: Psn,
    /// Packets that were captured, each once.
    pub(super) captured: u32,
    pub(super) bytes: u32,
    /// The length that its first packet announces.
    pub(super) announced: Option<u32>,
    /// The last packet of its answer that was captured.
    pub(super) answered_at: Option<usize>,
}

/// The message that the last request belongs to, as far as its packets add up.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenMessage {
    pub(super) operation: Operation,
    pub(super) announced: Option<u32>,
    pub(super) bytes: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RecentWrite {
    pub(super) first_psn: Psn,
    pub(super) reth: Reth,
    /// Bytes of its first packet: the path MTU, if it has more than one.
    pub(super) first_payload: u32,
}

impl CaptureConverter {
    /// Checks that the packets of a message add up.
    pub(super) fn check_message(
        &mut self,
        packet: SeenPacket,
        flow: usize,
        arrival: Arrival,
        payload: u32,
        reth: Option<Reth>,
    ) {
        let (position, operation) = (packet.opcode.position(), packet.opcode.operation());
        if arrival.is_behind() || !self.flows.get(flow).is_sequenced() {
            return;
        }
        let path_mtu = self.flows.get(flow).requests.path_mtu();
        let open = self.open_messages.remove(&flow);
        let mut problem = None;
        let is_data = matches!(operation, Operation::Send | Operation::Write);
        let open = match open.filter(|_| arrival == Arrival::Next) {
            // The packets before it are not in the capture.
            None => None,
            Some(Some(_)) if position.starts_message() => {
                problem = Some((
                    "message-boundary",
                    "it starts a message although the one before has not ended".into(),
                ));
                None
            }
            Some(Some(open)) if open.operation != operation => {
                problem = Some(("message-boundary", "it continues a message of another operation".into()));
                None
            }
            Some(None) if !position.starts_message() => {
                problem = Some(("message-boundary", "it continues a message that has not started".into()));
                None
            }
            Some(open) => open,
        };
        if is_data && matches!(position, Position::First | Position::Middle) && path_mtu != Some(payload) {
            let text = match path_mtu {
                Some(path_mtu) => format!(
                    "{payload} B in a packet that does not end its message; others of this connection have {path_mtu} B"
                ),
                None => format!("{payload} B in a packet that does not end its message: that is no path MTU"),
            };
            problem.get_or_insert(("path-mtu", text));
        }
        if position == Position::Last && is_data && payload == 0 {
            problem.get_or_insert(("message-boundary", "the last packet of a message has no payload".into()));
        }
        let announced = reth.filter(|_| position.starts_message()).map(|reth| reth.dma_length);
        let mut message = open.unwrap_or(OpenMessage { operation, announced, bytes: 0 });
        message.bytes += payload;
        let ends = position.ends_message();
        self.open_messages.insert(flow, (is_data && !ends).then_some(message));
        if is_data
            && ends
            && let Some(announced) = message.announced.filter(|announced| *announced != message.bytes)
        {
            let bytes = message.bytes;
            let text = format!("the message has {bytes} B, and its first packet announces {announced} B");
            problem.get_or_insert(("message-boundary", text));
        }
        if let Some((code, text)) = problem {
            self.inferences.entry(flow).or_default().irregular(packet, code, Certainty::Known, text);
        }
    }

    /// The message of a request, made if the request begins one.
    pub(super) fn message_of(
        &mut self,
        seen: &RoceInfo,
        begins: Option<usize>,
        arrival: Arrival,
        reth: Option<Reth>,
    ) -> Option<(usize, bool)> {
        let of_flow = self.messages_of_flow.entry(seen.flow).or_default();
        let announced = reth.map(|reth| reth.dma_length);
        let is_atomic = seen.opcode.operation().is_atomic();
        if begins.is_some() {
            let index = self.messages.len();
            self.messages.push(Message {
                wr_id: index as u64 + 1,
                flow: seen.flow,
                operation: operation_name(seen.opcode),
                first_psn: seen.psn,
                last_psn: seen.psn,
                captured: 1,
                bytes: announced.unwrap_or(if is_atomic { 8 } else { seen.payload }),
                announced,
                answered_at: None,
            });
            of_flow.push(index);
            return Some((index, true));
        }
        let index = *of_flow.get(self.flows.get(seen.flow).message_at(seen.psn)?)?;
        let message = &mut self.messages[index];
        if arrival != Arrival::Again {
            message.captured += 1;
            match announced {
                // The first packet came late.
                Some(length) => (message.bytes, message.announced) = (length, announced),
                None if message.announced.is_none() => message.bytes += seen.payload,
                None => {}
            }
            if seen.psn.is_before(message.first_psn) {
                message.first_psn = seen.psn;
            }
            if message.last_psn.is_before(seen.psn) {
                message.last_psn = seen.psn;
            }
        }
        Some((index, false))
    }

    /// The PSNs of a message, and how many of its packets are not in the capture.
    pub(super) fn packets_of(&self, message: &Message) -> (u32, u32) {
        let path_mtu = self.flows.get(message.flow).requests.path_mtu();
        let span = message.last_psn.since(message.first_psn) + 1;
        let announced =
            message.announced.zip(path_mtu).map(|(length, path_mtu)| length.div_ceil(path_mtu).max(1));
        let packets = announced.map_or(span, |announced| announced.max(span));
        let is_read = message.operation == "read";
        (packets, if is_read { 0 } else { packets.saturating_sub(message.captured) })
    }

    /// The key and address to which a packet of a WRITE puts its payload.
    pub(super) fn write_target(&mut self, seen: &RoceInfo, reth: Option<Reth>) -> Option<(u32, u64)> {
        if seen.opcode.operation() != Operation::Write || seen.payload == 0 {
            return None;
        }
        let writes = self.writes.entry(seen.flow).or_default();
        if let Some(reth) = reth {
            writes.push_back(RecentWrite { first_psn: seen.psn, reth, first_payload: seen.payload });
            if writes.len() > RECENT_WRITES {
                writes.pop_front();
            }
        }
        let write = writes.iter().rev().find(|write| !seen.psn.is_before(write.first_psn))?;
        let offset = u64::from(seen.psn.distance(write.first_psn) as u32) * u64::from(write.first_payload);
        (offset < u64::from(write.reth.dma_length))
            .then(|| (write.reth.rkey.0, write.reth.virtual_address.wrapping_add(offset)))
    }
}

/// The operation of a message as completions name it.
fn operation_name(opcode: Opcode) -> &'static str {
    match opcode.operation() {
        Operation::Write => "write",
        Operation::ReadRequest => "read",
        Operation::CompareSwap => "compare-swap",
        Operation::FetchAdd => "fetch-add",
        Operation::Flush => "flush",
        Operation::AtomicWrite => "atomic-write",
        _ => "send",
    }
}
