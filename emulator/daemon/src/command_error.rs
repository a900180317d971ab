//! Why a call was refused, as it travels.

use softhca_queue::control::Response;
use std::io;

/// Why a call was refused.
#[derive(Debug)]
pub(crate) struct CommandError {
    pub errno: i32,
    pub message: String,
}

impl CommandError {
    pub fn new(errno: i32, message: impl Into<String>) -> CommandError {
        CommandError { errno, message: message.into() }
    }

    pub fn into_response(self) -> Response {
        Response::Error { errno: self.errno, message: self.message }
    }
}

impl From<softhca_engine::VerbsError> for CommandError {
    fn from(error: softhca_engine::VerbsError) -> CommandError {
        CommandError::new(error.errno(), error.to_string())
    }
}

impl From<io::Error> for CommandError {
    fn from(error: io::Error) -> CommandError {
        let errno = error.raw_os_error().unwrap_or(libc::EINVAL);
        CommandError::new(errno, format!("the daemon: {error}"))
    }
}
