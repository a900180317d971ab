//! A scenario on the cards of a daemon, while real programs use them.

use softhca::{Counters, DaemonControl, PortState, Recovery, RuleId, Tally};
use softhca_scenarios::live::{Cards, Live, Port};
use softhca_scenarios::{Outcome, Plan};
use softhca_trace::log::Entry;
use std::time::{Duration, Instant};

/// A plan that stands on a daemon's cards.
pub struct Stage<'p> {
    plan: &'p Plan,
    live: Live<'p>,
    started: Instant,
    before: Vec<Counters>,
}

/// What a plan wants of a daemon: its hosts, and what a lost packet does if the file says so.
pub fn wishes(plan: &Plan, asked: Option<Recovery>) -> Result<(Vec<String>, Option<Recovery>), String> {
    let hosts = plan.hosts.iter().map(|host| host.name.clone()).collect();
    let mut wanted = asked;
    for host in &plan.hosts {
        match (host.said_recovery, wanted) {
            (Some(said), Some(other)) if said != other => {
                let (said, other) = (said.name(), other.name());
                return Err(format!("{} is to have recovery {said}, and another {other}", host.name)
                    + ": the cards of a daemon, and `--recovery`, have one");
            }
            (Some(said), _) => wanted = Some(said),
            (None, _) => {}
        }
    }
    Ok((hosts, wanted))
}

struct Ports<'a> {
    plan: &'a Plan,
    connection: &'a mut DaemonControl,
}

impl Cards for Ports<'_> {
    fn set_port(&mut self, host: usize, port: Port) -> Result<(), String> {
        let state = match port {
            Port::Up => PortState::Active,
            Port::Down => PortState::Down,
        };
        let host = &self.plan.hosts[host].name;
        self.connection.set_port(host, state).map_err(|error| format!("{host}: {error}"))
    }
}

impl<'p> Stage<'p> {
    /// Puts the rules on the cards. Queue pairs that connect from now on get the names of the file.
    pub fn load(plan: &'p Plan, connection: &mut DaemonControl) -> Result<Stage<'p>, String> {
        let live = Live::new(plan)?;
        let mut before = Vec::new();
        let told = |error: softhca::Error| error.to_string();
        for (index, host) in plan.hosts.iter().enumerate() {
            if !connection.rules(&host.name).map_err(told)?.is_empty() {
                return Err(format!(
                    "{} is under the rules of another scenario: `--name` has a daemon beside it",
                    host.name
                ));
            }
            before.push(connection.counters(Some(&host.name)).map_err(told)?);
            connection.name_flows(&host.name, plan.seed, &live.roles(index)).map_err(told)?;
            connection.add_rules(&host.name, plan.seed, &live.rules(index)).map_err(told)?;
        }
        Ok(Stage { plan, live, started: Instant::now(), before })
    }

    /// Has everything happen whose time has come; tells how long until the next.
    pub fn act(&mut self, connection: &mut DaemonControl) -> Option<Duration> {
        let now = self.started.elapsed();
        self.live.act(now.as_nanos() as u64, &mut Ports { plan: self.plan, connection });
        self.live.next_at().map(|at| Duration::from_nanos(at).saturating_sub(now))
    }

    /// Takes an entry of the daemon's log.
    pub fn hear(&mut self, entry: &Entry) {
        self.live.hear(entry);
    }

    /// A program of the plan ended.
    pub fn exited(&mut self, command: usize, code: i32, said: String) {
        self.live.exited(command, code, said);
    }

    /// Takes the rules away, and judges.
    pub fn finish(self, connection: &mut DaemonControl) -> Result<Outcome, String> {
        let told = |error: softhca::Error| error.to_string();
        let (mut tallies, mut counters): (Vec<(RuleId, Tally)>, _) = (Vec::new(), Vec::new());
        for (host, before) in self.plan.hosts.iter().zip(&self.before) {
            let rules = connection.rules(&host.name).map_err(told)?;
            tallies.extend(rules.into_iter().map(|(rule, tally)| (rule.id, tally)));
            counters.push(connection.counters(Some(&host.name)).map_err(told)?.since(before));
            connection.clear_rules(&host.name).map_err(told)?;
        }
        Ok(self.live.judge(&tallies, counters))
    }
}
