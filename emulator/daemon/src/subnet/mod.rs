//! The InfiniBand subnet of a daemon: the time, the streams of MADs, and the requests of clients about it.
//!
//! The subnet itself has no I/O. It runs on a thread of its own, because a subnet manager may be busy for long.

mod config;
mod device_link;
mod issm;
mod umad_port;
mod view;

pub use config::{DEFAULT_TOPOLOGY, SubnetConfig, SubnetManager};
pub(crate) use device_link::DeviceLink;
pub(crate) use umad_port::UmadPort;

use crate::command_error::{CommandError, RequestResult};
use device_link::ReadySignal;
use device_link::infiniband_port;
use issm::SmDevices;
use parking_lot::Mutex;
use softhca_control::{
    AgentRegistration, HostDevice, SubnetHca, SubnetPort, SubnetRequest, SubnetResponse, SubnetSettings,
    SubnetStatus,
};
use softhca_subnet::{
    ClientId, DropReason, MadClients, MadError, Manager, NodeKind, PortId, Registration, RoutingEngine,
    Subnet,
};
use softhca_wire::Gid;
use softhca_wire::smp::PortState;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Notify;
use view::HostView;

/// How often timeouts are looked for while requests or traps wait.
const TICK: Duration = Duration::from_millis(5);
/// Names in a message about a host that does not exist.
const MAX_NAMES: usize = 8;

/// The subnet of a daemon.
pub(crate) struct SubnetServer {
    settings: SubnetSettings,
    state: Mutex<State>,
    /// Something waits for its time from now on.
    armed: Arc<Notify>,
    started: Instant,
    /// The folder of the views of all hosts.
    folder: PathBuf,
    devices: SmDevices,
    /// Taken at the end.
    runtime: Option<Runtime>,
}

struct State {
    clients: MadClients,
    streams: BTreeMap<ClientId, Arc<Notify>>,
    /// The ports of verbs devices in use.
    devices: BTreeMap<PortId, Arc<ReadySignal>>,
    /// The views that were created, by the node of the host's first HCA.
    views: BTreeMap<usize, HostView>,
    is_armed: bool,
}

impl SubnetServer {
    /// Starts the subnet, and its manager if it has one.
    pub fn start(config: &SubnetConfig, folder: PathBuf) -> std::io::Result<Arc<SubnetServer>> {
        let runtime =
            Builder::new_multi_thread().worker_threads(1).thread_name("subnet").enable_all().build()?;
        let mut subnet = Subnet::new(config.topology.clone());
        let manager = match config.manager {
            SubnetManager::Builtin => {
                let node = config.topology.hcas().next().expect("a topology has an HCA");
                let linked = (1..=config.topology.nodes[node].port_count())
                    .find(|port| config.topology.peer(PortId { node, port: *port }).is_some());
                let port = PortId { node, port: linked.unwrap_or(1) };
                Some(Manager::new(&mut subnet, port, RoutingEngine::UpDown))
            }
            SubnetManager::None => None,
        };
        let state = State {
            clients: MadClients::new(subnet, manager),
            streams: BTreeMap::new(),
            devices: BTreeMap::new(),
            views: BTreeMap::new(),
            is_armed: false,
        };
        let armed = Arc::<Notify>::default();
        let devices = runtime.block_on(async { SmDevices::new() })?;
        let server = Arc::new(SubnetServer {
            settings: config.settings(),
            state: Mutex::new(state),
            armed: armed.clone(),
            started: Instant::now(),
            folder,
            devices,
            runtime: Some(runtime),
        });
        let handle = server.runtime();
        handle.spawn(expire(Arc::downgrade(&server), armed));
        handle.spawn(issm::watch(Arc::downgrade(&server), server.devices.events()));
        server.with_clients(|_| ());
        Ok(server)
    }

    /// The settings, which every client sees.
    pub fn settings(&self) -> &SubnetSettings {
        &self.settings
    }

    fn runtime(&self) -> Handle {
        self.runtime.as_ref().expect("it is taken at the end").handle().clone()
    }

    /// Calls a function with the programs of the subnet, then wakes the streams that have something to send.
    fn with_clients<T>(&self, call: impl FnOnce(&mut MadClients) -> T) -> T {
        let mut state = self.state.lock();
        let State { clients, streams, devices, views, is_armed } = &mut *state;
        clients.advance(self.started.elapsed().as_nanos() as u64);
        let result = call(clients);
        for id in clients.readable() {
            if let Some(stream) = streams.get(&id) {
                stream.notify_one();
            }
        }
        let changed = clients.take_changed();
        let ready = clients.pass_data(Subnet::take_ready);
        changed.iter().filter_map(|port| devices.get(port)).for_each(|signal| signal.raise_changed());
        ready.iter().filter_map(|port| devices.get(port)).for_each(|signal| signal.raise());
        for port in changed {
            views.values_mut().for_each(|view| view.update(clients.subnet(), port));
        }
        if !*is_armed && clients.has_timeouts() {
            *is_armed = true;
            self.armed.notify_one();
        }
        result
    }

    /// The name and the HCAs of a host; without a name, of the first host.
    fn hcas(&self, host: Option<&str>) -> Result<(String, Vec<usize>), CommandError> {
        let state = self.state.lock();
        let topology = state.clients.subnet().topology();
        let first = || topology.hcas().next().map(|node| topology.nodes[node].host().to_owned());
        let name = host.map(str::to_owned).or_else(first).unwrap_or_default();
        let hcas: Vec<usize> = topology.hcas_of(&name).collect();
        if hcas.is_empty() {
            let mut names: Vec<&str> = topology.hcas().map(|node| topology.nodes[node].host()).collect();
            names.dedup();
            let more = if names.len() > MAX_NAMES { ", …" } else { "" };
            names.truncate(MAX_NAMES);
            let text = format!(
                "no host of the topology is named {name:?}; its hosts are {}{more}",
                names.join(", ")
            );
            return Err(CommandError::new(libc::ENODEV, text));
        }
        Ok((name, hcas))
    }

    /// The verbs devices of a host, each at the first port of its HCA that has a link, with that port.
    pub fn devices(&self, host: Option<&str>) -> Result<Vec<(SubnetDevice, PortId)>, CommandError> {
        let (name, hcas) = self.hcas(host)?;
        let state = self.state.lock();
        let subnet = state.clients.subnet();
        let topology = subnet.topology();
        let device = |(index, node): (usize, usize)| {
            let mut ports = (1..=topology.nodes[node].port_count()).map(|port| PortId { node, port });
            let port = ports.find(|port| topology.peer(*port).is_some()).unwrap_or(PortId { node, port: 1 });
            let device_name = SubnetHca::device_name(index);
            let device = SubnetDevice {
                name: if index == 0 { name.clone() } else { format!("{name}:{device_name}") },
                host: name.clone(),
                device_name,
                gid: infiniband_port(subnet, port).gids.first().copied().unwrap_or_default(),
                node_guid: topology.nodes[node].guid,
            };
            (device, port)
        };
        Ok(hcas.into_iter().enumerate().map(device).collect())
    }

    fn status(&self) -> SubnetStatus {
        let state = self.state.lock();
        let subnet = state.clients.subnet();
        let topology = subnet.topology();
        let mut hosts: Vec<&str> = topology.hcas().map(|node| topology.nodes[node].host()).collect();
        hosts.sort_unstable();
        hosts.dedup();
        let ports = topology
            .hcas()
            .flat_map(|node| (1..=topology.nodes[node].port_count()).map(move |port| PortId { node, port }));
        let is_active = |port: &PortId| subnet.port_info(*port).state == PortState::ACTIVE;
        let dropped = DropReason::ALL.iter().map(|reason| (reason.name().into(), subnet.dropped(*reason)));
        SubnetStatus {
            settings: self.settings.clone(),
            hosts: hosts.len() as u32,
            hcas: topology.hcas().count() as u32,
            switches: (topology.nodes.len() - topology.hcas().count()) as u32,
            active_ports: ports.filter(is_active).count() as u32,
            open_ports: state.streams.len() as u32,
            dropped: dropped.filter(|(_, count)| *count > 0).collect(),
        }
    }

    /// The node with a description.
    fn node(&self, description: &str) -> Option<usize> {
        let state = self.state.lock();
        let nodes = &state.clients.subnet().topology().nodes;
        nodes.iter().position(|node| node.description == description)
    }

    fn create_view(&self, host: Option<&str>) -> Result<PathBuf, CommandError> {
        let (_, hcas) = self.hcas(host)?;
        let root = self.folder.join(format!("node{}", hcas[0]));
        let mut state = self.state.lock();
        if !state.views.contains_key(&hcas[0]) {
            let view = HostView::create(&root, state.clients.subnet(), &hcas)?;
            for (port, path) in view.sm_devices() {
                self.devices.add(port, &path)?;
            }
            state.views.insert(hcas[0], view);
        }
        Ok(root)
    }
}

/// A verbs device of a host of the subnet.
pub(crate) struct SubnetDevice {
    /// As in [`HostDevice`](softhca_control::HostDevice).
    pub name: String,
    pub host: String,
    pub device_name: String,
    pub gid: Gid,
    pub node_guid: u64,
}

/// Executes a request about the subnet of a client that may have a port open.
pub(crate) fn handle(
    server: &Arc<SubnetServer>,
    open: &mut Option<UmadPort>,
    request: SubnetRequest,
    count_client: impl FnOnce(&str) -> Result<(), CommandError>,
    devices: impl FnOnce(Option<&str>) -> Result<Vec<HostDevice>, CommandError>,
) -> RequestResult {
    let client = |open: &Option<UmadPort>| {
        let text = "no port is open on this connection";
        open.as_ref().map(UmadPort::id).ok_or_else(|| CommandError::new(libc::EBADF, text))
    };
    let response = match request {
        SubnetRequest::Hcas { host } => {
            let (host, nodes) = server.hcas(host.as_deref())?;
            let state = server.state.lock();
            let subnet = state.clients.subnet();
            SubnetResponse::Hcas { host, hcas: nodes.into_iter().map(|node| hca(subnet, node)).collect() }
        }
        SubnetRequest::Devices { host } => SubnetResponse::Devices(devices(host.as_deref())?),
        SubnetRequest::OpenPort { host, hca, port } => {
            if open.is_some() {
                return Err(CommandError::new(libc::EBUSY, "a port is already open on this connection"));
            }
            let (host, nodes) = server.hcas(host.as_deref())?;
            let node = *nodes
                .get(hca as usize)
                .ok_or_else(|| CommandError::new(libc::ENODEV, format!("host {host:?} has no HCA {hca}")))?;
            count_client(&host)?;
            let (opened, stream) = UmadPort::open(server, PortId { node, port })?;
            *open = Some(opened);
            return Ok((SubnetResponse::Done.into(), vec![stream]));
        }
        SubnetRequest::RegisterAgent(AgentRegistration {
            mgmt_class,
            class_version,
            methods,
            oui,
            rmpp_version,
        }) => {
            let registration =
                Registration { mgmt_class, class_version, methods, oui: Some(oui), rmpp_version };
            let client = client(open)?;
            SubnetResponse::Agent(server.with_clients(|clients| clients.register(client, registration))?)
        }
        SubnetRequest::UnregisterAgent(agent) => {
            let client = client(open)?;
            server.with_clients(|clients| clients.unregister(client, agent))?;
            SubnetResponse::Done
        }
        SubnetRequest::CreateView { host } => {
            SubnetResponse::View(server.create_view(host.as_deref())?.display().to_string())
        }
        SubnetRequest::Inject { node: name, port, fault } => {
            let node = server
                .node(&name)
                .ok_or_else(|| CommandError::new(libc::ENODEV, format!("no node is named {name:?}")))?;
            server.with_clients(|clients| {
                let first = u8::from(clients.subnet().topology().nodes[node].kind == NodeKind::Hca);
                let port = PortId { node, port: port.unwrap_or(first) };
                let impossible =
                    |why| CommandError::new(libc::EINVAL, format!("{name}/{}: {why}", port.port));
                clients.change(|subnet| subnet.apply(port, fault)).map_err(impossible)
            })?;
            SubnetResponse::Done
        }
        SubnetRequest::Status => SubnetResponse::Status(server.status()),
    };
    Ok((response.into(), Vec::new()))
}

fn hca(subnet: &Subnet, node: usize) -> SubnetHca {
    let ports = (1..=subnet.topology().nodes[node].port_count()).map(|port| {
        let port = PortId { node, port };
        let info = subnet.port_info(port);
        SubnetPort {
            lid: info.lid.0,
            lmc: info.lmc,
            sm_lid: info.sm_lid.0,
            sm_sl: info.sm_sl,
            state: info.state.0,
            physical_state: info.physical_state.0,
            rate: info.rate(),
            capabilities: info.capabilities.bits(),
            gid_prefix: info.gid_prefix,
            guid: subnet.port_guids(port)[0],
            p_keys: subnet.p_keys(port).to_vec(),
        }
    });
    SubnetHca { node_guid: subnet.topology().nodes[node].guid, ports: ports.collect() }
}

impl From<MadError> for CommandError {
    fn from(error: MadError) -> CommandError {
        CommandError::new(error.errno(), error.to_string())
    }
}

/// Sends requests and traps again, and ends requests without a response, while any wait.
async fn expire(server: Weak<SubnetServer>, armed: Arc<Notify>) {
    loop {
        armed.notified().await;
        loop {
            tokio::time::sleep(TICK).await;
            let Some(server) = server.upgrade() else { return };
            let now = server.started.elapsed().as_nanos() as u64;
            server.with_clients(|clients| clients.expire(now));
            let mut state = server.state.lock();
            state.is_armed = state.clients.has_timeouts();
            if !state.is_armed {
                break;
            }
        }
    }
}

impl Drop for SubnetServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests;
