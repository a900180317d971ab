//! A daemon for one test, and programs on its hosts.

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The timeout of a program, sufficient for the longest, a whole test suite, on a busy machine.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(600);

/// The result of a program.
#[derive(Debug)]
pub struct ProgramOutput {
    pub success: bool,
    pub code: Option<i32>,
    /// Standard output, then standard error.
    pub text: String,
}

/// A runtime folder for the daemon of `softhca exec`.
pub struct Rig {
    folder: PathBuf,
    /// Options of every `softhca exec`.
    options: Vec<&'static str>,
}

impl Rig {
    pub fn new() -> Rig {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("softhca-programs-{}-{serial}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("the temporary folder can be written");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(&folder, mode).expect("it is ours");
        Rig { folder, options: Vec::new() }
    }

    /// A rig whose every `softhca exec` has these options.
    pub fn with(options: &[&'static str]) -> Rig {
        let mut rig = Rig::new();
        rig.options.extend(options);
        rig
    }

    /// A rig with internal loopback.
    pub fn with_internal_loopback() -> Rig {
        Rig::with(&["--loopback", "internal"])
    }

    /// A rig with go-back-n recovery.
    pub fn with_go_back_n() -> Rig {
        Rig::with(&["--recovery", "go-back-n"])
    }

    /// A rig whose hosts have two cards: softhca0 and softhca1 on alice, softhca2 and softhca3 on bob.
    pub fn with_two_cards() -> Rig {
        Rig::with(&["--cards", "2"])
    }

    /// A rig whose programs see their device in `/sys` by a preloaded library.
    pub fn with_preloaded_view() -> Rig {
        Rig::with(&["--view", "preload"])
    }

    /// Runs a program where the kernel refuses mount and user namespaces: in a user namespace that permits none. The
    /// daemon is started outside.
    pub fn run_without_namespaces(&mut self, options: &[&str], words: &[&str]) -> ProgramOutput {
        assert!(self.softhca(&["env"]).success, "the daemon does not start");
        let inner = self.command(options, words);
        let script = "echo 0 > /proc/sys/user/max_mnt_namespaces; echo 0 > /proc/sys/user/max_user_namespaces; \
            if unshare --mount true 2> /dev/null; then echo namespaces are permitted; exit 1; fi; exec \"$0\" \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "sh", "-c", script]);
        command.arg(inner.get_program()).args(inner.get_args());
        command.env("XDG_RUNTIME_DIR", &self.folder).env_remove("SOFTHCA_DAEMON").env_remove("SOFTHCA_HOST");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        Running::new(command).wait()
    }

    /// The path of a file of the test.
    pub fn file(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    fn command(&self, options: &[&str], words: &[&str]) -> Command {
        let mut command = Command::new(softhca());
        command.arg("exec").args(&self.options).args(options).arg("--").args(words);
        command.env("XDG_RUNTIME_DIR", &self.folder).env_remove("SOFTHCA_DAEMON").env_remove("SOFTHCA_HOST");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // The program and its children are in one process group, which is killed as a whole.
        command.process_group(0);
        command
    }

    /// Starts a program.
    pub fn start(&mut self, words: &[&str]) -> Running {
        self.start_with(&[], words)
    }

    /// Starts a program with options of `softhca exec`.
    pub fn start_with(&mut self, options: &[&str], words: &[&str]) -> Running {
        Running::new(self.command(options, words))
    }

    /// Starts a program with SOFTHCA_ADDRESS.
    pub fn start_at(&mut self, address: &str, options: &[&str], words: &[&str]) -> Running {
        let mut command = self.command(options, words);
        command.env("SOFTHCA_ADDRESS", address);
        Running::new(command)
    }

    /// Runs a program until it exits.
    pub fn exec(&mut self, options: &[&str], words: &[&str]) -> ProgramOutput {
        Running::new(self.command(options, words)).wait()
    }

    /// Runs a shell script that finds the daemon of this rig.
    pub fn shell(&mut self, script: &str) -> ProgramOutput {
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("XDG_RUNTIME_DIR", &self.folder);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        Running::new(command).wait()
    }

    pub fn run(&mut self, words: &[&str]) -> ProgramOutput {
        self.exec(&[], words)
    }

    pub fn run_on(&mut self, host: &str, words: &[&str]) -> ProgramOutput {
        self.exec(&["--host", host], words)
    }

    /// Starts a server and a client that exchange addresses over a TCP port.
    pub fn start_pair(&mut self, words: &[&str]) -> (Running, Running) {
        self.start_pair_with([&[], &[]], words)
    }

    /// The same with options of `softhca exec` for server and client.
    pub fn start_pair_with(&mut self, options: [&[&str]; 2], words: &[&str]) -> (Running, Running) {
        let port = free_port().to_string();
        let shared = [words, &["-p", &port]].concat();
        let server = Running::new(self.command(options[0], &shared));
        await_listener(port.parse().expect("a port"));
        let client = Running::new(self.command(options[1], &[&shared[..], &["localhost"]].concat()));
        (server, client)
    }

    /// Runs another subcommand of softhca.
    pub fn softhca(&self, words: &[&str]) -> ProgramOutput {
        let mut command = Command::new(softhca());
        command.args(words).env("XDG_RUNTIME_DIR", &self.folder).env_remove("SOFTHCA_DAEMON");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        Running::new(command).wait()
    }

    /// Waits until a server listens on a port of the emulated host.
    pub fn await_cm_listener(&self, server: &mut Running) -> Result<(), String> {
        let until = Instant::now() + PROGRAM_TIMEOUT;
        while !self.softhca(&["status"]).text.contains("listening at ") {
            if server.has_ended() || Instant::now() > until {
                return Err(format!("no listener; the server: {:?}", server.try_wait()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Waits until the devices of the daemon have sent this many packets.
    pub fn await_packets(&self, count: u64) {
        let until = Instant::now() + PROGRAM_TIMEOUT;
        let sent = || {
            let text = self.softhca(&["stats"]).text;
            let of_host = |line: &str| line.split_once(" sent_pkts ")?.1.trim().parse::<u64>().ok();
            text.lines().filter_map(of_host).sum::<u64>()
        };
        while sent() < count {
            assert!(Instant::now() < until, "{count} packets were not sent: {:?}", self.softhca(&["stats"]));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts another subcommand of softhca with its output in files.
    pub fn spawn_softhca(&self, words: &[&str], output: &str, errors: &str) -> Child {
        let [output, errors] =
            [output, errors].map(|path| std::fs::File::create(path).expect("a folder of ours"));
        let mut command = Command::new(softhca());
        command.args(words).env("XDG_RUNTIME_DIR", &self.folder).env_remove("SOFTHCA_DAEMON");
        command.stdin(Stdio::null()).stdout(output).stderr(errors).spawn().expect("the command runs")
    }

    /// Writes a file of the test.
    pub fn write(&self, name: &str, text: &str) -> String {
        let path = self.file(name);
        std::fs::write(&path, text).expect("the temporary folder can be written");
        path
    }

    /// Kills the daemon.
    pub fn kill_daemon(&mut self) {
        let output = Command::new(softhca())
            .args(["status"])
            .env("XDG_RUNTIME_DIR", &self.folder)
            .output()
            .expect("the command runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let process = text.split_whitespace().nth(1).expect("`daemon PID version …`").to_string();
        let killed = Command::new("kill").args(["-9", &process]).status().expect("kill runs");
        assert!(killed.success(), "{text}");
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // The daemon may have exited already.
        let _ = Command::new(softhca())
            .arg("stop")
            .env("XDG_RUNTIME_DIR", &self.folder)
            .stderr(Stdio::null())
            .stdout(Stdio::null())
            .status();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The path of the softhca executable, relative to that of the test.
pub fn softhca() -> PathBuf {
    let own = std::env::current_exe().expect("a test runs from a file");
    let command = own.ancestors().nth(2).expect("target, profile, deps").join("softhca");
    assert!(command.is_file(), "{} is not there: cargo build", command.display());
    command
}

/// A port that no other test of this process has, and no connection: those have ports from 32768 on.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let offset = std::process::id().wrapping_mul(101).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 12_000 + (offset % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Waits for a listener on a TCP port without connecting to it.
pub fn await_listener(port: u16) {
    let wanted = format!(":{port:04X} ");
    let until = Instant::now() + PROGRAM_TIMEOUT;
    while Instant::now() < until {
        let listens = ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|file| {
            let text = std::fs::read_to_string(Path::new(file)).unwrap_or_default();
            text.lines().any(|line| {
                let mut words = line.split_whitespace().skip(1);
                let local = words.next().unwrap_or_default();
                let state = words.nth(1).unwrap_or_default();
                format!("{local} ").ends_with(&wanted) && state == "0A"
            })
        });
        if listens {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("no listener on port {port}");
}

/// A running program.
pub struct Running {
    child: Child,
    words: String,
    readers: Vec<std::thread::JoinHandle<String>>,
}

impl Running {
    fn new(mut command: Command) -> Running {
        let words = format!("{command:?}");
        let mut child = command.spawn().expect("the command runs");
        let streams: [Box<dyn Read + Send>; 2] = [
            Box::new(child.stdout.take().expect("it is piped")),
            Box::new(child.stderr.take().expect("it is piped")),
        ];
        let readers = streams.map(|mut stream| {
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                let _ = stream.read_to_end(&mut bytes);
                String::from_utf8_lossy(&bytes).into_owned()
            })
        });
        Running { child, words, readers: readers.into() }
    }

    /// Whether it has exited.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_some())
    }

    /// Waits until it exits.
    pub fn wait(&mut self) -> ProgramOutput {
        self.try_wait().unwrap_or_else(|why| panic!("{why}"))
    }

    /// The same, or an error with its output if it times out.
    fn try_wait(&mut self) -> Result<ProgramOutput, String> {
        let until = Instant::now() + PROGRAM_TIMEOUT;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("it is a child of ours") {
                break status;
            }
            if Instant::now() > until {
                self.kill_group();
                let text = self.text();
                return Err(format!("{} does not end: {text}", self.words));
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        Ok(ProgramOutput { success: status.success(), code: status.code(), text: self.text() })
    }

    fn text(&mut self) -> String {
        let texts = self.readers.drain(..).map(|reader| reader.join().unwrap_or_default());
        texts.collect::<Vec<_>>().join("\n")
    }

    /// Terminates the program itself: `softhca exec` forwards the signal.
    pub fn terminate(&self) {
        let process = self.child.id().to_string();
        let _ = Command::new("kill").args(["-TERM", &process]).status();
    }

    /// Terminates the program and waits for it.
    pub fn kill(mut self) {
        self.terminate();
        let _ = self.wait();
    }
}

impl Running {
    /// Kills `softhca exec`, and not the program.
    pub fn kill_only_exec(&mut self) {
        let exec = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(exec, rustix::process::Signal::KILL).expect("it runs");
        let _ = self.child.wait();
    }

    /// Kills the program and all its children.
    fn kill_group(&mut self) {
        let group = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.has_ended() {
            self.kill_group();
        }
        let _ = self.child.wait();
    }
}

/// Runs both ends of a program and requires both to succeed.
pub fn run_pair(rig: &mut Rig, words: &str) {
    let words: Vec<&str> = words.split(' ').collect();
    let port = free_port().to_string();
    let and = |more: &[&'static str]| [&words[..], more].concat();
    let and_port = |more: &[&'static str]| [&words[..], &["-p", &port], more].concat();
    let (server, client) = match words[0] {
        "rping" => (and(&["-s"]), and(&["-c", "-a", "127.0.0.1"])),
        "ucmatose" | "udaddy" => (words.clone(), and(&["-s", "127.0.0.1"])),
        "rstream" | "riostream" => (and_port(&[]), and_port(&["-s", "127.0.0.1"])),
        "rdma_server" => (words.clone(), vec!["rdma_client", "-s", "127.0.0.1"]),
        "rdma_xserver" => (words.clone(), vec!["rdma_xclient", "-s", "127.0.0.1"]),
        // These use connection management only.
        _ if words.contains(&"-R") => (and_port(&[]), and_port(&["127.0.0.1"])),
        _ => return run_by_name(rig, &words),
    };
    for _ in 0..CONNECT_ATTEMPTS {
        match run_by_address(rig, &server, &client) {
            Ok(ConnectResult::Connected) => return,
            Ok(ConnectResult::NotListening) => {
                eprintln!("{client:?} connected before {server:?} listened: once more")
            }
            Err(why) => panic!("{why}"),
        }
    }
    panic!("{client:?} connected before {server:?} listened, {CONNECT_ATTEMPTS} times in a row");
}

/// What perftest says if it could not measure the frequency of the processor, as happens beside other load.
const NO_CLOCK: &str = "Correlation coefficient";

/// Runs both ends of a program whose ends find each other by host, and requires both to succeed.
fn run_by_name(rig: &mut Rig, words: &[&str]) {
    for attempt in 1.. {
        let (mut server, mut client) = rig.start_pair(words);
        let seen = [client.wait(), server.wait()];
        if seen.iter().all(|seen| seen.success) {
            return;
        }
        let has_no_clock = seen.iter().any(|seen| seen.text.contains(NO_CLOCK));
        assert!(has_no_clock && attempt < CONNECT_ATTEMPTS, "{words:?}: {seen:?}");
        eprintln!("{words:?} could not measure the frequency of the processor: once more");
    }
}

/// The maximum number of attempts for perftest with `-R`.
const CONNECT_ATTEMPTS: usize = 8;

/// The result of connecting a client and a server.
enum ConnectResult {
    /// Both succeeded.
    Connected,
    /// The client requested its second connection before the server listened.
    NotListening,
}

/// The errors of perftest's client if nothing listens: REJ reason 8 is "invalid service ID", SIDR_REP status 1 is "service ID
/// not supported".
const NO_LISTENER_ERRORS: [&str; 2] =
    ["Event: RDMA_CM_EVENT_REJECTED; error: 8.", "Event: RDMA_CM_EVENT_UNREACHABLE; error: 1."];

/// Runs a server and a client that connect through a port of the emulated host.
///
/// perftest with `-R` makes two connections to one port and closes the first listener before it opens the second. After a
/// handshake over the first connection, the server binds and listens while the client resolves and connects: a race on any
/// device. A client that is faster is rejected, retries with the id that it has destroyed, and gives up; its server waits
/// forever.
fn run_by_address(rig: &mut Rig, server: &[&str], client_words: &[&str]) -> Result<ConnectResult, String> {
    let mut server = rig.start(server);
    rig.await_cm_listener(&mut server).map_err(|why| format!("{client_words:?}: {why}"))?;
    let mut client = rig.start(client_words);
    let seen = client.try_wait()?;
    let is_early = NO_LISTENER_ERRORS.iter().any(|words| seen.text.contains(words));
    if client_words.contains(&"-R") && !seen.success && is_early {
        return Ok(ConnectResult::NotListening);
    }
    let seen = [seen, server.try_wait()?];
    if seen.iter().all(|seen| seen.success) { Ok(ConnectResult::Connected) } else { Err(format!("{seen:?}")) }
}
