//! A scenario on the hosts of a daemon while real programs use them.

use super::daemon::StartCommand;
use super::events::DaemonEvents;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use softhca::fault::{FaultTrigger, InjectedEvent, Rule, RuleCounters, RuleId};
use softhca::{Counters, DaemonControl, PortState, Profile, Recovery};
use softhca_control::ProcessWatch;
use softhca_fabric::LinkState;
use softhca_scenarios::live::{Effect, HostControl, LiveScenario};
use softhca_scenarios::plan::Change;
use softhca_scenarios::{Outcome, Plan};
use std::time::{Duration, Instant};

/// How often the counters of rules are looked at if faults wait for them.
const TRIGGER_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A plan that is loaded on a daemon.
pub struct DaemonScenario<'p> {
    pub scenario: LiveScenario<'p>,
    started: Instant,
    state: DaemonState<'p>,
}

/// The daemon of a plan, which faults can kill and start again.
struct DaemonState<'p> {
    plan: &'p Plan,
    name: Option<String>,
    counters_before: Vec<Counters>,
    /// The hosts whose programs were killed to start again.
    restarting: Vec<usize>,
    /// A fault killed the daemon, and no other one runs.
    is_daemon_gone: bool,
    /// How to start another daemon, which is due.
    restart: Option<StartCommand>,
    /// The counters of daemons that faults killed.
    counted: FinalCounters,
}

/// The counters of all rules, and those of each host.
type FinalCounters = (Vec<(RuleId, RuleCounters)>, Vec<Counters>);

impl DaemonState<'_> {
    /// Adds what the daemon has counted since the start of the scenario.
    fn count(&mut self, connection: &mut DaemonControl) -> Result<(), softhca::Error> {
        let (rule_counters, host_counters) = &mut self.counted;
        host_counters.resize(self.plan.hosts.len(), Counters::default());
        for (index, host) in self.plan.own_hosts() {
            let (before, sum) = (&self.counters_before[index], &mut host_counters[index]);
            let rules = connection.rules(&host.name)?;
            rule_counters.extend(rules.into_iter().map(|(rule, counters)| (rule.id, counters)));
            sum.add(&connection.counters(Some(&host.name))?.since(before));
        }
        Ok(())
    }
}

/// The settings of a daemon that a plan and the options of a command require.
#[derive(Default)]
pub struct RequiredSettings {
    pub hosts: Vec<String>,
    pub cards: Option<usize>,
    pub profile: Option<&'static Profile>,
    pub recovery: Option<Recovery>,
}

/// The settings that a plan requires beside those of the options.
pub fn required_settings(plan: &Plan, requested: RequiredSettings) -> Result<RequiredSettings, String> {
    let first_cards = plan.own_hosts().filter(|(index, _)| index % plan.cards == 0);
    let hosts = first_cards.map(|(_, host)| host.name.clone()).collect();
    let RequiredSettings { cards, mut profile, mut recovery, .. } = requested;
    if let Some(other) = cards.filter(|cards| plan.cards > 1 && *cards != plan.cards) {
        return Err(format!(
            "the scenario has {} cards for each host, but `--cards` has {other}",
            plan.cards
        ));
    }
    let cards = cards.or((plan.cards > 1).then_some(plan.cards));
    for host in &plan.hosts {
        match (host.configured_profile, profile) {
            (Some(own), Some(other)) if own != other => {
                return Err(format!(
                    "{} has profile {own}, but another host or `--profile` has {other}: all hosts of a daemon share one profile",
                    host.name
                ));
            }
            (Some(own), _) => profile = Some(own),
            (None, _) => {}
        }
        match (host.configured_recovery, recovery) {
            (Some(own), Some(other)) if own != other => {
                let (own, other) = (own.name(), other.name());
                return Err(format!(
                    "{} has recovery {own}, but another host or `--recovery` has {other}",
                    host.name
                ) + ": all hosts of a daemon share one recovery mode");
            }
            (Some(own), _) => recovery = Some(own),
            (None, _) => {}
        }
    }
    Ok(RequiredSettings { hosts, cards, profile, recovery })
}

/// The programs of each host, by index in the plan.
pub type ProgramsOfHosts = Vec<(usize, Pid)>;

/// Whether a child process has ended; its parent may not have waited for it yet.
fn has_ended(program: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    matches!(waitid(WaitId::Pid(program), options), Ok(Some(_)))
}

struct DaemonHosts<'a, 'p> {
    state: &'a mut DaemonState<'p>,
    connection: &'a mut DaemonControl,
    programs: &'a ProgramsOfHosts,
    events: &'a mut DaemonEvents,
}

impl DaemonHosts<'_, '_> {
    fn raise_event(&mut self, host: usize, event: InjectedEvent) -> Result<(), String> {
        let host = &self.state.plan.hosts[host].name;
        self.connection.raise_event(host, event).map_err(|error| format!("{host}: {}: {error}", event.name()))
    }

    /// Sends a signal to the programs of a host, unless they have ended.
    fn signal(&self, host: usize, signal: Signal) -> Effect {
        let of_host = self.programs.iter().filter(|(of, _)| *of == host).map(|(_, program)| *program);
        let reached =
            of_host.filter(|program| !has_ended(*program) && kill_process(*program, signal).is_ok());
        if reached.count() > 0 { Effect::Applied } else { Effect::Nothing }
    }

    fn kill_daemon(&mut self, restart: bool) -> Result<(), String> {
        if self.state.is_daemon_gone {
            return Err("cannot kill the daemon: another fault killed it".into());
        }
        let message = |error: softhca::Error| format!("cannot kill the daemon: {error}");
        self.state.count(self.connection).map_err(message)?;
        self.events.stop(self.connection).map_err(message)?;
        if restart {
            self.state.restart = Some(StartCommand::of(self.connection)?);
        }
        let number = self.connection.process_id();
        let failed = |error: std::io::Error| format!("cannot kill the daemon: {error}");
        let watch = ProcessWatch::new(number).map_err(failed)?;
        if let Some(daemon) = Pid::from_raw(number as i32) {
            kill_process(daemon, Signal::KILL).map_err(|error| failed(error.into()))?;
        }
        watch.wait();
        self.state.is_daemon_gone = true;
        Ok(())
    }

    fn set_port(&mut self, host: usize, state: LinkState) -> Result<(), String> {
        let state = match state {
            LinkState::Up => PortState::Active,
            LinkState::Down => PortState::Down,
        };
        let host = &self.state.plan.hosts[host].name;
        self.connection.set_port_state(host, state).map_err(|error| format!("{host}: {error}"))
    }
}

impl HostControl for DaemonHosts<'_, '_> {
    fn apply(&mut self, _: u64, change: &Change) -> Result<Effect, String> {
        match *change {
            Change::LinkState { link, state, .. } => {
                let plan = self.state.plan;
                let mut hosts = plan.hosts_of_link(link).filter(|host| !plan.hosts[*host].is_foreign);
                hosts.try_for_each(|host| self.set_port(host, state))?;
            }
            Change::AsyncEvent { host, event, .. } => self.raise_event(host, event)?,
            Change::KillProgram { host } => return Ok(self.signal(host, Signal::KILL)),
            Change::RestartProgram { host } => {
                let effect = self.signal(host, Signal::KILL);
                if effect == Effect::Applied {
                    self.state.restarting.push(host);
                }
                return Ok(effect);
            }
            Change::Stall { host, .. } => return Ok(self.signal(host, Signal::STOP)),
            Change::StallEnd { host } => return Ok(self.signal(host, Signal::CONT)),
            Change::KillDaemon { restart } => self.kill_daemon(restart)?,
            _ => return Err(format!("not possible for real programs: {change:?}")),
        }
        Ok(Effect::Applied)
    }

    fn add_rule(&mut self, links: &[usize], rule: &Rule, name: &str) -> Result<(), String> {
        let plan = self.state.plan;
        for (index, host) in plan.own_hosts() {
            for rule in plan.rule_at_host(index, links, rule) {
                let added = self.connection.add_rules(&host.name, plan.seed, &[(rule, name)]);
                added.map_err(|error| format!("{}: {error}", host.name))?;
            }
        }
        Ok(())
    }

    fn note_trigger(&mut self, host: usize, trigger: &FaultTrigger) -> Result<(), String> {
        let host = &self.state.plan.hosts[host].name;
        self.connection.note_trigger(host, trigger.clone()).map_err(|error| format!("{host}: {error}"))
    }
}

impl<'p> DaemonScenario<'p> {
    /// Adds the fault rules to the hosts. Queue pairs that connect from now on get the names of the scenario.
    pub fn load(
        plan: &'p Plan,
        connection: &mut DaemonControl,
        daemon: Option<&str>,
    ) -> Result<DaemonScenario<'p>, String> {
        let scenario = LiveScenario::new(plan)?;
        let mut before = vec![Counters::default(); plan.hosts.len()];
        let message = |error: softhca::Error| error.to_string();
        for (index, host) in plan.own_hosts() {
            if !connection.rules(&host.name).map_err(message)?.is_empty() {
                return Err(format!(
                    "{} already has the fault rules of another scenario: use another daemon with `--name`",
                    host.name
                ));
            }
            before[index] = connection.counters(Some(&host.name)).map_err(message)?;
        }
        let state = DaemonState {
            plan,
            name: daemon.map(str::to_owned),
            counters_before: before,
            restarting: Vec::new(),
            is_daemon_gone: false,
            restart: None,
            counted: FinalCounters::default(),
        };
        let live = DaemonScenario { scenario, started: Instant::now(), state };
        live.add_rules(connection)?;
        Ok(live)
    }

    /// Gives the hosts their rules and roles.
    fn add_rules(&self, connection: &mut DaemonControl) -> Result<(), String> {
        let message = |error: softhca::Error| error.to_string();
        let seed = self.state.plan.seed;
        for (index, host) in self.state.plan.own_hosts() {
            connection.assign_roles(&host.name, seed, &self.scenario.roles(index)).map_err(message)?;
            connection.add_rules(&host.name, seed, &self.scenario.rules(index)).map_err(message)?;
        }
        Ok(())
    }

    /// Starts a daemon in place of one that a fault killed.
    fn restart_daemon(
        &mut self,
        command: &StartCommand,
        connection: &mut DaemonControl,
        events: &mut DaemonEvents,
    ) -> Result<(), String> {
        *connection = command.start_again(self.state.name.as_deref())?;
        self.state.counters_before.fill(Counters::default());
        while read_events(events, Some(self)) {}
        events.start_again(connection)?;
        self.add_rules(connection)?;
        self.state.is_daemon_gone = false;
        Ok(())
    }

    /// The plan.
    pub const fn plan(&self) -> &'p Plan {
        self.state.plan
    }

    /// Runs the actions that are due; returns the time until the next one.
    pub fn run_due_actions(
        &mut self,
        connection: &mut DaemonControl,
        programs: &ProgramsOfHosts,
        events: &mut DaemonEvents,
    ) -> Option<Duration> {
        if let Some(command) = self.state.restart.take()
            && let Err(why) = self.restart_daemon(&command, connection, events)
        {
            self.scenario.fail(format!("cannot start the daemon again: {why}"));
        }
        let waits = self.scenario.has_waiting_faults();
        let read_ns = self.started.elapsed().as_nanos() as u64;
        let mut counters = Vec::new();
        if waits && !self.state.is_daemon_gone {
            let rules = self.state.plan.own_hosts().filter_map(|(_, host)| connection.rules(&host.name).ok());
            counters.extend(rules.flatten().map(|(rule, counters)| (rule.id, counters)));
        }
        // After every packet that is counted: a fault lasts for its whole time from then on.
        let now = self.started.elapsed();
        let now_ns = now.as_nanos() as u64;
        self.scenario.on_rule_counters(read_ns, &counters);
        let was_gone = self.state.is_daemon_gone;
        let mut hosts = DaemonHosts { state: &mut self.state, connection, programs, events };
        self.scenario.run_due(now_ns, &mut hosts);
        self.scenario.check_held_packets(self.started.elapsed().as_nanos() as u64);
        if self.state.is_daemon_gone && !was_gone {
            self.scenario.forget_queue_pairs();
        }
        let due = self.scenario.next_due().map(|at| Duration::from_nanos(at).saturating_sub(now));
        let poll = waits.then_some(TRIGGER_POLL_INTERVAL);
        let restart = self.state.restart.is_some().then_some(Duration::ZERO);
        [due, poll, restart].into_iter().flatten().min()
    }

    /// Whether the program of a host, which ended, must start again.
    pub fn take_restart(&mut self, host: usize) -> bool {
        let restarting = &mut self.state.restarting;
        restarting.iter().position(|other| *other == host).map(|index| restarting.remove(index)).is_some()
    }

    /// Whether a fault killed the daemon. Its recording is complete.
    pub const fn is_daemon_gone(&self) -> bool {
        self.state.is_daemon_gone
    }

    /// Removes the fault rules and evaluates the expectations.
    pub fn finish(mut self, connection: &mut DaemonControl) -> Result<Outcome, String> {
        let message = |error: softhca::Error| error.to_string();
        if !self.state.is_daemon_gone {
            self.state.count(connection).map_err(message)?;
            let mut hosts = self.state.plan.own_hosts();
            hosts.try_for_each(|(_, host)| connection.clear_rules(&host.name)).map_err(message)?;
        }
        let (rule_counters, counters) = self.state.counted;
        Ok(self.scenario.evaluate(rule_counters, counters))
    }
}

/// Reads new events of a daemon and hands them to the scenario. Returns whether there are more.
pub fn read_events(events: &mut DaemonEvents, live: Option<&mut DaemonScenario<'_>>) -> bool {
    let read = match live {
        Some(live) => {
            let read = events.read_new(&mut |now, names, event| live.scenario.on_event(now, names, event));
            if let Some(gap) = events.gap() {
                live.scenario.fail(gap);
            }
            read
        }
        None => events.read_new(&mut |_, _, _| {}),
    };
    read.unwrap_or_else(|error| {
        warnln!("cannot read the events of the daemon: {error}");
        false
    })
}
