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

/// A command that fails: what it prints, and its exit code. A message is `PLACE: WHAT; WHAT TO DO`, without the name of
/// the command.
#[derive(Debug)]
pub struct CommandError {
    pub code: u8,
    pub messages: Vec<String>,
}

impl CommandError {
    /// Prints the messages.
    pub fn report(&self) -> ExitCode {
        for message in &self.messages {
            warnln!("{message}");
        }
        ExitCode::from(self.code)
    }
}

/// The errors of a command with this exit code.
pub fn error<E: Display>(code: u8) -> impl Fn(E) -> CommandError {
    move |why| CommandError { code, messages: vec![why.to_string()] }
}

impl From<softhca::Error> for CommandError {
    fn from(error: softhca::Error) -> CommandError {
        failure(error)
    }
}

/// Input that cannot be used.
pub fn bad_input(why: impl Display) -> CommandError {
    error(BAD_INPUT)(why)
}

/// [`bad_input`] whose messages begin with a place, such as the path of a file.
pub fn bad_input_in<E: Display>(place: impl Display) -> impl Fn(E) -> CommandError {
    move |why| bad_input(format!("{place}: {why}"))
}

/// A command that fails otherwise.
pub fn failure(why: impl Display) -> CommandError {
    error(1)(why)
}

/// [`failure`] whose messages begin with a place.
pub fn failure_in<E: Display>(place: impl Display) -> impl Fn(E) -> CommandError {
    move |why| failure(format!("{place}: {why}"))
}
