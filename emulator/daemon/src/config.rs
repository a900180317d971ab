//! The configuration of a daemon.

use crate::subnet::SubnetConfig;
use serde::Deserialize;
use softhca_control::DEFAULT_NAME;
use softhca_engine::{CongestionSettings, DeviceLimits, Profile, Recovery, Settings};
use softhca_fabric::{EcnMarking, LinkSettings, PER_BILLION, PfcSettings, SwitchSettings, Topology};
use softhca_udp::{Entropy, Loopback, parse_addresses};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// The configuration of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// The name.
    pub name: String,
    /// The address; `None` means the first free address of 127.0.0.2, 127.0.0.3, …
    pub address: Option<IpAddr>,
}

/// The resource limits of one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs, reason = "each field is the resource of its name")]
pub struct ClientLimits {
    pub max_qp: u32,
    pub max_cq: u32,
    pub max_srq: u32,
    pub max_pd: u32,
    /// Memory regions and memory windows together.
    pub max_mr: u32,
    pub max_ah: u32,
    pub max_xrcd: u32,
    /// The bytes of all rings.
    pub max_ring_bytes: u64,
}

impl Default for ClientLimits {
    fn default() -> ClientLimits {
        ClientLimits {
            max_qp: 4096,
            max_cq: 4096,
            max_srq: 8192,
            max_pd: 8192,
            max_mr: 8192,
            max_ah: 32_768,
            max_xrcd: 128,
            max_ring_bytes: 1 << 30,
        }
    }
}

/// The network between the hosts of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FabricConfig {
    /// The topology. It must have as many hosts as the daemon.
    pub topology: Topology,
    /// The settings of every link.
    pub link: LinkSettings,
    /// The settings of every switch.
    pub settings: SwitchSettings,
    /// Receive rates of hosts that process packets more slowly than the link, and pause their switch, in bits per second.
    pub receive_rates: BTreeMap<String, u64>,
}

softhca_wire::named_enum! {
    /// Which process executes the transport.
    #[derive(Default)]
    pub enum DataPath {
        /// The daemon, for all its clients.
        Daemon => "daemon",
        /// Each client for itself, on sockets that the daemon gives it.
        #[default]
        Direct => "direct",
    }
}

/// The configuration of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The name of the daemon.
    pub name: String,
    /// The hosts.
    pub hosts: Vec<HostConfig>,
    /// The addresses of the second and further cards of hosts, by host name; `None` as for a host.
    pub further_cards: BTreeMap<String, Vec<Option<IpAddr>>>,
    /// The IPv6 addresses of hosts that also have an IPv4 address, by host name.
    pub ipv6: BTreeMap<String, Ipv6Addr>,
    /// The network namespaces of hosts that are not in that of the daemon, by host name: files such as
    /// `/run/netns/alice`.
    pub namespaces: BTreeMap<String, PathBuf>,
    /// The UDP source port of packets.
    pub entropy: Entropy,
    /// How a host's traffic to itself is carried. By default inside the HCA and in rings on the direct data path, and
    /// through sockets on the daemon's.
    pub loopback: Option<Loopback>,
    /// Which process executes the transport.
    pub data_path: DataPath,
    /// The card whose behaviour all devices have where cards differ.
    pub profile: &'static Profile,
    /// The recovery mode after packet loss.
    pub recovery: Recovery,
    /// The recovery mode of connections to a foreign peer.
    pub foreign_recovery: Recovery,
    /// The most unacknowledged packets to a foreign peer.
    pub foreign_window: u32,
    /// Congestion control.
    pub congestion: CongestionSettings,
    /// The network between the hosts. Without one, the hosts send to each other over sockets.
    pub fabric: Option<FabricConfig>,
    /// The InfiniBand subnet. A daemon with one has no hosts of its own.
    pub subnet: Option<SubnetConfig>,
    /// The most clients.
    pub max_clients: usize,
    /// The limits of each client.
    pub client_limits: ClientLimits,
    /// The most rings and memory regions of all clients together. The kernel allows a process 65530 mappings, and the
    /// daemon needs some of them.
    pub max_mappings: usize,
    /// The most bytes of the rings and mapped memory regions of all clients together.
    pub max_mapped_bytes: u64,
    /// Kill a client that stalls a host for this long. All clients of the host wait, and nothing else ends the stall.
    /// With `None`, the daemon only reports the stall.
    pub kill_after: Option<Duration>,
    /// How long an idle engine thread polls before it sleeps.
    pub busy_poll: Duration,
    /// Exit when no client was connected for this long.
    pub idle_exit_after: Option<Duration>,
}

/// With two processors, programs that poll occupy both. A thread that sleeps preempts them when it is woken, and one that
/// polls waits for their time slices.
fn default_busy_poll() -> Duration {
    match std::thread::available_parallelism() {
        Ok(processors) if processors.get() > 2 => Duration::from_micros(50),
        _ => Duration::ZERO,
    }
}

impl Default for Config {
    fn default() -> Config {
        Config {
            name: DEFAULT_NAME.into(),
            hosts: vec![HostConfig { name: "host".into(), address: None }],
            further_cards: BTreeMap::new(),
            ipv6: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            entropy: Entropy::Off,
            loopback: None,
            data_path: DataPath::default(),
            profile: Profile::SOFTHCA,
            recovery: Recovery::Fatal,
            foreign_recovery: Settings::default().foreign_recovery,
            foreign_window: Settings::default().foreign_window,
            congestion: CongestionSettings::default(),
            fabric: None,
            subnet: None,
            max_clients: 1024,
            client_limits: ClientLimits::default(),
            max_mappings: 48_000,
            max_mapped_bytes: address_space() / 2,
            kill_after: None,
            busy_poll: default_busy_poll(),
            idle_exit_after: None,
        }
    }
}

/// The bytes that the kernel lets this process map.
fn address_space() -> u64 {
    let on_stack = 0u8;
    // The stack is at the end of the address space, whose size is a power of two.
    let size = (&raw const on_stack as u64).next_power_of_two();
    rustix::process::getrlimit(rustix::process::Resource::As).current.unwrap_or(size).min(size)
}

/// A card of a host.
pub(crate) struct CardConfig<'a> {
    /// The host's name for its first card, `HOST:DEVICE` for others.
    pub name: String,
    pub host: &'a str,
    pub address: Option<IpAddr>,
    pub ipv6: Option<Ipv6Addr>,
}

impl Config {
    /// The limits in the device attributes: the lower of the client's and the card's.
    pub(crate) fn device_limits(&self) -> DeviceLimits {
        let (client, card) = (&self.client_limits, self.profile.limits());
        DeviceLimits {
            max_clients: self.max_clients.try_into().unwrap_or(u32::MAX),
            max_qp: card.max_qp.min(client.max_qp),
            max_cq: card.max_cq.min(client.max_cq),
            max_srq: card.max_srq.min(client.max_srq),
            max_pd: card.max_pd.min(client.max_pd),
            max_mr: card.max_mr.min(client.max_mr),
            max_ah: card.max_ah.min(client.max_ah),
            max_xrcd: card.max_xrcd.min(client.max_xrcd),
            ..card
        }
    }

    /// How a host's traffic to itself is carried.
    pub(crate) fn loopback(&self) -> Loopback {
        self.loopback.unwrap_or(match self.data_path {
            DataPath::Daemon => Loopback::Socket,
            DataPath::Direct => Loopback::Internal,
        })
    }

    /// Gives every host this many cards, unless it has more. Further cards are at free loopback addresses.
    pub fn set_cards(&mut self, cards: usize) {
        for host in &self.hosts {
            let further = self.further_cards.entry(host.name.clone()).or_default();
            further.resize(further.len().max(cards.saturating_sub(1)), None);
        }
    }

    /// The cards of all hosts, in the order of their device numbers.
    pub(crate) fn cards(&self) -> Vec<CardConfig<'_>> {
        let mut cards = Vec::new();
        for HostConfig { name: host, address } in &self.hosts {
            let ipv6 = self.ipv6.get(host).copied();
            cards.push(CardConfig { name: host.clone(), host, address: *address, ipv6 });
            for address in self.further_cards.get(host).into_iter().flatten() {
                let name = format!("{host}:softhca{}", cards.len());
                cards.push(CardConfig { name, host, address: *address, ipv6: None });
            }
        }
        cards
    }

    /// The network namespace of a host, unless it is that of the daemon.
    pub(crate) fn namespace(&self, host: &str) -> Option<&Path> {
        self.namespaces.get(host).map(PathBuf::as_path)
    }

    /// The most devices that one process may have open: half of all.
    pub(crate) fn max_clients_per_process(&self) -> usize {
        self.max_clients.div_ceil(2)
    }
}

/// The error of a configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Unreadable {
        /// The file.
        path: String,
        /// The reason.
        source: std::io::Error,
    },
    /// The file is not valid. The message has the position.
    #[error("{path}: {message}")]
    Malformed {
        /// The file.
        path: String,
        /// The error and its position.
        message: String,
    },
}

/// The `[fabric]` table.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FabricTable {
    topology: String,
    /// The rate of every link in Gb/s.
    #[serde(default = "default_rate_gbit")]
    rate_gbit: NonZeroU64,
    #[serde(default = "default_delay_ns")]
    delay_ns: u64,
    left: Option<u32>,
    leaves: Option<u32>,
    spines: Option<u32>,
    switches: Option<u32>,
    k: Option<u32>,
    /// The bytes that all queues of a switch share.
    buffer: Option<u64>,
    ecn: Option<EcnTable>,
    pfc: Option<PfcTable>,
    /// The receive rates of hosts in Gb/s, by host name.
    #[serde(default)]
    receive_gbit: BTreeMap<String, f64>,
}

/// ECN marking: fill levels of a queue in bytes, and the probability of a mark just below `kmax`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EcnTable {
    kmin: u64,
    kmax: u64,
    pmax: f64,
}

/// PFC thresholds: bytes of an ingress port and priority. The defaults are those of [`FlowControl`].
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PfcTable {
    xoff: Option<u64>,
    xon: Option<u64>,
    headroom: Option<u64>,
}

impl EcnTable {
    fn marking(&self) -> Result<EcnMarking, String> {
        let EcnTable { kmin, kmax, pmax } = *self;
        if kmin > kmax {
            return Err(format!("fabric.ecn: kmin ({kmin}) is above kmax ({kmax})"));
        }
        if !(0.0..=1.0).contains(&pmax) {
            return Err(format!("fabric.ecn.pmax is {pmax}, expected a probability between 0 and 1"));
        }
        Ok(EcnMarking { kmin, kmax, pmax_per_billion: (pmax * f64::from(PER_BILLION)).round() as u32 })
    }
}

impl PfcTable {
    fn flow_control(&self) -> Result<PfcSettings, String> {
        let usual = PfcSettings::default();
        let xoff = self.xoff.unwrap_or(usual.xoff);
        let xon = self.xon.unwrap_or(xoff / 8 * 7);
        if xon > xoff || xoff == 0 {
            return Err(format!("fabric.pfc: xoff ({xoff}) must be above 0 and not below xon ({xon})"));
        }
        Ok(PfcSettings { xoff, xon, headroom: self.headroom.unwrap_or(usual.headroom), ..usual })
    }
}

/// The longest delay of a link: one second, after which programs give up on their peer.
const MAX_DELAY_NS: u64 = 1_000_000_000;

const fn default_rate_gbit() -> NonZeroU64 {
    NonZeroU64::new(100).expect("not zero")
}

const fn default_delay_ns() -> u64 {
    1_000
}

impl FabricTable {
    /// The network of these hosts.
    fn config(&self, named: &[CardConfig<'_>]) -> Result<FabricConfig, String> {
        // Every card has a link of its own.
        let hosts = named.len() as u32;
        let FabricTable { left, leaves, spines, switches, k, .. } = *self;
        let needs = |what: &str| format!("topology {:?} requires {what}", self.topology);
        let evenly = |groups: u32, what: &str| match groups {
            0 => Err(needs(what)),
            _ if hosts.is_multiple_of(groups) => Ok(hosts / groups),
            _ => Err(format!("{hosts} hosts cannot be distributed evenly over {groups} {what}")),
        };
        let topology = match &*self.topology {
            "pair" => Topology::Pair,
            "star" => Topology::Star { hosts },
            "dumbbell" => {
                let left = left.unwrap_or(hosts / 2);
                Topology::Dumbbell { left, right: hosts.saturating_sub(left) }
            }
            "leaf-spine" => {
                let leaves = leaves.ok_or_else(|| needs("leaves"))?;
                let spines = spines.ok_or_else(|| needs("spines"))?;
                Topology::LeafSpine { leaves, spines, hosts_per_leaf: evenly(leaves, "leaves")? }
            }
            "fat-tree" => Topology::FatTree { k: k.ok_or_else(|| needs("k"))? },
            "ring" => {
                let switches = switches.ok_or_else(|| needs("switches"))?;
                Topology::Ring { switches, hosts_per_switch: evenly(switches, "switches")? }
            }
            other => {
                return Err(format!(
                    "fabric.topology is {other:?}, expected one of \"pair\", \"star\", \"dumbbell\", \"leaf-spine\", \"fat-tree\", \"ring\""
                ));
            }
        };
        topology.layout().map_err(|why| format!("fabric: {why}"))?;
        if topology.hosts() != u64::from(hosts) {
            return Err(format!(
                "topology {:?} has {} hosts, but {hosts} are configured",
                self.topology,
                topology.hosts()
            ));
        }
        if self.delay_ns > MAX_DELAY_NS {
            return Err(format!("fabric.delay_ns is {}, expected at most {MAX_DELAY_NS}", self.delay_ns));
        }
        let bits_per_second =
            Some(self.rate_gbit.saturating_mul(NonZeroU64::new(1_000_000_000).expect("not zero")));
        let mut settings = SwitchSettings::default();
        settings.buffer = self.buffer.unwrap_or(settings.buffer);
        if let Some(ecn) = &self.ecn {
            settings.ecn_marking = Some(ecn.marking()?);
        }
        if let Some(pfc) = &self.pfc {
            settings.pfc = Some(pfc.flow_control()?);
        }
        let line = LinkSettings { bits_per_second, delay_ns: self.delay_ns, ..LinkSettings::default() };
        Ok(FabricConfig { topology, link: line, settings, receive_rates: self.receive_rates(named)? })
    }

    fn receive_rates(&self, hosts: &[CardConfig<'_>]) -> Result<BTreeMap<String, u64>, String> {
        let rates = self.receive_gbit.iter().map(|(name, gbit)| {
            if !hosts.iter().any(|host| host.name == *name) {
                return Err(format!("fabric.receive_gbit.{name}: no host is named {name:?}"));
            }
            if !gbit.is_finite() || *gbit <= 0.0 {
                return Err(format!("fabric.receive_gbit.{name} is {gbit}, expected more than 0"));
            }
            Ok((name.clone(), (gbit * 1e9).round() as u64))
        });
        rates.collect()
    }
}

/// The addresses of a host: of its card, or of each of its cards.
#[derive(Deserialize)]
#[serde(untagged)]
enum HostAddresses {
    Card(String),
    Cards(Vec<String>),
}

/// The configuration file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigFile {
    name: Option<String>,
    profile: Option<&'static Profile>,
    recovery: Option<String>,
    foreign_recovery: Option<String>,
    foreign_window: Option<u32>,
    loopback: Option<String>,
    data_path: Option<String>,
    congestion: Option<String>,
    fabric: Option<FabricTable>,
    max_clients: Option<usize>,
    kill_after: Option<u64>,
    cards: Option<usize>,
    #[serde(default)]
    hosts: BTreeMap<String, toml::Spanned<HostAddresses>>,
    #[serde(default)]
    entropy: bool,
    #[serde(default)]
    client_limits: ClientLimits,
}

impl Config {
    /// Reads a TOML file: `name`, `profile`, `recovery`, `foreign_recovery`, `foreign_window` in packets, `loopback`, `data_path`, `congestion`, `max_clients`, `kill_after` in seconds, `entropy`,
    /// `cards` of every host, a table `[hosts]` of names and addresses (`"10.0.0.1"`, `"10.0.0.1, fd00::1"` for a host
    /// with both IP versions, or a list with an address for each card), a table `[fabric]` of the network between them, and a table `[client_limits]`.
    pub fn read(path: &Path) -> Result<Config, ConfigError> {
        let shown = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Unreadable { path: shown.clone(), source })?;
        Config::parse(&text).map_err(|message| ConfigError::Malformed { path: shown, message })
    }

    /// Sets the profile, and the recovery mode of its card.
    pub fn set_profile(&mut self, profile: &'static Profile) {
        (self.profile, self.recovery) = (profile, profile.recovery);
    }

    /// Sets the recovery mode of all connections, to foreign peers too.
    pub fn set_recovery(&mut self, recovery: Recovery) {
        (self.recovery, self.foreign_recovery) = (recovery, recovery);
    }

    /// Parses the text of a configuration.
    pub fn parse(text: &str) -> Result<Config, String> {
        let file: ConfigFile = toml::from_str(text).map_err(|error| error.to_string())?;
        let mut config = Config { client_limits: file.client_limits, ..Config::default() };
        config.entropy = if file.entropy { Entropy::On } else { Entropy::Off };
        if let Some(name) = file.name {
            config.name = name;
        }
        config.kill_after = file.kill_after.map(Duration::from_secs);
        if let Some(clients) = file.max_clients {
            config.max_clients = clients;
        }
        let recovery = |key: &str, name: String| {
            Recovery::from_name(&name).ok_or_else(|| {
                format!("{key} is {name:?}, expected one of \"fatal\", \"go-back-n\", \"go-back-0\"")
            })
        };
        if let Some(profile) = file.profile {
            config.set_profile(profile);
        }
        if let Some(name) = file.recovery {
            config.set_recovery(recovery("recovery", name)?);
        }
        if let Some(name) = file.foreign_recovery {
            config.foreign_recovery = recovery("foreign_recovery", name)?;
        }
        config.foreign_window = file.foreign_window.unwrap_or(config.foreign_window);
        if let Some(name) = file.loopback {
            let unknown = || format!("loopback is {name:?}, expected one of \"socket\", \"internal\"");
            config.loopback = Some(Loopback::from_name(&name).ok_or_else(unknown)?);
        }
        if let Some(name) = file.data_path {
            config.data_path = DataPath::from_name(&name)
                .ok_or_else(|| format!("data_path is {name:?}, expected one of \"daemon\", \"direct\""))?;
        }
        if let Some(name) = file.congestion {
            config.congestion = CongestionSettings::from_name(&name).ok_or_else(|| {
                format!("congestion is {name:?}, expected one of {}", CongestionSettings::NAMES.join(", "))
            })?;
        }
        if !file.hosts.is_empty() {
            config.hosts.clear();
            for (name, value) in file.hosts {
                let line = text[..value.span().start].matches('\n').count() + 1;
                let cards = match value.into_inner() {
                    HostAddresses::Card(card) => vec![card],
                    HostAddresses::Cards(cards) => cards,
                };
                let mut addresses = Vec::new();
                for (index, card) in cards.iter().enumerate() {
                    let (address, ipv6) = parse_addresses(card).ok_or_else(|| {
                        format!(
                            "line {line}: the address of host {name:?} is {card:?}, expected an address such as \"127.0.0.2\" or \
                             \"10.0.0.1, fd00::1\""
                        )
                    })?;
                    match ipv6 {
                        Some(ipv6) if index == 0 => drop(config.ipv6.insert(name.clone(), ipv6)),
                        Some(_) => {
                            return Err(format!(
                                "line {line}: {card:?}: only the first card of host {name:?} can have an IPv4 and an IPv6 address"
                            ));
                        }
                        None => {}
                    }
                    addresses.push(address);
                }
                let Some((first, further)) = addresses.split_first() else {
                    return Err(format!("line {line}: host {name:?} has no address"));
                };
                let further = further.iter().copied().map(Some).collect();
                config.further_cards.insert(name.clone(), further);
                config.hosts.push(HostConfig { name, address: Some(*first) });
            }
        }
        if let Some(cards) = file.cards {
            config.set_cards(cards);
        }
        config.fabric = file.fabric.map(|fabric| fabric.config(&config.cards())).transpose()?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests;
