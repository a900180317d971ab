//! Other processes of a test: the test's binary runs itself again in a role.
//!
//! The binary has a test named `role` that does what SOFTHCA_TEST_ROLE says, and nothing without it.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// Long enough for the slowest machine; no test waits for it to pass.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Another process. It ends with the test.
pub struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// The command that starts this binary again in a role, behind the words of `wrapper`, which runs its arguments.
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

/// The role that this process has, if it was started in one.
pub fn role() -> Option<String> {
    std::env::var("SOFTHCA_TEST_ROLE").ok()
}

/// Says something to whoever started this process. The mark tells it from what the test harness prints.
pub fn send_line(text: &str) {
    println!("\n@{text}");
    std::io::stdout().flush().unwrap();
}

/// Hears what the process that started this one says.
pub fn receive_line() -> Option<String> {
    let mut line = String::new();
    (std::io::stdin().read_line(&mut line).unwrap() > 0).then(|| line.trim_end().into())
}

/// Ends this process with whoever started it.
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

    /// The next thing that it says.
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

    /// Waits until it ends by itself, as it should.
    pub fn finish(mut self) {
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success(), "{rest}");
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
