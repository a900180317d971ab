//! Workloads: which queue pairs they use or make, and the flows and programs that they are.

use super::build::Builder;
use super::{CommandPlan, FlowKind, FlowPlan, Job};
use crate::language::{
    CommandSpec, ConnectionSpec, Flavour, Incast, KeyValue, OperationName, Permutation, PingPong, Stream,
};
use crate::source::{Problem, join};
use softhca_engine::Limits;
use softhca_fabric::Seed;
use std::collections::BTreeSet;

const WORKLOADS: &str = "give one of stream, incast, permutation, ping-pong, key-value, command";

impl Builder<'_> {
    /// The workloads of the file, in its order.
    pub(super) fn add_workloads(&mut self) -> Result<(), Problem> {
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
            Flavour::Stream(stream) => self.add_stream(workload, stream, &join(path, "stream")),
            Flavour::Incast(incast) => self.add_incast(workload, incast, &join(path, "incast")),
            Flavour::Permutation(permutation) => {
                self.add_permutation(workload, permutation, &join(path, "permutation"))
            }
            Flavour::PingPong(ping_pong) => self.add_ping_pong(workload, ping_pong, &join(path, "ping-pong")),
            Flavour::KeyValue(key_value) => self.add_key_value(workload, key_value, &join(path, "key-value")),
            Flavour::Command(command) => self.add_command(workload, command, &join(path, "command")),
        }
    }

    fn add_stream(&mut self, workload: usize, stream: &Stream, path: &str) -> Result<(), Problem> {
        let qp = self.connected(&stream.qp, &join(path, "qp"))?;
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
        self.add_flow(flow, stream.bytes.0, path)
    }

    fn add_incast(&mut self, workload: usize, incast: &Incast, path: &str) -> Result<(), Problem> {
        let to = self.network.host(&incast.to, self.source, &join(path, "to"))?;
        let senders = self.hosts_named(&incast.from, &join(path, "from"))?;
        if let Some(priority) = incast.priority.filter(|priority| *priority > 7) {
            return Err(self.problem(&join(path, "priority"), format!("{priority}: priorities are 0 to 7")));
        }
        let own = ConnectionSpec { priority: incast.priority, ..ConnectionSpec::default() };
        for (index, host) in senders.into_iter().enumerate() {
            let [qp, _] = self.own_pair([host, to], &own, path)?;
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
            self.add_flow(flow, incast.bytes.0, path)?;
        }
        Ok(())
    }

    fn add_permutation(
        &mut self,
        workload: usize,
        permutation: &Permutation,
        path: &str,
    ) -> Result<(), Problem> {
        let hosts = self.hosts_named(&permutation.hosts, &join(path, "hosts"))?;
        let count = hosts.len();
        if count < 2 {
            return Err(self.problem(&join(path, "hosts"), "a permutation needs two hosts at least"));
        }
        let shift = match permutation.shift {
            Some(shift) => shift as usize % count,
            None => 1 + Seed(self.seed).below(count as u64 - 1, &[0x7065_726d, workload as u64]) as usize,
        };
        if shift == 0 {
            return Err(self.problem(&join(path, "shift"), "every host would send to itself"));
        }
        let own = ConnectionSpec { priority: permutation.priority, ..ConnectionSpec::default() };
        for (index, host) in hosts.iter().enumerate() {
            let [qp, _] = self.own_pair([*host, hosts[(index + shift) % count]], &own, path)?;
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
            self.add_flow(flow, permutation.bytes.0, path)?;
        }
        Ok(())
    }

    fn add_ping_pong(&mut self, workload: usize, ping_pong: &PingPong, path: &str) -> Result<(), Problem> {
        let qp = self.connected(&ping_pong.between[0], &format!("{path}.between.0"))?;
        let peer = self.connected(&ping_pong.between[1], &format!("{path}.between.1"))?;
        if self.qps[qp].peer != peer {
            return Err(self.problem(&join(path, "between"), "these two are not connected to each other"));
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
        self.add_flow(flow, ping_pong.bytes.0, path)
    }

    fn add_key_value(&mut self, workload: usize, key_value: &KeyValue, path: &str) -> Result<(), Problem> {
        let qp = self.connected(&key_value.client, &join(path, "client"))?;
        if key_value.keys == 0 || key_value.keys.saturating_mul(key_value.bytes.0) > 1 << 30 {
            return Err(
                self.problem(&join(path, "keys"), "there is at least one record, and at most 1 GiB of them")
            );
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
        self.add_flow(flow, key_value.bytes.0, path)
    }

    fn add_command(&mut self, workload: usize, command: &CommandSpec, path: &str) -> Result<(), Problem> {
        let host = self.network.host(&command.host, self.source, &join(path, "host"))?;
        if !self.is_open {
            let problem = self.problem(path, "the file connects queue pairs of its own");
            return Err(problem.help("a file that starts programs leaves queue pairs to them"));
        }
        if command.run.is_empty() {
            return Err(self.problem(&join(path, "run"), "which program?"));
        }
        if self.file.ends.is_some_and(|ends| command.at >= ends) {
            return Err(self.problem(&join(path, "at"), "it begins after the end of the run"));
        }
        self.check_addresses(&command.run, &join(path, "run"))?;
        let (words, at_ns, exit) = (command.run.clone(), command.at.0, command.exit);
        self.commands.push(CommandPlan { workload, host, words, at_ns, exit });
        Ok(())
    }

    /// The hosts that names and ranges of names stand for.
    fn hosts_named(&self, names: &[String], path: &str) -> Result<Vec<usize>, Problem> {
        let mut hosts = Vec::new();
        for (index, name) in names.iter().enumerate() {
            hosts.extend(self.network.hosts_of(name, self.source, &format!("{path}.{index}"))?);
        }
        Ok(hosts)
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
}

fn job_of(operation: OperationName) -> Job {
    match operation {
        OperationName::Send => Job::Send { immediate: None },
        OperationName::Write => Job::Write { immediate: None },
        OperationName::Read => Job::Read,
        OperationName::FetchAdd => Job::FetchAdd { add: 1 },
    }
}
