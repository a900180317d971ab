//! The state that the server and all sessions of a daemon share.

use crate::async_event_watchers::AsyncEventWatchers;
use crate::command_error::CommandError;
use crate::config::Config;
use crate::host::DaemonHost;
use crate::qp_roles::QpRoles;
use crate::quota::Mappings;
use crate::recording::Recordings;
use crate::subnet::SubnetServer;
use parking_lot::Mutex;
use softhca_control::{ClientStatus, DaemonStatus, HostStatus};
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
    pub hosts: Vec<Arc<DaemonHost>>,
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
            hosts,
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

    /// The host or device with this name; without a name, the first host.
    pub fn host(&self, name: Option<&str>) -> Result<&Arc<DaemonHost>, CommandError> {
        let found = match name {
            None => self.hosts.first(),
            Some(name) => {
                self.hosts.iter().find(|host| host.device.name == name || host.device.device_name == name)
            }
        };
        found.ok_or_else(|| {
            let names: Vec<&str> = self.hosts.iter().map(|host| host.device.name.as_str()).collect();
            let text =
                format!("no host is named {:?}; the hosts are {}", name.unwrap_or(""), names.join(", "));
            CommandError::new(libc::ENODEV, text)
        })
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
        self.hosts
            .iter()
            .filter_map(|host| host.slots.as_ref())
            .for_each(|slots| slots.set_has_roles(has_roles));
    }

    pub fn status(&self) -> DaemonStatus {
        let sessions: Vec<_> = self.sessions.lock().values().cloned().collect();
        let hosts = self.hosts.iter().map(|host| {
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
