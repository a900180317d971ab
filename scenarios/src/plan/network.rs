//! Hosts, switches and links.

use super::device::{cm_times, congestion_settings, host_settings, slow_receiver};
use super::{HostPlan, LINK_RULES, LinkPlan, LinkRule, Node, RoutePlan, SwitchPlan, limits};
use crate::quantity::{Probability, Rate, Time};
use crate::source::{Result, Source, join_path};
use crate::spec::{DeviceSpec, EcnSpec, HostSpec, PfcSpec, ScenarioFile, SwitchSpec};
use softhca_engine::Profile;
use softhca_fabric::{
    Action, Choice, Direction, EcnMarking, LinkSettings, PfcSettings, PfcWatchdog, Repeat, Rule, RuleId,
    Selector, SwitchSettings,
};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::num::{NonZeroU16, NonZeroU64};
use std::time::Duration;

/// The nodes and links of a scenario.
pub(super) struct Network {
    pub hosts: Vec<HostPlan>,
    /// Cards of each host. All but the first are further entries of `hosts`.
    pub cards: usize,
    pub switches: Vec<SwitchPlan>,
    pub links: Vec<LinkPlan>,
    pub link_rules: Vec<LinkRule>,
    pub routes: Vec<RoutePlan>,
    nodes: BTreeMap<String, Node>,
    neighbors: BTreeMap<Node, Vec<Node>>,
}

/// Expands `h[1..4]` to h1, h2, h3, h4. Other names stay as they are.
pub(super) fn expand_host_range(name: &str) -> Result<Vec<String>, String> {
    let Some((stem, rest)) = name.split_once('[') else { return Ok(vec![name.to_owned()]) };
    let bad = || format!("{name:?} is not a range of names such as \"h[1..16]\"");
    let (range, tail) = rest.split_once(']').ok_or_else(bad)?;
    let (first, last) = range.split_once("..").ok_or_else(bad)?;
    let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else { return Err(bad()) };
    if first > last {
        return Err(bad());
    }
    if last - first >= limits::MAX_HOSTS {
        return Err(format!("{name:?} expands to more than {} names", limits::MAX_HOSTS));
    }
    // Names of equal width sort like their numbers.
    let width = last.to_string().len();
    Ok((first..=last)
        .map(|n| {
            if first.to_string().len() == width {
                format!("{stem}{n}{tail}")
            } else {
                format!("{stem}{n:0width$}{tail}")
            }
        })
        .collect())
}

impl Network {
    pub fn new(file: &ScenarioFile, source: &Source) -> Result<Network> {
        let cards = file.device.cards.unwrap_or(1) as usize;
        if !(1..=limits::MAX_CARDS).contains(&cards) {
            let message = format!("a host has 1 to {} cards", limits::MAX_CARDS);
            return Err(source.error_in("device", "cards", message));
        }
        let mut network = Network {
            hosts: Vec::new(),
            cards,
            switches: Vec::new(),
            links: Vec::new(),
            link_rules: Vec::new(),
            routes: Vec::new(),
            nodes: BTreeMap::new(),
            neighbors: BTreeMap::new(),
        };
        for (key, host) in &file.hosts {
            let path = join_path("hosts", key);
            for name in expand_host_range(key).map_err(|why| source.error_at(&path, why))? {
                check_name(&name, source, &path)?;
                network.add_host(&name, host, &file.device, source, &path)?;
                for _ in 1..cards {
                    // As a daemon names them.
                    let name = format!("{name}:softhca{}", network.hosts.len());
                    let further = HostSpec { address: None, ..host.clone() };
                    network.add_host(&name, &further, &file.device, source, &path)?;
                }
            }
        }
        if network.hosts.is_empty() {
            return Err(source.error_at("hosts", "a scenario needs at least one host"));
        }
        for (name, switch) in &file.switches {
            network.add_switch(name, switch, source, &join_path("switches", name))?;
        }
        if let Some(topology) = &file.topology {
            if !file.link.is_empty() {
                return Err(source.error_at("topology", "give either `topology` or `[[link]]`, not both"));
            }
            network.build_topology(topology, source)?;
        }
        for (index, link) in file.link.iter().enumerate() {
            let path = format!("link.{index}");
            let line = link_line(link.rate, link.delay, link.mtu, source, &path)?;
            let mut ends = [Node::Host(0); 2];
            for (end, name) in link.between.iter().enumerate() {
                ends[end] = network.node(name, source, &format!("{path}.between.{end}"))?;
            }
            if ends[0] == ends[1] {
                return Err(source.error_in(&path, "between", "the ends of a link must differ"));
            }
            // Each link draws for itself.
            let id = RuleId(LINK_RULES.0 - 2 * network.links.len() as u32);
            network.links.push(LinkPlan { ends, line });
            let mut add = |id, repeat, action, name| {
                let rule = Rule { id, selector: Selector::default(), repeat, action };
                network.link_rules.push(LinkRule { link: index, rule, name });
            };
            if let Some(Probability(per_billion)) = link.loss {
                let choice = Choice::Probability { per_billion };
                let repeat = Repeat { choice, ..Repeat::default() };
                add(id, repeat, Action::Drop, "the loss of the link");
            }
            if let Some(Time(up_to_ns)) = link.jitter {
                let id = RuleId(id.0 - 1);
                add(id, Repeat::default(), Action::Jitter { up_to_ns }, "the jitter of the link");
            }
        }
        if network.links.is_empty() && network.hosts.len() == 2 * cards {
            let line = LinkSettings { delay_ns: 1_000, ..LinkSettings::default() };
            let ends = (0..cards).map(|card| [Node::Host(card), Node::Host(cards + card)]);
            network.links.extend(ends.map(|ends| LinkPlan { ends, line }));
        }
        for LinkPlan { ends: [first, second], .. } in &network.links {
            network.neighbors.entry(*first).or_default().push(*second);
            network.neighbors.entry(*second).or_default().push(*first);
        }
        Ok(network)
    }

    fn add_host(
        &mut self,
        name: &str,
        host: &HostSpec,
        device: &DeviceSpec,
        source: &Source,
        path: &str,
    ) -> Result<()> {
        if self.hosts.len() == limits::MAX_HOSTS {
            return Err(source.error_at(path, format!("more than {} hosts", limits::MAX_HOSTS)));
        }
        let n = self.hosts.len() as u32 + 1;
        let address = host.address.unwrap_or(IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + n)));
        if address.is_multicast() || address.is_unspecified() {
            return Err(source.error_in(path, "address", format!("{address} is not a unicast address")));
        }
        if self.hosts.iter().any(|other| other.address == address) {
            return Err(source.error_in(path, "address", format!("another host has the address {address}")));
        }
        let key_path = |own: bool, key: &str| join_path(if own { path } else { "device" }, key);
        let merged = host.or(device);
        let mut settings = host_settings(&merged);
        let configured_profile = match &merged.profile {
            Some(name) => Some(Profile::from_name(name).ok_or_else(|| {
                let path = key_path(host.profile.is_some(), "profile");
                let names: Vec<&str> = Profile::names().collect();
                source.error_at(&path, format!("unknown profile {name:?}")).suggest(name, names)
            })?),
            None => None,
        };
        if let Some(profile) = configured_profile {
            (settings.profile, settings.recovery) = (profile, merged.recovery.unwrap_or(profile.recovery));
        }
        if let Some(spec) = &merged.congestion_control {
            let path = key_path(host.congestion_control.is_some(), "congestion-control");
            settings.congestion = congestion_settings(spec, source, &path)?;
        }
        if let Some(spec) = &device.cm {
            settings.cm = cm_times(spec, source)?;
        }
        let receiver = match (merged.receive_rate, merged.receive_buffer) {
            (Some(rate), buffer) => Some(slow_receiver(rate, buffer)),
            (None, None) => None,
            (None, Some(_)) => {
                let path = key_path(host.receive_buffer.is_some(), "receive-buffer");
                return Err(source
                    .error_at(&path, "a device without a receive rate never fills its buffer")
                    .help("add `receive-rate`"));
            }
        };
        let node = Node::Host(self.hosts.len());
        self.hosts.push(HostPlan {
            name: name.to_owned(),
            address,
            is_foreign: host.foreign,
            settings,
            configured_profile,
            configured_recovery: merged.recovery,
            initial_rate: merged.congestion_control.and_then(|spec| spec.initial_rate).map(|rate| rate.0),
            receiver,
        });
        self.add_node(name, node, source, path)
    }

    fn add_switch(&mut self, name: &str, spec: &SwitchSpec, source: &Source, path: &str) -> Result<()> {
        check_name(name, source, path)?;
        let mut settings = SwitchSettings::default();
        if let Some(size) = spec.buffer {
            settings.buffer = size.0;
        }
        if let Some(size) = spec.queue_limit {
            settings.queue_limit = size.0;
        }
        if let Some(step) = spec.queue_depth_step {
            settings.sample_step = step.0;
        }
        if let Some(ecn) = &spec.ecn {
            settings.ecn_marking = Some(ecn_marking(ecn, source, &join_path(path, "ecn"))?);
        }
        if let Some(pfc) = &spec.pfc {
            settings.pfc = Some(pfc_settings(pfc, source, &join_path(path, "pfc"))?);
        }
        settings.watchdog = spec.watchdog.as_ref().map(|spec| PfcWatchdog {
            detection_time: Duration::from_nanos(spec.detection_time.0),
            restoration_time: Duration::from_nanos(spec.restoration_time.0),
            action: spec.action,
        });
        let node = Node::Switch(self.switches.len());
        self.switches.push(SwitchPlan { name: name.to_owned(), settings });
        self.add_node(name, node, source, path)
    }

    fn add_node(&mut self, name: &str, node: Node, source: &Source, path: &str) -> Result<()> {
        match self.nodes.insert(name.to_owned(), node) {
            None => Ok(()),
            Some(_) => Err(source.error_at(path, format!("another host or switch has the name {name:?}"))),
        }
    }

    /// The switch with this name. A switch that the file does not declare has default settings.
    pub fn switch(&mut self, name: &str, source: &Source) -> Result<Node> {
        match self.nodes.get(name) {
            Some(node @ Node::Switch(_)) => Ok(*node),
            Some(Node::Host(_)) => {
                Err(source.error_at("topology", format!("{name:?} is a host, not a switch")))
            }
            None => {
                self.add_switch(name, &SwitchSpec::default(), source, "topology")?;
                Ok(Node::Switch(self.switches.len() - 1))
            }
        }
    }

    /// The host or switch with this name.
    pub fn node(&self, name: &str, source: &Source, path: &str) -> Result<Node> {
        self.nodes.get(name).copied().ok_or_else(|| {
            let message = format!("unknown host or switch {name:?}");
            source.error_at(path, message).suggest(name, self.nodes.keys().map(String::as_str))
        })
    }

    pub fn host(&self, name: &str, source: &Source, path: &str) -> Result<usize> {
        match self.nodes.get(name) {
            Some(Node::Host(host)) => Ok(*host),
            _ => {
                let names = self.hosts.iter().map(|host| host.name.as_str());
                Err(source.error_at(path, format!("unknown host {name:?}")).suggest(name, names))
            }
        }
    }

    /// The hosts of a name or a range of names.
    pub fn hosts_matching(&self, name: &str, source: &Source, path: &str) -> Result<Vec<usize>> {
        let names = expand_host_range(name).map_err(|why| source.error_at(path, why))?;
        names.iter().map(|name| self.host(name, source, path)).collect()
    }

    pub fn switch_named(&self, name: &str, source: &Source, path: &str) -> Result<usize> {
        match self.nodes.get(name) {
            Some(Node::Switch(switch)) => Ok(*switch),
            _ => {
                let names = self.switches.iter().map(|switch| switch.name.as_str());
                Err(source.error_at(path, format!("unknown switch {name:?}")).suggest(name, names))
            }
        }
    }

    pub fn name(&self, node: Node) -> &str {
        match node {
            Node::Host(host) => &self.hosts[host].name,
            Node::Switch(switch) => &self.switches[switch].name,
        }
    }

    /// The link, and its direction or both, that `"a -> b"` and `"a - b"` name.
    pub fn link_direction(
        &self,
        text: &str,
        source: &Source,
        path: &str,
    ) -> Result<(usize, Option<Direction>)> {
        let one_way = text.split_once("->");
        let Some((from, to)) = one_way.or_else(|| text.split_once(" - ")) else {
            let problem = source.error_at(path, format!("{text:?} is not a link"));
            return Err(problem.help("write \"alice -> bob\" for one direction, \"alice - bob\" for both"));
        };
        let [from, to] = [self.node(from.trim(), source, path)?, self.node(to.trim(), source, path)?];
        let found = self.links.iter().position(|link| link.ends == [from, to] || link.ends == [to, from]);
        let Some(link) = found else {
            let message = format!("no link between {} and {}", self.name(from), self.name(to));
            let mut names = Vec::new();
            for link in &self.links {
                let [a, b] = link.ends;
                if [a, b].contains(&from) || [a, b].contains(&to) {
                    names.push(format!("\"{} - {}\"", self.name(a), self.name(b)));
                }
            }
            let problem = source.error_at(path, message);
            return Err(if names.is_empty() {
                problem
            } else {
                problem.help(format!("links: {}", names.join(", ")))
            });
        };
        let forward = self.links[link].ends == [from, to];
        let direction = if forward { Direction::Forward } else { Direction::Backward };
        Ok((link, one_way.is_some().then_some(direction)))
    }

    /// Whether a path connects two hosts.
    pub fn has_path(&self, from: usize, to: usize) -> bool {
        let (mut seen, mut left) = (BTreeSet::from([Node::Host(from)]), vec![Node::Host(from)]);
        while let Some(node) = left.pop() {
            for next in self.neighbors.get(&node).into_iter().flatten() {
                // Hosts do not forward packets.
                if seen.insert(*next) && matches!(next, Node::Switch(_)) {
                    left.push(*next);
                }
            }
        }
        seen.contains(&Node::Host(to))
    }
}

fn check_name(name: &str, source: &Source, path: &str) -> Result<()> {
    let fine = |c: char| c.is_alphanumeric() || c == '-' || c == '_';
    match !name.is_empty() && name.chars().all(fine) {
        true => Ok(()),
        false => Err(source.error_at(path, format!("{name:?}: names consist of letters, digits, - and _"))),
    }
}

pub(super) fn link_line(
    rate: Option<Rate>,
    delay: Time,
    mtu: Option<u32>,
    source: &Source,
    path: &str,
) -> Result<LinkSettings> {
    let bits_per_second = match rate {
        None => None,
        Some(rate) => Some(
            NonZeroU64::new(rate.0)
                .ok_or_else(|| source.error_in(path, "rate", "a link with rate 0 carries no packets"))?,
        ),
    };
    if mtu == Some(0) {
        return Err(source.error_in(path, "mtu", "a link with MTU 0 carries no packets"));
    }
    Ok(LinkSettings { bits_per_second, delay_ns: delay.0, mtu: mtu.unwrap_or(u32::MAX) })
}

/// The ECN marking of a switch.
pub(super) fn ecn_marking(spec: &EcnSpec, source: &Source, path: &str) -> Result<EcnMarking> {
    if spec.kmin > spec.kmax {
        return Err(source.error_at(path, "kmin exceeds kmax"));
    }
    Ok(EcnMarking { kmin: spec.kmin.0, kmax: spec.kmax.0, pmax_per_billion: spec.pmax.0 })
}

/// The PFC settings of a switch.
pub(super) fn pfc_settings(spec: &PfcSpec, source: &Source, path: &str) -> Result<PfcSettings> {
    let defaults = PfcSettings::default();
    let xoff = spec.xoff.map_or(defaults.xoff, |size| size.0);
    let xon = spec.xon.map_or(xoff / 8 * 7, |size| size.0);
    if xon > xoff {
        return Err(source.error_at(path, format!("xon ({xon} bytes) exceeds xoff ({xoff} bytes)")));
    }
    let priorities = match &spec.priorities {
        None => defaults.priorities,
        Some(list) => {
            if let Some(priority) = list.iter().find(|priority| **priority > 7) {
                let path = join_path(path, "priorities");
                return Err(source
                    .error_at(&path, format!("priority {priority} is out of range, priorities are 0 to 7")));
            }
            list.iter().fold(0, |mask, priority| mask | 1 << priority)
        }
    };
    let headroom = spec.headroom.map_or(defaults.headroom, |size| size.0);
    let quanta = spec.quanta.map_or(defaults.quanta, NonZeroU16::get);
    Ok(PfcSettings { priorities, xoff, xon, headroom, quanta })
}

#[cfg(test)]
mod tests {
    use super::expand_host_range;

    #[test]
    fn a_range_of_names_keeps_its_order() {
        assert_eq!(expand_host_range("h[1..3]").unwrap(), ["h1", "h2", "h3"]);
        assert_eq!(expand_host_range("h[9..11]").unwrap(), ["h09", "h10", "h11"]);
        assert_eq!(expand_host_range("alice").unwrap(), ["alice"]);
        assert!(expand_host_range("h[3..1]").is_err());
        assert!(expand_host_range("h[1").is_err());
    }
}
