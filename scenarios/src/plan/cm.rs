//! Checks of connection management steps and of rules for CM messages.

use super::builder::PlanBuilder;
use super::{StepAction, names};
use crate::source::{Result, join_path};
use crate::spec::{ClassName, PacketMatch, StepSpec};
use softhca_engine::QpType;
use softhca_fabric::{CmMessage, Direction, PacketClass, PacketClasses};
use softhca_types::cm;

impl PlanBuilder<'_> {
    /// Whether a step listens or connects with one of these queue pairs.
    pub(super) fn uses_connection_manager(&self, names: &[String; 2]) -> bool {
        self.file
            .step
            .iter()
            .any(|step| names.contains(&step.qp) && (step.listen.is_some() || step.connect.is_some()))
    }

    /// The connection management action of a step.
    pub(super) fn cm_actions(&self, step: &StepSpec, qp: usize, path: &str) -> Result<Vec<StepAction>> {
        let is_datagram = self.pairs[self.qps[qp].pair].kind.is_datagram();
        let data = |text: &str, key: &str, [connected, datagrams]: [usize; 2]| {
            let max = if is_datagram { datagrams } else { connected };
            match text.len() > max {
                true => {
                    let message = format!("{} bytes of private data, the maximum is {max}", text.len());
                    Err(self.error_at(&format!("{path}.{key}.private-data"), message))
                }
                false => Ok(text.as_bytes().to_vec()),
            }
        };
        let mut actions = Vec::new();
        if let Some(spec) = &step.listen {
            actions.push(StepAction::Listen { port: self.port(spec.port, &join_path(path, "listen"))? });
        }
        if let Some(spec) = &step.connect {
            let max = [cm::MAX_REQ_PRIVATE_DATA, cm::MAX_SIDR_REQ_PRIVATE_DATA];
            let private_data = data(&spec.private_data, "connect", max)?;
            actions.push(StepAction::Connect {
                port: self.port(spec.port, &join_path(path, "connect"))?,
                private_data,
            });
        }
        if let Some(spec) = &step.accept {
            let max = [cm::MAX_REP_PRIVATE_DATA, cm::MAX_SIDR_REP_PRIVATE_DATA];
            actions.push(StepAction::Accept { private_data: data(&spec.private_data, "accept", max)? });
        }
        if let Some(spec) = &step.reject {
            let max = [cm::MAX_REJ_PRIVATE_DATA, cm::MAX_SIDR_REP_PRIVATE_DATA];
            let private_data = data(&spec.private_data, "reject", max)?;
            actions.push(StepAction::Reject { reason: spec.reason, private_data });
        }
        if step.disconnect {
            actions.push(StepAction::Disconnect);
        }
        Ok(actions)
    }

    fn port(&self, port: u16, path: &str) -> Result<u16> {
        match port {
            0 => Err(self.error_in(path, "port", "port 0 does not identify a listener")),
            port => Ok(port),
        }
    }

    /// Rejects actions that the connection manager does not support for this queue pair.
    pub(super) fn check_cm_action(
        &self,
        step: &StepSpec,
        action: &StepAction,
        qp: usize,
        path: &str,
    ) -> Result<()> {
        let (name, peer) = (&self.qps[qp].name, self.qps[qp].peer);
        let pair = &self.pairs[self.qps[qp].pair];
        let is_answer = matches!(action, StepAction::Accept { .. } | StepAction::Reject { .. });
        if pair.uses_cm
            && pair.kind.is_datagram()
            && matches!(action, StepAction::Post(_))
            && self.listens(qp)
        {
            let message =
                format!("{name} is the passive side: SIDR does not give it the address of the peer");
            return Err(self.error_at(path, message).help("send from the active side"));
        }
        if !action.is_cm_call() {
            return Ok(());
        }
        if step.repeat != 1 {
            return Err(self.error_in(path, "repeat", "a queue pair connects only once"));
        }
        if !pair.uses_cm {
            let message = format!("{name} is connected before the run starts");
            let help = "add a `listen` step for one side of the pair and a `connect` step for the other";
            return Err(self.error_at(path, message).help(help));
        }
        if is_answer && !self.listens(qp) {
            let message = format!("{name} receives no request: it does not listen");
            return Err(self
                .error_at(path, message)
                .help("add an earlier step with `listen = { port = … }`"));
        }
        if *action == StepAction::Disconnect && pair.kind == QpType::Ud {
            return Err(self.error_in(path, "disconnect", "UD queue pairs have no connection"));
        }
        let begins =
            |action: &StepAction| matches!(action, StepAction::Listen { .. } | StepAction::Connect { .. });
        if begins(action) && self.steps.iter().any(|other| other.qp == qp && begins(&other.action)) {
            return Err(self
                .error_at(path, format!("{name} already listens or connects in an earlier step"))
                .help("a queue pair connects only once: add a [[pair]] for the second connection"));
        }
        let same = |action: &StepAction| match action {
            StepAction::Listen { .. } => self.listens(peer),
            StepAction::Connect { .. } => self.connects(peer),
            _ => false,
        };
        if same(action) {
            let message = format!("both sides of the pair do this: {} does it too", self.qps[peer].name);
            return Err(self.error_at(path, message).help("one side must listen and the other connect"));
        }
        Ok(())
    }

    fn listens(&self, qp: usize) -> bool {
        self.steps.iter().any(|step| step.qp == qp && matches!(step.action, StepAction::Listen { .. }))
    }

    fn connects(&self, qp: usize) -> bool {
        self.steps.iter().any(|step| step.qp == qp && matches!(step.action, StepAction::Connect { .. }))
    }

    /// The connection manager uses the MTU of the devices: sets it to that of the pairs that it connects.
    pub(super) fn unify_cm_mtu(&mut self) -> Result<()> {
        for pair in self.pairs.iter().filter(|pair| pair.uses_cm) {
            let hosts = pair.qps.map(|qp| self.qps[qp].host);
            let other = self.pairs.iter().find(|other| {
                other.mtu != pair.mtu && other.qps.iter().any(|qp| hosts.contains(&self.qps[*qp].host))
            });
            if let Some(other) = other {
                let [name, stranger] = [pair, other].map(|pair| &self.qps[pair.qps[0]].name);
                let message = format!(
                    "{name} connects through the connection manager, which uses the MTU of the device: \
                     {stranger} cannot have a different one"
                );
                return Err(self
                    .error_at("pair", message)
                    .help("set the same `mtu` for all pairs of these hosts"));
            }
            for host in hosts {
                self.network.hosts[host].settings.mtu = pair.mtu;
            }
        }
        Ok(())
    }

    /// Whether a step can cause one of these messages in a direction.
    pub(super) fn may_send_cm_message(
        &self,
        wanted: &dyn Fn(&CmMessage) -> bool,
        way: Option<(usize, Option<Direction>)>,
    ) -> bool {
        let mut connects = self.steps.iter().filter(|step| matches!(step.action, StepAction::Connect { .. }));
        connects.any(|step| {
            let plan = &self.qps[step.qp];
            let [active, passive] = names::cm_messages_by_side(self.pairs[plan.pair].kind.is_datagram());
            let [here, there] = [plan.host, self.qps[plan.peer].host];
            active.iter().any(wanted) && self.path_crosses(way, [here, there])
                || passive.iter().any(wanted) && self.path_crosses(way, [there, here])
        })
    }

    /// Rejects a selector of CM messages that no step causes in this direction.
    pub(super) fn check_cm_match(
        &self,
        matching: &PacketMatch,
        classes: Option<PacketClasses>,
        way: Option<(usize, Option<Direction>)>,
        path: &str,
    ) -> Result<()> {
        let is_about_messages = matching.cm.is_some() || matching.class == Some(ClassName::Cm);
        if !is_about_messages || self.has_external_programs {
            return Ok(());
        }
        let never =
            |key: &str, why: &str| self.error_in(path, key, format!("this rule can never fire: {why}"));
        if matching.qp.is_some() {
            return Err(never("qp", "CM messages are sent from QP1 to QP1"));
        }
        let key = if matching.cm.is_some() { "cm" } else { "class" };
        let Some(classes) = classes else { return Ok(()) };
        let wanted = |message: &CmMessage| classes.contains(PacketClass::Cm(*message));
        match self.may_send_cm_message(&wanted, way) {
            true => Ok(()),
            false => Err(never(key, "no step causes this message in this direction")
                .help("check the direction of `on`, the transport of the pair, and the `connect` steps")),
        }
    }
}
