//! Devices.

use crate::backend::{Backend, Result};
use crate::fault::{environment_faults, process_id};
use crate::{Context, EndpointExchange};
use parking_lot::Mutex;
use softhca_engine::{DeviceLimits, PortState, Profile};
use softhca_fabric::{Flow, Rule, RuleCounters, RuleId};
use softhca_types::{ProgramFault, ProgramFaults};
use softhca_wire::{Gid, Mtu};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// A card that can be opened.
#[derive(Clone)]
pub struct Device {
    pub(crate) backend: Arc<dyn Backend>,
    address: IpAddr,
    faults: Arc<Mutex<Option<ProgramFaults>>>,
}

impl Device {
    pub(crate) fn new(backend: Arc<dyn Backend>, address: IpAddr) -> Device {
        let faults = match backend.simulated_client() {
            Some(_) => None,
            None => environment_faults(),
        };
        Device { backend, address, faults: Arc::new(Mutex::new(faults)) }
    }

    /// The name, such as `softhca0`.
    pub fn name(&self) -> &str {
        self.backend.device_name()
    }

    /// The host's address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The GUID: a locally administered EUI-64 derived from the address.
    pub fn guid(&self) -> u64 {
        Gid::from(self.address).guid()
    }

    /// The capabilities and limits of the device, as `ibv_query_device` returns them.
    pub fn attributes(&self) -> DeviceAttributes {
        DeviceAttributes { limits: self.backend.limits(), profile: self.backend.profile() }
    }

    /// The attributes of its one port, as `ibv_query_port` returns them.
    pub fn port_attributes(&self) -> PortAttributes {
        let (active_mtu, gid) = (self.backend.active_mtu(), Gid::from(self.address));
        let state = self.backend.port_state();
        PortAttributes { port_num: 1, state, max_mtu: Mtu::B4096, active_mtu, gid }
    }

    /// Opens the device. Every context of a device has resources of its own. While a fault has removed the device, every
    /// call on the context fails; when it has returned, new contexts work.
    pub fn open(&self) -> Context {
        let backend = self.backend.reopened().unwrap_or_else(|| self.backend.clone());
        Context::new(backend, self.address, self.faults.lock().clone())
    }

    /// The place where applications exchange endpoints by name before they are connected. A `World` has one for all
    /// hosts, a process one for all its embedded devices.
    pub fn endpoint_exchange(&self) -> EndpointExchange {
        self.backend.endpoint_exchange()
    }

    /// Adds a fault rule to the link that leaves the device. `seed` decides random choices; in a world its own seed does.
    /// On the device of a daemon the rule stays until [`DaemonControl::clear_rules`](crate::DaemonControl::clear_rules), for all its clients.
    ///
    /// # Panics
    /// If the device belongs to a daemon that is gone or rejects the rule.
    pub fn add_rule(&self, seed: u64, rule: Rule) {
        self.backend.add_rule(seed, rule);
    }

    /// Names a fault rule in the event log and in the capture of an embedded device. A rule without a name is shown with
    /// its number. On other devices, the call has no effect.
    pub fn name_rule(&self, rule: RuleId, name: &str) {
        self.backend.name_rule(rule, name);
    }

    /// Stalls the device: it neither sends nor receives for this time, as if its host stood still. Packets wait for it
    /// as long as they are not too many; timers of its peers run on.
    ///
    /// # Errors
    /// Unsupported, if a daemon executes the transport of the device: other programs use it too. Stop the program
    /// instead (`softhca exec`, fault `stall`).
    pub fn stall(&self, time: Duration) -> Result<()> {
        self.backend.stall(time)
    }

    /// Injects a fault into the program that uses the device: into its calls, its completions or its device. It applies
    /// to devices that are opened from now on; the seed decides its draws. Returns the number of the rule, which replaces
    /// the one it has.
    ///
    /// ```
    /// use softhca::{Device, Errno, Error, Verb, VerbsError, fault};
    ///
    /// # fn main() -> Result<(), Error> {
    /// let device = Device::embedded()?;
    /// device.inject(1, fault::calls(Verb::AllocPd).nth(2).fail(Errno::ENOMEM));
    /// let context = device.open();
    /// context.allocate_protection_domain()?;
    /// let error = context.allocate_protection_domain().err().unwrap();
    /// assert!(matches!(error, Error::Verbs(VerbsError::Injected { errno: Errno::ENOMEM, .. })));
    /// context.allocate_protection_domain()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn inject(&self, seed: u64, fault: ProgramFault) -> u32 {
        let mut faults = self.faults.lock();
        let faults =
            faults.get_or_insert_with(|| ProgramFaults { process: process_id(), ..Default::default() });
        let id = faults.faults.len() as u32 + 1;
        faults.seed = seed;
        faults.faults.push(ProgramFault { id, ..fault });
        id
    }

    /// Sets all faults of the program that uses the device, with their numbers.
    pub fn set_program_faults(&self, faults: ProgramFaults) {
        *self.faults.lock() = Some(faults);
    }

    /// Names a flow, so that rules can select the packets of one queue pair.
    ///
    /// # Panics
    /// As [`Device::add_rule`].
    pub fn add_flow(&self, seed: u64, flow: Flow) {
        self.backend.add_flow(seed, flow);
    }

    /// The rules on the link and their counters.
    ///
    /// # Panics
    /// As [`Device::add_rule`].
    pub fn rules(&self) -> Vec<(Rule, RuleCounters)> {
        self.backend.rules()
    }
}

/// Attributes and limits of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// The maximum number of each resource and the maximum sizes.
    pub limits: DeviceLimits,
    /// The card whose behaviour the device has where cards differ.
    pub profile: &'static Profile,
}

/// Attributes of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttributes {
    /// The port number: always 1.
    pub port_num: u8,
    /// The state of its link when it was queried.
    pub state: PortState,
    /// The largest path MTU that the device supports.
    pub max_mtu: Mtu,
    /// The largest path MTU that fits the MTU of the network interface.
    pub active_mtu: Mtu,
    /// The first entry of the GID table.
    pub gid: Gid,
}
