//! From a file to a plan: queue pairs, steps, workloads, faults and expectations.

use super::network::Network;
use super::reach::Reach;
use super::{
    CommandPlan, Deed, FlowKind, FlowPlan, Job, PairPlan, Plan, QpPlan, StepPlan, Work, check, rules,
};
use crate::language::{
    AccessRight, AtomicSpec, ConnectionSpec, File, Flavour, OperationName, Placement, StateName, Step,
    TransferSpec, TransportName,
};
use crate::parameters::Values;
use crate::source::{Problem, Source, join};
use softhca_engine::{Limits, QpKind, State};
use softhca_fabric::Seed;
use softhca_queue::Access;
use softhca_wire::{Ecn, Mtu, Psn, RnrTimer};
use std::collections::{BTreeMap, BTreeSet};

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
    by_name: BTreeMap<String, usize>,
    seed: u64,
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
    let (expectations, counts) = check::expectations(&mut builder, &faults)?;
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

    fn add_pair(
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

    fn add_steps(&mut self) -> Result<(), Problem> {
        let mut names: BTreeMap<String, usize> = BTreeMap::new();
        for (index, step) in self.file.step.iter().enumerate() {
            let path = format!("step.{index}");
            let qp = self.qp(&step.qp, &join(&path, "qp"))?;
            if self.is_open {
                let problem = self.problem(&path, "a step needs a queue pair, and the file connects none");
                return Err(problem.help("add [[pair]] qps = [\"alice.1\", \"bob.1\"]"));
            }
            let deed = self.deed(step, qp, &path)?;
            self.check_connecting(step, &deed, qp, &path)?;
            let after = match &step.after {
                None => None,
                Some(name) => Some(*names.get(name).ok_or_else(|| {
                    let message = format!("there is no earlier step {name:?}");
                    self.problem(&join(&path, "after"), message)
                        .suggest(name, names.keys().map(String::as_str))
                })?),
            };
            if let Some(after) = after
                && !self.steps[after].deed.is_awaited()
            {
                return Err(self
                    .problem(&join(&path, "after"), "that step has no completion to wait for")
                    .help("name a signalled send, write, read, atomic, a receive, or a listen, connect, accept or disconnect"));
            }
            if after.is_none() && self.file.ends.is_some_and(|ends| step.at >= ends) {
                return Err(self.problem(&join(&path, "at"), "the step comes after the end of the run"));
            }
            if let Some(name) = &step.name
                && names.insert(name.clone(), index).is_some()
            {
                return Err(self.problem(&join(&path, "name"), format!("two steps are called {name:?}")));
            }
            let (name, at_ns, repeat) = (step.name.clone(), step.at.0, step.repeat);
            if repeat == 0 || repeat > 100_000 {
                return Err(self.problem(&join(&path, "repeat"), "a step is done 1 to 100000 times"));
            }
            self.steps.push(StepPlan { name, at_ns, after, qp, repeat, deed });
        }
        Ok(())
    }

    fn deed(&self, step: &Step, qp: usize, path: &str) -> Result<Deed, Problem> {
        let transfer = |spec: &TransferSpec, key: &str, job: Job| -> Result<Deed, Problem> {
            self.check_transfer(spec, qp, job, &join(path, key))?;
            Ok(Deed::Post(Work {
                job,
                bytes: spec.bytes.0 as u32,
                offset: spec.offset,
                remote_offset: spec.remote_offset,
                remote: spec.remote,
                signaled: spec.signaled,
                fence: spec.fence,
                solicited: spec.solicited,
                inline: spec.inline,
                group: spec.group,
            }))
        };
        let atomic = |spec: &AtomicSpec, key: &str, job: Job| -> Result<Deed, Problem> {
            self.check_service(qp, job, &join(path, key))?;
            Ok(Deed::Post(Work {
                job,
                bytes: 8,
                offset: spec.offset,
                remote_offset: spec.remote_offset,
                remote: spec.remote,
                signaled: true,
                fence: false,
                solicited: false,
                inline: false,
                group: None,
            }))
        };
        let mut deeds = Vec::new();
        if let Some(spec) = &step.send {
            deeds.push(transfer(spec, "send", Job::Send { immediate: spec.immediate })?);
        }
        if let Some(spec) = &step.write {
            deeds.push(transfer(spec, "write", Job::Write { immediate: spec.immediate })?);
        }
        if let Some(spec) = &step.read {
            deeds.push(transfer(spec, "read", Job::Read)?);
        }
        if let Some(spec) = &step.compare_swap {
            deeds.push(atomic(
                spec,
                "compare-swap",
                Job::CompareSwap { compare: spec.compare, swap: spec.swap },
            )?);
        }
        if let Some(spec) = &step.fetch_add {
            deeds.push(atomic(spec, "fetch-add", Job::FetchAdd { add: spec.add })?);
        }
        if let Some(spec) = &step.receive {
            if spec.bytes.0 > u64::from(u32::MAX) {
                return Err(self.problem(&join(path, "receive"), "a receive takes less than 4 GiB"));
            }
            deeds.push(Deed::Receive { bytes: spec.bytes.0 as u32, offset: spec.offset });
        }
        if let Some(spec) = &step.modify {
            deeds.push(Deed::Modify { state: state_of(spec.state), notify_drained: spec.notify_drained });
        }
        deeds.extend(self.connecting(step, qp, path)?);
        deeds.extend(self.grouping(step, qp, path)?);
        if step.destroy {
            deeds.push(Deed::Destroy);
        }
        if step.unmap {
            deeds.push(Deed::Unmap);
        }
        if step.deregister {
            deeds.push(Deed::Deregister);
        }
        if let Some(rights) = &step.reregister {
            deeds.push(Deed::Reregister(rights_of(rights)));
        }
        match (deeds.pop(), deeds.is_empty()) {
            (Some(deed), true) => Ok(deed),
            (None, _) => Err(self.problem(path, "the step does nothing").help(DEEDS)),
            (Some(_), false) => {
                Err(self.problem(path, "the step does two things").help("make two steps of it"))
            }
        }
    }

    fn check_transfer(&self, spec: &TransferSpec, qp: usize, job: Job, path: &str) -> Result<(), Problem> {
        self.check_service(qp, job, path)?;
        let plan = &self.qps[qp];
        if let Some(group) = spec.group {
            self.check_sent_to(group, spec, qp, path)?;
        }
        if let Some(to) = &spec.to {
            let peer = &self.qps[plan.peer].name;
            if to != peer {
                let message = format!("{} is connected to {peer}, not to {to:?}", plan.name);
                return Err(self.problem(&join(path, "to"), message).suggest(to, [peer.as_str()]));
            }
        }
        let pair = &self.pairs[plan.pair];
        let most =
            if pair.kind.is_datagram() { pair.mtu.bytes().into() } else { u64::from(Limits::CARD.message) };
        if spec.bytes.0 > most {
            let message = format!("{} bytes, at most {most} can be sent", spec.bytes.0);
            return Err(self.problem(&join(path, "bytes"), message));
        }
        if spec.inline && spec.bytes.0 > 64 {
            return Err(self.problem(&join(path, "inline"), "at most 64 bytes travel inline"));
        }
        if spec.immediate.is_some() && job == Job::Read {
            return Err(self.problem(&join(path, "immediate"), "a READ has no immediate data"));
        }
        Ok(())
    }

    fn check_service(&self, qp: usize, job: Job, path: &str) -> Result<(), Problem> {
        let kind = self.pairs[self.qps[qp].pair].kind;
        let fits = match job {
            Job::Send { .. } => true,
            Job::Write { .. } => !kind.is_datagram(),
            Job::Read | Job::CompareSwap { .. } | Job::FetchAdd { .. } => kind == QpKind::Rc,
        };
        match fits {
            true => Ok(()),
            false => Err(self.problem(path, format!("{} has no such operation", kind.service().name()))),
        }
    }

    fn add_workloads(&mut self) -> Result<(), Problem> {
        let mut names = BTreeSet::new();
        for (index, workload) in self.file.workload.iter().enumerate() {
            let path = format!("workload.{index}");
            let name = workload.name.clone().unwrap_or_else(|| format!("workload {}", index + 1));
            if !names.insert(name.clone()) {
                return Err(self.problem(&join(&path, "name"), format!("two workloads are called {name:?}")));
            }
            self.workloads.push(name);
            match workload.flavours()[..] {
                [ref flavour] => self.add_workload(index, flavour, &path)?,
                [] => return Err(self.problem(&path, "the workload does nothing").help(WORKLOADS)),
                _ => {
                    return Err(self
                        .problem(&path, "a workload has one shape")
                        .help("make two workloads of it"));
                }
            }
        }
        Ok(())
    }

    fn add_workload(&mut self, workload: usize, flavour: &Flavour<'_>, path: &str) -> Result<(), Problem> {
        match flavour {
            Flavour::Stream(stream) => {
                let path = join(path, "stream");
                let qp = self.connected(&stream.qp, &join(&path, "qp"))?;
                let flow = FlowPlan {
                    workload,
                    qp,
                    kind: FlowKind::Same(job_of(stream.op)),
                    bytes: stream.bytes.0 as u32,
                    count: stream.count,
                    depth: stream.depth,
                    at_ns: stream.at.0,
                    until_ns: stream.until.map(|time| time.0),
                    every_ns: stream.every.0,
                };
                self.add_flow(flow, stream.bytes.0, &path)
            }
            Flavour::Incast(incast) => {
                let path = join(path, "incast");
                let to = self.network.host(&incast.to, self.source, &join(&path, "to"))?;
                let mut senders = Vec::new();
                for (index, name) in incast.from.iter().enumerate() {
                    senders.extend(self.network.hosts_of(
                        name,
                        self.source,
                        &format!("{path}.from.{index}"),
                    )?);
                }
                if let Some(priority) = incast.priority.filter(|priority| *priority > 7) {
                    return Err(
                        self.problem(&join(&path, "priority"), format!("{priority}: priorities are 0 to 7"))
                    );
                }
                let own = ConnectionSpec { priority: incast.priority, ..ConnectionSpec::default() };
                for (index, host) in senders.into_iter().enumerate() {
                    let [qp, _] = self.own_pair([host, to], &own, &path)?;
                    let flow = FlowPlan {
                        workload,
                        qp,
                        kind: FlowKind::Same(job_of(incast.op)),
                        bytes: incast.bytes.0 as u32,
                        count: incast.count,
                        depth: incast.depth,
                        at_ns: incast.at.0 + incast.stagger.0 * index as u64,
                        until_ns: incast.until.map(|time| time.0),
                        every_ns: 0,
                    };
                    self.add_flow(flow, incast.bytes.0, &path)?;
                }
                Ok(())
            }
            Flavour::Permutation(permutation) => {
                let path = join(path, "permutation");
                let mut hosts = Vec::new();
                for (index, name) in permutation.hosts.iter().enumerate() {
                    hosts.extend(self.network.hosts_of(
                        name,
                        self.source,
                        &format!("{path}.hosts.{index}"),
                    )?);
                }
                let count = hosts.len();
                if count < 2 {
                    return Err(self.problem(&join(&path, "hosts"), "a permutation needs two hosts at least"));
                }
                let shift = match permutation.shift {
                    Some(shift) => shift as usize % count,
                    None => {
                        1 + Seed(self.seed).below(count as u64 - 1, &[0x7065_726d, workload as u64]) as usize
                    }
                };
                if shift == 0 {
                    return Err(self.problem(&join(&path, "shift"), "every host would send to itself"));
                }
                let own = ConnectionSpec { priority: permutation.priority, ..ConnectionSpec::default() };
                for (index, host) in hosts.iter().enumerate() {
                    let [qp, _] = self.own_pair([*host, hosts[(index + shift) % count]], &own, &path)?;
                    let flow = FlowPlan {
                        workload,
                        qp,
                        kind: FlowKind::Same(job_of(permutation.op)),
                        bytes: permutation.bytes.0 as u32,
                        count: permutation.count,
                        depth: permutation.depth,
                        at_ns: permutation.at.0,
                        until_ns: permutation.until.map(|time| time.0),
                        every_ns: 0,
                    };
                    self.add_flow(flow, permutation.bytes.0, &path)?;
                }
                Ok(())
            }
            Flavour::PingPong(ping_pong) => {
                let path = join(path, "ping-pong");
                let qp = self.connected(&ping_pong.between[0], &format!("{path}.between.0"))?;
                let peer = self.connected(&ping_pong.between[1], &format!("{path}.between.1"))?;
                if self.qps[qp].peer != peer {
                    return Err(
                        self.problem(&join(&path, "between"), "these two are not connected to each other")
                    );
                }
                let flow = FlowPlan {
                    workload,
                    qp,
                    kind: FlowKind::PingPong,
                    bytes: ping_pong.bytes.0 as u32,
                    count: Some(ping_pong.rounds),
                    depth: 1,
                    at_ns: ping_pong.at.0,
                    until_ns: None,
                    every_ns: 0,
                };
                self.add_flow(flow, ping_pong.bytes.0, &path)
            }
            Flavour::KeyValue(key_value) => {
                let path = join(path, "key-value");
                let qp = self.connected(&key_value.client, &join(&path, "client"))?;
                if key_value.keys == 0 || key_value.keys.saturating_mul(key_value.bytes.0) > 1 << 30 {
                    return Err(self.problem(
                        &join(&path, "keys"),
                        "there is at least one record, and at most 1 GiB of them",
                    ));
                }
                let kind = FlowKind::KeyValue { keys: key_value.keys, reads: key_value.reads.0 };
                let flow = FlowPlan {
                    workload,
                    qp,
                    kind,
                    bytes: key_value.bytes.0 as u32,
                    count: Some(key_value.operations),
                    depth: key_value.depth,
                    at_ns: key_value.at.0,
                    until_ns: None,
                    every_ns: 0,
                };
                self.add_flow(flow, key_value.bytes.0, &path)
            }
            Flavour::Command(command) => {
                let path = join(path, "command");
                let host = self.network.host(&command.host, self.source, &join(&path, "host"))?;
                if !self.is_open {
                    let problem = self.problem(&path, "the file connects queue pairs of its own");
                    return Err(problem.help("a file that starts programs leaves queue pairs to them"));
                }
                if command.run.is_empty() {
                    return Err(self.problem(&join(&path, "run"), "which program?"));
                }
                if self.file.ends.is_some_and(|ends| command.at >= ends) {
                    return Err(self.problem(&join(&path, "at"), "it begins after the end of the run"));
                }
                self.check_addresses(&command.run, &join(&path, "run"))?;
                let (words, at_ns, exit) = (command.run.clone(), command.at.0, command.exit);
                self.commands.push(CommandPlan { workload, host, words, at_ns, exit });
                Ok(())
            }
        }
    }

    /// `${ADDRESS_name}` stands for the address of a host that there is.
    fn check_addresses(&self, words: &[String], path: &str) -> Result<(), Problem> {
        for (index, word) in words.iter().enumerate() {
            for rest in word.split("${ADDRESS_").skip(1) {
                let path = format!("{path}.{index}");
                let name = rest.split_once('}').map_or(rest, |(name, _)| name);
                self.network.host(name, self.source, &path)?;
            }
        }
        Ok(())
    }

    /// A queue pair that the file connects.
    fn connected(&mut self, name: &str, path: &str) -> Result<usize, Problem> {
        if self.is_open {
            let problem = self.problem(path, format!("the file connects no queue pair {name:?}"));
            return Err(problem.help("add [[pair]] qps = [\"alice.1\", \"bob.1\"]"));
        }
        self.qp(name, path)
    }

    /// A connection of a workload's own, with the next free numbers.
    fn own_pair(
        &mut self,
        hosts: [usize; 2],
        own: &ConnectionSpec,
        path: &str,
    ) -> Result<[usize; 2], Problem> {
        let mut names = [String::new(), String::new()];
        for (side, host) in hosts.into_iter().enumerate() {
            let host = &self.network.hosts[host].name;
            let taken = |name: &String| self.by_name.contains_key(name) || names.contains(name);
            names[side] =
                (1..).map(|n| format!("{host}.{n}")).find(|name| !taken(name)).expect("numbers do not end");
        }
        self.add_pair(names, hosts, own, path)
    }

    fn add_flow(&mut self, flow: FlowPlan, bytes: u64, path: &str) -> Result<(), Problem> {
        let pair = &self.pairs[self.qps[flow.qp].pair];
        if pair.by_cm {
            let message = format!("{} is not connected when the run begins", self.qps[flow.qp].name);
            return Err(self.problem(path, message).help("give it steps `after` its connect or accept"));
        }
        let most =
            if pair.kind.is_datagram() { pair.mtu.bytes().into() } else { u64::from(Limits::CARD.message) };
        if bytes > most {
            return Err(
                self.problem(&join(path, "bytes"), format!("{bytes} bytes, at most {most} can be sent"))
            );
        }
        if let FlowKind::Same(job) = flow.kind {
            self.check_service(flow.qp, job, path)?;
        }
        if flow.depth == 0 || flow.depth > pair.sends {
            let message = format!(
                "depth is {}, at least 1 and at most {} (`sends`) is possible",
                flow.depth, pair.sends
            );
            return Err(self.problem(&join(path, "depth"), message));
        }
        let endless = flow.count.is_none() && flow.until_ns.is_none();
        if endless && self.file.ends.is_none() {
            return Err(self
                .problem(path, "this goes on for ever")
                .help("say `count` or `until` here, or `ends` for the whole run"));
        }
        if self.file.ends.is_some_and(|ends| flow.at_ns >= ends.0) {
            return Err(self.problem(path, "it begins after the end of the run"));
        }
        self.flows.push(flow);
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

const DEEDS: &str = "give one of send, write, read, compare-swap, fetch-add, receive, listen, connect, accept, reject, disconnect, join, leave, modify, destroy, unmap, deregister, reregister";
const WORKLOADS: &str = "give one of stream, incast, permutation, ping-pong, key-value, command";

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

fn job_of(operation: OperationName) -> Job {
    match operation {
        OperationName::Send => Job::Send { immediate: None },
        OperationName::Write => Job::Write { immediate: None },
        OperationName::Read => Job::Read,
        OperationName::FetchAdd => Job::FetchAdd { add: 1 },
    }
}

fn rights_of(rights: &[AccessRight]) -> Access {
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
