//! Subnet administration: the manager answers queries for records (IBA 15). It knows nodes and links from its last sweep,
//! and reads the tables of nodes when a query asks for them.

use crate::manager::{Found, Manager};
use crate::packet::DEFAULT_P_KEY;
use crate::rmpp::Datagram;
use crate::subnet::Subnet;
use alloc::vec::Vec;
use softhca_wire::sa::{PathRecord, Query, RecordId, SaHeader};
use softhca_wire::smp::{
    Attribute, Block, GuidTable, Lid, MAX_HOPS, Method, NodeDescription, PartitionKeyTable, PortInfo, SlToVl,
    SmInfo, Status, SwitchInfo, VlArbitration,
};
use softhca_wire::{Gid, MadHeader, RmppHeader, RmppKind};

/// The most bytes of the records of a response.
const MAX_RECORDS: usize = 1 << 20;
/// SLtoVLMappingTableRecord has half of a block's words.
const SL_TO_VL: usize = 8;
/// The most paths that a query makes the manager follow.
const MAX_PATHS: usize = 1 << 16;
/// The agent's own version of the class.
const CLASS_VERSION: u8 = 2;
/// 4.096 µs · 2^18 is about a second.
const RESPONSE_TIME: u8 = 18;
/// How a path states its values: exactly.
const EXACTLY: u8 = 2;

/// Where a path begins or ends.
struct Endpoint {
    node: usize,
    lid: Lid,
    gid: Gid,
}

impl Manager {
    /// Answers a query for records. The response has the transaction ID of the query.
    pub fn answer(&mut self, subnet: &mut Subnet, query: &Datagram) -> Vec<u8> {
        let is_table = query[3] == Method::GET_TABLE.0;
        let answer = self.records(subnet, query, is_table).and_then(|(size, records)| {
            match (is_table, records.len()) {
                (false, 0) => Err(Status::NO_RECORDS),
                (false, length) if length > size => Err(Status::TOO_MANY_RECORDS),
                _ => Ok((size, records)),
            }
        });
        let mut header = *query;
        header[3] |= 0x80;
        if is_table {
            let segments =
                RmppHeader { version: 1, kind: RmppKind::DATA, is_active: true, ..RmppHeader::default() };
            segments.write_to(&mut header);
        }
        let records = match answer {
            Ok((size, records)) => {
                SaHeader { attribute_offset: (size / 8) as u16, ..SaHeader::of(query) }.write_to(&mut header);
                records
            }
            Err(status) => {
                header[4..6].copy_from_slice(&status.0.to_be_bytes());
                Vec::new()
            }
        };
        let mut response = [&header[..SaHeader::RECORDS], &records].concat();
        if !is_table {
            response.resize(MadHeader::DATAGRAM_LEN, 0);
        }
        response
    }

    /// The records that a query asks for one after another, and the bytes from one to the next.
    fn records(
        &mut self,
        subnet: &mut Subnet,
        mad: &Datagram,
        is_table: bool,
    ) -> Result<(usize, Vec<u8>), Status> {
        let is_get = mad[3] == Method::GET.0;
        if !is_get && !is_table {
            return Err(Status::UNSUPPORTED_METHOD);
        }
        let attribute = u16::from_be_bytes([mad[16], mad[17]]);
        let modifier = u32::from_be_bytes([mad[20], mad[21], mad[22], mad[23]]);
        let id = RecordId::from_number(attribute).ok_or(Status::UNSUPPORTED_ATTRIBUTE)?;
        let query = Query::of(id, modifier, mad).ok_or(Status::INVALID_REQUEST)?;
        let mut found = Records { query, size: 0, bytes: Vec::new(), is_full: false };
        match id {
            RecordId::ClassPortInfo => {
                let mut info = [0; 72];
                (info[0], info[1], info[7]) = (1, CLASS_VERSION, RESPONSE_TIME);
                found.push(&info);
            }
            RecordId::Path => self.paths(subnet, &mut found, is_get),
            _ => self.node_records(subnet, &mut found),
        }
        if found.is_full { Err(Status::NO_RESOURCES) } else { Ok((found.size, found.bytes)) }
    }

    /// Records with the LID of a node.
    fn node_records(&mut self, subnet: &mut Subnet, found: &mut Records<'_>) {
        let nodes = core::mem::take(&mut self.nodes);
        for node in &nodes {
            let Some(lid) = node.lid.filter(|lid| found.query.lid().is_none_or(|asked| asked == *lid)) else {
                continue;
            };
            if !found.is_full {
                self.records_of(subnet, &nodes, node, lid, found);
            }
        }
        self.nodes = nodes;
    }

    fn records_of(
        &mut self,
        subnet: &mut Subnet,
        nodes: &[Found],
        node: &Found,
        lid: Lid,
        found: &mut Records<'_>,
    ) {
        let path = &node.path[..];
        let [high, low] = lid.0.to_be_bytes();
        // An HCA answers for the port that was asked.
        let ports = if node.is_switch() {
            0..=node.info.port_count
        } else {
            node.info.local_port..=node.info.local_port
        };
        let switch = node.is_switch();
        match found.query.id {
            RecordId::Node => {
                let Some(description) = self.get::<NodeDescription>(subnet, path, 0) else { return };
                found.push(
                    &[&[high, low, 0, 0], &node.info.to_block().0[..40], &description.to_block().0].concat(),
                );
            }
            RecordId::PortInfo => {
                for port in ports {
                    found.push_block::<PortInfo>(
                        &[high, low, port, 0],
                        self.get(subnet, path, port.into()),
                        64,
                    );
                }
            }
            RecordId::SwitchInfo if switch => {
                found.push_block::<SwitchInfo>(&[high, low, 0, 0], self.get(subnet, path, 0), 20)
            }
            RecordId::LinearForwardingTable if switch => {
                let Some(info) = self.get::<SwitchInfo>(subnet, path, 0) else { return };
                for block in 0..=info.linear_top / Block::LEN as u16 {
                    let [block_high, block_low] = block.to_be_bytes();
                    let table = self.get_table(subnet, path, block.into());
                    let Some(table) = table else { continue };
                    found.push(&[&[high, low, block_high, block_low, 0, 0, 0, 0], &table.0[..]].concat());
                }
            }
            RecordId::SlToVl => {
                let outputs = ports.clone().filter(|port| *port != 0);
                for (input, output) in
                    outputs.flat_map(|output| ports.clone().map(move |input| (input, output)))
                {
                    let pair = if switch { [input, output] } else { [0, 0] };
                    let modifier = u32::from(u16::from_be_bytes(pair));
                    found.push_block::<SlToVl>(
                        &[high, low, pair[0], pair[1], 0, 0, 0, 0],
                        self.get(subnet, path, modifier),
                        SL_TO_VL,
                    );
                }
            }
            RecordId::SmInfo if path.is_empty() => {
                found.push_block::<SmInfo>(&[high, low, 0, 0], Some(self.sm_info(subnet)), 21);
            }
            RecordId::Link => {
                for link in &node.links {
                    let Some((peer, port)) = link.peer else { continue };
                    let [to_high, to_low] = nodes[peer].lid.unwrap_or_default().0.to_be_bytes();
                    found.push(&[high, low, link.port, port, to_high, to_low, 0, 0]);
                }
            }
            RecordId::GuidInfo => {
                found.push_block::<GuidTable>(&[high, low, 0, 0, 0, 0, 0, 0], self.get(subnet, path, 0), 64)
            }
            RecordId::PKeyTable => {
                let blocks = node.info.partition_cap.div_ceil(32) as u8;
                for (port, block) in ports.flat_map(|port| (0..blocks).map(move |block| (port, block))) {
                    let of_port = if switch { u32::from(port) << 16 } else { 0 };
                    let table = self.get::<PartitionKeyTable>(subnet, path, of_port | u32::from(block));
                    found.push_block(&[high, low, 0, block, port, 0, 0, 0], table, 64);
                }
            }
            RecordId::VlArbitration => {
                for (port, part) in
                    ports.filter(|port| *port != 0).flat_map(|port| (1..=4u8).map(move |part| (port, part)))
                {
                    let of_port = if switch { port.into() } else { 0 };
                    let table = self.get::<VlArbitration>(subnet, path, u32::from(part) << 16 | of_port);
                    found.push_block(&[high, low, port, part, 0, 0, 0, 0], table, 64);
                }
            }
            _ => {}
        }
    }

    /// The paths between the ports that a query names.
    fn paths(&self, subnet: &Subnet, found: &mut Records<'_>, only_first: bool) {
        let prefix = subnet.port_info(self.port).gid_prefix;
        let endpoints: Vec<Endpoint> = self.endpoints(prefix).collect();
        let is_source = |end: &&Endpoint| found.query.names_source(end.lid, end.gid);
        let is_destination = |end: &&Endpoint| found.query.names_destination(end.lid, end.gid);
        let sources: Vec<&Endpoint> = endpoints.iter().filter(is_source).collect();
        let destinations: Vec<&Endpoint> = endpoints.iter().filter(is_destination).collect();
        let mut pairs = sources.iter().flat_map(|source| destinations.iter().map(move |to| (source, to)));
        for (source, destination) in pairs.by_ref().take(MAX_PATHS) {
            let path = self.path(source, destination).filter(|path| found.query.accepts_path(path));
            if let Some(path) = &path {
                found.push(&path.to_bytes());
            }
            if found.is_full || only_first && path.is_some() {
                return;
            }
        }
        found.is_full |= pairs.next().is_some();
    }

    fn endpoints(&self, prefix: u64) -> impl Iterator<Item = Endpoint> + '_ {
        self.nodes.iter().enumerate().filter_map(move |(node, found)| {
            let gid = u128::from(prefix) << 64 | u128::from(found.info.port_guid);
            Some(Endpoint { node, lid: found.lid?, gid: Gid(gid.to_be_bytes()) })
        })
    }

    /// Follows the forwarding tables; `None` if they do not lead from one port to the other.
    fn path(&self, source: &Endpoint, destination: &Endpoint) -> Option<PathRecord> {
        let nodes = &self.nodes;
        let (mut at, mut mtu, mut rate) = (source.node, u8::MAX, u32::MAX);
        for _ in 0..=MAX_HOPS {
            if at == destination.node {
                break;
            }
            let port = match self.tables.get(&at) {
                Some(table) => *table.get(usize::from(destination.lid.0))?,
                None if at == source.node => nodes[at].info.local_port,
                None => return None,
            };
            let link = nodes[at].links.iter().find(|link| link.port == port)?;
            (mtu, rate) = (mtu.min(link.info.neighbor_mtu), rate.min(link.info.rate()));
            at = link.peer?.0;
        }
        let own = nodes[source.node].links.first();
        let (own_mtu, own_rate) = own.map_or((5, 0), |link| (link.info.neighbor_mtu, link.info.rate()));
        (at == destination.node).then(|| PathRecord {
            dgid: destination.gid,
            sgid: source.gid,
            dlid: destination.lid,
            slid: source.lid,
            is_reversible: true,
            count: 0,
            p_key: DEFAULT_P_KEY,
            mtu_selector: EXACTLY,
            mtu: if mtu == u8::MAX { own_mtu } else { mtu },
            rate_selector: EXACTLY,
            rate: PathRecord::rate_number(if rate == u32::MAX { own_rate } else { rate }),
            lifetime_selector: EXACTLY,
            lifetime: RESPONSE_TIME,
            ..PathRecord::default()
        })
    }
}

/// What a query has found.
struct Records<'a> {
    query: Query<'a>,
    size: usize,
    bytes: Vec<u8>,
    is_full: bool,
}

impl Records<'_> {
    /// Adds a record that has what the query asks for.
    fn push(&mut self, record: &[u8]) {
        if !self.query.matches(record) {
            return;
        }
        self.size = record.len().next_multiple_of(8);
        self.is_full |= self.bytes.len() + self.size > MAX_RECORDS;
        if !self.is_full {
            self.bytes.extend_from_slice(record);
            self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        }
    }

    /// Adds a record with the start of an attribute, unless the node did not answer.
    fn push_block<A: Attribute>(&mut self, start: &[u8], attribute: Option<A>, length: usize) {
        if let Some(attribute) = attribute {
            self.push(&[start, &attribute.to_block().0[..length]].concat());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MadClients, PortId, Registration, RoutingEngine, Topology, UserMadHeader};
    use proptest::prelude::*;

    /// A subnet with a manager, and the answer to a query from its last HCA.
    fn ask(topology: &str, method: Method, query: impl Fn(&mut Datagram, &Subnet)) -> Option<Vec<u8>> {
        let topology = Topology::generate(topology).expect("a generator").expect("valid arguments");
        let mut subnet = Subnet::new(topology);
        let ports: Vec<PortId> = subnet.topology().hcas().map(|node| PortId { node, port: 1 }).collect();
        let manager = Manager::new(&mut subnet, ports[0], RoutingEngine::UpDown);
        let mut clients = MadClients::new(subnet, Some(manager));
        let client = clients.open(*ports.last().expect("an HCA")).expect("a port");
        let registration =
            Registration { mgmt_class: 3, class_version: 2, rmpp_version: 1, ..Registration::default() };
        let agent = clients.register(client, registration).expect("an agent");
        let mut mad = [0; 256];
        (mad[0], mad[1], mad[2], mad[3]) = (1, 3, 2, method.0);
        query(&mut mad, clients.subnet());
        let lid = clients.subnet().port_info(ports[0]).lid;
        let header =
            UserMadHeader { agent, timeout_ms: 100, qp: 1, q_key: 0x8001_0000, lid, ..Default::default() };
        clients.send(client, &[&header.emit(256)[..], &mad].concat()).expect("sent");
        Some(clients.next_received(client)?[UserMadHeader::LEN..].to_vec())
    }

    fn set(mad: &mut Datagram, id: RecordId, mask: u64) {
        mad[16..18].copy_from_slice(&(id as u16).to_be_bytes());
        SaHeader { component_mask: mask, ..SaHeader::default() }.write_to(mad);
    }

    /// Status and records of a table.
    fn table(topology: &str, id: RecordId) -> (u16, usize) {
        let answer = ask(topology, Method::GET_TABLE, |mad, _| set(mad, id, 0)).expect("an answer");
        let size = usize::from(u16::from_be_bytes([answer[44], answer[45]])) * 8;
        (
            u16::from_be_bytes([answer[4], answer[5]]),
            (answer.len() - SaHeader::RECORDS).checked_div(size).unwrap_or(0),
        )
    }

    #[test]
    fn every_record_has_its_number() {
        // Four switches with three ports and a host each.
        for (id, count) in [
            (RecordId::ClassPortInfo, 1),
            (RecordId::Node, 8),
            (RecordId::PortInfo, 4 + 4 * 4),
            (RecordId::SlToVl, 4 + 4 * 12),
            (RecordId::SwitchInfo, 4),
            (RecordId::LinearForwardingTable, 4),
            (RecordId::SmInfo, 1),
            (RecordId::Link, 16),
            (RecordId::GuidInfo, 8),
            (RecordId::PKeyTable, 4 * 4 + 4 * 4 * 4),
            (RecordId::Path, 64),
            (RecordId::VlArbitration, 4 * 4 + 4 * 3 * 4),
        ] {
            assert_eq!(table("ring:4:1", id), (0, count), "{}", id.name());
        }
    }

    #[test]
    fn a_path_leads_where_the_tables_lead() {
        let answer = ask("ring:6:1", Method::GET, |mad, subnet| {
            set(mad, RecordId::Path, 1 << 4 | 1 << 5);
            let hosts: Vec<usize> = subnet.topology().hcas().collect();
            let lids = [hosts[3], hosts[0]]
                .map(|node| subnet.port_info(PortId { node, port: 1 }).lid.0.to_be_bytes());
            mad[96..100].copy_from_slice(&lids.concat());
        });
        let answer = answer.expect("an answer");
        assert_eq!(answer[3..6], [0x81, 0, 0]);
        // Exactly 4096 bytes, and exactly 100 Gb/s.
        assert_eq!(answer[SaHeader::RECORDS + 54..][..2], [0x85, 0x80 | 16]);
    }

    #[test]
    fn errors_have_their_status() {
        let status = |method, id, mask| {
            let answer = ask("one-switch", method, |mad, _| set(mad, id, mask)).expect("an answer");
            Status(u16::from_be_bytes([answer[4], answer[5]]))
        };
        assert_eq!(status(Method::GET, RecordId::Node, 0), Status::TOO_MANY_RECORDS);
        // No node has LID 0.
        assert_eq!(status(Method::GET, RecordId::Node, 1), Status::NO_RECORDS);
        assert_eq!(status(Method::GET_TABLE, RecordId::Node, 1), Status::OK);
        assert_eq!(status(Method::GET_TABLE, RecordId::Node, 1 << 40), Status::INVALID_REQUEST);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_query_panics(bytes in prop::collection::vec(any::<u8>(), 240), id in prop::sample::select(&RecordId::ALL[..]), is_table: bool) {
            let method = if is_table { Method::GET_TABLE } else { Method::GET };
            ask("ring:3:1", method, |mad, _| {
                mad[16..].copy_from_slice(&bytes);
                mad[16..18].copy_from_slice(&(id as u16).to_be_bytes());
                mad[24..36].fill(0);
            });
        }
    }
}
