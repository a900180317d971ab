//! Steps that make and end connections: what they may say, and on which queue pairs.

use super::build::Builder;
use super::{Deed, words};
use crate::language::{ClassName, Match, Step};
use crate::source::{Problem, join};
use softhca_engine::QpKind;
use softhca_fabric::{Class, Classes, CmMessage, Direction};
use softhca_queue::cm;

impl Builder<'_> {
    /// Whether a step connects one of these queue pairs, or waits for a request with it.
    pub(super) fn uses_connection_manager(&self, names: &[String; 2]) -> bool {
        self.file
            .step
            .iter()
            .any(|step| names.contains(&step.qp) && (step.listen.is_some() || step.connect.is_some()))
    }

    /// What a step does with a connection.
    pub(super) fn connecting(&self, step: &Step, qp: usize, path: &str) -> Result<Vec<Deed>, Problem> {
        let is_datagram = self.pairs[self.qps[qp].pair].kind.is_datagram();
        let data = |text: &str, key: &str, [connected, datagrams]: [usize; 2]| {
            let most = if is_datagram { datagrams } else { connected };
            match text.len() > most {
                true => {
                    let message = format!("{} bytes of private data, at most {most} fit here", text.len());
                    Err(self.problem(&format!("{path}.{key}.private-data"), message))
                }
                false => Ok(text.as_bytes().to_vec()),
            }
        };
        let mut deeds = Vec::new();
        if let Some(spec) = &step.listen {
            deeds.push(Deed::Listen { port: self.port(spec.port, &join(path, "listen"))? });
        }
        if let Some(spec) = &step.connect {
            let most = [cm::REQUEST_DATA, cm::SERVICE_REQUEST_DATA];
            let private_data = data(&spec.private_data, "connect", most)?;
            deeds.push(Deed::Connect { port: self.port(spec.port, &join(path, "connect"))?, private_data });
        }
        if let Some(spec) = &step.accept {
            let most = [cm::REPLY_DATA, cm::SERVICE_REPLY_DATA];
            deeds.push(Deed::Accept { private_data: data(&spec.private_data, "accept", most)? });
        }
        if let Some(spec) = &step.reject {
            let most = [cm::REJECT_DATA, cm::SERVICE_REPLY_DATA];
            let private_data = data(&spec.private_data, "reject", most)?;
            deeds.push(Deed::Reject { reason: spec.reason, private_data });
        }
        if step.disconnect {
            deeds.push(Deed::Disconnect);
        }
        Ok(deeds)
    }

    fn port(&self, port: u16, path: &str) -> Result<u16, Problem> {
        match port {
            0 => Err(self.problem(&join(path, "port"), "nobody could know which port 0 stands for")),
            port => Ok(port),
        }
    }

    /// Refuses what no connection manager would do for this queue pair.
    pub(super) fn check_connecting(
        &self,
        step: &Step,
        deed: &Deed,
        qp: usize,
        path: &str,
    ) -> Result<(), Problem> {
        let (name, peer) = (&self.qps[qp].name, self.qps[qp].peer);
        let pair = &self.pairs[self.qps[qp].pair];
        let is_answer = matches!(deed, Deed::Accept { .. } | Deed::Reject { .. });
        if pair.by_cm && pair.kind.is_datagram() && matches!(deed, Deed::Post(_)) && self.listens(qp) {
            let message = format!("{name} listens: it is told nothing of the queue pair that asks for it");
            return Err(self.problem(path, message).help("send from the side that connects"));
        }
        if !deed.is_of_connections() {
            return Ok(());
        }
        if step.repeat != 1 {
            return Err(self.problem(&join(path, "repeat"), "a queue pair is connected once"));
        }
        if !pair.by_cm {
            let message = format!("{name} is connected before the run begins");
            let help = "let a step of the pair `listen` and one of the other side `connect`";
            return Err(self.problem(path, message).help(help));
        }
        if is_answer && !self.listens(qp) {
            let message = format!("no request comes to {name}: it does not listen");
            return Err(self.problem(path, message).help("add an earlier step with `listen = { port = … }`"));
        }
        if *deed == Deed::Disconnect && pair.kind == QpKind::Ud {
            return Err(self.problem(&join(path, "disconnect"), "datagrams have no connection to end"));
        }
        let begins = |deed: &Deed| matches!(deed, Deed::Listen { .. } | Deed::Connect { .. });
        if begins(deed) && self.steps.iter().any(|other| other.qp == qp && begins(&other.deed)) {
            return Err(self
                .problem(path, format!("{name} listens or connects in an earlier step"))
                .help("a queue pair is connected once: give the second connection a [[pair]] of its own"));
        }
        let same = |deed: &Deed| match deed {
            Deed::Listen { .. } => self.listens(peer),
            Deed::Connect { .. } => self.connects(peer),
            _ => false,
        };
        if same(deed) {
            let message = format!("both sides of the pair do this: {} does it, too", self.qps[peer].name);
            return Err(self.problem(path, message).help("one side listens, the other connects"));
        }
        Ok(())
    }

    fn listens(&self, qp: usize) -> bool {
        self.steps.iter().any(|step| step.qp == qp && matches!(step.deed, Deed::Listen { .. }))
    }

    fn connects(&self, qp: usize) -> bool {
        self.steps.iter().any(|step| step.qp == qp && matches!(step.deed, Deed::Connect { .. }))
    }

    /// The connection manager takes the MTU of the cards: those of a pair that it connects get the pair's.
    pub(super) fn agree_on_mtu(&mut self) -> Result<(), Problem> {
        for pair in self.pairs.iter().filter(|pair| pair.by_cm) {
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
                    .problem("pair", message)
                    .help("give all pairs of these hosts the same `mtu`"));
            }
            for host in hosts {
                self.network.hosts[host].settings.mtu = pair.mtu;
            }
        }
        Ok(())
    }

    /// Whether a connection that a step makes has a message of these, this way.
    pub(super) fn sends_messages(
        &self,
        wanted: &dyn Fn(&CmMessage) -> bool,
        way: Option<(usize, Option<Direction>)>,
    ) -> bool {
        let mut connects = self.steps.iter().filter(|step| matches!(step.deed, Deed::Connect { .. }));
        connects.any(|step| {
            let plan = &self.qps[step.qp];
            let [asking, asked] = words::messages(self.pairs[plan.pair].kind.is_datagram());
            let [here, there] = [plan.host, self.qps[plan.peer].host];
            asking.iter().any(wanted) && self.passes(way, [here, there])
                || asked.iter().any(wanted) && self.passes(way, [there, here])
        })
    }

    /// Refuses a selector of messages that nobody sends this way.
    pub(super) fn check_messages(
        &self,
        matching: &Match,
        classes: Option<Classes>,
        way: Option<(usize, Option<Direction>)>,
        path: &str,
    ) -> Result<(), Problem> {
        let is_about_messages = matching.cm.is_some() || matching.class == Some(ClassName::Cm);
        if !is_about_messages || self.is_open {
            return Ok(());
        }
        let never =
            |key: &str, why: &str| self.problem(&join(path, key), format!("this rule can never fire: {why}"));
        if matching.qp.is_some() {
            return Err(never("qp", "messages of the connection manager are from QP1 to QP1"));
        }
        let key = if matching.cm.is_some() { "cm" } else { "class" };
        let Some(classes) = classes else { return Ok(()) };
        let wanted = |message: &CmMessage| classes.contains(Class::Cm(*message));
        match self.sends_messages(&wanted, way) {
            true => Ok(()),
            false => Err(never(key, "no connection that a step makes has such a message this way")
                .help("look at the direction of `on`, the transport of the pair, and which step connects")),
        }
    }
}
