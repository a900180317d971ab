//! Two captures of the same traffic, taken at both ends: what was lost between them, and how long packets took.
//!
//! Packets are matched by their addresses, BTH and ICRC. The two clocks differ by an unknown offset.
//! It is taken to be the one that makes the shortest delays of both directions equal.

use crate::describe::duration;
use crate::summary::percentile;
use crate::{Packet, PacketContents, Record};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::net::IpAddr;
use thiserror::Error;

/// Why two captures cannot be joined.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum JoinError {
    /// A capture without RoCE.
    #[error("the {0} capture has no RoCE packet")]
    NoPackets(&'static str),
    /// Nothing in common.
    #[error(
        "the captures have no packet in common: they show different traffic or times, or something between them rewrites packets"
    )]
    NothingInCommon,
}

/// The fate of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "fate")]
pub enum Fate {
    /// Both captures have it.
    Arrived {
        /// Nanoseconds from one capture to the other.
        delay_ns: i64,
    },
    /// Only the capture at its sender has it.
    Lost,
    /// Only the capture at its sender has it, but the receiver acknowledged it: the other capture missed it.
    NotCapturedAtReceiver,
    /// Only the capture at its receiver has it: the capture at its sender missed it.
    NotCapturedAtSender,
    /// The capture at the other end had not begun, or had ended.
    Outside,
}

/// A packet of both captures, or of one.
#[derive(Clone, Copy, Debug)]
pub struct JoinedPacket {
    /// Whether the record is one of the second capture.
    pub is_second: bool,
    /// Its number in that capture, from 0.
    pub index: usize,
    /// When it was sent, by the clock of the first capture, in nanoseconds since that capture's first packet.
    pub time_ns: i64,
    /// Its fate.
    pub fate: Fate,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DirectionDelays {
    /// The sender.
    pub from: IpAddr,
    /// The receiver.
    pub to: IpAddr,
    /// Packets that both captures have.
    pub matched: u64,
    /// Packets that were lost in between.
    pub lost: u64,
    /// Packets that arrived after later ones.
    pub reordered: u64,
    /// One-way delays in nanoseconds.
    pub min_ns: i64,
    /// Half of the packets took no longer.
    pub median_ns: i64,
    /// 99 of 100 took no longer.
    pub p99_ns: i64,
    /// The longest.
    pub max_ns: i64,
}

/// Two captures as one.
#[derive(Clone, Debug)]
pub struct JoinedCapture {
    /// The packets, in the order in which they were sent.
    pub packets: Vec<JoinedPacket>,
    /// The difference to add to times of the second capture to get the first one's clock, in nanoseconds.
    pub offset_ns: i64,
    /// Whether packets of both directions are in both captures; else the shortest delay is taken for zero.
    pub is_symmetric: bool,
    /// The two directions.
    pub directions: Vec<DirectionDelays>,
    /// Packets of other host pairs, which are left out.
    pub others: u64,
}

/// The identity of a packet in both captures.
type Key = (IpAddr, IpAddr, [u8; 12], [u8; 4]);

struct ObservedFrame {
    key: Key,
    index: usize,
    time_ns: i64,
    /// The PSN of an ACK.
    acknowledges: Option<u32>,
    psn: u32,
    is_request: bool,
}

impl ObservedFrame {
    /// Destination queue pair and PSN: the same for every transmission.
    fn message(&self) -> ([u8; 3], u32) {
        let bth = self.key.2;
        ([bth[5], bth[6], bth[7]], self.psn)
    }
}

fn observed_frames(records: &[Record]) -> Vec<ObservedFrame> {
    let start = records.first().map_or(0, |record| record.time_ns);
    let frames = records.iter().enumerate().filter_map(|(index, record)| {
        let packet = Packet::new(record, start);
        let PacketContents::Roce(roce) = &packet.contents else { return None };
        let bth = &roce.transport.header.bth;
        let network = &roce.frame.network;
        let syndrome = roce.transport.header.aeth.map(|aeth| aeth.syndrome);
        Some(ObservedFrame {
            key: (
                network.source(),
                network.destination(),
                *roce.frame.packet.first_chunk::<12>()?,
                roce.frame.icrc().0,
            ),
            index,
            time_ns: packet.time_ns,
            acknowledges: matches!(syndrome, Some(softhca_wire::Syndrome::Ack(_))).then(|| bth.psn.value()),
            psn: bth.psn.value(),
            is_request: bth.opcode.operation().is_request(),
        })
    });
    frames.collect()
}

/// Joins two captures.
pub fn join(first: &[Record], second: &[Record]) -> Result<JoinedCapture, JoinError> {
    let (one, other) = (observed_frames(first), observed_frames(second));
    if one.is_empty() || other.is_empty() {
        return Err(JoinError::NoPackets(if one.is_empty() { "first" } else { "second" }));
    }
    let pair = common_pair(&one, &other).ok_or(JoinError::NothingInCommon)?;
    let differences = pair.map(|(from, to)| differences(&one, &other, from, to));
    let middle = |values: &[i64]| values.get(values.len() / 2).copied();
    let [there, back] = [&differences[0], &differences[1]];
    // Packets of the host where the first capture was taken reach the second one later.
    let first_is_source = match (middle(there), middle(back)) {
        (Some(there), Some(back)) => there >= back,
        (Some(_), None) => true,
        _ => false,
    };
    let (out, home) = if first_is_source { (there, back) } else { (back, there) };
    let is_symmetric = !out.is_empty() && !home.is_empty();
    // out = offset + delay, home = offset - delay, for the offset of the second clock.
    let ahead = match (out.first(), home.last()) {
        (Some(out), Some(home)) => (out + home) / 2,
        (Some(out), None) => *out,
        (None, Some(home)) => *home,
        (None, None) => return Err(JoinError::NothingInCommon),
    };
    let mut joined = JoinedCapture {
        packets: Vec::new(),
        offset_ns: -ahead,
        is_symmetric,
        directions: Vec::new(),
        others: 0,
    };
    for (at, (from, to)) in pair.into_iter().enumerate() {
        let sender_is_first = (at == 0) == first_is_source;
        joined.add_direction(&one, &other, from, to, sender_is_first);
    }
    let is_pair = |frame: &ObservedFrame| pair.contains(&(frame.key.0, frame.key.1));
    joined.others = one.iter().chain(&other).filter(|frame| !is_pair(frame)).count() as u64;
    joined.packets.sort_by_key(|packet| (packet.time_ns, packet.is_second, packet.index));
    Ok(joined)
}

/// The two hosts with the most packets in common, as the two directions.
fn common_pair(one: &[ObservedFrame], other: &[ObservedFrame]) -> Option<[(IpAddr, IpAddr); 2]> {
    let keys: BTreeSet<&Key> = other.iter().map(|frame| &frame.key).collect();
    let mut counts: BTreeMap<(IpAddr, IpAddr), u64> = BTreeMap::new();
    for frame in one.iter().filter(|frame| keys.contains(&frame.key)) {
        let (from, to) = (frame.key.0, frame.key.1);
        *counts.entry((from.min(to), from.max(to))).or_default() += 1;
    }
    let ((one, other), _) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    Some([(one, other), (other, one)])
}

/// Time in the second capture less time in the first, of packets that each has once; sorted.
fn differences(one: &[ObservedFrame], other: &[ObservedFrame], from: IpAddr, to: IpAddr) -> Vec<i64> {
    let once = |frames: &[ObservedFrame]| {
        let mut times: BTreeMap<Key, Option<i64>> = BTreeMap::new();
        for frame in frames.iter().filter(|frame| (frame.key.0, frame.key.1) == (from, to)) {
            let time = if times.contains_key(&frame.key) { None } else { Some(frame.time_ns) };
            times.insert(frame.key, time);
        }
        times
    };
    let (one, other) = (once(one), once(other));
    let common = one.iter().filter_map(|(key, time)| Some((*other.get(key)?)? - (*time)?));
    let mut differences: Vec<i64> = common.collect();
    differences.sort_unstable();
    differences
}

impl JoinedCapture {
    fn add_direction(
        &mut self,
        one: &[ObservedFrame],
        other: &[ObservedFrame],
        from: IpAddr,
        to: IpAddr,
        sender_is_first: bool,
    ) {
        let aligned = |is_second: bool, frame: &ObservedFrame| {
            frame.time_ns + if is_second { self.offset_ns } else { 0 }
        };
        let (senders, receivers) = if sender_is_first { (one, other) } else { (other, one) };
        let (at_sender, at_receiver) = (!sender_is_first, sender_is_first);
        let range = |is_second: bool, frames: &[ObservedFrame]| {
            let times = frames.iter().map(|frame| aligned(is_second, frame));
            (times.clone().min().unwrap_or(0), times.max().unwrap_or(0))
        };
        let sender_range = range(at_sender, senders);
        let receiver_range = range(at_receiver, receivers);
        let of_flow = |frame: &&ObservedFrame| (frame.key.0, frame.key.1) == (from, to);
        let mut waiting: BTreeMap<Key, VecDeque<&ObservedFrame>> = BTreeMap::new();
        for frame in senders.iter().filter(of_flow) {
            waiting.entry(frame.key).or_default().push_back(frame);
        }
        // PSNs that the receiver acknowledged, by the packets that it sent back.
        let acknowledged: BTreeSet<u32> = receivers
            .iter()
            .chain(senders)
            .filter(|frame| (frame.key.0, frame.key.1) == (to, from))
            .filter_map(|frame| frame.acknowledges)
            .collect();
        let mut packets = Vec::new();
        let mut delays = Vec::new();
        let mut arrived_keys = BTreeSet::new();
        let (mut lost, mut reordered, mut latest) = (0, 0, i64::MIN);
        for frame in receivers.iter().filter(of_flow) {
            let arrived = aligned(at_receiver, frame);
            let candidates = waiting.get_mut(&frame.key);
            // Of several transmissions the one sent last before it arrived; earlier ones were lost.
            let sent = candidates.and_then(|candidates| {
                let is_before =
                    |candidate: &&&ObservedFrame| aligned(at_sender, candidate) <= arrived + SLACK_NS;
                let last = candidates.iter().filter(is_before).count().saturating_sub(1);
                candidates.remove(last)
            });
            let Some(sent) = sent else {
                let is_outside = !(sender_range.0..=sender_range.1).contains(&arrived);
                let fate = if is_outside { Fate::Outside } else { Fate::NotCapturedAtSender };
                packets.push(JoinedPacket {
                    is_second: at_receiver,
                    index: frame.index,
                    time_ns: arrived,
                    fate,
                });
                continue;
            };
            let time_ns = aligned(at_sender, sent);
            delays.push(arrived - time_ns);
            arrived_keys.insert(frame.message());
            reordered += u64::from(time_ns < latest);
            latest = latest.max(time_ns);
            let fate = Fate::Arrived { delay_ns: arrived - time_ns };
            packets.push(JoinedPacket { is_second: at_sender, index: sent.index, time_ns, fate });
        }
        delays.sort_unstable();
        let longest = delays.last().copied().unwrap_or(0);
        for frame in waiting.into_values().flatten() {
            let time_ns = aligned(at_sender, frame);
            let is_inside = time_ns >= receiver_range.0 - longest && time_ns <= receiver_range.1;
            let is_acknowledged = frame.is_request && acknowledged.contains(&frame.psn);
            let has_copy = arrived_keys.contains(&frame.message());
            let fate = match () {
                () if !is_inside => Fate::Outside,
                () if is_acknowledged && !has_copy => Fate::NotCapturedAtReceiver,
                () => {
                    lost += 1;
                    Fate::Lost
                }
            };
            packets.push(JoinedPacket { is_second: at_sender, index: frame.index, time_ns, fate });
        }
        self.packets.extend(packets);
        self.directions.push(DirectionDelays {
            from,
            to,
            matched: delays.len() as u64,
            lost,
            reordered,
            min_ns: delays.first().copied().unwrap_or(0),
            median_ns: percentile(&delays, 50),
            p99_ns: percentile(&delays, 99),
            max_ns: longest,
        });
    }
}

/// How much earlier than its departure a packet may seem to arrive: clocks drift.
const SLACK_NS: i64 = 1_000;

fn signed_duration(ns: i64) -> String {
    format!("{}{}", if ns < 0 { "-" } else { "" }, duration(ns.unsigned_abs()))
}

impl fmt::Display for JoinedCapture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "The clock of the second capture is aligned by {}.", signed_duration(self.offset_ns))?;
        match self.is_symmetric {
            true => writeln!(
                f,
                "One-way delays assume that the shortest delay is the same in both directions; if it is not, they are wrong by half of the difference."
            )?,
            false => writeln!(
                f,
                "Packets of one direction only are in both captures: the shortest delay is taken for zero."
            )?,
        }
        for direction in &self.directions {
            writeln!(
                f,
                "{} -> {}: {} packets in both captures, {} lost in between, {} reordered; delay {} min, {} median, {} p99, {} max",
                direction.from,
                direction.to,
                direction.matched,
                direction.lost,
                direction.reordered,
                signed_duration(direction.min_ns),
                signed_duration(direction.median_ns),
                signed_duration(direction.p99_ns),
                signed_duration(direction.max_ns)
            )?;
        }
        let count = |wanted: Fate| self.packets.iter().filter(|packet| packet.fate == wanted).count();
        for (fate, text) in [
            (
                Fate::NotCapturedAtReceiver,
                "were acknowledged but are missing from the capture at their receiver",
            ),
            (Fate::NotCapturedAtSender, "arrived but are missing from the capture at their sender"),
            (Fate::Outside, "are outside of the time that both captures cover"),
        ] {
            let count = count(fate);
            if count > 0 {
                writeln!(f, "{count} packets {text}.")?;
            }
        }
        if self.others > 0 {
            writeln!(f, "{} packets of other host pairs are left out.", self.others)?;
        }
        Ok(())
    }
}
