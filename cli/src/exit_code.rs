//! Exit codes of the command besides 0 (success) and 1 (an expectation failed).

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
