//! A host: its card, the thread that drives it, and who hears what the card tells.

use crate::client_memory::{AccessMonitor, ClientMemories};
use crate::config::{Config, HostConfig};
use crate::notification_queue::NotificationQueue;
use crate::recording::Recordings;
use crate::server::StartError;
use parking_lot::Mutex;
use softhca_engine::{AckPolicy, ClientId, CqId, Event, Instant, Settings};
use softhca_fabric::{EventSink, HostId, NetworkEvent, Stage};
use softhca_queue::control::{HostDevice, Notification};
use softhca_queue::{MapMode, SharedMemory};
use softhca_trace::PacketDirection;
use softhca_udp::{
    DrivePolicy, Driver, DriverOptions, HostNetwork, HostSockets, IcrcCheck, SharedDriver, SocketOptions,
    bind_host,
};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// A host of the daemon.
pub(crate) struct DaemonHost {
    pub device: HostDevice,
    pub driver: SharedDriver<ClientMemories>,
    pub event_bus: Arc<EventBus>,
    pub access_monitor: Arc<AccessMonitor>,
    /// The page that tells clients whether the engine thread sleeps. They can only read it.
    pub sleep_flag: OwnedFd,
}

/// Who hears what of a card.
#[derive(Default)]
pub(crate) struct EventBus {
    host_name: String,
    completion_queues: Mutex<BTreeMap<CqId, Arc<NotificationQueue>>>,
    clients: Mutex<BTreeMap<ClientId, ClientSubscription>>,
    watchers: Arc<AsyncEventWatchers>,
}

struct ClientSubscription {
    pid: u32,
    name: String,
    notifications: Arc<NotificationQueue>,
}

/// Connections that hear every asynchronous event of every host.
#[derive(Default)]
pub(crate) struct AsyncEventWatchers {
    watchers: Mutex<Vec<Arc<NotificationQueue>>>,
}

impl AsyncEventWatchers {
    pub fn add(&self, outbox: &Arc<NotificationQueue>) {
        self.watchers.lock().push(outbox.clone());
    }

    pub fn remove(&self, outbox: &Arc<NotificationQueue>) {
        self.watchers.lock().retain(|other| !Arc::ptr_eq(other, outbox));
    }
}

impl EventBus {
    pub fn add_client(&self, client: ClientId, process: u32, name: &str, outbox: &Arc<NotificationQueue>) {
        let listener = ClientSubscription { pid: process, name: name.into(), notifications: outbox.clone() };
        self.clients.lock().insert(client, listener);
    }

    pub fn remove_client(&self, client: ClientId) {
        self.clients.lock().remove(&client);
    }

    pub fn add_completion_queue(&self, cq: CqId, outbox: &Arc<NotificationQueue>) {
        self.completion_queues.lock().insert(cq, outbox.clone());
    }

    pub fn remove_completion_queue(&self, cq: CqId) {
        self.completion_queues.lock().remove(&cq);
    }

    fn publish_async_event(&self, client: Option<ClientId>, event: softhca_engine::AsyncEvent) {
        let clients = self.clients.lock();
        let heard = |id: &ClientId| client.is_none_or(|client| client == *id);
        for (_, listener) in clients.iter().filter(|(id, _)| heard(id)) {
            listener.notifications.push(Notification::AsyncEventRaised(event));
        }
        let process = client.and_then(|client| clients.get(&client)).map(|listener| listener.pid);
        for watcher in self.watchers.watchers.lock().iter() {
            watcher.push(Notification::AsyncEventObserved {
                host: self.host_name.clone(),
                pid: process,
                event,
            });
        }
    }
}

/// Reads the card's events for the board and for records.
struct HostEventSink {
    bus: Arc<EventBus>,
    recordings: Arc<Recordings>,
    host: HostId,
    /// Queues whose owners are to be woken, once everything that arrived together is in its place: a program may
    /// take it for granted that the acknowledgement of its message comes before the answer, although both are in one
    /// send, the other way round.
    pending_notifications: Vec<CqId>,
}

impl EventSink for HostEventSink {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        match *event {
            NetworkEvent::Hca { event, .. } => self.on_hca_event(event),
            NetworkEvent::Frame { stage: Stage::Admitted, addressing, packet, .. } => {
                self.recordings.on_packet_sent(self.host, addressing, packet);
            }
            NetworkEvent::Fault { fault, .. } => self.recordings.on_fault(self.host, fault),
            NetworkEvent::Fabric(event) => self.recordings.on_port_event(self.host, now, &event),
            NetworkEvent::PauseFrame { stage, pause, .. } => {
                let direction = match stage {
                    Stage::Delivered => PacketDirection::Inbound,
                    _ => PacketDirection::Outbound,
                };
                self.recordings.on_link_pause(self.host, direction, pause);
            }
            _ => {}
        }
    }

    fn flush(&mut self) {
        if self.pending_notifications.is_empty() {
            return;
        }
        let queues = self.bus.completion_queues.lock();
        for cq in self.pending_notifications.drain(..) {
            if let Some(outbox) = queues.get(&cq) {
                outbox.push(Notification::CompletionNotified(cq));
            }
        }
    }
}

impl HostEventSink {
    fn on_hca_event(&mut self, event: &Event) {
        self.recordings.on_engine_event(self.host, event);
        match event {
            Event::CompletionNotified { cq } => self.pending_notifications.push(*cq),
            Event::AsyncEventRaised { client, event } => self.bus.publish_async_event(*client, *event),
            Event::CmEventRaised { client, channel, .. } => {
                if let Some(listener) = self.bus.clients.lock().get(client) {
                    // The session takes them when it sends.
                    listener
                        .notifications
                        .push(Notification::CmEventsRaised { channel: *channel, events: Vec::new() });
                }
            }
            Event::ClientFaulted { client, qp, why } => {
                let clients = self.bus.clients.lock();
                if let Some(ClientSubscription { pid: process, name, .. }) = clients.get(client) {
                    eprintln!("softhca: process {process} ({name}), queue pair {qp}: {why}; it was stopped");
                }
            }
            _ => {}
        }
    }
}

impl DaemonHost {
    pub fn start(
        config: &Config,
        index: usize,
        host: &HostConfig,
        watchers: &Arc<AsyncEventWatchers>,
        records: &Arc<Recordings>,
    ) -> Result<DaemonHost, StartError> {
        let explain = |source| StartError::Bind { host: host.name.clone(), source };
        let sockets = match host.address {
            Some(address) => {
                let ipv6 = config.ipv6.get(&host.name).copied();
                HostSockets::bind_dual_stack(address, ipv6, SocketOptions::default()).map_err(explain)?
            }
            None => bind_host(SocketOptions::default()).map_err(explain)?,
        };
        let settings = Settings {
            recovery: config.recovery,
            congestion: config.congestion,
            ack_policy: AckPolicy::Coalesce,
            min_ack_timeout: Duration::from_millis(500),
            seed: RandomState::new().hash_one(index),
            ..Settings::default()
        };
        let card = HostDevice {
            name: host.name.clone(),
            device_name: format!("softhca{index}"),
            address: sockets.address(),
            active_mtu: sockets.active_mtu(),
            limits: config.client_limits.device_limits(config.max_clients),
            recovery: config.recovery.name().into(),
            loopback: config.loopback.name().into(),
        };
        let board = Arc::new(EventBus {
            host_name: host.name.clone(),
            watchers: watchers.clone(),
            ..EventBus::default()
        });
        let Config { entropy, loopback, .. } = *config;
        let options = DriverOptions { settings, icrc: IcrcCheck::default(), entropy, loopback };
        let reaching = Arc::new(AccessMonitor::default());
        let id = HostId(index as u32);
        records.name_host(id, &host.name, card.address);
        let herald = Box::new(HostEventSink {
            bus: board.clone(),
            recordings: records.clone(),
            host: id,
            pending_notifications: Vec::new(),
        });
        let driver = Driver::new(sockets, options, ClientMemories::new(reaching.clone()), herald);
        let page = Arc::new(SharedMemory::create("softhca-asleep", 4096, MapMode::ReadOnly)?);
        let asleep = page.take_descriptor().expect("nobody took it yet");
        let conduct = DrivePolicy::Thread { busy_poll: config.busy_poll };
        let station = SharedDriver::start(driver, conduct, page.words(0, 1))?;
        Ok(DaemonHost {
            device: card,
            driver: station,
            event_bus: board,
            access_monitor: reaching,
            sleep_flag: asleep,
        })
    }

    /// Puts a network between this host and the others of the daemon.
    pub fn attach_network(&self, backbone: &Arc<HostNetwork>) -> io::Result<()> {
        if let Some(bell) = backbone.wake_descriptor(self.device.address) {
            self.driver.add_wake_source(bell)?;
        }
        self.driver.control(|driver| driver.attach_to_network(backbone.clone()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_woken_when_all_that_came_together_is_there() {
        let (board, outbox) = (Arc::new(EventBus::default()), Arc::new(NotificationQueue::new().unwrap()));
        for number in [1, 2] {
            board.add_completion_queue(CqId(number), &outbox);
        }
        let records = Recordings::new();
        let mut herald = HostEventSink {
            bus: board.clone(),
            recordings: records,
            host: HostId(0),
            pending_notifications: Vec::new(),
        };
        for number in [2, 1] {
            herald.on_hca_event(&Event::CompletionNotified { cq: CqId(number) });
            assert!(outbox.drain().unwrap().is_empty(), "before the rest has arrived");
        }
        board.remove_completion_queue(CqId(1));
        herald.flush();
        assert_eq!(outbox.drain().unwrap(), [Notification::CompletionNotified(CqId(2))]);
        herald.flush();
        assert!(outbox.drain().unwrap().is_empty());
    }
}
