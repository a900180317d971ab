//! A host: its HCA, the engine thread that drives it, and the distribution of its events.

use crate::async_event_watchers::AsyncEventWatchers;
use crate::client_memory::AccessMonitor;
use crate::client_process::ClientProcess;
use crate::config::{CardConfig, Config, DataPath};
use crate::host_driver::HostDriver;
use crate::messages::report;
use crate::notification_queue::NotificationQueue;
use crate::recording::Recordings;
use crate::slots::HostSlots;
use crate::start_error::StartError;
use crate::subnet::{DeviceLink, SubnetDevice};
use parking_lot::Mutex;
use softhca_control::{
    DeviceChange, HostDevice, MAX_QUEUE_PAIRS_LISTED, Notification, QueuePairStatus, limit_of,
};
use softhca_engine::{
    AckPolicy, AsyncEvent, ClientId, Counters, CqId, Event, Instant, PortState, Recovery, Settings,
};
use softhca_fabric::{EventSink, HostId, NetworkEvent};
use softhca_queue::{MapMode, SharedMemory, SleepFlag};
use softhca_types::InjectedEvent;
use softhca_udp::{
    DrivePolicy, Driver, DriverOptions, HostNetwork, HostSockets, IcrcCheck, IcrcMode, SharedDriver,
    SocketOptions, bind_free_host, bind_host,
};
use softhca_wire::{Mtu, QpnSlot};
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A host of the daemon.
pub(crate) struct DaemonHost {
    pub device: HostDevice,
    pub driver: Arc<HostDriver>,
    pub event_bus: Arc<EventBus>,
    /// A fault removed the device.
    pub is_removed: Arc<AtomicBool>,
    pub access_monitor: Arc<AccessMonitor>,
    /// The page with the sleep flag of the engine thread, which clients map read-only.
    pub sleep_flag: OwnedFd,
    /// The slots of processes with a direct data path, if the kernel supports them and the configuration permits.
    pub slots: Option<Arc<HostSlots>>,
    /// Held while fault rules change: all drivers of the host add them in the same order.
    pub rule_changes: Mutex<()>,
}

/// The parts of a host.
struct Parts {
    device: HostDevice,
    sockets: HostSockets,
    settings: Settings,
    slots: Option<Arc<HostSlots>>,
    link: Option<DeviceLink>,
}

/// The device of a host of a subnet, as clients see it.
pub(crate) fn subnet_device(config: &Config, device: &SubnetDevice) -> HostDevice {
    HostDevice {
        name: device.name.clone(),
        host: device.host.clone(),
        device_name: device.device_name.clone(),
        address: IpAddr::V6(device.gid.0.into()),
        active_mtu: Mtu::B4096,
        limits: config.device_limits(),
        profile: config.profile.name.into(),
        recovery: Recovery::GoBackN.name().into(),
        loopback: config.loopback().name().into(),
        data_path: DataPath::Daemon.name().into(),
        is_removed: false,
        node_guid: Some(device.node_guid),
    }
}

/// Distributes the events of a host to the sessions.
#[derive(Default)]
pub(crate) struct EventBus {
    host_name: String,
    completion_queues: Mutex<BTreeMap<CqId, Arc<NotificationQueue>>>,
    clients: Mutex<BTreeMap<ClientId, ClientSubscription>>,
    watchers: Arc<AsyncEventWatchers>,
}

struct ClientSubscription {
    pid: u32,
    is_direct: bool,
    name: String,
    notifications: Arc<NotificationQueue>,
}

impl EventBus {
    /// Gives a client its events. A client that `is_direct` has a card of its own.
    pub fn add_client(
        &self,
        client: ClientId,
        ClientProcess { pid, name, .. }: &ClientProcess,
        is_direct: bool,
        queue: &Arc<NotificationQueue>,
    ) {
        let (notifications, name) = (queue.clone(), name.clone());
        let subscription = ClientSubscription { pid: *pid, is_direct, name, notifications };
        self.clients.lock().insert(client, subscription);
    }

    pub fn remove_client(&self, client: ClientId) {
        self.clients.lock().remove(&client);
    }

    pub fn add_completion_queue(&self, cq: CqId, queue: &Arc<NotificationQueue>) {
        self.completion_queues.lock().insert(cq, queue.clone());
    }

    pub fn remove_completion_queue(&self, cq: CqId) {
        self.completion_queues.lock().remove(&cq);
    }

    fn publish_async_event(&self, client: Option<ClientId>, event: AsyncEvent) {
        let clients = self.clients.lock();
        // A process with a card of its own raises events of the whole device itself.
        let is_recipient = |(id, subscription): &(&ClientId, &ClientSubscription)| {
            client.map_or(!subscription.is_direct, |client| client == **id)
        };
        for (_, subscription) in clients.iter().filter(is_recipient) {
            subscription.notifications.push(Notification::AsyncEventRaised(event));
        }
        let pid = client.and_then(|client| clients.get(&client)).map(|subscription| subscription.pid);
        let host = self.host_name.clone();
        self.watchers.publish(&Notification::AsyncEventObserved { host, pid, event });
    }
}

/// Passes the events of a host to its event bus and to recordings.
struct HostEventSink {
    bus: Arc<EventBus>,
    recordings: Arc<Recordings>,
    host: HostId,
    /// Completion queues to notify once the whole received batch is processed. A batch may hold the response of a peer
    /// before the ACK of the request, and a program may rely on the completion of its request being there first.
    pending_notifications: Vec<CqId>,
}

impl EventSink for HostEventSink {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        self.recordings.on_host_event(self.host, now, event);
        if let NetworkEvent::Hca { event, .. } = event {
            self.on_hca_event(event);
        }
    }

    fn is_enabled(&self) -> bool {
        self.recordings.is_active()
    }

    fn flush(&mut self) {
        if self.pending_notifications.is_empty() {
            return;
        }
        let subscribers = self.bus.completion_queues.lock();
        for cq in self.pending_notifications.drain(..) {
            if let Some(subscriber) = subscribers.get(&cq) {
                subscriber.push(Notification::CompletionNotified(cq));
            }
        }
    }
}

impl HostEventSink {
    fn on_hca_event(&mut self, event: &Event) {
        match event {
            Event::CompletionNotified { cq } => self.pending_notifications.push(*cq),
            Event::AsyncEventRaised { client, event } => self.bus.publish_async_event(*client, *event),
            Event::CmEventRaised { client, channel, .. } => {
                if let Some(subscription) = self.bus.clients.lock().get(client) {
                    // The session dequeues the events when it sends the notification.
                    subscription
                        .notifications
                        .push(Notification::CmEventsRaised { channel: *channel, events: Vec::new() });
                }
            }
            Event::ClientFaulted { client, qp, corrupt_ring: why } => {
                let clients = self.bus.clients.lock();
                if let Some(ClientSubscription { pid, name, .. }) = clients.get(client) {
                    report!("queue pair {qp} of process {pid} ({name}) was stopped: {why}");
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
        card: &CardConfig<'_>,
        watchers: &Arc<AsyncEventWatchers>,
        recordings: &Arc<Recordings>,
    ) -> Result<DaemonHost, StartError> {
        let bind_error = |source| StartError::Bind { host: card.name.clone(), source };
        let sockets = match card.address {
            Some(address) => HostSockets::bind_dual_stack(address, card.ipv6, SocketOptions::default())
                .map_err(bind_error)?,
            // SOFTHCA_ADDRESS is the address of one card.
            None => match config.cards().iter().position(|card| card.address.is_none()) == Some(index) {
                true => bind_host(SocketOptions::default()).map_err(bind_error)?,
                false => bind_free_host(SocketOptions::default()).map_err(bind_error)?,
            },
        };
        let mut settings = Settings {
            profile: config.profile,
            recovery: config.recovery,
            foreign_recovery: config.foreign_recovery,
            foreign_window: config.foreign_window,
            congestion: config.congestion,
            ack_policy: AckPolicy::Coalesce,
            min_ack_timeout: Duration::from_millis(500),
            ..Settings::default()
        };
        let is_central = config.fabric.is_some() || config.congestion.name().is_none();
        let slots = match config.data_path == DataPath::Direct && !is_central {
            true => HostSlots::new(
                &sockets,
                settings,
                config.loopback(),
                HostId(index as u32),
                config.namespace(card.host),
                recordings,
            )
            .inspect_err(|error| report!("no direct data path: {error}{}", limit_of(error, "this process")))
            .ok(),
            false => None,
        };
        if slots.is_some() {
            recordings.allow_slots();
            settings.qpn_slot = QpnSlot { number: 0, bits: QpnSlot::BITS };
        }
        let device = HostDevice {
            name: card.name.clone(),
            host: card.host.into(),
            device_name: format!("softhca{index}"),
            address: sockets.address(),
            active_mtu: sockets.active_mtu(),
            limits: config.device_limits(),
            profile: config.profile.name.into(),
            recovery: config.recovery.name().into(),
            loopback: config.loopback().name().into(),
            data_path: if slots.is_some() { DataPath::Direct } else { DataPath::Daemon }.name().into(),
            is_removed: false,
            node_guid: None,
        };
        Self::assemble(
            config,
            index,
            Parts { device, sockets, settings, slots, link: None },
            (watchers, recordings),
        )
    }

    /// Starts the device of a host of an InfiniBand subnet.
    pub fn start_on_subnet(
        config: &Config,
        index: usize,
        device: &SubnetDevice,
        link: DeviceLink,
        shared: (&Arc<AsyncEventWatchers>, &Arc<Recordings>),
    ) -> Result<DaemonHost, StartError> {
        let bind_error = |source| StartError::Bind { host: device.name.clone(), source };
        let sockets = HostSockets::unreachable().map_err(bind_error)?;
        // As on hardware: what a link that goes down has lost is sent again, perhaps on another route.
        let settings =
            Settings { recovery: Recovery::GoBackN, ack_policy: AckPolicy::Coalesce, ..Settings::default() };
        let device = subnet_device(config, device);
        Self::assemble(
            config,
            index,
            Parts { device, sockets, settings, slots: None, link: Some(link) },
            shared,
        )
    }

    /// Puts the parts of a host together, and starts its thread.
    fn assemble(
        config: &Config,
        index: usize,
        parts: Parts,
        (watchers, recordings): (&Arc<AsyncEventWatchers>, &Arc<Recordings>),
    ) -> Result<DaemonHost, StartError> {
        let Parts { device, sockets, settings, slots, link } = parts;
        let event_bus = Arc::new(EventBus {
            host_name: device.name.clone(),
            watchers: watchers.clone(),
            ..EventBus::default()
        });
        let (entropy, loopback) = (config.entropy, config.loopback());
        let icrc_mode = IcrcMode::of(loopback)?;
        let options = DriverOptions { settings, icrc: IcrcCheck::default(), icrc_mode, entropy, loopback };
        let access_monitor = Arc::new(AccessMonitor::default());
        let id = HostId(index as u32);
        recordings.name(|names| names.add_card(id, &device.name, device.address));
        let sink = Box::new(HostEventSink {
            bus: event_bus.clone(),
            recordings: recordings.clone(),
            host: id,
            pending_notifications: Vec::new(),
        });
        let mut driver = Driver::new(sockets, options, sink);
        if let Some(slots) = slots.clone() {
            driver.share_rule_counters(slots.rule_counters());
            driver.set_hand_over(Box::new(move |packets| slots.hand_over(packets)));
        }
        let wake_source =
            link.as_ref().map(|link| link.wake_descriptor().try_clone_to_owned()).transpose()?;
        if let Some(link) = link {
            driver.attach_to_subnet(Box::new(link));
        }
        let is_removed = driver.removal_flag();
        let page = Arc::new(SharedMemory::create("softhca-sleep-flag", 4096, MapMode::ReadOnly)?);
        let sleep_flag = page.take_descriptor().expect("a new memory has its descriptor");
        let policy = DrivePolicy::Thread { busy_poll: config.busy_poll };
        let flag = SleepFlag::new(page.words(0, SleepFlag::WORDS));
        let driver = Arc::new(HostDriver(SharedDriver::start(driver, policy, flag)?));
        if let Some(descriptor) = wake_source {
            driver.add_wake_source(descriptor.as_fd())?;
        }
        Ok(DaemonHost {
            device,
            driver,
            event_bus,
            is_removed,
            access_monitor,
            sleep_flag,
            slots,
            rule_changes: Mutex::default(),
        })
    }

    /// The device as it is now.
    pub fn current_device(&self) -> HostDevice {
        let is_removed = self.is_removed.load(Ordering::Relaxed);
        HostDevice { is_removed, ..self.device.clone() }
    }

    /// Changes the device of the host: the daemon's card, and those of processes but the one in the slot `except`.
    pub fn change_device(&self, change: &DeviceChange, except: Option<u16>) {
        self.driver.control(|driver| driver.change_device(change));
        self.notify_of_change(change, except);
    }

    /// Notifies processes of a change that the daemon's card already has.
    pub fn notify_of_change(&self, change: &DeviceChange, except: Option<u16>) {
        if let Some(slots) = &self.slots {
            let notification = Notification::DeviceChanged(change.clone());
            tokio::task::block_in_place(|| slots.notify_all(&notification, except));
        }
    }

    /// The changes that lead from a new device to this one.
    pub fn device_changes(&self) -> Vec<Notification> {
        let changes = self.driver.control(|driver| {
            let (hca, is_link_down) = (driver.hca(), driver.is_link_down());
            let link = is_link_down.then_some(DeviceChange::PortState(PortState::Down));
            let port =
                (hca.port_state() == PortState::Down && !is_link_down).then_some(InjectedEvent::PortErr);
            let device = match (hca.is_removed(), hca.has_failed()) {
                (true, _) => Some(InjectedEvent::DeviceRemoved),
                (false, true) => Some(InjectedEvent::DeviceFatal),
                (false, false) => None,
            };
            link.into_iter()
                .chain([port, device].into_iter().flatten().map(DeviceChange::Event))
                .collect::<Vec<_>>()
        });
        changes.into_iter().map(Notification::DeviceChanged).collect()
    }

    /// The counters of the host: of the daemon's HCA and of those in processes, present and past.
    pub fn counters(&self) -> Counters {
        let mut counters = self.driver.control(|driver| *driver.hca().counters());
        if let Some(slots) = &self.slots {
            // The port of the host went down once, and not once in each process.
            counters.add(&Counters { link_downed: 0, ..slots.counters() });
        }
        counters
    }

    /// The queue pairs of all clients.
    pub fn queue_pairs(&self) -> Vec<QueuePairStatus> {
        let found: Vec<_> = self
            .driver
            .control(|driver| driver.hca().queue_pairs_with_owners().take(MAX_QUEUE_PAIRS_LISTED).collect());
        let clients = self.event_bus.clients.lock();
        let pid = |client| clients.get(client).map(|client| client.pid);
        let mut listed: Vec<_> =
            found.iter().map(|(client, qp)| QueuePairStatus::new(qp, pid(client))).collect();
        drop(clients);
        if let Some(slots) = &self.slots {
            listed.extend(slots.reports().into_iter().flat_map(|report| report.queue_pairs));
        }
        listed.truncate(MAX_QUEUE_PAIRS_LISTED);
        listed
    }

    /// Attaches the host to the network between the hosts.
    pub fn attach_network(&self, network: &Arc<HostNetwork>) -> io::Result<()> {
        if let Some(descriptor) = network.wake_descriptor(self.device.address) {
            self.driver.add_wake_source(descriptor)?;
        }
        self.driver.control(|driver| driver.attach_to_network(network.clone()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completion_queues_are_notified_after_the_whole_batch() {
        let (bus, queue) = (Arc::new(EventBus::default()), Arc::<NotificationQueue>::default());
        for number in [1, 2] {
            bus.add_completion_queue(CqId(number), &queue);
        }
        let mut sink = HostEventSink {
            bus: bus.clone(),
            recordings: Recordings::new(Arc::default()),
            host: HostId(0),
            pending_notifications: Vec::new(),
        };
        for number in [2, 1] {
            sink.on_hca_event(&Event::CompletionNotified { cq: CqId(number) });
            assert!(queue.drain().unwrap().is_empty(), "the batch is not complete");
        }
        bus.remove_completion_queue(CqId(1));
        sink.flush();
        assert_eq!(queue.drain().unwrap(), [Notification::CompletionNotified(CqId(2))]);
        sink.flush();
        assert!(queue.drain().unwrap().is_empty());
    }
}
