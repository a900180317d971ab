//! A scenario on the hosts of a daemon while real programs use them.

use super::daemon::StartCommand;
use super::event_log::DaemonEventLog;
use rustix::process::{Pid, Signal, kill_process};
use softhca::fault::{FaultTrigger, InjectedEvent, ProgramFaults, Rule, RuleCounters, RuleId};
use softhca::{Counters, DaemonControl, Device, PortState, Recovery};
use softhca_fabric::LinkState;
use softhca_queue::control::ProcessWatch;
use softhca_scenarios::live::{HostControl, LiveScenario, ProgramSignal};
use softhca_scenarios::{Outcome, Plan};
use softhca_trace::log::Entry;
use std::time::{Duration, Instant};

/// How often events, faults and rules are looked at if faults wait for them.
const TRIGGER_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A plan that is loaded on a daemon.
pub struct DaemonScenario<'p> {
    plan: &'p Plan,
    live: LiveScenario<'p>,
    started: Instant,
    counters_before: Vec<Counters>,
    daemon: Option<String>,
    /// The hosts whose programs were killed to start again.
    restarting: Vec<usize>,
    /// A fault killed the daemon, and no other one runs.
    is_daemon_gone: bool,
    /// How to start another daemon, which is due.
    restart: Option<StartCommand>,
    /// What daemons had counted that faults killed.
    counted: FinalCounters,
}

/// The counters of all rules, and those of each host.
type FinalCounters = (Vec<(RuleId, RuleCounters)>, Vec<Counters>);

/// Reads the counters of the rules and hosts of a plan, those of hosts since `before`.
fn read_counters(
    plan: &Plan,
    connection: &mut DaemonControl,
    before: &[Counters],
) -> Result<FinalCounters, softhca::Error> {
    let (mut rule_counters, mut counters): FinalCounters = Default::default();
    for (host, before) in plan.hosts.iter().zip(before) {
        let rules = connection.rules(&host.name)?;
        rule_counters.extend(rules.into_iter().map(|(rule, counters)| (rule.id, counters)));
        counters.push(connection.counters(Some(&host.name))?.since(before));
    }
    Ok((rule_counters, counters))
}

fn add_counters(all: &mut FinalCounters, (rules, hosts): FinalCounters) {
    all.0.extend(rules);
    all.1.resize(hosts.len(), Counters::default());
    all.1.iter_mut().zip(&hosts).for_each(|(sum, counters)| sum.add(counters));
}

/// The settings of a daemon that a plan and the options of a command require.
#[derive(Default)]
pub struct RequiredSettings {
    pub hosts: Vec<String>,
    pub cards: Option<usize>,
    pub recovery: Option<Recovery>,
}

/// The settings that a plan requires beside those of the options.
pub fn required_settings(plan: &Plan, requested: RequiredSettings) -> Result<RequiredSettings, String> {
    let hosts = plan.hosts.iter().step_by(plan.cards).map(|host| host.name.clone()).collect();
    let RequiredSettings { cards, mut recovery, .. } = requested;
    if let Some(other) = cards.filter(|cards| plan.cards > 1 && *cards != plan.cards) {
        return Err(format!(
            "the scenario has {} cards for each host, but `--cards` has {other}",
            plan.cards
        ));
    }
    let cards = cards.or((plan.cards > 1).then_some(plan.cards));
    for host in &plan.hosts {
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
    Ok(RequiredSettings { hosts, cards, recovery })
}

/// The programs of each host, by index in the plan.
pub type ProgramsOfHosts = Vec<(usize, Pid)>;

struct DaemonHosts<'a> {
    plan: &'a Plan,
    connection: &'a mut DaemonControl,
    daemon: Option<&'a str>,
    programs: &'a ProgramsOfHosts,
    restarting: &'a mut Vec<usize>,
    counters_before: &'a [Counters],
    is_daemon_gone: &'a mut bool,
    restart: &'a mut Option<StartCommand>,
    counted: &'a mut FinalCounters,
}

impl HostControl for DaemonHosts<'_> {
    fn raise_event(&mut self, host: usize, event: InjectedEvent) -> Result<(), String> {
        let host = &self.plan.hosts[host].name;
        self.connection.raise_event(host, event).map_err(|error| format!("{host}: {}: {error}", event.name()))
    }

    fn signal(&mut self, host: usize, signal: ProgramSignal) -> Result<(), String> {
        if signal == ProgramSignal::Restart {
            self.restarting.push(host);
        }
        let signal = match signal {
            ProgramSignal::Kill | ProgramSignal::Restart => Signal::KILL,
            ProgramSignal::Stop => Signal::STOP,
            ProgramSignal::Continue => Signal::CONT,
        };
        for (_, program) in self.programs.iter().filter(|(of, _)| *of == host) {
            // It may have ended meanwhile.
            let _ = kill_process(*program, signal);
        }
        Ok(())
    }

    fn kill_daemon(&mut self, restart: bool) -> Result<(), String> {
        if *self.is_daemon_gone {
            return Err("cannot kill the daemon: another fault killed it".into());
        }
        let message = |error: softhca::Error| format!("cannot kill the daemon: {error}");
        let counters = read_counters(self.plan, self.connection, self.counters_before).map_err(message)?;
        add_counters(self.counted, counters);
        self.connection.stop_recording().map_err(message)?;
        if restart {
            *self.restart = Some(StartCommand::of(self.connection)?);
        }
        let number = self.connection.process_id();
        let failed = |error: std::io::Error| format!("cannot kill the daemon: {error}");
        let watch = ProcessWatch::new(number).map_err(failed)?;
        if let Some(daemon) = Pid::from_raw(number as i32) {
            kill_process(daemon, Signal::KILL).map_err(|error| failed(error.into()))?;
        }
        watch.wait();
        *self.is_daemon_gone = true;
        Ok(())
    }

    fn add_rule(&mut self, host: usize, rule: Rule, name: &str) -> Result<(), String> {
        let host = &self.plan.hosts[host].name;
        let added = self.connection.add_rules(host, self.plan.seed, &[(rule, name)]);
        added.map_err(|error| format!("{host}: {error}"))
    }

    fn note_trigger(&mut self, host: usize, trigger: &FaultTrigger) -> Result<(), String> {
        let host = &self.plan.hosts[host].name;
        let noted = Device::daemon_host(self.daemon, Some(host))
            .and_then(|device| device.open().note_trigger(trigger.clone()));
        noted.map_err(|error| format!("{host}: {error}"))
    }

    fn set_port(&mut self, host: usize, state: LinkState) -> Result<(), String> {
        let state = match state {
            LinkState::Up => PortState::Active,
            LinkState::Down => PortState::Down,
        };
        let host = &self.plan.hosts[host].name;
        self.connection.set_port_state(host, state).map_err(|error| format!("{host}: {error}"))
    }
}

impl<'p> DaemonScenario<'p> {
    /// Adds the fault rules to the hosts. Queue pairs that connect from now on get the names of the scenario.
    pub fn load(
        plan: &'p Plan,
        connection: &mut DaemonControl,
        daemon: Option<&str>,
    ) -> Result<DaemonScenario<'p>, String> {
        let live = LiveScenario::new(plan)?;
        let mut before = Vec::new();
        let message = |error: softhca::Error| error.to_string();
        for host in &plan.hosts {
            if !connection.rules(&host.name).map_err(message)?.is_empty() {
                return Err(format!(
                    "{} already has the fault rules of another scenario: use another daemon with `--name`",
                    host.name
                ));
            }
            before.push(connection.counters(Some(&host.name)).map_err(message)?);
        }
        let scenario = DaemonScenario {
            plan,
            live,
            started: Instant::now(),
            counters_before: before,
            daemon: daemon.map(str::to_owned),
            restarting: Vec::new(),
            is_daemon_gone: false,
            restart: None,
            counted: FinalCounters::default(),
        };
        scenario.add_rules(connection)?;
        Ok(scenario)
    }

    /// Gives the hosts their rules and roles.
    fn add_rules(&self, connection: &mut DaemonControl) -> Result<(), String> {
        let message = |error: softhca::Error| error.to_string();
        let seed = self.plan.seed;
        for (index, host) in self.plan.hosts.iter().enumerate() {
            connection.assign_roles(&host.name, seed, &self.live.roles(index)).map_err(message)?;
            connection.add_rules(&host.name, seed, &self.live.rules(index)).map_err(message)?;
        }
        Ok(())
    }

    /// Starts a daemon in place of one that a fault killed.
    fn restart_daemon(
        &mut self,
        command: &StartCommand,
        connection: &mut DaemonControl,
        events: Option<&mut DaemonEventLog>,
    ) -> Result<(), String> {
        *connection = command.start_again(self.daemon.as_deref())?;
        self.counters_before.fill(Counters::default());
        if let Some(events) = events {
            read_events(events, Some(self), false);
            events.start_again(connection)?;
        }
        self.add_rules(connection)?;
        self.is_daemon_gone = false;
        Ok(())
    }

    /// The plan.
    pub const fn plan(&self) -> &'p Plan {
        self.plan
    }

    /// Runs the actions that are due; returns the time until the next one.
    pub fn run_due_actions(
        &mut self,
        connection: &mut DaemonControl,
        programs: &ProgramsOfHosts,
        events: Option<&mut DaemonEventLog>,
    ) -> Option<Duration> {
        if let Some(command) = self.restart.take()
            && let Err(why) = self.restart_daemon(&command, connection, events)
        {
            self.live.fail(format!("cannot start the daemon again: {why}"));
        }
        let now = self.started.elapsed();
        let now_ns = now.as_nanos() as u64;
        let waits = self.live.has_waiting_faults();
        if waits && !self.is_daemon_gone {
            let rules = self.plan.hosts.iter().filter_map(|host| connection.rules(&host.name).ok());
            let counters: Vec<_> = rules.flatten().map(|(rule, counters)| (rule.id, counters)).collect();
            self.live.on_rule_counters(now_ns, &counters);
        }
        let (daemon, restarting) = (self.daemon.as_deref(), &mut self.restarting);
        let mut hosts = DaemonHosts {
            plan: self.plan,
            connection,
            daemon,
            programs,
            restarting,
            counters_before: &self.counters_before,
            is_daemon_gone: &mut self.is_daemon_gone,
            restart: &mut self.restart,
            counted: &mut self.counted,
        };
        self.live.run_due(now_ns, &mut hosts);
        let due = self.live.next_due().map(|at| Duration::from_nanos(at).saturating_sub(now));
        let poll = waits.then_some(TRIGGER_POLL_INTERVAL);
        let restart = self.restart.is_some().then_some(Duration::ZERO);
        [due, poll, restart].into_iter().flatten().min()
    }

    /// Whether the program of a host, which ended, must start again.
    pub fn take_restart(&mut self, host: usize) -> bool {
        let place = self.restarting.iter().position(|other| *other == host);
        place.map(|place| self.restarting.remove(place)).is_some()
    }

    /// Whether a fault killed the daemon. Its recording is complete.
    pub const fn is_daemon_gone(&self) -> bool {
        self.is_daemon_gone
    }

    /// Records the exit code of the program of `softhca exec`.
    pub fn on_program_exit(&mut self, code: u8) {
        self.live.on_program_exit(code);
    }

    /// The faults of the programs of a host.
    pub fn program_faults(&self, host: usize) -> Option<ProgramFaults> {
        self.live.program_faults(host)
    }

    /// Processes an entry of the daemon's log.
    pub fn on_entry(&mut self, entry: &Entry) {
        self.live.on_log_entry(entry);
    }

    /// Records the exit of a program of the plan.
    pub fn on_exit(&mut self, command: usize, code: i32, output: String) {
        self.live.on_exit(command, code, output);
    }

    /// Removes the fault rules and evaluates the expectations.
    pub fn finish(self, connection: &mut DaemonControl) -> Result<Outcome, String> {
        let message = |error: softhca::Error| error.to_string();
        let mut counted = self.counted;
        if !self.is_daemon_gone {
            let counters = read_counters(self.plan, connection, &self.counters_before).map_err(message)?;
            add_counters(&mut counted, counters);
            self.plan
                .hosts
                .iter()
                .try_for_each(|host| connection.clear_rules(&host.name))
                .map_err(message)?;
        }
        Ok(self.live.evaluate(counted.0, counted.1))
    }
}

/// Reads the new entries of a daemon's log and hands them to the scenario.
pub fn read_events(events: &mut DaemonEventLog, scenario: Option<&mut DaemonScenario<'_>>, lint: bool) {
    let read = match scenario {
        Some(scenario) => {
            events.read_new(lint, LiveScenario::uses_event, &mut |entry| scenario.on_entry(entry))
        }
        None => events.read_new(lint, |_| false, &mut |_| {}),
    };
    if let Err(error) = read {
        errln!("softhca: cannot read the event log: {error}");
    }
}
