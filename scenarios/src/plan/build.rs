//! From a file to a plan, and first of all its queue pairs: their names, how they are connected, their memory.

use super::network::Network;
use super::reach::Reach;
use super::{
    CommandPlan, Deed, FlowKind, FlowPlan, Job, PairPlan, Plan, QpPlan, StepPlan, expectations, rules,
};
use crate::language::{AccessRight, ConnectionSpec, File, Placement, StateName, TransportName};
use crate::parameters::Values;
use crate::source::{Problem, Source, join};
use softhca_engine::{Limits, QpKind, State};
use softhca_fabric::Seed;
use softhca_queue::Access;
use softhca_wire::{Ecn, Mtu, Psn, RnrTimer};
use std::collections::BTreeMap;

/// Everything that is known while a plan is made.
pub(super) struct Builder<'a> {
    pub file: &'a File,
    pub source: &'a Source,
    pub network: Network,
    pub qps: Vec<QpPlan>,
    pub pairs: Vec<PairPlan>,
    pub steps: Vec<StepPlan>,
    pub flows: Vec<FlowPlan>,
    pub commands: Vec<CommandPlan>,
    pub workloads: Vec<String>,
    pub reach: Reach,
    /// The file leaves queue pairs to real programs: their names are roles in the order of connection.
    pub is_open: bool,
    pub by_name: BTreeMap<String, usize>,
    pub seed: u64,
}

/// Makes a plan of a file for one seed.
pub(crate) fn build(file: &File, source: &Source, values: Values, seed: u64) -> Result<Plan, Problem> {
    let network = Network::new(file, source)?;
    let makes_pairs =
        file.workload.iter().any(|workload| workload.incast.is_some() || workload.permutation.is_some());
    let mut builder = Builder {
        file,
        source,
        network,
        qps: Vec::new(),
        pairs: Vec::new(),
        steps: Vec::new(),
        flows: Vec::new(),
        commands: Vec::new(),
        workloads: Vec::new(),
        reach: Reach::default(),
        is_open: file.pair.is_empty() && !makes_pairs,
        by_name: BTreeMap::new(),
        seed,
    };
    builder.check_connection(&file.connection, "connection")?;
    builder.add_pairs()?;
    builder.add_steps()?;
    builder.add_workloads()?;
    builder.size_areas();
    builder.agree_on_mtu()?;
    builder.reach = Reach::new(&builder.qps, &builder.pairs, &builder.steps, &builder.flows, builder.is_open);
    let faults = rules::faults(&mut builder)?;
    let (expectations, counts) = expectations::expectations(&mut builder, &faults)?;
    let Builder { network, qps, pairs, steps, flows, commands, workloads, .. } = builder;
    Ok(Plan {
        title: file.title.clone(),
        seed,
        values,
        ends_ns: file.ends.map(|time| time.0),
        hosts: network.hosts,
        switches: network.switches,
        cables: network.cables,
        routes: network.routes,
        qps,
        pairs,
        transport: kind_of(file.connection.transport),
        steps,
        flows,
        commands,
        workloads,
        faults,
        counts,
        expectations,
        invariants: file.invariants.clone(),
    })
}

impl Builder<'_> {
    pub fn problem(&self, path: &str, message: impl Into<String>) -> Problem {
        self.source.problem(path, message)
    }

    /// The queue pair of this name.
    pub fn qp(&mut self, name: &str, path: &str) -> Result<usize, Problem> {
        if let Some(qp) = self.by_name.get(name) {
            return Ok(*qp);
        }
        if self.is_open {
            return self.open_qp(name, path);
        }
        let names: Vec<&str> = self.by_name.keys().map(String::as_str).collect();
        let shown = if names.len() > 24 { &names[..24] } else { &names[..] };
        Err(self
            .problem(path, format!("there is no queue pair {name:?}"))
            .suggest(name, shown.iter().copied()))
    }

    /// A queue pair of a real program, known by the order in which programs connect them.
    fn open_qp(&mut self, name: &str, path: &str) -> Result<usize, Problem> {
        let (host, _) = self.split(name, path)?;
        let qp = self.qps.len();
        self.qps.push(QpPlan { name: name.into(), host, peer: qp, pair: 0 });
        self.by_name.insert(name.into(), qp);
        Ok(qp)
    }

    /// Host and number of a queue pair's name.
    fn split(&self, name: &str, path: &str) -> Result<(usize, u32), Problem> {
        let parts =
            name.rsplit_once('.').and_then(|(host, number)| Some((host, number.parse::<u32>().ok()?)));
        let Some((host, number @ 1..)) = parts else {
            let problem = self.problem(path, format!("{name:?} is no name of a queue pair"));
            return Err(problem.help("write the host, a dot and a number from 1: \"alice.1\""));
        };
        Ok((self.network.host(host, self.source, path)?, number))
    }

    fn add_pairs(&mut self) -> Result<(), Problem> {
        for (index, pair) in self.file.pair.iter().enumerate() {
            let path = format!("pair.{index}");
            let own = pair.connection();
            self.check_connection(&own, &path)?;
            let mut hosts = [0; 2];
            for (side, name) in pair.qps.iter().enumerate() {
                let path = format!("{path}.qps.{side}");
                hosts[side] = self.split(name, &path)?.0;
                if self.by_name.contains_key(name) || side == 1 && pair.qps[0] == *name {
                    return Err(self.problem(&path, format!("{name} is in a pair already")));
                }
            }
            self.add_pair([pair.qps[0].clone(), pair.qps[1].clone()], hosts, &own, &join(&path, "qps"))?;
        }
        Ok(())
    }

    pub(super) fn add_pair(
        &mut self,
        names: [String; 2],
        hosts: [usize; 2],
        own: &ConnectionSpec,
        path: &str,
    ) -> Result<[usize; 2], Problem> {
        if !self.network.connects(hosts[0], hosts[1]) {
            let names = hosts.map(|host| self.network.hosts[host].name.clone());
            let problem = self.problem(path, format!("no cable leads from {} to {}", names[0], names[1]));
            let help = format!("add [[link]] between = [\"{}\", \"{}\"]", names[0], names[1]);
            return Err(problem.help(help));
        }
        let pair = self.pairs.len();
        let qps = [self.qps.len(), self.qps.len() + 1];
        let both = &self.file.connection;
        let psns = own.first_psn.or(both.first_psn).unwrap_or_else(|| {
            [0, 1].map(|side| Seed(self.seed).draw(&[0x0070_736e, pair as u64, side]) as u32 & 0xff_ffff)
        });
        let kind = match own.transport.or(both.transport) {
            None | Some(TransportName::Rc) => QpKind::Rc,
            Some(TransportName::Uc) => QpKind::Uc,
            Some(TransportName::Ud) => QpKind::Ud,
            Some(TransportName::Xrc) => {
                let place = own.transport.and_then(|_| path.strip_suffix("qps"));
                let place = place.map_or("connection.transport".into(), |pair| format!("{pair}transport"));
                let why = "XRC does not join two equal queue pairs: an initiator sends, a target has no queues of \
                           its own, and receives come from the shared receive queue that each request names";
                let help = "use \"rc\" here; tests of XRC are written with the Rust API or as a C program";
                return Err(self.problem(&place, why).help(help));
            }
        };
        let access = own.access.as_ref().or(both.access.as_ref());
        let priority = own.priority.or(both.priority).unwrap_or(0);
        let ecn = own.ecn.or(both.ecn).unwrap_or(false);
        self.pairs.push(PairPlan {
            qps,
            kind,
            by_cm: self.uses_connection_manager(&names),
            mtu: own.mtu.or(both.mtu).and_then(Mtu::from_bytes).unwrap_or(Mtu::B1024),
            timeout: own.timeout.or(both.timeout).unwrap_or(14),
            retry_count: own.retry_count.or(both.retry_count).unwrap_or(7),
            rnr_retry: own.rnr_retry.or(both.rnr_retry).unwrap_or(7),
            min_rnr_timer: RnrTimer::new(own.min_rnr_timer.or(both.min_rnr_timer).unwrap_or(12)),
            reads: own.reads.or(both.reads).unwrap_or(16),
            psns: psns.map(Psn::new),
            access: access.map_or(ALL, |rights| rights_of(rights)),
            receives: own.receives.or(both.receives).unwrap_or(0),
            receive_bytes: own.receive_bytes.or(both.receive_bytes).map_or(0, |size| size.0 as u32),
            traffic_class: priority << 5 | if ecn { Ecn::Capable0 as u8 } else { 0 },
            sends: own.sends.or(both.sends).unwrap_or(128),
            completions: own.completions.or(both.completions).unwrap_or(0),
            area: 4096,
        });
        for (side, name) in names.into_iter().enumerate() {
            self.by_name.insert(name.clone(), qps[side]);
            self.qps.push(QpPlan { name, host: hosts[side], peer: qps[1 - side], pair });
        }
        Ok(qps)
    }

    fn check_connection(&self, spec: &ConnectionSpec, path: &str) -> Result<(), Problem> {
        if let Some(mtu) = spec.mtu
            && Mtu::from_bytes(mtu).is_none()
        {
            return Err(self
                .problem(&join(path, "mtu"), format!("{mtu} is no path MTU"))
                .help("256, 512, 1024, 2048 or 4096"));
        }
        let limits = [
            ("timeout", spec.timeout, 31),
            ("retry-count", spec.retry_count, 7),
            ("rnr-retry", spec.rnr_retry, 7),
            ("min-rnr-timer", spec.min_rnr_timer, 31),
            ("reads", spec.reads, Limits::CARD.reads),
            ("priority", spec.priority, 7),
        ];
        for (name, value, limit) in limits {
            if let Some(value) = value.filter(|value| *value > limit) {
                return Err(self
                    .problem(&join(path, name), format!("{name} is {value}, at most {limit} is possible")));
            }
        }
        for (side, psn) in spec.first_psn.into_iter().flatten().enumerate() {
            if psn >= 1 << 24 {
                let path = format!("{path}.first-psn.{side}");
                return Err(self.problem(&path, format!("{psn:#x} has more than the 24 bits of a PSN")));
            }
        }
        Ok(())
    }

    /// Makes the memory of each pair large enough for its messages, and posts receives where sends come.
    fn size_areas(&mut self) {
        let area =
            |pair: &mut PairPlan, needed: u64| pair.area = pair.area.max(needed.next_multiple_of(4096));
        for step in &self.steps {
            let pair = &mut self.pairs[self.qps[step.qp].pair];
            match &step.deed {
                Deed::Post(work) => {
                    area(pair, work.offset + u64::from(work.bytes));
                    if work.remote == Placement::Region {
                        area(pair, work.remote_offset + u64::from(work.bytes));
                    }
                }
                Deed::Receive { bytes, offset } => area(pair, offset + u64::from(*bytes)),
                _ => {}
            }
        }
        for flow in &self.flows {
            let pair = &mut self.pairs[self.qps[flow.qp].pair];
            area(pair, u64::from(flow.bytes));
            match flow.kind {
                FlowKind::KeyValue { keys, .. } => area(pair, keys * u64::from(flow.bytes)),
                FlowKind::Same(Job::Send { .. }) | FlowKind::PingPong if pair.receives == 0 => {
                    pair.receives = (flow.depth * 2).max(16);
                }
                _ => {}
            }
        }
        for pair in &mut self.pairs {
            let header = if pair.kind.is_datagram() { 40 } else { 0 };
            if pair.receive_bytes == 0 && pair.receives > 0 {
                pair.receive_bytes = pair.area.min(u64::from(u32::MAX) - header) as u32 + header as u32;
            }
            pair.area = pair.area.max((u64::from(pair.receive_bytes)).next_multiple_of(4096));
            if pair.completions == 0 {
                pair.completions = (pair.sends + pair.receives).max(1024).next_power_of_two();
            }
        }
    }
}

const ALL: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

/// What the queue pairs of real programs are; of XRC, those that send.
const fn kind_of(transport: Option<TransportName>) -> QpKind {
    match transport {
        None | Some(TransportName::Rc) => QpKind::Rc,
        Some(TransportName::Uc) => QpKind::Uc,
        Some(TransportName::Ud) => QpKind::Ud,
        Some(TransportName::Xrc) => QpKind::XrcInitiator,
    }
}

pub(super) fn rights_of(rights: &[AccessRight]) -> Access {
    rights.iter().fold(Access::empty(), |all, right| {
        all | match right {
            AccessRight::LocalWrite => Access::LOCAL_WRITE,
            AccessRight::RemoteWrite => Access::REMOTE_WRITE,
            AccessRight::RemoteRead => Access::REMOTE_READ,
            AccessRight::RemoteAtomic => Access::REMOTE_ATOMIC,
        }
    })
}

pub(super) const fn state_of(name: StateName) -> State {
    match name {
        StateName::Reset => State::Reset,
        StateName::Init => State::Init,
        StateName::Rtr => State::ReadyToReceive,
        StateName::Rts => State::ReadyToSend,
        StateName::Sqd => State::SendQueueDrained,
        StateName::Sqe => State::SendQueueError,
        StateName::Error => State::Error,
    }
}
