//! One direction of a connection in a capture: requests, responses, and the attributes of the two queue pairs that follow
//! from them.

use softhca_engine::QpType;
use softhca_fabric::Frame;
use softhca_tests::{capture, captures_folder};
use softhca_trace::CaptureReader;
use softhca_wire::{
    ICRC_LEN, Mtu, NakCode, Operation, Psn, Qpn, QueueKey, RemoteKey, RnrTimer, Service, Syndrome,
    TransportHeader, TransportPacket,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

/// A packet of a capture.
#[derive(Clone, Debug)]
pub struct Packet {
    pub frame: Frame,
    pub header: TransportHeader,
    pub payload: Vec<u8>,
}

impl Packet {
    pub fn new(frame: Frame) -> Packet {
        let transport =
            TransportPacket::parse(&frame.bytes[..frame.bytes.len() - ICRC_LEN]).expect("a packet");
        let (header, payload) = (transport.header, transport.payload.to_vec());
        Packet { frame, header, payload }
    }

    /// From the BTH to the pad bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.frame.bytes[..self.frame.bytes.len() - ICRC_LEN]
    }

    pub fn psn(&self) -> Psn {
        self.header.bth.psn
    }

    pub fn operation(&self) -> Operation {
        self.header.bth.opcode.operation()
    }

    pub fn is_request(&self) -> bool {
        self.operation().is_request()
    }

    /// The kind of packet, without per-packet numbers.
    pub fn describe(&self) -> String {
        let bth = &self.header.bth;
        let mut line = bth.opcode.name().to_string();
        if self.is_request() && bth.ack_request {
            line += " ackreq";
        }
        if let Some(aeth) = self.header.aeth {
            line += &format!(" {}", aeth.syndrome);
        }
        if bth.opcode.has_payload() {
            line += &format!(" {}B", self.payload.len());
        }
        line
    }
}

/// One direction of a connection.
pub struct CapturedFlow {
    pub name: String,
    pub kind: QpType,
    pub requester: (IpAddr, Qpn),
    pub responder: (IpAddr, Qpn),
    /// Requests and responses, in capture order.
    pub packets: Vec<Packet>,
}

/// The names of the captures of connections without a connection manager.
pub fn names() -> Vec<String> {
    let folder = std::fs::read_dir(captures_folder()).expect("the folder of captures");
    let names = folder.map(|entry| entry.expect("an entry").path());
    let names = names.filter(|path| path.extension().is_some_and(|end| end == "pcap"));
    let names = names.map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned());
    // The queue pairs of srq_pp cannot be distinguished: packets contain only the destination QPN.
    let is_plain = |name: &str| {
        let name = name.trim_start_matches("j_");
        ["vt_", "pf_", "rc_pp", "uc_pp", "ud_pp"].iter().any(|start| name.starts_with(start))
    };
    let mut names: Vec<_> = names.filter(|name| is_plain(name)).collect();
    names.sort();
    names
}

/// The directions of a capture that have requests.
pub fn flows(name: &str) -> Vec<CapturedFlow> {
    let records =
        CaptureReader::open(&capture(name)).expect("a capture").map(|record| record.expect("a record"));
    let mut packets = Vec::new();
    for record in records {
        let Ok(frame) = record.frame() else { continue };
        let addressing = frame.network.addressing().expect("RoCEv2");
        packets.push(Packet::new(Frame::new(addressing, frame.packet.to_vec())));
    }
    let requesters: BTreeSet<IpAddr> = packets
        .iter()
        .filter(|packet| packet.is_request())
        .map(|packet| packet.frame.addressing.source)
        .collect();
    requesters.into_iter().map(|requester| CapturedFlow::new(name, requester, &packets)).collect()
}

impl CapturedFlow {
    fn new(name: &str, requester: IpAddr, packets: &[Packet]) -> CapturedFlow {
        let belongs = |packet: &&Packet| packet.is_request() == (packet.frame.addressing.source == requester);
        let packets: Vec<Packet> = packets.iter().filter(belongs).cloned().collect();
        let request = packets.iter().find(|packet| packet.is_request()).expect("a request");
        let reply = packets.iter().find(|packet| !packet.is_request());
        let kind = match request.header.bth.opcode.service() {
            Service::Uc => QpType::Uc,
            Service::Ud => QpType::Ud,
            _ => QpType::Rc,
        };
        let source = request.header.deth.map(|deth| deth.source_qp);
        // Without responses the QPN of the requester is arbitrary.
        let own = reply.map(|reply| reply.header.bth.destination_qp).or(source).unwrap_or(Qpn::new(0x7777));
        CapturedFlow {
            name: name.into(),
            kind,
            requester: (requester, own),
            responder: (request.frame.addressing.destination, request.header.bth.destination_qp),
            packets,
        }
    }

    pub fn requests(&self) -> impl Iterator<Item = &Packet> {
        self.packets.iter().filter(|packet| packet.is_request())
    }

    pub fn responses(&self) -> impl Iterator<Item = &Packet> {
        self.packets.iter().filter(|packet| !packet.is_request())
    }

    pub fn first_psn(&self) -> Psn {
        self.requests().next().expect("a request").psn()
    }

    /// Every request once, in PSN order, without READs that resume an earlier one.
    pub fn without_retransmissions(&self) -> Vec<&Packet> {
        let first = self.first_psn();
        let mut by_psn = BTreeMap::new();
        for packet in self.requests() {
            by_psn.entry(packet.psn().since(first)).or_insert(packet);
        }
        let mut next = 0;
        by_psn.retain(|psn, packet| {
            let is_new = *psn >= next;
            if is_new {
                let length = packet.header.reth.map_or(0, |reth| reth.dma_length);
                let is_read = packet.operation() == Operation::ReadRequest;
                next = psn + if is_read { self.mtu().packets(length) } else { 1 };
            }
            is_new
        });
        by_psn.into_values().collect()
    }

    /// The path MTU: captures whose name starts with `j_` are of jumbo frames.
    pub fn mtu(&self) -> Mtu {
        if self.name.starts_with("j_") { Mtu::B4096 } else { Mtu::B1024 }
    }

    /// The Q_Key of datagrams.
    pub fn queue_key(&self) -> QueueKey {
        self.requests().find_map(|packet| packet.header.deth).map_or(QueueKey(0), |deth| deth.qkey)
    }

    /// The timer of the RNR NAKs, if any.
    pub fn rnr_timer(&self) -> Option<RnrTimer> {
        self.responses().find_map(|packet| match packet.header.aeth?.syndrome {
            Syndrome::RnrNak(timer) => Some(timer),
            _ => None,
        })
    }

    /// The number of RNR NAKs per PSN.
    pub fn rnr_naks(&self) -> HashMap<Psn, u32> {
        let mut counts = HashMap::new();
        for packet in self.responses() {
            if matches!(packet.header.aeth.map(|aeth| aeth.syndrome), Some(Syndrome::RnrNak(_))) {
                *counts.entry(packet.psn()).or_insert(0) += 1;
            }
        }
        counts
    }

    /// PSNs that got a NAK because of their rkey.
    fn nak_psns(&self) -> HashSet<Psn> {
        let is_refusal = |packet: &&Packet| {
            packet.header.aeth.is_some_and(|aeth| aeth.syndrome == Syndrome::Nak(NakCode::RemoteAccessError))
        };
        self.responses().filter(is_refusal).map(Packet::psn).collect()
    }

    /// The page-aligned address ranges of requests by rkey, without rejected ones.
    pub fn regions(&self) -> BTreeMap<RemoteKey, (u64, u64)> {
        let rejected = self.nak_psns();
        let mut regions: BTreeMap<RemoteKey, (u64, u64)> = BTreeMap::new();
        for packet in self.requests().filter(|packet| !rejected.contains(&packet.psn())) {
            let Some((key, address, length)) = remote_range(packet) else { continue };
            let (from, to) = (address & !0xfff, (address + u64::from(length)).next_multiple_of(0x1000));
            let region = regions.entry(key).or_insert((from, to));
            *region = (region.0.min(from), region.1.max(to).max(from + 0x1000));
        }
        regions
    }

    /// The initial memory of the responder: the bytes that READs and atomics returned from addresses that no earlier
    /// request had written.
    pub fn memory(&self) -> BTreeMap<u64, u8> {
        let replies: HashMap<Psn, &Packet> = self.responses().map(|packet| (packet.psn(), packet)).collect();
        let mut known = BTreeMap::new();
        let mut touched = BTreeSet::new();
        let mut write_to = 0;
        for packet in self.without_retransmissions() {
            match (packet.operation(), remote_range(packet)) {
                (Operation::Write, named) => {
                    write_to = named.map_or(write_to, |(_, address, _)| address);
                    touched.extend(write_to..write_to + packet.payload.len() as u64);
                    write_to += packet.payload.len() as u64;
                }
                (Operation::ReadRequest, Some((_, mut address, _))) => {
                    let mut psn = packet.psn();
                    while let Some(reply) = replies.get(&psn)
                        && reply.operation() == Operation::ReadResponse
                    {
                        learn(&mut known, &touched, address, &reply.payload);
                        address += reply.payload.len() as u64;
                        psn = psn.plus(1);
                        if reply.header.bth.opcode.position().ends_message() {
                            break;
                        }
                    }
                }
                (_, Some((_, address, _))) => {
                    if let Some(original) =
                        replies.get(&packet.psn()).and_then(|reply| reply.header.atomic_ack)
                    {
                        learn(&mut known, &touched, address, &original.0.to_ne_bytes());
                    }
                    touched.extend(address..address + 8);
                }
                _ => {}
            }
        }
        known
    }
}

fn learn(known: &mut BTreeMap<u64, u8>, touched: &BTreeSet<u64>, address: u64, bytes: &[u8]) {
    for (at, byte) in (address..).zip(bytes).filter(|(at, _)| !touched.contains(at)) {
        known.entry(at).or_insert(*byte);
    }
}

/// The rkey, address and length of a request.
pub fn remote_range(packet: &Packet) -> Option<(RemoteKey, u64, u32)> {
    let reth = packet.header.reth.map(|reth| (reth.rkey, reth.virtual_address, reth.dma_length));
    reth.or(packet.header.atomic.map(|atomic| (atomic.rkey, atomic.virtual_address, 8)))
}
