//! The port of a host on an InfiniBand subnet: packets from the LRH to the VCRC take the place of datagrams.
//!
//! It writes and checks what only an InfiniBand link has: LRH, GRH, P_Keys and CRCs. The transport above it does not differ.

use softhca_engine::{Hca, PacketBatch};
use softhca_types::InfiniBandPort;
use softhca_wire::smp::{KeyViolation, TrapNumber};
use softhca_wire::{
    AddressHeaders, Bth, ICRC_LEN, LocalPacket, LocalRoute, Malformed, PartitionKey, Qpn, TransportHeader,
    VCRC_LEN,
};
use std::collections::BTreeSet;
use std::net::IpAddr;

/// The most packets that one poll receives.
pub(crate) const MAX_PACKETS_PER_POLL: usize = 64;
/// A P_Key that matches none.
const NO_P_KEY: PartitionKey = PartitionKey(0);

/// The subnet, as a host's port reaches it.
pub trait SubnetLink: Send {
    /// Whether anything has happened at the port since the last call: packets, room, or other attributes.
    fn take_ready(&mut self) -> bool;
    /// Whether the port may send now. If not, it becomes ready when it may.
    fn has_room(&mut self) -> bool;
    /// Sends packets, each from the LRH to the VCRC.
    fn send(&mut self, packets: &[Vec<u8>]);
    /// Receives up to so many packets. The port stays ready if it may have more.
    fn receive(&mut self, most: usize) -> Vec<Vec<u8>>;
    /// The attributes of the port, if they have changed since the last call.
    fn changed_port(&mut self) -> Option<InfiniBandPort>;
    /// Counts a wrong key, and reports it to the manager of the subnet.
    fn report(&mut self, trap: TrapNumber, violation: KeyViolation);
}

/// The port of a host on a subnet.
pub(crate) struct SubnetPort {
    pub link: Box<dyn SubnetLink>,
    /// Destinations that wait for room.
    blocked: BTreeSet<IpAddr>,
    /// The last poll left packets behind.
    pub has_more: bool,
}

/// What has arrived at a port, with its addressing and the range from the BTH to the pad bytes.
pub(crate) struct Arrived {
    pub addressing: AddressHeaders,
    pub transport: std::ops::Range<usize>,
}

impl SubnetPort {
    pub fn new(link: Box<dyn SubnetLink>) -> SubnetPort {
        SubnetPort { link, blocked: BTreeSet::new(), has_more: false }
    }

    /// Whether packets to a destination may be sent. If not, it is one of [`SubnetPort::take_blocked`] later.
    pub fn can_send(&mut self, destination: IpAddr) -> bool {
        let can_send = self.link.has_room();
        if !can_send {
            self.blocked.insert(destination);
        }
        can_send
    }

    /// The destinations that wait for room.
    pub fn take_blocked(&mut self) -> BTreeSet<IpAddr> {
        std::mem::take(&mut self.blocked)
    }

    /// Sends a batch. Its packets go from the BTH to the place of the ICRC.
    pub fn send(&mut self, hca: &Hca, batch: &PacketBatch, bytes: &[u8]) {
        let key = hca.p_key_of(batch.qpn).unwrap_or(NO_P_KEY);
        let (lrh, grh) = (batch.addressing.lrh(), batch.addressing.grh(0));
        let emit = |packet: &[u8]| {
            let mut transport = packet[..packet.len() - ICRC_LEN].to_vec();
            set_p_key(&mut transport, key);
            let mut whole = Vec::new();
            LocalPacket::emit(&lrh, grh.as_ref(), &transport, &mut whole).ok()?;
            Some(whole)
        };
        let packets: Vec<Vec<u8>> = bytes.chunks(batch.segment_size).filter_map(emit).collect();
        self.link.send(&packets);
    }

    /// Checks a packet that has arrived. Its P_Key then is the default one if the receiver accepts it, or else none.
    pub fn accept(&mut self, hca: &Hca, bytes: &mut [u8]) -> Result<Arrived, Malformed> {
        let local = LocalPacket::parse(bytes)?;
        if !local.icrc_is_valid() {
            return Err(Malformed::Checksum { what: "ICRC" });
        }
        let lrh = local.lrh;
        let route = LocalRoute { slid: lrh.slid, dlid: lrh.dlid, service_level: lrh.service_level };
        let addressing = AddressHeaders::routed(route, local.grh.as_ref());
        let end = bytes.len() - VCRC_LEN - ICRC_LEN;
        let start = end + ICRC_LEN - local.packet.len();
        let (header, _) = TransportHeader::parse(&local.packet[..end - start])?;
        let (bth, deth) = (header.bth, header.deth);
        let violation = |key| KeyViolation {
            source: lrh.slid,
            destination: lrh.dlid,
            key,
            sl: lrh.service_level,
            source_qp: deth.map_or(Qpn::default(), |deth| deth.source_qp),
            destination_qp: bth.destination_qp,
            ..KeyViolation::default()
        };
        let accepts = accepts_p_key(hca, bth.destination_qp, bth.pkey);
        if !accepts {
            self.link.report(TrapNumber::BAD_P_KEY, violation(bth.pkey.0.into()));
        } else if let Some(deth) = deth
            && hca.q_key_of(bth.destination_qp).is_some_and(|own| own != deth.qkey)
        {
            self.link.report(TrapNumber::BAD_Q_KEY, violation(deth.qkey.0));
        }
        set_p_key(&mut bytes[start..end], if accepts { PartitionKey::DEFAULT } else { NO_P_KEY });
        Ok(Arrived { addressing, transport: start..end })
    }
}

/// Whether the receiver of a packet accepts its P_Key: the queue pair by its own, a group and QP1 by any of the port.
fn accepts_p_key(hca: &Hca, receiver: Qpn, key: PartitionKey) -> bool {
    let matches = |own: PartitionKey| own.matches(key);
    match hca.infiniband_port() {
        Some(port) if receiver == Qpn::MULTICAST || receiver == Qpn::GSI => {
            port.p_keys.iter().any(|own| matches(PartitionKey(*own)))
        }
        _ => hca.p_key_of(receiver).is_some_and(matches),
    }
}

/// Writes the P_Key of a packet that begins with its BTH.
fn set_p_key(packet: &mut [u8], key: PartitionKey) {
    const P_KEY: std::ops::Range<usize> = 2..4;
    debug_assert!(packet.len() >= Bth::LEN);
    packet[P_KEY].copy_from_slice(&key.0.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_engine::{Context, Instant, MemoryObjects, Settings};
    use softhca_wire::smp::{Lid, PortInfo, PortState};
    use softhca_wire::{Deth, Grh, Lrh, Opcode, Psn, QueueKey};
    use std::sync::{Arc, Mutex};

    const UD_SEND_ONLY: u8 = 0x64;

    #[derive(Clone, Default)]
    struct Link {
        sent: Arc<Mutex<Vec<Vec<u8>>>>,
        reports: Arc<Mutex<Vec<(TrapNumber, KeyViolation)>>>,
    }

    impl SubnetLink for Link {
        fn take_ready(&mut self) -> bool {
            false
        }

        fn has_room(&mut self) -> bool {
            false
        }

        fn send(&mut self, packets: &[Vec<u8>]) {
            self.sent.lock().unwrap().extend_from_slice(packets);
        }

        fn receive(&mut self, _: usize) -> Vec<Vec<u8>> {
            Vec::new()
        }

        fn changed_port(&mut self) -> Option<InfiniBandPort> {
            None
        }

        fn report(&mut self, trap: TrapNumber, violation: KeyViolation) {
            self.reports.lock().unwrap().push((trap, violation));
        }
    }

    /// The port with LID 6 in a partition whose key is 0x8001.
    fn hca() -> Hca {
        let mut hca = Hca::new(Settings::default(), Vec::new());
        let info = PortInfo { lid: Lid(6), state: PortState::ACTIVE, neighbor_mtu: 5, ..PortInfo::default() };
        let port = InfiniBandPort::new(1, &info, &[2], &[0x8001, 0], 0);
        let mut memory = MemoryObjects::default();
        let mut events = |_: Instant, _: &_| {};
        let mut ctx = Context { now: Instant::from_nanos(0), memory: &mut memory, events: &mut events };
        hca.set_infiniband_port(&mut ctx, port);
        hca
    }

    fn datagram(pkey: PartitionKey, receiver: Qpn, grh: Option<&Grh>) -> Vec<u8> {
        let opcode = Opcode::from_byte(UD_SEND_ONLY).expect("it is defined");
        let mut header = TransportHeader::new(Bth { pkey, ..Bth::new(opcode, receiver, Psn::new(0)) });
        header.deth = Some(Deth { qkey: QueueKey(7), source_qp: Qpn::new(33) });
        let mut transport = [0; Bth::LEN + 8 + 4];
        header.emit(&mut transport);
        let lrh = Lrh { slid: Lid(4), dlid: Lid(6), service_level: 3, ..Lrh::default() };
        let mut bytes = Vec::new();
        LocalPacket::emit(&lrh, grh, &transport, &mut bytes).expect("it fits");
        bytes
    }

    #[test]
    fn the_transport_sees_the_default_key_where_the_port_accepts_a_packet() {
        let (hca, link) = (hca(), Link::default());
        let mut port = SubnetPort::new(Box::new(link.clone()));
        let header = [[0x60, 0, 0, 0, 0, 0, 0x1b, 1].as_slice(), &[0xff; 32]].concat();
        let (grh, ..) = Grh::parse(&header).expect("a header");
        for (receiver, grh) in [(Qpn::new(500), None), (Qpn::GSI, None), (Qpn::MULTICAST, Some(&grh))] {
            for (key, expected) in
                [(0x8001, PartitionKey::DEFAULT), (1, PartitionKey::DEFAULT), (0xffff, NO_P_KEY)]
            {
                let mut bytes = datagram(PartitionKey(key), receiver, grh);
                let Arrived { addressing, transport } = port.accept(&hca, &mut bytes).expect("a packet");
                let bth = Bth::parse(&bytes[transport]).expect("a BTH");
                assert_eq!((bth.pkey, bth.destination_qp), (expected, receiver), "{key:#x}");
                assert_eq!((addressing.local.slid, addressing.local.service_level), (Lid(4), 3));
                assert_eq!(addressing.grh(0).is_some(), grh.is_some());
            }
        }
        let reports = link.reports.lock().unwrap();
        assert_eq!(reports.len(), 3);
        let (trap, violation) = reports[0];
        assert_eq!((trap, violation.key, violation.source), (TrapNumber::BAD_P_KEY, 0xffff, Lid(4)));
        assert_eq!((violation.source_qp, violation.destination_qp), (Qpn::new(33), Qpn::new(500)));
    }

    #[test]
    fn packets_leave_with_the_key_of_the_table_and_damaged_ones_are_not_accepted() {
        let (hca, link) = (hca(), Link::default());
        let mut port = SubnetPort::new(Box::new(link.clone()));
        let route = LocalRoute { slid: Lid(6), dlid: Lid(4), service_level: 1 };
        let whole = datagram(PartitionKey::DEFAULT, Qpn::new(9), None);
        let packet = LocalPacket::parse(&whole).expect("a packet").packet;
        let batch = PacketBatch {
            addressing: AddressHeaders::routed(route, None),
            segment_size: packet.len(),
            packets: 2,
            bytes: 2 * packet.len(),
            is_unacknowledged: true,
            qpn: Qpn::new(33),
            service_level: 1,
            elided_payload: 0,
        };
        port.send(&hca, &batch, &[packet, packet].concat());
        let mut sent = std::mem::take(&mut *link.sent.lock().unwrap());
        assert_eq!(sent.len(), 2);
        let local = LocalPacket::parse(&sent[0]).expect("a packet");
        assert!(local.icrc_is_valid());
        assert_eq!((local.lrh.slid, local.lrh.dlid, local.lrh.service_level), (Lid(6), Lid(4), 1));
        assert_eq!(local.transport().expect("a datagram").header.bth.pkey, PartitionKey(0x8001));
        let bytes = &mut sent[1];
        bytes[30] ^= 1;
        assert!(matches!(port.accept(&hca, bytes), Err(Malformed::Checksum { .. })));
        assert!(port.accept(&hca, &mut bytes[..9]).is_err());
        assert!(!port.can_send(batch.addressing.destination));
        assert_eq!(port.take_blocked(), BTreeSet::from([batch.addressing.destination]));
    }
}
