//! The state that the server and all sessions of a daemon share.

use crate::async_event_watchers::AsyncEventWatchers;
use crate::command_error::CommandError;
use crate::config::Config;
use crate::host::{DaemonHost, subnet_device};
use crate::qp_roles::QpRoles;
use crate::quota::Mappings;
use crate::recording::Recordings;
use crate::subnet::{DeviceLink, SubnetServer};
use parking_lot::{Mutex, RwLock};
use softhca_control::{ClientStatus, DaemonStatus, HostDevice, HostStatus};
use softhca_udp::HostNetwork;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{Notify, watch};

/// The state of a session that `softhca status` shows.
pub(crate) struct SessionStatus {
    pub host_name: Option<String>,
    pub client: ClientStatus,
    /// Ends the connection, unless it has opened a device.
    pub evicted: Arc<Notify>,
}

/// The state that all sessions share.
pub(crate) struct DaemonState {
    pub config: Config,
    hosts: RwLock<Vec<Arc<DaemonHost>>>,
    pub watchers: Arc<AsyncEventWatchers>,
    pub recordings: Arc<Recordings>,
    pub roles: QpRoles,
    pub mappings: Arc<Mappings>,
    /// The network between the hosts.
    pub network: Option<Arc<HostNetwork>>,
    /// The InfiniBand subnet.
    pub subnet: Option<Arc<SubnetServer>>,
    /// True when every session must end.
    pub stopping: watch::Sender<bool>,
    /// A client asked the daemon to stop.
    pub stop_requested: Notify,
    pub sessions: Mutex<BTreeMap<u64, Arc<Mutex<SessionStatus>>>>,
    started: Instant,
}

impl DaemonState {
    pub fn new(
        config: Config,
        hosts: Vec<Arc<DaemonHost>>,
        watchers: Arc<AsyncEventWatchers>,
        recordings: Arc<Recordings>,
        network: Option<Arc<HostNetwork>>,
        subnet: Option<Arc<SubnetServer>>,
    ) -> DaemonState {
        DaemonState {
            mappings: Mappings::new(&config),
            config,
            hosts: RwLock::new(hosts),
            watchers,
            recordings,
            roles: QpRoles::default(),
            network,
            subnet,
            stopping: watch::Sender::new(false),
            stop_requested: Notify::new(),
            sessions: Mutex::default(),
            started: Instant::now(),
        }
    }

    /// The hosts. Those of a subnet are in the order in which programs have opened them.
    pub fn hosts(&self) -> Vec<Arc<DaemonHost>> {
        self.hosts.read().clone()
    }

    /// The hosts that clients are told of. A subnet has too many for a greeting.
    pub fn listed_hosts(&self) -> Vec<HostDevice> {
        match self.subnet {
            Some(_) => Vec::new(),
            None => self.hosts().iter().map(|host| host.current_device()).collect(),
        }
    }

    /// The host or device with this name; without a name, the first host. One of a subnet starts when it is first needed.
    pub fn host(&self, name: Option<&str>) -> Result<Arc<DaemonHost>, CommandError> {
        if let Some(subnet) = &self.subnet {
            return self.subnet_host(subnet, name);
        }
        let hosts = self.hosts();
        let found = match name {
            None => hosts.first(),
            Some(name) => {
                hosts.iter().find(|host| host.device.name == name || host.device.device_name == name)
            }
        };
        found.cloned().ok_or_else(|| {
            let names: Vec<&str> = hosts.iter().map(|host| host.device.name.as_str()).collect();
            let text =
                format!("no host is named {:?}; the hosts are {}", name.unwrap_or(""), names.join(", "));
            CommandError::new(libc::ENODEV, text)
        })
    }

    /// The device of the subnet with this name: that of a host, or of another HCA as `HOST:DEVICE`.
    fn subnet_host(
        &self,
        subnet: &Arc<SubnetServer>,
        name: Option<&str>,
    ) -> Result<Arc<DaemonHost>, CommandError> {
        let host = name.map(|name| name.split_once(':').map_or(name, |(host, _)| host));
        let devices = subnet.devices(host)?;
        let found = devices.into_iter().find(|(device, _)| name.is_none_or(|name| device.name == name));
        let (device, port) = found.ok_or_else(|| {
            CommandError::new(libc::ENODEV, format!("no device is named {:?}", name.unwrap_or_default()))
        })?;
        let mut hosts = self.hosts.write();
        if let Some(host) = hosts.iter().find(|host| host.device.name == device.name) {
            return Ok(host.clone());
        }
        let link = DeviceLink::open(subnet, port)?;
        let shared = (&self.watchers, &self.recordings);
        let started = DaemonHost::start_on_subnet(&self.config, hosts.len(), &device, link, shared);
        let host = started.map_err(|error| CommandError::new(libc::EIO, error.to_string()))?;
        hosts.push(Arc::new(host));
        Ok(hosts.last().expect("it was just added").clone())
    }

    /// The verbs devices of a host of the subnet.
    pub fn subnet_devices(&self, host: Option<&str>) -> Result<Vec<HostDevice>, CommandError> {
        let devices = self.subnet.as_ref().map_or(Ok(Vec::new()), |subnet| subnet.devices(host))?;
        Ok(devices.iter().map(|(device, _)| subnet_device(&self.config, device)).collect())
    }

    /// Counts a session as a client of a host, if the limits of clients permit it.
    pub fn add_client(&self, own: &Mutex<SessionStatus>, host: &str) -> Result<(), CommandError> {
        // Held until the session counts: two sessions cannot take the last place.
        let sessions = self.sessions.lock();
        let pid = own.lock().client.pid;
        let (mut all, mut of_process) = (0, 0);
        for session in sessions.values() {
            let session = session.lock();
            if session.host_name.is_some() {
                all += 1;
                of_process += usize::from(session.client.pid == pid);
            }
        }
        let (limit, share) = (self.config.max_clients, self.config.max_clients_per_process());
        let message = if all >= limit {
            format!("the daemon has {limit} clients, which is its limit (max_clients)")
        } else if of_process >= share {
            format!(
                "process {pid} has {share} open devices, which is the limit of a process: half of max_clients, {limit}"
            )
        } else {
            own.lock().host_name = Some(host.into());
            return Ok(());
        };
        Err(CommandError::new(libc::EMFILE, message))
    }

    /// Publishes to the processes that execute the transport themselves whether queue pairs wait for roles or have them.
    pub fn publish_has_roles(&self) {
        let has_roles = !self.roles.is_idle();
        self.hosts()
            .iter()
            .filter_map(|host| host.slots.as_ref())
            .for_each(|slots| slots.set_has_roles(has_roles));
    }

    pub fn status(&self) -> DaemonStatus {
        let sessions: Vec<_> = self.sessions.lock().values().cloned().collect();
        let hosts = self.hosts();
        let hosts = hosts.iter().map(|host| {
            let reports = host.slots.as_ref().map(|slots| slots.reports()).unwrap_or_default();
            let clients = sessions.iter().filter_map(|session| {
                let session = session.lock();
                let mut client = (session.host_name.as_ref() == Some(&host.device.name))
                    .then(|| session.client.clone())?;
                if client.is_direct
                    && let Some(report) = reports.iter().find(|report| report.pid == client.pid)
                {
                    client.resources.clone_from(&report.resources);
                }
                Some(client)
            });
            let (mut queue_pairs, listening_ports, port_state, has_pending_timer) =
                host.driver.control(|driver| {
                    let hca = driver.hca();
                    let queue_pairs = hca.queue_pair_count() as u32;
                    let listening_ports = hca.listening_ports().collect();
                    (queue_pairs, listening_ports, hca.port_state(), hca.has_pending_timer())
                });
            queue_pairs += reports.iter().map(|report| report.queue_pairs.len() as u32).sum::<u32>();
            let (host, clients) = (host.device.clone(), clients.collect());
            HostStatus { host, clients, queue_pairs, listening_ports, port_state, has_pending_timer }
        });
        DaemonStatus {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_s: self.started.elapsed().as_secs(),
            hosts: hosts.collect(),
        }
    }
}
