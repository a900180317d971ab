//! Starts and stops the processes of a test.

use softhca::{DaemonControl, Device};
use softhca_daemon::{ClientLimits, Config, Daemon, DataPath, HostConfig};
use softhca_tests::process::exit_with_parent;
pub use softhca_tests::process::{Process, TEST_TIMEOUT, receive_line, send_line, use_one_processor};
use std::cell::Cell;
use std::os::unix::process::CommandExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Runs this binary in a role.
pub fn spawn(role: &str, daemon: &str, variables: &[(&str, &str)]) -> Process {
    spawn_as(role, daemon, variables, None)
}

/// The same as another user.
pub fn spawn_as(role: &str, daemon: &str, variables: &[(&str, &str)], user: Option<u32>) -> Process {
    let mut command = softhca_tests::process::command(&[], role);
    command.env("SOFTHCA_DAEMON", daemon).envs(variables.iter().copied());
    if let Some(user) = user {
        command.uid(user).gid(user);
    }
    if let Some((_, path)) = variables.iter().find(|(name, _)| *name == "TEST_STDERR") {
        command.stderr(std::fs::File::create(path).unwrap());
    }
    Process::start(&mut command)
}

/// A daemon process with the hosts alice and bob.
pub struct TestDaemon {
    pub name: String,
    pub process: Process,
}

impl TestDaemon {
    pub fn start() -> TestDaemon {
        TestDaemon::with(&[])
    }

    pub fn with(variables: &[(&str, &str)]) -> TestDaemon {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        TestDaemon::named(format!("test-{}-{count}", std::process::id()), variables)
    }

    pub fn named(name: String, variables: &[(&str, &str)]) -> TestDaemon {
        let path = OWN_DATA_PATH.get().then_some(("TEST_DATA_PATH", "daemon"));
        let variables: Vec<_> = variables.iter().copied().chain(path).collect();
        let mut process = spawn("daemon", &name, &variables);
        assert_eq!(process.receive_line(), "ready");
        TestDaemon { name, process }
    }

    pub fn open(&self, host: &str) -> Device {
        Device::daemon_host(Some(&self.name), Some(host)).unwrap()
    }

    pub fn control(&self) -> DaemonControl {
        DaemonControl::connect(Some(&self.name)).unwrap()
    }

    /// Waits until `held` returns true for the daemon's status.
    pub fn wait_until(&self, what: &str, held: impl Fn(&softhca::DaemonStatus) -> bool) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        let mut control = self.control();
        while !held(&control.status().unwrap()) {
            assert!(Instant::now() < deadline, "{what} did not happen: {:?}", control.status());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

thread_local! {
    /// The daemons that this thread starts execute the transport.
    static OWN_DATA_PATH: Cell<bool> = const { Cell::new(false) };
}

/// Runs a test whose daemons execute the transport for their clients.
pub fn on_own_data_path(test: fn()) {
    let result = std::thread::spawn(move || {
        OWN_DATA_PATH.set(true);
        test();
    });
    if let Err(panic) = result.join() {
        std::panic::resume_unwind(panic);
    }
}

/// The daemon's process.
pub fn run_daemon() {
    fn number<N: std::str::FromStr>(name: &str) -> Option<N> {
        std::env::var(name).ok().and_then(|value| value.parse().ok())
    }
    let mut limits = match std::env::var("TEST_LIMITS") {
        Ok(text) => Config::parse(&format!("[client_limits]\n{text}")).unwrap().client_limits,
        Err(_) => ClientLimits::default(),
    };
    limits.max_qp = number("TEST_QUEUE_PAIRS").unwrap_or(limits.max_qp);
    limits.max_mr = number("TEST_KEYS").unwrap_or(limits.max_mr);
    let text = std::env::var("TEST_CONFIG").unwrap_or_default();
    let mut base = Config::parse(&text).unwrap();
    if let (false, Ok(path)) = (text.contains("data_path"), std::env::var("TEST_DATA_PATH")) {
        base.data_path = DataPath::from_name(&path).expect("a data path");
    }
    let hosts = match base.hosts.iter().any(|host| host.address.is_some()) {
        true => base.hosts.clone(),
        false => ["alice", "bob"].map(|name| HostConfig { name: name.into(), address: None }).into(),
    };
    let config = Config {
        name: std::env::var("SOFTHCA_DAEMON").unwrap(),
        hosts,
        client_limits: limits,
        max_clients: number("TEST_CLIENTS").unwrap_or(32),
        kill_after: number("TEST_KILL_AFTER").map(Duration::from_secs),
        max_mappings: number("TEST_MAPPINGS").unwrap_or(48_000),
        busy_poll: Duration::from_micros(number("TEST_LINGER").unwrap_or(50)),
        ..base
    };
    let mut daemon = Daemon::start(config).unwrap();
    send_line("ready");
    exit_with_parent();
    daemon.run(None).unwrap();
}
