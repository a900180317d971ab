//! Child processes of a test: the test binary runs itself again in a role.
//!
//! The test named `role` runs the role in SOFTHCA_TEST_ROLE, and does nothing if the variable is not set.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Long enough for the slowest machine. Tests do not wait for it to expire.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The longest silence of a process that works: its tests have timeouts of their own for what they wait for.
const MAX_SILENCE: Duration = Duration::from_secs(600);

/// A child process that is killed when the test ends.
pub struct Process {
    child: Child,
    input: ChildStdin,
    output: Receiver<String>,
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
        let input = child.stdin.take().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let (sender, output) = channel();
        std::thread::spawn(move || lines.into_iter().try_for_each(|line| sender.send(line)));
        Process { child, input, output }
    }

    /// The next line of output; `None` at its end.
    fn next_line(&self) -> Option<String> {
        match self.output.recv_timeout(MAX_SILENCE) {
            Err(RecvTimeoutError::Timeout) => panic!("process {} is silent for {MAX_SILENCE:?}", self.id()),
            line => line.ok(),
        }
    }

    /// Receives the next line from the child.
    pub fn receive_line(&mut self) -> String {
        while let Some(line) = self.next_line() {
            if let Some(text) = line.strip_prefix('@') {
                return text.trim_end().into();
            }
        }
        panic!("the process ended: {:?}", self.wait());
    }

    pub fn send_line(&mut self, text: &str) {
        writeln!(self.input, "{text}").unwrap();
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the child exits successfully.
    pub fn finish(mut self) {
        let rest: Vec<String> = std::iter::from_fn(|| self.next_line()).collect();
        assert!(self.wait().success(), "{}", rest.join("\n"));
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
