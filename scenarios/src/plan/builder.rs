//! Builds a plan from a file, starting with its queue pairs: names, connections, memory.

use super::network::Network;
use super::traffic::TrafficSummary;
use super::{
    CommandPlan, FlowKind, FlowPlan, HealPlan, PairPlan, Plan, QpPlan, StepAction, StepPlan, WorkOperation,
};
use crate::parameters::ParameterValues;
use crate::quantity::Time;
use crate::source::{Diagnostic, Result, Source, join_path};
use crate::spec::{AccessRight, ConnectionSpec, ExpectationFile, HealSpec, RemoteTarget, ScenarioFile};
use softhca_engine::{DeviceLimits, QpType};
use softhca_fabric::Seed;
use softhca_types::AccessFlags;
use softhca_wire::{Ecn, Mtu, Psn, RnrTimer};
use std::collections::BTreeMap;

/// The state of plan building.
pub(super) struct PlanBuilder<'a> {
    pub file: &'a ScenarioFile,
    pub source: &'a Source,
    pub network: Network,
    pub qps: Vec<QpPlan>,
    pub pairs: Vec<PairPlan>,
    pub steps: Vec<StepPlan>,
    pub flows: Vec<FlowPlan>,
    pub commands: Vec<CommandPlan>,
    pub workloads: Vec<String>,
    pub traffic: TrafficSummary,
    /// External programs create the queue pairs; names refer to them in the order in which they connect.
    pub has_external_programs: bool,
    pub qp_by_name: BTreeMap<String, usize>,
    pub seed: u64,
}

/// Builds the plan of a file for one seed, with the expectations of another file.
pub(crate) fn build(
    file: &ScenarioFile,
    source: &Source,
    more: Option<&(ExpectationFile, Source)>,
    values: ParameterValues,
    seed: u64,
) -> Result<Plan> {
    let network = Network::new(file, source)?;
    let makes_pairs =
        file.workload.iter().any(|workload| workload.incast.is_some() || workload.permutation.is_some());
    let mut builder = PlanBuilder {
        file,
        source,
        network,
        qps: Vec::new(),
        pairs: Vec::new(),
        steps: Vec::new(),
        flows: Vec::new(),
        commands: Vec::new(),
        workloads: Vec::new(),
        traffic: TrafficSummary::default(),
        has_external_programs: file.pair.is_empty() && !makes_pairs,
        qp_by_name: BTreeMap::new(),
        seed,
    };
    builder.check_connection(&file.connection, "connection")?;
    builder.add_pairs()?;
    builder.add_steps()?;
    builder.add_workloads()?;
    builder.size_areas();
    builder.unify_cm_mtu()?;
    builder.traffic = TrafficSummary::new(
        &builder.qps,
        &builder.pairs,
        &builder.steps,
        &builder.flows,
        builder.has_external_programs,
    );
    let faults = builder.faults()?;
    let heal = builder.heal()?;
    let (mut expectations, mut counting_rules) = (Vec::new(), Vec::new());
    builder.expectations(&file.expect, &faults, &mut expectations, &mut counting_rules)?;
    let mut invariants = file.invariants.clone();
    if let Some((more, source)) = more {
        builder.source = source;
        builder.expectations(&more.expect, &faults, &mut expectations, &mut counting_rules)?;
        invariants.extend(&more.invariants);
    }
    let PlanBuilder { network, qps, pairs, steps, flows, commands, workloads, .. } = builder;
    Ok(Plan {
        title: file.title.clone(),
        seed,
        parameters: values,
        duration_ns: file.duration.map(|time| time.0),
        hosts: network.hosts,
        cards: network.cards,
        switches: network.switches,
        links: network.links,
        link_rules: network.link_rules,
        routes: network.routes,
        qps,
        pairs,
        transport: file.connection.transport.unwrap_or(QpType::Rc),
        steps,
        flows,
        commands,
        workloads,
        faults,
        heal,
        branch: None,
        counting_rules,
        expectations,
        invariants,
    })
}

impl PlanBuilder<'_> {
    fn heal(&self) -> Result<Option<HealPlan>> {
        let Some(HealSpec { at, deadline }) = self.file.heal.clone() else { return Ok(None) };
        let deadline_ns = at.0.saturating_add(deadline.0);
        if let Some(duration) = self.file.duration.filter(|duration| duration.0 < deadline_ns) {
            let message =
                format!("the run stops at {duration}, before the deadline of {}", Time(deadline_ns));
            return Err(self.error_at("heal", message).help("remove `duration`, or set `deadline`"));
        }
        Ok(Some(HealPlan { at_ns: at.0, deadline_ns, at: self.source.line("heal") }))
    }

    pub fn error_at(&self, path: &str, message: impl Into<String>) -> Diagnostic {
        self.source.error_at(path, message)
    }

    pub fn error_in(&self, path: &str, key: &str, message: impl Into<String>) -> Diagnostic {
        self.source.error_in(path, key, message)
    }

    /// The host of the key `host` below `path`.
    pub fn host(&self, name: &str, path: &str) -> Result<usize> {
        self.network.host(name, self.source, &join_path(path, "host"))
    }

    /// The queue pair of the key `qp` below `path`, if the file gives one.
    pub fn optional_qp(&mut self, name: Option<&String>, path: &str) -> Result<Option<usize>> {
        name.map(|name| self.qp(name, &join_path(path, "qp"))).transpose()
    }

    pub fn qp(&mut self, name: &str, path: &str) -> Result<usize> {
        if let Some(qp) = self.qp_by_name.get(name) {
            return Ok(*qp);
        }
        if self.has_external_programs {
            return self.external_qp(name, path);
        }
        let names: Vec<&str> = self.qp_by_name.keys().map(String::as_str).collect();
        let shown = if names.len() > 24 { &names[..24] } else { &names[..] };
        Err(self.error_at(path, format!("unknown queue pair {name:?}")).suggest(name, shown.iter().copied()))
    }

    /// A queue pair of an external program, identified by the order in which programs connect.
    fn external_qp(&mut self, name: &str, path: &str) -> Result<usize> {
        let (host, _) = self.parse_qp_name(name, path)?;
        let qp = self.qps.len();
        self.qps.push(QpPlan { name: name.into(), host, peer: qp, pair: 0 });
        self.qp_by_name.insert(name.into(), qp);
        Ok(qp)
    }

    /// Host and number in the name of a queue pair.
    fn parse_qp_name(&self, name: &str, path: &str) -> Result<(usize, u32)> {
        let parts =
            name.rsplit_once('.').and_then(|(host, number)| Some((host, number.parse::<u32>().ok()?)));
        let Some((host, number @ 1..)) = parts else {
            let problem = self.error_at(path, format!("{name:?} is not the name of a queue pair"));
            return Err(problem.help("write the host, a dot and a number from 1: \"alice.1\""));
        };
        Ok((self.network.host(host, self.source, path)?, number))
    }

    fn add_pairs(&mut self) -> Result<()> {
        for (index, pair) in self.file.pair.iter().enumerate() {
            let path = format!("pair.{index}");
            self.check_connection(&pair.or(&ConnectionSpec::default()), &path)?;
            let mut hosts = [0; 2];
            for (side, name) in pair.qps.iter().enumerate() {
                let path = format!("{path}.qps.{side}");
                hosts[side] = self.parse_qp_name(name, &path)?.0;
                if self.qp_by_name.contains_key(name) || side == 1 && pair.qps[0] == *name {
                    return Err(self.error_at(&path, format!("{name} is already in a pair")));
                }
            }
            let spec = pair.or(&self.file.connection);
            self.add_pair(pair.qps.clone(), hosts, &spec, &join_path(&path, "qps"))?;
        }
        Ok(())
    }

    pub(super) fn add_pair(
        &mut self,
        names: [String; 2],
        hosts: [usize; 2],
        spec: &ConnectionSpec,
        path: &str,
    ) -> Result<[usize; 2]> {
        if !self.network.has_path(hosts[0], hosts[1]) {
            let names = hosts.map(|host| self.network.hosts[host].name.clone());
            let problem = self.error_at(path, format!("no path from {} to {}", names[0], names[1]));
            let help = format!("add [[link]] between = [\"{}\", \"{}\"]", names[0], names[1]);
            return Err(problem.help(help));
        }
        let pair = self.pairs.len();
        let qps = [self.qps.len(), self.qps.len() + 1];
        let psns = spec.sq_psn.unwrap_or_else(|| {
            [0, 1].map(|side| Seed(self.seed).draw(&[0x0070_736e, pair as u64, side]) as u32 & 0xff_ffff)
        });
        let ecn = if spec.ecn == Some(true) { Ecn::Ect0 as u8 } else { 0 };
        self.pairs.push(PairPlan {
            qps,
            kind: spec.transport.unwrap_or(QpType::Rc),
            uses_cm: self.uses_connection_manager(&names),
            mtu: spec.mtu.and_then(Mtu::from_bytes).unwrap_or(Mtu::B1024),
            timeout: spec.timeout.unwrap_or(14),
            retry_count: spec.retry_count.unwrap_or(7),
            rnr_retry: spec.rnr_retry.unwrap_or(7),
            min_rnr_timer: RnrTimer::new(spec.min_rnr_timer.unwrap_or(12)),
            max_rd_atomic: spec.max_rd_atomic.unwrap_or(16),
            sq_psns: psns.map(Psn::new),
            access: spec.access.as_deref().map_or(ALL_ACCESS, AccessRight::flags),
            posted_receives: spec.posted_receives.unwrap_or(0),
            receive_bytes: spec.receive_bytes.map_or(0, |size| size.0 as u32),
            traffic_class: spec.priority.unwrap_or(0) << 5 | ecn,
            max_send_wr: spec.max_send_wr.unwrap_or(128),
            cqe: spec.cqe.unwrap_or(0),
            area_bytes: 4096,
        });
        for (side, name) in names.into_iter().enumerate() {
            self.qp_by_name.insert(name.clone(), qps[side]);
            self.qps.push(QpPlan { name, host: hosts[side], peer: qps[1 - side], pair });
        }
        Ok(qps)
    }

    pub(super) fn check_connection(&self, spec: &ConnectionSpec, path: &str) -> Result<()> {
        match spec.transport {
            Some(QpType::XrcInitiator | QpType::XrcTarget) if !self.has_external_programs => {
                let message = "XRC does not connect two equal queue pairs: an initiator sends, a target has no queues, and \
                               each request names the shared receive queue of its receive";
                let help = "use \"rc\" here, and test XRC with the Rust API or a C program";
                return Err(self.error_in(path, "transport", message).help(help));
            }
            Some(QpType::Gsi) => {
                let message = "the connection manager owns the GSI queue pair";
                return Err(self.error_in(path, "transport", message));
            }
            _ => {}
        }
        if let Some(mtu) = spec.mtu
            && Mtu::from_bytes(mtu).is_none()
        {
            return Err(self
                .error_in(path, "mtu", format!("{mtu} is not a path MTU"))
                .help("use 256, 512, 1024, 2048 or 4096"));
        }
        let limits = [
            ("timeout", spec.timeout, 31),
            ("retry-count", spec.retry_count, 7),
            ("rnr-retry", spec.rnr_retry, 7),
            ("min-rnr-timer", spec.min_rnr_timer, 31),
            ("max-rd-atomic", spec.max_rd_atomic, DeviceLimits::HCA.max_qp_rd_atom),
            ("priority", spec.priority, 7),
        ]
        .map(|(name, value, limit)| (name, value.map(u64::from), u64::from(limit)));
        let sizes = [
            ("posted-receives", spec.posted_receives.map(u64::from), u64::from(DeviceLimits::HCA.max_qp_wr)),
            ("max-send-wr", spec.max_send_wr.map(u64::from), u64::from(DeviceLimits::HCA.max_qp_wr)),
            ("cqe", spec.cqe.map(u64::from), u64::from(DeviceLimits::HCA.max_cqe)),
            ("receive-bytes", spec.receive_bytes.map(|size| size.0), u64::from(u32::MAX)),
        ];
        for (name, value, limit) in limits.into_iter().chain(sizes) {
            if let Some(value) = value.filter(|value| *value > limit) {
                return Err(self.error_in(path, name, format!("{name} is {value}, the maximum is {limit}")));
            }
        }
        for (side, psn) in spec.sq_psn.into_iter().flatten().enumerate() {
            if psn >= 1 << 24 {
                let path = format!("{path}.sq-psn.{side}");
                return Err(self.error_at(&path, format!("{psn:#x} exceeds the 24 bits of a PSN")));
            }
        }
        Ok(())
    }

    /// Sizes the memory of each pair for its messages, and posts receives where SENDs arrive.
    fn size_areas(&mut self) {
        let area = |pair: &mut PairPlan, needed: u64| {
            pair.area_bytes = pair.area_bytes.max(needed.next_multiple_of(4096))
        };
        for step in &self.steps {
            let pair = &mut self.pairs[self.qps[step.qp].pair];
            match &step.action {
                StepAction::Post(work) => {
                    area(pair, work.offset + u64::from(work.bytes));
                    if work.remote_target == RemoteTarget::Valid {
                        area(pair, work.remote_offset + u64::from(work.bytes));
                    }
                }
                StepAction::Receive { bytes, offset } => area(pair, offset + u64::from(*bytes)),
                _ => {}
            }
        }
        for flow in &self.flows {
            let pair = &mut self.pairs[self.qps[flow.qp].pair];
            area(pair, u64::from(flow.bytes));
            match flow.kind {
                FlowKind::KeyValue { keys, .. } => area(pair, keys * u64::from(flow.bytes)),
                FlowKind::Uniform(WorkOperation::Send { .. }) | FlowKind::PingPong
                    if pair.posted_receives == 0 =>
                {
                    pair.posted_receives = (flow.depth * 2).clamp(16, DeviceLimits::HCA.max_qp_wr);
                }
                _ => {}
            }
        }
        for pair in &mut self.pairs {
            let header = if pair.kind.is_datagram() { 40 } else { 0 };
            if pair.receive_bytes == 0 && pair.posted_receives > 0 {
                pair.receive_bytes = pair.area_bytes.min(u64::from(u32::MAX) - header) as u32 + header as u32;
            }
            pair.area_bytes = pair.area_bytes.max((u64::from(pair.receive_bytes)).next_multiple_of(4096));
            if pair.cqe == 0 {
                pair.cqe = (pair.max_send_wr + pair.posted_receives).max(1024).next_power_of_two();
            }
        }
    }
}

const ALL_ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);
