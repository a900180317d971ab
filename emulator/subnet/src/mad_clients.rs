//! The programs that send and receive MADs at the ports of HCAs, as Linux's MAD layer serves them: agents, transaction
//! IDs, timeouts, retries, and the choice of the agent that gets a request.

use crate::drop_reason::DropReason;
use crate::manager::Manager;
use crate::packet::{Mad, Packet};
use crate::rmpp::{self, Assembled, Assembly, Datagram, Transfer};
use crate::subnet::Subnet;
use crate::topology::PortId;
use crate::user_mad::UserMadHeader;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use softhca_wire::smp::{Lid, Method, Smp, Status};
use softhca_wire::{MadHeader, RmppHeader, RmppKind};
use thiserror::Error;

/// The most programs that have a port open.
pub const MAX_CLIENTS: usize = 512;
/// The most agents of a client: Linux's limit.
pub const MAX_AGENTS: usize = 32;
/// The most requests of a client that wait for a response.
pub const MAX_REQUESTS: usize = 1024;
/// The most MADs that wait to be read by a client.
pub const MAX_RECEIVED: usize = 2048;
/// The most bytes of a MAD, segments joined.
pub const MAX_MAD: usize = 2 << 20;
/// The most bytes of MADs that wait to be read by a client.
pub const MAX_RECEIVED_BYTES: usize = 8 << 20;
/// The most MADs of a client that are sent in segments at a time, and the most that arrive.
pub const MAX_TRANSFERS: usize = 16;
/// How long a sender of segments waits for an ACK, and how often it sends them again.
const ACK_TIMEOUT: u64 = 500 * MILLISECOND;
const ACK_RETRIES: u32 = 4;
/// How long a receiver waits for the next segment.
const ASSEMBLY_TIMEOUT: u64 = 10_000 * MILLISECOND;
/// The status of a request without a response: Linux's ETIMEDOUT.
const TIMED_OUT: u32 = 110;
const MILLISECOND: u64 = 1_000_000;
/// Where a MAD of a vendor class has its OUI.
const OUI: core::ops::Range<usize> = 37..40;
/// The classes whose MADs have an OUI.
const OUI_CLASSES: core::ops::RangeInclusive<u8> = 0x30..=0x4f;

/// A program that has opened a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClientId(pub u64);

/// Which MADs an agent takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Registration {
    /// The management class.
    pub mgmt_class: u8,
    /// The version of the class.
    pub class_version: u8,
    /// The methods of requests that the agent takes, one bit each. Responses need none.
    pub methods: [u64; 2],
    /// The OUI of a vendor class.
    pub oui: Option<[u8; 3]>,
    /// The version of RMPP that the card executes for the agent; zero for none.
    pub rmpp_version: u8,
}

/// Why a call of a program failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MadError {
    /// The client, agent, class or address does not exist.
    #[error("invalid client, agent, class or address")]
    Invalid,
    /// Another agent takes one of the methods.
    #[error("another agent of the port takes one of the methods")]
    MethodInUse,
    /// A limit is reached.
    #[error("too many clients, agents or requests")]
    Limit,
    /// A MAD beyond one datagram needs RMPP.
    #[error("the MAD is longer than 256 bytes")]
    TooLong,
}

impl MadError {
    /// The errno that Linux returns.
    pub const fn errno(self) -> i32 {
        match self {
            MadError::Invalid | MadError::MethodInUse => 22, // EINVAL
            MadError::Limit => 12,                           // ENOMEM
            MadError::TooLong => 90,                         // EMSGSIZE
        }
    }
}

struct Agent {
    registration: Registration,
    /// The upper half of its transaction IDs.
    transactions: u32,
}

/// A request that waits for its response.
struct Request {
    header: UserMadHeader,
    packet: Packet,
    retries: u32,
    deadline: u64,
}

/// A MAD that is sent in segments.
struct Sending {
    transfer: Transfer,
    header: UserMadHeader,
    /// A packet with any segment.
    packet: Packet,
    retries: u32,
    deadline: u64,
}

struct Client {
    port: PortId,
    agents: BTreeMap<u32, Agent>,
    requests: BTreeMap<u64, Request>,
    received: VecDeque<Vec<u8>>,
    received_bytes: usize,
    /// By transaction ID, as `assemblies`.
    transfers: BTreeMap<u64, Sending>,
    /// With the time of their end.
    assemblies: BTreeMap<u64, (Assembly, u64)>,
}

impl Client {
    fn new(port: PortId) -> Client {
        Client {
            port,
            agents: BTreeMap::new(),
            requests: BTreeMap::new(),
            received: VecDeque::new(),
            received_bytes: 0,
            transfers: BTreeMap::new(),
            assemblies: BTreeMap::new(),
        }
    }

    /// Queues a MAD for the program, if there is room.
    fn push(&mut self, header: &UserMadHeader, mad: &[u8]) -> bool {
        let bytes = UserMadHeader::LEN + mad.len();
        let has_room =
            self.received.len() < MAX_RECEIVED && self.received_bytes + bytes <= MAX_RECEIVED_BYTES;
        if has_room {
            self.received.push_back([&header.emit(mad.len())[..], mad].concat());
            self.received_bytes += bytes;
        }
        has_room
    }

    /// The agent that takes a MAD: that of the request for a response.
    fn agent_for(&self, mad: &Datagram) -> Option<u32> {
        if Method(mad[3]).is_response() {
            return self.requests.get(&transaction_id(mad)).map(|request| request.header.agent);
        }
        self.agents.iter().find(|(_, agent)| agent.registration.takes(mad)).map(|(number, _)| *number)
    }
}

/// A subnet with the programs at its ports, and perhaps a manager.
pub struct MadClients {
    subnet: Subnet,
    manager: Option<Manager>,
    /// The client that receives the queries for the manager.
    administration: Option<ClientId>,
    clients: BTreeMap<ClientId, Client>,
    last_client: u64,
    /// The upper halves of transaction IDs that are in use.
    last_transactions: u32,
    now: u64,
}

impl MadClients {
    /// A subnet without programs. A manager sweeps at once.
    pub fn new(subnet: Subnet, manager: Option<Manager>) -> MadClients {
        let clients = BTreeMap::new();
        let (last_client, last_transactions) = (0, 0);
        let mut all = MadClients {
            subnet,
            manager,
            administration: None,
            clients,
            last_client,
            last_transactions,
            now: 0,
        };
        all.administration =
            all.manager.as_ref().map(Manager::port).and_then(|port| all.administer(port).ok());
        all.dispatch_arrived();
        all
    }

    /// Receives queries for the manager at its port, as a program would.
    fn administer(&mut self, port: PortId) -> Result<ClientId, MadError> {
        let client = self.open(port)?;
        let methods = [Method::GET, Method::GET_TABLE].iter().fold(0, |bits, method| bits | 1 << method.0);
        let registration = Registration {
            mgmt_class: MadHeader::CLASS_SA,
            class_version: 2,
            methods: [methods, 0],
            oui: None,
            rmpp_version: 1,
        };
        self.register(client, registration)?;
        Ok(client)
    }

    /// Answers the queries for the manager. Returns whether there were any.
    fn answer_queries(&mut self) -> bool {
        let mut has_answered = false;
        while let Some(client) = self.administration
            && let Some(query) = self.next_received(client)
        {
            let (Some(manager), Some((header, mad))) = (&mut self.manager, query.split_first_chunk()) else {
                break;
            };
            let Some(mad) = mad.first_chunk() else { continue };
            let header = UserMadHeader { timeout_ms: 0, ..UserMadHeader::parse(header) };
            let response = manager.answer(&mut self.subnet, mad);
            let message = [&header.emit(response.len())[..], &response].concat();
            if self.transmit(client, &message).is_err() {
                self.subnet.count_drop(DropReason::QueueFull);
            }
            has_answered = true;
        }
        has_answered
    }

    /// The subnet.
    pub fn subnet(&self) -> &Subnet {
        &self.subnet
    }

    /// Changes the subnet: a fault, or a manager at a port.
    pub fn change<R>(&mut self, change: impl FnOnce(&mut Subnet) -> R) -> R {
        let result = change(&mut self.subnet);
        self.dispatch_arrived();
        result
    }

    /// Passes packets of devices, which no program and no manager waits for.
    pub fn pass_data<R>(&mut self, pass: impl FnOnce(&mut Subnet) -> R) -> R {
        pass(&mut self.subnet)
    }

    /// The ports whose attributes have changed since the last call.
    pub fn take_changed(&mut self) -> alloc::collections::BTreeSet<PortId> {
        self.subnet.take_changed()
    }

    /// Opens a port of an HCA.
    pub fn open(&mut self, port: PortId) -> Result<ClientId, MadError> {
        let is_port = self.subnet.topology().hcas().any(|node| node == port.node)
            && (1..=self.subnet.topology().nodes[port.node].port_count()).contains(&port.port);
        if !is_port {
            return Err(MadError::Invalid);
        }
        if self.clients.len() >= MAX_CLIENTS {
            return Err(MadError::Limit);
        }
        self.last_client += 1;
        let id = ClientId(self.last_client);
        self.clients.insert(id, Client::new(port));
        Ok(id)
    }

    /// Closes a client with all of its agents.
    pub fn close(&mut self, client: ClientId) {
        self.clients.remove(&client);
    }

    /// Registers an agent and returns its number.
    pub fn register(&mut self, client: ClientId, registration: Registration) -> Result<u32, MadError> {
        let port = self.clients.get(&client).ok_or(MadError::Invalid)?.port;
        let Registration { mgmt_class, class_version, methods, oui, .. } = registration;
        let needs_oui = OUI_CLASSES.contains(&mgmt_class) && methods != [0; 2];
        let is_class = mgmt_class == Smp::CLASS_DIRECTED || (1..=*OUI_CLASSES.end()).contains(&mgmt_class);
        if !is_class || needs_oui && oui.is_none() {
            return Err(MadError::Invalid);
        }
        let others = self.clients.values().filter(|other| other.port == port);
        let mut others = others.flat_map(|other| other.agents.values()).map(|agent| &agent.registration);
        let is_taken = others.any(|other| {
            let has_method = other.methods.iter().zip(methods).any(|(taken, new)| taken & new != 0);
            (other.mgmt_class, other.class_version, other.oui) == (mgmt_class, class_version, oui)
                && has_method
        });
        if is_taken {
            return Err(MadError::MethodInUse);
        }
        self.last_transactions = self.last_transactions.wrapping_add(1);
        let agent = Agent { registration, transactions: self.last_transactions };
        let agents = &mut self.clients.get_mut(&client).ok_or(MadError::Invalid)?.agents;
        let free = (0..MAX_AGENTS as u32).find(|number| !agents.contains_key(number));
        let number = free.ok_or(MadError::Limit)?;
        agents.insert(number, agent);
        Ok(number)
    }

    /// Removes an agent. Its requests end without a response.
    pub fn unregister(&mut self, client: ClientId, agent: u32) -> Result<(), MadError> {
        let client = self.clients.get_mut(&client).ok_or(MadError::Invalid)?;
        client.agents.remove(&agent).ok_or(MadError::Invalid)?;
        client.requests.retain(|_, request| request.header.agent != agent);
        client.transfers.retain(|_, sending| sending.header.agent != agent);
        Ok(())
    }

    /// Sends a MAD with its header. A request that cannot be sent returns at once with the reason as its status, because
    /// its sender waits.
    pub fn send_or_fail(&mut self, client: ClientId, bytes: &[u8]) {
        let Err(error) = self.send(client, bytes) else { return };
        self.subnet.count_drop(DropReason::Malformed);
        let Some((header, mad)) = bytes.split_first_chunk() else { return };
        let header = UserMadHeader::parse(header);
        let waiting = self.clients.get_mut(&client).filter(|_| header.timeout_ms != 0);
        if let (Some(client), Some(mad)) = (waiting, mad.get(..MadHeader::LEN)) {
            client.push(&UserMadHeader { status: error.errno() as u32, ..header }, mad);
        }
    }

    /// Sends a MAD with its header.
    pub fn send(&mut self, client: ClientId, bytes: &[u8]) -> Result<(), MadError> {
        self.transmit(client, bytes)?;
        self.dispatch_arrived();
        Ok(())
    }

    fn transmit(&mut self, client: ClientId, bytes: &[u8]) -> Result<(), MadError> {
        let (header, mad) = bytes.split_first_chunk().ok_or(MadError::Invalid)?;
        let header = UserMadHeader::parse(header);
        if mad.len() > MAX_MAD {
            return Err(MadError::TooLong);
        }
        if mad.len() < MadHeader::LEN {
            return Err(MadError::Invalid);
        }
        let owner = self.clients.get_mut(&client).ok_or(MadError::Invalid)?;
        let agent = owner.agents.get(&header.agent).ok_or(MadError::Invalid)?;
        let mut whole = mad.to_vec();
        let is_request = !Method(whole[3]).is_response();
        if is_request {
            whole[8..12].copy_from_slice(&agent.transactions.to_be_bytes());
        }
        if header.qp > 1 {
            return Err(MadError::Invalid);
        }
        let mut data = [0; MadHeader::DATAGRAM_LEN];
        let start = whole.len().min(MadHeader::DATAGRAM_LEN);
        data[..start].copy_from_slice(&whole[..start]);
        let uses_rmpp = agent.registration.rmpp_version != 0 && header.qp == 1 && rmpp::wants_segments(&data);
        let transfer = if uses_rmpp { Transfer::new(&whole) } else { None };
        if transfer.is_none() && whole.len() > MadHeader::DATAGRAM_LEN {
            return Err(MadError::TooLong);
        }
        let mad = Packet::parse_mad(header.qp, &data).map_err(|_| MadError::Invalid)?;
        let port = owner.port;
        let p_key = self.subnet.p_keys(port).get(usize::from(header.p_key_index)).copied();
        let packet = Packet {
            slid: self.source_lid(port, header.path_bits),
            dlid: header.lid,
            sl: header.sl,
            p_key: p_key.ok_or(MadError::Invalid)?,
            q_key: header.q_key,
            source_qp: header.qp,
            destination_qp: header.qp,
            mad,
        };
        let owner = self.clients.get_mut(&client).ok_or(MadError::Invalid)?;
        if transfer.is_some() && owner.transfers.len() >= MAX_TRANSFERS {
            return Err(MadError::Limit);
        }
        if is_request && header.timeout_ms != 0 {
            if owner.requests.len() >= MAX_REQUESTS {
                return Err(MadError::Limit);
            }
            let deadline = self.now + u64::from(header.timeout_ms) * MILLISECOND;
            let request = Request { header, packet, retries: header.retries, deadline };
            owner.requests.insert(transaction_id(&data), request);
        }
        match transfer {
            None => self.subnet.send(port, packet),
            Some(transfer) => {
                let deadline = self.now + ACK_TIMEOUT;
                let sending = Sending { transfer, header, packet, retries: ACK_RETRIES, deadline };
                let segments = sending.segments();
                owner.transfers.insert(transaction_id(&data), sending);
                segments.into_iter().for_each(|segment| self.subnet.send(port, segment));
            }
        }
        Ok(())
    }

    fn source_lid(&self, port: PortId, path_bits: u8) -> Lid {
        let info = self.subnet.port_info(port);
        Lid(info.lid.0 | u16::from(path_bits) & ((1 << info.lmc) - 1))
    }

    /// The next MAD for a client, with its header.
    pub fn next_received(&mut self, client: ClientId) -> Option<Vec<u8>> {
        let client = self.clients.get_mut(&client)?;
        let mad = client.received.pop_front()?;
        client.received_bytes -= mad.len();
        Some(mad)
    }

    /// The clients that have something to read.
    pub fn readable(&self) -> impl Iterator<Item = ClientId> + '_ {
        self.clients.iter().filter(|(_, client)| !client.received.is_empty()).map(|(id, _)| *id)
    }

    /// Advances the time, in nanoseconds, without doing what is due.
    pub fn advance(&mut self, now: u64) {
        self.now = self.now.max(now);
        self.subnet.advance(self.now);
    }

    /// Says that a program manages the subnet at a port, or has ended. The manager of the subnet stays one.
    pub fn set_is_sm(&mut self, port: PortId, is_sm: bool) {
        if self.manager.as_ref().is_none_or(|manager| manager.port() != port) {
            self.change(|subnet| subnet.set_is_sm(port, is_sm));
        }
    }

    /// Whether a request waits for its response, or a trap to be repeated.
    pub fn has_timeouts(&self) -> bool {
        let is_waiting = |client: &Client| {
            !client.requests.is_empty() || !client.transfers.is_empty() || !client.assemblies.is_empty()
        };
        self.subnet.next_timeout().is_some() || self.clients.values().any(is_waiting)
    }

    /// When [`MadClients::expire`] has something to do.
    pub fn next_timeout(&self) -> Option<u64> {
        let requests = self.clients.values().flat_map(|client| client.requests.values());
        let transfers = self.clients.values().flat_map(|client| client.transfers.values());
        let assemblies = self.clients.values().flat_map(|client| client.assemblies.values());
        let deadlines = requests.map(|request| request.deadline);
        let deadlines = deadlines.chain(transfers.map(|sending| sending.deadline));
        deadlines.chain(assemblies.map(|(_, end)| *end)).chain(self.subnet.next_timeout()).min()
    }

    /// Advances the time, in nanoseconds: requests are sent again or fail, and agents repeat their traps.
    pub fn expire(&mut self, now: u64) {
        self.now = self.now.max(now);
        self.subnet.expire(self.now);
        let mut again = Vec::new();
        for client in self.clients.values_mut() {
            let mut failed = Vec::new();
            for (id, request) in client.requests.iter_mut().filter(|(_, request)| request.deadline <= now) {
                request.deadline = now + u64::from(request.header.timeout_ms) * MILLISECOND;
                match request.retries.checked_sub(1) {
                    Some(left) => {
                        request.retries = left;
                        again.push((client.port, request.packet));
                    }
                    None => failed.push(*id),
                }
            }
            for id in failed {
                let Some(request) = client.requests.remove(&id) else { continue };
                let header = UserMadHeader { status: TIMED_OUT, ..request.header };
                client.push(&header, &request.packet.mad_bytes()[..MadHeader::LEN]);
            }
            client.assemblies.retain(|_, (_, end)| *end > now);
            let port = client.port;
            client.transfers.retain(|_, sending| {
                if sending.deadline <= now {
                    sending.deadline = now + ACK_TIMEOUT;
                    let Some(left) = sending.retries.checked_sub(1) else { return false };
                    sending.retries = left;
                    again.extend(sending.segments().into_iter().map(|segment| (port, segment)));
                }
                true
            });
        }
        again.into_iter().for_each(|(port, packet)| self.subnet.send(port, packet));
        self.dispatch_arrived();
    }

    /// Hands the MADs that arrived to the manager and to clients, until nothing is left to do.
    fn dispatch_arrived(&mut self) {
        loop {
            while let Some((at, packet)) = self.subnet.take_arrived() {
                let manager = self.manager.as_mut().filter(|manager| manager.port() == at);
                if !manager.is_some_and(|manager| manager.receive(&mut self.subnet, &packet)) {
                    self.dispatch(at, &packet);
                }
            }
            let has_answered = self.answer_queries();
            let swept = self.manager.as_mut().and_then(|manager| manager.sweep_if_needed(&mut self.subnet));
            if swept.is_none() && !has_answered {
                return;
            }
        }
    }

    fn dispatch(&mut self, at: PortId, packet: &Packet) {
        let mad = packet.mad_bytes();
        let is_segmented = packet.destination_qp == 1 && rmpp::is_active(&mad);
        if is_segmented && RmppHeader::of(&mad).kind != RmppKind::DATA && self.continue_transfer(at, &mad) {
            return;
        }
        let mut clients = self.clients.iter_mut().filter(|(_, client)| client.port == at);
        let found = clients.find_map(|(_, client)| Some((client.agent_for(&mad)?, client)));
        let Some((agent, client)) = found else { return self.reject(at, packet, mad) };
        let uses_rmpp = client.agents.get(&agent).is_some_and(|agent| agent.registration.rmpp_version != 0);
        let p_keys = self.subnet.p_keys(at);
        let matches = |key: &u16| key & 0x7fff == packet.p_key & 0x7fff;
        let header = UserMadHeader {
            agent,
            qp: packet.source_qp,
            q_key: packet.q_key,
            lid: packet.slid,
            sl: packet.sl,
            p_key_index: p_keys.iter().position(matches).unwrap_or(0) as u16,
            ..UserMadHeader::default()
        };
        let id = transaction_id(&mad);
        let (complete, answer) = match is_segmented && uses_rmpp {
            true => client.assemble(id, &mad, self.now),
            false => (Some(mad.to_vec()), None),
        };
        if let Some(complete) = complete {
            if Method(mad[3]).is_response() {
                client.requests.remove(&id);
            }
            if !client.push(&header, &complete) {
                self.subnet.count_drop(DropReason::QueueFull);
            }
        }
        if let Some(answer) = answer {
            let (source_qp, destination_qp) = (packet.destination_qp, packet.source_qp);
            let (slid, dlid, mad) = (self.source_lid(at, 0), packet.slid, Mad::General(answer));
            self.subnet.send(at, Packet { slid, dlid, source_qp, destination_qp, mad, ..*packet });
        }
    }

    /// Handles what the receiver of a transfer says. Returns false if no transfer of a program at the port has this ID.
    fn continue_transfer(&mut self, at: PortId, mad: &Datagram) -> bool {
        let (id, answer) = (transaction_id(mad), RmppHeader::of(mad));
        let mut clients = self.clients.values_mut().filter(|client| client.port == at);
        let Some(client) = clients.find(|client| client.transfers.contains_key(&id)) else { return false };
        let Some(sending) = client.transfers.get_mut(&id) else { return false };
        let is_complete = match answer.kind {
            RmppKind::ACK => sending.transfer.acknowledge(&answer),
            _ => Some(true),
        };
        match is_complete {
            Some(true) => drop(client.transfers.remove(&id)),
            Some(false) => {
                (sending.retries, sending.deadline) = (ACK_RETRIES, self.now + ACK_TIMEOUT);
                let segments = sending.segments();
                segments.into_iter().for_each(|segment| self.subnet.send(at, segment));
            }
            None => {}
        }
        true
    }

    /// Answers a Get or Set that no agent takes, so that the requester need not wait.
    fn reject(&mut self, at: PortId, packet: &Packet, mut mad: [u8; MadHeader::DATAGRAM_LEN]) {
        self.subnet.count_drop(DropReason::NoAgent);
        if !matches!(Method(mad[3]), Method::GET | Method::SET) {
            return;
        }
        let direction = if mad[1] == Smp::CLASS_DIRECTED { 0x8000 } else { 0 };
        mad[3] = Method::GET_RESP.0;
        mad[4..6].copy_from_slice(&(Status::UNSUPPORTED_ATTRIBUTE.0 | direction).to_be_bytes());
        let Ok(response) = Packet::parse_mad(packet.destination_qp, &mad) else { return };
        let is_direct =
            matches!(&response, Mad::Subnet(smp) if smp.is_directed() && smp.dr_dlid == Lid::PERMISSIVE);
        let dlid = if is_direct { Lid::PERMISSIVE } else { packet.slid };
        let slid = self.source_lid(at, 0);
        let (source_qp, destination_qp) = (packet.destination_qp, packet.source_qp);
        self.subnet.send(at, Packet { slid, dlid, source_qp, destination_qp, mad: response, ..*packet });
    }
}

impl Sending {
    /// The packets that may be sent now.
    fn segments(&self) -> Vec<Packet> {
        self.transfer.due().map(|mad| Packet { mad: Mad::General(mad), ..self.packet }).collect()
    }
}

impl Client {
    /// Adds a segment to its MAD. Returns the complete MAD and the answer to the sender, as far as there are any.
    fn assemble(&mut self, id: u64, segment: &Datagram, now: u64) -> (Option<Vec<u8>>, Option<Datagram>) {
        let is_first = RmppHeader::of(segment).is_first;
        if is_first && !self.assemblies.contains_key(&id) && self.assemblies.len() < MAX_TRANSFERS {
            self.assemblies.insert(id, (Assembly::new(segment), now));
        }
        let Some((assembly, end)) = self.assemblies.get_mut(&id) else { return (None, None) };
        *end = now + ASSEMBLY_TIMEOUT;
        match assembly.receive(segment, MAX_MAD - MadHeader::DATAGRAM_LEN) {
            Assembled::Waits(answer) => (None, answer),
            Assembled::Complete(answer, mad) => {
                self.assemblies.remove(&id);
                (Some(mad), Some(answer))
            }
            Assembled::Failed(answer) => {
                self.assemblies.remove(&id);
                (None, Some(answer))
            }
        }
    }
}

impl Registration {
    fn takes(&self, mad: &[u8; MadHeader::DATAGRAM_LEN]) -> bool {
        let [_, mgmt_class, class_version, method] = *mad.first_chunk().expect("a MAD has a header");
        let has_method = self.methods[usize::from(method >> 6 & 1)] >> (method & 63) & 1 != 0;
        let has_oui = !OUI_CLASSES.contains(&mgmt_class) || self.oui.is_none_or(|oui| mad[OUI] == oui);
        (self.mgmt_class, self.class_version) == (mgmt_class, class_version) && has_method && has_oui
    }
}

fn transaction_id(mad: &[u8; MadHeader::DATAGRAM_LEN]) -> u64 {
    u64::from_be_bytes(mad[8..16].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests;
