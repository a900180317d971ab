//! Converts steps to actions and checks them.

use super::builder::PlanBuilder;
use super::{StepAction, StepPlan, WorkOperation, WorkRequest, limits};
use crate::source::{Result, join_path};
use crate::spec::{AccessRight, AtomicSpec, StepSpec, TransferSpec};
use softhca_engine::{DeviceLimits, QpType};

const STEP_ACTIONS: &str = "give one of send, write, read, compare-swap, fetch-add, receive, listen, connect, accept, reject, disconnect, attach-mcast, detach-mcast, modify, destroy, unmap, deregister, reregister";

impl PlanBuilder<'_> {
    /// Adds the steps in the order of the file.
    pub(super) fn add_steps(&mut self) -> Result<()> {
        for (index, step) in self.file.step.iter().enumerate() {
            let path = format!("step.{index}");
            let qp = self.qp(&step.qp, &join_path(&path, "qp"))?;
            if self.has_external_programs {
                let problem = self.error_at(&path, "a step needs a queue pair, but the file connects none");
                return Err(problem.help("add [[pair]] qps = [\"alice.1\", \"bob.1\"]"));
            }
            let action = self.step_action(step, qp, &path)?;
            self.check_cm_action(step, &action, qp, &path)?;
            let at = join_path(&path, "after");
            let after = step.after.as_ref().map(|name| self.step_with_completion(name, &at)).transpose()?;
            if after.is_none() && self.file.duration.is_some_and(|ends| step.at >= ends) {
                return Err(self.error_in(&path, "at", "the step starts after the end of the run"));
            }
            if let Some(name) = &step.name
                && self.steps.iter().any(|other| other.name.as_ref() == Some(name))
            {
                return Err(self.error_in(&path, "name", format!("another step has the name {name:?}")));
            }
            let (name, at_ns, repeat) = (step.name.clone(), step.at.0, step.repeat);
            if repeat == 0 || repeat > limits::MAX_REPEATS {
                let message = format!("`repeat` is 1 to {}", limits::MAX_REPEATS);
                return Err(self.error_in(&path, "repeat", message));
            }
            self.steps.push(StepPlan { name, at_ns, after, qp, repeat, action });
        }
        Ok(())
    }

    /// The step with this name that came before. It must have a completion.
    pub(super) fn step_with_completion(&self, name: &str, path: &str) -> Result<usize> {
        let names = || self.steps.iter().filter_map(|step| step.name.as_deref());
        let found =
            self.steps.iter().position(|step| step.name.as_deref() == Some(name)).ok_or_else(|| {
                self.error_at(path, format!("unknown earlier step {name:?}")).suggest(name, names())
            })?;
        match self.steps[found].action.has_completion() {
            true => Ok(found),
            false => Err(self.error_at(path, "the named step has no completion").help(
                "name a signaled send, write, read or atomic, a receive, listen, connect, accept or disconnect",
            )),
        }
    }

    fn step_action(&self, step: &StepSpec, qp: usize, path: &str) -> Result<StepAction> {
        let transfer = |spec: &TransferSpec, key: &str, operation: WorkOperation| -> Result<StepAction> {
            self.check_transfer(spec, qp, operation, &join_path(path, key))?;
            self.check_area_bounds(spec.offset, spec.bytes.0, &format!("{path}.{key}.offset"))?;
            self.check_area_bounds(spec.remote_offset, spec.bytes.0, &format!("{path}.{key}.remote-offset"))?;
            Ok(StepAction::Post(WorkRequest {
                operation,
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
        let atomic = |spec: &AtomicSpec, key: &str, operation: WorkOperation| -> Result<StepAction> {
            self.check_operation(qp, operation, &join_path(path, key))?;
            self.check_area_bounds(spec.offset, 8, &format!("{path}.{key}.offset"))?;
            self.check_area_bounds(spec.remote_offset, 8, &format!("{path}.{key}.remote-offset"))?;
            Ok(StepAction::Post(WorkRequest {
                offset: spec.offset,
                remote_offset: spec.remote_offset,
                remote_target: spec.remote,
                ..WorkRequest::new(operation, 8)
            }))
        };
        let mut actions = Vec::new();
        if let Some(spec) = &step.send {
            actions.push(transfer(spec, "send", WorkOperation::Send { immediate: spec.imm_data })?);
        }
        if let Some(spec) = &step.write {
            actions.push(transfer(spec, "write", WorkOperation::Write { immediate: spec.imm_data })?);
        }
        if let Some(spec) = &step.read {
            actions.push(transfer(spec, "read", WorkOperation::Read)?);
        }
        if let Some(spec) = &step.compare_swap {
            actions.push(atomic(
                spec,
                "compare-swap",
                WorkOperation::CompareSwap { compare: spec.compare, swap: spec.swap },
            )?);
        }
        if let Some(spec) = &step.fetch_add {
            actions.push(atomic(spec, "fetch-add", WorkOperation::FetchAdd { add: spec.add })?);
        }
        if let Some(spec) = &step.receive {
            if spec.bytes.0 > u64::from(u32::MAX) {
                return Err(self.error_in(path, "receive", "a receive is smaller than 4 GiB"));
            }
            self.check_area_bounds(spec.offset, spec.bytes.0, &join_path(path, "receive.offset"))?;
            actions.push(StepAction::Receive { bytes: spec.bytes.0 as u32, offset: spec.offset });
        }
        if let Some(spec) = &step.modify {
            actions.push(StepAction::Modify { state: spec.state, notify_drained: spec.en_sqd_async_notify });
        }
        actions.extend(self.cm_actions(step, qp, path)?);
        actions.extend(self.multicast_actions(step, qp, path)?);
        if step.destroy {
            actions.push(StepAction::Destroy);
        }
        if step.unmap {
            actions.push(StepAction::Unmap);
        }
        if step.deregister {
            actions.push(StepAction::Deregister);
        }
        if let Some(rights) = &step.reregister {
            actions.push(StepAction::Reregister(AccessRight::flags(rights)));
        }
        match (actions.pop(), actions.is_empty()) {
            (Some(action), true) => Ok(action),
            (None, _) => Err(self.error_at(path, "the step has no action").help(STEP_ACTIONS)),
            (Some(_), false) => {
                Err(self.error_at(path, "the step has two actions").help("split it into two steps"))
            }
        }
    }

    /// Checks that a range lies within the maximum size of an area.
    fn check_area_bounds(&self, offset: u64, bytes: u64, path: &str) -> Result<()> {
        match offset.checked_add(bytes).is_some_and(|end| end <= limits::MAX_AREA_BYTES) {
            true => Ok(()),
            false => {
                let message = format!(
                    "{bytes} bytes at offset {offset} exceed the maximum area size of {} bytes",
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
        operation: WorkOperation,
        path: &str,
    ) -> Result<()> {
        self.check_operation(qp, operation, path)?;
        let plan = &self.qps[qp];
        if let Some(group) = spec.group {
            self.check_multicast_send(group, spec, qp, path)?;
        }
        if let Some(to) = &spec.to {
            let peer = &self.qps[plan.peer].name;
            if to != peer {
                let message = format!("{} is connected to {peer}, not to {to:?}", plan.name);
                return Err(self.error_in(path, "to", message).suggest(to, [peer.as_str()]));
            }
        }
        let pair = &self.pairs[plan.pair];
        let max = if pair.kind.is_datagram() {
            pair.mtu.bytes().into()
        } else {
            u64::from(DeviceLimits::HCA.max_msg_sz)
        };
        if spec.bytes.0 > max {
            let message = format!("{} bytes, the maximum is {max}", spec.bytes.0);
            return Err(self.error_in(path, "bytes", message));
        }
        if spec.inline && spec.bytes.0 > 64 {
            return Err(self.error_in(path, "inline", "inline data is limited to 64 bytes"));
        }
        if spec.imm_data.is_some() && operation == WorkOperation::Read {
            return Err(self.error_in(path, "imm-data", "a READ has no immediate data"));
        }
        Ok(())
    }

    /// Checks that the transport supports the operation.
    pub(super) fn check_operation(&self, qp: usize, operation: WorkOperation, path: &str) -> Result<()> {
        let kind = self.pairs[self.qps[qp].pair].kind;
        let fits = match operation {
            WorkOperation::Send { .. } => true,
            WorkOperation::Write { .. } => !kind.is_datagram(),
            WorkOperation::Read | WorkOperation::CompareSwap { .. } | WorkOperation::FetchAdd { .. } => {
                kind == QpType::Rc
            }
        };
        match fits {
            true => Ok(()),
            false => {
                Err(self.error_at(path, format!("{} does not support this operation", kind.service().name())))
            }
        }
    }
}
