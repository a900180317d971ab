//! Messages of programs with open ports, RMPP among them: none may end the daemon, and queues stay bounded.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_subnet::{
    MAX_RECEIVED, MadClients, Manager, PortId, Registration, RoutingEngine, Subnet, Topology, UserMadHeader,
};

const CLASSES: [u8; 5] = [0x01, 0x81, 0x03, 0x04, 0x32];

fuzz_target!(|data: &[u8]| {
    let topology = Topology::generate("one-switch:3").expect("a generator").expect("valid arguments");
    let ports: Vec<PortId> = topology.hcas().map(|node| PortId { node, port: 1 }).collect();
    let mut subnet = Subnet::new(topology);
    let manager = Manager::new(&mut subnet, ports[0], RoutingEngine::MinHop);
    let mut clients = MadClients::new(subnet, Some(manager));
    let programs: Vec<_> = ports.iter().map(|port| clients.open(*port).expect("a port")).collect();
    for program in &programs {
        for mgmt_class in CLASSES {
            let class_version = if mgmt_class == 3 { 2 } else { 1 };
            let registration = Registration { mgmt_class, class_version, methods: [!0; 2], oui: Some([0; 3]), rmpp_version: 1 };
            clients.register(*program, registration).expect("an agent");
        }
    }
    let lids: Vec<u16> = ports.iter().map(|port| clients.subnet().port_info(*port).lid.0).collect();
    let mut now = 0;
    // Each message: its sender and receiver, its class, how long the MAD is, the time since the last one, whether the
    // receiver reads, and its first bytes.
    let mut rest = data;
    while let [ends, class, high, low, time, reads, length, tail @ ..] = rest {
        let (start, after) = tail.split_at(usize::from(*length).min(tail.len()));
        rest = after;
        let index = usize::from(*class) % CLASSES.len();
        let mut mad = vec![0; usize::from(u16::from_be_bytes([*high, *low])).min(4000)];
        let count = start.len().min(mad.len());
        mad[..count].copy_from_slice(&start[..count]);
        if mad.len() >= 3 {
            (mad[0], mad[1], mad[2]) = (1, CLASSES[index], if CLASSES[index] == 3 { 2 } else { 1 });
        }
        let header = UserMadHeader {
            agent: index as u32,
            timeout_ms: u32::from(*time),
            retries: u32::from(reads >> 4),
            qp: u32::from(index > 1),
            q_key: 0x8001_0000,
            lid: softhca_wire::smp::Lid(lids[usize::from(ends >> 4) % lids.len()]),
            ..UserMadHeader::default()
        };
        let sender = programs[usize::from(ends & 15) % programs.len()];
        clients.send_or_fail(sender, &[&header.emit(mad.len())[..], &mad].concat());
        now += u64::from(*time) << 22;
        clients.expire(now);
        for program in &programs {
            let mut count = 0;
            while reads & 1 != 0 && clients.next_received(*program).is_some() {
                count += 1;
            }
            assert!(count <= MAX_RECEIVED);
        }
    }
    clients.expire(u64::MAX / 2);
});
