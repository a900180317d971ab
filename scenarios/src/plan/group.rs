//! Multicast groups: who may be a member, and what may be sent to one.

use super::build::Builder;
use super::{Deed, Plan};
use crate::language::{Step, TransferSpec};
use crate::source::{Problem, join};
use softhca_engine::QpKind;
use std::collections::BTreeSet;
use std::net::IpAddr;

impl Plan {
    /// The groups that datagrams are sent to, each with the queue pair that sends.
    pub fn sent_to_groups(&self) -> BTreeSet<(usize, IpAddr)> {
        let group = |deed: &Deed| match deed {
            Deed::Post(work) => work.group,
            _ => None,
        };
        self.steps.iter().filter_map(|step| Some((step.qp, group(&step.deed)?))).collect()
    }

    /// Every group that a step names.
    pub fn groups(&self) -> BTreeSet<IpAddr> {
        let group = |deed: &Deed| match deed {
            Deed::Post(work) => work.group,
            Deed::Join(group) | Deed::Leave(group) => Some(*group),
            _ => None,
        };
        self.steps.iter().filter_map(|step| group(&step.deed)).collect()
    }
}

impl Builder<'_> {
    /// What a step does with the membership of a queue pair.
    pub(super) fn grouping(&self, step: &Step, qp: usize, path: &str) -> Result<Vec<Deed>, Problem> {
        let mut deeds = Vec::new();
        if let Some(group) = step.join {
            self.check_group(group, qp, &join(path, "join"))?;
            deeds.push(Deed::Join(group));
        }
        if let Some(group) = step.leave {
            let path = join(path, "leave");
            self.check_group(group, qp, &path)?;
            if !self.steps.iter().any(|earlier| earlier.qp == qp && earlier.deed == Deed::Join(group)) {
                let message = format!("{} is no member of {group}", self.qps[qp].name);
                let help = format!("add an earlier step with join = \"{group}\"");
                return Err(self.problem(&path, message).help(help));
            }
            deeds.push(Deed::Leave(group));
        }
        Ok(deeds)
    }

    /// Refuses what cannot be sent to a group.
    pub(super) fn check_sent_to(
        &self,
        group: IpAddr,
        spec: &TransferSpec,
        qp: usize,
        path: &str,
    ) -> Result<(), Problem> {
        self.check_group(group, qp, &join(path, "group"))?;
        match &spec.to {
            Some(_) => Err(self.problem(&join(path, "to"), "a datagram goes to a queue pair or to a group")),
            None => Ok(()),
        }
    }

    fn check_group(&self, group: IpAddr, qp: usize, path: &str) -> Result<(), Problem> {
        let plan = &self.qps[qp];
        if self.pairs[plan.pair].kind != QpKind::Ud {
            let message = format!("{} has no groups: only UD queue pairs do", plan.name);
            return Err(self.problem(path, message).help("give the pair transport = \"ud\""));
        }
        if !group.is_multicast() {
            let message = format!("{group} is no multicast address");
            return Err(self
                .problem(path, message)
                .help("use one of 224.0.0.0 to 239.255.255.255, or of ff00::/8"));
        }
        let host = &self.network.hosts[plan.host];
        if group.is_ipv4() != host.address.is_ipv4() {
            let message =
                format!("{} has the address {}: {group} is of the other family", host.name, host.address);
            return Err(self.problem(path, message));
        }
        Ok(())
    }
}
