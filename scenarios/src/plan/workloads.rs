//! Converts workloads to flows and programs, and creates their queue pairs.

use super::builder::PlanBuilder;
use super::{CommandPlan, FlowKind, FlowPlan, ReadyPlan, WorkOperation, limits};
use crate::quantity::Time;
use crate::source::{Result, join_path};
use crate::spec::{
    CommandSpec, ConnectionSpec, IncastSpec, KeyValueSpec, OperationName, PermutationSpec, PingPongSpec,
    StreamSpec, WorkloadSpec,
};
use softhca_engine::DeviceLimits;
use softhca_fabric::Seed;
use std::collections::BTreeSet;

const WORKLOAD_KINDS: &str = "give one of stream, incast, permutation, ping-pong, key-value, command";

impl PlanBuilder<'_> {
    /// Adds the workloads in the order of the file.
    pub(super) fn add_workloads(&mut self) -> Result<()> {
        let mut names = BTreeSet::new();
        for (index, workload) in self.file.workload.iter().enumerate() {
            let path = format!("workload.{index}");
            let name = workload.name.clone().unwrap_or_else(|| format!("workload {}", index + 1));
            if !names.insert(name.clone()) {
                return Err(self.error_in(&path, "name", format!("another workload has the name {name:?}")));
            }
            self.workloads.push(name);
            match self.add_patterns(index, workload, &path)? {
                1 => {}
                0 => return Err(self.error_at(&path, "the workload has no pattern").help(WORKLOAD_KINDS)),
                _ => {
                    return Err(self
                        .error_at(&path, "a workload has one pattern")
                        .help("split it into two workloads"));
                }
            }
        }
        Ok(())
    }

    /// Adds the patterns of a workload; returns their number.
    fn add_patterns(&mut self, index: usize, workload: &WorkloadSpec, path: &str) -> Result<usize> {
        let WorkloadSpec { name: _, stream, incast, permutation, ping_pong, key_value, command } = workload;
        let mut patterns = 0;
        let mut add = |pattern: Option<Result<()>>| {
            patterns += usize::from(pattern.is_some());
            pattern.unwrap_or(Ok(()))
        };
        add(stream.as_ref().map(|spec| self.add_stream(index, spec, &join_path(path, "stream"))))?;
        add(incast.as_ref().map(|spec| self.add_incast(index, spec, &join_path(path, "incast"))))?;
        add(permutation
            .as_ref()
            .map(|spec| self.add_permutation(index, spec, &join_path(path, "permutation"))))?;
        add(ping_pong.as_ref().map(|spec| self.add_ping_pong(index, spec, &join_path(path, "ping-pong"))))?;
        add(key_value.as_ref().map(|spec| self.add_key_value(index, spec, &join_path(path, "key-value"))))?;
        add(command.as_ref().map(|spec| self.add_command(index, spec, &join_path(path, "command"))))?;
        Ok(patterns)
    }

    fn add_stream(&mut self, workload: usize, stream: &StreamSpec, path: &str) -> Result<()> {
        let qp = self.connected_qp(&stream.qp, &join_path(path, "qp"))?;
        let kind = FlowKind::Uniform(work_operation(stream.op));
        let flow = FlowPlan {
            until_ns: stream.until.map(|time| time.0),
            interval_ns: stream.interval.0,
            ..FlowPlan::new(workload, qp, kind, stream.bytes, stream.count, stream.depth, stream.at)
        };
        self.add_flow(flow, stream.bytes.0, path)
    }

    fn add_incast(&mut self, workload: usize, incast: &IncastSpec, path: &str) -> Result<()> {
        let to = self.network.host(&incast.to, self.source, &join_path(path, "to"))?;
        let senders = self.resolve_hosts(&incast.from, &join_path(path, "from"))?;
        if senders.is_empty() {
            return Err(self.error_in(path, "from", "an incast needs at least one sender"));
        }
        let spec = self.workload_connection(incast.priority, path)?;
        for (index, host) in senders.into_iter().enumerate() {
            let [qp, _] = self.add_workload_pair([host, to], &spec, path)?;
            let kind = FlowKind::Uniform(work_operation(incast.op));
            let at = Time(incast.at.0 + incast.stagger.0 * index as u64);
            let flow = FlowPlan {
                until_ns: incast.until.map(|time| time.0),
                ..FlowPlan::new(workload, qp, kind, incast.bytes, incast.count, incast.depth, at)
            };
            self.add_flow(flow, incast.bytes.0, path)?;
        }
        Ok(())
    }

    fn add_permutation(&mut self, workload: usize, permutation: &PermutationSpec, path: &str) -> Result<()> {
        let hosts = self.resolve_hosts(&permutation.hosts, &join_path(path, "hosts"))?;
        let count = hosts.len();
        if count < 2 {
            return Err(self.error_in(path, "hosts", "a permutation needs at least two hosts"));
        }
        let shift = match permutation.shift {
            Some(shift) => shift as usize % count,
            None => 1 + Seed(self.seed).below(count as u64 - 1, &[0x7065_726d, workload as u64]) as usize,
        };
        if shift == 0 {
            return Err(self.error_in(path, "shift", "every host would send to itself"));
        }
        let spec = self.workload_connection(permutation.priority, path)?;
        for (index, host) in hosts.iter().enumerate() {
            let [qp, _] = self.add_workload_pair([*host, hosts[(index + shift) % count]], &spec, path)?;
            let kind = FlowKind::Uniform(work_operation(permutation.op));
            let PermutationSpec { bytes, count, depth, at, .. } = *permutation;
            let flow = FlowPlan {
                until_ns: permutation.until.map(|time| time.0),
                ..FlowPlan::new(workload, qp, kind, bytes, count, depth, at)
            };
            self.add_flow(flow, permutation.bytes.0, path)?;
        }
        Ok(())
    }

    fn add_ping_pong(&mut self, workload: usize, ping_pong: &PingPongSpec, path: &str) -> Result<()> {
        let qp = self.connected_qp(&ping_pong.between[0], &format!("{path}.between.0"))?;
        let peer = self.connected_qp(&ping_pong.between[1], &format!("{path}.between.1"))?;
        if self.qps[qp].peer != peer {
            return Err(self.error_in(path, "between", "these queue pairs are not peers"));
        }
        let PingPongSpec { bytes, rounds, at, .. } = *ping_pong;
        let flow = FlowPlan::new(workload, qp, FlowKind::PingPong, bytes, Some(rounds), 1, at);
        self.add_flow(flow, ping_pong.bytes.0, path)
    }

    fn add_key_value(&mut self, workload: usize, key_value: &KeyValueSpec, path: &str) -> Result<()> {
        let qp = self.connected_qp(&key_value.client, &join_path(path, "client"))?;
        if key_value.keys == 0 || key_value.keys.saturating_mul(key_value.bytes.0) > 1 << 30 {
            return Err(self.error_in(path, "keys", "the records need at least one key and at max 1 GiB"));
        }
        let kind = FlowKind::KeyValue { keys: key_value.keys, read_per_billion: key_value.read_fraction.0 };
        let KeyValueSpec { bytes, operations, depth, at, .. } = *key_value;
        let flow = FlowPlan::new(workload, qp, kind, bytes, Some(operations), depth, at);
        self.add_flow(flow, key_value.bytes.0, path)
    }

    fn add_command(&mut self, workload: usize, command: &CommandSpec, path: &str) -> Result<()> {
        let host = self.host(&command.host, path)?;
        if !self.has_external_programs {
            let problem = self.error_at(path, "a file with programs cannot connect queue pairs");
            return Err(problem.help("remove the pairs: the programs create the queue pairs"));
        }
        if command.argv.is_empty() {
            return Err(self.error_in(path, "argv", "missing program"));
        }
        if self.file.duration.is_some_and(|ends| command.at >= ends) {
            return Err(self.error_in(path, "at", "it starts after the end of the run"));
        }
        if command.ready.as_deref() == Some("") {
            return Err(self.error_in(path, "ready", "every output contains the empty text"));
        }
        if command.timeout == Some(Time(0)) {
            return Err(self.error_in(path, "timeout", "no program ends at once"));
        }
        self.check_addresses(&command.argv, &join_path(path, "argv"))?;
        let CommandSpec { argv, at, exit_code, ready, ready_tcp, ready_listen, timeout, .. } =
            command.clone();
        let ready = ReadyPlan { output: ready, tcp: ready_tcp, listen: ready_listen };
        let (at_ns, timeout_ns) = (at.0, timeout.map(|time| time.0));
        self.commands.push(CommandPlan { workload, host, argv, at_ns, exit_code, ready, timeout_ns });
        Ok(())
    }

    /// Resolves names and ranges of names to hosts.
    fn resolve_hosts(&self, names: &[String], path: &str) -> Result<Vec<usize>> {
        let mut hosts = Vec::new();
        for (index, name) in names.iter().enumerate() {
            hosts.extend(self.network.hosts_matching(name, self.source, &format!("{path}.{index}"))?);
        }
        Ok(hosts)
    }

    /// Checks that `${ADDRESS_name}` names a host.
    fn check_addresses(&self, argv: &[String], path: &str) -> Result<()> {
        for (index, word) in argv.iter().enumerate() {
            for rest in word.split("${ADDRESS_").skip(1) {
                let path = format!("{path}.{index}");
                let name = rest.split_once('}').map_or(rest, |(name, _)| name);
                self.network.host(name, self.source, &path)?;
            }
        }
        Ok(())
    }

    /// A queue pair that the file connects.
    fn connected_qp(&mut self, name: &str, path: &str) -> Result<usize> {
        if self.has_external_programs {
            let problem = self.error_at(path, format!("the file does not connect queue pair {name:?}"));
            return Err(problem.help("add [[pair]] qps = [\"alice.1\", \"bob.1\"]"));
        }
        self.qp(name, path)
    }

    /// The settings of the connections that a workload creates.
    fn workload_connection(&self, priority: Option<u8>, path: &str) -> Result<ConnectionSpec> {
        self.check_connection(&ConnectionSpec { priority, ..ConnectionSpec::default() }, path)?;
        let defaults = self.file.connection.clone();
        Ok(ConnectionSpec { priority: priority.or(defaults.priority), ..defaults })
    }

    /// Creates a pair for a workload, with the next free numbers.
    fn add_workload_pair(
        &mut self,
        hosts: [usize; 2],
        spec: &ConnectionSpec,
        path: &str,
    ) -> Result<[usize; 2]> {
        let mut names = [String::new(), String::new()];
        for (side, host) in hosts.into_iter().enumerate() {
            let host = &self.network.hosts[host].name;
            let taken = |name: &String| self.qp_by_name.contains_key(name) || names.contains(name);
            names[side] = (1..)
                .map(|n| format!("{host}.{n}"))
                .find(|name| !taken(name))
                .expect("integers are unlimited");
        }
        self.add_pair(names, hosts, spec, path)
    }

    fn add_flow(&mut self, flow: FlowPlan, bytes: u64, path: &str) -> Result<()> {
        let pair = &self.pairs[self.qps[flow.qp].pair];
        if pair.uses_cm {
            let message = format!("{} is not connected at the start of the run", self.qps[flow.qp].name);
            return Err(self.error_at(path, message).help("use steps `after` its connect or accept"));
        }
        let max = if pair.kind.is_datagram() {
            pair.mtu.bytes().into()
        } else {
            u64::from(DeviceLimits::HCA.max_msg_sz)
        };
        if bytes > max {
            return Err(self.error_in(path, "bytes", format!("{bytes} bytes, the maximum is {max}")));
        }
        if let FlowKind::Uniform(job) = flow.kind {
            self.check_operation(flow.qp, job, path)?;
        }
        if flow.depth == 0 || flow.depth > pair.max_send_wr {
            let message = format!(
                "depth is {}, the minimum is 1 and the maximum {} (`max-send-wr`)",
                flow.depth, pair.max_send_wr
            );
            return Err(self.error_in(path, "depth", message));
        }
        let posted: u64 = self.flows.iter().filter_map(|flow| flow.count).sum();
        if flow.count.is_some_and(|count| count > limits::MAX_MESSAGES - posted) {
            let message = format!("more than {} messages in total", limits::MAX_MESSAGES);
            return Err(self.error_at(path, message));
        }
        let endless = flow.count.is_none() && flow.until_ns.is_none();
        if endless && self.file.duration.is_none() {
            return Err(self
                .error_at(path, "this workload never ends")
                .help("add `count` or `until` here, or `duration` for the run"));
        }
        if self.file.duration.is_some_and(|ends| flow.at_ns >= ends.0) {
            return Err(self.error_at(path, "it starts after the end of the run"));
        }
        self.flows.push(flow);
        Ok(())
    }
}

fn work_operation(operation: OperationName) -> WorkOperation {
    match operation {
        OperationName::Send => WorkOperation::Send { immediate: None },
        OperationName::Write => WorkOperation::Write { immediate: None },
        OperationName::Read => WorkOperation::Read,
        OperationName::FetchAdd => WorkOperation::FetchAdd { add: 1 },
    }
}
