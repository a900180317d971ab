//! Steps: what each does, on which queue pair, and after which other.

use super::build::{Builder, rights_of, state_of};
use super::{Deed, Job, StepPlan, Work, limits};
use crate::language::{AtomicSpec, Step, TransferSpec};
use crate::source::{Problem, join};
use softhca_engine::{Limits, QpKind};
use std::collections::BTreeMap;

const DEEDS: &str = "give one of send, write, read, compare-swap, fetch-add, receive, listen, connect, accept, reject, disconnect, join, leave, modify, destroy, unmap, deregister, reregister";

impl Builder<'_> {
    /// The steps of the file, in its order.
    pub(super) fn add_steps(&mut self) -> Result<(), Problem> {
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
            if repeat == 0 || repeat > limits::REPEATS {
                let message = format!("a step is done 1 to {} times", limits::REPEATS);
                return Err(self.problem(&join(&path, "repeat"), message));
            }
            self.steps.push(StepPlan { name, at_ns, after, qp, repeat, deed });
        }
        Ok(())
    }

    fn deed(&self, step: &Step, qp: usize, path: &str) -> Result<Deed, Problem> {
        let transfer = |spec: &TransferSpec, key: &str, job: Job| -> Result<Deed, Problem> {
            self.check_transfer(spec, qp, job, &join(path, key))?;
            self.check_place(spec.offset, spec.bytes.0, &format!("{path}.{key}.offset"))?;
            self.check_place(spec.remote_offset, spec.bytes.0, &format!("{path}.{key}.remote-offset"))?;
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
            self.check_place(spec.offset, 8, &format!("{path}.{key}.offset"))?;
            self.check_place(spec.remote_offset, 8, &format!("{path}.{key}.remote-offset"))?;
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
            self.check_place(spec.offset, spec.bytes.0, &join(path, "receive.offset"))?;
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

    /// Whether so many bytes from an offset on are in a memory of sensible size.
    fn check_place(&self, offset: u64, bytes: u64, path: &str) -> Result<(), Problem> {
        match offset.checked_add(bytes).is_some_and(|end| end <= limits::AREA) {
            true => Ok(()),
            false => {
                let message =
                    format!("{bytes} bytes from {offset} on: the memory has at most {} bytes", limits::AREA);
                Err(self.problem(path, message))
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

    /// Whether queue pairs of this kind have the operation.
    pub(super) fn check_service(&self, qp: usize, job: Job, path: &str) -> Result<(), Problem> {
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
}
