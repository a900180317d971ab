//! Multicast groups: checks of members and of datagrams to groups.

use super::builder::PlanBuilder;
use super::{Plan, StepAction};
use crate::source::{Result, join_path};
use crate::spec::{StepSpec, TransferSpec};
use softhca_engine::QpType;
use std::collections::BTreeSet;
use std::net::IpAddr;

impl Plan {
    /// The groups that steps send to, with the sending queue pair.
    pub fn multicast_sends(&self) -> BTreeSet<(usize, IpAddr)> {
        let group = |action: &StepAction| match action {
            StepAction::Post(work) => work.group,
            _ => None,
        };
        self.steps.iter().filter_map(|step| Some((step.qp, group(&step.action)?))).collect()
    }

    /// All groups that steps name.
    pub fn multicast_groups(&self) -> BTreeSet<IpAddr> {
        let group = |action: &StepAction| match action {
            StepAction::Post(work) => work.group,
            StepAction::AttachMulticast(group) | StepAction::DetachMulticast(group) => Some(*group),
            _ => None,
        };
        self.steps.iter().filter_map(|step| group(&step.action)).collect()
    }
}

impl PlanBuilder<'_> {
    /// The multicast action of a step.
    pub(super) fn multicast_actions(
        &self,
        step: &StepSpec,
        qp: usize,
        path: &str,
    ) -> Result<Vec<StepAction>> {
        let mut actions = Vec::new();
        if let Some(group) = step.attach_mcast {
            self.check_group(group, qp, &join_path(path, "attach-mcast"))?;
            actions.push(StepAction::AttachMulticast(group));
        }
        if let Some(group) = step.detach_mcast {
            let path = join_path(path, "detach-mcast");
            self.check_group(group, qp, &path)?;
            if !self
                .steps
                .iter()
                .any(|earlier| earlier.qp == qp && earlier.action == StepAction::AttachMulticast(group))
            {
                let message = format!("{} is not attached to {group}", self.qps[qp].name);
                let help = format!("add an earlier step with attach-mcast = \"{group}\"");
                return Err(self.error_at(&path, message).help(help));
            }
            actions.push(StepAction::DetachMulticast(group));
        }
        Ok(actions)
    }

    /// Checks a datagram to a group.
    pub(super) fn check_multicast_send(
        &self,
        group: IpAddr,
        spec: &TransferSpec,
        qp: usize,
        path: &str,
    ) -> Result<()> {
        self.check_group(group, qp, &join_path(path, "group"))?;
        match &spec.to {
            Some(_) => Err(self.error_in(path, "to", "give either `to` or `group`, not both")),
            None => Ok(()),
        }
    }

    fn check_group(&self, group: IpAddr, qp: usize, path: &str) -> Result<()> {
        let plan = &self.qps[qp];
        if self.pairs[plan.pair].kind != QpType::Ud {
            let message =
                format!("{} is not a UD queue pair: only UD queue pairs use multicast groups", plan.name);
            return Err(self.error_at(path, message).help("set transport = \"ud\""));
        }
        if !group.is_multicast() {
            let message = format!("{group} is not a multicast address");
            return Err(self
                .error_at(path, message)
                .help("use an address from 224.0.0.0 to 239.255.255.255 or in ff00::/8"));
        }
        let host = &self.network.hosts[plan.host];
        if group.is_ipv4() != host.address.is_ipv4() {
            let message = format!(
                "{} has the address {}, and {group} belongs to the other address family",
                host.name, host.address
            );
            return Err(self.error_at(path, message));
        }
        Ok(())
    }
}
