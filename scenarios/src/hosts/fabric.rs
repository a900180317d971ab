//! The part of a host's control that only the network of a simulation has: links and switches of any kind, and their
//! faults.

use crate::plan::{Change, FaultKind, LinkRule, Plan};
use softhca::Device;
use softhca::sim::{FabricSink, SimulatedFabric};
use softhca_fabric::{
    Action, Direction, HostId, LinkId, LinkSettings, LinkState, Rule, RuleCounters, RuleId, SwitchId,
    SwitchSettings, World,
};
use softhca_wire::Qpn;
use std::num::NonZeroU64;

/// Builds the network of a plan, and a device for each host.
pub(crate) fn build_fabric(plan: &Plan) -> (SimulatedFabric, Vec<Device>) {
    let fabric = SimulatedFabric::new(plan.seed);
    let devices =
        plan.hosts.iter().map(|host| fabric.add_host(&host.name, host.address, host.settings)).collect();
    fabric.with(|world| {
        for switch in &plan.switches {
            world.add_switch(&switch.name, switch.settings);
        }
        for link in &plan.links {
            world.add_link(link.ends[0], link.ends[1], link.line);
        }
        for route in &plan.routes {
            let link = LinkId(route.link as u32);
            world.set_route(SwitchId(route.switch as u32), HostId(route.host as u32), &[link]);
        }
        for (host, plan) in plan.hosts.iter().enumerate() {
            if let Some(receiver) = plan.receiver {
                world.set_receiver(HostId(host as u32), receiver);
            }
        }
    });
    (fabric, devices)
}

/// Installs the rules of a plan. Counting rules come first: they see packets before any fault.
pub fn install_rules(fabric: &SimulatedFabric, plan: &Plan) {
    let counts = plan.counting_rules.iter().map(|count| (&count.links, &count.rule));
    let faults = plan.faults.iter().filter(|fault| fault.after.is_none());
    let faults = faults.filter_map(|fault| match &fault.kind {
        FaultKind::Packets { links, rule } => Some((links, rule)),
        _ => None,
    });
    counts.chain(faults).for_each(|(links, rule)| add_rule(fabric, links, rule));
    plan.link_rules.iter().for_each(|of_link| add_rule(fabric, &[of_link.link], &of_link.rule));
}

/// Adds a rule to links.
pub fn add_rule(fabric: &SimulatedFabric, links: &[usize], rule: &Rule) {
    fabric.with(|world| {
        for link in links {
            world.add_rule(LinkId(*link as u32), rule.clone());
        }
    });
}

/// Ends all faults of links, switches and hosts. Rules keep their counters.
pub fn heal(fabric: &SimulatedFabric, plan: &Plan) {
    let is_fault = |rule: &Rule| {
        let is_loss = |of_link: &&LinkRule| of_link.rule.id == rule.id && rule.action == Action::Drop;
        plan.faults.iter().any(|fault| fault.id == rule.id) || plan.link_rules.iter().any(|it| is_loss(&it))
    };
    fabric.with(|world| {
        for (index, link) in plan.links.iter().enumerate() {
            let id = LinkId(index as u32);
            world.link_mut(id).stop_rules(is_fault);
            for direction in [Direction::Forward, Direction::Backward] {
                if world.link(id).state(world.now().nanos(), direction) == LinkState::Down {
                    world.set_link_state(id, direction, LinkState::Up);
                }
            }
            if *world.link(id).settings() != link.line {
                world.link_mut(id).set_settings(link.line);
            }
        }
        for (index, switch) in plan.switches.iter().enumerate() {
            let id = SwitchId(index as u32);
            if *world.switch(id).settings() != switch.settings {
                world.set_switch_settings(id, switch.settings);
            }
        }
        for host in 0..plan.hosts.len() {
            if world.receiver(HostId(host as u32)).pause_storm != 0 {
                set_pause_storm(world, host, |_| 0);
            }
            world.with_hca(HostId(host as u32), |hca, ctx| hca.heal(ctx));
        }
    });
}

/// The counters of the rules of every link.
pub fn rule_counters(fabric: &SimulatedFabric, plan: &Plan) -> Vec<(RuleId, RuleCounters)> {
    fabric.with(|world| {
        let rules = (0..plan.links.len()).flat_map(|link| world.link(LinkId(link as u32)).rules());
        rules.map(|(rule, counters)| (rule.id, counters)).collect()
    })
}

/// Sets the initial rates of the queue pairs.
pub fn set_initial_rates(fabric: &SimulatedFabric, plan: &Plan, qpn_of: impl Fn(usize) -> Qpn) {
    for (index, qp) in plan.qps.iter().enumerate() {
        if let Some(rate) = plan.hosts[qp.host].initial_rate {
            let host = HostId(qp.host as u32);
            fabric.with(|world| world.with_hca(host, |hca, ctx| hca.set_rate(ctx, qpn_of(index), rate)));
        }
    }
}

/// Applies a change to a link, a switch or a port.
pub fn apply(fabric: &SimulatedFabric, change: &Change) {
    fabric.with(|world| match *change {
        Change::LinkState { link, directions, state } => {
            for (direction, wanted) in [Direction::Forward, Direction::Backward].into_iter().zip(directions) {
                if wanted {
                    world.set_link_state(LinkId(link as u32), direction, state);
                }
            }
        }
        Change::LinkRate { link, rate } => {
            change_link(world, link, |line| line.bits_per_second = NonZeroU64::new(rate));
        }
        Change::LinkMtu { link, mtu } => change_link(world, link, |line| line.mtu = mtu),
        Change::SwitchBuffer { switch, bytes } => {
            change_switch(world, switch, |settings| settings.buffer = bytes);
        }
        Change::SwitchMarking { switch, marking } => {
            change_switch(world, switch, |settings| settings.ecn_marking = Some(marking));
        }
        Change::SwitchPfc { switch, settings: pfc } => {
            change_switch(world, switch, |settings| settings.pfc = Some(pfc));
        }
        Change::PauseStorm { host, priority } => {
            set_pause_storm(world, host, |storm| storm | 1 << priority);
        }
        Change::PauseStormEnd { host, priority } => {
            set_pause_storm(world, host, |storm| storm & !(1 << priority));
        }
        Change::RestartProgram { .. } | Change::KillDaemon { .. } => {
            unreachable!("a plan with steps or workloads has neither")
        }
        _ => unreachable!("the device or the program does it, on every back end"),
    });
}

fn change_switch(world: &mut World<FabricSink>, switch: usize, change: impl Fn(&mut SwitchSettings)) {
    let id = SwitchId(switch as u32);
    let mut settings = *world.switch(id).settings();
    change(&mut settings);
    world.set_switch_settings(id, settings);
}

fn change_link(world: &mut World<FabricSink>, link: usize, change: impl Fn(&mut LinkSettings)) {
    let link = world.link_mut(LinkId(link as u32));
    let mut line = *link.settings();
    change(&mut line);
    link.set_settings(line);
}

/// Changes the priorities for which a host pauses its neighbours without a reason.
fn set_pause_storm(world: &mut World<FabricSink>, host: usize, change: impl Fn(u8) -> u8) {
    let host = HostId(host as u32);
    let mut receiver = *world.receiver(host);
    receiver.pause_storm = change(receiver.pause_storm);
    world.set_receiver(host, receiver);
}
