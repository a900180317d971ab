//! The interface between the verbs and an HCA: in this process, in a simulation or in a daemon.

use crate::async_events::AsyncEventQueue;
use crate::memory::MemoryBlock;
use crate::notifier::Notifier;
use crate::{EndpointExchange, Error};
use softhca_engine::{
    ClientId, CmChannelId, Command, Counters, CqId, DeviceLimits, Instant, PortState, Profile, Reply,
};
use softhca_fabric::{Flow, HostId, Rule, RuleCounters, RuleId};
use softhca_queue::{SendProducer, SharedWords};
use softhca_types::{cm, reply};
use softhca_wire::{Gid, Mtu, Qpn};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Refuses in a child of the process that `mark` stands for.
#[cfg(feature = "sockets")]
pub(crate) fn check_process(mark: &softhca_udp::ProcessIdentity) -> Result<()> {
    if mark.is_current() { Ok(()) } else { Err(Error::Forked { parent: mark.pid }) }
}

/// The runtime of an HCA: its sockets or its simulation, and the clock by which its application waits.
pub(crate) trait Runtime: Send + Sync {
    /// Fails in a child process of the process that opened the device. Every verb checks this before it takes a
    /// lock, which another thread may have held during the fork, and before it touches shared memory.
    fn check_process(&self) -> Result<()> {
        Ok(())
    }
    /// Checks the process for verbs that cannot fail.
    ///
    /// # Panics
    /// In a child process.
    #[inline]
    fn assert_same_process(&self) {
        if let Err(error) = self.check_process() {
            panic!("{error}");
        }
    }
    /// Whether the HCA still exists.
    fn is_alive(&self) -> bool {
        true
    }
    fn device_name(&self) -> &str {
        "softhca0"
    }
    fn profile(&self) -> &'static Profile;
    fn limits(&self) -> DeviceLimits {
        self.profile().limits()
    }
    /// The largest path MTU of the network.
    fn active_mtu(&self) -> Mtu;
    /// The address of an emulated host, by name.
    fn resolve_host(&self, name: &str) -> Option<IpAddr>;

    /// As [`Device::stall`](crate::Device::stall).
    fn stall(&self, time: Duration) -> Result<()>;
    /// As [`Device::add_rule`](crate::Device::add_rule).
    fn add_rule(&self, seed: u64, rule: Rule);
    /// As [`Device::name_rule`](crate::Device::name_rule).
    fn name_rule(&self, rule: RuleId, name: &str) {
        let _ = (rule, name);
    }
    /// As [`Device::add_flow`](crate::Device::add_flow).
    fn add_flow(&self, seed: u64, flow: Flow);
    /// As [`Device::rules`](crate::Device::rules).
    fn rules(&self) -> Vec<(Rule, RuleCounters)>;

    /// Makes progress on the time of a caller that found a completion queue empty, without sleeping. Returns whether it
    /// may have made any.
    fn drive(&self) -> bool;
    /// What a poll reads before it drives, if callers drive the HCA.
    #[cfg(feature = "sockets")]
    fn poll_gate(&self) -> Option<Arc<softhca_udp::PollGate>> {
        None
    }
    /// As [`Context::hand_over`](crate::Context::hand_over).
    fn hand_over(&self) {}
    /// As [`Context::allow_silent_waits`](crate::Context::allow_silent_waits).
    fn allow_silent_waits(&self) {}
    /// The time by which the application waits.
    fn now(&self) -> Instant;
    /// If callers drive the HCA, drives for a moment, until `notifier` counts past `seen`. Returns whether it did.
    fn spin_wait(&self, notifier: &Notifier, seen: u64) -> bool {
        let _ = (notifier, seen);
        false
    }
    /// Blocks until `notifier` counts past `seen`. Returns false if `until` comes first.
    fn wait(&self, notifier: &Notifier, seen: u64, until: Option<Instant>) -> bool;
    /// As [`Context::wait_readable`](crate::Context::wait_readable).
    #[cfg(feature = "sockets")]
    fn wait_readable(
        &self,
        descriptors: &[std::os::fd::BorrowedFd<'_>],
        timeout: Option<Duration>,
    ) -> std::io::Result<()> {
        softhca_udp::poll_readable(descriptors, timeout).map(drop)
    }
    /// A random number; in a simulation, one that the seed determines.
    fn random(&self) -> u64;
    /// Exchanges endpoints between applications on HCAs of this kind.
    fn endpoint_exchange(&self) -> EndpointExchange;

    /// As [`Device::receive_buffer_usage`](crate::Device::receive_buffer_usage).
    #[cfg(feature = "sockets")]
    fn receive_buffer_usage(&self) -> Result<Option<[softhca_udp::ReceiveMemory; 2]>> {
        Ok(None)
    }
    /// The host and the client in a simulation, if it is one.
    fn simulated_client(&self) -> Option<(HostId, ClientId)> {
        None
    }
}

/// An HCA that an application uses. Work requests and completions pass through rings, control verbs through
/// [`Backend::execute`].
pub(crate) trait Backend: Runtime {
    /// This HCA for a new context, if this client lost it. A removed device that returned must be opened anew.
    fn reopened(&self) -> Option<Arc<dyn Backend>> {
        None
    }
    /// Executes a control verb. `memory` is the memory that the verb registers. Returns the memory of new rings
    /// with the reply.
    fn execute_with(
        &self,
        command: Command,
        memory: Option<&Arc<MemoryBlock>>,
    ) -> Result<(Reply, Option<SharedWords>)>;
    /// Executes a control verb without memory and rings.
    fn execute(&self, command: Command) -> Result<Reply> {
        self.execute_with(command, None).map(|(reply, _)| reply)
    }
    /// Executes a control verb that creates rings.
    fn execute_with_rings(&self, command: Command) -> Result<(Reply, SharedWords)> {
        let (reply, rings) = self.execute_with(command, None)?;
        Ok((reply, rings.unwrap_or_else(|| SharedWords::heap(0))))
    }
    /// Executes a call to the connection manager.
    fn execute_cm(&self, command: cm::Command) -> Result<cm::Reply> {
        Ok(reply!(self.execute(Command::Cm(command))?, Reply::Cm(reply) => reply))
    }
    /// Sets the notifier of a completion queue: called for each notification that the application requested.
    fn set_completion_notifier(&self, cq: CqId, notifier: Arc<Notifier>);
    /// Sets the notifier of a CM event channel: called for each event.
    fn set_cm_notifier(&self, channel: CmChannelId, notifier: Arc<Notifier>);

    /// Allocates memory for a region.
    fn allocate_memory(&self, length: usize) -> Result<Arc<MemoryBlock>>;

    fn gids(&self) -> Vec<Gid>;
    fn counters(&self) -> Counters;
    fn port_state(&self) -> PortState {
        match self.execute(Command::QueryPort) {
            Ok(Reply::PortState(state)) => state,
            _ => PortState::Down,
        }
    }
    /// Asynchronous events that the application has not taken yet.
    fn async_events(&self) -> &AsyncEventQueue;
    /// Rings the doorbell of a queue pair with new work requests.
    fn ring_doorbell(&self, qpn: Qpn, send: &SendProducer);
}
