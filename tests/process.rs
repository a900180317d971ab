//! Child processes of a test: the test binary runs itself again in a role.
//!
//! The test named `role` runs the role in SOFTHCA_TEST_ROLE, and does nothing if the variable is not set.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Long enough for the slowest machine. Tests do not wait for it to expire.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A child process that is killed when the test ends.
pub struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// The command that runs this binary in a role, through `wrapper`, which executes its arguments.
pub fn command(wrapper: &[&str], role: &str) -> Command {
    let binary = std::env::current_exe().unwrap();
    let mut command = match wrapper {
        [] => Command::new(binary),
        [program, words @ ..] => {
            let mut command = Command::new(program);
            command.args(words).arg(binary);
            command
        }
    };
    command.args(["--exact", "role", "--nocapture", "--test-threads=1"]);
    command.env("SOFTHCA_TEST_ROLE", role);
    command
}

/// The role of this process, if it has one.
pub fn role() -> Option<String> {
    std::env::var("SOFTHCA_TEST_ROLE").ok()
}

/// From now on this process and its children run on one processor.
pub fn use_one_processor() {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let mut one = rustix::thread::CpuSet::new();
    one.set((0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap());
    rustix::thread::sched_setaffinity(None, &one).unwrap();
}

/// Sends a line to the parent. The mark `@` distinguishes it from the output of the test harness.
pub fn send_line(text: &str) {
    println!("\n@{text}");
    std::io::stdout().flush().unwrap();
}

/// Receives a line from the parent; `None` if it has exited.
pub fn receive_line() -> Option<String> {
    let mut line = String::new();
    (std::io::stdin().read_line(&mut line).unwrap() > 0).then(|| line.trim_end().into())
}

/// Exits when the parent does.
pub fn exit_with_parent() {
    std::thread::spawn(|| {
        while receive_line().is_some() {}
        std::process::exit(0);
    });
}

impl Process {
    /// Starts a command.
    pub fn start(command: &mut Command) -> Process {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Process { child, input, output }
    }

    /// Receives the next line from the child.
    pub fn receive_line(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(text) = line.strip_prefix('@') {
                return text.trim_end().into();
            }
            line.clear();
        }
        panic!("the process ended: {:?}", self.child.wait());
    }

    pub fn send_line(&mut self, text: &str) {
        writeln!(self.input, "{text}").unwrap();
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the child exits successfully.
    pub fn finish(mut self) {
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success(), "{rest}");
    }

    /// Waits until the child has ended.
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "process {} does not end", self.id());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends SIGKILL and waits for the exit.
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
