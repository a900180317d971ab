//! How commands end: exit codes besides 0 (success) and 1 (an expectation failed), and errors.

use std::fmt::Display;
use std::process::ExitCode;

/// Input that cannot be used.
pub const BAD_INPUT: u8 = 2;
/// An expectation of the scenario of `softhca exec` does not hold.
pub const EXPECTATION_FAILED: u8 = 123;
/// `softhca exec` itself failed, as for env(1).
pub const EXEC_FAILED: u8 = 125;
/// An interruption ended the command, as the shell reports SIGINT.
pub const INTERRUPTED: u8 = 130;
/// The program exists and cannot be run.
pub const CANNOT_RUN: u8 = 126;
/// The program does not exist.
pub const NOT_FOUND: u8 = 127;

/// How a command ends.
pub type CommandResult = Result<ExitCode, CommandError>;

/// A command that fails: what it prints, and its exit code.
#[derive(Debug)]
pub struct CommandError {
    pub code: u8,
    pub message: String,
}

impl CommandError {
    /// Prints the message, if there is one.
    pub fn report(&self) -> ExitCode {
        if !self.message.is_empty() {
            errln!("{}", self.message);
        }
        ExitCode::from(self.code)
    }
}

/// The errors of a command with this exit code, whose messages begin with `prefix`.
pub fn error<E: Display>(code: u8, prefix: impl Display) -> impl Fn(E) -> CommandError {
    move |why| CommandError { code, message: format!("{prefix}: {why}") }
}

impl From<softhca::Error> for CommandError {
    fn from(error: softhca::Error) -> CommandError {
        failure("softhca")(error)
    }
}

/// [`error`] for input that cannot be used.
pub fn bad_input<E: Display>(prefix: impl Display) -> impl Fn(E) -> CommandError {
    error(BAD_INPUT, prefix)
}

/// [`error`] for a command that fails otherwise.
pub fn failure<E: Display>(prefix: impl Display) -> impl Fn(E) -> CommandError {
    error(1, prefix)
}
