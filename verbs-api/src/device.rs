//! Devices.

use crate::backend::Backend;
#[cfg(target_os = "linux")]
use crate::daemon::DaemonBackend;
use crate::embedded::{self, EmbeddedBackend};
use crate::simulated::SimulatedBackend;
use crate::{Context, EndpointExchange, Entropy, Error, EventSink, IcrcCheck, Loopback, Settings};
use softhca_engine::{AckPolicy, DeviceLimits, PortState, ResponseOrder};
use softhca_fabric::{Flow, LinkSettings, ReceiverSettings, Rule, RuleCounters, SwitchSettings};
use softhca_udp::{DriverOptions, HostSockets, ReceiveMemory, SocketOptions, bind_host};
use softhca_wire::{Gid, Mtu};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

/// A switch before the port of an embedded card, of its own: what arrives passes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortSwitch {
    /// The cables to the card and to whoever sends to it.
    pub line: LinkSettings,
    /// When the switch marks and pauses.
    pub settings: SwitchSettings,
    /// How fast the card's port takes what arrives; it pauses the switch before it loses anything.
    pub receiver: ReceiverSettings,
}

/// What an embedded card may differ in.
pub struct EmbeddedOptions {
    /// The host's address; without one, `SOFTHCA_ADDRESS` or the first of 127.0.0.2, 127.0.0.3, … that is free.
    pub address: Option<IpAddr>,
    /// The host's IPv6 address beside an IPv4 one: its GID 1. Without one, a host on a network takes that of its
    /// interface, if there is one and it is free.
    pub ipv6: Option<Ipv6Addr>,
    /// Which source port packets have.
    pub entropy: Entropy,
    /// Where goes what the host sends to itself.
    pub loopback: Loopback,
    /// The settings of the card. A seed of zero takes one from the operating system.
    pub settings: Settings,
    /// How the invariant CRC of arriving packets is checked.
    pub icrc: IcrcCheck,
    /// How many bytes of receive buffer to ask for. Linux doubles it, and gives less where it is above the
    /// system's limit (`net.core.rmem_max`) and the process has no CAP_NET_ADMIN.
    pub receive_buffer: usize,
    /// A switch that queues, marks and pauses what other ports of this make send here; without one, it arrives as it comes.
    pub switch: Option<PortSwitch>,
    /// Sees every event and every packet.
    pub event_sink: Box<dyn EventSink + Send>,
}

impl Default for EmbeddedOptions {
    fn default() -> EmbeddedOptions {
        EmbeddedOptions {
            address: None,
            ipv6: None,
            entropy: Entropy::Off,
            loopback: Loopback::Socket,
            settings: Settings {
                ack_policy: AckPolicy::Coalesce,
                response_order: ResponseOrder::ResponseFirst,
                min_ack_timeout: Duration::from_millis(500),
                ..Settings::default()
            },
            icrc: IcrcCheck::default(),
            receive_buffer: SocketOptions::default().receive_buffer,
            switch: None,
            event_sink: Box::new(()),
        }
    }
}

#[derive(Clone)]
enum DeviceBackend {
    Embedded(Arc<EmbeddedBackend>),
    Simulated(Arc<SimulatedBackend>),
    #[cfg(target_os = "linux")]
    Daemon(Arc<DaemonBackend>),
}

/// A card that can be opened.
#[derive(Clone)]
pub struct Device {
    backend: DeviceBackend,
    address: IpAddr,
}

impl Device {
    /// A card in this process, on a loopback address of its own. Needs nothing running and nothing set up.
    pub fn embedded() -> Result<Device, Error> {
        Device::embedded_with(EmbeddedOptions::default())
    }

    /// A card in this process, as the options say.
    pub fn embedded_with(mut options: EmbeddedOptions) -> Result<Device, Error> {
        if options.settings.seed == 0 {
            options.settings.seed = RandomState::new().hash_one(0);
        }
        let buffers = SocketOptions { receive_buffer: options.receive_buffer, ..SocketOptions::default() };
        let sockets = match options.address {
            Some(address) => HostSockets::bind_dual_stack(address, options.ipv6, buffers)?,
            None => match options.ipv6 {
                None => bind_host(buffers)?,
                ipv6 => bind_host(buffers)?.with_ipv6(ipv6, buffers)?,
            },
        };
        let EmbeddedOptions { settings, icrc, entropy, loopback, .. } = options;
        let driver = DriverOptions { settings, icrc, entropy, loopback };
        let card = embedded::start(sockets, driver, options.switch, options.event_sink)?;
        let address = card.runtime.address();
        Ok(Device { backend: DeviceBackend::Embedded(Arc::new(card)), address })
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn from_daemon(card: DaemonBackend, address: IpAddr) -> Device {
        Device { backend: DeviceBackend::Daemon(Arc::new(card)), address }
    }

    pub(crate) fn simulated(card: SimulatedBackend, address: IpAddr) -> Device {
        Device { backend: DeviceBackend::Simulated(Arc::new(card)), address }
    }

    /// The name: a process has one host, and a host one device.
    pub fn name(&self) -> &str {
        match &self.backend {
            #[cfg(target_os = "linux")]
            DeviceBackend::Daemon(card) => card.device_name(),
            _ => "softhca0",
        }
    }

    /// The host's address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The globally unique identifier: a locally administered EUI-64 made of the address.
    pub fn guid(&self) -> u64 {
        Gid::from(self.address).guid()
    }

    /// What the card offers.
    pub fn attributes(&self) -> DeviceAttributes {
        let limits = match &self.backend {
            #[cfg(target_os = "linux")]
            DeviceBackend::Daemon(card) => card.limits(),
            _ => DeviceLimits::HCA,
        };
        DeviceAttributes { limits }
    }

    /// What its one port is like.
    pub fn port_attributes(&self) -> PortAttributes {
        let (active_mtu, gid) = (self.backend().active_mtu(), Gid::from(self.address));
        let state = self.backend().port_state();
        PortAttributes { port_num: 1, state, max_mtu: Mtu::B4096, active_mtu, gid }
    }

    /// Opens the device.
    pub fn open(&self) -> Context {
        Context::new(self.backend(), self.address)
    }

    fn backend(&self) -> Arc<dyn Backend> {
        match &self.backend {
            DeviceBackend::Embedded(card) => card.clone(),
            DeviceBackend::Simulated(card) => card.clone(),
            #[cfg(target_os = "linux")]
            DeviceBackend::Daemon(card) => card.clone(),
        }
    }

    /// How full the receive buffers of an embedded card's sockets are, and how many datagrams they dropped:
    /// first that of RoCE, then that of link control. Other cards are not asked.
    pub fn receive_buffer_usage(&self) -> Result<Option<[ReceiveMemory; 2]>, Error> {
        match &self.backend {
            DeviceBackend::Embedded(card) => card.runtime.receive_buffer_usage().map(Some),
            _ => Ok(None),
        }
    }

    /// Where applications meet before they are connected: shared by the hosts of a `World`, or by all
    /// embedded cards of this process.
    pub fn endpoint_exchange(&self) -> EndpointExchange {
        self.backend().endpoint_exchange()
    }

    /// Puts a fault rule on the cable that leaves the card. A world's own seed decides its draws. On the card of a
    /// daemon it stays until [`DaemonControl::clear_rules`](crate::DaemonControl::clear_rules), for all its clients.
    ///
    /// # Panics
    /// If the card is a daemon's that is gone or refuses.
    pub fn add_rule(&self, seed: u64, rule: Rule) {
        match &self.backend {
            DeviceBackend::Embedded(card) => card.runtime.add_rule(seed, rule),
            DeviceBackend::Simulated(card) => card.runtime.add_rule(&rule),
            #[cfg(target_os = "linux")]
            DeviceBackend::Daemon(card) => expect_success(card.add_rule(seed, rule)),
        }
    }

    /// Lets rules know a queue pair by its role.
    ///
    /// # Panics
    /// As [`Device::add_rule`].
    pub fn add_flow(&self, seed: u64, flow: Flow) {
        match &self.backend {
            DeviceBackend::Embedded(card) => card.runtime.add_flow(seed, flow),
            DeviceBackend::Simulated(card) => card.runtime.add_flow(flow),
            #[cfg(target_os = "linux")]
            DeviceBackend::Daemon(card) => expect_success(card.add_flow(seed, flow)),
        }
    }

    /// The rules on the cable, and how often each fired.
    ///
    /// # Panics
    /// As [`Device::add_rule`].
    pub fn rules(&self) -> Vec<(Rule, RuleCounters)> {
        match &self.backend {
            DeviceBackend::Embedded(card) => card.runtime.rules(),
            DeviceBackend::Simulated(card) => card.runtime.rules(),
            #[cfg(target_os = "linux")]
            DeviceBackend::Daemon(card) => expect_success(card.rules()),
        }
    }
}

#[cfg(target_os = "linux")]
fn expect_success<T>(result: Result<T, Error>) -> T {
    result.unwrap_or_else(|error| panic!("fault rules on a daemon's card: {error}"))
}

/// What a card offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// How many of each resource, and how large.
    pub limits: DeviceLimits,
}

/// What a port is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttributes {
    /// Its number: a card has one port.
    pub port_num: u8,
    /// Whether its link carries anything, when it was asked.
    pub state: PortState,
    /// The largest path MTU that the card can do.
    pub max_mtu: Mtu,
    /// The largest path MTU that the network carries.
    pub active_mtu: Mtu,
    /// The first entry of the GID table.
    pub gid: Gid,
}
