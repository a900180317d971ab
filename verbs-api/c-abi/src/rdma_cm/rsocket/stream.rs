//! The rsockets protocol on a reliable connection: the data that both sides exchange when they connect, a ring buffer
//! for each direction, and flow control.
//!
//! Data travels as RDMA WRITE with immediate data into the receive buffer of the peer. That has two halves; the
//! receiver announces each half that is free again by writing its address to the SGL of the sender. The upper three
//! bits of the immediate data are the operation. The others are the length of the data, or the number of messages that
//! may be sent.

use super::options::Sizes;
use softhca::cm::ConnectionParameters;
use softhca::{
    AccessFlags, Completion, CompletionChannel, CompletionQueue, Context, CqNotify, Error, MemoryRegion,
    ProtectionDomain, QpType, QueuePair, ReceiveRequest, RemoteAddress, RemoteKey, SendRequest,
};
use std::collections::VecDeque;
use std::ptr::NonNull;

/// The version of the protocol.
const VERSION: u8 = 1;
/// Flags of the private data: the sender is big-endian; it has a table of mappings.
const BIG_ENDIAN: u8 = 1;
const HAS_IOMAP: u8 = 1 << 1;
/// The private data of a request and of its reply.
const CONNECTION_DATA_BYTES: usize = 40;

/// Operations in the upper three bits of the immediate data.
const OP_DATA: u32 = 0;
const OP_SGL: u32 = 4;
const OP_IOMAP: u32 = 6;
const OP_CONTROL: u32 = 7;
const OP_SHIFT: u32 = 29;
/// Values of `OP_CONTROL`.
const CONTROL_DISCONNECT: u32 = 0;
const CONTROL_SHUTDOWN: u32 = 2;

/// Entries of an SGL, and the bytes of one: address, key and length.
const SGL_ENTRIES: usize = 2;
const SGE_BYTES: usize = 16;
/// Bytes of a mapping: an offset and an SGE.
const IOMAP_BYTES: usize = 8 + SGE_BYTES;
/// The most bytes of a message.
const MAX_TRANSFER: usize = 1 << 16;
/// Announcements that may be outstanding, and the slots that control messages have beside those of data.
const MAX_ANNOUNCEMENTS: u32 = 4;
const CONTROL_SLOTS: u32 = 8;

/// Work request IDs: a receive, or a control message; otherwise the bytes of the send buffer that it uses.
const RECEIVE: u64 = u64::MAX;
const CONTROL: u64 = u64::MAX - 1;

/// Memory of the peer.
#[derive(Clone, Copy, Default)]
struct RemoteRange {
    address: u64,
    key: u32,
    length: u32,
}

impl RemoteRange {
    fn from_be(bytes: &[u8; SGE_BYTES]) -> RemoteRange {
        let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|index| bytes[at + index]));
        let address = u64::from(word(0)) << 32 | u64::from(word(4));
        RemoteRange { address, key: word(8), length: word(12) }
    }

    fn to_bytes(self, is_big_endian: bool) -> [u8; SGE_BYTES] {
        let mut bytes = [0; SGE_BYTES];
        let RemoteRange { address, key, length } = self;
        let (address, key, length) = match is_big_endian {
            true => (address.to_be_bytes(), key.to_be_bytes(), length.to_be_bytes()),
            false => (address.to_le_bytes(), key.to_le_bytes(), length.to_le_bytes()),
        };
        bytes[..8].copy_from_slice(&address);
        bytes[8..12].copy_from_slice(&key);
        bytes[12..].copy_from_slice(&length);
        bytes
    }

    fn at(self, offset: u64) -> RemoteAddress {
        RemoteAddress { address: self.address + offset, rkey: RemoteKey(self.key) }
    }
}

/// The data that a side announces when it connects.
pub struct ConnectionData {
    is_big_endian: bool,
    credits: u16,
    iomaps: usize,
    sgl: RemoteRange,
    data: RemoteRange,
}

impl ConnectionData {
    /// Reads private data; `None` if the peer does not use rsockets.
    pub fn parse(bytes: &[u8]) -> Option<ConnectionData> {
        let (bytes, _) = bytes.split_first_chunk::<CONNECTION_DATA_BYTES>()?;
        let range = |at: usize| RemoteRange::from_be(&std::array::from_fn(|index| bytes[at + index]));
        let parsed = ConnectionData {
            is_big_endian: bytes[1] & BIG_ENDIAN != 0,
            credits: u16::from_be_bytes([bytes[2], bytes[3]]),
            // Counts up to 128 are themselves, larger ones a multiple of 256.
            iomaps: match (bytes[1] & HAS_IOMAP, usize::from(bytes[7])) {
                (0, _) => 0,
                (_, count) if count <= 128 => count,
                (_, count) => (count & 127) << 8,
            },
            sgl: range(8),
            data: range(24),
        };
        (bytes[0] == VERSION && parsed.sgl.length as usize == SGL_ENTRIES).then_some(parsed)
    }
}

/// Memory of the program that the peer may write with `riowrite`.
struct Mapping {
    base: usize,
    offset: u64,
    region: MemoryRegion,
    /// Its place in the peer's table.
    slot: Option<usize>,
}

/// How the peer has ended the stream.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PeerState {
    Open,
    /// It sends no more.
    Shutdown,
    /// It neither sends nor receives.
    Disconnected,
}

/// One end of a connection.
pub struct Stream {
    domain: ProtectionDomain,
    pair: QueuePair,
    queue: CompletionQueue,
    pub channel: CompletionChannel,
    /// Space for completions that are processed.
    completions: Vec<Completion>,
    sizes: Sizes,
    peer: Option<ConnectionData>,
    pub peer_state: PeerState,
    /// A work request that failed.
    pub failure: Option<Completion>,
    /// Something has changed that no caller of [`Stream::progress`] knows of.
    has_changed: bool,

    send_buffer: MemoryRegion,
    send_offset: usize,
    send_used: usize,
    outstanding: u32,
    outstanding_control: u32,
    /// Messages sent, and the number that may be sent, modulo 2^16.
    sent: u16,
    sent_limit: u16,
    target: RemoteRange,
    next_target: usize,

    /// The ring buffer, then the SGL and the table of mappings, which the peer writes.
    receive_buffer: MemoryRegion,
    read_offset: usize,
    readable: usize,
    /// Bytes that were read and not announced, and where they begin.
    free: usize,
    free_offset: usize,
    received: u16,
    announce_at: u16,
    next_remote: usize,

    mappings: Vec<Mapping>,
    unannounced: VecDeque<(usize, u64, RemoteRange)>,
}

impl Stream {
    /// Creates the queues and buffers of a connection.
    pub fn new(context: &Context, domain: &ProtectionDomain, sizes: Sizes) -> Result<Stream, Error> {
        let channel = context.create_completion_channel()?;
        let receives = sizes.receive_queue + CONTROL_SLOTS;
        let sends = sizes.send_queue + CONTROL_SLOTS;
        let queue = context.create_completion_queue_with_channel(receives + sends, &channel)?;
        let builder = domain.create_queue_pair(QpType::Rc, &queue);
        let builder = builder.max_send_wr(sends).max_recv_wr(receives).max_inline_data(64);
        let pair = builder.without_silent_waits().build()?;
        let tables = SGL_ENTRIES * SGE_BYTES + sizes.iomaps * IOMAP_BYTES;
        let access = AccessFlags::LOCAL_WRITE;
        let half = sizes.receive_buffer / 2;
        Ok(Stream {
            send_buffer: domain.allocate_region(sizes.send_buffer as u64, access)?,
            receive_buffer: domain.allocate_region(
                (sizes.receive_buffer + tables) as u64,
                access | AccessFlags::REMOTE_WRITE,
            )?,
            domain: domain.clone(),
            pair,
            queue,
            channel,
            completions: Vec::with_capacity(32),
            sizes,
            peer: None,
            peer_state: PeerState::Open,
            failure: None,
            has_changed: false,
            send_offset: 0,
            send_used: 0,
            outstanding: 0,
            outstanding_control: 0,
            sent: 0,
            sent_limit: 0,
            target: RemoteRange::default(),
            next_target: 1,
            read_offset: 0,
            readable: 0,
            free: half,
            free_offset: half,
            received: 0,
            announce_at: (sizes.receive_queue / 2) as u16,
            next_remote: 1,
            mappings: Vec::new(),
            unannounced: VecDeque::new(),
        })
    }

    pub fn pair(&self) -> &QueuePair {
        &self.pair
    }

    /// Posts the receives, which carry immediate data only. The queue pair is in INIT.
    pub fn post_receives(&self) -> Result<(), Error> {
        (0..self.sizes.receive_queue + CONTROL_SLOTS).try_for_each(|_| self.post_receive())
    }

    fn post_receive(&self) -> Result<(), Error> {
        self.pair.post_recv(&ReceiveRequest { wr_id: RECEIVE, sg_list: &[] })
    }

    /// The parameters of the request or of the reply.
    pub fn parameters(&self) -> ConnectionParameters {
        let mut data = vec![VERSION, HAS_IOMAP];
        let credits = self.sizes.receive_queue as u16;
        data.extend(credits.to_be_bytes());
        let iomaps = self.sizes.iomaps;
        data.extend([0, 0, 0, if iomaps <= 128 { iomaps } else { 128 | iomaps >> 8 } as u8]);
        let range = |offset: usize, length: usize| {
            let RemoteAddress { address, rkey } = self.receive_buffer.remote_address(offset as u64);
            RemoteRange { address, key: rkey.0, length: length as u32 }.to_bytes(true)
        };
        data.extend(range(self.sizes.receive_buffer, SGL_ENTRIES));
        data.extend(range(0, self.sizes.receive_buffer / 2));
        ConnectionParameters { private_data: data, ..ConnectionParameters::default() }
    }

    /// Stores what the peer has said.
    pub fn set_peer(&mut self, peer: ConnectionData) {
        (self.target, self.sent_limit) = (peer.data, peer.credits);
        self.peer = Some(peer);
    }

    pub fn has_peer(&self) -> bool {
        self.peer.is_some()
    }

    /// Processes completions and announces free memory. While it is connected, it stops when there is data: the program reads
    /// that before more is received. Returns whether anything has changed.
    pub fn progress(&mut self, is_connected: bool) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        loop {
            completions.clear();
            if self.queue.poll_many(&mut completions) == 0 {
                break;
            }
            self.has_changed = true;
            completions.iter().for_each(|completion| self.process(completion));
            if is_connected && self.readable > 0 {
                break;
            }
        }
        self.completions = completions;
        if is_connected {
            self.announce_free();
        }
        self.take_changes()
    }

    /// Whether anything has changed since the last call, or the last [`Stream::progress`].
    pub fn take_changes(&mut self) -> bool {
        std::mem::take(&mut self.has_changed)
    }

    /// Lets the device send what was posted.
    fn drive(&mut self) {
        self.has_changed |= self.progress(true);
    }

    fn process(&mut self, completion: &Completion) {
        if !completion.status.is_success() {
            self.failure.get_or_insert(*completion);
            (self.outstanding, self.outstanding_control, self.send_used) = (0, 0, 0);
            return;
        }
        match completion.wr_id {
            RECEIVE => {
                let (operation, value) =
                    (completion.imm_data >> OP_SHIFT, completion.imm_data & ((1 << OP_SHIFT) - 1));
                match (operation, value) {
                    (OP_DATA, length) => {
                        // A peer cannot write more than was announced.
                        let space = self.sizes.receive_buffer - self.readable;
                        self.readable += (length as usize).min(space);
                        self.received = self.received.wrapping_add(1);
                    }
                    (OP_SGL, limit) => self.sent_limit = limit as u16,
                    (OP_CONTROL, CONTROL_DISCONNECT) => self.peer_state = PeerState::Disconnected,
                    (OP_CONTROL, CONTROL_SHUTDOWN) => {
                        self.peer_state = self.peer_state.max(PeerState::Shutdown);
                    }
                    _ => {}
                }
                // It fails only if the connection has ended, which another completion reports.
                let _ = self.post_receive();
            }
            CONTROL => self.outstanding_control = self.outstanding_control.saturating_sub(1),
            bytes => {
                self.outstanding = self.outstanding.saturating_sub(1);
                self.send_used = self.send_used.saturating_sub(bytes as usize);
            }
        }
    }

    /// Announces a half of the receive buffer that was read, or that further messages may be sent. Returns whether it did.
    fn announce_free(&mut self) -> bool {
        let half = self.sizes.receive_buffer / 2;
        let has_half = self.free >= half;
        let is_due = has_half || self.received.wrapping_sub(self.announce_at) as i16 >= 0;
        let Some(peer) = &self.peer else { return false };
        if !is_due || self.outstanding_control >= MAX_ANNOUNCEMENTS || self.is_over() {
            return false;
        }
        let limit = self.received.wrapping_add(self.sizes.receive_queue as u16);
        let (sgl, is_big_endian) = (peer.sgl, peer.is_big_endian);
        let mut entry = Vec::new();
        let mut remote = sgl.at(0);
        if has_half {
            let RemoteAddress { address, rkey } = self.receive_buffer.remote_address(self.free_offset as u64);
            entry = RemoteRange { address, key: rkey.0, length: half as u32 }.to_bytes(is_big_endian).into();
            remote = sgl.at((self.next_remote * SGE_BYTES) as u64);
            self.free -= half;
            self.free_offset = (self.free_offset + half) % self.sizes.receive_buffer;
            self.next_remote = (self.next_remote + 1) % SGL_ENTRIES;
        }
        self.announce_at = self.received.wrapping_add((self.sizes.receive_queue / 2) as u16);
        self.post_control(OP_SGL, u32::from(limit), remote, &entry);
        true
    }

    fn post_control(&mut self, operation: u32, value: u32, remote: RemoteAddress, bytes: &[u8]) {
        let request = SendRequest::rdma_write_with_imm(CONTROL, &[], remote, operation << OP_SHIFT | value)
            .inline_data(bytes);
        if self.pair.post_send(&request).is_ok() {
            self.outstanding_control += 1;
        }
    }

    /// Announces that this side sends no more, or that it receives no more either.
    pub fn shut_down(&mut self, is_disconnect: bool) {
        let value = if is_disconnect { CONTROL_DISCONNECT } else { CONTROL_SHUTDOWN };
        if let Some(sgl) = self.peer.as_ref().map(|peer| peer.sgl) {
            self.post_control(OP_CONTROL, value, sgl.at(0), &[]);
        }
    }

    /// Whether the peer has acknowledged everything.
    pub fn is_flushed(&self) -> bool {
        self.outstanding == 0 && self.outstanding_control == 0
    }

    /// Whether nothing can be sent any more.
    pub fn is_over(&self) -> bool {
        self.failure.is_some() || self.peer_state == PeerState::Disconnected
    }

    /// Requests the event of the next completion, and forgets those before.
    pub fn arm(&self) {
        while self.channel.poll().is_some() {}
        self.queue.request_notification(CqNotify::NextCompletion);
    }

    pub fn readable(&self) -> usize {
        self.readable
    }

    /// Whether data can be sent now: there is a slot, space, and memory of the peer.
    pub fn can_send(&mut self) -> bool {
        if self.target.length == 0 {
            self.load_target();
        }
        self.has_space() && self.sent != self.sent_limit && self.target.length > 0
    }

    fn has_space(&self) -> bool {
        self.peer.is_some()
            && self.outstanding < self.sizes.send_queue
            && self.send_used < self.sizes.send_buffer
    }

    /// Takes the next entry of the SGL, if the peer has written it. The length becomes visible last.
    fn load_target(&mut self) {
        let at = (self.sizes.receive_buffer + self.next_target * SGE_BYTES) as u64;
        let [key, length] = split(self.receive_buffer.load(at + 8));
        if length > 0 {
            self.target = RemoteRange { address: self.receive_buffer.load(at), key, length };
            self.receive_buffer.write_at(at, &[0; SGE_BYTES]);
            self.next_target = (self.next_target + 1) % SGL_ENTRIES;
        }
    }

    /// Writes the beginning of `data`, at most `most` bytes, to memory of the peer through the send buffer, with
    /// immediate data for an operation. Returns its length.
    fn write(
        &mut self,
        data: &[u8],
        most: usize,
        remote: RemoteAddress,
        operation: Option<u32>,
    ) -> Result<usize, Error> {
        if self.send_used == 0 {
            self.send_offset = 0;
        }
        let size = self.sizes.send_buffer;
        let space = (size - self.send_used).min(size - self.send_offset);
        let length = data.len().min(space).min(most).min(MAX_TRANSFER);
        let offset = self.send_offset;
        self.send_buffer.write_at(offset as u64, &data[..length]);
        self.send_offset = (offset + length) % size;
        self.send_used += length;
        self.outstanding += 1;
        let gather = [self.send_buffer.sge(offset as u64, length as u32)];
        let id = length as u64;
        self.pair.post_send(&match operation {
            Some(operation) => {
                let imm_data = operation << OP_SHIFT | length as u32;
                SendRequest::rdma_write_with_imm(id, &gather, remote, imm_data)
            }
            None => SendRequest::rdma_write(id, &gather, remote),
        })?;
        Ok(length)
    }

    /// Sends the beginning of `data`, not more than the buffer holds, so that other threads get their turn. Returns its length,
    /// which is zero if nothing can be sent now.
    pub fn send(&mut self, data: &[u8]) -> Result<usize, Error> {
        self.announce_mappings()?;
        let data = &data[..data.len().min(self.sizes.send_buffer)];
        let mut sent = 0;
        while sent < data.len() && self.unannounced.is_empty() && !self.is_over() && self.can_send() {
            let most = self.target.length as usize;
            let length = self.write(&data[sent..], most, self.target.at(0), Some(OP_DATA))?;
            self.target.address += length as u64;
            self.target.length -= length as u32;
            self.sent = self.sent.wrapping_add(1);
            sent += length;
            // The peer reads this message while the next is copied.
            self.drive();
        }
        Ok(sent)
    }

    /// Copies received data out after the first `skipped` bytes, and leaves it in the buffer. Returns its length.
    pub fn peek(&self, into: &mut [u8], skipped: usize) -> usize {
        let size = self.sizes.receive_buffer;
        let length = into.len().min(self.readable.saturating_sub(skipped));
        let start = (self.read_offset + skipped) % size;
        let first = length.min(size - start);
        self.receive_buffer.read_into(start as u64, &mut into[..first]);
        self.receive_buffer.read_into(0, &mut into[first..length]);
        length
    }

    /// Moves received data out and frees its memory. Returns its length.
    pub fn receive(&mut self, into: &mut [u8]) -> usize {
        let length = self.peek(into, 0);
        self.read_offset = (self.read_offset + length) % self.sizes.receive_buffer;
        self.readable -= length;
        self.free += length;
        if self.announce_free() && length > 0 {
            self.drive();
        }
        length
    }

    /// Writes to memory that the peer has mapped at `offset`. Returns the bytes written; `None` if none is mapped.
    pub fn write_mapped(&mut self, data: &[u8], offset: u64) -> Result<Option<usize>, Error> {
        self.announce_mappings()?;
        let table = self.sizes.receive_buffer + SGL_ENTRIES * SGE_BYTES;
        let found = (0..self.sizes.iomaps).find_map(|index| {
            let at = (table + index * IOMAP_BYTES) as u64;
            let (start, address) = (self.receive_buffer.load(at), self.receive_buffer.load(at + 8));
            let [key, length] = split(self.receive_buffer.load(at + 16));
            let into = offset.checked_sub(start).filter(|into| *into < u64::from(length))?;
            Some((RemoteRange { address, key, length }.at(into), u64::from(length) - into))
        });
        let Some((mut remote, left)) = found else { return Ok(None) };
        let data = &data[..data.len().min(left as usize)];
        let mut sent = 0;
        while sent < data.len() && self.has_space() {
            let length = self.write(&data[sent..], MAX_TRANSFER, remote, None)?;
            remote.address += length as u64;
            sent += length;
        }
        Ok(Some(sent))
    }

    /// Maps memory for the peer at an offset, or registers it for this side only.
    ///
    /// # Safety
    /// As [`ProtectionDomain::register_memory`].
    pub unsafe fn map(
        &mut self,
        base: NonNull<u8>,
        length: usize,
        is_remote: bool,
        offset: u64,
    ) -> Result<(), Error> {
        let access = match is_remote {
            true => AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
            false => AccessFlags::empty(),
        };
        let peer_slots = self.peer.as_ref().map_or(0, |peer| peer.iomaps);
        let is_free = |slot: &usize| self.mappings.iter().all(|mapping| mapping.slot != Some(*slot));
        let slot = (0..peer_slots).find(is_free).filter(|_| is_remote);
        if is_remote && slot.is_none() {
            let why = "the peer has no free entry for a mapping: it sets RDMA_IOMAPSIZE before it connects";
            return Err(softhca::VerbsError::Invalid { what: "riomap", why }.into());
        }
        // SAFETY: the caller guarantees it.
        let region = unsafe { self.domain.register_memory(base, length, access)? };
        if let Some(slot) = slot {
            let range =
                RemoteRange { address: region.address(), key: region.rkey().0, length: length as u32 };
            self.unannounced.push_back((slot, offset, range));
        }
        self.mappings.push(Mapping { base: base.as_ptr() as usize, offset, region, slot });
        Ok(())
    }

    /// Removes a mapping. Returns whether there was one.
    pub fn unmap(&mut self, base: usize, length: usize) -> bool {
        let is_it = |mapping: &Mapping| mapping.base == base && mapping.region.len() == length as u64;
        let Some(index) = self.mappings.iter().position(is_it) else { return false };
        let mapping = self.mappings.swap_remove(index);
        if let Some(slot) = mapping.slot {
            self.unannounced.push_back((slot, mapping.offset, RemoteRange::default()));
        }
        true
    }

    /// Writes mappings to the peer's table, before data that is sent later.
    fn announce_mappings(&mut self) -> Result<(), Error> {
        let Some((sgl, is_big_endian)) = self.peer.as_ref().map(|peer| (peer.sgl, peer.is_big_endian)) else {
            return Ok(());
        };
        while !self.unannounced.is_empty() && self.outstanding < self.sizes.send_queue {
            let Some((slot, offset, range)) = self.unannounced.pop_front() else { break };
            let mut bytes = Vec::with_capacity(IOMAP_BYTES);
            bytes.extend(if is_big_endian { offset.to_be_bytes() } else { offset.to_le_bytes() });
            bytes.extend(range.to_bytes(is_big_endian));
            let remote = sgl.at((SGL_ENTRIES * SGE_BYTES + slot * IOMAP_BYTES) as u64);
            let request =
                SendRequest::rdma_write_with_imm(0, &[], remote, OP_IOMAP << OP_SHIFT | slot as u32);
            self.pair.post_send(&request.inline_data(&bytes))?;
            self.outstanding += 1;
        }
        Ok(())
    }
}

/// Two words in the order of memory.
fn split(value: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_ne_bytes();
    [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_data_has_the_layout_of_rsockets() {
        let mut bytes = vec![1, 2, 1, 0x80, 0, 0, 0, 0x82];
        for range in [(0x1122_3344_5566_7788_u64, 7_u32, 2_u32), (0x99, 8, 65536)] {
            bytes.extend(range.0.to_be_bytes());
            bytes.extend(range.1.to_be_bytes());
            bytes.extend(range.2.to_be_bytes());
        }
        // The CM fills private data up with zeros.
        bytes.resize(56, 0);
        let data = ConnectionData::parse(&bytes).expect("rsockets");
        assert_eq!((data.credits, data.iomaps, data.is_big_endian), (384, 512, false));
        assert_eq!((data.sgl.address, data.sgl.key, data.sgl.length), (0x1122_3344_5566_7788, 7, 2));
        assert_eq!((data.data.address, data.data.key, data.data.length), (0x99, 8, 65536));
        assert_eq!(data.data.to_bytes(true), bytes[24..40]);
        bytes[0] = 2;
        assert!(ConnectionData::parse(&bytes).is_none(), "another version");
        assert!(ConnectionData::parse(&bytes[..39]).is_none(), "too short");
    }
}
