//! Starting and ending the processes of a test.

use softhca::{DaemonControl, Device};
use softhca_daemon::{Config, Daemon, HostConfig, Share};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Long enough for the slowest machine; no test waits for it to pass.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Another process of this binary. It ends with the test.
pub struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// Starts this binary again in a role.
pub fn spawn(role: &str, daemon: &str, variables: &[(&str, &str)]) -> Process {
    spawn_as(role, daemon, variables, None)
}

/// The same as another user.
pub fn spawn_as(role: &str, daemon: &str, variables: &[(&str, &str)], user: Option<u32>) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "role", "--nocapture", "--test-threads=1"]);
    command.env("SOFTHCA_TEST_ROLE", role).env("SOFTHCA_DAEMON", daemon);
    command.envs(variables.iter().copied());
    if let Some(user) = user {
        command.uid(user).gid(user);
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    Process { child, input, output }
}

/// Says something to whoever started this process. The mark tells it from what the test harness prints.
pub fn say(text: &str) {
    println!("\n@{text}");
    std::io::stdout().flush().unwrap();
}

/// Hears what the process that started this one says.
pub fn hear() -> Option<String> {
    let mut line = String::new();
    (std::io::stdin().read_line(&mut line).unwrap() > 0).then(|| line.trim_end().into())
}

impl Process {
    /// The next thing that it says.
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(text) = line.strip_prefix('@') {
                return text.trim_end().into();
            }
            line.clear();
        }
        panic!("the process ended: {:?}", self.child.wait());
    }

    pub fn say(&mut self, text: &str) {
        writeln!(self.input, "{text}").unwrap();
    }

    pub fn number(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, and wait until it is gone.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A daemon in a process of its own, with the hosts alice and bob.
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
        let mut process = spawn("daemon", &name, variables);
        assert_eq!(process.hear(), "ready");
        TestDaemon { name, process }
    }

    pub fn open(&self, host: &str) -> Device {
        Device::daemon_host(Some(&self.name), Some(host)).unwrap()
    }

    pub fn control(&self) -> DaemonControl {
        DaemonControl::connect(Some(&self.name)).unwrap()
    }

    /// Waits until `held` says so of the daemon's status.
    pub fn wait_until(&self, what: &str, held: impl Fn(&softhca::DaemonStatus) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut control = self.control();
        while !held(&control.status().unwrap()) {
            assert!(Instant::now() < deadline, "{what} never came: {:?}", control.status());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The daemon's process.
pub fn be_daemon() {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse().ok());
    let mut share = Share::default();
    share.queue_pairs = number("TEST_QUEUE_PAIRS").unwrap_or(share.queue_pairs);
    share.keys = number("TEST_KEYS").unwrap_or(share.keys);
    let config = Config {
        name: std::env::var("SOFTHCA_DAEMON").unwrap(),
        hosts: ["alice", "bob"].map(|name| HostConfig { name: name.into(), address: None }).into(),
        share,
        clients: number("TEST_CLIENTS").unwrap_or(32),
        linger: Duration::from_micros(number("TEST_LINGER").unwrap_or(50) as u64),
        ..Config::default()
    };
    let mut daemon = Daemon::start(config).unwrap();
    say("ready");
    // It also ends with whoever started it.
    std::thread::spawn(|| {
        while hear().is_some() {}
        std::process::exit(0);
    });
    daemon.run(None).unwrap();
}
