//! Packet builders and a link output for the tests of this crate.

use crate::{Direction, Endpoint, Fault, Flow, FlowId, Frame, LinkOutput};
use alloc::vec;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr};
use softhca_wire::{
    AddressHeaders, Aeth, AtomicAckEth, AtomicEth, Bth, Deth, ExtendedHeaders, Feth, ICRC_LEN, Icrc, Ieth,
    ImmOrInvalidate, Immediate, Opcode, Operation, Position, Psn, Qpn, QueueKey, RemoteKey, Reth, Service,
    Syndrome, TransportHeader, XrcEth,
};

pub(crate) const ALICE: Endpoint = host(1);
pub(crate) const BOB: Endpoint = host(2);

/// Queue pair 0x100 + n on host n.
pub(crate) const fn host(n: u8) -> Endpoint {
    Endpoint { address: IpAddr::V4(Ipv4Addr::new(10, 0, 0, n)), qpn: Qpn::new(0x100 + n as u32) }
}

pub(crate) fn flow(flow_id: u32, requester: Endpoint, responder: Endpoint, first_psn: u32) -> Flow {
    Flow { id: FlowId(flow_id), requester, responder: Some(responder), first_psn: Psn::new(first_psn) }
}

/// A packet builder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    pub opcode: Opcode,
    psn: u32,
    from: Endpoint,
    to: Endpoint,
    syndrome: Syndrome,
    payload: usize,
    traffic_class: u8,
    /// Management class and attribute.
    management: Option<(u8, u16)>,
}

impl Packet {
    pub fn new(opcode: Opcode, psn: u32) -> Packet {
        let (syndrome, payload, traffic_class) = (Syndrome::ACK, 32, 2);
        Packet { opcode, psn, from: ALICE, to: BOB, syndrome, payload, traffic_class, management: None }
    }

    pub fn rc(operation: Operation, psn: u32) -> Packet {
        Packet::part(operation, Position::Only, psn)
    }

    pub fn part(operation: Operation, position: Position, psn: u32) -> Packet {
        let service = match operation {
            Operation::Cnp => Service::Cnp,
            _ => Service::Rc,
        };
        Packet::new(Opcode::new(service, operation, position, ImmOrInvalidate::None).expect("an opcode"), psn)
    }

    pub fn between(self, from: Endpoint, to: Endpoint) -> Packet {
        Packet { from, to, ..self }
    }

    pub fn syndrome(self, syndrome: Syndrome) -> Packet {
        Packet { syndrome, ..self }
    }

    pub fn payload(self, payload: usize) -> Packet {
        Packet { payload, ..self }
    }

    pub fn traffic_class(self, traffic_class: u8) -> Packet {
        Packet { traffic_class, ..self }
    }

    pub fn frame(self) -> Frame {
        let mut addressing = AddressHeaders::between(self.from.address, self.to.address);
        addressing.traffic_class = self.traffic_class;
        let payload = match self.opcode.operation() {
            Operation::AtomicWrite => 8,
            _ if self.opcode.has_payload() => self.payload,
            _ => 0,
        };
        let mut header = TransportHeader::new(Bth::new(self.opcode, self.to.qpn, Psn::new(self.psn)));
        header.bth.pad = (payload.next_multiple_of(4) - payload) as u8;
        let has = |headers| self.opcode.headers().contains(headers);
        let key = RemoteKey(0x4444);
        header.deth =
            has(ExtendedHeaders::DETH).then_some(Deth { qkey: QueueKey::GSI, source_qp: self.from.qpn });
        header.xrceth = has(ExtendedHeaders::XRCETH).then_some(XrcEth(9));
        header.feth = has(ExtendedHeaders::FETH).then_some(Feth(1));
        header.reth =
            has(ExtendedHeaders::RETH).then_some(Reth { virtual_address: 0x1000, rkey: key, dma_length: 64 });
        header.atomic = has(ExtendedHeaders::ATOMIC).then_some(AtomicEth {
            virtual_address: 0x2000,
            rkey: key,
            swap_or_add: 3,
            compare: 4,
        });
        header.aeth = has(ExtendedHeaders::AETH).then_some(Aeth { syndrome: self.syndrome, msn: 1 });
        header.atomic_ack = has(ExtendedHeaders::ATOMIC_ACK).then_some(AtomicAckEth(5));
        header.immediate = has(ExtendedHeaders::IMMEDIATE).then_some(Immediate(6));
        header.ieth = has(ExtendedHeaders::IETH).then_some(Ieth(7));
        let mut bytes = vec![0; TransportHeader::MAX_LEN + 32];
        let at = header.emit(&mut bytes);
        bytes.truncate(at);
        bytes.resize(at + payload.next_multiple_of(4) + ICRC_LEN, 0);
        if let Some((class, attribute)) = self.management {
            bytes[at + 1] = class;
            bytes[at + 16..at + 18].copy_from_slice(&attribute.to_be_bytes());
        }
        Icrc::write(&addressing, &mut bytes);
        Frame::new(addressing, bytes)
    }
}

/// A management datagram from QP1 of Alice to QP1 of Bob.
pub(crate) fn management_datagram(class: u8, attribute: u16) -> Packet {
    let opcode =
        Opcode::new(Service::Ud, Operation::Send, Position::Only, ImmOrInvalidate::None).expect("an opcode");
    let gsi = |endpoint| Endpoint { qpn: Qpn::GSI, ..endpoint };
    Packet { management: Some((class, attribute)), ..Packet::new(opcode, 0) }
        .payload(256)
        .between(gsi(ALICE), gsi(BOB))
}

/// The output of a link.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Collected {
    pub deliveries: Vec<(u64, Direction, Frame)>,
    pub faults: Vec<Fault>,
}

impl Collected {
    /// The PSNs delivered, in the order of delivery.
    pub fn psns(&self) -> Vec<u32> {
        self.deliveries.iter().map(|(_, _, frame)| psn(frame)).collect()
    }

    pub fn times(&self) -> Vec<u64> {
        self.deliveries.iter().map(|(at_ns, _, _)| *at_ns).collect()
    }
}

impl LinkOutput for Collected {
    fn deliver(&mut self, at_ns: u64, direction: Direction, frame: Frame) {
        self.deliveries.push((at_ns, direction, frame));
    }

    fn report(&mut self, fault: Fault) {
        self.faults.push(fault);
    }
}

pub(crate) fn psn(frame: &Frame) -> u32 {
    TransportHeader::parse(&frame.bytes).expect("a header").0.bth.psn.value()
}
