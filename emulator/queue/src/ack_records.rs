//! The last ACK of each queue pair of a process, in memory that outlives the process.
//!
//! A program that has seen a message may end before the ACK is sent. Its peer must still get the ACK. The HCA therefore
//! records what it acknowledges before the program can see the message. The owner of the memory sends the ACK again at
//! the end. A peer ignores an ACK that it has had already.

use crate::SharedWords;
use crate::sync::Ordering;
use core::net::{IpAddr, Ipv6Addr};
use softhca_wire::{Psn, Qpn, QpnSlot};

/// The queue pairs of a slot, each with an entry of one cache line.
const ENTRIES: usize = 1 << (24 - QpnSlot::BITS);
const ENTRY_WORDS: usize = 8;
/// Entries are read only in blocks of a page that was used: one bit for each.
const BLOCK: usize = 64;
const BLOCK_WORDS: usize = ENTRIES / BLOCK / 64;

/// The words of an entry: PSN, MSN and [`VALID`]; then the connection.
const ACK: usize = 0;
const NUMBERS: usize = 1;
const SOURCE: usize = 2;
const DESTINATION: usize = 4;
const PATH: usize = 6;
const VALID: u64 = 1 << 63;
const IS_XRC: u64 = 1 << 48;

/// The connection of a queue pair, as far as its ACKs need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckPath {
    /// The queue pair.
    pub qpn: Qpn,
    /// QPN of its peer.
    pub dest_qpn: Qpn,
    /// Whether it is an XRC connection.
    pub is_xrc: bool,
    /// Source address of its packets.
    pub source: IpAddr,
    /// Destination address of its packets.
    pub destination: IpAddr,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// The service level.
    pub service_level: u8,
    /// The flow label of IPv6.
    pub flow_label: u32,
}

/// The last ACK of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedAck {
    /// Its connection.
    pub path: AckPath,
    /// The last PSN that it acknowledges.
    pub psn: Psn,
    /// The message sequence number.
    pub msn: u32,
}

/// The last ACK of each queue pair of a slot.
#[derive(Clone)]
pub struct AckRecords {
    words: SharedWords,
}

impl AckRecords {
    /// The words that the records take.
    pub const WORDS: usize = BLOCK_WORDS + ENTRIES * ENTRY_WORDS;

    /// The records in `words`.
    ///
    /// # Panics
    /// If there are too few words.
    pub fn new(words: SharedWords) -> AckRecords {
        assert!(words.len() >= Self::WORDS, "the records of a slot");
        AckRecords { words }
    }

    fn index(qpn: Qpn) -> usize {
        qpn.value() as usize % ENTRIES
    }

    fn entry(index: usize) -> usize {
        BLOCK_WORDS + index * ENTRY_WORDS
    }

    /// A queue pair is connected. It has acknowledged nothing yet.
    pub fn connect(&self, path: &AckPath) {
        let index = Self::index(path.qpn);
        let entry = Self::entry(index);
        let store = |word: usize, value: u64| self.words[entry + word].store(value, Ordering::Relaxed);
        store(ACK, 0);
        let is_xrc = if path.is_xrc { IS_XRC } else { 0 };
        store(NUMBERS, u64::from(path.qpn.value()) | u64::from(path.dest_qpn.value()) << 24 | is_xrc);
        for (at, address) in [(SOURCE, path.source), (DESTINATION, path.destination)] {
            let bits = to_bits(address);
            store(at, (bits >> 64) as u64);
            store(at + 1, bits as u64);
        }
        let [class, level] = [path.traffic_class, path.service_level].map(u64::from);
        store(PATH, class | level << 8 | u64::from(path.flow_label) << 32);
        self.words[index / BLOCK / 64].fetch_or(1 << (index / BLOCK % 64), Ordering::Relaxed);
    }

    /// The queue pair acknowledges everything up to `psn`. Called before the program can see what that completes.
    #[inline]
    pub fn record(&self, qpn: Qpn, psn: Psn, msn: u32) {
        let value = VALID | u64::from(msn & 0xff_ffff) << 24 | u64::from(psn.value());
        self.words[Self::entry(Self::index(qpn)) + ACK].store(value, Ordering::Relaxed);
    }

    /// The connection of a queue pair has ended.
    pub fn clear(&self, qpn: Qpn) {
        self.words[Self::entry(Self::index(qpn)) + ACK].store(0, Ordering::Relaxed);
    }

    /// The ACKs of all connections.
    pub fn iter(&self) -> impl Iterator<Item = RecordedAck> {
        let is_used = |block: &usize| self.words[block / 64].load(Ordering::Acquire) >> (block % 64) & 1 == 1;
        let used = (0..ENTRIES / BLOCK).filter(is_used);
        used.flat_map(|block| block * BLOCK..(block + 1) * BLOCK).filter_map(|index| self.read(index))
    }

    fn read(&self, index: usize) -> Option<RecordedAck> {
        let entry = Self::entry(index);
        let load = |word: usize| self.words[entry + word].load(Ordering::Relaxed);
        let ack = load(ACK);
        if ack & VALID == 0 {
            return None;
        }
        let [numbers, path] = [load(NUMBERS), load(PATH)];
        let [source, destination] =
            [SOURCE, DESTINATION].map(|at| from_bits(u128::from(load(at)) << 64 | u128::from(load(at + 1))));
        Some(RecordedAck {
            path: AckPath {
                qpn: Qpn::new(numbers as u32),
                dest_qpn: Qpn::new((numbers >> 24) as u32),
                is_xrc: numbers & IS_XRC != 0,
                source,
                destination,
                traffic_class: path as u8,
                service_level: (path >> 8) as u8,
                flow_label: (path >> 32) as u32,
            },
            psn: Psn::new(ack as u32),
            msn: (ack >> 24) as u32 & 0xff_ffff,
        })
    }
}

/// An address in two words; one of IPv4 is mapped.
pub(crate) fn to_bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// The address that [`to_bits`] has put there.
pub(crate) fn from_bits(bits: u128) -> IpAddr {
    let address = Ipv6Addr::from_bits(bits);
    address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    fn path(qpn: u32, address: &str) -> AckPath {
        let address: IpAddr = address.parse().unwrap();
        AckPath {
            qpn: Qpn::new(qpn),
            dest_qpn: Qpn::new(0xff_fffe),
            is_xrc: qpn % 2 == 1,
            source: address,
            destination: address,
            traffic_class: 0x82,
            service_level: 3,
            flow_label: 0xf_ffff,
        }
    }

    #[test]
    fn the_last_ack_of_each_connection_is_read_back() {
        let records = AckRecords::new(SharedWords::heap(AckRecords::WORDS));
        let paths = [path(0x8000, "127.0.0.1"), path(0x8041, "fd00::1"), path(0xffff, "10.1.2.3")];
        paths.iter().for_each(|path| records.connect(path));
        assert_eq!(records.iter().count(), 0, "nothing was acknowledged");
        for path in &paths {
            records.record(path.qpn, Psn::new(1), 1);
            records.record(path.qpn, Psn::new(0xff_ffff), 0xff_fffe);
        }
        let expected = paths.map(|path| RecordedAck { path, psn: Psn::new(0xff_ffff), msn: 0xff_fffe });
        assert_eq!(records.iter().collect::<Vec<_>>(), expected);
        records.clear(paths[1].qpn);
        assert_eq!(records.iter().count(), 2);
        records.connect(&paths[0]);
        assert_eq!(records.iter().collect::<Vec<_>>(), [expected[2]], "a new connection has no ACK");
    }
}
