//! The connections of a process that its peers must be informed about when it ends, in memory that outlives the process.
//!
//! The connection manager of the process records each identifier that would send a message when it is destroyed. The
//! owner of the memory destroys what is recorded when the process is gone.

use crate::SharedWords;
use crate::ack_records::{from_bits, to_bits};
use crate::sync::Ordering;
use core::net::IpAddr;
use softhca_types::CmId;
use softhca_types::cm::CmState;
use softhca_wire::Qpn;
use softhca_wire::cm::{CommunicationId, ServiceId};

/// As many as a client has identifiers, each with an entry of one cache line.
const ENTRIES: usize = 1 << 15;
const ENTRY_WORDS: usize = 8;
/// Entries are read only in blocks of a page that was used: one bit for each.
const BLOCK: usize = 64;
const BLOCK_WORDS: usize = ENTRIES / BLOCK / 64;

/// The words of an entry: [`VALID`], the state and the identifier; then its connection.
const STATE: usize = 0;
const COMM_IDS: usize = 1;
const TRANSACTION: usize = 2;
const NUMBERS: usize = 3;
const SOURCE: usize = 4;
const DESTINATION: usize = 6;
const VALID: u64 = 1 << 63;

/// An identifier whose peer waits for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedConnection {
    /// The identifier.
    pub id: CmId,
    /// Its state.
    pub state: CmState,
    /// Its communication ID.
    pub local_id: CommunicationId,
    /// Communication ID of its peer.
    pub remote_id: CommunicationId,
    /// The transaction ID of the message that its peer waits for.
    pub transaction_id: u64,
    /// The service.
    pub service: ServiceId,
    /// The queue pair of its peer.
    pub remote_qpn: Qpn,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// The address of its host.
    pub source: IpAddr,
    /// The address of its peer.
    pub destination: IpAddr,
}

/// The connections of a process.
#[derive(Clone)]
pub struct CmRecords {
    words: SharedWords,
}

impl CmRecords {
    /// The words that the records take.
    pub const WORDS: usize = BLOCK_WORDS + ENTRIES * ENTRY_WORDS;
    /// The number of entries.
    pub const ENTRIES: usize = ENTRIES;

    /// The records in `words`.
    ///
    /// # Panics
    /// If there are too few words.
    pub fn new(words: SharedWords) -> CmRecords {
        assert!(words.len() >= Self::WORDS, "the records of a slot");
        CmRecords { words }
    }

    fn entry(index: usize) -> usize {
        BLOCK_WORDS + index * ENTRY_WORDS
    }

    /// Records a connection in an entry. A process that ends meanwhile leaves the entry empty.
    pub fn record(&self, index: usize, connection: &RecordedConnection) {
        let entry = Self::entry(index);
        let store = |word: usize, value: u64| self.words[entry + word].store(value, Ordering::Relaxed);
        store(STATE, 0);
        store(COMM_IDS, u64::from(connection.local_id.0) << 32 | u64::from(connection.remote_id.0));
        store(TRANSACTION, connection.transaction_id);
        let [qpn, class] = [connection.remote_qpn.value(), connection.traffic_class.into()].map(u64::from);
        store(NUMBERS, connection.service.0 << 32 | class << 24 | qpn);
        for (at, address) in [(SOURCE, connection.source), (DESTINATION, connection.destination)] {
            let bits = to_bits(address);
            store(at, (bits >> 64) as u64);
            store(at + 1, bits as u64);
        }
        let state = VALID | (connection.state as u64) << 32 | u64::from(connection.id.0);
        self.words[entry + STATE].store(state, Ordering::Release);
        self.words[index / BLOCK / 64].fetch_or(1 << (index / BLOCK % 64), Ordering::Relaxed);
    }

    /// The peer of the connection in an entry waits for nothing any more.
    pub fn clear(&self, index: usize) {
        self.words[Self::entry(index) + STATE].store(0, Ordering::Relaxed);
    }

    /// All connections.
    pub fn iter(&self) -> impl Iterator<Item = RecordedConnection> {
        let is_used = |block: &usize| self.words[block / 64].load(Ordering::Acquire) >> (block % 64) & 1 == 1;
        let used = (0..ENTRIES / BLOCK).filter(is_used);
        used.flat_map(|block| block * BLOCK..(block + 1) * BLOCK).filter_map(|index| self.read(index))
    }

    fn read(&self, index: usize) -> Option<RecordedConnection> {
        let entry = Self::entry(index);
        let load = |word: usize| self.words[entry + word].load(Ordering::Relaxed);
        let state = self.words[entry + STATE].load(Ordering::Acquire);
        if state & VALID == 0 {
            return None;
        }
        let [comm_ids, numbers] = [load(COMM_IDS), load(NUMBERS)];
        let [source, destination] =
            [SOURCE, DESTINATION].map(|at| from_bits(u128::from(load(at)) << 64 | u128::from(load(at + 1))));
        Some(RecordedConnection {
            id: CmId(state as u32),
            state: CmState::ALL.get((state >> 32) as u8 as usize).copied()?,
            local_id: CommunicationId((comm_ids >> 32) as u32),
            remote_id: CommunicationId(comm_ids as u32),
            transaction_id: load(TRANSACTION),
            service: ServiceId(numbers >> 32),
            remote_qpn: Qpn::new(numbers as u32),
            traffic_class: (numbers >> 24) as u8,
            source,
            destination,
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use softhca_wire::cm::PortSpace;

    #[test]
    fn recorded_connections_are_read_until_they_are_cleared() {
        let records = CmRecords::new(SharedWords::heap(CmRecords::WORDS));
        assert_eq!(records.iter().count(), 0);
        let connection = |id, state| RecordedConnection {
            id: CmId(id),
            state,
            local_id: CommunicationId(0x8000_0001),
            remote_id: CommunicationId(0xffff_fffe),
            transaction_id: 2 << 32 | 5,
            service: ServiceId::new(PortSpace::Tcp, 7174),
            remote_qpn: Qpn::new(0xff_fffe),
            traffic_class: 0xfe,
            source: IpAddr::from([127, 0, 0, 1]),
            destination: IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 9]),
        };
        let [first, last] = [connection(u32::MAX, CmState::Established), connection(2, CmState::ReqReceived)];
        records.record(0, &first);
        records.record(CmRecords::ENTRIES - 1, &last);
        assert!(records.iter().eq([first, last]));
        let later = RecordedConnection { state: CmState::DreqReceived, ..first };
        records.record(0, &later);
        records.clear(CmRecords::ENTRIES - 1);
        assert!(records.iter().eq([later]));
    }
}
