//! Asking a daemon about itself.

use crate::backend::Result;
use crate::daemon::connection::ControlSocket;
use crate::daemon::event_stream::EventStream;
use crate::daemon::opened_host::OpenedHost;
use crate::{
    Counters, Device, Error, QpType,
    fault::{FaultTrigger, FlowId, Rule, RuleCounters},
};
use softhca_control::{
    DEFAULT_NAME, DaemonStatus, FabricPort, HostDevice, Message, NAME_VARIABLE, Notification, ProcessWatch,
    QueuePairStatus, Request, Response, SubnetRequest, SubnetResponse, SubnetSettings, decode, encode,
};
use softhca_types::{AsyncEvent, InjectedEvent, PortState};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The value in a response of this kind; another response is an error.
macro_rules! expect_response {
    ($response:expr, $kind:ident) => {
        match $response {
            Response::$kind(value) => Ok(value),
            other => Err($crate::daemon::control::unexpected_reply(&other)),
        }
    };
}
pub(super) use expect_response;

/// An asynchronous event of some client of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAsyncEvent {
    /// The host.
    pub host: String,
    /// The process that it is for; `None` if it is for all.
    pub process: Option<u32>,
    /// The event.
    pub event: AsyncEvent,
}

/// A connection to a daemon, to ask about it or to open a device.
pub struct DaemonControl {
    socket: ControlSocket,
    /// The device that was opened with the connection.
    opened: Option<OpenedHost>,
}

/// The daemon to use: the given one, or `SOFTHCA_DAEMON`, or the one without a name.
pub(crate) fn daemon_name(name: Option<&str>) -> String {
    match name {
        Some(name) => name.into(),
        None => std::env::var(NAME_VARIABLE).unwrap_or_else(|_| DEFAULT_NAME.into()),
    }
}

impl DaemonControl {
    /// Connects to a daemon; without a name, to the one in `SOFTHCA_DAEMON` or the default one.
    pub fn connect(name: Option<&str>) -> Result<DaemonControl> {
        Ok(DaemonControl { socket: ControlSocket::connect(&daemon_name(name))?, opened: None })
    }

    /// Connects to the selected daemon, and opens the first device of a host for [`DaemonControl::open_device`] in the
    /// same round trip. `None` selects the first host.
    pub fn connect_to_open(host: Option<&str>) -> Result<DaemonControl> {
        let (socket, opened) = OpenedHost::connect(&daemon_name(None), host.map(Into::into))?;
        Ok(DaemonControl { socket, opened: opened.ok() })
    }

    /// The hosts and the device of each.
    pub fn hosts(&self) -> &[HostDevice] {
        &self.socket.welcome.hosts
    }

    /// The verbs devices of a host of the InfiniBand subnet; without a name, of its first host.
    pub fn subnet_devices(&mut self, host: Option<&str>) -> Result<Vec<HostDevice>> {
        match self.subnet(SubnetRequest::Devices { host: host.map(Into::into) })?.0 {
            SubnetResponse::Devices(devices) => Ok(devices),
            other => Err(unexpected_reply(&Response::Subnet(other))),
        }
    }

    /// Opens a device: over this connection if it was opened with it.
    pub fn open_device(self, name: &str) -> Result<Device> {
        match self.opened {
            Some(opened) if opened.host.name == name => Device::open_over(self.socket, opened),
            _ => Device::daemon_host(None, Some(name)),
        }
    }

    /// The daemon's process.
    pub fn process_id(&self) -> u32 {
        self.socket.welcome.pid
    }

    /// The daemon's hosts and clients.
    pub fn status(&mut self) -> Result<DaemonStatus> {
        expect_response!(self.socket.call(&Request::Status, &[])?.0, Status)
    }

    /// The counters of a host's card. `None` selects the first host.
    pub fn counters(&mut self, host: Option<&str>) -> Result<Counters> {
        expect_response!(
            self.socket.call(&Request::Counters { host: host.map(Into::into) }, &[])?.0,
            Counters
        )
    }

    /// The counters of the ports of the network between the hosts; empty if the daemon has no such network.
    pub fn ports(&mut self) -> Result<Vec<FabricPort>> {
        expect_response!(self.socket.call(&Request::PortCounters, &[])?.0, PortCounters)
    }

    /// Hears every asynchronous event of every host from now on.
    pub fn subscribe_async_events(&mut self) -> Result<()> {
        self.socket.call(&Request::WatchAsyncEvents, &[]).map(|_| ())
    }

    /// Waits for the next event, after [`DaemonControl::subscribe_async_events`].
    pub fn next_async_event(&mut self) -> Result<HostAsyncEvent> {
        loop {
            if let Message::Notification(Notification::AsyncEventObserved { host, pid: process, event }) =
                self.socket.next_message()?.0
            {
                return Ok(HostAsyncEvent { host, process, event });
            }
        }
    }

    /// Puts fault rules, with names for records, on the link of a host. `seed` decides their draws.
    pub fn add_rules(&mut self, host: &str, seed: u64, rules: &[(Rule, &str)]) -> Result<()> {
        let call = Request::AddFaultRules { host: Some(host.into()), seed, rules: encode(&rules) };
        self.socket.call(&call, &[]).map(|_| ())
    }

    /// Gives the roles that rules refer to to the next queue pairs of a host that become ready to receive. Each role
    /// goes to the first queue pair of its type. PSNs count from the first that it has to send.
    pub fn assign_roles(&mut self, host: &str, seed: u64, roles: &[(QpType, FlowId)]) -> Result<()> {
        let roles = roles.iter().map(|(kind, role)| (*kind, role.0)).collect();
        self.socket.call(&Request::AssignRoles { host: Some(host.into()), seed, roles }, &[]).map(|_| ())
    }

    /// The rules of a host, and how often each fired.
    pub fn rules(&mut self, host: &str) -> Result<Vec<(Rule, RuleCounters)>> {
        decode_rules(self.socket.call(&Request::QueryFaultRules { host: Some(host.into()) }, &[])?.0)
    }

    /// Takes all rules and roles of a host away. Packets that they hold back still arrive. The end of this connection
    /// does the same for the hosts that it gave rules or roles to.
    pub fn clear_rules(&mut self, host: &str) -> Result<()> {
        self.socket.call(&Request::ClearFaultRules { host: Some(host.into()) }, &[]).map(|_| ())
    }

    /// Lets the rules and roles that this connection added stay after its end, until they are cleared.
    pub fn keep_rules(&mut self) -> Result<()> {
        self.socket.call(&Request::KeepFaultRules, &[]).map(|_| ())
    }

    /// Takes the port of a host down, or brings it up. It is up again at the end of this connection at the latest.
    pub fn set_port_state(&mut self, host: &str, state: PortState) -> Result<()> {
        let request = Request::SetPortState { host: host.into(), state, stays: false };
        self.socket.call(&request, &[]).map(|_| ())
    }

    /// Raises an asynchronous event of the device of a host, with its consequences. A port comes up and a removed device
    /// returns at the end of this connection at the latest.
    pub fn raise_event(&mut self, host: &str, event: InjectedEvent) -> Result<()> {
        self.socket.call(&Request::RaiseEvent { host: host.into(), event }, &[]).map(|_| ())
    }

    /// Reports something to the faults of the programs of a host that wait for it.
    pub fn note_trigger(&mut self, host: &str, trigger: FaultTrigger) -> Result<()> {
        self.socket.call(&Request::NoteTrigger { host: host.into(), trigger }, &[]).map(|_| ())
    }

    /// Takes the port of a device down, or brings it up, for as long as the daemon runs.
    pub fn set_link(&mut self, device: &str, state: PortState) -> Result<()> {
        let request = Request::SetPortState { host: device.into(), state, stays: true };
        self.socket.call(&request, &[]).map(|_| ())
    }

    /// The queue pairs of all clients of a host or device.
    pub fn queue_pairs(&mut self, host: &str) -> Result<Vec<QueuePairStatus>> {
        expect_response!(
            self.socket.call(&Request::QueuePairs { host: Some(host.into()) }, &[])?.0,
            QueuePairs
        )
    }

    /// The InfiniBand subnet, if the daemon has one.
    pub fn subnet_settings(&self) -> Option<&SubnetSettings> {
        self.socket.welcome.subnet.as_ref()
    }

    /// Sends a request about the InfiniBand subnet. Descriptors may accompany the response.
    pub fn subnet(&mut self, request: SubnetRequest) -> Result<(SubnetResponse, Vec<OwnedFd>)> {
        let (response, descriptors) = self.socket.call(&Request::Subnet(request), &[])?;
        Ok((expect_response!(response, Subnet)?, descriptors))
    }

    /// Has the daemon write what its cards do from now on: a capture, an event log, or both. They end with
    /// [`DaemonControl::stop_recording`], or with this connection.
    pub fn start_recording(
        &mut self,
        capture: Option<BorrowedFd<'_>>,
        log: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        self.record([capture, log, None])
    }

    /// The same, with a stream of the events.
    pub fn start_recording_events(
        &mut self,
        capture: Option<BorrowedFd<'_>>,
        log: Option<BorrowedFd<'_>>,
    ) -> Result<EventStream> {
        let (stream, daemon) = EventStream::pair()?;
        self.record([capture, log, Some(daemon.as_fd())])?;
        Ok(stream)
    }

    fn record(&mut self, files: [Option<BorrowedFd<'_>>; 3]) -> Result<()> {
        let [capture, log, events] = files.map(|file| file.is_some());
        let passed: Vec<BorrowedFd<'_>> = files.into_iter().flatten().collect();
        self.socket.call(&Request::StartRecording { capture, log, events }, &passed).map(|_| ())
    }

    /// Ends the records of this connection. When it returns, they are complete, or the error says what is missing.
    pub fn stop_recording(&mut self) -> Result<()> {
        self.socket.call(&Request::StopRecordings, &[]).map(|_| ())
    }

    /// The same for records with a stream of events, which has its last ones then.
    pub fn stop_recording_events(&mut self, events: &mut EventStream) -> Result<()> {
        self.socket.send(&Request::StopRecordings)?;
        events.read_rest();
        self.socket.response().map(|_| ())
    }

    /// Ends the daemon, and waits until it is gone.
    pub fn stop(mut self) -> Result<()> {
        let watch = ProcessWatch::new(self.process_id());
        self.socket.call(&Request::Stop, &[])?;
        while self.socket.next_message().is_ok() {}
        // Its addresses and its name are free when its process is gone.
        if let Ok(watch) = watch
            && self.process_id() != std::process::id()
        {
            watch.wait();
        }
        Ok(())
    }
}

/// The rules in a reply.
pub(crate) fn decode_rules(reply: Response) -> Result<Vec<(Rule, RuleCounters)>> {
    let bytes = expect_response!(reply, FaultRules)?;
    decode(&bytes).map_err(|error| Error::DaemonRejected { errno: 71, message: error.to_string() })
}

/// A reply that does not belong to its call: only a broken daemon sends it.
pub(crate) fn unexpected_reply(reply: &Response) -> Error {
    Error::DaemonRejected { errno: 71, message: format!("the daemon answered something else: {reply:?}") }
}
