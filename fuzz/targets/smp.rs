//! SMPs and other MADs from a host of a managed subnet: the agents must answer or drop them, and stay usable.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_subnet::{Manager, Packet, PortId, RoutingEngine, Subnet, Topology};
use softhca_wire::MadHeader;
use softhca_wire::smp::Lid;

fuzz_target!(|data: &[u8]| {
    let topology = Topology::generate("ring:3").expect("a generator").expect("valid arguments");
    let hosts: Vec<usize> = topology.hcas().collect();
    let mut subnet = Subnet::new(topology);
    let port = |host: u8| PortId { node: hosts[usize::from(host) % hosts.len()], port: 1 };
    let mut manager = Manager::new(&mut subnet, port(0), RoutingEngine::UpDown);
    manager.sweep_if_needed(&mut subnet);
    let mut now = 0;
    // Each MAD: its sender, the queue pair, the LID, the time since the last one, and its first bytes.
    let mut rest = data;
    while let [host, qp, high, low, time, length, class, tail @ ..] = rest {
        let (start, after) = tail.split_at(usize::from(*length).min(tail.len()));
        rest = after;
        let mut mad = [0; MadHeader::DATAGRAM_LEN];
        mad[..start.len()].copy_from_slice(start);
        (mad[0], mad[1], mad[2]) = (1, *class, 1);
        let qp = u32::from(qp & 1);
        let dlid = Lid(u16::from_be_bytes([*high, *low]));
        let slid = subnet.port_info(port(*host)).lid;
        if let Ok(mad) = Packet::parse_mad(qp, &mad) {
            let packet = Packet { slid, dlid, sl: 0, p_key: 0xffff, q_key: 0x8001_0000, source_qp: qp, destination_qp: qp, mad };
            subnet.send(port(*host), packet);
        }
        now += u64::from(*time) << 24;
        subnet.expire(now);
        while let Some((at, packet)) = subnet.take_arrived() {
            if at == manager.port() {
                manager.receive(&mut subnet, &packet);
            }
        }
        manager.sweep_if_needed(&mut subnet);
    }
});
