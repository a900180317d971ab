//! Steps: what each does, on which queue pair, and after which other.

use super::builder::PlanBuilder;
use super::{StepAction, StepPlan, WorkOperation, WorkRequest, limits};
use crate::source::{Diagnostic, join_path};
use crate::spec::{AccessRight, AtomicSpec, StepSpec, TransferSpec};
use softhca_engine::{DeviceLimits, QpType};
use std::collections::BTreeMap;

const STEP_ACTIONS: &str = "give one of send, write, read, compare-swap, fetch-add, receive, listen, connect, accept, reject, disconnect, attach-mcast, detach-mcast, modify, destroy, unmap, deregister, reregister";

impl PlanBuilder<'_> {
    /// The steps of the file, in its order.
    pub(super) fn add_steps(&mut self) -> Result<(), Diagnostic> {
        let mut names: BTreeMap<String, usize> = BTreeMap::new();
        for (index, step) in self.file.step.iter().enumerate() {
            let path = format!("step.{index}");
            let qp = self.qp(&step.qp, &join_path(&path, "qp"))?;
            if self.has_external_programs {
                let problem = self.error_at(&path, "a step needs a queue pair, and the file connects none");
                return Err(problem.help("add [[pair]] qps = [\"alice.1\", \"bob.1\"]"));
            }
            let deed = self.step_action(step, qp, &path)?;
            self.check_cm_action(step, &deed, qp, &path)?;
            let after = match &step.after {
                None => None,
                Some(name) => Some(*names.get(name).ok_or_else(|| {
                    let message = format!("there is no earlier step {name:?}");
                    self.error_at(&join_path(&path, "after"), message)
                        .suggest(name, names.keys().map(String::as_str))
                })?),
            };
            if let Some(after) = after
                && !self.steps[after].action.has_completion()
            {
                return Err(self
                    .error_at(&join_path(&path, "after"), "that step has no completion to wait for")
                    .help("name a signalled send, write, read, atomic, a receive, or a listen, connect, accept or disconnect"));
            }
            if after.is_none() && self.file.duration.is_some_and(|ends| step.at >= ends) {
                return Err(self.error_at(&join_path(&path, "at"), "the step comes after the end of the run"));
            }
            if let Some(name) = &step.name
                && names.insert(name.clone(), index).is_some()
            {
                return Err(
                    self.error_at(&join_path(&path, "name"), format!("two steps are called {name:?}"))
                );
            }
            let (name, at_ns, repeat) = (step.name.clone(), step.at.0, step.repeat);
            if repeat == 0 || repeat > limits::MAX_REPEATS {
                let message = format!("a step is done 1 to {} times", limits::MAX_REPEATS);
                return Err(self.error_at(&join_path(&path, "repeat"), message));
            }
            self.steps.push(StepPlan { name, at_ns, after, qp, repeat, action: deed });
        }
        Ok(())
    }

    fn step_action(&self, step: &StepSpec, qp: usize, path: &str) -> Result<StepAction, Diagnostic> {
        let transfer = |spec: &TransferSpec,
                        key: &str,
                        job: WorkOperation|
         -> Result<StepAction, Diagnostic> {
            self.check_transfer(spec, qp, job, &join_path(path, key))?;
            self.check_area_bounds(spec.offset, spec.bytes.0, &format!("{path}.{key}.offset"))?;
            self.check_area_bounds(spec.remote_offset, spec.bytes.0, &format!("{path}.{key}.remote-offset"))?;
            Ok(StepAction::Post(WorkRequest {
                operation: job,
                bytes: spec.bytes.0 as u32,
                offset: spec.offset,
                remote_offset: spec.remote_offset,
                remote_target: spec.remote,
                signaled: spec.signaled,
                fence: spec.fence,
                solicited: spec.solicited,
                inline: spec.inline,
                group: spec.group,
            }))
        };
        let atomic = |spec: &AtomicSpec, key: &str, job: WorkOperation| -> Result<StepAction, Diagnostic> {
            self.check_operation(qp, job, &join_path(path, key))?;
            self.check_area_bounds(spec.offset, 8, &format!("{path}.{key}.offset"))?;
            self.check_area_bounds(spec.remote_offset, 8, &format!("{path}.{key}.remote-offset"))?;
            Ok(StepAction::Post(WorkRequest {
                operation: job,
                bytes: 8,
                offset: spec.offset,
                remote_offset: spec.remote_offset,
                remote_target: spec.remote,
                signaled: true,
                fence: false,
                solicited: false,
                inline: false,
                group: None,
            }))
        };
        let mut deeds = Vec::new();
        if let Some(spec) = &step.send {
            deeds.push(transfer(spec, "send", WorkOperation::Send { immediate: spec.imm_data })?);
        }
        if let Some(spec) = &step.write {
            deeds.push(transfer(spec, "write", WorkOperation::Write { immediate: spec.imm_data })?);
        }
        if let Some(spec) = &step.read {
            deeds.push(transfer(spec, "read", WorkOperation::Read)?);
        }
        if let Some(spec) = &step.compare_swap {
            deeds.push(atomic(
                spec,
                "compare-swap",
                WorkOperation::CompareSwap { compare: spec.compare, swap: spec.swap },
            )?);
        }
        if let Some(spec) = &step.fetch_add {
            deeds.push(atomic(spec, "fetch-add", WorkOperation::FetchAdd { add: spec.add })?);
        }
        if let Some(spec) = &step.receive {
            if spec.bytes.0 > u64::from(u32::MAX) {
                return Err(self.error_at(&join_path(path, "receive"), "a receive takes less than 4 GiB"));
            }
            self.check_area_bounds(spec.offset, spec.bytes.0, &join_path(path, "receive.offset"))?;
            deeds.push(StepAction::Receive { bytes: spec.bytes.0 as u32, offset: spec.offset });
        }
        if let Some(spec) = &step.modify {
            deeds.push(StepAction::Modify { state: spec.state, notify_drained: spec.en_sqd_async_notify });
        }
        deeds.extend(self.cm_actions(step, qp, path)?);
        deeds.extend(self.multicast_actions(step, qp, path)?);
        if step.destroy {
            deeds.push(StepAction::Destroy);
        }
        if step.unmap {
            deeds.push(StepAction::Unmap);
        }
        if step.deregister {
            deeds.push(StepAction::Deregister);
        }
        if let Some(rights) = &step.reregister {
            deeds.push(StepAction::Reregister(AccessRight::flags(rights)));
        }
        match (deeds.pop(), deeds.is_empty()) {
            (Some(deed), true) => Ok(deed),
            (None, _) => Err(self.error_at(path, "the step does nothing").help(STEP_ACTIONS)),
            (Some(_), false) => {
                Err(self.error_at(path, "the step does two things").help("make two steps of it"))
            }
        }
    }

    /// Whether so many bytes from an offset on are in a memory of sensible size.
    fn check_area_bounds(&self, offset: u64, bytes: u64, path: &str) -> Result<(), Diagnostic> {
        match offset.checked_add(bytes).is_some_and(|end| end <= limits::MAX_AREA_BYTES) {
            true => Ok(()),
            false => {
                let message = format!(
                    "{bytes} bytes from {offset} on: the memory has at most {} bytes",
                    limits::MAX_AREA_BYTES
                );
                Err(self.error_at(path, message))
            }
        }
    }

    fn check_transfer(
        &self,
        spec: &TransferSpec,
        qp: usize,
        job: WorkOperation,
        path: &str,
    ) -> Result<(), Diagnostic> {
        self.check_operation(qp, job, path)?;
        let plan = &self.qps[qp];
        if let Some(group) = spec.group {
            self.check_multicast_send(group, spec, qp, path)?;
        }
        if let Some(to) = &spec.to {
            let peer = &self.qps[plan.peer].name;
            if to != peer {
                let message = format!("{} is connected to {peer}, not to {to:?}", plan.name);
                return Err(self.error_at(&join_path(path, "to"), message).suggest(to, [peer.as_str()]));
            }
        }
        let pair = &self.pairs[plan.pair];
        let most = if pair.kind.is_datagram() {
            pair.mtu.bytes().into()
        } else {
            u64::from(DeviceLimits::HCA.max_msg_sz)
        };
        if spec.bytes.0 > most {
            let message = format!("{} bytes, at most {most} can be sent", spec.bytes.0);
            return Err(self.error_at(&join_path(path, "bytes"), message));
        }
        if spec.inline && spec.bytes.0 > 64 {
            return Err(self.error_at(&join_path(path, "inline"), "at most 64 bytes travel inline"));
        }
        if spec.imm_data.is_some() && job == WorkOperation::Read {
            return Err(self.error_at(&join_path(path, "imm-data"), "a READ has no immediate data"));
        }
        Ok(())
    }

    /// Whether queue pairs of this kind have the operation.
    pub(super) fn check_operation(
        &self,
        qp: usize,
        job: WorkOperation,
        path: &str,
    ) -> Result<(), Diagnostic> {
        let kind = self.pairs[self.qps[qp].pair].kind;
        let fits = match job {
            WorkOperation::Send { .. } => true,
            WorkOperation::Write { .. } => !kind.is_datagram(),
            WorkOperation::Read | WorkOperation::CompareSwap { .. } | WorkOperation::FetchAdd { .. } => {
                kind == QpType::Rc
            }
        };
        match fits {
            true => Ok(()),
            false => Err(self.error_at(path, format!("{} has no such operation", kind.service().name()))),
        }
    }
}
