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
use softhca_engine::{Attachments, Command, DeviceLimits, Reply, Resource, VerbsError};
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
    /// Changes of the host before this process opened its device.
    first_changes: Mutex<Vec<Notification>>,
    /// Changes of the fault rules and of the device that the card does not have yet.
    changes: Mutex<Vec<Notification>>,
    page: SlotState,
}

impl DirectState {
    /// `first_changes` are those of the host before this process opened its device.
    pub(super) fn new(
        event_bus: Arc<EventBus>,
        is_gone: Arc<AtomicBool>,
        page: SlotState,
        first_changes: Vec<Notification>,
    ) -> DirectState {
        DirectState {
            is_gone,
            connection: OnceLock::new(),
            resources: Mutex::default(),
            event_bus,
            card: OnceLock::new(),
            early_rings: Mutex::default(),
            first_changes: Mutex::new(first_changes),
            changes: Mutex::default(),
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

    /// Applies the changes of the host to the card, if it exists.
    fn apply_changes(&self) {
        // Locked until they are applied: another thread may have later ones.
        let mut changes = self.changes.lock();
        if self.card.get().is_some() {
            for change in changes.drain(..) {
                self.control(|driver| apply_change(driver, change));
                self.page.count_applied();
            }
        }
    }

    /// Gives the card the notifications from now on, and first the state of the host.
    fn attach(&self, card: &Arc<SharedDriver>) {
        let changes = self.changes.lock();
        let _ = self.card.set(Arc::downgrade(card));
        let first_changes = std::mem::take(&mut *self.first_changes.lock());
        first_changes.into_iter().for_each(|change| self.control(|driver| apply_change(driver, change)));
        // Changes from before the device was open raise no events.
        while self.event_bus.async_events.pop().is_some() {}
        drop(changes);
        self.add_rings();
        self.apply_changes();
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
        // The next daemon binds the ports.
        let _ = self.card.get().and_then(Weak::upgrade).map(|card| card.close());
        self.event_bus.wake_all();
    }
}

/// Applies a change of the host to the card of a process.
fn apply_change(driver: &mut Driver, change: Notification) {
    match change {
        Notification::FaultRulesAdded { seed, rules } => {
            let rules: Vec<Rule> = decode(&rules).unwrap_or_default();
            rules.into_iter().for_each(|rule| driver.add_rule(seed, rule));
        }
        Notification::FlowsAdded { seed, flows } => {
            let flows: Vec<Flow> = decode(&flows).unwrap_or_default();
            flows.into_iter().for_each(|flow| driver.add_flow(seed, flow));
        }
        Notification::FaultRulesCleared => driver.clear_rules(),
        Notification::DeviceChanged(change) => driver.change_device(&change),
        _ => {}
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
            | Notification::FaultRulesCleared
            | Notification::DeviceChanged(_) => {
                self.changes.lock().push(notification);
                self.apply_changes();
            }
            Notification::ProcessGone { slot } => {
                self.early_rings.lock().retain(|(other, _)| *other != slot);
                self.control(|driver| driver.remove_rings(slot));
            }
            Notification::PacketsHandedOver { packets } => {
                self.control(|driver| driver.receive_handed_over(&packets));
            }
            Notification::AsyncEventRaised(event) => self.event_bus.async_events.push(event),
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
        execute: impl FnMut(cm::Command, bool) -> Result<cm::Reply>,
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
        let (result, raised) = card.driver.control(|driver| {
            (driver.execute(card.client.id, command, attachments), driver.take_raised_event())
        });
        if let Some(event) = raised {
            // If it fails, the daemon is gone.
            let request = Request::RaiseEvent { host: self.device.name.clone(), event };
            let _ = self.connection.call(&request, &[]);
        }
        let reply = result?;
        self.count(creates, destroys);
        self.on_command(ready, |qpn| {
            card.driver.control(|driver| driver.hca().query_queue_pair(card.client.id, qpn))
        })?;
        Ok(reply)
    }

    /// Executes a call to the connection manager in the card, or a part of a call that was counted already.
    fn execute_cm_in_card(
        &self,
        card: &EmbeddedRuntime,
        command: cm::Command,
        attachments: &Attachments,
    ) -> Result<cm::Reply> {
        self.execute_cm(command, |command, is_part| {
            let is_part = is_part || attachments.is_part;
            let mut attachments =
                Attachments { call_site: attachments.call_site, is_part, ..Attachments::default() };
            let reply = self.execute_counted(card, Command::Cm(command), &mut attachments)?;
            Ok(reply!(reply, Reply::Cm(reply) => reply))
        })
    }

    /// Takes a queue pair through its states one by one: the daemon is to know each before the next.
    fn transition_queue_pair(
        &self,
        card: &EmbeddedRuntime,
        transition: &cm::QpTransition,
        attachments: &mut Attachments,
    ) -> Result<Reply> {
        if let Some((verb, object)) = Command::TransitionQueuePair(transition.clone()).call()
            && let reply @ Reply::Cm(_) =
                self.execute_counted(card, Command::AnnounceCall { verb, object }, attachments)?
        {
            // A fault replies in place of the connection manager.
            return Ok(reply);
        }
        attachments.is_part = true;
        let manage =
            |attachments: &mut Attachments, command| self.execute_cm_in_card(card, command, attachments);
        let modify = |attachments: &mut Attachments, attributes: &ModifyQp| {
            let (qpn, modify) = (transition.qpn, *attributes);
            self.execute_counted(card, Command::ModifyQueuePair { qpn, modify }, attachments).map(drop)
        };
        transition.execute(attachments, manage, modify).map(Reply::Cm)
    }
}

impl CardHost for DirectHost {
    fn is_alive(&self) -> bool {
        !self.state.is_gone.load(Ordering::Acquire)
    }

    fn device_name(&self) -> &str {
        &self.device.device_name
    }

    fn limits(&self) -> Option<DeviceLimits> {
        Some(self.device.limits)
    }

    fn resolve_host(&self, name: &str) -> Option<IpAddr> {
        self.hosts.iter().find(|host| host.name == name).map(|host| host.address)
    }

    /// Gives notifications to this card from now on.
    fn attach(&self, card: &Arc<SharedDriver>) {
        self.state.attach(card);
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
            Command::Cm(command) => {
                self.execute_cm_in_card(card, command.clone(), attachments).map(Reply::Cm)
            }
            Command::TransitionQueuePair(transition) if self.has_roles() => {
                self.transition_queue_pair(card, transition, attachments)
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
