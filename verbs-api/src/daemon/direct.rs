//! An HCA in this process, on the sockets that a daemon gave it: the process executes the transport and the connection
//! manager itself. The daemon keeps the ports of all processes of the host.

use super::connection::{ControlConnection, NotificationHandler};
use super::control::expect_response;
use super::port_reservations::PortReservations;
use crate::Error;
use crate::backend::Result;
use crate::embedded::{CardHost, EmbeddedRuntime};
use crate::local_backend::EventBus;
use parking_lot::Mutex;
use softhca_control::{
    HostDevice, MAX_QUEUE_PAIRS_LISTED, Notification, QueuePairStatus, Request, Response, decode,
};
use softhca_engine::{
    AsyncEvent, Attachments, Command, DeviceLimits, PortState, Reply, Resource, VerbsError,
};
use softhca_fabric::{Flow, Rule};
use softhca_types::{ModifyQp, QpSnapshot, ResourceCounts, cm, reply};
use softhca_udp::{Driver, RingPair, SharedDriver, SlotState};
use softhca_wire::Qpn;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// The host of a daemon whose transport this process executes itself.
pub(crate) struct DirectHost {
    pub(super) connection: Arc<ControlConnection>,
    pub(super) state: Arc<DirectState>,
    pub device: HostDevice,
    /// All hosts of the daemon.
    pub(super) hosts: Vec<HostDevice>,
    pub(super) ports: PortReservations,
}

/// State that the notification thread and the callers share.
pub(super) struct DirectState {
    is_gone: Arc<AtomicBool>,
    pub(super) connection: OnceLock<Weak<ControlConnection>>,
    /// The resources of this process.
    resources: Mutex<ResourceCounts>,
    event_bus: Arc<EventBus>,
    /// The card, once it exists.
    card: OnceLock<Weak<SharedDriver>>,
    /// Rings that were opened before.
    early_rings: Mutex<Vec<(u16, RingPair)>>,
    /// Changes of the fault rules that came before.
    early_changes: Mutex<Vec<Notification>>,
    page: SlotState,
}

impl DirectState {
    /// `early_changes` are the fault rules that the host already has.
    pub(super) fn new(
        event_bus: Arc<EventBus>,
        is_gone: Arc<AtomicBool>,
        page: SlotState,
        early_changes: Vec<Notification>,
    ) -> DirectState {
        DirectState {
            is_gone,
            connection: OnceLock::new(),
            resources: Mutex::default(),
            event_bus,
            card: OnceLock::new(),
            early_rings: Mutex::default(),
            early_changes: Mutex::new(early_changes),
            page,
        }
    }

    /// Calls `act` with the driver of the card.
    fn control(&self, act: impl FnOnce(&mut Driver)) {
        if let Some(card) = self.card.get().and_then(Weak::upgrade) {
            card.control(act);
        }
    }

    /// Gives new rings to the card, if it exists. Without them, its peer finds out that packets are not acknowledged.
    fn add_rings(&self) {
        if self.card.get().is_some() {
            let rings = std::mem::take(&mut *self.early_rings.lock());
            self.control(|driver| {
                rings.into_iter().for_each(|(slot, rings)| drop(driver.add_rings(slot, rings)));
            });
        }
    }

    /// Applies the changes of the host's fault rules to the card, if it exists.
    fn change_rules(&self) {
        if self.card.get().is_none() {
            return;
        }
        // Locked until they are applied: another thread may have later ones.
        for change in self.early_changes.lock().drain(..) {
            self.control(|driver| match change {
                Notification::FaultRulesAdded { seed, rules } => {
                    let rules: Vec<Rule> = decode(&rules).unwrap_or_default();
                    rules.into_iter().for_each(|rule| driver.add_rule(seed, rule));
                }
                Notification::FlowsAdded { seed, flows } => {
                    let flows: Vec<Flow> = decode(&flows).unwrap_or_default();
                    flows.into_iter().for_each(|flow| driver.add_flow(seed, flow));
                }
                _ => {
                    driver.clear_rules();
                    self.page.clear_rules();
                }
            });
            self.page.count_applied();
        }
    }

    /// Reports the resources of this process to the daemon.
    fn report(&self) {
        let mut queue_pairs = Vec::new();
        self.control(|driver| {
            let found = driver.hca().queue_pairs_with_owners().take(MAX_QUEUE_PAIRS_LISTED);
            queue_pairs = found.map(|(_, qp)| QueuePairStatus::new(&qp, None)).collect();
        });
        let resources = self.resources.lock().iter().map(|(name, count)| (name.into(), count)).collect();
        if let Some(connection) = self.connection.get().and_then(Weak::upgrade) {
            // If it fails, the daemon is gone.
            let _ = connection.call(&Request::Report { queue_pairs, resources }, &[]);
        }
    }

    /// Flushes everything and raises DEVICE_FATAL: the daemon is gone.
    fn fail(&self) {
        self.control(|driver| driver.control(|hca, ctx| hca.fail_device(ctx)));
        self.event_bus.wake_all();
    }
}

impl NotificationHandler for DirectState {
    fn on_notification(&self, notification: Notification, descriptors: Vec<OwnedFd>) {
        match notification {
            Notification::RingsOpened { slot } => {
                if let Ok(rings) = RingPair::adopt(descriptors) {
                    self.early_rings.lock().push((slot, rings));
                    self.add_rings();
                }
            }
            Notification::ReportRequested => self.report(),
            Notification::FaultRulesAdded { .. }
            | Notification::FlowsAdded { .. }
            | Notification::FaultRulesCleared => {
                self.early_changes.lock().push(notification);
                self.change_rules();
            }
            Notification::ProcessGone { slot } => {
                self.early_rings.lock().retain(|(other, _)| *other != slot);
                self.control(|driver| driver.remove_rings(slot));
            }
            Notification::PacketsHandedOver { packets } => {
                self.control(|driver| driver.receive_handed_over(&packets));
            }
            Notification::AsyncEventRaised(AsyncEvent::PortDown) => {
                self.control(|driver| driver.set_port_state(PortState::Down));
            }
            Notification::AsyncEventRaised(AsyncEvent::PortActive) => {
                self.control(|driver| driver.set_port_state(PortState::Active));
            }
            Notification::AsyncEventRaised(AsyncEvent::DeviceFatal) => self.fail(),
            Notification::AsyncEventRaised(event) => self.event_bus.async_events.push(event),
            Notification::DeviceRemoved => {
                self.control(|driver| driver.control(|hca, ctx| hca.raise_cm_device_removal(ctx)));
            }
            Notification::CmEventsRaised { .. }
            | Notification::CompletionNotified(_)
            | Notification::AsyncEventObserved { .. } => {}
        }
    }

    fn on_disconnect(&self) {
        self.is_gone.store(true, Ordering::Release);
        self.fail();
    }
}

impl DirectHost {
    /// The error of a verb when the daemon is gone.
    fn gone(&self) -> Error {
        Error::DeviceGone { why: "its daemon closed the connection".into() }
    }

    /// Has the daemon execute a command.
    fn request(&self, command: Command) -> Result<Reply> {
        let request = Request::Execute { command, backing: None, call_site: None };
        expect_response!(self.connection.call(&request, &[])?.0, Executed)
    }

    /// Whether queue pairs wait for roles or have them: the daemon is to know every transition to RTR and RTS.
    fn has_roles(&self) -> bool {
        self.state.page.has_roles()
    }

    /// Executes a call to the connection manager by `execute`. The daemon first reserves the port that it binds.
    fn execute_cm(
        &self,
        command: cm::Command,
        execute: impl FnMut(cm::Command) -> Result<cm::Reply>,
    ) -> Result<cm::Reply> {
        let request = |command| Ok(reply!(self.request(Command::Cm(command))?, Reply::Cm(reply) => reply));
        match (self.ports.execute(command, execute, request)?, self.is_alive()) {
            (cm::Reply::Event(None, _), false) => Err(self.gone()),
            (cm::Reply::Event(Some(event), left), _) => {
                if event.event_type == cm::EventType::ConnectRequest {
                    // The application owns the identifier of the request from now on.
                    self.count(Some(Resource::CmIdentifier), None);
                }
                Ok(cm::Reply::Event(Some(event), left))
            }
            (reply, _) => Ok(reply),
        }
    }

    /// Reports to the daemon that a command took a queue pair to RTR or RTS, if it may have a role. Fault rules of all hosts
    /// know the role when this returns.
    fn on_command(
        &self,
        ready: Option<Qpn>,
        query: impl FnOnce(Qpn) -> std::result::Result<QpSnapshot, VerbsError>,
    ) -> Result<()> {
        if let Some(qpn) = ready.filter(|_| self.has_roles()) {
            self.connection.call(&Request::QueuePairReady { qp: query(qpn)? }, &[])?;
        }
        Ok(())
    }

    /// Checks that this process may create another resource.
    fn check_limit(&self, command: &Command) -> Result<()> {
        match command.creates() {
            Some(resource) => Ok(self.state.resources.lock().check(&self.device.limits, resource)?),
            None => Ok(()),
        }
    }

    /// Counts the resource that a command created or destroyed.
    fn count(&self, created: Option<Resource>, destroyed: Option<(Resource, u32)>) {
        let mut resources = self.state.resources.lock();
        if let Some(resource) = created {
            resources.add(resource);
        }
        if let Some((resource, _)) = destroyed {
            resources.remove(resource);
        }
    }

    /// Executes a control verb in the card.
    fn execute_counted(
        &self,
        card: &EmbeddedRuntime,
        command: Command,
        attachments: &mut Attachments,
    ) -> Result<Reply> {
        self.check_limit(&command)?;
        let (creates, destroys) = (command.creates(), command.destroys());
        let ready = command.qp_ready_to_receive().or(command.qp_ready_to_send());
        let reply = card.execute_in_card(command, attachments)?;
        self.count(creates, destroys);
        self.on_command(ready, |qpn| {
            card.driver.control(|driver| driver.hca().query_queue_pair(card.client.id, qpn))
        })?;
        Ok(reply)
    }

    /// Executes a call to the connection manager in the card.
    fn execute_cm_in_card(&self, card: &EmbeddedRuntime, command: cm::Command) -> Result<cm::Reply> {
        self.execute_cm(command, |command| {
            let reply = self.execute_counted(card, Command::Cm(command), &mut Attachments::default())?;
            Ok(reply!(reply, Reply::Cm(reply) => reply))
        })
    }
}

impl CardHost for DirectHost {
    fn is_alive(&self) -> bool {
        !self.state.is_gone.load(Ordering::Acquire)
    }

    fn device_name(&self) -> &str {
        &self.device.device_name
    }

    fn limits(&self) -> DeviceLimits {
        self.device.limits
    }

    fn resolve_host(&self, name: &str) -> Option<IpAddr> {
        self.hosts.iter().find(|host| host.name == name).map(|host| host.address)
    }

    /// Gives notifications to this card from now on.
    fn attach(&self, card: &Arc<SharedDriver>) {
        let _ = self.state.card.set(Arc::downgrade(card));
        self.state.add_rings();
        self.state.change_rules();
        if !self.is_alive() {
            self.state.fail();
        }
    }

    fn execute(
        &self,
        card: &EmbeddedRuntime,
        command: Command,
        attachments: &mut Attachments,
    ) -> Result<Reply> {
        // Only what frees resources, and the events that are left, still work without the daemon.
        let is_refused = !self.is_alive()
            && command.destroys().is_none()
            && !matches!(command, Command::Cm(cm::Command::GetEvent(_)));
        let result = match &command {
            _ if is_refused => Err(self.gone()),
            Command::Cm(command) => self.execute_cm_in_card(card, command.clone()).map(Reply::Cm),
            // The daemon is to know each state before the next step.
            Command::TransitionQueuePair(transition) if self.has_roles() => {
                let manage = |_: &mut (), command| self.execute_cm_in_card(card, command);
                let modify = |_: &mut (), attributes: &ModifyQp| {
                    let (qpn, modify) = (transition.qpn, *attributes);
                    self.execute_counted(card, Command::ModifyQueuePair { qpn, modify }, attachments)
                        .map(drop)
                };
                transition.execute(&mut (), manage, modify).map(Reply::Cm)
            }
            // The daemon notifies all processes of the host.
            Command::RaiseEvent { object: None, .. } | Command::NoteTrigger(_) => self.request(command),
            _ => self.execute_counted(card, command, attachments),
        };
        // The daemon may have ended since, and the device failed with it.
        match result {
            Err(Error::Verbs(VerbsError::DeviceFailed)) if !self.is_alive() => Err(self.gone()),
            result => result,
        }
    }
}
