//! `softhca exec` and `softhca env`: unmodified programs on an emulated host.
//!
//! Exit codes are env(1)'s: the program's own, 125 if `softhca exec` failed, 126 if the program cannot be run, 127 if
//! it does not exist. Exit code 123 means that an expectation of a scenario does not hold, or that `--strict` found an error.

mod daemon;
mod device_use;
mod embedded_logs;
mod events;
mod infiniband;
mod library;
mod live_scenario;
mod own_path;
mod program;
mod readiness;
mod scenario_programs;
pub mod sweep_support;
mod sysfs;

pub use own_path::own_path;
pub use program::{NextPoll, run as run_program};
pub use scenario_programs::run_programs;
pub use sysfs::check_allowed as check_view_allowed;

use crate::exit_code::{self, CommandResult, error};
use crate::subnet::FabricOptions;
use crate::{output, scenario, shell};
use clap::Args;
use daemon::{DaemonLifetime, DaemonRequirements};
use device_use::DeviceUse;
use embedded_logs::EmbeddedLogs;
use events::{DaemonEvents, RunAnalysis};
use live_scenario::{DaemonScenario, RequiredSettings};
use program::ExecError;
use rustix::process::Pid;
use softhca::fault::FAULTS_VARIABLE;
use softhca::{DATA_PATH_VARIABLE, DaemonControl, HOST_VARIABLE, NAME_VARIABLE};
use softhca_control::RuntimeDir;
use softhca_daemon::DataPath;
use softhca_scenarios::{ParameterValues, Plan, Scenario, Verdict};
use softhca_udp::ADDRESS_VARIABLE;
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sysfs::{View, ViewMethod};

/// The variable with which the C library adds the places of calls to the events of work requests.
const CALL_SITES_VARIABLE: &str = "SOFTHCA_CALL_SITES";
/// The library prints the reason of rejected calls: each once, if its value is `once`.
const EXPLAIN_VARIABLE: &str = "SOFTHCA_EXPLAIN";

/// The daemon and host that a program uses.
#[derive(Args)]
struct DaemonOptions {
    /// Host that the program runs on [default: the daemon's first host]
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    /// Cards of each host: softhca0, softhca1, … [default: 1]
    #[arg(long, value_name = "N", value_parser = crate::daemon::parse_cards)]
    cards: Option<usize>,
    /// Card whose behaviour the devices have where cards differ: softhca, rxe or mlx5
    #[arg(long, value_name = "CARD", value_parser = crate::daemon::parse_profile)]
    profile: Option<&'static softhca::Profile>,
    /// Recovery from packet loss: fatal, go-back-n or go-back-0 [default: that of the profile]
    #[arg(long, value_name = "MODE", value_parser = crate::daemon::parse_recovery)]
    recovery: Option<softhca::Recovery>,
    /// How a host's traffic to itself is carried: socket, or internal (faster, not visible to tcpdump)
    #[arg(long, value_name = "METHOD", value_parser = crate::daemon::parse_loopback)]
    loopback: Option<softhca::Loopback>,
    /// Which process executes the transport: the program itself (direct), or the daemon [default: direct where nothing needs the daemon]
    #[arg(long = "path", visible_alias = "data-path", value_name = "PROCESS", value_parser = crate::daemon::parse_data_path)]
    data_path: Option<DataPath>,
    /// Name of the daemon, if you run several
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    #[command(flatten)]
    fabric: FabricOptions,
}

/// Arguments of `softhca exec`.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    daemon: DaemonOptions,
    /// Apply the faults of this scenario file to the program and check its expectations at the end
    #[arg(long, value_name = "FILE")]
    scenario: Option<PathBuf>,
    /// Write the verdict of the scenario to this file as a JUnit report
    #[arg(long, value_name = "FILE", requires = "scenario")]
    junit: Option<PathBuf>,
    /// Print the verdict of the scenario as JSON: the last line of standard output
    #[arg(long, requires = "scenario")]
    json: bool,
    /// Write the packets of the daemon's hosts to this pcapng file until the program exits
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Only packets that match in the capture, such as 'nak || retransmission'
    #[arg(long, value_name = "EXPRESSION", requires = "capture", value_parser = crate::trace::parse_packet_filter)]
    filter: Option<softhca_trace::filter::Filter>,
    /// Write the events of the daemon's hosts to this file until the program exits; `softhca why` reads it
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Explain failed work requests at the end; implied by --scenario, --log and --lint
    #[arg(long)]
    why: bool,
    /// Warn about common mistakes in verbs programs while the program runs
    #[arg(long)]
    lint: bool,
    /// Like --lint, and exit with 123 if there is an error among the findings
    #[arg(long)]
    strict: bool,
    /// Do not show the emulated device in /sys and /dev; programs that look there find no RDMA device
    #[arg(long)]
    no_view: bool,
    /// How to show the emulated device in /sys and /dev: mount, or preload [default: mount where the kernel permits it]
    #[arg(long, value_name = "METHOD", conflicts_with = "no_view", value_parser = sysfs::parse_method)]
    view: Option<ViewMethod>,
    /// Load SoftHCA before all other libraries: for programs that bring their own libibverbs, as Python wheels do
    #[arg(long)]
    preload: bool,
    /// Program to run, with its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Arguments of `softhca env`.
#[derive(Args)]
pub struct EnvArguments {
    #[command(flatten)]
    daemon: DaemonOptions,
    /// Apply the faults of this scenario file to the programs; its expectations are not checked
    #[arg(long, value_name = "FILE", conflicts_with = "no_start")]
    scenario: Option<PathBuf>,
    /// Do not start a daemon
    #[arg(long)]
    no_start: bool,
}

impl DaemonOptions {
    /// The host that the options or the environment choose.
    fn chosen_host(&self) -> Option<String> {
        self.host.clone().or_else(|| std::env::var(HOST_VARIABLE).ok())
    }

    fn requirements(&self) -> DaemonRequirements<'_> {
        let (name, host) = (self.name.as_deref(), self.host.as_deref());
        let address = std::env::var(ADDRESS_VARIABLE).ok();
        let DaemonOptions { cards, profile, recovery, loopback, .. } = *self;
        let fabric = self.fabric.clone();
        DaemonRequirements { name, host, address, hosts: &[], cards, profile, recovery, loopback, fabric }
    }

    /// The hosts and settings that a daemon must have for these options, and for a scenario if there is one.
    fn required_settings(&self, plan: Option<&Plan>) -> Result<RequiredSettings, String> {
        let DaemonOptions { cards, profile, recovery, .. } = *self;
        let requested = RequiredSettings { hosts: Vec::new(), cards, profile, recovery };
        match plan {
            Some(plan) => live_scenario::required_settings(plan, requested),
            None => Ok(requested),
        }
    }

    /// The index of the program's host in a plan. Faults of the programs of other hosts would never happen.
    fn host_index(&self, plan: &Plan) -> Result<usize, String> {
        let name = self.chosen_host();
        let found = name
            .as_ref()
            .map_or(plan.own_hosts().next(), |name| plan.own_hosts().find(|(_, host)| host.name == *name));
        let found = found.map(|(index, _)| index);
        let names = || plan.hosts.iter().map(|host| host.name.as_str()).collect::<Vec<_>>().join(", ");
        let host = found.ok_or_else(|| format!("the scenario has no host {name:?}, only {}", names()))?;
        if let Some(other) =
            (0..plan.hosts.len()).find(|other| *other != host && plan.program_faults(*other).is_some())
        {
            let (own, other) = (&plan.hosts[host].name, &plan.hosts[other].name);
            return Err(format!(
                "the program runs on {own}, and the scenario has faults in the calls or completions of {other}: run it \
                 with `--host {other}`, or give both programs to the scenario (`command`) and use `softhca run --on udp`"
            ));
        }
        Ok(host)
    }

    /// The environment variables of a program whose libraries are in `folder`.
    fn environment(&self, folder: &Path) -> Vec<(&'static str, OsString)> {
        let mut variables = vec![("LD_LIBRARY_PATH", library::search_path(folder))];
        // NCCL 2.28 crashes in its GPU-initiated networking if no device is an mlx5 one, unless the proxy type is chosen.
        if std::env::var_os("NCCL_GIN_TYPE").is_none() {
            variables.push(("NCCL_GIN_TYPE", "2".into()));
        }
        variables.extend(self.name.as_ref().map(|name| (NAME_VARIABLE, name.into())));
        variables.extend(self.host.as_ref().map(|host| (HOST_VARIABLE, host.into())));
        variables.extend(self.data_path.map(|path| (DATA_PATH_VARIABLE, path.name().into())));
        variables
    }

    /// Replaces the fault rules of the hosts by those of a plan. Returns the variable with the faults of the program.
    fn load_faults(
        &self,
        plan: &Plan,
        connection: &mut DaemonControl,
    ) -> Result<Option<(&'static str, OsString)>, String> {
        let host = self.host_index(plan)?;
        for (_, other) in plan.own_hosts() {
            connection.clear_rules(&other.name).map_err(|error| error.to_string())?;
        }
        let live = DaemonScenario::load(plan, connection, self.name.as_deref())?;
        let faults = live.scenario.program_faults(host);
        Ok(faults.map(|faults| (FAULTS_VARIABLE, softhca_control::faults_to_text(&faults).into())))
    }

    /// Rejects `--path direct` if the daemon would execute the transport of the program.
    fn check_data_path(&self, connection: &DaemonControl) -> Result<(), String> {
        if self.data_path != Some(DataPath::Direct) {
            return Ok(());
        }
        let chosen = self.chosen_host();
        let mut devices = connection.hosts().iter();
        let device = devices.find(|device| chosen.as_ref().is_none_or(|host| device.host == *host));
        match device.filter(|device| device.data_path != DataPath::Direct.name()) {
            Some(device) => Err(format!(
                "--path direct: the daemon executes the transport of all programs on {}, because of its data_path, \
                 its [fabric], its congestion settings, or a kernel that does not share ports",
                device.host
            )),
            None => Ok(()),
        }
    }

    /// The folder with what the programs of the host see of `/sys` and `/dev`.
    fn view_root(&self, connection: &DaemonControl) -> Option<PathBuf> {
        let chosen = self.chosen_host();
        let host = chosen.or_else(|| connection.hosts().first().map(|device| device.host.clone()))?;
        let name = daemon::daemon_name(self.name.as_deref());
        Some(RuntimeDir::for_user().view(&name, &host)).filter(|root| root.is_dir())
    }
}

impl Arguments {
    /// Whether the linter reads the events.
    fn lints(&self) -> bool {
        self.lint || self.strict
    }
}

/// Runs `softhca exec`.
pub fn run(arguments: &Arguments) -> CommandResult {
    let code = execute(arguments).map_err(|failed| error(failed.code)(failed.message))?;
    Ok(ExitCode::from(code))
}

/// Prepares the daemon, the libraries and the scenario, runs the program and prints the results. All messages go to
/// standard error: standard output belongs to the program.
fn execute(arguments: &Arguments) -> Result<u8, ExecError> {
    let first = arguments.program[0].to_string_lossy();
    if first.starts_with('-') {
        return Err(format!("unknown option {first}; see `softhca exec --help`").into());
    }
    if arguments.daemon.fabric.is_infiniband() {
        return infiniband::execute(arguments);
    }
    let scenario = arguments.scenario.as_deref().map(scenario::read).transpose()?.map(Arc::new);
    let plan = match &scenario {
        Some(scenario) => {
            let plan = scenario.plan(&ParameterValues::new(), scenario.seed);
            let plan = plan.map_err(|problem| problem.to_string())?;
            if !plan.commands.is_empty() {
                let name = scenario.name();
                return Err(format!(
                    "{name}: the scenario starts programs itself: use `softhca run --on udp`"
                )
                .into());
            }
            Some(plan)
        }
        None => None,
    };
    let started = Instant::now();
    let path = program::find(&arguments.program[0])?;
    let folder = library::library_folder()?;
    let settings = arguments.daemon.required_settings(plan.as_ref())?;
    let RequiredSettings { ref hosts, cards, profile, recovery } = settings;
    let requirements =
        DaemonRequirements { hosts, cards, profile, recovery, ..arguments.daemon.requirements() };
    // The open connection keeps an auto-started daemon running until the program is done.
    let mut connection = daemon::connect_or_start(&requirements, DaemonLifetime::WhileUsed)?;
    arguments.daemon.check_data_path(&connection)?;
    let mut events = start_recording(&mut connection, arguments)?;
    let mut live = plan
        .as_ref()
        .map(|plan| DaemonScenario::load(plan, &mut connection, arguments.daemon.name.as_deref()))
        .transpose()?;
    let mut variables = arguments.daemon.environment(&folder);
    let program_host = plan.as_ref().map(|plan| arguments.daemon.host_index(plan)).transpose()?.unwrap_or(0);
    if let Some(faults) = live.as_ref().and_then(|live| live.scenario.program_faults(program_host)) {
        variables.push((FAULTS_VARIABLE, softhca_control::faults_to_text(&faults).into()));
    }
    let wants_reasons = arguments.why || arguments.lints();
    if wants_reasons && std::env::var_os(EXPLAIN_VARIABLE).is_none() {
        variables.push((EXPLAIN_VARIABLE, "once".into()));
    }
    if events.is_some() {
        variables.push((CALL_SITES_VARIABLE, "1".into()));
    }
    let embedded = if wants_reasons { EmbeddedLogs::create()? } else { None };
    variables.extend(embedded.iter().map(EmbeddedLogs::variable));
    if arguments.preload {
        variables.push(library::preloaded_verbs(&folder));
    }
    let mut device_use = DeviceUse::watch();
    variables.push(device_use.variable());
    let root = arguments.daemon.view_root(&connection).filter(|_| !arguments.no_view);
    let mut run_once = |live: &mut Option<DaemonScenario<'_>>| {
        let views = root.as_ref().map(|root| View::choices(root, arguments.view, &folder));
        program::run(&path, &arguments.program, &variables, views.unwrap_or_default(), &mut |process| {
            let programs =
                Pid::from_raw(process).map(|process| (program_host, process)).into_iter().collect();
            let running = live.as_mut().zip(events.as_mut());
            let due =
                running.and_then(|(live, events)| live.run_due_actions(&mut connection, &programs, events));
            let after = [due, device_use.look(process)].into_iter().flatten().min();
            let Some(events) = &mut events else { return NextPoll { after, readable: None } };
            match live_scenario::read_events(events, live.as_mut()) {
                true => NextPoll { after: Some(Duration::ZERO), readable: None },
                false => NextPoll { after, readable: events.readable() },
            }
        })
    };
    let code = loop {
        let code = run_once(&mut live)?;
        if !live.as_mut().is_some_and(|live| live.take_restart(program_host)) {
            break code;
        }
    };
    // Faults that wait for the program's last packets are due now.
    if let (Some(live), Some(events)) = (live.as_mut().filter(|live| !live.is_daemon_gone()), &mut events) {
        live.run_due_actions(&mut connection, &Vec::new(), events);
    }
    if let Some(warning) = device_use.warning(&first, arguments.preload) {
        warnln!("{warning}");
    }
    let daemon_runs = !live.as_ref().is_some_and(DaemonScenario::is_daemon_gone);
    let stopped = match &mut events {
        Some(events) if daemon_runs => events.stop(&mut connection),
        None if arguments.capture.is_some() => connection.stop_recording(),
        _ => Ok(()),
    };
    stopped.map_err(|error| format!("the recording is incomplete: {error}"))?;
    if let (Some(path), Some(filter)) = (&arguments.capture, &arguments.filter) {
        let filtered = crate::trace::filter_file(path, filter);
        filtered.map_err(|error| {
            format!("cannot filter {} (--filter): {error}; it has all packets", path.display())
        })?;
    }
    let mut has_lint_errors = false;
    if let Some(logs) = &embedded {
        let explanations = logs.explanations(arguments.lints(), &mut has_lint_errors);
        for text in
            explanations.map_err(|error| format!("cannot read the logs of embedded devices: {error}"))?
        {
            eprintln!("\n{text}");
        }
    }
    if let Some(events) = &mut events {
        while live_scenario::read_events(events, live.as_mut()) {}
        if let Some(gap) = events.gap() {
            warnln!("{gap}");
        }
        if let Some(analysis) = events.analysis() {
            if let Some(text) = explanation(analysis, arguments.log.as_deref()) {
                errln!("\n{text}");
            }
            if arguments.lints() {
                errln!("{}", analysis.lint_summary());
                has_lint_errors |= analysis.has_lint_errors();
            }
        }
    }
    let mut failed = arguments.strict && has_lint_errors;
    if let (Some(mut live), Some(scenario)) = (live, &scenario) {
        live.scenario.on_program_exit(code);
        let outcome = live.finish(&mut connection)?;
        let heading = format!("{}  ({})", scenario.title, scenario.name());
        errln!("\n{}", scenario::format_verdict(&heading, &outcome).trim_end_matches('\n'));
        let error = outcome.error.clone();
        failed |= outcome.verdict != Verdict::Pass;
        let words = arguments.program.iter().map(|word| shell::quote(&word.to_string_lossy()));
        let replay = format!(
            "softhca exec --scenario {} -- {}",
            shell::quote(scenario.name()),
            words.collect::<Vec<_>>().join(" ")
        );
        let (json, junit) =
            crate::run::program_report::exec_reports(scenario.clone(), outcome, started.elapsed(), &replay);
        if let Some(path) = &arguments.junit {
            std::fs::write(path, junit).map_err(|error| output::write_error("--junit", path, &error))?;
        }
        if arguments.json {
            outln!("{json}");
        }
        if let Some(error) = error {
            return Err(format!("the scenario could not be run: {error}").into());
        }
    }
    let expected = plan.as_ref().is_some_and(Plan::expects_exit_code);
    Ok(match failed {
        true => exit_code::EXPECTATION_FAILED,
        // A failure that is expected is success.
        false if expected => 0,
        false => code,
    })
}

/// Explains the problems of a run whose log may be in a file.
fn explanation(analysis: &mut RunAnalysis, log: Option<&Path>) -> Option<String> {
    match log {
        Some(log) => {
            let command = format!("`softhca why {}`", log.display());
            analysis.explanation(&format!("run {command}"), &format!("Run {command} to see this again."))
        }
        None => analysis.explanation("keep the log with `--log FILE` to explain them", ""),
    }
}

/// Opens the output files with the user's rights and passes them to the daemon.
fn start_recording(
    connection: &mut DaemonControl,
    arguments: &Arguments,
) -> Result<Option<DaemonEvents>, String> {
    let Arguments { scenario, capture, log, why, .. } = arguments;
    for (option, path) in [("--capture", capture), ("--log", log)] {
        path.as_deref().map_or(Ok(()), |path| output::reserve(option, path))?;
    }
    let packets = capture.as_ref().map(|path| output::create("--capture", path)).transpose()?;
    let packets = packets.as_ref().map(AsFd::as_fd);
    if scenario.is_none() && log.is_none() && !why && !arguments.lints() {
        if packets.is_some() {
            connection.start_recording(packets, None).map_err(|error| error.to_string())?;
        }
        return Ok(None);
    }
    let log = log.as_ref().map(|path| output::create("--log", path)).transpose()?;
    let log = log.as_ref().map(AsFd::as_fd);
    DaemonEvents::start(connection, packets, log, Some(arguments.lints())).map(Some)
}

/// The plan of a scenario whose programs a shell starts. Nothing watches them, so its faults need no action of a command.
fn plan_of_other_programs(scenario: &Scenario) -> Result<Plan, String> {
    let name = scenario.name();
    let plan =
        scenario.plan(&ParameterValues::new(), scenario.seed).map_err(|problem| problem.to_string())?;
    if !plan.commands.is_empty() {
        return Err(format!("{name}: the scenario starts programs itself: use `softhca run --on udp`"));
    }
    if let Some(fault) = plan.faults.iter().find(|fault| fault.needs_command()) {
        return Err(format!(
            "{name}: fault {:?} begins at a time or after something, or concerns a host or a link: \
             `softhca env` applies faults of packets, calls and completions; use `softhca exec --scenario`",
            fault.name
        ));
    }
    if !plan.expectations.is_empty() {
        warnln!("{name}: the expectations are not checked; `softhca exec --scenario` checks them");
    }
    Ok(plan)
}

/// Runs `softhca env`.
pub fn env(arguments: &EnvArguments) -> CommandResult {
    print_environment(arguments).map_err(error(exit_code::EXEC_FAILED))?;
    Ok(ExitCode::SUCCESS)
}

fn print_environment(arguments: &EnvArguments) -> Result<(), String> {
    let is_infiniband = arguments.daemon.fabric.is_infiniband();
    let folder = if is_infiniband { library::subnet_library_folder() } else { library::library_folder() }?;
    let mut variables = arguments.daemon.environment(&folder);
    let scenario = arguments.scenario.as_deref().map(scenario::read).transpose()?;
    let plan = scenario.as_ref().map(plan_of_other_programs).transpose()?;
    let settings = arguments.daemon.required_settings(plan.as_ref())?;
    let RequiredSettings { ref hosts, cards, profile, recovery } = settings;
    let requirements =
        DaemonRequirements { hosts, cards, profile, recovery, ..arguments.daemon.requirements() };
    let mut connection = match arguments.no_start {
        true => DaemonControl::connect(arguments.daemon.name.as_deref()).ok(),
        false => Some(daemon::connect_or_start(&requirements, DaemonLifetime::UntilStopped)?),
    };
    if let Some(connection) = &mut connection {
        arguments.daemon.check_data_path(connection)?;
        if let Some(plan) = &plan {
            variables.extend(arguments.daemon.load_faults(plan, connection)?);
            connection.keep_rules().map_err(|error| error.to_string())?;
        }
    }
    let root = match &mut connection {
        Some(connection) if is_infiniband => Some(arguments.daemon.subnet_view(connection)?),
        Some(connection) => arguments.daemon.view_root(connection),
        None => None,
    };
    if let Some(root) = root {
        variables.extend(sysfs::preload_variables(&root, &folder));
        library::join_preloads(&mut variables);
    }
    for (name, value) in variables {
        outln!("export {name}={}", shell::quote(&value.to_string_lossy()));
    }
    Ok(())
}
