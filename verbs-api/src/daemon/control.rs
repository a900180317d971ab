//! Asking a daemon about itself.

use crate::backend::Result;
use crate::daemon::connection::Greeted;
use crate::{Counters, Error, QpKind, Role, Rule, Tally};
use softhca_queue::control::{
    Call, DEFAULT_NAME, FabricPort, HostCard, Message, NAME_VARIABLE, News, ProcessWatch, Reply, Status,
    decode, encode,
};
use softhca_queue::{AsyncEvent, PortState};
use std::os::fd::BorrowedFd;

/// An asynchronous event of some client of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenEvent {
    /// The host.
    pub host: String,
    /// The process that it is for; `None` if it is for all.
    pub process: Option<u32>,
    /// The event.
    pub event: AsyncEvent,
}

/// A connection to a daemon that asks about it, without a device.
pub struct DaemonControl {
    line: Greeted,
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
        Ok(DaemonControl { line: Greeted::connect(&daemon_name(name))? })
    }

    /// The hosts and the device of each.
    pub fn hosts(&self) -> &[HostCard] {
        &self.line.welcome.hosts
    }

    /// The daemon's process.
    pub fn process(&self) -> u32 {
        self.line.welcome.process
    }

    /// What runs there.
    pub fn status(&mut self) -> Result<Status> {
        match self.line.ask(&Call::Status, &[])?.0 {
            Reply::Status(status) => Ok(status),
            other => Err(unexpected(&other)),
        }
    }

    /// What the card of a host counted; without a name, of the first.
    pub fn counters(&mut self, host: Option<&str>) -> Result<Counters> {
        match self.line.ask(&Call::Counters { host: host.map(Into::into) }, &[])?.0 {
            Reply::Counters(counters) => Ok(counters),
            other => Err(unexpected(&other)),
        }
    }

    /// What the ports of the network between the hosts counted; nothing if the daemon has none.
    pub fn ports(&mut self) -> Result<Vec<FabricPort>> {
        match self.line.ask(&Call::Ports, &[])?.0 {
            Reply::Ports(ports) => Ok(ports),
            other => Err(unexpected(&other)),
        }
    }

    /// Hears every asynchronous event of every host from now on.
    pub fn watch(&mut self) -> Result<()> {
        self.line.ask(&Call::Watch, &[]).map(|_| ())
    }

    /// Waits for the next event, after [`DaemonControl::watch`].
    pub fn next_event(&mut self) -> Result<SeenEvent> {
        loop {
            if let Message::News(News::Seen { host, process, event }) = self.line.next()?.0 {
                return Ok(SeenEvent { host, process, event });
            }
        }
    }

    /// Puts fault rules, with names for records, on the cable of a host. `seed` decides their draws.
    pub fn add_rules(&mut self, host: &str, seed: u64, rules: &[(Rule, &str)]) -> Result<()> {
        let call = Call::AddRules { host: Some(host.into()), seed, rules: encode(&rules) };
        self.line.ask(&call, &[]).map(|_| ())
    }

    /// Gives roles, which rules speak of, to the next queue pairs of a host that become ready to receive: each to
    /// the first of its kind. PSNs count from the first that it is told to send.
    pub fn name_flows(&mut self, host: &str, seed: u64, roles: &[(QpKind, Role)]) -> Result<()> {
        let roles = roles.iter().map(|(kind, role)| (*kind, role.0)).collect();
        self.line.ask(&Call::NameFlows { host: Some(host.into()), seed, roles }, &[]).map(|_| ())
    }

    /// The rules of a host, and how often each fired.
    pub fn rules(&mut self, host: &str) -> Result<Vec<(Rule, Tally)>> {
        read_rules(self.line.ask(&Call::Rules { host: Some(host.into()) }, &[])?.0)
    }

    /// Takes all rules and roles of a host away. What they hold back still arrives. The end of this connection does
    /// the same for the hosts that it gave rules or roles to.
    pub fn clear_rules(&mut self, host: &str) -> Result<()> {
        self.line.ask(&Call::ClearRules { host: Some(host.into()) }, &[]).map(|_| ())
    }

    /// Takes the port of a host down, or brings it up. It is up again at the end of this connection at the latest.
    pub fn set_port(&mut self, host: &str, state: PortState) -> Result<()> {
        self.line.ask(&Call::SetPort { host: host.into(), state }, &[]).map(|_| ())
    }

    /// Has the daemon write what its cards do from now on: a capture, an event log, or both. They end with
    /// [`DaemonControl::end_records`], or with this connection.
    pub fn record(&mut self, capture: Option<BorrowedFd<'_>>, log: Option<BorrowedFd<'_>>) -> Result<()> {
        let call = Call::Record { capture: capture.is_some(), log: log.is_some() };
        let passed: Vec<BorrowedFd<'_>> = [capture, log].into_iter().flatten().collect();
        self.line.ask(&call, &passed).map(|_| ())
    }

    /// Ends the records of this connection. When it returns, they are complete, or the error says what is missing.
    pub fn end_records(&mut self) -> Result<()> {
        self.line.ask(&Call::EndRecords, &[]).map(|_| ())
    }

    /// Ends the daemon, and waits until it is gone.
    pub fn stop(mut self) -> Result<()> {
        let watch = ProcessWatch::new(self.process());
        self.line.ask(&Call::Stop, &[])?;
        while self.line.next().is_ok() {}
        // Its addresses and its name are free when its process is gone.
        if let Ok(watch) = watch
            && self.process() != std::process::id()
        {
            watch.wait();
        }
        Ok(())
    }
}

/// The rules in a reply.
pub(crate) fn read_rules(reply: Reply) -> Result<Vec<(Rule, Tally)>> {
    match reply {
        Reply::Rules(bytes) => {
            decode(&bytes).map_err(|error| Error::Refused { errno: 71, message: error.to_string() })
        }
        other => Err(unexpected(&other)),
    }
}

/// A reply that does not belong to its call: only a broken daemon sends it.
pub(crate) fn unexpected(reply: &Reply) -> Error {
    Error::Refused { errno: 71, message: format!("the daemon answered something else: {reply:?}") }
}
