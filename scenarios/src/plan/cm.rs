//! Steps that make and end connections: what they may say, and on which queue pairs.

use super::builder::PlanBuilder;
use super::{StepAction, names};
use crate::source::{Diagnostic, join_path};
use crate::spec::{ClassName, PacketMatch, StepSpec};
use softhca_engine::QpType;
use softhca_fabric::{CmMessage, Direction, PacketClass, PacketClasses};
use softhca_queue::cm;

impl PlanBuilder<'_> {
    /// Whether a step connects one of these queue pairs, or waits for a request with it.
    pub(super) fn uses_connection_manager(&self, names: &[String; 2]) -> bool {
        self.file
            .step
            .iter()
            .any(|step| names.contains(&step.qp) && (step.listen.is_some() || step.connect.is_some()))
    }

    /// What a step does with a connection.
    pub(super) fn cm_actions(
        &self,
        step: &StepSpec,
        qp: usize,
        path: &str,
    ) -> Result<Vec<StepAction>, Diagnostic> {
        let is_datagram = self.pairs[self.qps[qp].pair].kind.is_datagram();
        let data = |text: &str, key: &str, [connected, datagrams]: [usize; 2]| {
            let most = if is_datagram { datagrams } else { connected };
            match text.len() > most {
                true => {
                    let message = format!("{} bytes of private data, at most {most} fit here", text.len());
                    Err(self.error_at(&format!("{path}.{key}.private-data"), message))
                }
                false => Ok(text.as_bytes().to_vec()),
            }
        };
        let mut deeds = Vec::new();
        if let Some(spec) = &step.listen {
            deeds.push(StepAction::Listen { port: self.port(spec.port, &join_path(path, "listen"))? });
        }
        if let Some(spec) = &step.connect {
            let most = [cm::MAX_REQ_PRIVATE_DATA, cm::MAX_SIDR_REQ_PRIVATE_DATA];
            let private_data = data(&spec.private_data, "connect", most)?;
            deeds.push(StepAction::Connect {
                port: self.port(spec.port, &join_path(path, "connect"))?,
                private_data,
            });
        }
        if let Some(spec) = &step.accept {
            let most = [cm::MAX_REP_PRIVATE_DATA, cm::MAX_SIDR_REP_PRIVATE_DATA];
            deeds.push(StepAction::Accept { private_data: data(&spec.private_data, "accept", most)? });
        }
        if let Some(spec) = &step.reject {
            let most = [cm::MAX_REJ_PRIVATE_DATA, cm::MAX_SIDR_REP_PRIVATE_DATA];
            let private_data = data(&spec.private_data, "reject", most)?;
            deeds.push(StepAction::Reject { reason: spec.reason, private_data });
        }
        if step.disconnect {
            deeds.push(StepAction::Disconnect);
        }
        Ok(deeds)
    }

    fn port(&self, port: u16, path: &str) -> Result<u16, Diagnostic> {
        match port {
            0 => Err(self.error_at(&join_path(path, "port"), "nobody could know which port 0 stands for")),
            port => Ok(port),
        }
    }

    /// Refuses what no connection manager would do for this queue pair.
    pub(super) fn check_cm_action(
        &self,
        step: &StepSpec,
        deed: &StepAction,
        qp: usize,
        path: &str,
    ) -> Result<(), Diagnostic> {
        let (name, peer) = (&self.qps[qp].name, self.qps[qp].peer);
        let pair = &self.pairs[self.qps[qp].pair];
        let is_answer = matches!(deed, StepAction::Accept { .. } | StepAction::Reject { .. });
        if pair.uses_cm && pair.kind.is_datagram() && matches!(deed, StepAction::Post(_)) && self.listens(qp)
        {
            let message = format!("{name} listens: it is told nothing of the queue pair that asks for it");
            return Err(self.error_at(path, message).help("send from the side that connects"));
        }
        if !deed.is_cm_call() {
            return Ok(());
        }
        if step.repeat != 1 {
            return Err(self.error_at(&join_path(path, "repeat"), "a queue pair is connected once"));
        }
        if !pair.uses_cm {
            let message = format!("{name} is connected before the run begins");
            let help = "let a step of the pair `listen` and one of the other side `connect`";
            return Err(self.error_at(path, message).help(help));
        }
        if is_answer && !self.listens(qp) {
            let message = format!("no request comes to {name}: it does not listen");
            return Err(self
                .error_at(path, message)
                .help("add an earlier step with `listen = { port = … }`"));
        }
        if *deed == StepAction::Disconnect && pair.kind == QpType::Ud {
            return Err(self.error_at(&join_path(path, "disconnect"), "datagrams have no connection to end"));
        }
        let begins =
            |deed: &StepAction| matches!(deed, StepAction::Listen { .. } | StepAction::Connect { .. });
        if begins(deed) && self.steps.iter().any(|other| other.qp == qp && begins(&other.action)) {
            return Err(self
                .error_at(path, format!("{name} listens or connects in an earlier step"))
                .help("a queue pair is connected once: give the second connection a [[pair]] of its own"));
        }
        let same = |deed: &StepAction| match deed {
            StepAction::Listen { .. } => self.listens(peer),
            StepAction::Connect { .. } => self.connects(peer),
            _ => false,
        };
        if same(deed) {
            let message = format!("both sides of the pair do this: {} does it, too", self.qps[peer].name);
            return Err(self.error_at(path, message).help("one side listens, the other connects"));
        }
        Ok(())
    }

    fn listens(&self, qp: usize) -> bool {
        self.steps.iter().any(|step| step.qp == qp && matches!(step.action, StepAction::Listen { .. }))
    }

    fn connects(&self, qp: usize) -> bool {
        self.steps.iter().any(|step| step.qp == qp && matches!(step.action, StepAction::Connect { .. }))
    }

    /// The connection manager takes the MTU of the cards: those of a pair that it connects get the pair's.
    pub(super) fn unify_cm_mtu(&mut self) -> Result<(), Diagnostic> {
        for pair in self.pairs.iter().filter(|pair| pair.uses_cm) {
            let hosts = pair.qps.map(|qp| self.qps[qp].host);
            let other = self.pairs.iter().find(|other| {
                other.mtu != pair.mtu && other.qps.iter().any(|qp| hosts.contains(&self.qps[*qp].host))
            });
            if let Some(other) = other {
                let [name, stranger] = [pair, other].map(|pair| &self.qps[pair.qps[0]].name);
                let message = format!(
                    "{name} is connected through the connection manager, which takes the MTU of the cards: \
                     {stranger} cannot have another"
                );
                return Err(self
                    .error_at("pair", message)
                    .help("give all pairs of these hosts the same `mtu`"));
            }
            for host in hosts {
                self.network.hosts[host].settings.mtu = pair.mtu;
            }
        }
        Ok(())
    }

    /// Whether a connection that a step makes has a message of these, this way.
    pub(super) fn may_send_cm_message(
        &self,
        wanted: &dyn Fn(&CmMessage) -> bool,
        way: Option<(usize, Option<Direction>)>,
    ) -> bool {
        let mut connects = self.steps.iter().filter(|step| matches!(step.action, StepAction::Connect { .. }));
        connects.any(|step| {
            let plan = &self.qps[step.qp];
            let [asking, asked] = names::cm_messages_by_side(self.pairs[plan.pair].kind.is_datagram());
            let [here, there] = [plan.host, self.qps[plan.peer].host];
            asking.iter().any(wanted) && self.path_crosses(way, [here, there])
                || asked.iter().any(wanted) && self.path_crosses(way, [there, here])
        })
    }

    /// Refuses a selector of messages that nobody sends this way.
    pub(super) fn check_cm_match(
        &self,
        matching: &PacketMatch,
        classes: Option<PacketClasses>,
        way: Option<(usize, Option<Direction>)>,
        path: &str,
    ) -> Result<(), Diagnostic> {
        let is_about_messages = matching.cm.is_some() || matching.class == Some(ClassName::Cm);
        if !is_about_messages || self.has_external_programs {
            return Ok(());
        }
        let never = |key: &str, why: &str| {
            self.error_at(&join_path(path, key), format!("this rule can never fire: {why}"))
        };
        if matching.qp.is_some() {
            return Err(never("qp", "messages of the connection manager are from QP1 to QP1"));
        }
        let key = if matching.cm.is_some() { "cm" } else { "class" };
        let Some(classes) = classes else { return Ok(()) };
        let wanted = |message: &CmMessage| classes.contains(PacketClass::Cm(*message));
        match self.may_send_cm_message(&wanted, way) {
            true => Ok(()),
            false => Err(never(key, "no connection that a step makes has such a message this way")
                .help("look at the direction of `on`, the transport of the pair, and which step connects")),
        }
    }
}
