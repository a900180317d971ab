//! The model: the state of each request on memory, packet by packet, in the order of posting.
//!
//! Each direction of a connection has its own memory at both ends, so directions are independent, and within a direction
//! requests execute in the order of posting.

use super::walk::{BadKey, Request, Step, Verb, Walk};
use softhca_engine::QpType;
use softhca_tests::pair::pattern;
use softhca_types::CompletionStatus;
use std::sync::LazyLock;

/// Bytes of constant source data at the sender.
pub const SOURCE_BYTES: u64 = 32 << 10;
/// Bytes at the receiver that WRITEs, READs and atomics access.
pub const TARGET_BYTES: u64 = 24 << 10;
/// The max_inline_data of a queue pair.
pub const MAX_INLINE: u32 = 64;
/// Bytes of the GRH before the data of a datagram.
pub const GRH_BYTES: u32 = 40;

/// A request with all parameters resolved.
#[derive(Clone, Debug)]
pub struct ModelRequest {
    pub request: Request,
    pub length: u32,
    /// The first PSN, relative to that of the direction.
    pub first_psn: u32,
    pub packets: u32,
    /// The offset into the receiver's target.
    pub remote_offset: u64,
    /// The SGEs in the sender's memory.
    pub sges: Vec<(u64, u32)>,
    pub immediate: Option<u32>,
    pub fence: bool,
    pub inline: bool,
    /// The expected error, if the request is invalid.
    pub failure: Option<CompletionStatus>,
}

impl ModelRequest {
    pub fn end_psn(&self) -> u32 {
        self.first_psn + self.packets
    }

    /// Whether the request fails when its response is placed.
    pub fn fails_at_response(&self) -> bool {
        self.failure == Some(CompletionStatus::LocalProtectionError)
            && matches!(self.request.verb, Verb::Read | Verb::CompareSwap | Verb::FetchAdd)
    }

    /// Whether it consumes a receive of the peer.
    pub fn consumes_receive(&self) -> bool {
        self.request.verb == Verb::Send || self.request.verb == Verb::Write && self.immediate.is_some()
    }

    pub fn operands(&self) -> (u64, u64) {
        let compare = if self.request.remote_slot.is_multiple_of(2) { 0 } else { self.request.remote_slot };
        (compare, u64::from(self.first_psn) * 0x0101_0101_0101 + 1)
    }
}

impl Walk {
    /// Bytes of each receive.
    pub fn receive_bytes(&self) -> u32 {
        let header = if self.kind == QpType::Ud { GRH_BYTES } else { 0 };
        4 * self.mtu.bytes() + 8 + header
    }
}

/// One direction of a connection.
#[derive(Debug)]
pub struct DirectionModel {
    pub mtu: u32,
    pub kind: QpType,
    pub requests: Vec<ModelRequest>,
    /// Bytes at the sender: the source, then the destinations of READs and atomics.
    pub sender_bytes: u64,
    /// Bytes of each receive.
    pub receive_bytes: u32,
    /// The larger of the receives that the walk posts and those that are needed.
    pub receives: usize,
}

/// The memory after some requests of a direction.
pub struct ModelState {
    /// The receiver's target.
    pub target: Vec<u8>,
    /// Each request that consumed a receive, and the received bytes.
    pub received: Vec<(usize, Vec<u8>)>,
    /// The sender's memory with the results of completed READs and atomics.
    pub sender: Vec<u8>,
}

impl DirectionModel {
    /// The initial source data.
    pub fn initial_source(index: usize) -> Vec<u8> {
        initial_bytes(index)[..SOURCE_BYTES as usize].to_vec()
    }

    /// The initial contents of the receiver's target.
    pub fn initial_target(index: usize) -> Vec<u8> {
        initial_bytes(index)[77..77 + TARGET_BYTES as usize].to_vec()
    }

    fn new(walk: &Walk) -> DirectionModel {
        let mtu = walk.mtu.bytes();
        DirectionModel {
            mtu,
            kind: walk.kind,
            requests: Vec::new(),
            sender_bytes: SOURCE_BYTES,
            receive_bytes: walk.receive_bytes(),
            receives: 0,
        }
    }

    fn add(&mut self, request: &Request) {
        let number = self.requests.len();
        let mut length = (request.packets * self.mtu).saturating_add_signed(request.extra_bytes);
        let verb = request.verb;
        let brings = matches!(verb, Verb::Read | Verb::CompareSwap | Verb::FetchAdd);
        let is_atomic = brings && verb != Verb::Read;
        if is_atomic {
            length = 8;
        } else if self.kind == QpType::Ud {
            length = length.min(self.mtu);
        }
        let inline = request.inline && !brings && length <= MAX_INLINE;
        let last_read = self.requests.iter().rev().find(|deed| deed.request.verb == Verb::Read);
        let relayed =
            last_read.filter(|read| request.forwards_read && !brings && !inline && read.length >= length);
        let start = match relayed {
            Some(read) => read.sges[0].0,
            None if brings => self.sender_bytes,
            None => (number as u64 * 1237) % (SOURCE_BYTES - u64::from(length)),
        };
        let remote =
            if is_atomic { request.remote_slot * 8 } else { request.remote_slot * 8 + request.sges as u64 };
        // READs may be executed late or repeatedly: requests that modify the same bytes need a fence.
        let changes = matches!(verb, Verb::Write | Verb::CompareSwap | Verb::FetchAdd);
        let overlaps = self.requests.iter().any(|earlier| {
            earlier.request.verb == Verb::Read
                && earlier.remote_offset < remote + u64::from(length)
                && remote < earlier.remote_offset + u64::from(earlier.length)
        });
        let reliable = self.kind.is_reliable();
        let immediate = (request.immediate || !reliable) && matches!(verb, Verb::Send | Verb::Write);
        let first = self.requests.last().map_or(0, ModelRequest::end_psn);
        let packets = if is_atomic { 1 } else { length.div_ceil(self.mtu).max(1) };
        let sges = split(start, length, if is_atomic { 1 } else { request.sges });
        if brings {
            self.sender_bytes += u64::from(length);
        }
        let fence = reliable && (request.fence || relayed.is_some() || changes && overlaps);
        // The key of a zero-length access is not checked.
        let is_empty = length == 0;
        let failure = match request.bad_key {
            Some(BadKey::Lkey) if reliable && !is_empty && !inline => {
                Some(CompletionStatus::LocalProtectionError)
            }
            Some(BadKey::Rkey) if reliable && !is_empty && verb != Verb::Send => {
                Some(CompletionStatus::RemoteAccessError)
            }
            _ => None,
        };
        let deed = ModelRequest {
            request: request.clone(),
            length,
            first_psn: first,
            packets,
            remote_offset: remote,
            sges,
            immediate: immediate.then_some(number as u32 + 1),
            fence,
            inline,
            failure,
        };
        self.requests.push(deed);
    }

    /// The first request that cannot succeed.
    pub fn first_failing(&self) -> Option<usize> {
        self.requests.iter().position(|deed| deed.failure.is_some())
    }

    /// The number of PSNs of all requests.
    pub fn packets(&self) -> u32 {
        self.requests.last().map_or(0, ModelRequest::end_psn)
    }

    /// The bytes that a request sends, given the sender's memory.
    pub fn data(&self, deed: &ModelRequest, sender: &[u8]) -> Vec<u8> {
        deed.sges
            .iter()
            .flat_map(|(at, length)| &sender[*at as usize..][..*length as usize])
            .copied()
            .collect()
    }

    /// The initial memory of the sender.
    pub fn initial_sender(&self, index: usize) -> Vec<u8> {
        let mut sender = DirectionModel::initial_source(index);
        sender.resize(self.sender_bytes as usize, 0);
        sender
    }

    /// The memory after the receiver executed the packets that `executed` selects, in order.
    pub fn state_after(&self, index: usize, executed: impl Fn(u32) -> bool) -> ModelState {
        let mut state = ModelState {
            target: DirectionModel::initial_target(index),
            received: Vec::new(),
            sender: self.initial_sender(index),
        };
        for (number, deed) in self.requests.iter().enumerate() {
            let at = deed.remote_offset as usize;
            match deed.request.verb {
                Verb::Send | Verb::Write => {
                    let data = self.data(deed, &state.sender);
                    let is_send = deed.request.verb == Verb::Send;
                    for packet in (0..deed.packets).filter(|n| !is_send && executed(deed.first_psn + n)) {
                        let from = (packet * self.mtu) as usize;
                        let to = data.len().min(from + self.mtu as usize);
                        state.target[at + from..at + to].copy_from_slice(&data[from..to]);
                    }
                    if deed.consumes_receive() && (deed.first_psn..deed.end_psn()).all(&executed) {
                        state.received.push((number, if is_send { data } else { Vec::new() }));
                    }
                }
                _ if !executed(deed.first_psn) => {}
                Verb::Read => {
                    let data = state.target[at..at + deed.length as usize].to_vec();
                    let place = deed.sges[0].0 as usize;
                    state.sender[place..place + data.len()].copy_from_slice(&data);
                }
                Verb::CompareSwap | Verb::FetchAdd => {
                    let word = &mut state.target[at..at + 8];
                    let found = u64::from_ne_bytes(word.try_into().expect("eight bytes"));
                    let (compare, operand) = deed.operands();
                    let new = match deed.request.verb {
                        Verb::FetchAdd => found.wrapping_add(operand),
                        _ if found == compare => operand,
                        _ => found,
                    };
                    word.copy_from_slice(&new.to_ne_bytes());
                    let place = deed.sges[0].0 as usize;
                    state.sender[place..place + 8].copy_from_slice(&found.to_ne_bytes());
                }
            }
        }
        state
    }
}

/// The data of a direction. All walks use the same, which is computed once.
fn initial_bytes(index: usize) -> &'static [u8] {
    static BYTES: LazyLock<Vec<Vec<u8>>> =
        LazyLock::new(|| (0..6).map(|index| pattern(index * 1_000_003, SOURCE_BYTES as usize)).collect());
    &BYTES[index]
}

/// Splits `length` bytes at `start` into consecutive ranges.
pub fn split(start: u64, length: u32, sges: usize) -> Vec<(u64, u32)> {
    let sges = sges as u32;
    let mut at = 0;
    (1..=sges)
        .map(|n| {
            let end = if n == sges { length } else { length / 3 * n };
            let piece = (start + u64::from(at), end - at);
            at = end;
            piece
        })
        .collect()
}

/// The directions of a walk: two for each connection.
pub fn directions(walk: &Walk) -> Vec<DirectionModel> {
    let mut directions: Vec<DirectionModel> =
        (0..walk.psns.len() * 2).map(|_| DirectionModel::new(walk)).collect();
    let count = directions.len();
    for step in &walk.steps {
        match step {
            Step::Post { direction, request } => directions[direction % count].add(request),
            Step::Receive { direction, count: receives } => {
                directions[direction % count].receives += receives
            }
            Step::Run { .. } | Step::Drain { .. } | Step::Resume { .. } | Step::Rebind { .. } => {}
        }
    }
    for direction in &mut directions {
        // The memory after it may be the target of atomics, which must be aligned.
        direction.sender_bytes = direction.sender_bytes.next_multiple_of(8);
        let needed = direction.requests.iter().filter(|deed| deed.consumes_receive()).count();
        direction.receives = direction.receives.max(needed);
    }
    directions
}
