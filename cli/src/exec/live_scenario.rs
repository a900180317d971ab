//! A scenario on the cards of a daemon, while real programs use them.

use softhca::{Counters, DaemonControl, PortState, Recovery, RuleCounters, RuleId};
use softhca_scenarios::live::{self, LiveScenario, PortControl};
use softhca_scenarios::{Outcome, Plan};
use softhca_trace::log::Entry;
use std::time::{Duration, Instant};

/// A plan that stands on a daemon's cards.
pub struct DaemonScenario<'p> {
    plan: &'p Plan,
    live: LiveScenario<'p>,
    started: Instant,
    counters_before: Vec<Counters>,
}

/// What a plan wants of a daemon: its hosts, and what a lost packet does if the file says so.
pub fn required_settings(
    plan: &Plan,
    asked: Option<Recovery>,
) -> Result<(Vec<String>, Option<Recovery>), String> {
    let hosts = plan.hosts.iter().map(|host| host.name.clone()).collect();
    let mut wanted = asked;
    for host in &plan.hosts {
        match (host.configured_recovery, wanted) {
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

struct DaemonPorts<'a> {
    plan: &'a Plan,
    connection: &'a mut DaemonControl,
}

impl PortControl for DaemonPorts<'_> {
    fn set_port(&mut self, host: usize, port: live::PortState) -> Result<(), String> {
        let state = match port {
            live::PortState::Up => PortState::Active,
            live::PortState::Down => PortState::Down,
        };
        let host = &self.plan.hosts[host].name;
        self.connection.set_port_state(host, state).map_err(|error| format!("{host}: {error}"))
    }
}

impl<'p> DaemonScenario<'p> {
    /// Puts the rules on the cards. Queue pairs that connect from now on get the names of the file.
    pub fn load(plan: &'p Plan, connection: &mut DaemonControl) -> Result<DaemonScenario<'p>, String> {
        let live = LiveScenario::new(plan)?;
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
            connection.assign_roles(&host.name, plan.seed, &live.roles(index)).map_err(told)?;
            connection.add_rules(&host.name, plan.seed, &live.rules(index)).map_err(told)?;
        }
        Ok(DaemonScenario { plan, live, started: Instant::now(), counters_before: before })
    }

    /// Has everything happen whose time has come; tells how long until the next.
    pub fn run_due_actions(&mut self, connection: &mut DaemonControl) -> Option<Duration> {
        let now = self.started.elapsed();
        self.live.run_due(now.as_nanos() as u64, &mut DaemonPorts { plan: self.plan, connection });
        self.live.next_due().map(|at| Duration::from_nanos(at).saturating_sub(now))
    }

    /// Takes an entry of the daemon's log.
    pub fn on_entry(&mut self, entry: &Entry) {
        self.live.on_log_entry(entry);
    }

    /// A program of the plan ended.
    pub fn on_exit(&mut self, command: usize, code: i32, said: String) {
        self.live.on_exit(command, code, said);
    }

    /// Takes the rules away, and judges.
    pub fn finish(self, connection: &mut DaemonControl) -> Result<Outcome, String> {
        let told = |error: softhca::Error| error.to_string();
        let (mut tallies, mut counters): (Vec<(RuleId, RuleCounters)>, _) = (Vec::new(), Vec::new());
        for (host, before) in self.plan.hosts.iter().zip(&self.counters_before) {
            let rules = connection.rules(&host.name).map_err(told)?;
            tallies.extend(rules.into_iter().map(|(rule, tally)| (rule.id, tally)));
            counters.push(connection.counters(Some(&host.name)).map_err(told)?.since(before));
            connection.clear_rules(&host.name).map_err(told)?;
        }
        Ok(self.live.evaluate(&tallies, counters))
    }
}
